"""Storage read rates by block size, range and queue depth, and their interpolation.

In a closed loop with depth d and r(d) reads a second, each read takes d / r(d). Times are made monotone: larger blocks,
wider ranges and deeper queues never make a read faster.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NoReturn

from torch_pi2.base.fields import MISSING, Field, limited

#: Depths that a plan may choose.
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
#: Share of the highest rate that a depth must reach.
_ENOUGH = 0.97

Key = tuple[int, int, int]

FIX = "Measure again with `torch-pi2 doctor --measure`, or correct the file; its format is in docs/HARDWARE.md."


def wrong(path: str, expected: str, found: object) -> NoReturn:
    """Raises ArtifactError for the field ``path`` of a hardware profile."""
    Field(MISSING if found is None else found, path, FIX).wrong(expected)


@dataclass(frozen=True)
class ReadRate:
    """Random reads a second of ``block_bytes`` each over ``range_bytes``, at queue depth ``depth``."""

    block_bytes: int = limited(1)
    range_bytes: int = limited(1)
    depth: int = limited(1)
    reads_per_s: float = limited(above=True)


@dataclass(frozen=True)
class Reads:
    """Read rates of one drive.

    Attributes:
        engine: the fastest read engine. direct: bypasses the page cache. warm: two passes over the file took the same
            time before the measurement; else a virtual disk's own cache was cold and figures are too low.
        file_bytes: of the test file. stream_gb_per_s: large sequential reads.
        cpu_us_per_read: CPU time of a small read, kernel and engine together.
        rates: a row for every combination of blocks, ranges and depths.
    """

    engine: str = ""
    direct: bool = False
    warm: bool = False
    file_bytes: int = limited(default=0)
    stream_gb_per_s: float = limited(above=True, default=1.0)
    cpu_us_per_read: float = limited(default=0.0)
    rates: tuple[ReadRate, ...] = ()

    @cached_property
    def _table(self) -> tuple[list[list[float]], dict[Key, float]]:
        """Points of the three axes, and microseconds of a read there."""
        rows = {(r.block_bytes, r.range_bytes, r.depth): r for r in self.rates}
        axes = [sorted({float(key[axis]) for key in rows}) for axis in range(3)]
        return axes, {key: row.depth / row.reads_per_s * 1e6 for key, row in rows.items()}

    def latency_us(self, block_bytes: float, range_bytes: float, depth: float) -> float:
        """Microseconds of each of ``depth`` reads: log-linear between points; outside, nearest bandwidth or rate."""
        axes, latency = self._table
        wanted = (float(block_bytes), float(range_bytes), float(depth))
        found = [_around(points, value) for points, value in zip(axes, wanted, strict=True)]
        log = 0.0
        for corner in product(*found):
            weight = math.prod(share for _, share in corner)
            if weight > 0:
                key = (int(corner[0][0]), int(corner[1][0]), int(corner[2][0]))
                log += weight * math.log(latency[key])
        return math.exp(log) * max(1.0, wanted[0] / axes[0][-1]) * max(1.0, wanted[2] / axes[2][-1])

    def us(self, reads: float, block_bytes: float, range_bytes: float, depth: float) -> float:
        """Microseconds of ``reads`` random reads of ``block_bytes`` over ``range_bytes``, up to ``depth`` at once."""
        if reads <= 0:
            return 0.0
        under_way = max(1.0, min(float(depth), float(reads)))
        return reads * self.latency_us(block_bytes, range_bytes, under_way) / under_way

    def stream_us(self, nbytes: float) -> float:
        """Microseconds of one large sequential read."""
        return nbytes / self.stream_gb_per_s * 1e-3

    def best_depth(self, block_bytes: float, range_bytes: float) -> int:
        """The smallest depth with 97 % of the highest rate."""
        per_s = {depth: depth / self.latency_us(block_bytes, range_bytes, depth) for depth in DEPTHS}
        enough = _ENOUGH * max(per_s.values())
        return next(depth for depth in DEPTHS if per_s[depth] >= enough)


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def monotone(rows: Sequence[ReadRate]) -> tuple[ReadRate, ...]:
    """Measured rows, with times made monotone in block, range and depth.

    A time becomes the geometric mean of the longest among rows no larger in any axis, and the shortest among rows no
    smaller in any: both grow with every axis.
    """
    found = {(r.block_bytes, r.range_bytes, r.depth): r.depth / r.reads_per_s for r in rows}
    made = []
    for key in sorted(found):
        longest = max(t for other, t in found.items() if all(a <= b for a, b in zip(other, key, strict=True)))
        shortest = min(t for other, t in found.items() if all(a >= b for a, b in zip(other, key, strict=True)))
        made.append(ReadRate(*key, reads_per_s=six_digits(key[2] / math.sqrt(longest * shortest))))
    return tuple(made)


def check_reads(reads: Reads, where: str) -> None:
    """Raises ArtifactError: the table is empty or has gaps."""
    found = {(r.block_bytes, r.range_bytes, r.depth) for r in reads.rates}
    if not found or len(found) < len(reads.rates) or len(found) < math.prod(map(len, map(set, zip(*found)))):
        expected = "one row for every combination of its blocks, ranges and depths"
        wrong(f"{where}, rates", expected, f"{len(reads.rates)} rows")


def _around(points: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The points around ``value`` with their log-linear weights."""
    above = bisect_left(points, value)
    if above == 0 or above == len(points):
        return [(points[min(above, len(points) - 1)], 1.0)]
    low, high = points[above - 1], points[above]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
