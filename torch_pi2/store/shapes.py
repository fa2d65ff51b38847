"""Sizes of well-known decoders, for synthetic models: Hugging Face configuration values by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_pi2.base.extras import missing_package
from torch_pi2.errors import ConfigError

#: ``llama-1b`` has the sizes of TinyLlama-like benchmarks (2048, 8192, 16 layers), not those of one published model;
#: ``llama-13b`` has those of Llama-2-13B, ``llama-70b`` those of Llama-3-70B; ``smallthinker-4b`` and ``gpt-oss-20b``
#: those of SmallThinker-4B-A0.6B and gpt-oss-20b, in the form of Qwen3-MoE.
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": None,
        "max_position_embeddings": 32768,
    },
    "llama-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "llama-13b": {
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "smallthinker-4b": {
        "model_type": "qwen3_moe",
        "hidden_size": 1536,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 32000,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2880,
        "moe_intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
SHAPES["mixtral-8x7b-quarter"] = SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 8}
#: Configuration and causal model classes of transformers, by ``model_type``.
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
}
_COMMON = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}


def build_config(shape: str | Mapping[str, Any], **more: Any) -> Any:
    """A transformers configuration of ``shape`` (a name in ``SHAPES`` or configuration values), ``more`` on top.

    Raises:
        ConfigError: unknown name or model type, or sizes that do not fit together.
        LibraryMissingError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_package("transformers", "hf", error) from error
    if isinstance(shape, str) and shape not in SHAPES:
        raise ConfigError(
            "shape",
            expected=f"{', '.join(SHAPES)}, or a dict of configuration values",
            found=repr(shape),
            fix="Choose one of these.",
        )
    values = {"model_type": "llama"} | dict(SHAPES[shape] if isinstance(shape, str) else shape)
    kind = values.pop("model_type")
    if kind not in CLASSES:
        raise ConfigError(
            "shape's model_type", expected=", ".join(CLASSES), found=repr(kind), fix="Synthetic models are of these."
        )
    config_class = getattr(transformers, f"{CLASSES[kind]}Config")
    try:
        return config_class(**(_COMMON | values | more), architectures=[f"{CLASSES[kind]}ForCausalLM"])
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            "shape",
            expected=f"values of a {CLASSES[kind]}Config",
            found=str(error).splitlines()[0],
            fix="Correct the sizes.",
        ) from error
