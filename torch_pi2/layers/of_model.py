"""The sparse layers that are in a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.standin import StandIn
from torch_pi2.types.site import FFNSite

#: What holds weights: a layer, or all experts of a block.
SparseLayer = SparseFFN | SparseExperts


def is_optimized(model: nn.Module) -> bool:
    """Whether :func:`rewrite` has put anything into ``model``."""
    return next(stand_ins(model), None) is not None


def sites_of(model: nn.Module) -> list[FFNSite]:
    """The FFN sites that are sparse in ``model`` now, in order of execution; empty for a dense model."""
    return [layer.site for layer in sparse_layers(model)]


def sparse_layers(model: nn.Module) -> list[SparseFFN]:
    """The sparse layers in ``model``, in order of execution; of experts each its own, over views of their buffers."""
    layers: list[SparseFFN] = []
    for home in homes(model):
        layers += layers_of(home)
    return sorted(layers, key=lambda layer: layer.site.layer)


def layers_of(home: SparseLayer) -> list[SparseFFN]:
    """The layer that ``home`` is, or those of all its experts."""
    return home.experts() if isinstance(home, SparseExperts) else [home]


def homes(model: nn.Module) -> list[SparseLayer]:
    """What holds the weights of sparse layers in ``model``: the layers, and modules of experts."""
    found = {id(s._home[0]): s._home[0] for _, _, s in stand_ins(model)}
    return [home for home in found.values() if isinstance(home, SparseLayer)]


def stand_ins(model: nn.Module) -> Iterator[tuple[nn.Module, str, StandIn]]:
    """Every place (parent, name) where one of ours is registered."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if isinstance(child, StandIn) and child._original:
                yield parent, name, child
