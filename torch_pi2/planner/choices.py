"""The choices that a plan has: which hot counts a layer may have, what each costs, and the best of a layer at a price.

In memory layers do not depend on each other: of each the best is found by looking at every count. What couples them,
room in a cache, in an accelerator, or a floor of quality, is given a price (Lagrange multipliers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pi2.planner.layer_cost import TIMES, expert_use, layer_curve, predicted_share
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.machine_plan import ACCELERATOR_CHUNK
from torch_pi2.types.method import Method

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Hot neurons are a multiple of this (64 keeps runs of neurons whole pages), or ``base_hot``, or all.
STEP = 64
#: Counts whose time differs by less are as good as each other: the fewer hot.
NEAR = 0.01
#: Prices of a slot of the cache, in missed slots a step: what the rarest neuron is worth that a cache still holds.
_SLOT_PRICES = (1.0, 0.6, 0.35, 0.2, 0.1, 0.05, 0.02)
#: Of a read's time, the share that computing does not hide.
_EXPOSED = (1.0, 0.3)


@dataclass(frozen=True)
class Price:
    """What a candidate is made with: ``read_ms`` for each missed slot, ``slot`` misses for a slot of the cache.

    ``stream``: what a missed hot slot is worth in misses: hot ones lie together and come in one read.
    """

    read_ms: float = 0.0
    slot: float = 1.0
    stream: float = 1.0


def prices(read_ms: float, stream_ms: float) -> tuple[Price, ...]:
    """Those that are tried over a store, whatever its cache: so a larger one has no fewer candidates.

    Args:
        read_ms: of a slot among others, anywhere. stream_ms: of one of many in a row.
    """
    stream = min(1.0, stream_ms / read_ms) if read_ms > 0 else 1.0
    return (Price(), *(Price(read_ms * share, slot, stream) for share in _EXPOSED for slot in _SLOT_PRICES))


def hot_counts(layer: LayerShape, step: int = STEP) -> np.ndarray:
    """Hot counts that a layer may have, ascending: ``base_hot``, multiples of ``step`` beyond, and all neurons.

    ``base_hot`` alone where the plan's count is part of the method (dense, threshold) and of experts, of which none is
    hot.
    """
    fixed = layer.method in (Method.DENSE, Method.THRESHOLD) or layer.experts > 1 or layer.chosen < 1
    if fixed or layer.base_hot >= layer.intermediate:
        return np.array([layer.base_hot])
    first = (layer.base_hot // step + 1) * step
    return np.array([layer.base_hot, *range(first, layer.intermediate, step), layer.intermediate])


@dataclass(frozen=True)
class Choice:
    """By layer: hot neurons, and of them those of an accelerator."""

    hot: tuple[int, ...]
    accelerator: tuple[int, ...]


class Space:
    """Every hot count of every layer, with its time at each batch size.

    Args:
        accelerated: whether an accelerator may compute hot neurons: all counts are then multiples of its chunk.
        ticks: what is iterated over, for a progress bar.

    Attributes:
        fixed: whether what has room on an accelerator is computed there whatever the batch: it holds the rest, too.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        batches: Sequence[int],
        *,
        accelerated: bool = False,
        ticks: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        self.shape, self.hardware, self.batches = shape, hardware, tuple(batches)
        step = ACCELERATOR_CHUNK if accelerated else STEP
        theirs = hardware.accelerator
        self.fixed = accelerated and theirs is not None and theirs.holds_rest
        self.hots = [hot_counts(layer, step) for layer in shape.layers]
        self.firsts = [self._firsts(layer, hots) if accelerated else np.array([0]) for layer, hots in self._each()]
        widest = max(len(h) for h in self.hots), max(len(a) for a in self.firsts)
        self._ms = {batch: np.full((len(self.hots), *widest), np.inf) for batch in self.batches}
        self._hot_LN = _padded(self.hots, widest[0])
        self._first_LN = _padded(self.firsts, widest[1])
        for index in ticks(range(len(shape.layers))):
            for batch in self.batches:
                self._fill(index, batch)

    def _each(self) -> Iterable[tuple[LayerShape, np.ndarray]]:
        return zip(self.shape.layers, self.hots, strict=True)

    @staticmethod
    def _firsts(layer: LayerShape, hots: np.ndarray) -> np.ndarray:
        """Counts that an accelerator may have: whole chunks, or all. None of a layer of which nothing may be hot."""
        if layer.experts > 1 or layer.chosen < 1 or layer.method == Method.THRESHOLD:
            return np.array([0])
        most = int(hots[-1])
        whole = list(range(0, most + 1, ACCELERATOR_CHUNK))
        return np.array(whole if most % ACCELERATOR_CHUNK == 0 or most < layer.intermediate else [*whole, most])

    def _fill(self, index: int, batch: int) -> None:
        layer, hots, firsts = self.shape.layers[index], self.hots[index], self.firsts[index]
        hot_N, first_N = (grid.ravel() for grid in np.meshgrid(hots, firsts, indexing="ij"))
        allowed = first_N <= hot_N
        curve = layer_curve(
            layer,
            self.hardware,
            batch,
            hot_N[allowed],
            accelerator=first_N[allowed],
            model_bytes=self.shape.weight_bytes,
        )
        ms_N = np.full(len(hot_N), np.inf)
        ms_N[allowed] = sum(curve[part] for part in TIMES)
        self._ms[batch][index, : len(hots), : len(firsts)] = ms_N.reshape(len(hots), len(firsts))

    def ms(self, batch: int) -> np.ndarray:
        """Float64 ``[layers, hot counts, accelerator counts]``: milliseconds in memory; inf: no such choice."""
        return self._ms[batch]

    def slot_use(self, batch: int, price: Price) -> np.ndarray:
        """Missed slots a step of each choice, where a slot of the cache is worth some misses; shape as :meth:`ms`.

        A neuron that is wanted in the share p of steps costs p misses outside the cache and ``price.slot`` inside it,
        and is where it costs less. A hot one is wanted in every step, one that an accelerator has in none.
        """
        found = np.zeros(self._ms[batch].shape)
        for index, layer in enumerate(self.shape.layers):
            hots, firsts = self.hots[index], self.firsts[index]
            rest_H = np.append(np.cumsum(np.minimum(wanted(layer, batch), price.slot)[::-1])[::-1], 0.0)
            use = min(price.slot, price.stream) * np.maximum(hots[:, None] - firsts[None, :], 0) + rest_H[hots][:, None]
            found[index, : len(hots), : len(firsts)] = use / layer.cluster
        return found

    def cost(self, batch: int, price: Price) -> np.ndarray:
        """Milliseconds and misses at ``price``; shape as :meth:`ms`."""
        ms = self.ms(batch)
        return ms if price.read_ms == 0 else ms + price.read_ms * self.slot_use(batch, price)

    def capped(self, cost: np.ndarray, most: Sequence[int] | None) -> np.ndarray:
        """``cost`` with no more than ``most`` neurons of each layer on the accelerator; all of them if ``fixed``."""
        if most is None:
            return cost
        first_L1N, most_L11 = self._first_LN[:, None, :], np.asarray(most)[:, None, None]
        return np.where(first_L1N == most_L11 if self.fixed else first_L1N <= most_L11, cost, np.inf)

    def best(self, cost: np.ndarray) -> Choice:
        """Of each layer the cheapest; of those within :data:`NEAR` of it the fewest hot, then the fewest away."""
        least = cost.min(axis=(1, 2), keepdims=True)
        good = (cost <= least + NEAR * np.abs(least)).reshape(len(cost), -1)
        at = good.argmax(axis=1)
        return self._choice(at // cost.shape[2], at % cost.shape[2])

    def _choice(self, hot_at: np.ndarray, first_at: np.ndarray) -> Choice:
        hot = tuple(int(h[i]) for h, i in zip(self.hots, hot_at, strict=True))
        return Choice(hot, tuple(int(a[i]) for a, i in zip(self.firsts, first_at, strict=True)))

    # --- a floor of quality ---

    def found_pairs(self, batch: int) -> tuple[np.ndarray, float]:
        """``[layers, hot counts]`` of what fires and is computed, of all of ``(the second)`` that fires."""
        found, total = np.zeros(self._hot_LN.shape), 0.0
        for index, layer in enumerate(self.shape.layers):
            use, tokens = expert_use(layer, batch)
            f_I = use * layer.frequency(tokens)
            hot_H = np.append(0.0, np.cumsum(f_I))[self.hots[index]]
            recall = layer.recall if layer.predictor else 1.0
            found[index, : len(hot_H)] = hot_H + recall * (f_I.sum() - hot_H)
            total += float(f_I.sum())
        return found, total

    def recall(self, batch: int, choice: Choice) -> float:
        """Share of what fires that is computed, of the whole model: hot neurons, and what predictors find of others."""
        found, total = self.found_pairs(batch)
        at = [int(np.searchsorted(h, n)) for h, n in zip(self.hots, choice.hot, strict=True)]
        return float(found[np.arange(len(at)), at].sum()) / total if total else 1.0

    def most_recall(self, batch: int) -> float:
        """With everything hot that may be."""
        return self.recall(batch, Choice(tuple(int(h[-1]) for h in self.hots), (0,) * len(self.hots)))

    def best_with(self, cost: np.ndarray, floors: Sequence[tuple[int, float]]) -> Choice:
        """As :meth:`best`, with a recall of at least ``floor`` at each ``(batch, floor)``, which must be reachable.

        A price on what is missed, as low as meets the floors (bisection), then layer by layer the cheapest count that
        still meets them: at most one layer's step from the optimum.
        """
        choice = self.best(cost)
        about = [(batch, floor, *self.found_pairs(batch)) for batch, floor in floors]
        short = [(b, floor, found, total) for b, floor, found, total in about if self.recall(b, choice) < floor]
        if not short:
            return choice

        def at_price(price: float) -> tuple[Choice, bool]:
            gains = sum(found / max(total, 1e-300) for _, _, found, total in short)
            made = self.best(cost - price * np.asarray(gains)[:, :, None])
            return made, all(self.recall(b, made) >= floor for b, floor, _, _ in about)

        low, high = 0.0, 1.0
        while not at_price(high)[1] and high < 1e12:
            low, high = high, high * 4
        for _ in range(30):
            middle = math.sqrt(low * high) if low else high / 2
            low, high = (low, middle) if at_price(middle)[1] else (middle, high)
        made, good = at_price(high)
        if not good:  # within rounding of what can be reached at all
            made = Choice(tuple(int(h[-1]) for h in self.hots), choice.accelerator)
        return self._trimmed(cost, made, about)

    def _trimmed(
        self, cost: np.ndarray, choice: Choice, about: Sequence[tuple[int, float, np.ndarray, float]]
    ) -> Choice:
        """``choice`` with each layer's cheapest hot count that leaves the floors met, one layer after the other."""
        hot_at = np.array([np.searchsorted(h, n) for h, n in zip(self.hots, choice.hot, strict=True)])
        first_at = np.array([np.searchsorted(a, n) for a, n in zip(self.firsts, choice.accelerator, strict=True)])
        rows = np.arange(len(hot_at))
        for index in rows.tolist():
            fits = np.ones(cost.shape[1], dtype=bool)
            for _, floor, found, total in about:
                others = found[rows, hot_at].sum() - found[index, hot_at[index]]
                fits &= others + found[index] >= floor * total
            line = np.where(fits, cost[index, :, first_at[index]], np.inf)
            if line.min() < line[hot_at[index]]:
                hot_at[index] = int(line.argmin())
        return self._choice(hot_at, first_at)


def wanted(layer: LayerShape, batch: int) -> np.ndarray:
    """Float64 ``[I]``: share of steps in which a cold neuron is read."""
    use, tokens = expert_use(layer, batch)
    return use * predicted_share(layer, tokens)


def resident_counts(shape: ModelShape, batch: int, choice: Choice, slots: int) -> tuple[int, ...]:
    """By layer, the first neurons after the accelerator's that never leave a cache: at most ``slots`` of it.

    The most wanted of all layers by their union frequency at that batch (hot ones first), as far as they are first in
    plan order: what a cache with perfect knowledge of frequencies would hold anyway.
    """
    rates, prefixes = [], []
    for layer, h, first in zip(shape.layers, choice.hot, choice.accelerator, strict=True):
        rate_I = wanted(layer, batch).copy()
        rate_I[:h] = 1
        rates.append(rate_I[first:])
    everything = np.concatenate(rates)
    room = slots * shape.layers[0].cluster
    if room <= 0:
        return (0,) * len(rates)
    if room >= len(everything):
        least = 0.0
    else:
        least = float(np.partition(everything, len(everything) - room)[len(everything) - room])
    for rate_I in rates:
        below = np.flatnonzero(rate_I < least)
        prefixes.append(int(below[0]) if len(below) else len(rate_I))
    scale = min(1.0, room / max(1, sum(prefixes)))
    return tuple(
        _whole_clusters(int(count * scale), layer.cluster, layer.intermediate - first)
        for count, layer, first in zip(prefixes, shape.layers, choice.accelerator, strict=True)
    )


def _whole_clusters(count: int, cluster: int, most: int) -> int:
    return min(most, count) if count >= most else count // cluster * cluster


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """``[rows, width]``; what is beyond a row's end is huge."""
    made = np.full((len(rows), width), np.iinfo(np.int64).max)
    for line, row in zip(made, rows, strict=True):
        line[: len(row)] = row
    return made
