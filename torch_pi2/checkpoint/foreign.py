"""Checkpoints that GPTQ, AWQ, compressed-tensors or torchao have quantised, as rows of our formats.

Each format stores integers q and, for every group of columns, a scale s and a zero point z; a weight is s (q - z). If
q - z fits into a format of ours, the integers are kept: ours have a float16 scale per 32 columns, which divide the
groups. Nothing is rounded if float16 has s exactly. Other matrices are read as floats.

A setting of ``quantization_config`` that changes the numbers and is not computed here is refused by name. What it says
of inputs (``input_activations``) is ignored: inputs are floats here, and ``load(activations="int8")`` rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import shown
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.stored import Packed
from torch_pi2.errors import ArtifactError, NonFiniteError, UnsupportedModelError
from torch_pi2.formats import FORMATS, GROUP
from torch_pi2.ops.quantize import pack_integers
from torch_pi2.store.folder import read_config
from torch_pi2.store.source import Checkpoint

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
    *("_weight_qdata", "_weight_scale", "_weight_zero_point"),
)
_MAIN = ("qweight", "weight_packed", "weight_scale", "_weight_qdata")
#: What rounds inputs, which are floats here, and frequencies, which are in the configuration.
_OF_INPUTS = (".input_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "rotary_emb.inv_freq")
#: Relative error of a number that float16 rounds and does not lose.
_HALF = 2.0**-11
#: Classes of torchao that can be read; a folder that names none has Int8Tensor.
_INT8, _INT4 = "Int8Tensor", "Int4Tensor"
TORCHAO_CLASSES = (_INT8, "IntxUnpackedToInt8Tensor", _INT4)
#: Largest whole zero point that is taken off the integers, which int16 holds.
_MOST_ZERO = 1 << 14


@dataclass(frozen=True)
class _Integers:
    """A matrix: ``n_NK`` int16 with whole zero points taken off, ``scale_NG`` in the checkpoint's dtype, per group.

    ``offset_NG``: what is added to the product of both, where zero points are between integers; None: nothing.
    """

    n_NK: torch.Tensor
    scale_NG: torch.Tensor
    offset_NG: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return self.n_NK.shape[1] // self.scale_NG.shape[1]

    def values(self, start: int, stop: int | None) -> torch.Tensor:
        """Rows ``[start, stop)``, float32 ``[N, K]``."""

        def wide(of_NG: torch.Tensor) -> torch.Tensor:
            return of_NG[start:stop].float().repeat_interleave(self.group, 1)

        values = self.n_NK[start:stop].float() * wide(self.scale_NG)
        return values if self.offset_NG is None else values + wide(self.offset_NG)

    @cached_property
    def own_format(self) -> str | None:
        """The smallest format of ours that has these integers."""
        scale_NG = self.scale_NG.double()
        halves = bool(((scale_NG.half().double() - scale_NG).abs() <= _HALF * scale_NG.abs()).all())
        if self.group % GROUP or self.n_NK.shape[1] % GROUP or not halves or self.offset_NG is not None:
            return None
        least, most = (int(end) for end in self.n_NK.aminmax())
        return next((name for name, end in (("int4", 8), ("int8", 128)) if -end <= least and most < end), None)

    @cached_property
    def exact(self) -> bool:
        """Whether float16 has the scales, so that rows in :attr:`own_format` are these numbers."""
        return torch.equal(self.scale_NG.half().double(), self.scale_NG.double())

    def rows(self, start: int, stop: int, kind: str) -> torch.Tensor:
        """Rows ``[start, stop)`` in the format ``kind``."""
        halves = self.scale_NG[start:stop].half().repeat_interleave(self.group // GROUP, 1)
        n_NGk = self.n_NK[start:stop].to(torch.int8).unflatten(1, (-1, GROUP))
        return pack_integers(n_NGk, halves[..., None], kind)


def _wrong(files: Checkpoint, name: str, expected: str, found: str, fix: str = _DAMAGED) -> ArtifactError:
    return ArtifactError(f"{name} of {files.folder}", expected=expected, found=found, fix=fix)


def _matrix(files: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
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


def _integers(
    files: Checkpoint,
    base: str,
    q_NK: torch.Tensor,
    scale_NG: torch.Tensor,
    z_NG: torch.Tensor | None = None,
    offset_NG: torch.Tensor | None = None,
) -> _Integers:
    """A matrix whose numbers are ``scale (q - z)``, or ``scale q + offset``.

    Raises:
        ArtifactError: shapes that do not belong together. NonFiniteError: a scale or zero point is no number.
    """
    rows, columns = q_NK.shape
    sound = scale_NG.dim() == 2 and len(scale_NG) == rows > 0 and scale_NG.shape[1] > 0
    if not sound or columns % scale_NG.shape[1] or columns < scale_NG.shape[1]:
        raise _wrong(files, base, f"scales of {rows} rows of {columns}", str(list(scale_NG.shape)))
    numbers = [one for one in (scale_NG, z_NG, offset_NG) if one is not None]
    if odd := [one for one in numbers if one.shape != scale_NG.shape]:
        raise _wrong(files, base, f"zero points for scales of {list(scale_NG.shape)}", str(list(odd[0].shape)))
    if not all(bool(one.float().isfinite().all()) for one in numbers):
        raise NonFiniteError(
            f"scales of {base} in {files.folder}",
            expected="numbers",
            found="NaN or an infinity",
            fix="The checkpoint is damaged; get it again.",
        )
    if z_NG is not None and bool(((z_NG == z_NG.round()) & (z_NG.abs() <= _MOST_ZERO)).all()):
        q_NK = q_NK - z_NG.to(torch.int16).repeat_interleave(columns // z_NG.shape[1], 1)
    elif z_NG is not None:
        offset_NG = -z_NG.double() * scale_NG.double()
    if offset_NG is not None and not bool(offset_NG.any()):
        offset_NG = None
    return _Integers(q_NK.contiguous(), scale_NG.contiguous(), offset_NG)


def _check_order(files: Checkpoint, base: str, name: str, made: _Integers, reordered: bool) -> _Integers:
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


def _gptq(files: Checkpoint, base: str, how: Format) -> _Integers:
    q_NK = _unpacked(_matrix(files, f"{base}.qweight", torch.int32), how.bits, 0).T
    z_NG = _unpacked(_matrix(files, f"{base}.qzeros", torch.int32), how.bits, 1)[:, : len(q_NK)].T
    if how.less and bool((z_NG == (1 << how.bits) - 1).any()):
        raise refuse(files.folder, "zero points from 1 on, as gptq's first version has them", f"0 in {base}")
    made = _integers(files, base, q_NK, _transposed(files.read(f"{base}.scales")), z_NG + how.less)
    return _check_order(files, base, f"{base}.g_idx", made, how.reordered)


def _awq(files: Checkpoint, base: str, how: Format) -> _Integers:
    q_NK, z_NG = (
        _unpacked(_matrix(files, f"{base}.{part}", torch.int32), 4, 1)
        .unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)]
        .flatten(1)
        .T
        for part in ("qweight", "qzeros")
    )
    return _integers(files, base, q_NK, _transposed(files.read(f"{base}.scales")), z_NG)


def _compressed(files: Checkpoint, base: str, how: Format) -> _Integers:
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


def _torchao(files: Checkpoint, base: str, kind: str) -> _Integers:
    if kind not in TORCHAO_CLASSES:
        raise unknown_class(f"{base} of {files.folder}", kind)
    q_NK = _matrix(files, f"{base}._weight_qdata", torch.int8)
    scale_NG, zero = files.read(f"{base}._weight_scale"), f"{base}._weight_zero_point"
    if kind == _INT4:  # two integers in a byte; scales and zeros by group, and the zeros are added to the product
        n_NK = torch.stack((q_NK << 4 >> 4, q_NK >> 4), -1).flatten(1).to(torch.int16)
        scale_NG, zero_NG = (_transposed(one) for one in (scale_NG, files.read(zero)))
        return _integers(files, base, n_NK, scale_NG, offset_NG=zero_NG)
    n_NK, scale_NG = q_NK.to(torch.int16), _by_row(scale_NG, len(q_NK))
    return _integers(files, base, n_NK, scale_NG, _by_row(files.read(zero), len(n_NK)) if zero in files else None)


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
            found[name.removesuffix(".weight")] = kind if isinstance(kind, str) else shown(value)
    return found


def unknown_class(where: str, found: str) -> UnsupportedModelError:
    """A tensor of torchao's that is not read."""
    return UnsupportedModelError(
        where,
        expected=f"a matrix of {', '.join(TORCHAO_CLASSES[:-1])} or {TORCHAO_CLASSES[-1]}",
        found=found,
        fix="Quantise the float model: torch_pi2.quantize, or torchao's Int8WeightOnlyConfig, IntxWeightOnlyConfig or "
        "Int4WeightOnlyConfig(int4_packing_format='plain'); other packings are for kernels of one device.",
    )


# --- checkpoints


class QuantizedCheckpoint:
    """The checkpoint in ``folder``, which has a ``quantization_config``: a :class:`PackedSource`.

    Raises:
        UnsupportedModelError: another method, or a setting that is not computed here. ArtifactError: damage.
    """

    by_neuron = False

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        self.folder, self.about, self._format = folder, str(config.get("model_type")), format_of(folder, config)
        self._files = Checkpoint(folder)
        try:
            self._classes = _classes_in(self._files) if self._format.method == "torchao" else {}
        except BaseException:
            self._files.close()
            raise
        parts = (name.rpartition(".") for name in self._files.names())
        self._packed = {base for base, _, part in parts if part in _MAIN}
        self._held: tuple[str, _Integers] | None = None
        #: Matrix -> its shape, and what is said of it: unpacking it again for that would take as long.
        self._facts: dict[str, tuple[tuple[int, ...], Packed]] = {}
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
            self._held, how = None, self._format
            if how.method == "torchao":
                found = _torchao(self._files, base, self._classes.get(base, _INT8))
            else:
                unpack = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[how.method]
                found = unpack(self._files, base, how)
            if how.group > 0 and found.n_NK.shape[1] % how.group:
                columns = f"{found.n_NK.shape[1]} columns of {base} in groups of {how.group}"
                raise refuse(self.folder, "groups of one size", columns)
            self._held = base, found
        self._used |= {f"{base}.{part}" for part in _PARTS}
        return self._held[1]

    def _about(self, base: str) -> tuple[tuple[int, ...], Packed]:
        if base not in self._facts:
            found = self._integers(base)
            own, kind = found.own_format, f"{self._format.method} in groups of {found.group}"
            bits = float(FORMATS[own].bits) if own else 8.0
            about = Packed(kind, bits, own or "int8", own is not None, own is not None and found.exact)
            self._facts[base] = tuple(found.n_NK.shape), about
        return self._facts[base]

    def packed(self, name: str) -> Packed | None:
        base = self._base(name)
        return None if base is None else self._about(base)[1]

    def spec(self, name: str) -> Spec:
        base = self._base(name)
        return self._files.spec(name) if base is None else Spec(self._about(base)[0], torch.float32)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        base = self._base(name)
        if base is None:
            self._used.add(name)
            return self._files.read(name, rows)
        return self._integers(base).values(*(rows or (0, None)))

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

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        base = name.removesuffix(".weight")
        return self._integers(base).rows(start, stop, self._about(base)[1].format)

    def unused(self) -> list[str]:
        known = {name for name in self._files.names() if name.endswith(_OF_INPUTS)}
        return sorted(name for name in set(self._files.names()) - self._used - known if not self._adds_nothing(name))

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros, which AutoGPTQ has written of linear layers that have none."""
        return name.removesuffix(".bias") in self._packed and not bool(self._files.read(name).any())
