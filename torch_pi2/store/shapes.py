"""Sizes of well-known decoders, for synthetic models: Hugging Face configuration values by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_pi2.base.extras import missing_package
from torch_pi2.errors import ConfigError


def _sizes(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _experts(count: int, used: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": used, "norm_topk_prob": True, **more}


#: ``llama-1b`` has the sizes of TinyLlama-like benchmarks (2048, 8192, 16 layers), not those of one published model;
#: ``llama-13b`` has those of Llama-2-13B, ``llama-70b`` those of Llama-3-70B; ``smallthinker-4b`` and ``gpt-oss-20b``
#: those of SmallThinker-4B-A0.6B and gpt-oss-20b, in the form of Qwen3-MoE.
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": _sizes("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=None, max_position_embeddings=32768),
    "llama-1b": _sizes("llama", 2048, 8192, 16, 32, 8, 32000),
    "llama-13b": _sizes("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256),
    "qwen2-7b": _sizes("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "mixtral-8x7b": _sizes(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "smallthinker-4b": _sizes("qwen3_moe", 1536, 768, 32, 12, 2, 32000, **_experts(32, 4, head_dim=128)),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 2048, 768, 48, 32, 4, 151936, **_experts(128, 8, head_dim=128)),
    "gpt-oss-20b": _sizes("qwen3_moe", 2880, 2880, 24, 64, 8, 201088, **_experts(32, 4, head_dim=64)),
    "tiny": _sizes("llama", 256, 1024, 4, 8, 2, 1024),
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
