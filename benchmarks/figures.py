"""What all benchmarks do alike: settings that are checked, rounds that alternate, medians, ranges and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torch_pi2.errors import ConfigError

T = TypeVar("T")


def at_least(least: int, **settings: int) -> None:
    """Raises ConfigError: one of ``settings`` is less."""
    for name, value in settings.items():
        if value < least:
            raise ConfigError(name, expected=f"{least} or more", found=str(value), fix="Choose a larger number.")


def known(what: str, found: Iterable[str], allowed: Collection[str]) -> None:
    """Raises ConfigError: a name that is not one of ``allowed``."""
    for name in found:
        if name not in allowed:
            raise ConfigError(what, expected=" or ".join(allowed), found=name, fix="Choose one of them.")


def alternate(names: Sequence[str], rounds: int, run: Callable[[str, int], T]) -> dict[str, list[T]]:
    """By name, what ``run(name, round)`` gave; each round begins with another name."""
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


def way_rows(ways: Mapping[str, Any], ratio: str, answers: int, digits: int) -> list[tuple[str, ...]]:
    """For a table: ``ms`` of each way, its ``ratio``, their spreads, and the same tokens in how many."""

    def shown(found: Mapping[str, Any], name: str, digits: int) -> tuple[str, str]:
        low, high = found["spread"][name]
        return f"{found[name]:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"

    return [
        (
            way,
            *shown(found, "ms", digits),
            *shown(found, ratio, 2),
            "-" if found["same"] is None else f"{found['same']} of {answers}",
        )
        for way, found in ways.items()
    ]


def over(rates: Mapping[str, Sequence[float]], first: str) -> dict[str, list[float]]:
    """By every other name, how many times as fast ``first`` is, within each round."""
    others = [name for name in rates if name != first]
    return {name: [a / b for a, b in zip(rates[first], rates[name], strict=True)] for name in others}


def of_store(rounds: Sequence[Mapping[str, int]], tokens: int, seconds: float, threads: int) -> dict[str, Any]:
    """What a store did for so many ``tokens``, of its counters in each round.

    ``io_critical_share``: of the ``seconds`` of all ``threads``, what computing waited for neurons.
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


def shown(value: float | None, text: Callable[[float], str]) -> str:
    """Nothing where nothing was measured."""
    return "" if value is None else text(value)


def label(result: Mapping[str, Any]) -> str:
    """The last line of what is printed: whether the figures are of random weights."""
    return f"(synthetic: {result['synthetic']})" if result["synthetic"] else "(a real model: speed only)"
