"""Prefetchers in Python: what a store reads ahead while its model runs (docs/RESEARCH.md)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torch_pi2.base.fields import argument, checked, shown
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.layers.of_model import SparseLayer, seeing_inputs, sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.rewrite.gpu import refuse_split
from torch_pi2.rewrite.state import store_and_budget

#: Site key, its input ``[T, H]``, experts of each token ``[T, K]`` or None -> key of another site -> bool ``[..., I]``.
Ahead = Callable[[str, torch.Tensor, torch.Tensor | None], Mapping[str, torch.Tensor] | None]


@checked
@contextmanager
def prefetching(model: nn.Module, ahead: Ahead) -> Iterator[None]:
    """Context in which ``ahead`` says, before each call of a feed-forward layer, what to read for later ones.

    ``ahead(key, x_TH, experts_TK)`` gets the site key, its input, and None; in a mixture the name of the module of
    experts, its input, and the expert numbers of each token. It returns masks by site key (of an expert: its own), bool
    ``[I]`` or ``[T, I]`` in the model's order of neurons; None or ``{}``: nothing. They are read behind the reads of
    the layer itself, while it is computed. Results keep their bits. ``stats(model)`` counts slots
    that were ``guessed``, and those of them ``used``. The model runs eagerly meanwhile: a hook sees each call.

    Raises ConfigError: the model is not over a store, or is divided with a GPU; in calls, a mask of another layer.
    """
    refuse_split(model, "prefetching", whole=True)
    store = store_and_budget(model)[0]
    layers = {y.site.key: y for y in sparse_layers(model) if isinstance(y, OffloadedFFN)}

    def see(home: SparseLayer, x_TH: torch.Tensor, routing: Sequence[torch.Tensor]) -> None:
        for key, active in (ahead(home.site.key, x_TH, routing[0] if routing else None) or {}).items():
            layer = layers.get(key)
            if layer is None or active.dtype != torch.bool or active.shape[-1:] != layer.order.shape:
                expected = "a site's key" if layer is None else f"bool [..., {len(layer.order)}]"
                argument(active, f"what to read ahead for {shown(key)}").wrong(expected, f"a mask {list(active.shape)}")
            behind = getattr(home, "store_layer", None)
            if isinstance(home, OffloadedExperts) and layer.site.experts != home.site.experts:  # its own: at once
                behind = home.first_layer
            store.prefetch(layer.store_layer, active[..., layer.order], after=behind)

    with seeing_inputs(model, see):
        yield
