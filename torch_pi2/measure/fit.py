"""Timing calls in turn, and fitting lines to their times."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from torch_pi2.machine.hardware import Line
from torch_pi2.machine.reads import six_digits

#: Least passes over all cases; the median of three excludes the first, which warms up.
_LEAST_PASSES = 3

#: Prepares a call on new data.
Ready = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Size:
    """Work of one call: bytes and multiply-adds, as in :class:`~torch_pi2.machine.hardware.Line`."""

    hot: float = 0.0
    cold: float = 0.0
    gate: float = 0.0
    macs: float = 0.0


@dataclass(frozen=True)
class Case:
    """A call to time for the line ``key`` at ``tokens`` tokens; ``ready`` prepares it, untimed."""

    key: str
    tokens: int
    size: Size
    ready: Ready


class Samples:
    """Sizes and microseconds by line and tokens."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[tuple[Size, float]]] = defaultdict(list)

    def add(self, case: Case, us: float) -> None:
        self._found[case.key, case.tokens].append((case.size, us))

    def lines(self, key: str) -> tuple[Line, ...]:
        """Lines of ``key``, ascending by tokens."""
        found = sorted(tokens for name, tokens in self._found if name == key)
        lines = [fit(tokens, self._found[key, tokens]) for tokens in found]
        for i, tokens in enumerate(found[1:], 1):  # no exact gate in large batches
            if not any(size.gate for size, _ in self._found[key, tokens]):
                lines[i] = replace(lines[i], us_per_gate_mb=lines[i - 1].us_per_gate_mb)
        return tuple(lines)


def fit(tokens: int, samples: Sequence[tuple[Size, float]]) -> Line:
    """Non-negative least squares of the relative errors, so that small calls count like large ones."""
    import numpy as np
    from scipy.optimize import nnls

    sizes = [(1.0, s.hot * 1e-6, s.cold * 1e-6, s.gate * 1e-6, s.macs * 1e-6) for s, _ in samples]
    relative = np.array(sizes) / np.array([us for _, us in samples])[:, None]
    # normalised columns: the active set does not depend on units
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    found, _ = nnls(relative / scale, np.ones(len(samples)))
    error = float(np.abs(relative @ (found / scale) - 1).mean())
    call, hot, cold, gate, macs = (six_digits(float(c)) for c in found / scale)
    return Line(tokens, call, hot, cold, gate, macs, six_digits(error))


@torch.inference_mode()
def time_into(samples: Samples, cases: Iterable[Case], seconds: float) -> None:
    """Time all cases in turn for ``seconds``, at least three times; add medians to ``samples``."""
    cases = list(cases)
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    while not times or len(times[-1]) < _LEAST_PASSES or time.perf_counter() < end:
        for case, found in zip(cases, times, strict=True):
            found.append(_us(case.ready()))
    for case, found in zip(cases, times, strict=True):
        samples.add(case, statistics.median(found))


@torch.inference_mode()
def median_us(ready: Ready, *, least: int = 3, seconds: float = 0.0) -> float:
    """Median microseconds of at least ``least`` calls over ``seconds``, after one to warm up."""
    ready()()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        found.append(_us(ready()))
    return statistics.median(found)


def _us(call: Callable[[], object]) -> float:
    """By the operators' own clock, without call overhead; else by the wall clock."""
    torch.ops.pi2.timings(True)
    started = time.perf_counter()
    call()
    wall = (time.perf_counter() - started) * 1e6
    inside = float(torch.ops.pi2.timings(True)[:, 4].sum()) / 1e3
    return inside or wall
