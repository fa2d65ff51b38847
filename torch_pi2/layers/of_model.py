"""The sparse layers that are in a model, and the modules whose ``forward`` they replace."""

from __future__ import annotations

from torch import nn

from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown, LazySource
from torch_pi2.layers.sequence import FusedIdentity

#: What holds weights: a layer, or all experts of a block.
SparseLayer = SparseFFN | SparseExperts
#: What the ``forward`` of a module of an optimised model may be a method of.
Replacement = SparseFFN | SparseExperts | FusedIdentity | LazySource | LazyDown


def sparse_layers(model: nn.Module) -> list[SparseFFN]:
    """The sparse layers in ``model``, in order of execution; of experts each its own, over views of their buffers."""
    layers = [layer for home in homes(model) for layer in layers_of(home)]
    return sorted(layers, key=lambda layer: layer.site.layer)


def layers_of(home: SparseLayer) -> list[SparseFFN]:
    """The layer that ``home`` is, or those of all its experts."""
    return home.experts() if isinstance(home, SparseExperts) else [home]


def homes(model: nn.Module) -> list[SparseLayer]:
    """What holds the weights of sparse layers in ``model``: the layers, and modules of experts."""
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def replacement_of(module: nn.Module) -> Replacement | None:
    """What computes in the place of the ``forward`` of ``module``'s class, if anything of ours does."""
    found = getattr(vars(module).get("forward"), "__self__", None)
    return found if isinstance(found, Replacement) else None


def replacements(model: nn.Module) -> list[tuple[nn.Module, Replacement]]:
    """All modules of ``model`` whose forward is replaced, with what replaces it."""
    found = ((module, replacement_of(module)) for module in model.modules())
    return [(module, replacement) for module, replacement in found if replacement is not None]


def called_modules(model: nn.Module) -> dict[SparseLayer, nn.Module]:
    """The module of ``model`` that each sparse layer computes: its hooks see the layer's inputs.

    Of lazy tensors no module's are the layer's, and the layer itself is called.
    """
    called: dict[SparseLayer, nn.Module] = {home: home for home in homes(model)}
    return called | {part: module for module, part in replacements(model) if isinstance(part, SparseLayer)}
