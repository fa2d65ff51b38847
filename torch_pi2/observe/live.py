"""Live figures of a served model: the share of neurons that fire in each layer."""

from typing import Any

import torch
from torch import nn

from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.watch import Watch
from torch_pi2.rewrite.gpu import refuse_split


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
