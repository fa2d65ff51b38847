"""Checkpoints that GPTQ, AWQ, compressed-tensors or torchao have quantised: integers with a scale, in the rows of ours.

Each says of a matrix: integers q, for every group of columns a scale s and a zero point z; a weight is s (q - z). Where
q - z fits into a format of ours, the integers are kept: ours have a float16 scale per 32 columns, which divide the
groups. Nothing is rounded if float16 has s exactly. 4 bits of torchao whose zero points are floats, s q + z, are q4_1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch

from torch_pi2.base.fields import shown
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.quantized_config import Settings, refuse, settings_of
from torch_pi2.errors import ArtifactError, NonFiniteError, UnsupportedModelError
from torch_pi2.formats import FORMATS, GROUP
from torch_pi2.ops.dtypes import dtype_name
from torch_pi2.ops.quantize import pack_integers
from torch_pi2.store.folder import read_config
from torch_pi2.store.source import Checkpoint, Source

#: Order of the eight 4-bit numbers in an int32 of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: Parts of a matrix, and those that one is known by.
_ALL = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero"),
)
_MAIN = ("qweight", "weight_packed", "weight_scale", "_weight_qdata")
#: What rounds inputs, which are floats here, and frequencies, which the configuration says.
_OF_INPUTS = (".input_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "rotary_emb.inv_freq")
#: Parts of names of matrices that are in no feed-forward layer; those of its own have many names.
_NO_FFN = ("attn", "attention", "lm_head", "embed")


#: Relative error of a number that float16 rounds and does not lose.
_HALF = 2.0**-11


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
        if self.group % GROUP or self.n_NK.shape[1] % GROUP or not all(map(_fits_half, self._of_groups)):
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


def _fits_half(numbers: torch.Tensor) -> bool:
    """Whether float16 has these, rounded, but none that it takes for infinite or for next to nothing."""
    return bool(((numbers.half().double() - numbers).abs() <= _HALF * numbers.abs()).all())


class _About(NamedTuple):
    """What is asked of a matrix before it is read: unpacking it again would take as long."""

    shape: tuple[int, ...]
    group: int
    own_format: str | None
    exact: bool


class Tensors(Source, Protocol):
    """What has the parts of matrices under their names."""

    def names(self) -> Collection[str]: ...

    def close(self) -> None: ...


class QuantizedCheckpoint:
    """As :class:`torch_pi2.checkpoint.importing.PackedSource`: a folder with ``quantization_config``.

    Raises:
        UnsupportedModelError: another method, or a setting that is not computed here. ArtifactError: damage.
    """

    by_neuron = False

    def __init__(self, folder: str | Path) -> None:
        self.config = read_config(Path(folder))
        settings = settings_of(Path(folder), self.config)
        files = Checkpoint(folder)
        try:
            kinds = classes_of(files) if settings.method == "torchao" else {}
        except BaseException:
            files.close()
            raise
        self._begin(files, str(self.config.get("model_type")), settings, kinds)

    def _begin(self, files: Tensors, about: str, settings: Settings, kinds: Mapping[str, str]) -> None:
        """``kinds``: matrices of torchao -> their classes, where they are known."""
        self.folder, self.about, self._files = files.folder, about, files
        self.method, self._group, self._unpack = settings.method, settings.group, _way(settings, kinds)
        parts = (name.rpartition(".") for name in self._files.names())
        self._packed = {base for base, _, part in parts if part in _MAIN}
        self._held: tuple[str, _Integers] | None = None
        self._abouts: dict[str, _About] = {}
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
            if self._group > 0 and found.n_NK.shape[1] % self._group:
                columns = f"{found.n_NK.shape[1]} columns of {base} in groups of {self._group}"
                raise refuse(self.folder, "groups of one size", columns)
            self._held = base, found
        self._used |= {f"{base}.{part}" for part in _ALL}
        return self._held[1]

    def _about(self, name: str) -> _About | None:
        base = self._base(name)
        if base is None:
            return None
        if base not in self._abouts:
            found = self._integers(base)
            self._abouts[base] = _About(tuple(found.n_NK.shape), found.group, found.own_format, found.exact)
        return self._abouts[base]

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
        return "" if found is None else f"{self.method} in groups of {found.group}"

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

    def left(self) -> list[str]:
        known = {name for name in self._files.names() if name.endswith(_OF_INPUTS)}
        return sorted(name for name in set(self._files.names()) - self._used - known if not self._adds_nothing(name))

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros, which AutoGPTQ has written of linear layers that have none."""
        return name.removesuffix(".bias") in self._packed and not bool(self._files.read(name).any())


def _way(settings: Settings, kinds: Mapping[str, str]) -> Callable[[Tensors, str], _Integers]:
    """How a matrix is unpacked."""
    if settings.method == "gptq":
        return lambda files, base: _gptq(files, base, settings)
    if settings.method == "awq":
        return _awq
    if settings.method == "torchao":
        return lambda files, base: _torchao(files, base, kinds.get(base, INT8_TENSOR))
    return lambda files, base: _compressed(files, base, settings)


def _integers_of(files: Tensors, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of integers. Raises ArtifactError: it is of another dtype, such as floats that nobody has packed."""
    found = files.read(name)
    if found.dtype != dtype or found.dim() != 2:
        raise ArtifactError(
            f"{name} of {files.folder}",
            expected=f"a matrix of {dtype_name(dtype)}",
            found=f"{dtype_name(found.dtype)} {list(found.shape)}",
            fix="The checkpoint is not what its quantization_config says; get it again.",
        )
    return found


def _unpacked(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 with ``32 / bits`` unsigned numbers each, low bits first, along ``axis`` -> int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    moved = packed.movedim(axis, -1)
    numbers = (moved[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, axis).to(torch.int16)


def _check_order(files: Tensors, base: str, name: str, of_K: torch.Tensor, reordered: bool) -> None:
    """Raises UnsupportedModelError: columns of a group are no neighbours, or nothing says of which group they are."""
    given = files.read(name).long() if name in files else None
    if (given is None and not reordered) or (given is not None and torch.equal(given, of_K)):
        return
    raise UnsupportedModelError(
        f"{base} of {files.folder}",
        expected="groups of neighbouring columns (desc_act false, actorder weight or none)",
        found="columns in another order" if given is not None else f"columns in an order that no {name} says",
        fix="Take a checkpoint without act-order, or the float one.",
    )


def _gptq(files: Tensors, base: str, settings: Settings) -> _Integers:
    bits = settings.bits
    q_KN = _unpacked(_integers_of(files, f"{base}.qweight", torch.int32), bits, 0)
    z_GN = _unpacked(_integers_of(files, f"{base}.qzeros", torch.int32), bits, 1)[:, : q_KN.shape[1]]
    if settings.less and bool((z_GN == (1 << bits) - 1).any()):
        raise refuse(files.folder, "zero points from 1 on, as gptq's first version has them", f"0 in {base}")
    scale_GN = files.read(f"{base}.scales")
    _check_groups(files, base, q_KN.T, scale_GN.T if scale_GN.dim() == 2 else scale_GN, z_GN.T)
    of_K = torch.arange(len(q_KN)) // (len(q_KN) // len(scale_GN))
    _check_order(files, base, f"{base}.g_idx", of_K, settings.reordered)
    return _checked(files, base, (q_KN - (z_GN + settings.less)[of_K]).T, scale_GN.T)


def _awq(files: Tensors, base: str) -> _Integers:
    def ordered(name: str) -> torch.Tensor:
        packed = _integers_of(files, name, torch.int32)
        numbers: torch.Tensor = _unpacked(packed, 4, 1).unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)
        return numbers

    q_KN, z_GN = ordered(f"{base}.qweight"), ordered(f"{base}.qzeros")
    scale_GN = files.read(f"{base}.scales")
    _check_groups(files, base, q_KN.T, scale_GN.T if scale_GN.dim() == 2 else scale_GN, z_GN.T)
    return _checked(files, base, (q_KN - z_GN.repeat_interleave(len(q_KN) // len(z_GN), 0)).T, scale_GN.T)


def _compressed(files: Tensors, base: str, settings: Settings) -> _Integers:
    bits = settings.bits
    if f"{base}.weight_packed" in files:
        shape = [int(n) for n in files.read(f"{base}.weight_shape").flatten()]
        rows, columns = shape if len(shape) == 2 else (0, 0)
        packed = _integers_of(files, f"{base}.weight_packed", torch.int32)
        n_NK = _unpacked(packed, bits, 1)[:rows, :columns] - (1 << (bits - 1))
    else:
        n_NK = _integers_of(files, f"{base}.weight", torch.int8).to(torch.int16)
    scale_NG = _by_row(files.read(f"{base}.weight_scale"), len(n_NK))
    _check_groups(files, base, n_NK, scale_NG)
    each = n_NK.shape[1] // scale_NG.shape[1]
    _check_order(files, base, f"{base}.weight_g_idx", torch.arange(n_NK.shape[1]) // each, settings.reordered)
    if settings.shifted or f"{base}.weight_zero_point" in files:  # raises where there should be some
        z = files.read(f"{base}.weight_zero_point")
        if z.dtype == torch.int32:  # packed along the rows
            z = _unpacked(z, bits, 0)[: len(n_NK)] - (1 << (bits - 1))
        z_NG = _by_row(z.to(torch.int16), len(n_NK))
        _check_groups(files, base, n_NK, scale_NG, z_NG)
        n_NK = n_NK - z_NG.repeat_interleave(each, 1)
    return _checked(files, base, n_NK, scale_NG)


#: Classes of torchao whose numbers can be read; one of Int8Tensor's parts is what a folder without classes has.
INT8_TENSOR, _INT4, _OPAQUE = "Int8Tensor", "Int4Tensor", "Int4OpaqueTensor"
TORCHAO_CLASSES = (INT8_TENSOR, "IntxUnpackedToInt8Tensor", _INT4, _OPAQUE)


#: Of whole zero points that are taken off the integers; int16 holds what comes of it.
_MOST_ZERO = 1 << 14


def classes_of(files: Checkpoint) -> dict[str, str]:
    """Matrices of torchao -> the classes that the files' headers say. Raises ArtifactError: damage."""
    expected, fix, found = "metadata of torchao's tensors", "Get the checkpoint again.", {}
    for name, text in files.metadata().items():
        if name.endswith(".weight"):
            said = parse(text, f"{name} in the header of {files.folder}", expected=expected, fix=fix)
            kind = said.get("_type") if isinstance(said, dict) else None
            if kind == _OPAQUE:
                raise refuse_class(f"{name} of {files.folder}", f"{kind} in a folder, packed for another CPU perhaps")
            found[name.removesuffix(".weight")] = kind if isinstance(kind, str) else shown(said)
    return found


def refuse_class(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        where,
        expected=f"a matrix of {', '.join(TORCHAO_CLASSES[:-1])} or {TORCHAO_CLASSES[-1]}",
        found=found,
        fix="Quantise the float model: torch_pi2.quantize, or torchao's Int8WeightOnlyConfig, IntxWeightOnlyConfig or "
        "Int4WeightOnlyConfig(int4_packing_format='plain'); other packings are for kernels of one device.",
    )


def _torchao(files: Tensors, base: str, kind: str) -> _Integers:
    if kind not in TORCHAO_CLASSES:
        raise refuse_class(f"{base} of {files.folder}", kind)
    if kind == _OPAQUE:
        return _opaque(files, base)
    q_NK = _integers_of(files, f"{base}._weight_qdata", torch.int8)
    scale_NG = files.read(f"{base}._weight_scale")
    zero = f"{base}._weight_zero_point"
    if kind == _INT4:  # two integers in a byte; scales and zeros by group
        n_NK = torch.stack((q_NK << 4 >> 4, q_NK >> 4), -1).flatten(1).to(torch.int16)
        return _shifted(files, base, n_NK, scale_NG.T, files.read(zero).T)
    n_NK, scale_NG = q_NK.to(torch.int16), _by_row(scale_NG, len(q_NK))
    _check_groups(files, base, n_NK, scale_NG)
    if zero not in files:
        return _checked(files, base, n_NK, scale_NG)
    z_NG = _by_row(files.read(zero).double(), len(n_NK))
    _check_groups(files, base, n_NK, scale_NG, z_NG)
    if not bool(((z_NG == z_NG.round()) & (z_NG.abs() <= _MOST_ZERO)).all()):
        return _shifted(files, base, n_NK, scale_NG, -z_NG * scale_NG.double())
    z_NK = z_NG.to(torch.int16).repeat_interleave(n_NK.shape[1] // z_NG.shape[1], 1)
    return _checked(files, base, n_NK - z_NK, scale_NG)


#: 4-bit integers that one float32 holds exactly, as digits.
_DIGITS = 5


def _opaque(files: Tensors, base: str) -> _Integers:
    """Integers in an order of this CPU's, read by its kernel: a column is the product with a unit vector."""
    packed, both_GN2 = files.read(f"{base}._weight_qdata"), files.read(f"{base}._weight_scale_and_zero").float()
    rows, columns = len(packed), 2 * packed.shape[-1]
    ones_GN2 = torch.stack((torch.ones_like(both_GN2[..., 0]), torch.zeros_like(both_GN2[..., 1])), -1)
    n_NK = torch.empty((rows, columns), dtype=torch.int16)
    powers = 16.0 ** torch.arange(_DIGITS)
    for start in range(0, columns, 64 * _DIGITS):
        k = torch.arange(start, min(columns, start + 64 * _DIGITS))
        x = torch.zeros((-(-len(k) // _DIGITS), columns))
        x[(k - start) // _DIGITS, k] = powers[(k - start) % _DIGITS]
        sums = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, columns // len(both_GN2), ones_GN2)
        digits = (sums.T.long() + 8 * int(powers.sum()))[..., None] >> 4 * torch.arange(_DIGITS) & 15
        n_NK[:, start : start + len(k)] = digits.flatten(1)[:, : len(k)] - 8
    scale_NG, offset_NG = (files.read(f"{base}._weight_scale_and_zero")[..., part].T for part in range(2))
    return _shifted(files, base, n_NK, scale_NG, offset_NG)


def _shifted(
    files: Tensors, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor, offset_NG: torch.Tensor
) -> _Integers:
    """Of scales and what is added to the products, which is no multiple of the scales."""
    _check_groups(files, base, n_NK, scale_NG, offset_NG)
    checked = _checked(files, base, n_NK, scale_NG)
    if not bool(offset_NG.any()):
        return checked
    if not bool(offset_NG.isfinite().all()):
        raise _not_finite(files, base)
    return _Integers(checked.n_NK, checked.scale_NG, offset_NG.double().contiguous())


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``[N, G]`` of what has a number for a row, or one for all."""
    values = values[:, None] if values.dim() == 1 else values
    return values.expand(rows, 1) if values.numel() == 1 else values


def _check_groups(
    files: Tensors, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor | None = None
) -> None:
    """Raises ArtifactError: shapes that do not go together."""
    rows, columns = n_NK.shape
    sound = scale_NG.dim() == 2 and len(scale_NG) == rows > 0 and scale_NG.shape[1] > 0
    if not sound or columns % scale_NG.shape[1] or columns < scale_NG.shape[1]:
        raise ArtifactError(
            f"{base} of {files.folder}",
            expected=f"scales of {rows} rows of {columns}",
            found=str(list(scale_NG.shape)),
            fix="Get the checkpoint again.",
        )
    if z_NG is not None and z_NG.shape != scale_NG.shape:
        raise ArtifactError(
            f"{base} of {files.folder}",
            expected=f"zero points for scales of {list(scale_NG.shape)}",
            found=str(list(z_NG.shape)),
            fix="Get the checkpoint again.",
        )


def _checked(files: Tensors, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor) -> _Integers:
    """Raises NonFiniteError: a scale is no number."""
    if not bool(scale_NG.float().isfinite().all()):
        raise _not_finite(files, base)
    return _Integers(n_NK.contiguous(), scale_NG.contiguous())


def _not_finite(files: Tensors, base: str) -> NonFiniteError:
    return NonFiniteError(
        f"scales of {base} in {files.folder}",
        expected="numbers",
        found="NaN or an infinity",
        fix="The checkpoint is damaged; get it again.",
    )
