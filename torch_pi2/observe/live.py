"""While a model is served: the share of each layer's neurons that fires, and where the decoding thread's time goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings
from torch_pi2.observe.watch import Watch

#: Parts of a model whose time is known, and the rest.
PARTS = ("linear", "head", "predictor", "ffn", "wait", "rest")


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer; a module of experts is one.

    Attributes:
        key: name of its module. neurons: of all its experts. experts: their number (0: no mixture).
        chosen: share of the experts that a token is routed to. method: how cold neurons are chosen.
    """

    key: str
    neurons: int
    experts: int
    chosen: float
    method: str


@dataclass(frozen=True)
class Fired:
    """Counts of one layer since the last reading; shares are of all of its neurons.

    Attributes:
        tokens: of its calls; of experts the sum, so a token that goes to two experts counts twice.
        hot: neurons that are always computed. fired_hot, fired_cold: mean neurons that fire for a token.
    """

    tokens: int
    hot: float
    fired_hot: float
    fired_cold: float


class Firing:
    """Counts from :meth:`start` to :meth:`stop`; otherwise it costs nothing.

    Args:
        model: any.

    Attributes:
        layers: in order of execution; none if the model computes all neurons.

    Raises:
        ConfigError, ArtifactError: (by :meth:`start`) see :class:`~torch_pi2.observe.watch.Watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        found = sparse_layers(model)
        if all(layer.n_hot == layer.site.intermediate for layer in found):
            found = []
        self._watch = Watch(model, batch_sizes=(1,)) if found else None
        shares = chosen_shares(getattr(model, "config", None), [layer.site for layer in found])
        groups: dict[str, list[SparseFFN]] = {}
        for layer in found:
            groups.setdefault(_name(layer), []).append(layer)
        self.layers = [_described(name, group, shares) for name, group in groups.items()]

    def start(self) -> None:
        """Start or continue counting."""
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        """Stop counting."""
        if self._watch is not None:
            self._watch.stop()

    def read(self, sequences: int) -> list[Fired]:
        """Counts of each layer since the last call; any thread. ``sequences``: that are decoded together."""
        sums = {layer.key: torch.zeros(4, dtype=torch.float64) for layer in self.layers}
        for layer, counts in [] if self._watch is None else self._watch.counts(reset=True):
            hot = layer.n_hot if layer.site.experts is not None else layer.hot_for(max(1, sequences))
            fired = counts[1 : 1 + hot].sum(), counts[1 + hot :].sum()
            sums[_name(layer)] += torch.tensor([counts[0], hot, *fired], dtype=torch.float64)
        return [_fired(layer, *sums[layer.key].tolist()) for layer in self.layers]


def _name(layer: SparseFFN) -> str:
    return layer.site.experts or layer.site.key


def _described(name: str, group: list[SparseFFN], shares: dict[str | None, float]) -> Layer:
    site = group[0].site
    neurons = sum(layer.site.intermediate for layer in group)
    return Layer(name, neurons, len(group) if site.experts else 0, shares.get(site.experts, 1.0), group[0].method)


def _fired(layer: Layer, tokens: float, hot: float, fired_hot: float, fired_cold: float) -> Fired:
    # neurons of experts that a token is not routed to do not fire
    pairs = tokens * layer.neurons / max(1, layer.experts) / layer.chosen
    shares = (fired_hot / pairs, fired_cold / pairs) if pairs else (0.0, 0.0)
    return Fired(int(tokens), hot / layer.neurons, *shares)


@dataclass
class Spent:
    """Time of one kind of work.

    Attributes:
        rounds: how often it began. seconds: wall time.
        ms: by part of :data:`PARTS`: ``linear`` layers in our formats without the ``head``; ``ffn`` without the
            ``wait`` for reads in it; ``rest``: attention to keys and values, norms, choosing tokens, and linear layers
            that are PyTorch's.
    """

    rounds: int = 0
    seconds: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


@dataclass(frozen=True)
class _Sample:
    """Wall time, the core's timings, and nanoseconds that threads waited for reads."""

    at: float
    timings: dict[tuple[int, ...], int]
    wait_ns: int


class Meter:
    """Adds up the time that a thread spends on each kind of work.

    The core's clocks are read when the kind changes, and every ``every_s`` while it stays. They count the whole
    process: the time of other models is in the parts too.

    Args:
        vocabulary: rows of the head, which distinguish it from other linear layers.
        store: of the model; None: it is in memory.
    """

    def __init__(self, vocabulary: int, store: Store | None, every_s: float = 0.2) -> None:
        self._vocabulary, self._store, self._every_s = vocabulary, store, every_s
        self._kind: str | None = None
        self._rounds = 0
        self._before: _Sample | None = None
        self._spent: dict[str, Spent] = {}

    def enter(self, kind: str) -> None:
        """The thread begins a round of ``kind``. Only one thread may call this."""
        if kind != self._kind or self._before is None or time.perf_counter() - self._before.at >= self._every_s:
            self._add()
            self._kind = kind
        self._rounds += 1

    def read(self) -> dict[str, Spent]:
        """By kind, since the start, from any thread; the result does not change afterwards."""
        return self._spent

    def _add(self) -> None:
        now, before = self._sample(), self._before
        if before is not None and self._kind is not None:
            spent = self._spent.get(self._kind, Spent())
            ms = _between(before, now, self._vocabulary)
            added = Spent(
                spent.rounds + self._rounds,
                spent.seconds + now.at - before.at,
                {part: spent.ms[part] + ms[part] for part in PARTS},
            )
            self._spent = {**self._spent, self._kind: added}  # a new object: readers keep the old one
        self._before, self._rounds = now, 0

    def _sample(self) -> _Sample:
        wait_ns = 0 if self._store is None else self._store.stats()["wait_ns"] // max(1, torch.get_num_threads())
        rows = timings.read(reset=False)
        return _Sample(time.perf_counter(), {tuple(row[:3]): row[4] for row in rows}, wait_ns)


def _between(before: _Sample, now: _Sample, vocabulary: int) -> dict[str, float]:
    """Milliseconds by part; clocks that were reset in between count from zero."""
    rows: list[Sequence[int]] = []
    for key, nanoseconds in now.timings.items():
        earlier = before.timings.get(key, 0)
        rows.append((*key, 0, nanoseconds - earlier if nanoseconds >= earlier else nanoseconds))
    linear, head = timings.split_head(rows, vocabulary)
    ffn, predictor = (timings.milliseconds(rows, kind) for kind in (timings.FFN, timings.PREDICTOR))
    waited = now.wait_ns - before.wait_ns if now.wait_ns >= before.wait_ns else now.wait_ns
    wait = min(ffn, waited / 1e6)
    known = {"linear": linear, "head": head, "predictor": predictor, "ffn": ffn - wait, "wait": wait}
    return {**known, "rest": max(0.0, 1e3 * (now.at - before.at) - sum(known.values()))}
