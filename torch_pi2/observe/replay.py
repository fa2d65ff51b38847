"""Hit rates of caches of other sizes and policies on recorded accesses (docs/TRACES.md), by the stores' C++ cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from torch_pi2.base.fields import argument
from torch_pi2.base.progress import bar
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError, check_choice
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.policies import OPTIMAL as OPTIMAL
from torch_pi2.observe.policies import CachePolicy, policy_in_python, policy_names, replay_in_python


@dataclass(frozen=True)
class Replayed:
    """One cache on recorded accesses: its ``policy`` and ``slots``, also as ``share`` of the store's; neurons
    ``wanted`` and ``hits``, also as ``hit_rate``; missing slots and their bytes per decoding step or prompt.
    """

    policy: str
    slots: int
    share: float
    cache_bytes: int
    hits: int
    wanted: int
    hit_rate: float
    reads_per_pass: float
    read_bytes_per_pass: float


def replay(
    accesses: Accesses,
    policy: str | type[CachePolicy],
    slots: int,
    *,
    hot_share: float | None = None,
    preload: bool | None = None,
    window: int | None = None,
) -> Replayed:
    """Replay ``accesses`` with a cache of ``slots`` slots and ``policy``: one of the core's, ``optimal``, or a
    :class:`~torch_pi2.CachePolicy`: the class, its registered name or ``FILE.py:CLASS``, which takes longer.
    ``hot_share``, ``preload``, ``window``: as in :class:`~torch_pi2.OffloadConfig`; None: as in the run. The optimum
    uses ``preload`` only. Neurons that the run kept resident (:meth:`~torch_pi2.layers.offloaded.Store.arrange`) stay
    resident unless ``hot_share`` is given. Raises ConfigError: an unknown policy, or sizes out of range.
    """
    run = accesses.run
    resident = run.get("resident") if hot_share is None else None
    kind = _check(policy, hot_share, window)
    given = {"hot_share": hot_share, "preload": preload, "window": window}
    how: list[Any] = [run[name] if value is None else value for name, value in given.items()]
    most, fixed = min(slots, accesses.slots), list(resident or ())
    if kind is None:
        assert isinstance(policy, str)
        counts_L3 = torch.ops.pi2.replay(*accesses.arguments, policy, most, *how, fixed)
    else:
        if how[2]:
            argument(how[2], "window", "Pass window=0.").wrong("0 for a policy in Python")
        work = torch.ops.pi2.replay_work(*accesses.arguments, most, *how[:2], fixed)
        first = list(accumulate((layer.slots for layer in accesses.stored), initial=0))
        counts_L3 = replay_in_python(kind, accesses.layers.tolist(), first, work, most)
        policy = policy if isinstance(policy, str) else policy.name or policy.__name__
    wanted, hits, _ = (int(n) for n in counts_L3.sum(0))
    missed_L = counts_L3[:, 2]
    read_bytes = sum(n * layer.read_bytes for n, layer in zip(missed_L.tolist(), accesses.stored, strict=True))
    passes = max(1, accesses.passes)
    sizes: Any = {"share": slots / accesses.slots, "cache_bytes": slots * accesses.place_bytes}
    found: Any = {"hits": hits, "wanted": wanted, "hit_rate": hits / wanted if wanted else 0.0}
    reads: Any = {"reads_per_pass": int(missed_L.sum()) / passes, "read_bytes_per_pass": read_bytes / passes}
    return Replayed(policy=policy, slots=slots, **sizes, **found, **reads)


def replay_all(
    accesses: Accesses,
    policies: Sequence[str | type[CachePolicy]],
    slots: Sequence[int],
    *,
    progress: bool = False,
    **how: Any,
) -> list[Replayed]:
    """:func:`replay` for every policy and number of slots; a progress bar appears after two seconds."""
    for policy in policies:
        _check(policy, how.get("hot_share"), how.get("window"))
    all_of_them = [(policy, count) for count in slots for policy in policies]
    shown = bar(all_of_them, "replay", progress, delay=2)
    return [replay(accesses, policy, count, **how) for policy, count in shown]


def as_run(accesses: Accesses) -> Replayed:
    """Replay with the settings of the run; the hits are the same if ``accesses.run["whole"]``."""
    return replay(accesses, accesses.run["policy"], accesses.run["slots"])


def slots_of(accesses: Accesses, budget: str) -> int:
    """The number of slots for a budget: ``30%`` of the store's, or as many as fit in ``700MiB``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", budget)
    if match and float(match.group(1)) <= 100:
        return round(float(match.group(1)) / 100 * accesses.slots)
    if match or "%" in budget:
        raise ConfigError("budget", expected="0% to 100%, or bytes", found=repr(budget), fix="Correct it.")
    return min(accesses.slots, parse_bytes(budget) // accesses.place_bytes)


def _check(policy: str | type[CachePolicy], hot_share: float | None, window: int | None) -> type[CachePolicy] | None:
    """The class of a policy in Python; None: one of the core's."""
    kind = policy_in_python(policy)
    if kind is None:
        check_choice("policy", policy, policy_names(), "Choose one of them, or FILE.py:CLASS.")
    if hot_share is not None:
        argument(hot_share, "hot_share").number(0, 1)
    if window is not None:
        argument(window, "window").whole()
    return kind
