"""Live figures of a served model: the share of neurons that fire in each layer, and the decoding thread's time."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings
from torch_pi2.observe.watch import Watch
from torch_pi2.rewrite.gpu import refuse_split

#: Parts of a step's time.
PARTS = ("linear", "head", "predictor", "ffn", "wait", "rest")


class Firing:
    """Counts firing neurons from :meth:`start` to :meth:`stop`; costs nothing otherwise.

    ``layers``: in order of execution; none if the model computes all neurons. The experts of a module are one layer:
    ``key``, the name of the module; ``neurons`` of all its experts; ``experts``, their number (0: no mixture);
    ``chosen``, the share of the experts that a token is routed to; ``method``, how cold neurons are chosen.
    :meth:`start` raises as :class:`~torch_pi2.observe.watch.Watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        found = sparse_layers(model)
        if all(layer.n_hot == layer.site.intermediate for layer in found):
            found = []
        refuse_split(model, "watching", whole=True)
        self._watch = Watch(found) if found else None
        shares = chosen_shares(getattr(model, "config", None), [layer.site for layer in found])
        groups: dict[str, list[SparseFFN]] = {}
        for layer in found:
            groups.setdefault(_name(layer), []).append(layer)
        self.layers: list[dict[str, Any]] = []
        for name, group in groups.items():
            neurons, experts = sum(layer.site.intermediate for layer in group), group[0].site.experts
            about = {"chosen": shares.get(experts, 1.0), "method": group[0].method}
            self.layers.append({"key": name, "neurons": neurons, "experts": len(group) if experts else 0, **about})

    def start(self) -> None:
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def read(self, sequences: int) -> list[dict[str, float]]:
        """Figures of each layer since the last call, from any thread: ``tokens`` (routed to two experts: twice), and
        mean shares of the layer's neurons: ``hot`` (always computed), ``fired_hot`` and ``fired_cold``. ``sequences``:
        decoded together.
        """
        sums = {layer["key"]: torch.zeros(4, dtype=torch.float64) for layer in self.layers}
        counted = [] if self._watch is None else zip(self._watch.layers, self._watch.counts(reset=True))
        for layer, counts in counted:
            hot = layer.n_hot if layer.site.experts is not None else layer.hot_for(max(1, sequences))
            fired = counts[1 : 1 + hot].sum(), counts[1 + hot :].sum()
            sums[_name(layer)] += torch.tensor([counts[0], hot, *fired], dtype=torch.float64)
        found = []
        for about in self.layers:
            tokens, hot, fired_hot, fired_cold = sums[about["key"]].tolist()
            # only neurons of experts that a token is routed to can fire
            pairs = max(tokens, 1) * about["neurons"] / max(1, about["experts"]) / about["chosen"]
            shares = {"hot": hot / about["neurons"], "fired_hot": fired_hot / pairs, "fired_cold": fired_cold / pairs}
            found.append({"tokens": int(tokens), **shares})
        return found


def _name(layer: SparseFFN) -> str:
    return layer.site.experts or layer.site.key


@dataclass
class Spent:
    """Time of one kind of work: ``seconds`` of wall time in ``rounds``. ``ms``: by part of :data:`PARTS`: ``linear``
    layers in our formats without the ``head``; ``ffn`` without its ``wait`` for reads; ``rest``: attention, norms,
    sampling, PyTorch's linear layers.
    """

    rounds: int = 0
    seconds: float = 0.0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class Meter:
    """Adds up the time that a thread spends on each kind of work. The core's clocks are read when the kind changes, and
    at least every ``every_s`` seconds; they are process-wide, so parts include the time of other models.
    ``vocabulary``: rows of the head, which distinguish it from other linear layers. ``store``: of the model, or None.
    """

    def __init__(self, vocabulary: int, store: Store | None, every_s: float = 0.2) -> None:
        self._vocabulary, self._store, self._every_s = vocabulary, store, every_s
        self._kind: str | None = None
        self._rounds = 0
        self._before: dict[str, float] = {}
        self._spent: dict[str, Spent] = {}

    def enter(self, kind: str) -> None:
        """Begin a round of ``kind``; to be called by one thread only."""
        if kind != self._kind or 1e3 * (time.perf_counter() - self._every_s) >= self._before["total"]:
            self._add()
            self._kind = kind
        self._rounds += 1

    def read(self) -> dict[str, Spent]:
        """Totals by kind, from any thread; a snapshot."""
        return self._spent

    def _add(self) -> None:
        now, before = self._sample(), self._before
        if self._kind is not None:
            past = {name: max(0.0, now[name] - before[name]) for name in now}  # clocks may have been reset
            total = past.pop("total")
            past["wait"] = min(past["wait"], past["ffn"])
            past["ffn"] -= past["wait"]
            past["rest"] = max(0.0, total - sum(past.values()))
            spent = self._spent.get(self._kind, Spent())
            ms = {part: spent.ms[part] + past[part] for part in PARTS}
            added = Spent(spent.rounds + self._rounds, spent.seconds + total / 1e3, ms)
            self._spent = {**self._spent, self._kind: added}  # readers keep the old dict
        self._before, self._rounds = now, 0

    def _sample(self) -> dict[str, float]:
        wait_ns = 0 if self._store is None else self._store.stats()["wait_ns"] / max(1, torch.get_num_threads())
        rows = timings.read(reset=False)
        linear, head = timings.split_head(rows, self._vocabulary)
        ffn, predictor = (timings.milliseconds(rows, kind) for kind in (timings.FFN, timings.PREDICTOR))
        parts = {"linear": linear, "head": head, "predictor": predictor, "ffn": ffn, "wait": wait_ns / 1e6}
        return {"total": 1e3 * time.perf_counter(), **parts}
