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
TORCHAO: dict[str, Any] = {
    "quant_method": "torchao",
    "include_input_output_embeddings": False,
    "modules_to_not_convert": ["lm_head"],
    "quant_type": {
        "default": {
            "_type": "Int8WeightOnlyConfig",
            "_version": 2,
            "_data": {"granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}, "group_size": None},
        }
    },
}
OF_TORCHAO = "torchao's Int8WeightOnlyConfig, Int8Dynamic.* or .* for all, found "
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
        (GPTQ, ("format",), "bitblas", "expected format gptq or gptq_v2, found 'bitblas'"),
        (GPTQ, ("pack_dtype",), "int8", "expected pack_dtype int32, found 'int8'"),
        (GPTQ, ("rotation",), "hadamard", "expected rotation none, found 'hadamard'"),
        (GPTQ, ("adapter",), {"rank": 32}, "expected adapter none, found {'rank': 32}"),
        (GPTQ, ("dynamic",), {"+:.*up.*": {"bits": 8}}, r"expected modules of one kind, found dynamic .* with 'bits'"),
        (GPTQ, ("dynamic",), True, "expected modules of one kind, found dynamic"),
        (GPTQ, ("bits",), [4], r"expected gptq of 2, 4 or 8 bits, found \[4\]"),
        (AWQ, ("zero_point",), False, "expected zero_point true, as version gemm has it, found false"),
        (AWQ, ("rotation",), "hadamard", "expected rotation none"),
        (COMPRESSED, ("transform_config",), {"config_groups": {"R1": {"type": "hadamard"}}}, "config_groups none, fou"),
        (COMPRESSED, ("transform_config",), ["R1"], "config_groups none, found"),
        (COMPRESSED, ("kv_cache_scheme",), {"num_bits": 8}, "expected kv_cache_scheme none, found {'num_bits': 8}"),
        (COMPRESSED, ("sparsity_config",), {"format": "sparse-24-bitmask"}, "format dense, found 'sparse-24-bitmask'"),
        (COMPRESSED, ("moe_sparsity_config",), {"a": 1}, "expected moe_sparsity_config none"),
        (COMPRESSED, ("some_day",), True, "expected some_day none, found True"),
        (COMPRESSED, ("format",), "marlin-24", "pack-quantized or int-quantized of 4 or 8 bits, found 'marlin-24'"),
        (COMPRESSED, ("config_groups",), {"W4A16": ["Linear"]}, "expected a group with fields, found "),
        (COMPRESSED, (*WEIGHTS, "type"), "float", "expected type int, found 'float'"),
        (COMPRESSED, (*WEIGHTS, "strategy"), "block", "expected strategy group or channel or tensor, found 'block'"),
        (COMPRESSED, (*WEIGHTS, "dynamic"), True, "expected dynamic none, found True"),
        (COMPRESSED, (*WEIGHTS, "block_structure"), [128, 128], "expected block_structure none"),
        (COMPRESSED, (*WEIGHTS, "num_bits"), 3, "of 4 or 8 bits, found 'pack-quantized' of 3"),
        (COMPRESSED, (*WEIGHTS[:2], "output_activations"), {"num_bits": 8}, "expected output_activations none"),
        (COMPRESSED, (*WEIGHTS[:2], "format"), "nvfp4-pack-quantized", "expected format pack-quantized, found 'nvfp4"),
        (COMPRESSED, ("config_groups", "group_1"), {"weights": {"num_bits": 8}}, "as many bits everywhere, found 4"),
        (GPTQ, ("bits",), 3, "expected gptq of 2, 4 or 8 bits, found 3"),
        (AWQ, ("version",), "gemv", "awq of 4 bits, version gemm, found 4 bits, 'gemv'"),
        ({}, ("quant_method",), "hqq", "quant_method gptq, awq, compressed-tensors or torchao, found 'hqq'"),
        ({}, ("quant_method",), ["gptq"], "quant_method gptq, awq, compressed-tensors or torchao, found"),
        (TORCHAO, ("quant_type",), {"default": {"_type": "Float8WeightOnlyConfig"}}, OF_TORCHAO + "'Float8"),
        (TORCHAO, ("quant_type",), {"default": {}, "model.embed_tokens": None}, OF_TORCHAO + "{'default'"),
        (TORCHAO, ("quant_type",), "int8_weight_only", OF_TORCHAO + "'int8_weight_only'"),
    ],
)  # fmt: skip
def test_refused_by_name(config: dict[str, Any], way: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        format_of(Path("x"), {"quantization_config": changed(config, way, value)})


@pytest.mark.parametrize("said", [3, "gptq", [1], None])
def test_no_settings_at_all(said: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="quant_method gptq, awq, compressed-tensors or torchao, found "):
        format_of(Path("x"), {"quantization_config": said})
