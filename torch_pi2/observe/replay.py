"""What caches of other sizes and policies would have had of recorded accesses (docs/TRACES.md).

The C++ core replays with the cache that runs in a store, so that what is compared is what would run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_pi2.base.progress import bar
from torch_pi2.base.units import parse_bytes
from torch_pi2.errors import ConfigError, check_choice
from torch_pi2.observe.accesses import Accesses
from torch_pi2.ops.constants import lists

#: No policy, but what none can surpass: it knows what is going to be wanted (Belady 1966).
OPTIMAL = "optimal"


@dataclass(frozen=True)
class Replayed:
    """One cache on recorded accesses.

    Attributes:
        policy: of the core's policies, or ``optimal``. slots: of the cache. share: of all slots of the store.
        cache_bytes: what the cache takes. hit_rate: of the neurons wanted, those that were there.
        hits, wanted: neurons. reads_per_pass: slots that were not there; read_bytes_per_pass: their bytes. A pass is a
            token when one sequence is decoded, and a prompt.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    accesses: Accesses,
    policy: str,
    slots: int,
    *,
    hot_share: float | None = None,
    preload: bool | None = None,
    window: int | None = None,
    resident: Sequence[int] | None = None,
) -> Replayed:
    """Replay ``accesses`` with a cache of ``slots`` slots.

    Args:
        policy: one of the core's (``torch_pi2.ops.constants.lists().policies``), or ``optimal``.
        hot_share, preload, window: as in :class:`~torch_pi2.OffloadConfig`; None: those of the run. The optimum begins
            with the same neurons, and reads neither of the others.
        resident: neurons by layer that are there from the beginning and never leave, as
            :meth:`~torch_pi2.layers.offloaded.Store.arrange` has them, in the place of ``hot_share``; where there is no
            room for all of them, the most frequent. None: as in the run, unless ``hot_share`` is given.

    Raises:
        ConfigError: an unknown policy, or sizes that make no sense.
    """
    _check(policy, slots, hot_share, window)
    run = accesses.run
    if resident is None and hot_share is None:
        resident = run.get("resident")
    _check_resident(resident, accesses)
    counts_L3 = torch.ops.pi2.replay(
        *accesses.arguments,
        policy,
        min(slots, accesses.slots),
        run["hot_share"] if hot_share is None else hot_share,
        run["preload"] if preload is None else preload,
        run["window"] if window is None else window,
        [] if resident is None else list(resident),
    )
    wanted, hits, _ = (int(n) for n in counts_L3.sum(0))
    missed_L = counts_L3[:, 2]
    read_bytes = sum(n * layer.read_bytes for n, layer in zip(missed_L.tolist(), accesses.stored, strict=True))
    passes = max(1, accesses.passes)
    return Replayed(
        policy=policy,
        slots=slots,
        share=slots / accesses.slots,
        cache_bytes=slots * accesses.place_bytes,
        hits=hits,
        wanted=wanted,
        hit_rate=hits / wanted if wanted else 0.0,
        reads_per_pass=int(missed_L.sum()) / passes,
        read_bytes_per_pass=read_bytes / passes,
    )


def replay_all(
    accesses: Accesses, policies: Sequence[str], slots: Sequence[int], *, progress: bool = False, **how: Any
) -> list[Replayed]:
    """:func:`replay`, for each number of slots with each policy; with a progress bar if it takes over two seconds."""
    for policy in policies:
        _check(policy, min(slots, default=0), how.get("hot_share"), how.get("window"))
    all_of_them = [(policy, count) for count in slots for policy in policies]
    shown = bar(all_of_them, "replay", progress, delay=2)
    return [replay(accesses, policy, count, **how) for policy, count in shown]


def lru_curve(accesses: Accesses, shares: Sequence[float]) -> list[tuple[float, float]]:
    """(share of the store's slots, hit rate) of an LRU cache that is empty at first, with nothing fixed.

    From one count of stack distances (Mattson et al. 1970): how many other slots were used since a slot was last used,
    when its call begins. Among the slots of one call the order is that of the file, where a cache has what it found
    before what it read: a few neurons of a large call may go the other way than in :func:`replay`.
    """
    distances_D = torch.ops.pi2.replay_distances(*accesses.arguments)
    within_D = torch.cumsum(distances_D, 0)
    wanted = max(1, int(within_D[-1]))

    def rate(share: float) -> float:
        slots = round(share * accesses.slots)
        return int(within_D[min(slots, accesses.slots) - 1]) / wanted if slots else 0.0

    return [(share, rate(share)) for share in shares]


def as_run(accesses: Accesses) -> Replayed:
    """Replay with the settings of the run: where ``accesses.run["whole"]`` is set, its hits are those of the run."""
    return replay(accesses, accesses.run["policy"], accesses.run["slots"])


def slots_of(accesses: Accesses, budget: str) -> int:
    """``30%`` of the store's slots, or as many as fit ``700MiB``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", budget)
    if match and float(match.group(1)) <= 100:
        return round(float(match.group(1)) / 100 * accesses.slots)
    if match or "%" in budget:
        raise ConfigError("budget", expected="0% to 100%, or bytes", found=repr(budget), fix="Correct it.")
    return min(accesses.slots, parse_bytes(budget) // accesses.place_bytes)


def _check_resident(resident: Sequence[int] | None, accesses: Accesses) -> None:
    neurons = [layer.neurons for layer in accesses.stored]
    if resident is None or (
        len(resident) == len(neurons) and all(0 <= n <= most for n, most in zip(resident, neurons, strict=True))
    ):
        return
    raise ConfigError(
        "resident",
        expected=f"a number of neurons for each of {len(neurons)} layers, at most those that it has",
        found=f"{len(resident)} numbers" if len(resident) != len(neurons) else str(list(resident)),
        fix="Correct it, or take it from a plan of this model.",
    )


def _check(policy: str, slots: int, hot_share: float | None, window: int | None) -> None:
    check_choice("policy", policy, (*lists().policies, OPTIMAL), "Choose one of them.")
    for name, value, most in (("slots", slots, None), ("hot_share", hot_share, 1), ("window", window, None)):
        if value is not None and not 0 <= value <= (value if most is None else most):
            raise ConfigError(
                name, expected="0 or more" if most is None else "0 to 1", found=str(value), fix="Correct it."
            )
