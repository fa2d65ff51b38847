"""Recorded accesses, replayed: hits over time with the run's cache, and with caches of other sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from torch_pi2.base.progress import bar
from torch_pi2.errors import check_made_from
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.replay import OPTIMAL, replay, replay_all
from torch_pi2.report.facts import Cache, CacheSize

#: Policies that are compared, beside the run's.
POLICIES = ("lru", "lfu")
_WINDOWS = 24
_SIZES = 10
#: Neurons wanted from which on fewer replays are made: one of as many takes a second or two.
_MANY = 50_000_000


def read_accesses(path: str | Path, model_hash: str, *, progress: bool = False) -> Cache:
    """Replay the recording in ``path``.

    Args:
        model_hash: of the weights whose report it is. progress: a bar, if it takes over two seconds.

    Raises:
        ArtifactError: missing or damaged. StaleArtifactError: recorded with other weights.
    """
    accesses = Accesses.load(path)
    check_made_from(
        str(path),
        accesses.model_hash,
        model_hash,
        "accesses of FFN weights",
        "Record them with this model (torch_pi2.record_accesses).",
    )
    run = accesses.run
    many = run["wanted"] > _MANY
    policies = list(dict.fromkeys((run["policy"], *POLICIES)))
    ends = _ends(accesses, _WINDOWS // 4 if many else _WINDOWS)
    shares = [round(accesses.slots * n / _SIZES) for n in range(1, _SIZES + 1)][:: 2 if many else 1]
    swept = replay_all(accesses, [*policies, OPTIMAL], shares, progress=progress)
    by_size = {slots: [made for made in swept if made.slots == slots] for slots in dict.fromkeys(shares)}
    return Cache(
        where=Path(path).name,
        calls=len(accesses.layers),
        passes=accesses.passes,
        policy=run["policy"],
        share=run["slots"] / accesses.slots,
        hit_rate=run["hits"] / max(1, run["wanted"]),
        whole=run["whole"],
        windows=tuple(passes for passes, _ in ends),
        over_time=_over_time(accesses, policies, [calls for _, calls in ends], progress),
        sizes=tuple(
            CacheSize(made[0].share, made[0].cache_bytes, {m.policy: m.hit_rate for m in made})
            for made in by_size.values()
        ),
    )


def _ends(accesses: Accesses, windows: int) -> list[tuple[int, int]]:
    """Where stretches of the recording end, of nearly as many passes each: (passes, calls) until there."""
    layers = accesses.layers
    one = len(accesses.stored) == 1
    anew = torch.ones(max(0, len(layers) - 1), dtype=torch.bool) if one else layers[1:] < layers[:-1]
    begins = [*(torch.nonzero(anew).flatten() + 1).tolist(), len(layers)]  # of the second pass, ..., and the end
    count = min(windows, accesses.passes)
    return [(last, begins[last - 1]) for n in range(1, count + 1) if (last := n * accesses.passes // count)]


def _over_time(
    accesses: Accesses, policies: list[str], ends: list[int], progress: bool
) -> dict[str, tuple[float, ...]]:
    """By policy the hit rate in each stretch: the beginning is replayed up to each end, and the hits subtracted."""
    parts = [_beginning(accesses, calls) for calls in ends]
    every = [(policy, part) for policy in policies for part in parts]
    shown = bar(every, "replay in windows", progress, delay=2)
    made = [replay(part, policy, accesses.run["slots"]) for policy, part in shown]
    found: dict[str, tuple[float, ...]] = {}
    for number, policy in enumerate(policies):
        sums = [(0, 0), *((m.hits, m.wanted) for m in made[number * len(parts) : (number + 1) * len(parts)])]
        found[policy] = tuple((b[0] - a[0]) / max(1, b[1] - a[1]) for a, b in pairwise(sums))
    return found


def _beginning(accesses: Accesses, calls: int) -> Accesses:
    """The first ``calls`` calls."""
    bits = accesses.wanted[: int(accesses.ends[calls - 1])] if calls else accesses.wanted[:0]
    return replace(accesses, layers=accesses.layers[:calls], streamed=accesses.streamed[:calls], wanted=bits)
