"""The memory roofline: plain reads of bytes at streaming speed, and of neurons at gather speed."""

from __future__ import annotations

import time

import torch

from torch_pi2.ops import load

#: Larger than any cache.
BYTES = 1 << 30


class Memory:
    """A buffer of at least ``size`` bytes as neurons of ``neuron_bytes``, read by plain loads on torch's threads.

    Args:
        share: of the neurons that a gathered read takes, in ascending order, drawn anew each time.
    """

    def __init__(self, neuron_bytes: int, share: float, *, size: int = BYTES, seed: int = 0) -> None:
        load()
        self._neuron_rows = torch.empty((-(-size // neuron_bytes), neuron_bytes), dtype=torch.uint8)
        torch.ops.pi2.advise_huge_pages(self._neuron_rows)
        self._neuron_rows.fill_(1)  # a page never written is one page of zeros, read from cache
        self._generator = torch.Generator().manual_seed(seed)
        self._count = max(1, round(len(self._neuron_rows) * share))

    def read_gb_per_s(self) -> float:
        """One pass over everything."""
        started = time.perf_counter()
        torch.ops.pi2.plain_read(self._neuron_rows, None)
        return self._neuron_rows.nbytes / (time.perf_counter() - started) / 1e9

    def gather_gb_per_s(self) -> float:
        """A random set of neurons, after the pass above: nothing of it is in a cache."""
        ids = torch.randperm(len(self._neuron_rows), generator=self._generator)[: self._count].sort().values
        started = time.perf_counter()
        torch.ops.pi2.plain_read(self._neuron_rows, ids)
        return self._count * self._neuron_rows.shape[1] / (time.perf_counter() - started) / 1e9
