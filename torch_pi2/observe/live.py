"""``Firing``: which share of each layer's neurons fires while a model is used, at the cost of an addition for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.watch import Watch


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer; a module of experts is one.

    Attributes:
        key: name of its module. neurons: of all its experts. experts: how many (0: it is no mixture).
        chosen: share of the experts that a token goes to. method: how cold neurons are chosen; of experts the first's.
    """

    key: str
    neurons: int
    experts: int
    chosen: float
    method: str


@dataclass(frozen=True)
class Fired:
    """Of one layer, since it was read before; shares are of all of its neurons.

    Attributes:
        tokens: that it had; of experts the sum, so that one that goes to two counts twice.
        hot: neurons that are computed whether they fire or not.
        fired_hot, fired_cold: neurons that fired for a token in the mean, among the hot and among the cold ones.
    """

    tokens: int
    hot: float
    fired_hot: float
    fired_cold: float


class Firing:
    """Counts from :meth:`start` to :meth:`stop`; off it costs nothing.

    Args:
        model: any.

    Attributes:
        layers: in order of execution; none if the model computes all neurons of all of them.

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
        """Begin to count, or go on."""
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        """Nothing is counted any more."""
        if self._watch is not None:
            self._watch.stop()

    def read(self, sequences: int) -> list[Fired]:
        """Of each layer since the last time; any thread. ``sequences``: decoded together, by which neurons are hot."""
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
    # a token goes to a share of the experts: of all neurons, those of the others did not fire
    pairs = tokens * layer.neurons / max(1, layer.experts) / layer.chosen
    shares = (fired_hot / pairs, fired_cold / pairs) if pairs else (0.0, 0.0)
    return Fired(int(tokens), hot / layer.neurons, *shares)
