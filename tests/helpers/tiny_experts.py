"""Tiny mixtures of experts: Hugging Face's, and settings for synthetic ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "hidden_act": "relu"},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 40, "head_dim": 16},
    # the first layer dense, a shared expert beside the others in the second
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
}


SYNTHETIC = {k: v for k, v in SIZES.items() if "token_id" not in k} | {"intermediate_size": 96, "vocab_size": 80}


SHAPE = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16},
    "olmoe": {"num_experts": 4},
}


IDS = torch.arange(1, 25).reshape(2, 12)


def build(name: str, **more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS.get(name, {}) | more))
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)  # transformers' own start is too small to tell right from wrong
    return model


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
