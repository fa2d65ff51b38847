"""The share of each layer's neurons that fires while a model is served."""

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
