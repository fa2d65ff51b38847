"""A copy of an optimised model whose feed-forward layers are delegate operators: what is exported.

``split_hot_cold`` gives each layer a submodule ``hot`` between the submit and the collect of its cold part. It is the
accelerator's alone: compiled for it, or (XNNPACK) kept apart from its neighbours by these two.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.lazy import LazyDown, LazySource
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.layers.standin import StandIn
from torch_pi2.rewrite.handle import Handle
from torch_pi2.rewrite.install import everywhere, exchange


class DelegatedFFN(nn.Module):
    """A whole layer in the delegate. See :mod:`torch_pi2.export.markers`."""

    def __init__(self, model: str, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.pi2.delegate_ffn(x, self.model, self.layer, 0)
        return y


class DelegatedExperts(nn.Module):
    """A mixture of experts in the delegate, called as :class:`~torch_pi2.layers.experts.SparseExperts` is."""

    def __init__(self, model: str, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed = (top_k_index, top_k_weights)
        y: torch.Tensor = torch.ops.pi2.delegate_experts(hidden_states, self.model, self.layer, *routed)
        return y


class SplitFFN(nn.Module):
    """A layer whose first neurons an accelerator computes while the delegate computes the others.

    Attributes:
        hot: the accelerator's part: :class:`~torch_pi2.export.hot.HotChunks`, or what was compiled of it; None: the
            delegate computes the whole layer.
        first: the first neuron of the cold part, as many as ``hot`` has.
    """

    def __init__(self, whole: DelegatedFFN) -> None:
        super().__init__()
        self.model, self.layer = whole.model, whole.layer
        self.hot: nn.Module | None = None
        self.first = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        if self.hot is None:
            y = torch.ops.pi2.delegate_ffn(x, self.model, self.layer, 0)
        else:
            settings = (self.model, self.layer, self.first, self.layer + 1)
            y = torch.ops.pi2.delegate_collect(self.hot(torch.ops.pi2.delegate_submit(x, *settings)), *settings)
        return y


def exported_layers(model: nn.Module) -> list[SparseLayer]:
    """What holds the sparse layers of ``model``, in the order of its plan, if all can be delegate operators.

    There are none in what was imported without neurons.

    Raises:
        ConfigError: a dense model. UnsupportedModelError: layers whose activation is code of a bigger block.
    """
    handle = Handle.of(model)
    if handle is not None and handle.group is not None:
        raise ConfigError(
            f"exporting {type(model).__name__}",
            expected="a model with all of its neurons",
            found="a shard of one, of several processes",
            fix="Make one store of the shards (torch-pi2 pack SHARDS WHOLE), and export that.",
        )
    if handle is None:
        raise ConfigError(
            f"export of {type(model).__name__}",
            expected="a model that torch_pi2.optimize or load gave",
            found="a dense model",
            fix="Call torch_pi2.optimize(model, ...) first; method='dense' keeps every neuron.",
        )
    modules = list(model.modules())
    lazy = [m.sparse.site.key for m in modules if isinstance(m, LazyDown)]
    if lazy or any(isinstance(m, LazySource) for m in modules):
        raise UnsupportedModelError(
            f"export of {type(model).__name__}",
            expected="feed-forward layers that are modules, or chains of modules",
            found=f"{len(lazy)} whose activation is code of a bigger block ({', '.join(lazy[:3])})",
            fix="Move each FFN with its activation into a module of its own, and optimise the model again.",
        )
    found = {id(m): m for m in modules if isinstance(m, SparseLayer)}
    return sorted(found.values(), key=lambda home: home.site.layer)


def delegated_copy(model: nn.Module, layers: Sequence[SparseLayer], name: str) -> nn.Module:
    """A copy of ``model`` in evaluation mode, ``layers`` as delegate operators of the registered ``name``.

    Nothing of the feed-forward layers is copied, and ``model`` is left as it was.
    """
    # what is left of a chain passes its input on
    instead: dict[nn.Module, nn.Module] = {m: nn.Identity() for m in model.modules() if isinstance(m, StandIn)}
    for i, home in enumerate(layers):
        instead[home] = DelegatedExperts(name, i) if isinstance(home, SparseExperts) else DelegatedFFN(name, i)
    handle, undo = Handle.detach(model), exchange(everywhere(model, instead))
    try:
        return copy.deepcopy(model).eval().requires_grad_(False)
    finally:
        undo()
        if handle is not None:
            handle.attach(model)


def split_hot_cold(model: nn.Module) -> list[SplitFFN]:
    """Put a :class:`SplitFFN` in the place of each :class:`DelegatedFFN` of ``model``; they, in order of layers."""
    whole = {module.layer: module for module in model.modules() if isinstance(module, DelegatedFFN)}
    made = [SplitFFN(whole[i]) for i in sorted(whole)]
    exchange(everywhere(model, {whole[split.layer]: split for split in made}))
    return made
