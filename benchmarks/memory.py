"""The two lines every figure is held against: bytes at streaming speed and bundles at gather speed."""

from __future__ import annotations

import time

import torch

from torch_pi2.ops import load

#: Larger than any cache; the issue asks for at least this.
BYTES = 1 << 30


class Memory:
    """A buffer of at least ``size`` bytes as bundles of ``bundle_bytes``, read by plain loads on torch's threads.

    Args:
        share: of the bundles that a gathered read takes, in rising order, drawn anew each time.
    """

    def __init__(self, bundle_bytes: int, share: float, *, size: int = BYTES, seed: int = 0) -> None:
        load()
        self._bundles = torch.empty((-(-size // bundle_bytes), bundle_bytes), dtype=torch.uint8)
        torch.ops.pi2.advise_huge_pages(self._bundles)
        self._bundles.fill_(1)  # a page never written is one page of zeros, read from cache
        self._generator = torch.Generator().manual_seed(seed)
        self._count = max(1, round(len(self._bundles) * share))

    def read_gb_per_s(self) -> float:
        """One pass over everything."""
        started = time.perf_counter()
        torch.ops.pi2.read_bundles(self._bundles, None)
        return self._bundles.nbytes / (time.perf_counter() - started) / 1e9

    def gather_gb_per_s(self) -> float:
        """A random set of bundles, after the pass above: nothing of it is in a cache."""
        ids = torch.randperm(len(self._bundles), generator=self._generator)[: self._count].sort().values
        started = time.perf_counter()
        torch.ops.pi2.read_bundles(self._bundles, ids)
        return self._count * self._bundles.shape[1] / (time.perf_counter() - started) / 1e9
