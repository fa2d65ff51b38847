"""Checkpoints quantised by GPTQ, AWQ, compressed-tensors, torchao or BitNet, converted to rows of our formats.

All of them store integers q and, per group of columns, a scale s and a zero point z; a weight is s (q - z). Where q - z
fits one of our formats, the integers are kept. Our formats have one float16 scale per 32 columns, so a group must be a
multiple of 32. Nothing is rounded if float16 represents s exactly. Other matrices are read as floats.

Settings of ``quantization_config`` that change the numbers and are not implemented are refused by name.
``input_activations`` is ignored: inputs are floats here, and ``load(activations="int8")`` rounds them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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


class Format(NamedTuple):
    """How a checkpoint stores its matrices. ``method``: ``gptq``, ``awq``, ``compressed-tensors``, ``torchao`` or
    ``bitnet``. ``bits``: per integer. ``group``: columns per scale; 0: one scale per row, or not stated. ``less``: zero
    points are stored less this number. ``reordered``: columns may be permuted, as their tensors say. ``shifted``: zero
    points are required. ``inverse``: 1 / scale is stored.
    """

    method: str
    bits: int
    group: int
    less: int = 0
    reordered: bool = False
    shifted: bool = False
    inverse: bool = False


#: Any value of the field is accepted.
_ANY = object()
_GROUP_FIELDS = {
    "weights": {
        "type": ("int",),
        "strategy": ("group", "channel", "tensor"),
        "dynamic": (),
        "block_structure": (),
        "num_bits": (4, 8),
        **dict.fromkeys(("symmetric", "group_size", "actorder"), _ANY),
        **dict.fromkeys(("scale_dtype", "zp_dtype", "observer", "observer_kwargs"), _ANY),
    },
    "format": ("pack-quantized", "int-quantized"),
    "output_activations": (),
    **dict.fromkeys(("targets", "input_activations"), _ANY),
}
#: Settings of single modules that matter only when quantising.
_OF_MODULES = dict.fromkeys(
    ("group_size", "sym", "desc_act", "damp_percent", "damp_auto_increment", "mse", "static_groups"), _ANY
)
#: Method -> field -> accepted values besides empty ones, or nested fields; ``*`` stands for all other fields.
_FIELDS: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": (2, 4, 8),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "dynamic": {"*": _OF_MODULES},
        **dict.fromkeys(("rotation", "adapter", "is_marlin_format"), ()),
        "*": _ANY,
    },
    "awq": {
        **dict.fromkeys(("bits", "w_bit"), (4,)),
        **dict.fromkeys(("version", "format"), ("gemm", "GEMM")),
        **dict.fromkeys(("rotation", "adapter"), ()),
        "*": _ANY,
    },
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized"),
        "config_groups": {"*": _GROUP_FIELDS},
        "kv_cache_scheme": (),
        "sparsity_config": {"format": ("dense",), "*": _ANY},
        "transform_config": {"config_groups": (), "*": _ANY},
        **dict.fromkeys(("quant_method", "ignore", "quantization_status", "global_compression_ratio", "version"), _ANY),
    },
    "torchao": {"*": _ANY},  # its tensors name their classes
    "bitnet": {
        "quant_method": ("bitnet",),
        "linear_class": ("bitlinear", "autobitlinear"),
        "quantization_mode": ("offline",),
        **dict.fromkeys(("modules_to_not_convert", "rms_norm_eps"), _ANY),
    },
}


def format_of(folder: Path, config: Mapping[str, Any]) -> Format:
    """The format of the checkpoint with this config.json. Raises UnsupportedModelError if it is not supported."""
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in _FIELDS:
        found = shown(method) if method else "none"
        raise refuse(folder, "quant_method gptq, awq, compressed-tensors, torchao or bitnet", found)
    _check(folder, settings, _FIELDS[method])
    if method == "gptq":
        # The first version of the format stores zero points less one.
        second = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
        group, reordered = _group_of(settings, "group_size"), bool(settings.get("desc_act"))
        return Format(method, settings.get("bits") or 4, group, 0 if second else 1, reordered)
    if method == "compressed-tensors":
        return _compressed_format(folder, settings)
    if method == "bitnet":
        return Format(method, 2, 0, inverse=settings.get("linear_class", "bitlinear") == "bitlinear")
    if not settings.get("zero_point", True):
        raise refuse(folder, "zero_point true, as version gemm has it", "false")
    return Format(method, 4 if method == "awq" else 8, _group_of(settings, "group_size", "q_group_size"))


def refuse(folder: Path, expected: str, found: str) -> UnsupportedModelError:
    fix = "Take the model's original float checkpoint, and torch_pi2.quantize it."
    return UnsupportedModelError(f"quantization_config of {folder}", expected=expected, found=found, fix=fix)


def _check(folder: Path, settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError: a field is not in ``fields``, or has a value that is not accepted."""
    for name, found in settings.items():
        known = fields.get(name, fields.get("*", ()))
        if isinstance(known, dict) and isinstance(found, dict):
            _check(folder, found, known)
        elif known is not _ANY and found not in (None, False, "", [], {}, *(() if isinstance(known, dict) else known)):
            expected = "with fields" if isinstance(known, dict) else " or ".join(map(str, known)) or "none"
            raise refuse(folder, f"{name} {expected}", shown(found))


def _group_of(settings: Mapping[str, Any], *names: str) -> int:
    found = next((settings[name] for name in names if name in settings), 0)
    return found if isinstance(found, int) and found > 0 else 0


def _compressed_format(folder: Path, settings: Mapping[str, Any]) -> Format:
    groups = (settings.get("config_groups") or {}).values()
    weights = [group["weights"] for group in groups if group and group.get("weights")]
    bits = {one.get("num_bits") or 8 for one in weights}
    if len(bits) != 1:
        raise refuse(folder, "matrices of as many bits everywhere", " and ".join(map(str, sorted(bits))) or "none")
    sizes = {_group_of(one, "group_size") for one in weights}
    reordered = any(one.get("actorder") in ("group", "dynamic", True) for one in weights)
    group, shifted = sizes.pop() if len(sizes) == 1 else 0, all(one.get("symmetric") is False for one in weights)
    return Format("compressed-tensors", bits.pop(), group, reordered=reordered, shifted=shifted)


#: Order of the eight 4-bit numbers in an int32 of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: Suffixes of the tensor that marks a quantised matrix.
_MAIN = ("qweight", "weight_packed", "weight_scale", "_weight_qdata")
#: Unused tensors: scales of inputs, which are floats here, and frequencies, which the configuration gives.
_OF_INPUTS = (".input_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "rotary_emb.inv_freq")
#: Largest relative rounding error of a normal float16.
_HALF = 2.0**-11
#: Supported classes of torchao; a folder that names none has the first.
_TORCHAO_CLASSES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
#: Largest zero point that int16 arithmetic allows.
_MOST_ZERO = 1 << 14


@dataclass(frozen=True)
class _Integers:
    """A matrix: ``n_NK``, int16 integers less zero points; ``scale_NG``, scales in the checkpoint's dtype."""

    n_NK: torch.Tensor
    scale_NG: torch.Tensor

    @property
    def group(self) -> int:
        return self.n_NK.shape[1] // self.scale_NG.shape[1]

    def values(self, start: int, stop: int | None) -> torch.Tensor:
        """Rows ``[start, stop)``, float32 ``[N, K]``."""
        return self.n_NK[start:stop].float() * self.scale_NG[start:stop].float().repeat_interleave(self.group, 1)

    @cached_property
    def own_format(self) -> str | None:
        """The smallest of our formats that holds these integers, or None."""
        scale_NG = self.scale_NG.double()
        halves = bool(((scale_NG.half().double() - scale_NG).abs() <= _HALF * scale_NG.abs()).all())
        if self.group % GROUP or self.n_NK.shape[1] % GROUP or not halves:
            return None
        least, most = (int(end) for end in self.n_NK.aminmax())
        if self.group % FORMATS["tq2_0"].block == 0 and least >= -1 and most <= 1:
            return "tq2_0"
        return next((name for name, end in (("int4", 8), ("int8", 128)) if -end <= least and most < end), None)

    @cached_property
    def exact(self) -> bool:
        """Whether float16 represents the scales exactly, so that rows in :attr:`own_format` lose nothing."""
        return torch.equal(self.scale_NG.half().double(), self.scale_NG.double())

    def rows(self, start: int, stop: int, kind: str) -> torch.Tensor:
        """Rows ``[start, stop)`` in format ``kind``."""
        halves = self.scale_NG[start:stop].half().repeat_interleave(self.group // GROUP, 1)
        n_NGk = self.n_NK[start:stop].to(torch.int8).unflatten(1, (-1, GROUP))
        return pack_integers(n_NGk, halves[..., None], kind)


def _unpacked(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 with ``32 / bits`` unsigned numbers each, low bits first, along ``axis`` -> int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    moved = packed.movedim(axis, -1)
    numbers = (moved[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, axis).to(torch.int16)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``[N, G]`` from values per row, or from one value for all rows."""
    values = values[:, None] if values.dim() == 1 else values
    return values.expand(rows, 1) if values.numel() == 1 else values


class QuantizedCheckpoint(Checkpoint):
    """A :class:`PackedSource` with a ``quantization_config``. Raises UnsupportedModelError, ArtifactError (damage)."""

    by_neuron, zeros = False, True

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        self.about, self._format = str(config.get("model_type")), format_of(folder, config)
        super().__init__(folder)
        parts = (name.rpartition(".") for name in self.names())
        self._packed = {base for base, _, part in parts if part in _MAIN}
        self._header = self.metadata()
        self._held: tuple[str, _Integers] | None = None
        #: Matrix -> shape and :class:`Packed`, cached because finding them unpacks the matrix.
        self._facts: dict[str, tuple[tuple[int, ...], Packed]] = {}
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._base(name) is not None or super().__contains__(name)

    def _base(self, name: str) -> str | None:
        """The prefix of the tensors that make up matrix ``name``; None if it is stored in floats."""
        own = self.own(name)
        base = own.removesuffix(".weight")
        return base if base in self._packed and base != own else None

    def matrices(self) -> list[str]:
        parts = (name.rpartition(".") for name in self.names())
        floats = {"".join(part) for part in parts if part[0] not in self._packed or part[2] == "bias"}
        return [*floats, *(f"{base}.weight" for base in self._packed)]

    def is_packed(self, name: str) -> bool:
        return self._base(name) is not None

    def packed(self, name: str) -> Packed | None:
        base = self._base(name)
        return None if base is None else self._about(base)[1]

    def spec(self, name: str) -> Spec:
        base = self._base(name)
        return super().spec(name) if base is None else Spec(self._about(base)[0], torch.float32)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        base = self._base(name)
        return self._raw(name, rows) if base is None else self._integers(base).values(*(rows or (0, None)))

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        if self._base(name) is None:
            self._used.add(self.own(name))
            super().read_into(name, tensor, row)
        else:
            tensor.copy_(self.read(name, (row, row + len(tensor))))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        self._used.add(self.own(name))
        return super().read_bytes(name, start, stop)

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        base = self._base(name)
        assert base is not None
        return self._integers(base).rows(start, stop, self._about(base)[1].format)

    def unused(self) -> list[str]:
        known = {name for name in self.names() if name.endswith(_OF_INPUTS)}
        left = set(self.names()) - self._used - known
        # AutoGPTQ writes biases of zeros for linear layers without bias
        return sorted(n for n in left if n.removesuffix(".bias") not in self._packed or bool(self.read(n).any()))

    def _about(self, base: str) -> tuple[tuple[int, ...], Packed]:
        if base not in self._facts:
            found = self._integers(base)
            own, kind = found.own_format, f"{self._format.method} in groups of {found.group}"
            bits = float(FORMATS[own].bits) if own else 8.0
            about = Packed(kind, bits, own or "int8", own is not None, own is not None and found.exact)
            self._facts[base] = tuple(found.n_NK.shape), about
        return self._facts[base]

    def _integers(self, base: str) -> _Integers:
        """A matrix. The last one is cached, since it is read piece by piece."""
        if self._held is None or self._held[0] != base:
            self._held, group = None, self._format.group
            readers = {"gptq": self._gptq, "awq": self._awq, "torchao": self._torchao, "bitnet": self._bitnet}
            found = readers.get(self._format.method, self._compressed)(base)
            if group > 0 and found.n_NK.shape[1] % group:
                columns = f"{found.n_NK.shape[1]} columns of {base} in groups of {group}"
                raise refuse(self.folder, "groups of one size", columns)
            self._held = base, found
        return self._held[1]

    def _raw(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        self._used.add(self.own(name))
        return super().read(name, rows)

    def _matrix(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A matrix of integers. Raises ArtifactError: another dtype, such as floats that were never packed."""
        found = self._raw(name)
        if found.dtype != dtype or found.dim() != 2:
            raise self._wrong(name, f"a matrix of {dtype_name(dtype)}", str(Spec.of(found)))
        return found

    def _wrong(self, name: str, expected: str, found: str) -> ArtifactError:
        return ArtifactError(f"{name} of {self.folder}", expected=expected, found=found, fix=_DAMAGED)

    def _gptq(self, base: str) -> _Integers:
        bits, less = self._format.bits, self._format.less
        q_NK = _unpacked(self._matrix(f"{base}.qweight", torch.int32), bits, 0).T
        z_NG = _unpacked(self._matrix(f"{base}.qzeros", torch.int32), bits, 1)[:, : len(q_NK)].T
        if less and bool((z_NG == (1 << bits) - 1).any()):
            raise refuse(self.folder, "zero points from 1 on, as gptq's first version has them", f"0 in {base}")
        return self._made(base, q_NK, _transposed(self._raw(f"{base}.scales")), z_NG + less, f"{base}.g_idx")

    def _awq(self, base: str) -> _Integers:
        parts = (self._matrix(f"{base}.{part}", torch.int32) for part in ("qweight", "qzeros"))
        eights = (_unpacked(part, 4, 1).unflatten(1, (-1, 8)) for part in parts)
        q_NK, z_NG = (eight[..., list(_AWQ_ORDER)].flatten(1).T for eight in eights)
        return self._made(base, q_NK, _transposed(self._raw(f"{base}.scales")), z_NG)

    def _compressed(self, base: str) -> _Integers:
        bits, half = self._format.bits, 1 << (self._format.bits - 1)
        if f"{base}.weight_packed" in self:
            shape = [int(n) for n in self._raw(f"{base}.weight_shape").flatten()]
            rows, columns = shape if len(shape) == 2 else (0, 0)
            n_NK = _unpacked(self._matrix(f"{base}.weight_packed", torch.int32), bits, 1)[:rows, :columns] - half
        else:
            n_NK = self._matrix(f"{base}.weight", torch.int8).to(torch.int16)
        scale_NG, z_NG = _by_row(self._raw(f"{base}.weight_scale"), len(n_NK)), None
        if self._format.shifted or f"{base}.weight_zero_point" in self:  # raises if a required one is missing
            z = self._raw(f"{base}.weight_zero_point")
            if z.dtype == torch.int32:  # packed along the rows
                z = _unpacked(z, bits, 0)[: len(n_NK)] - half
            z_NG = _by_row(z.to(torch.int16), len(n_NK))
        return self._made(base, n_NK, scale_NG, z_NG, f"{base}.weight_g_idx")

    def _torchao(self, base: str) -> _Integers:
        text = self._header.get(f"{base}.weight", json.dumps({"_type": _TORCHAO_CLASSES[0]}))
        where, expected = f"{base}.weight in the header of {self.folder}", "metadata of torchao's tensors"
        kind = parse(text, where, expected=expected, fix=_DAMAGED)
        if not isinstance(kind, dict) or kind.get("_type") not in _TORCHAO_CLASSES:
            other, kinds = shown(kind.get("_type") if isinstance(kind, dict) else kind), " or ".join(_TORCHAO_CLASSES)
            how = "torch_pi2.quantize, or torchao's Int8WeightOnlyConfig or IntxWeightOnlyConfig"
            fix = f"Quantise the float model: {how}; other packings are for kernels of one device."
            raise UnsupportedModelError(
                f"{base} of {self.folder}", expected=f"a matrix of {kinds}", found=other, fix=fix
            )
        n_NK = self._matrix(f"{base}._weight_qdata", torch.int8).to(torch.int16)
        scale_NG, zero = _by_row(self._raw(f"{base}._weight_scale"), len(n_NK)), f"{base}._weight_zero_point"
        return self._made(base, n_NK, scale_NG, _by_row(self._raw(zero), len(n_NK)) if zero in self else None)

    def _bitnet(self, base: str) -> _Integers:
        q_PK = self._matrix(f"{base}.weight", torch.uint8)  # a quarter of the rows to each pair of bits
        n_NK = torch.cat([q_PK >> shift & 3 for shift in (0, 2, 4, 6)]).to(torch.int16) - 1
        if bool((n_NK > 1).any()):
            raise self._wrong(base, "numbers of -1, 0 and 1", "2")
        scale = self._raw(f"{base}.weight_scale").float()
        return self._made(base, n_NK, _by_row(1 / scale if self._format.inverse else scale, len(n_NK)), None)

    def _made(
        self, base: str, q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor | None, order: str = ""
    ) -> _Integers:
        """The matrix ``scale (q - z)``; ``order`` names the tensor with the group of each column. Raises ArtifactError:
        mismatched shapes, or zero points that are no integers. NonFiniteError: NaN or infinite scales.
        UnsupportedModelError: columns of a group are not adjacent.
        """
        rows, columns = q_NK.shape
        sound = scale_NG.dim() == 2 and len(scale_NG) == rows > 0 and scale_NG.shape[1] > 0
        if not sound or columns % scale_NG.shape[1] or columns < scale_NG.shape[1]:
            raise self._wrong(base, f"scales of {rows} rows of {columns}", str(list(scale_NG.shape)))
        if not bool(scale_NG.float().isfinite().all()):
            found, fix = "NaN or an infinity", "The checkpoint is damaged; get it again."
            raise NonFiniteError(f"scales of {base} in {self.folder}", expected="numbers", found=found, fix=fix)
        group = columns // scale_NG.shape[1]
        if z_NG is not None:
            if z_NG.shape != scale_NG.shape:
                raise self._wrong(base, f"zero points for scales of {list(scale_NG.shape)}", str(list(z_NG.shape)))
            if not bool(((z_NG == z_NG.round()) & (z_NG.abs() <= _MOST_ZERO)).all()):
                raise self._wrong(base, f"integers of at most {_MOST_ZERO} as zero points", "others")
            q_NK = q_NK - z_NG.to(torch.int16).repeat_interleave(group, 1)
        given = self._raw(order).long() if order in self else None
        neighbours = given is not None and torch.equal(given, torch.arange(columns) // group)
        if not neighbours and (given is not None or self._format.reordered):
            expected = "groups of neighbouring columns (desc_act false, actorder weight or none)"
            found = "columns in another order" if given is not None else f"columns in an order that no {order} says"
            fix = "Take a checkpoint without act-order, or the float one."
            raise UnsupportedModelError(f"{base} of {self.folder}", expected=expected, found=found, fix=fix)
        return _Integers(q_NK.contiguous(), scale_NG.contiguous())
