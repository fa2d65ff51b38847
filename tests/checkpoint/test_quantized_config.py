"""What is taken of ``quantization_config``, and what changes numbers and is therefore refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from torch_pi2.checkpoint.foreign import Format, format_of
from torch_pi2.errors import UnsupportedModelError

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "lm_head": True,
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"group_size": 64, "desc_act": False}},
    "meta": {"quantizer": ["gptqmodel:4.0"], "damp_percent": 0.01},
    "true_sequential": True,
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "GEMM",
    "modules_to_not_convert": ["lm_head"],
}
BITNET = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
    "modules_to_not_convert": None,
    "use_rms_norm": False,
    "rms_norm_eps": 1e-6,
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "group_size": 128,
                "strategy": "group",
                "dynamic": False,
                "actorder": "weight",
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {"averaging_constant": 0.1},
            },
            "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
            "output_activations": None,
            "format": "pack-quantized",
        }
    },
    "ignore": ["lm_head"],
    "global_compression_ratio": 1.5,
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12",
}
WEIGHTS = ("config_groups", "group_0", "weights")


def changed(config: dict[str, Any], way: tuple[str, ...], value: Any) -> dict[str, Any]:
    made = at = copy.deepcopy(config)
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = value
    return made


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (GPTQ, Format("gptq", 4, 128, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, Format("gptq", 4, 128, 0, True)),
        (GPTQ | {"bits": 8, "group_size": -1}, Format("gptq", 8, 0, 1)),
        (AWQ, Format("awq", 4, 64)),
        (BITNET, Format("bitnet", 2, 0)),
        (BITNET | {"linear_class": "bitlinear"}, Format("bitnet", 2, 0, inverse=True)),
        (COMPRESSED, Format("compressed-tensors", 4, 128)),
        (changed(COMPRESSED, (*WEIGHTS, "actorder"), "group"), Format("compressed-tensors", 4, 128, 0, True)),
        (changed(COMPRESSED, (*WEIGHTS, "strategy"), "channel"), Format("compressed-tensors", 4, 128)),
        (changed(COMPRESSED, ("sparsity_config",), {"format": "dense"}), Format("compressed-tensors", 4, 128)),
    ],
)
def test_known(config: dict[str, Any], settings: Format) -> None:
    assert format_of(Path("x"), {"quantization_config": config}) == settings


@pytest.mark.parametrize(
    ("config", "way", "value", "message"),
    [
        (GPTQ, ("checkpoint_format",), "marlin", "expected checkpoint_format gptq or gptq_v2, found 'marlin'"),
        (GPTQ, ("rotation",), "hadamard", "expected rotation none, found 'hadamard'"),
        (GPTQ, ("dynamic",), {"+:.*up.*": {"bits": 8}}, "expected bits none, found 8"),
        (GPTQ, ("dynamic",), True, "expected dynamic with fields, found True"),
        (GPTQ, ("bits",), [4], r"expected bits 2 or 4 or 8, found \[4\]"),
        (AWQ, ("zero_point",), False, "expected zero_point true, as version gemm has it, found false"),
        (BITNET, ("quantization_mode",), "online", "expected quantization_mode offline, found 'online'"),
        (BITNET, ("use_rms_norm",), True, "expected use_rms_norm none, found True"),
        (AWQ, ("version",), "gemv", "expected version gemm or GEMM, found 'gemv'"),
        (COMPRESSED, ("transform_config",), {"config_groups": {"R1": {"type": "hadamard"}}}, "config_groups none, fou"),
        (COMPRESSED, ("sparsity_config",), {"format": "sparse-24-bitmask"}, "format dense, found 'sparse-24-bitmask'"),
        (COMPRESSED, ("some_day",), True, "expected some_day none, found True"),
        (COMPRESSED, ("format",), "marlin-24", "format pack-quantized or int-quantized, found 'marlin-24'"),
        (COMPRESSED, ("config_groups",), {"W4A16": ["Linear"]}, "expected W4A16 with fields, found "),
        (COMPRESSED, (*WEIGHTS, "type"), "float", "expected type int, found 'float'"),
        (COMPRESSED, (*WEIGHTS, "num_bits"), 3, "expected num_bits 4 or 8, found 3"),
        (COMPRESSED, (*WEIGHTS[:2], "output_activations"), {"num_bits": 8}, "expected output_activations none"),
        (COMPRESSED, ("config_groups", "group_1"), {"weights": {"num_bits": 8}}, "as many bits everywhere, found 4"),
        (COMPRESSED, ("config_groups",), {}, "as many bits everywhere, found none"),
        ({}, ("quant_method",), ["gptq"], "quant_method gptq, awq, compressed-tensors, torchao or bitnet, found"),
    ],
)  # fmt: skip
def test_refused_by_name(config: dict[str, Any], way: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        format_of(Path("x"), {"quantization_config": changed(config, way, value)})


@pytest.mark.parametrize("said", [3, "gptq", [1], None])
def test_no_settings_at_all(said: Any) -> None:
    with pytest.raises(
        UnsupportedModelError, match="quant_method gptq, awq, compressed-tensors, torchao or bitnet, found "
    ):
        format_of(Path("x"), {"quantization_config": said})
