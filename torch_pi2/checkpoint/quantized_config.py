"""``quantization_config`` of GPTQ, AWQ, compressed-tensors and torchao: how matrices are read, what is refused by name.

Whatever changes the numbers that a checkpoint stands for, and is not computed here, is refused. What it says of inputs
(``input_activations``) is not: inputs are floats here, and are rounded by ``load(activations="int8")``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_pi2.base.fields import shown
from torch_pi2.errors import UnsupportedModelError

#: Fields of compressed-tensors, which has no others; those with a check of their own here are checked.
_COMPRESSED = (
    *("quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio"),
    *("kv_cache_scheme", "sparsity_config", "transform_config", "version"),
)
_GROUP = ("weights", "targets", "input_activations", "output_activations", "format")
_WEIGHTS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder", "block_structure"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
#: Of torchao: those whose tensors, which say their classes themselves, may be read.
_OF_TORCHAO = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig"),
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", "Int4WeightOnlyConfig"),
    *("FqnToConfig", "ModuleFqnToConfig"),
)
#: What ``dynamic`` of GPTQ may say of some modules: how they were made, not how they are read.
_OF_MODULES = ("group_size", "sym", "desc_act", "damp_percent", "damp_auto_increment", "mse", "static_groups")


class Settings(NamedTuple):
    """How matrices are stored.

    Attributes:
        method: ``gptq``, ``awq``, ``compressed-tensors`` or ``torchao``. bits: of an integer. group: columns with one
            scale; 0: a row is one, or nothing is said. less: what zero points are stored less by. reordered: columns
            may be in another order, which their tensors have to say.
    """

    method: str
    bits: int
    group: int
    less: int = 0
    reordered: bool = False
    shifted: bool = False


def settings_of(folder: Path, config: Mapping[str, Any]) -> Settings:
    """Of the checkpoint with this config.json. Raises UnsupportedModelError: another method, or a setting of it."""
    said = config.get("quantization_config") or {}
    method = said.get("quant_method") if isinstance(said, dict) else said
    of = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "torchao": _torchao}.get(str(method))
    if of is None or method is said:
        found = shown(method) if method else "none"
        raise refuse(folder, "quant_method gptq, awq, compressed-tensors or torchao", found)
    return of(folder, said)


def refuse(folder: Path, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config of {folder}",
        expected=expected,
        found=found,
        fix="Take the model's original float checkpoint, and torch_pi2.quantize it.",
    )


def _only(folder: Path, said: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Raises UnsupportedModelError: ``name`` is neither empty nor one of ``allowed``."""
    found = said.get(name)
    if found not in (None, False, "", [], {}, *allowed):
        raise refuse(folder, f"{name} {' or '.join(map(str, allowed)) or 'none'}", shown(found))


def _known(folder: Path, said: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    """``said``, whose fields are ``names``, or empty. Raises UnsupportedModelError."""
    if not isinstance(said, dict):
        raise refuse(folder, f"{where} with fields", shown(said))
    for name in said:
        if name not in names:
            _only(folder, said, name)
    return said


def _group_of(said: Mapping[str, Any], *names: str) -> int:
    found = next((said[name] for name in names if name in said), 0)
    return found if isinstance(found, int) and found > 0 else 0


def _gptq(folder: Path, said: Mapping[str, Any]) -> Settings:
    bits = said.get("bits", 4)
    if bits not in (2, 4, 8):
        raise refuse(folder, "gptq of 2, 4 or 8 bits", shown(bits))
    for name in ("checkpoint_format", "format"):
        _only(folder, said, name, "gptq", "gptq_v2")
    _only(folder, said, "pack_dtype", "int32")
    for name in ("rotation", "adapter", "is_marlin_format"):
        _only(folder, said, name)
    dynamic = said.get("dynamic") or {}
    for pattern, change in dynamic.items() if isinstance(dynamic, dict) else [("", [dynamic])]:
        if odd := [name for name in change or () if name not in _OF_MODULES]:
            raise refuse(folder, "modules of one kind", f"dynamic {shown(pattern)} with {shown(odd[0])}")
    # The first version of the format stores zero points less one.
    second = "gptq_v2" in (said.get("checkpoint_format"), said.get("format"))
    return Settings("gptq", bits, _group_of(said, "group_size"), 0 if second else 1, bool(said.get("desc_act")))


def _awq(folder: Path, said: Mapping[str, Any]) -> Settings:
    bits, version = said.get("bits", said.get("w_bit", 4)), said.get("version") or said.get("format") or "gemm"
    if bits != 4 or str(version).lower() != "gemm":
        raise refuse(folder, "awq of 4 bits, version gemm", f"{shown(bits)} bits, {shown(version)}")
    if not said.get("zero_point", True):
        raise refuse(folder, "zero_point true, as version gemm has it", "false")
    for name in ("rotation", "adapter"):
        _only(folder, said, name)
    return Settings("awq", 4, _group_of(said, "group_size", "q_group_size"))


def _torchao(folder: Path, said: Mapping[str, Any]) -> Settings:
    kinds = said.get("quant_type") or {}
    kind = kinds.get("default") if isinstance(kinds, dict) and len(kinds) == 1 else kinds
    name = kind.get("_type", kind) if isinstance(kind, dict) else kind
    if name not in _OF_TORCHAO:
        raise refuse(folder, f"torchao's {', '.join(_OF_TORCHAO[:-1])} or {_OF_TORCHAO[-1]} for all", shown(name))
    return Settings("torchao", 8, 0)


def _compressed(folder: Path, said: Mapping[str, Any]) -> Settings:
    _known(folder, said, "quantization_config", _COMPRESSED)
    kind, groups = said.get("format"), said.get("config_groups") or {}
    groups = [_known(folder, g, "a group", _GROUP) for g in (groups.values() if isinstance(groups, dict) else [groups])]
    weights = [_known(folder, group["weights"], "weights", _WEIGHTS) for group in groups if group.get("weights")]
    bits = weights[0].get("num_bits", 8) if weights else None
    if kind not in ("pack-quantized", "int-quantized") or bits not in (4, 8):
        raise refuse(folder, "pack-quantized or int-quantized of 4 or 8 bits", f"{shown(kind)} of {shown(bits)}")
    for one in weights:
        if one.get("num_bits", 8) != bits:
            raise refuse(folder, "matrices of as many bits everywhere", f"{bits} and {shown(one.get('num_bits', 8))}")
        _only(folder, one, "type", "int")
        _only(folder, one, "strategy", "group", "channel", "tensor")
        for name in ("dynamic", "block_structure"):
            _only(folder, one, name)
    for group in groups:
        _only(folder, group, "format", kind)
        _only(folder, group, "output_activations")
    _only(folder, said, "kv_cache_scheme")
    sparsity = said.get("sparsity_config") or {}
    _only(folder, sparsity if isinstance(sparsity, dict) else {"format": sparsity}, "format", "dense")
    transforms = said.get("transform_config") or {}
    _only(folder, transforms if isinstance(transforms, dict) else {"config_groups": transforms}, "config_groups")
    sizes = {_group_of(one, "group_size") for one in weights}
    reordered = any(one.get("actorder") in ("group", "dynamic", True) for one in weights)
    shifted = all(one.get("symmetric") is False for one in weights)
    group = sizes.pop() if len(sizes) == 1 else 0
    return Settings("compressed-tensors", bits, group, reordered=reordered, shifted=shifted)
