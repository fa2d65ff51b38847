"""Tiny random models of every supported architecture: hidden 32, two layers, seeded, in eval mode.

``tiny("llama")`` builds one; ``EXPECTED`` says which FFN each must be found to have. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, INTERMEDIATE, LAYERS = 64, 32, 48, 2
DRELU_SOURCE = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m" / "modeling_drelu_llama.py"

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Expected(NamedTuple):
    activation: str
    gated: bool
    on_up: bool
    owner: str  # of layer 0
    way: str  # of rewriting: "owner" or "chain"


@cache
def drelu_module() -> ModuleType:
    """The modelling file of the committed dReLU model."""
    spec = importlib.util.spec_from_file_location("modeling_drelu_llama", DRELU_SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _hf(name: str, **config: Any) -> nn.Module:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    return model_class(config_class(**(_LLAMA | config)))


def _opt(**config: Any) -> nn.Module:
    return _hf("OPT", ffn_dim=INTERMEDIATE, word_embed_proj_dim=HIDDEN, **config)


def _gpt2(activation: str) -> nn.Module:
    sizes = {"n_embd": HIDDEN, "n_inner": INTERMEDIATE, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    return _hf("GPT2", **sizes, activation_function=activation, scale_attn_by_inverse_layer_idx=True)


def _drelu() -> nn.Module:
    module = drelu_module()
    return module.DReLULlamaForCausalLM(module.DReLULlamaConfig(**_LLAMA, hidden_act="relu", tie_word_embeddings=True))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _hf("Llama"),
    "llama-relu": lambda: _hf("Llama", hidden_act="relu"),
    "llama-bias": lambda: _hf("Llama", mlp_bias=True, hidden_act="relu"),
    "drelu": _drelu,
    "mistral": lambda: _hf("Mistral"),
    "qwen2": lambda: _hf("Qwen2"),
    "qwen3": lambda: _hf("Qwen3", head_dim=8),
    "gemma": lambda: _hf("Gemma", head_dim=8),
    "gemma2": lambda: _hf("Gemma2", head_dim=8),
    "phi3": lambda: _hf("Phi3"),
    "opt": lambda: _opt(),
    "opt-postnorm": lambda: _opt(do_layer_norm_before=False),
    "falcon": lambda: _hf("Falcon", ffn_hidden_size=INTERMEDIATE),
    "falcon-bias": lambda: _hf("Falcon", ffn_hidden_size=INTERMEDIATE, bias=True, alibi=True),
    "nemotron": lambda: _hf("Nemotron"),
    "gpt2": lambda: _gpt2("gelu_new"),
    "gpt2-relu": lambda: _gpt2("relu"),
    "llama-quick-gelu": lambda: _hf("Llama", hidden_act="quick_gelu"),
}

_MLP = "model.layers.0.mlp"
EXPECTED: dict[str, Expected] = {
    "llama": Expected("silu", True, False, _MLP, "owner"),
    "llama-relu": Expected("relu", True, False, _MLP, "owner"),
    "llama-bias": Expected("relu", True, False, _MLP, "owner"),
    "drelu": Expected("relu", True, True, _MLP, "owner"),
    "mistral": Expected("silu", True, False, _MLP, "owner"),
    "qwen2": Expected("silu", True, False, _MLP, "owner"),
    "qwen3": Expected("silu", True, False, _MLP, "owner"),
    "gemma": Expected("gelu_tanh", True, False, _MLP, "owner"),
    "gemma2": Expected("gelu_tanh", True, False, _MLP, "owner"),
    "phi3": Expected("silu", True, False, _MLP, "owner"),
    "opt": Expected("relu", False, False, "model.decoder.layers.0", "chain"),
    "opt-postnorm": Expected("relu", False, False, "model.decoder.layers.0", "chain"),
    "falcon": Expected("gelu", False, False, "transformer.h.0.mlp", "owner"),
    "falcon-bias": Expected("gelu", False, False, "transformer.h.0.mlp", "owner"),
    "nemotron": Expected("relu2", False, False, _MLP, "owner"),
    "gpt2": Expected("gelu_tanh", False, False, "transformer.h.0.mlp", "owner"),
    "gpt2-relu": Expected("relu", False, False, "transformer.h.0.mlp", "owner"),
    "llama-quick-gelu": Expected("silu[in=1.702,out=0.587544066]", True, False, _MLP, "owner"),
}


def tiny(name: str, *, seed: int = 0, std: float = 0.3) -> nn.Module:
    """A random model of architecture ``name`` (a key of ``BUILDERS``), float32.

    Weights have standard deviation ``std`` rather than 0.02, so that activations are far from linear and a
    wrong FFN shows in the logits; biases are random as well.
    """
    torch.manual_seed(seed)
    model = BUILDERS[name]().eval()
    return randomise(model, std)


def randomise(model: nn.Module, std: float = 0.3) -> nn.Module:
    """Fill matrices and biases (norm scales excepted) with normal values from torch's generator."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or parameter_name.endswith("bias"):
                parameter.normal_(0.0, std)
    return model


def overflowing(token: int) -> nn.Module:
    """In float16, whose numbers overflow in the first FFN where ``token`` is read, and nowhere else."""
    model: Any = tiny("llama-relu")
    layer, words = model.model.layers[0], model.get_input_embeddings().weight
    with torch.no_grad():
        layer.self_attn.o_proj.weight[0] = layer.mlp.gate_proj.weight[0] = layer.mlp.up_proj.weight[0] = 0
        words[:, 0] = words[token] = 0
        words[token, 0], layer.mlp.down_proj.weight[:, 0] = 100, 100
        layer.mlp.gate_proj.weight[0, 0] = layer.mlp.up_proj.weight[0, 0] = 10
    half: nn.Module = model.half()
    return half


class FunctionalBlock(nn.Module):
    """A pre-norm block that calls ``F.relu`` itself, with names that say nothing."""

    def __init__(self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        self.n = nn.LayerNorm(hidden)
        self.banana = nn.Linear(hidden, intermediate)
        self.cherry = nn.Linear(intermediate, hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return x_BTH + self.cherry(F.relu(self.banana(self.n(x_BTH))))


class GatedBlock(nn.Module):
    """Gated with biases everywhere, inside a residual block: no module computes the FFN alone."""

    def __init__(self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        self.n = nn.LayerNorm(hidden)
        self.a = nn.Linear(hidden, intermediate)
        self.b = nn.Linear(hidden, intermediate)
        self.c = nn.Linear(intermediate, hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        y = self.n(x_BTH)
        g = self.a(y)
        return x_BTH + self.c(self.b(y) * torch.sigmoid(g) * g)


def plain(*blocks: nn.Module) -> nn.Module:
    """Blocks one after another, randomised, in eval mode."""
    torch.manual_seed(0)
    return randomise(nn.Sequential(*blocks).eval())


def wider(bias: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A random Llama whose linear layers are not too small to be replaced, by quantised or input-sparse ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": bias}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2, "mlp_bias": bias}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads, dtype=dtype))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    for parameter in model.parameters():  # no buffers
        parameter.data = parameter.data.to(dtype)
    return model.eval()
