"""Checkpoints and models that GPTQ, AWQ, compressed-tensors or torchao have quantised, as rows of our formats.

Each format stores integers q and, for every group of columns, a scale s and a zero point z; a weight is s (q - z). If
q - z fits into a format of ours, the integers are kept: ours have a float16 scale per 32 columns, which divide the
groups. Nothing is rounded if float16 has s exactly. 4 bits of torchao whose zero points are floats, s q + z, are q4_1.

A setting of ``quantization_config`` that changes the numbers and is not computed here is refused by name. What it says
of inputs (``input_activations``) is ignored: inputs are floats here, and ``load(activations="int8")`` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name, stands_for_another
from torch_pi2.base.fields import shown
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ArtifactError, ConfigError, NonFiniteError, UnsupportedModelError
from torch_pi2.formats import FORMATS, GROUP
from torch_pi2.ops.quantize import pack_integers
from torch_pi2.store.folder import read_config
from torch_pi2.store.source import Checkpoint, Source

_DAMAGED = "Get the checkpoint again."

# --- which formats are read, by their configuration


class Format(NamedTuple):
    """How the matrices of a checkpoint are stored.

    Attributes:
        method: ``gptq``, ``awq``, ``compressed-tensors`` or ``torchao``. bits: of an integer. group: columns with one
            scale; 0: a row has one, or nothing is said. less: what zero points are stored less by. reordered: columns
            may be in another order, which their tensors have to give. shifted: there must be zero points.
    """

    method: str
    bits: int
    group: int
    less: int = 0
    reordered: bool = False
    shifted: bool = False


#: Values that a field may have besides empty ones. Other fields of gptq, awq and torchao do not matter here.
_ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "gptq": {
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "rotation": (),
        "adapter": (),
        "is_marlin_format": (),
    },
    "awq": {"rotation": (), "adapter": ()},
    "compressed-tensors": {"kv_cache_scheme": ()},
    "a group": {"output_activations": ()},
    "weights": {"type": ("int",), "strategy": ("group", "channel", "tensor"), "dynamic": (), "block_structure": ()},
    "sparsity_config": {"format": ("dense",)},
    "transform_config": {"config_groups": ()},
}
#: Where every field is known: those that change nothing, or are checked elsewhere.
_KNOWN = {
    "compressed-tensors": (
        *("quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio"),
        *("sparsity_config", "transform_config", "version"),
    ),
    "a group": ("weights", "targets", "input_activations", "format"),
    "weights": (
        *("num_bits", "symmetric", "group_size", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    ),
}
#: What ``dynamic`` of GPTQ may say of some modules: how they were made, not how they are read.
_OF_MODULES = ("group_size", "sym", "desc_act", "damp_percent", "damp_auto_increment", "mse", "static_groups")
#: Configurations of torchao whose tensors, which name their classes themselves, may be read.
_OF_TORCHAO = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Int8StaticActivationInt8WeightConfig"),
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", "Int4WeightOnlyConfig"),
    *("FqnToConfig", "ModuleFqnToConfig"),
)


def format_of(folder: Path, config: Mapping[str, Any]) -> Format:
    """The format of the checkpoint with this config.json. Raises UnsupportedModelError: one that is not read."""
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    known = {"gptq": _gptq_format, "awq": _awq_format, "torchao": _torchao_format}
    known["compressed-tensors"] = _compressed_format
    if str(method) not in known or method is settings:
        found = shown(method) if method else "none"
        raise refuse(folder, "quant_method gptq, awq, compressed-tensors or torchao", found)
    _check(folder, settings, str(method))
    return known[str(method)](folder, settings)


def refuse(folder: Path, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config of {folder}",
        expected=expected,
        found=found,
        fix="Take the model's original float checkpoint, and torch_pi2.quantize it.",
    )


def _check(folder: Path, settings: Any, what: str, **more: tuple[str, ...]) -> dict[str, Any]:
    """``settings``, whose fields have the values of ``_ALLOWED`` and ``more``. Raises UnsupportedModelError."""
    if not isinstance(settings, dict):
        raise refuse(folder, f"{what} with fields", shown(settings))
    allowed, known = _ALLOWED.get(what, {}) | more, _KNOWN.get(what)
    for name, found in settings.items():
        values = allowed.get(name, () if known is not None and name not in known else None)
        if values is not None and found not in (None, False, "", [], {}, *values):
            raise refuse(folder, f"{name} {' or '.join(values) or 'none'}", shown(found))
    return settings


def _group_of(settings: Mapping[str, Any], *names: str) -> int:
    found = next((settings[name] for name in names if name in settings), 0)
    return found if isinstance(found, int) and found > 0 else 0


def _gptq_format(folder: Path, settings: Mapping[str, Any]) -> Format:
    bits = settings.get("bits", 4)
    if bits not in (2, 4, 8):
        raise refuse(folder, "gptq of 2, 4 or 8 bits", shown(bits))
    dynamic = settings.get("dynamic") or {}
    for pattern, change in dynamic.items() if isinstance(dynamic, dict) else [("", [dynamic])]:
        if odd := [name for name in change or () if name not in _OF_MODULES]:
            raise refuse(folder, "modules of one kind", f"dynamic {shown(pattern)} with {shown(odd[0])}")
    # The first version of the format stores zero points less one.
    second = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
    group, reordered = _group_of(settings, "group_size"), bool(settings.get("desc_act"))
    return Format("gptq", bits, group, 0 if second else 1, reordered)


def _awq_format(folder: Path, settings: Mapping[str, Any]) -> Format:
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = settings.get("version") or settings.get("format") or "gemm"
    if bits != 4 or str(version).lower() != "gemm":
        raise refuse(folder, "awq of 4 bits, version gemm", f"{shown(bits)} bits, {shown(version)}")
    if not settings.get("zero_point", True):
        raise refuse(folder, "zero_point true, as version gemm has it", "false")
    return Format("awq", 4, _group_of(settings, "group_size", "q_group_size"))


def _torchao_format(folder: Path, settings: Mapping[str, Any]) -> Format:
    kinds = settings.get("quant_type") or {}
    kind = kinds.get("default") if isinstance(kinds, dict) and len(kinds) == 1 else kinds
    name = kind.get("_type", kind) if isinstance(kind, dict) else kind
    if name not in _OF_TORCHAO:
        raise refuse(folder, f"torchao's {', '.join(_OF_TORCHAO[:-1])} or {_OF_TORCHAO[-1]} for all", shown(name))
    return Format("torchao", 8, 0)


def _compressed_format(folder: Path, settings: Mapping[str, Any]) -> Format:
    kind, groups = settings.get("format"), settings.get("config_groups") or {}
    groups = [_check(folder, g, "a group") for g in (groups.values() if isinstance(groups, dict) else [groups])]
    weights = [_check(folder, group["weights"], "weights") for group in groups if group.get("weights")]
    bits = weights[0].get("num_bits", 8) if weights else None
    if kind not in ("pack-quantized", "int-quantized") or bits not in (4, 8):
        raise refuse(folder, "pack-quantized or int-quantized of 4 or 8 bits", f"{shown(kind)} of {shown(bits)}")
    for group in groups:
        _check(folder, group, "a group", format=(str(kind),))
    for one in weights:
        if one.get("num_bits", 8) != bits:
            raise refuse(folder, "matrices of as many bits everywhere", f"{bits} and {shown(one.get('num_bits', 8))}")
    for name, field in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        found = settings.get(name) or {}
        _check(folder, found if isinstance(found, dict) else {field: found}, name)
    sizes = {_group_of(one, "group_size") for one in weights}
    return Format(
        "compressed-tensors",
        bits,
        sizes.pop() if len(sizes) == 1 else 0,
        reordered=any(one.get("actorder") in ("group", "dynamic", True) for one in weights),
        shifted=all(one.get("symmetric") is False for one in weights),
    )


# --- matrices

#: Order of the eight 4-bit numbers in an int32 of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: Tensors of a matrix, and those by which it is recognised.
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero"),
)
_MAIN = ("qweight", "weight_packed", "weight_scale", "_weight_qdata")
#: What rounds inputs, which are floats here, and frequencies, which are in the configuration.
_OF_INPUTS = (".input_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "rotary_emb.inv_freq")
#: Parts of names of matrices outside feed-forward layers.
_NO_FFN = ("attn", "attention", "lm_head", "embed")
#: Relative error of a number that float16 rounds and does not lose.
_HALF = 2.0**-11
#: Classes of torchao that can be read; a folder that names none has Int8Tensor.
_INT8, _INT4, _OPAQUE = "Int8Tensor", "Int4Tensor", "Int4OpaqueTensor"
_CLASSES = (_INT8, "IntxUnpackedToInt8Tensor", _INT4, _OPAQUE)
#: Largest whole zero point that is taken off the integers, which int16 holds.
_MOST_ZERO = 1 << 14
#: 4-bit integers that one float32 holds exactly, as digits.
_DIGITS = 5


@dataclass(frozen=True)
class _Integers:
    """A matrix: ``n_NK`` int16 with the zero points taken off, ``scale_NG`` in the checkpoint's dtype, per group.

    ``offset_NG``: float64, what is added to the product of both; None: nothing.
    """

    n_NK: torch.Tensor
    scale_NG: torch.Tensor
    offset_NG: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return self.n_NK.shape[1] // self.scale_NG.shape[1]

    def part(self, start: int, stop: int | None) -> _Integers:
        """Rows ``[start, stop)``."""
        offset_NG = self.offset_NG if self.offset_NG is None else self.offset_NG[start:stop]
        return _Integers(self.n_NK[start:stop], self.scale_NG[start:stop], offset_NG)

    def values(self) -> torch.Tensor:
        """float32 ``[N, K]``."""
        values = self.n_NK.float() * self.scale_NG.float().repeat_interleave(self.group, 1)
        return values if self.offset_NG is None else values + self.offset_NG.float().repeat_interleave(self.group, 1)

    @cached_property
    def _of_groups(self) -> tuple[torch.Tensor, ...]:
        """What a group has as float16 numbers, in float64: its scale; q4_1 also the number of the integer -8."""
        scale_NG = self.scale_NG.double()
        return (scale_NG,) if self.offset_NG is None else (scale_NG, self.offset_NG - 8 * scale_NG)

    @cached_property
    def own_format(self) -> str | None:
        """The smallest format of ours that has these integers."""
        halves = [((one.half().double() - one).abs() <= _HALF * one.abs()).all() for one in self._of_groups]
        if self.group % GROUP or self.n_NK.shape[1] % GROUP or not all(map(bool, halves)):
            return None
        formats = (("int4", 8), ("int8", 128)) if self.offset_NG is None else (("q4_1", 8),)
        least, most = (int(end) for end in self.n_NK.aminmax())
        return next((name for name, end in formats if -end <= least and most < end), None)

    @cached_property
    def exact(self) -> bool:
        """Whether float16 has the scales, so that rows in :attr:`own_format` are these numbers."""
        return all(torch.equal(one.half().double(), one) for one in self._of_groups)

    def rows(self, kind: str) -> torch.Tensor:
        halves = [one.half().repeat_interleave(self.group // GROUP, 1) for one in self._of_groups]
        n_NGk = self.n_NK.to(torch.int8).unflatten(1, (-1, GROUP))
        if kind != "q4_1":
            return pack_integers(n_NGk, halves[0][..., None], kind)
        low, high = (n_NGk + 8).view(torch.uint8).chunk(2, -1)
        return torch.cat((torch.stack(halves, -1).view(torch.uint8), low | high << 4), -1).flatten(1)


class Tensors(Source, Protocol):
    """What has the tensors of matrices, under their names."""

    def names(self) -> Collection[str]: ...

    def close(self) -> None: ...


def _wrong(files: Tensors, name: str, expected: str, found: str, fix: str = _DAMAGED) -> ArtifactError:
    return ArtifactError(f"{name} of {files.folder}", expected=expected, found=found, fix=fix)


def _matrix(files: Tensors, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of integers. Raises ArtifactError: it is of another dtype, such as floats that nobody has packed."""
    found = files.read(name)
    if found.dtype != dtype or found.dim() != 2:
        fix = "The checkpoint is not what its quantization_config says; get it again."
        is_ = f"{dtype_name(found.dtype)} {list(found.shape)}"
        raise _wrong(files, name, f"a matrix of {dtype_name(dtype)}", is_, fix)
    return found


def _unpacked(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 with ``32 / bits`` unsigned numbers each, low bits first, along ``axis`` -> int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    moved = packed.movedim(axis, -1)
    numbers = (moved[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, axis).to(torch.int16)


def _check_groups(
    files: Tensors, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor | None = None
) -> None:
    """Raises ArtifactError: shapes that do not belong together. NonFiniteError: a scale is no number."""
    rows, columns = n_NK.shape
    sound = scale_NG.dim() == 2 and len(scale_NG) == rows > 0 and scale_NG.shape[1] > 0
    if not sound or columns % scale_NG.shape[1] or columns < scale_NG.shape[1]:
        raise _wrong(files, base, f"scales of {rows} rows of {columns}", str(list(scale_NG.shape)))
    if z_NG is not None and z_NG.shape != scale_NG.shape:
        raise _wrong(files, base, f"zero points for scales of {list(scale_NG.shape)}", str(list(z_NG.shape)))
    if not bool(scale_NG.float().isfinite().all()):
        raise _not_finite(files, base)


def _not_finite(files: Tensors, base: str) -> NonFiniteError:
    return NonFiniteError(
        f"scales of {base} in {files.folder}",
        expected="numbers",
        found="NaN or an infinity",
        fix="The checkpoint is damaged; get it again.",
    )


def _integers(
    files: Tensors, base: str, q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor | None = None
) -> _Integers:
    """Integers with whole zero points, which are taken off. Raises as :func:`_check_groups`."""
    _check_groups(files, base, q_NK, scale_NG, z_NG)
    if z_NG is not None:
        q_NK = q_NK - z_NG.repeat_interleave(q_NK.shape[1] // z_NG.shape[1], 1)
    return _Integers(q_NK.contiguous(), scale_NG.contiguous())


def _shifted(
    files: Tensors, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor, offset_NG: torch.Tensor
) -> _Integers:
    """Integers with an offset that is no multiple of the scales. Raises as :func:`_check_groups`."""
    _check_groups(files, base, n_NK, scale_NG, offset_NG)
    if not bool(offset_NG.isfinite().all()):
        raise _not_finite(files, base)
    offset = offset_NG.double().contiguous() if bool(offset_NG.any()) else None
    return _Integers(n_NK.contiguous(), scale_NG.contiguous(), offset)


def _check_order(files: Tensors, base: str, name: str, made: _Integers, reordered: bool) -> _Integers:
    """Raises UnsupportedModelError: columns of a group are no neighbours, or nothing says of which group they are."""
    of_K = torch.arange(made.n_NK.shape[1]) // made.group
    given = files.read(name).long() if name in files else None
    if (given is None and not reordered) or (given is not None and torch.equal(given, of_K)):
        return made
    raise UnsupportedModelError(
        f"{base} of {files.folder}",
        expected="groups of neighbouring columns (desc_act false, actorder weight or none)",
        found="columns in another order" if given is not None else f"columns in an order that no {name} says",
        fix="Take a checkpoint without act-order, or the float one.",
    )


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _gptq(files: Tensors, base: str, how: Format) -> _Integers:
    q_NK = _unpacked(_matrix(files, f"{base}.qweight", torch.int32), how.bits, 0).T
    z_NG = _unpacked(_matrix(files, f"{base}.qzeros", torch.int32), how.bits, 1)[:, : len(q_NK)].T
    if how.less and bool((z_NG == (1 << how.bits) - 1).any()):
        raise refuse(files.folder, "zero points from 1 on, as gptq's first version has them", f"0 in {base}")
    made = _integers(files, base, q_NK, _transposed(files.read(f"{base}.scales")), z_NG + how.less)
    return _check_order(files, base, f"{base}.g_idx", made, how.reordered)


def _awq(files: Tensors, base: str, how: Format) -> _Integers:
    q_NK, z_NG = (
        _unpacked(_matrix(files, f"{base}.{part}", torch.int32), 4, 1)
        .unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)]
        .flatten(1)
        .T
        for part in ("qweight", "qzeros")
    )
    return _integers(files, base, q_NK, _transposed(files.read(f"{base}.scales")), z_NG)


def _compressed(files: Tensors, base: str, how: Format) -> _Integers:
    half = 1 << (how.bits - 1)
    if f"{base}.weight_packed" in files:
        shape = [int(n) for n in files.read(f"{base}.weight_shape").flatten()]
        rows, columns = shape if len(shape) == 2 else (0, 0)
        packed = _matrix(files, f"{base}.weight_packed", torch.int32)
        n_NK = _unpacked(packed, how.bits, 1)[:rows, :columns] - half
    else:
        n_NK = _matrix(files, f"{base}.weight", torch.int8).to(torch.int16)
    scale_NG, z_NG = _by_row(files.read(f"{base}.weight_scale"), len(n_NK)), None
    if how.shifted or f"{base}.weight_zero_point" in files:  # raises where there should be some
        z = files.read(f"{base}.weight_zero_point")
        if z.dtype == torch.int32:  # packed along the rows
            z = _unpacked(z, how.bits, 0)[: len(n_NK)] - half
        z_NG = _by_row(z.to(torch.int16), len(n_NK))
    made = _integers(files, base, n_NK, scale_NG, z_NG)
    return _check_order(files, base, f"{base}.weight_g_idx", made, how.reordered)


def _torchao(files: Tensors, base: str, kind: str) -> _Integers:
    if kind not in _CLASSES:
        raise _unknown_class(f"{base} of {files.folder}", kind)
    if kind == _OPAQUE:
        return _opaque(files, base)
    q_NK = _matrix(files, f"{base}._weight_qdata", torch.int8)
    scale_NG, zero = files.read(f"{base}._weight_scale"), f"{base}._weight_zero_point"
    if kind == _INT4:  # two integers in a byte; scales and zeros by group
        n_NK = torch.stack((q_NK << 4 >> 4, q_NK >> 4), -1).flatten(1).to(torch.int16)
        return _shifted(files, base, n_NK, scale_NG.T, files.read(zero).T)
    n_NK, scale_NG = q_NK.to(torch.int16), _by_row(scale_NG, len(q_NK))
    z_NG = _by_row(files.read(zero).double(), len(n_NK)) if zero in files else None
    _check_groups(files, base, n_NK, scale_NG, z_NG)
    if z_NG is not None and not bool(((z_NG == z_NG.round()) & (z_NG.abs() <= _MOST_ZERO)).all()):
        return _shifted(files, base, n_NK, scale_NG, -z_NG * scale_NG.double())
    return _integers(files, base, n_NK, scale_NG, None if z_NG is None else z_NG.to(torch.int16))


def _opaque(files: Tensors, base: str) -> _Integers:
    """Integers in an order of this CPU's, read by its kernel: a column is the product with a unit vector."""
    packed, both_GN2 = files.read(f"{base}._weight_qdata"), files.read(f"{base}._weight_scale_and_zero")
    rows, columns = len(packed), 2 * packed.shape[-1]
    ones_GN2 = torch.stack((torch.ones_like(both_GN2[..., 0]), torch.zeros_like(both_GN2[..., 1])), -1).float()
    n_NK = torch.empty((rows, columns), dtype=torch.int16)
    powers = 16.0 ** torch.arange(_DIGITS)
    for start in range(0, columns, 64 * _DIGITS):
        k = torch.arange(start, min(columns, start + 64 * _DIGITS))
        x = torch.zeros((-(-len(k) // _DIGITS), columns))
        x[(k - start) // _DIGITS, k] = powers[(k - start) % _DIGITS]
        sums = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, columns // len(both_GN2), ones_GN2)
        digits = (sums.T.long() + 8 * int(powers.sum()))[..., None] >> 4 * torch.arange(_DIGITS) & 15
        n_NK[:, start : start + len(k)] = digits.flatten(1)[:, : len(k)] - 8
    return _shifted(files, base, n_NK, both_GN2[..., 0].T, both_GN2[..., 1].T)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``[N, G]`` of what has a number for a row, or one for all."""
    values = values[:, None] if values.dim() == 1 else values
    return values.expand(rows, 1) if values.numel() == 1 else values


def _classes_in(files: Checkpoint) -> dict[str, str]:
    """Matrices of torchao -> the classes that the files' headers say. Raises ArtifactError: damage."""
    expected, found = "metadata of torchao's tensors", {}
    for name, text in files.metadata().items():
        if name.endswith(".weight"):
            value = parse(text, f"{name} in the header of {files.folder}", expected=expected, fix=_DAMAGED)
            kind = value.get("_type") if isinstance(value, dict) else None
            if kind == _OPAQUE:
                found_ = f"{kind} in a folder, packed for another CPU perhaps"
                raise _unknown_class(f"{name} of {files.folder}", found_)
            found[name.removesuffix(".weight")] = kind if isinstance(kind, str) else shown(value)
    return found


def _unknown_class(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        where,
        expected=f"a matrix of {', '.join(_CLASSES[:-1])} or {_CLASSES[-1]}",
        found=found,
        fix="Quantise the float model: torch_pi2.quantize, or torchao's Int8WeightOnlyConfig, IntxWeightOnlyConfig or "
        "Int4WeightOnlyConfig(int4_packing_format='plain'); other packings are for kernels of one device.",
    )


# --- checkpoints


class _Facts(NamedTuple):
    """What is asked of a matrix before it is read: unpacking it again would take as long."""

    shape: tuple[int, ...]
    group: int
    own_format: str | None
    exact: bool


class QuantizedCheckpoint:
    """A :class:`torch_pi2.checkpoint.importing.PackedSource`, of ``files`` in a format of others.

    Args:
        about: of what model it is, for messages. kinds: matrices of torchao -> their classes, where they are known.
    """

    by_neuron = False

    def __init__(self, files: Tensors, about: str, how: Format, kinds: Mapping[str, str]) -> None:
        self.folder, self.about, self._files, self._format = files.folder, about, files, how
        self._unpack = _unpacker(how, kinds)
        parts = (name.rpartition(".") for name in files.names())
        self._packed = {base for base, _, part in parts if part in _MAIN}
        self._held: tuple[str, _Integers] | None = None
        self._facts: dict[str, _Facts] = {}
        self._used: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def nbytes(self) -> int:
        return self._files.nbytes

    def __contains__(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._packed or name in self._files

    def _base(self, name: str) -> str | None:
        """Of matrix ``name``, what its parts' names begin with; None: it is floats."""
        base = name.removesuffix(".weight")
        return base if base in self._packed and base != name else None

    def _integers(self, base: str) -> _Integers:
        """A matrix. The last one is held: it is asked for piece by piece."""
        if self._held is None or self._held[0] != base:
            self._held = None
            found = self._unpack(self._files, base)
            if self._format.group > 0 and found.n_NK.shape[1] % self._format.group:
                columns = f"{found.n_NK.shape[1]} columns of {base} in groups of {self._format.group}"
                raise refuse(self.folder, "groups of one size", columns)
            self._held = base, found
        self._used |= {f"{base}.{part}" for part in _PARTS}
        return self._held[1]

    def _about(self, name: str) -> _Facts | None:
        base = self._base(name)
        if base is None:
            return None
        if base not in self._facts:
            found = self._integers(base)
            self._facts[base] = _Facts(tuple(found.n_NK.shape), found.group, found.own_format, found.exact)
        return self._facts[base]

    def spec(self, name: str) -> Spec:
        found = self._about(name)
        return self._files.spec(name) if found is None else Spec(found.shape, torch.float32)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        base = self._base(name)
        if base is None:
            self._used.add(name)
            return self._files.read(name, rows)
        return self._integers(base).part(*(rows or (0, None))).values()

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        if self._base(name) is None:
            self._used.add(name)
            self._files.read_into(name, tensor, row)
        else:
            tensor.copy_(self.read(name, (row, row + len(tensor))))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._used.add(name)
        return self._files.read_bytes(name, start, stop)

    def check_float(self, name: str) -> None:
        if self._base(name) is None:
            self._files.check_float(name)

    def type_of(self, name: str) -> str:
        found = self._about(name)
        return "" if found is None else f"{self._format.method} in groups of {found.group}"

    def own_format(self, name: str) -> str | None:
        found = self._about(name)
        return None if found is None else found.own_format

    def exact(self, name: str) -> bool:
        found = self._about(name)
        return found is not None and found.exact

    def rounded_format(self, name: str) -> str:
        return "int8"

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        base, kind = self._base(name), self.own_format(name)
        if base is None or kind is None:
            raise ArtifactError(name, expected="rows in a format of ours", found="others", fix="Round them.")
        return self._integers(base).part(start, stop).rows(kind)

    def ffn_bits(self) -> float:
        inner = (base for base in sorted(self._packed) if not any(part in base for part in _NO_FFN))
        name = next((f"{base}.weight" for base in inner), None)
        if name is None:
            return 16.0
        own = self.own_format(name)
        return float(FORMATS[own].bits) if own else 8.0

    def unused(self) -> list[str]:
        known = {name for name in self._files.names() if name.endswith(_OF_INPUTS)}
        return sorted(name for name in set(self._files.names()) - self._used - known if not self._adds_nothing(name))

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros, which AutoGPTQ has written of linear layers that have none."""
        return name.removesuffix(".bias") in self._packed and not bool(self._files.read(name).any())


def _unpacker(how: Format, kinds: Mapping[str, str]) -> Callable[[Tensors, str], _Integers]:
    if how.method == "torchao":
        return lambda files, base: _torchao(files, base, kinds.get(base, _INT8))
    unpack = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[how.method]
    return lambda files, base: unpack(files, base, how)


def open_folder(folder: Path) -> QuantizedCheckpoint:
    """The checkpoint in ``folder``, which has a ``quantization_config``.

    Raises:
        UnsupportedModelError: another method, or a setting that is not computed here. ArtifactError: damage.
    """
    config = read_config(folder)
    how, files = format_of(folder, config), Checkpoint(folder)
    try:
        kinds = _classes_in(files) if how.method == "torchao" else {}
    except BaseException:
        files.close()
        raise
    return QuantizedCheckpoint(files, str(config.get("model_type")), how, kinds)


def of_model(model: nn.Module) -> QuantizedCheckpoint:
    """A Hugging Face ``model`` in memory whose linear layers torchao has quantised, as its checkpoint would be.

    Nothing is copied before it is asked for.

    Raises:
        UnsupportedModelError: another class of tensors, factors of inputs, or no model of Hugging Face. ConfigError:
            nothing in it is quantised.
    """
    kind = type(model).__name__
    if not hasattr(type(model), "base_model_prefix"):  # what wraps a model has its methods, too
        raise UnsupportedModelError(
            f"import of a {kind}",
            expected="a Hugging Face model, which can be built from its configuration",
            found="another module",
            fix="Pass the model itself: model._orig_mod of torch.compile's, model.merge_and_unload() of PEFT's. Of "
            "other modules take the float model, and optimise that.",
        )
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied
            continue
        seen.add(id(tensor))
        if stands_for_another(tensor):
            tensors |= _parts_of(name, tensor)
            kinds[name.removesuffix(".weight")] = type(tensor.detach()).__name__
        else:
            tensors[name] = tensor.detach()
    if not kinds:
        raise ConfigError(
            f"import of a {kind}",
            expected="linear layers that torchao has quantised",
            found="none",
            fix="torch_pi2.optimize(model, weights='int8') quantises them.",
        )
    config: Any = model.config
    return QuantizedCheckpoint(_InMemory(kind, tensors), str(config.model_type), Format("torchao", 8, 0), kinds)


def _parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tensor of torchao is made of, by the names that transformers saves them under."""
    of: Any = tensor.detach()
    kind = type(of).__name__
    odd = "" if kind in _CLASSES and name.endswith(".weight") and of.dim() == 2 else kind
    factors = getattr(of, "act_pre_scale", None)
    odd = odd or ("factors of its inputs (act_pre_scale)" if factors is not None else "")
    odd = odd or (f"{kind} for int8 inputs" if getattr(of, "act_mapping_type", None) is not None else "")
    if odd:
        raise _unknown_class(f"{name} of a model in memory", odd)
    found = {part: getattr(of, part, None) for part in ("qdata", "scale", "zero_point", "scale_and_zero")}
    base = name.removesuffix(".weight")
    return {f"{base}._weight_{part}": value for part, value in found.items() if value is not None}


class _InMemory:
    """:class:`Tensors` of a model in memory."""

    def __init__(self, about: str, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self._tensors = Path(about), tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def close(self) -> None:
        """Nothing: the model is the caller's."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def spec(self, name: str) -> Spec:
        return Spec.of(self._tensors[name])

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self._tensors[name][slice(*rows) if rows else slice(None)].cpu().contiguous()

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        tensor.copy_(self._tensors[name][row : row + len(tensor)])

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[name].cpu().contiguous().view(-1).view(torch.uint8)[start:stop]

    def check_float(self, name: str) -> None:
        """Nothing: a model computes in floats."""
