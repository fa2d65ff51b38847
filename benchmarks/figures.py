"""What all benchmarks measure alike: rounds that alternate, medians, ranges, ratios, and the counters of a store."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def alternate(names: Sequence[str], rounds: int, run: Callable[[str, int], T]) -> dict[str, list[T]]:
    """By name, what ``run(name, round)`` returned; each round begins with another name."""
    kept: dict[str, list[T]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            kept[name].append(run(name, index))
    return kept


def timed(cases: Mapping[str, Callable[[int], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each case in every round after ``warm_up`` others, cases in turn; they are given the round."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for i in range(warm_up + rounds):
            for name, case in cases.items():
                started = time.perf_counter()
                case(i)
                if i >= warm_up:
                    samples[name].append((time.perf_counter() - started) * 1e3)
    return samples


def medians(by_name: Mapping[str, Iterable[float]], digits: int = 3) -> dict[str, float]:
    return {name: round(statistics.median(values), digits) for name, values in by_name.items()}


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """The least and the most."""
    return [round(min(values), digits), round(max(values), digits)]


def summary(by_name: Mapping[str, Sequence[float]], digits: int = 3) -> dict[str, Any]:
    """Medians by name, and ``spread``: their ranges."""
    return {**medians(by_name, digits), "spread": {name: spread(v, digits) for name, v in by_name.items()}}


def ratios(over: Sequence[Any], under: Sequence[Any]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def of_store(rounds: Sequence[Mapping[str, int]], tokens: int, seconds: float, threads: int) -> dict[str, Any]:
    """What a store did for so many ``tokens``, from its counters in each round.

    ``io_critical_share``: share of the ``seconds`` of all ``threads`` in which computing waited for neurons.
    """
    keys = ("wanted", "hits", "reads", "bytes_read", "evictions", "wait_ns", "late")
    total = {key: sum(stats[key] for stats in rounds) for key in keys}
    return {
        "bytes_read_per_token": round(total["bytes_read"] / tokens),
        "reads_per_token": round(total["reads"] / tokens, 1),
        "late_share": round(total["late"] / total["reads"], 4) if total["reads"] else 0.0,
        "evictions_per_token": round(total["evictions"] / tokens, 1),
        "hit_rate": round(total["hits"] / total["wanted"], 4) if total["wanted"] else None,
        "io_critical_share": round(total["wait_ns"] / 1e9 / threads / seconds, 4),
    }
