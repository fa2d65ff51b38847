"""Weights to measure with: a large buffer, refilled for each format; every call gets a different part."""

from __future__ import annotations

import torch

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.memory import new_tensor
from torch_pi2.formats import FLOATS, FORMATS, GROUP, row_bytes
from torch_pi2.ops import load

#: Bytes of distinct random rows, which the buffer repeats.
_BLOCK_BYTES = 4 << 20
#: Standard deviations of uniform 4-bit and 8-bit integers.
_DEVIATION = {"int4": 4.6, "int8": 74.0}


class Weights:
    """A buffer of ``nbytes`` bytes. Parts start at random rows, so that caches rarely hold them."""

    def __init__(self, nbytes: int) -> None:
        load()
        self.raw = new_tensor([nbytes], torch.uint8)
        self.raw.fill_(1)  # untouched pages map to one cached page of zeros
        self._generator = torch.Generator().manual_seed(0)
        self._rows = self.raw.view(1, -1)

    def fill(self, kind: str, columns: int) -> Weights:
        """Fill with random rows of ``columns`` numbers in format ``kind``; products keep unit variance."""
        rows = self._some(kind, columns)
        whole, width = self.raw.view(rows.dtype), rows.shape[1]
        self._rows = whole[: whole.numel() // width * width].view(-1, width)
        for part in self._rows.split(len(rows)):
            part.copy_(rows[: len(part)])
        return self

    def _some(self, kind: str, columns: int) -> torch.Tensor:
        if kind in FLOATS:
            count = max(1, _BLOCK_BYTES // (4 * columns))
            numbers = torch.randn((count, columns), generator=self._generator).mul_(columns**-0.5)
            return numbers.to(DTYPES[kind])
        size = row_bytes(kind, columns)
        count, groups = max(1, _BLOCK_BYTES // size), -(-columns // GROUP)
        rows = torch.randint(256, (count, size), generator=self._generator, dtype=torch.uint8)
        scale = torch.tensor(columns**-0.5 / _DEVIATION[kind], dtype=torch.float16)
        rows[:, groups * FORMATS[kind].group_bytes :] = scale.repeat(groups).view(torch.uint8)
        return rows

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        return self._rows[:1].nbytes

    def rows(self, count: int) -> torch.Tensor:
        """``count`` adjacent rows from a random start."""
        start = int(torch.randint(self.count - count + 1, (), generator=self._generator))
        return self._rows[start : start + count]

    def neuron_rows(self, neurons: int) -> torch.Tensor:
        """``neurons`` adjacent neurons of three rows from a random start."""
        return self.rows(3 * neurons).unflatten(0, (-1, 3))
