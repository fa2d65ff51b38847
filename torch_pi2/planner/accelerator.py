"""How many neurons of each layer an accelerator's memory holds, by integer programs (HiGHS, ``scipy.optimize.milp``).

:func:`choose` is exact over predicted times. :func:`place` is PowerInfer's program (arXiv 2312.12456, section 6.3) over
any tiers of memory: of every layer groups of neurons of like frequency are placed where they save the most time, within
each tier's bytes; a layer uses an accelerator for at least so many neurons that this pays for the start. Where neither
of these two conditions binds it is a sort by frequency. Over a store, whose cache ``choose`` does not see, the solver
takes what is better of both (:func:`caps`): ``place`` has won by up to 6 % there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from torch_pi2.errors import ConfigError
from torch_pi2.planner.choices import Price, Space
from torch_pi2.planner.drive import read_ms
from torch_pi2.planner.request import Task
from torch_pi2.spec.machine_plan import ACCELERATOR_CHUNK

#: Neurons of a group, as in the paper.
GROUP = 64
#: Relative distance to the optimum at which the search ends, and seconds after which it ends in any case.
GAP, SECONDS = 1e-4, 20.0
#: By layer, the most neurons on an accelerator.
Counts = tuple[int, ...]
#: Of all neurons, what memory holds in placements beside an accelerator: whatever the budget is.
_MEMORY_SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Tier:
    """Where neurons may lie.

    Attributes:
        gb_per_s: at which a step reads them there.
        capacity_bytes: for neurons; None: room for all.
        sync_us: what a layer pays if it uses the tier at all (start and merge).
    """

    name: str
    gb_per_s: float
    capacity_bytes: int | None = None
    sync_us: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Where neurons are.

    Attributes:
        tiers: names, the fastest first. counts: by tier, neurons of each layer; the most frequent in the first tier.
        saved_us: of a step, against all neurons in the last tier.
        gap: how far from the optimum this may be, relative; 0: it is the optimum.
    """

    tiers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    saved_us: float
    gap: float


def least_neurons(neuron_bytes: int, fast: Tier, slow: Tier) -> int | None:
    """Neurons from which on a layer gains by ``fast``: ``C_l >= T_sync / (T_slow - T_fast)`` (the paper's formula 4).

    None: never.
    """
    gained = neuron_bytes / (slow.gb_per_s * 1e3) - neuron_bytes / (fast.gb_per_s * 1e3)
    return None if gained <= 0 else math.ceil(fast.sync_us / gained)


def place(
    frequencies: Sequence[np.ndarray],
    neuron_bytes: Sequence[int],
    tiers: Sequence[Tier],
    *,
    group: int = GROUP,
    whole: bool = False,
    seconds: float = SECONDS,
) -> Placement:
    """Place neurons so that a step saves the most time.

    Maximises over binary ``a``: group g is in tier t, and ``y``: layer l uses tier t,
    ``sum a[t,g] * sum_{i in g} f_i * bytes * (1 / GBps_last - 1 / GBps_t)``, where each group is in one tier, tiers
    hold no more than their bytes, and ``C_l * y[t,l] <= neurons of l in t <= K * y[t,l]`` where a tier has a
    ``sync_us`` (``C_l``: :func:`least_neurons` against the next tier).

    Args:
        frequencies: of each layer ``[I]``, the most frequent first: how often a step reads a neuron.
        neuron_bytes: of a neuron of each layer.
        tiers: the fastest first; the last has room for all that is left.
        group: neurons that are placed together.
        whole: the first tier has whole groups only, or all of a layer.
        seconds: for the search. Only if it runs out can results of two runs differ.

    Raises:
        ConfigError: fewer than two tiers, a last tier with a capacity, or no solution in the time given.
    """
    _check(tiers)
    parts = [_groups(f, group) for f in frequencies]
    weight = np.concatenate([sums for _, sums in parts])
    sizes = np.concatenate([counts for counts, _ in parts])
    layer = np.repeat(np.arange(len(parts)), [len(counts) for counts, _ in parts])
    nbytes = np.asarray(neuron_bytes, dtype=np.float64)[layer]
    upper, last, n, n_layers = tiers[:-1], tiers[-1], len(sizes), len(parts)
    gained = np.concatenate([weight * nbytes * (1 / last.gb_per_s - 1 / t.gb_per_s) / 1e3 for t in upper])
    per_tier = n + n_layers  # a, then y
    cost = np.zeros(len(upper) * per_tier)
    bounds = np.ones(len(cost))
    rows = _Program(len(cost))
    for t, tier in enumerate(upper):
        a, y = t * per_tier, t * per_tier + n
        cost[a : a + n] = -gained[t * n : (t + 1) * n]
        if tier.capacity_bytes is not None:
            # In units that every group is some of: half of one more is room for none, and more than HiGHS' tolerance.
            unit = max(1, int(np.gcd.reduce((sizes * nbytes).astype(np.int64))))
            rows.add(np.arange(a, a + n), sizes * nbytes / unit, -np.inf, tier.capacity_bytes // unit + 0.5)
        for index in range(n_layers):
            own = np.flatnonzero(layer == index)
            least = least_neurons(neuron_bytes[index], tier, tiers[t + 1]) if tier.sync_us else 0
            total = int(sizes[own].sum())
            if least is None or least > total:
                bounds[a + own] = bounds[y + index] = 0
            elif least:
                column, value = np.append(a + own, y + index), np.append(sizes[own], -float(least))
                rows.add(column, value, 0.0, np.inf)
                rows.add(column, np.append(sizes[own], -float(total)), -np.inf, 0.0)
            if whole and t == 0 and len(own) > 1 and sizes[own[-1]] < group:
                # The last group, which is no whole one, only with all others.
                rows.add(
                    np.append(a + own[:-1], a + own[-1]), np.append(np.ones(len(own) - 1), 1.0 - len(own)), 0, np.inf
                )
    for g in range(n if len(upper) > 1 else 0):
        rows.add(np.arange(len(upper)) * per_tier + g, np.ones(len(upper)), -np.inf, 1.0)
    fix = "Give it more time, or place larger groups."
    found = rows.solved(cost, bounds, seconds, f"placement of {n} groups in {len(tiers)} tiers", fix)
    taken_TG = np.round(found.x).reshape(len(upper), per_tier)[:, :n]
    counts = []
    for t, tier in enumerate(upper):
        least_L = [
            (least_neurons(size, tier, tiers[t + 1]) or 0) if tier.sync_us else 0 for size in map(int, neuron_bytes)
        ]
        _fit(taken_TG[t], layer, sizes, nbytes, gained[t * n : (t + 1) * n], tier.capacity_bytes, least_L)
        taken = taken_TG[t] * sizes
        counts.append(tuple(int(taken[layer == index].sum()) for index in range(n_layers)))
    rest = tuple(len(f) - sum(c[index] for c in counts) for index, f in enumerate(frequencies))
    gap = float(getattr(found, "mip_gap", 0.0) or 0.0)
    saved_us = float(gained @ taken_TG.reshape(-1))
    return Placement(tuple(t.name for t in tiers), (*counts, rest), saved_us, gap)


def choose(
    costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], capacity: int, *, seconds: float = SECONDS
) -> list[int]:
    """Of each layer's options one, such that their sizes have room together and their costs are least.

    The multiple-choice knapsack, exactly. Each layer's first option must have size 0.

    Args:
        costs, sizes: of the options of each layer.

    Raises:
        ConfigError: no solution in the time given.
    """
    cost = np.concatenate([np.asarray(line, dtype=np.float64) for line in costs])
    if not np.any([len(line) > 1 for line in costs]):
        return [0] * len(costs)
    scale = max(1.0, float(capacity))
    rows, start = _Program(len(cost)), 0
    rows.add(
        np.arange(len(cost)), np.concatenate([np.asarray(line) / scale for line in sizes]), -np.inf, capacity / scale
    )
    starts = []
    for line in costs:
        rows.add(np.arange(start, start + len(line)), np.ones(len(line)), 1.0, 1.0)
        starts.append(start)
        start += len(line)
    what = f"choice among {len(cost)} options of {len(costs)} layers"
    found = rows.solved(cost, 1, seconds, what, "Give it more time.")
    picked = [int(np.argmax(found.x[s : s + len(line)])) for s, line in zip(starts, costs, strict=True)]
    # HiGHS meets constraints but for 1e-6: bytes are hard here.
    while sum(line[n] for line, n in zip(sizes, picked, strict=True)) > capacity:
        index = max(range(len(picked)), key=lambda i: sizes[i][picked[i]])
        picked[index] -= 1
    return picked


def caps(task: Task, space: Space, prices: Sequence[Price]) -> list[Counts | None]:
    """Counts that fit together, each once; the first is none at all. ``[None]``: there is no accelerator to plan for.

    The same neurons are there at all batch sizes: the sum over them counts. In memory the second is the optimum.
    """
    if not task.accelerator_bytes:
        return [None]
    sizes = [[int(a) * layer.bundle_bytes for a in f] for layer, f in zip(task.shape.layers, space.firsts, strict=True)]
    found: list[Counts | None] = [(0,) * len(sizes)]
    for price in dict.fromkeys((prices[0], prices[-1])):
        costs = []
        for index, firsts in enumerate(space.firsts):
            line = [0.0] * len(firsts)
            for batch in task.batches:
                best = space.cost(batch, price)[index, :, : len(firsts)].min(axis=0)
                # What has room there need not be used.
                line = [sum_ + task.weight(batch) * min(best[: n + 1]) for n, sum_ in enumerate(line)]
            costs.append(line)
        picked = choose(costs, sizes, task.accelerator_bytes)
        found.append(tuple(int(f[n]) for f, n in zip(space.firsts, picked, strict=True)))
    return list(dict.fromkeys([*found, *_placed(task, space)]))


def _placed(task: Task, space: Space) -> list[Counts]:
    """PowerInfer's placement, by the frequencies of the smallest batch; over a store for some sizes of memory."""
    theirs, layers = task.hardware.accelerator, task.shape.layers
    assert theirs is not None
    nbytes = [layer.bundle_bytes for layer in layers]
    every = sum(layer.intermediate * layer.bundle_bytes for layer in layers)
    mean = every / len(layers)
    how: dict[str, Any] = {"batch": 1, "hot_bytes": 0, "macs": 0}
    once, twice = (task.hardware.layer_us(layers[0].kernel, cold_bytes=n * mean, **how) for n in (1, 2))
    memory = Tier("memory", mean / max(1e-9, twice - once) / 1e3)
    flash = Tier("flash", task.shape.place_bytes / (read_ms(task.shape, task.hardware) * 1e6))
    speed = max(theirs.stream_gb_per_s, memory.gb_per_s)
    first = Tier(theirs.name, speed, task.accelerator_bytes, theirs.launch_us + theirs.merge_us)
    found = []
    for share in _MEMORY_SHARES if task.stored and flash.gb_per_s < memory.gb_per_s else (None,):
        rest = [memory] if share is None else [replace(memory, capacity_bytes=int(share * every)), flash]
        frequencies = [layer.frequency(task.batches[0]) for layer in layers]
        placed = place(frequencies, nbytes, [first, *rest], group=ACCELERATOR_CHUNK, whole=True).counts[0]
        found.append(tuple(max(int(a) for a in f if a <= n) for f, n in zip(space.firsts, placed, strict=True)))
    return found


def _check(tiers: Sequence[Tier]) -> None:
    if len(tiers) < 2 or tiers[-1].capacity_bytes is not None:
        found = ", ".join(f"{t.name} ({t.capacity_bytes} bytes)" for t in tiers)
        raise ConfigError(
            "tiers of a placement",
            expected="two or more, the last without a capacity",
            found=found or "none",
            fix="End with the tier where everything has room, such as flash.",
        )
    for fast, slow in pairwise(tiers):
        if not fast.gb_per_s >= slow.gb_per_s > 0:
            raise ConfigError(
                f"tiers {fast.name} and {slow.name}",
                expected="the faster first, with GB/s above 0",
                found=f"{fast.gb_per_s:g} and {slow.gb_per_s:g} GB/s",
                fix="Change their order.",
            )


def _fit(
    taken_G: np.ndarray,
    layer_G: np.ndarray,
    sizes_G: np.ndarray,
    nbytes_G: np.ndarray,
    gained_G: np.ndarray,
    capacity: int | None,
    least_L: Sequence[int],
) -> None:
    """Take groups out of a tier, in place, until the rest has room: HiGHS meets constraints but for its tolerance.

    Each time a layer's last one, where that costs least: what is left of it are whole groups. All of a layer of which
    fewer than ``least_L`` neurons would be left.
    """
    while capacity is not None and int((taken_G * sizes_G * nbytes_G).sum()) > capacity:
        options = []
        for index in set(layer_G[taken_G > 0].tolist()):
            own = np.flatnonzero((layer_G == index) & (taken_G > 0))
            out = own[-1:] if sizes_G[own[:-1]].sum() >= max(1, least_L[index]) else own
            options.append((float(gained_G[out].sum()), index, out))
        taken_G[min(options, key=lambda option: option[:2])[2]] = 0


def _groups(frequency_I: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Neurons of each group, and the sum of their frequencies."""
    starts = np.arange(0, len(frequency_I), group)
    counts = np.minimum(group, len(frequency_I) - starts)
    return counts.astype(np.float64), np.add.reduceat(np.asarray(frequency_I, dtype=np.float64), starts)


class _Program:
    """An integer program: rows of a sparse constraint matrix, with their bounds."""

    def __init__(self, columns: int) -> None:
        self.count, self._columns = 0, columns
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add(self, columns: np.ndarray, values: np.ndarray, lower: float, upper: float) -> None:
        self._entries.append((np.full(len(columns), self.count), columns, np.asarray(values, dtype=np.float64)))
        self._lower.append(lower)
        self._upper.append(upper)
        self.count += 1

    def solved(self, cost: np.ndarray, bounds: Any, seconds: float, what: str, fix: str) -> Any:
        """The whole numbers of 0 to ``bounds`` that cost least, as scipy gives them.

        Raises:
            ConfigError: none was found in that time; ``what`` it is of, and how to ``fix`` it.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        constraints = []
        if self.count:
            row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
            matrix = csr_array((value, (row, column)), shape=(self.count, self._columns))
            constraints = [LinearConstraint(matrix, np.array(self._lower), np.array(self._upper))]
        found = milp(
            cost,
            integrality=np.ones(len(cost)),
            bounds=Bounds(0, bounds),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        if found.x is None:
            expected = f"a solution in {seconds:g} seconds"
            raise ConfigError(what, expected=expected, found=str(found.message), fix=fix)
        return found
