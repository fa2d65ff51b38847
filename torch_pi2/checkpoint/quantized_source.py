"""Checkpoints that GPTQ, AWQ or compressed-tensors have quantised: integers with a scale, in the rows of ours.

Each says of a matrix: integers q, for every group of columns a scale s and a zero point z; a weight is s (q - z). Where
q - z fits into a format of ours, and its float16 scales are s exactly, nothing is rounded: ours have one per 32
columns, which divide the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.formats import FORMATS, GROUP
from torch_pi2.ops.quantize import pack
from torch_pi2.store.folder import read_config
from torch_pi2.store.source import Checkpoint

#: Order of the eight 4-bit numbers in an int32 of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: Parts of a matrix, and those that one is known by.
_ALL = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight"),
)
_MAIN = ("qweight", "weight_packed", "weight_scale")


@dataclass(frozen=True)
class _Integers:
    """A matrix: ``n_NK`` int16 with the zero points taken off, ``scale_NG`` in the checkpoint's dtype, per group."""

    n_NK: torch.Tensor
    scale_NG: torch.Tensor

    @property
    def group(self) -> int:
        return self.n_NK.shape[1] // self.scale_NG.shape[1]

    def part(self, start: int, stop: int | None) -> _Integers:
        """Rows ``[start, stop)``."""
        return _Integers(self.n_NK[start:stop], self.scale_NG[start:stop])

    def values(self) -> torch.Tensor:
        """float32 ``[N, K]``."""
        scale_NK = self.scale_NG.float().repeat_interleave(self.group, 1)
        return self.n_NK.float() * scale_NK

    @cached_property
    def own_format(self) -> str | None:
        """The smallest format of ours that has these numbers exactly."""
        half = self.scale_NG.half()
        exact = bool((half.double() == self.scale_NG.double()).all())
        if not exact or self.group % GROUP or self.n_NK.shape[1] % GROUP:
            return None
        least, most = (int(end) for end in self.n_NK.aminmax())
        fits = (name for name in ("int4", "int8") if FORMATS[name].least <= least and most <= FORMATS[name].most)
        return next(fits, None)

    def rows(self, kind: str) -> torch.Tensor:
        scale_NG1 = self.scale_NG.float().repeat_interleave(self.group // GROUP, 1)[..., None]
        return pack(self.n_NK.float().unflatten(1, (-1, GROUP)) * scale_NG1, scale_NG1, kind)


class _About(NamedTuple):
    """What is asked of a matrix before it is read: unpacking it again would take as long."""

    shape: tuple[int, ...]
    group: int
    own_format: str | None


class QuantizedCheckpoint:
    """As :class:`torch_pi2.checkpoint.importing.PackedSource`: a folder with ``quantization_config``.

    Raises:
        UnsupportedModelError: another method, or a setting of these that is not known. ArtifactError: damage.
    """

    by_neuron = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.about = str(self.config.get("model_type"))
        said = self.config.get("quantization_config") or {}
        self.method = str(said.get("quant_method", ""))
        self._unpack, self._group = _ways(self.folder, self.method, said), _group_size(said)
        self._files = Checkpoint(self.folder)
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
                raise _refuse(self.folder, "groups of one size", columns)
            self._held = base, found
        self._used |= {f"{base}.{part}" for part in _ALL}
        return self._held[1]

    def _about(self, name: str) -> _About | None:
        base = self._base(name)
        if base is None:
            return None
        if base not in self._abouts:
            found = self._integers(base)
            self._abouts[base] = _About(tuple(found.n_NK.shape), found.group, found.own_format)
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

    def rounded_format(self, name: str) -> str:
        return "int8"

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        base, kind = self._base(name), self.own_format(name)
        if base is None or kind is None:
            raise ArtifactError(name, expected="rows in a format of ours", found="others", fix="Round them.")
        return self._integers(base).part(start, stop).rows(kind)

    def ffn_bits(self) -> float:
        name = next((f"{base}.weight" for base in sorted(self._packed) if "down_proj" in base), None)
        return 4.0 if name is None or self.own_format(name) == "int4" else 8.0

    def left(self) -> list[str]:
        known = {name for name in self._files.names() if name.endswith((".input_scale", "rotary_emb.inv_freq"))}
        return sorted(set(self._files.names()) - self._used - known)


def _refuse(folder: Path, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantization_config of {folder}",
        expected=expected,
        found=found,
        fix="Take the model's original float checkpoint, and torch_pi2.quantize it.",
    )


def _group_size(said: dict[str, Any]) -> int:
    """Columns of a group, as the configuration has it; 0: a row is one, or nothing is said."""
    found = said.get("group_size", said.get("q_group_size"))
    for group in (said.get("config_groups") or {}).values():
        found = (group.get("weights") or {}).get("group_size") if isinstance(group, dict) else found
    return found if isinstance(found, int) and found > 0 else 0


def _ways(folder: Path, method: str, said: dict[str, Any]) -> Callable[[Checkpoint, str], _Integers]:
    """How a matrix is unpacked."""
    bits = said.get("bits", said.get("w_bit", 4))
    if method == "gptq":
        if bits not in (2, 4, 8):
            raise _refuse(folder, "gptq of 2, 4 or 8 bits", f"{bits}")
        # The first version of the format stores zero points less one.
        offset = 0 if said.get("checkpoint_format") == "gptq_v2" else 1
        return lambda files, base: _gptq(files, base, bits, offset)
    if method == "awq":
        if bits != 4 or str(said.get("version", "gemm")).lower() != "gemm":
            raise _refuse(folder, "awq of 4 bits, version gemm", f"{bits} bits, {said.get('version')}")
        return _awq
    if method == "compressed-tensors":
        kind, groups = said.get("format"), list((said.get("config_groups") or {}).values())
        widths = {(group.get("weights") or {}).get("num_bits") for group in groups if isinstance(group, dict)}
        if kind not in ("pack-quantized", "int-quantized") or len(widths) != 1 or not widths <= {4, 8}:
            raise _refuse(
                folder, "pack-quantized or int-quantized of 4 or 8 bits", f"{kind} of {sorted(map(str, widths))}"
            )
        width = 4 if widths == {4} else 8
        return lambda files, base: _compressed(files, base, width)
    raise _refuse(folder, "quant_method gptq, awq or compressed-tensors", repr(method) if method else "none")


def _unpacked(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """int32 with ``32 / bits`` unsigned numbers each, low bits first, along ``axis`` -> int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    moved = packed.movedim(axis, -1)
    numbers = (moved[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, axis).to(torch.int16)


def _gptq(files: Checkpoint, base: str, bits: int, offset: int) -> _Integers:
    q_KN = _unpacked(files.read(f"{base}.qweight"), bits, 0)
    z_GN = _unpacked(files.read(f"{base}.qzeros"), bits, 1) + offset
    scale_GN = files.read(f"{base}.scales")
    columns, groups = len(q_KN), len(scale_GN)
    of_K = torch.arange(columns) // (columns // groups)
    if f"{base}.g_idx" in files:
        given = files.read(f"{base}.g_idx").long()
        if not torch.equal(given, of_K):
            raise UnsupportedModelError(
                f"{base} of {files.folder}",
                expected="groups of neighbouring columns (desc_act false)",
                found="columns in another order",
                fix="Take a checkpoint without act-order, or the float one.",
            )
    return _checked(files, base, (q_KN - z_GN[of_K, : q_KN.shape[1]]).T, scale_GN.T)


def _awq(files: Checkpoint, base: str) -> _Integers:
    def ordered(packed: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = _unpacked(packed, 4, 1).unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)
        return numbers

    q_KN, z_GN = ordered(files.read(f"{base}.qweight")), ordered(files.read(f"{base}.qzeros"))
    scale_GN = files.read(f"{base}.scales")
    return _checked(files, base, (q_KN - z_GN.repeat_interleave(len(q_KN) // len(z_GN), 0)).T, scale_GN.T)


def _compressed(files: Checkpoint, base: str, bits: int) -> _Integers:
    scale_NG = files.read(f"{base}.weight_scale")
    scale_NG = scale_NG[:, None] if scale_NG.dim() == 1 else scale_NG
    if f"{base}.weight_packed" in files:
        rows, columns = (int(n) for n in files.read(f"{base}.weight_shape"))
        n_NK = _unpacked(files.read(f"{base}.weight_packed"), bits, 1)[:rows, :columns] - (1 << (bits - 1))
    else:
        n_NK = files.read(f"{base}.weight").to(torch.int16)
    if f"{base}.weight_zero_point" in files:
        z = files.read(f"{base}.weight_zero_point")
        if z.dtype == torch.int32:  # packed along the rows
            z = _unpacked(z, bits, 0)[: len(n_NK)] - (1 << (bits - 1))
        z = z[:, None] if z.dim() == 1 else z
        n_NK = n_NK - z.to(torch.int16).repeat_interleave(n_NK.shape[1] // z.shape[1], 1)
    return _checked(files, base, n_NK, scale_NG)


def _checked(files: Checkpoint, base: str, n_NK: torch.Tensor, scale_NG: torch.Tensor) -> _Integers:
    """Raises ArtifactError: shapes that do not go together."""
    rows, columns = n_NK.shape
    if scale_NG.dim() != 2 or len(scale_NG) != rows or columns % max(1, scale_NG.shape[1]):
        raise ArtifactError(
            f"{base} of {files.folder}",
            expected=f"scales of {rows} rows of {columns}",
            found=str(list(scale_NG.shape)),
            fix="Get the checkpoint again.",
        )
    return _Integers(n_NK.contiguous(), scale_NG.contiguous())
