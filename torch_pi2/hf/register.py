"""Registering with transformers, which has no other way for who is not in its own lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)

from torch_pi2.errors import ConfigError
from torch_pi2.hf.quantizer import Pi2Quantizer
from torch_pi2.hf.saving import saving
from torch_pi2.hf.settings import Pi2QuantizationConfig
from torch_pi2.store.folder import HF_METHOD


def register() -> None:
    """Once in a process: the method and its settings, and two functions that only know methods of their own.

    They are ``merge_quantization_configs``, which heeds what is passed beside a folder's own settings for classes in a
    list alone, and ``save_pretrained``, which can write nothing but a state dict.
    """
    if HF_METHOD in AUTO_QUANTIZER_MAPPING:
        return
    register_quantization_config(HF_METHOD)(Pi2QuantizationConfig)
    register_quantizer(HF_METHOD)(Pi2Quantizer)
    merge: Any = staticmethod(_merging(AutoHfQuantizer.merge_quantization_configs))
    AutoHfQuantizer.merge_quantization_configs = merge
    PreTrainedModel.save_pretrained = saving(PreTrainedModel.save_pretrained)


def _merging(usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        own, passed = quantization_config, quantization_config_from_args
        if isinstance(own, Mapping) and own.get("quant_method") == HF_METHOD:
            own = Pi2QuantizationConfig(**own)
        if not isinstance(own, Pi2QuantizationConfig) or passed is None:
            return usual(own, passed)
        if isinstance(passed, Mapping):
            passed = Pi2QuantizationConfig(**passed)
        if not isinstance(passed, Pi2QuantizationConfig):
            raise ConfigError(
                "from_pretrained(quantization_config=...)",
                expected="a Pi2QuantizationConfig: the folder has its weights in torch_pi2's form",
                found=f"a {type(passed).__name__}",
                fix="Leave it out, or quantise the float checkpoint.",
            )
        return passed.over(own)

    return merge
