"""Sparse layers into a model whose weights are not there: the way is tried once, when the folder is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.standin import Absorbed
from torch_pi2.rewrite import ways
from torch_pi2.rewrite.install import install
from torch_pi2.rewrite.skeleton import put
from torch_pi2.store.weights import STRATEGIES
from torch_pi2.types.plan import LayerPlan
from torch_pi2.types.site import FFNSite

#: Experts of a module whose weights are read to see what it computes.
TRIED_EXPERTS = 2


def find_way(model: nn.Module, site: FFNSite) -> str:
    """One of ``STRATEGIES`` that is seen to compute the same; the parameters of ``site`` in ``model`` have values.

    Raises:
        UnsupportedModelError: none does.
    """
    try:
        with torch.no_grad():
            return ways.find_way(model, site, None, ways.probes_of(site, site.weights(model)), STRATEGIES)[0]
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"weights of {site.key or 'the FFN'} ({site.owner_class}) in a folder",
            expected="a module that computes the feed-forward layer, or a chain of modules",
            found=error.found,
            fix="Move the FFN into a module of its own; in memory, optimize(model, weights=...) runs it as it is.",
        ) from None


def way_taken(model: nn.Module, layer: SparseFFN) -> str | None:
    """The way by which ``layer`` came into ``model``; None: one that cannot be taken without weights."""
    if layer.site.experts is not None:
        return "owner"
    mine = {name: m for name, m in model.named_modules() if getattr(m, "_home", ()) == (layer,)}
    if all(module is layer for module in mine.values()):
        return "owner"
    return "chain" if all(module is layer or isinstance(module, Absorbed) for module in mine.values()) else None


def place(model: nn.Module, site: FFNSite, ffn: SparseFFN, way: str) -> None:
    """Put ``ffn`` in the place of the modules of ``site``, whose parameters need no values."""
    for ref in (site.gate, site.up, site.down):
        for name in () if ref is None else (ref.weight, ref.bias):
            if name is not None and model.get_parameter(name).numel():
                put(model, [name], torch.empty(0, dtype=model.get_parameter(name).dtype))
    with torch.no_grad():
        _, swaps = ways.find_way(model, site, ffn, [], [way])  # nothing to try it with
    install(model, ffn, swaps)


def find_experts_way(model: nn.Module, group: Sequence[LayerPlan]) -> str:
    """As :func:`find_way`, for the experts of one module, of which the first ``TRIED_EXPERTS`` have values."""
    with torch.no_grad():
        ways.experts_way(model, group, None, tried=TRIED_EXPERTS)
    return "owner"


def place_experts(model: nn.Module, group: Sequence[LayerPlan], sparse: SparseExperts) -> None:
    """Put ``sparse`` in the place of the module of experts that ``group`` names, whose parameters need no values."""
    swap = ways.experts_way(model, group, sparse, tried=0)
    site = group[0].site
    for ref in (site.up, site.down):
        for name in (ref.weight, ref.bias):
            if name is not None:
                put(model, [name], torch.empty(0, dtype=model.get_parameter(name).dtype))
    install(model, sparse, [swap])
