"""Weights to measure with: one large buffer, filled anew for each format, of which every call gets another part."""

from __future__ import annotations

import torch

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.memory import new_tensor
from torch_pi2.formats import FLOATS, FORMATS, GROUP, row_bytes
from torch_pi2.ops import load

#: Rows made of random numbers; the buffer repeats them.
_BLOCK_BYTES = 4 << 20
#: Standard deviations of random whole numbers of 4 and 8 bits.
_DEVIATION = {"int4": 4.6, "int8": 74.0}


class Weights:
    """Memory of ``nbytes`` bytes.

    Calls take parts that begin anywhere in it: what they read is in a cache as seldom as caches are smaller than it.
    """

    def __init__(self, nbytes: int) -> None:
        load()
        self.raw = new_tensor([nbytes], torch.uint8)
        self.raw.fill_(1)  # a page never written is one page of zeros, read from cache
        self._generator = torch.Generator().manual_seed(0)
        self._rows = self.raw.view(1, -1)

    def fill(self, kind: str, columns: int) -> Weights:
        """Random rows of ``columns`` numbers, ``int4``, ``int8`` or a float type.

        Products with inputs of a standard deviation of 1 have about the same.
        """
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
        """Rows that there are."""
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        return self._rows[:1].nbytes

    def rows(self, count: int) -> torch.Tensor:
        """``count`` neighbouring rows, beginning anywhere."""
        start = int(torch.randint(self.count - count + 1, (), generator=self._generator))
        some: torch.Tensor = self._rows[start : start + count]
        return some

    def neuron_rows(self, neurons: int) -> torch.Tensor:
        """``neurons`` neighbours of three rows, beginning anywhere."""
        some: torch.Tensor = self.rows(3 * neurons).unflatten(0, (-1, 3))
        return some
