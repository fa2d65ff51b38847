"""What a store reads ahead and keeps while its model runs, said in Python (docs/RESEARCH.md)."""

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
    store, layers = store_and_budget(model)[0], _layers(model)

    def see(home: SparseLayer, x_TH: torch.Tensor, routing: Sequence[torch.Tensor]) -> None:
        for key, active in (ahead(home.site.key, x_TH, routing[0] if routing else None) or {}).items():
            layer = _of(layers, key, active, torch.bool)
            behind = getattr(home, "store_layer", None)
            if isinstance(home, OffloadedExperts) and layer.site.experts != home.site.experts:  # its own: at once
                behind = home.first_layer
            store.prefetch(layer.store_layer, active[..., layer.order], after=behind)

    with seeing_inputs(model, see):
        yield


@checked
def prioritize(model: nn.Module, priorities: Mapping[str, torch.Tensor] | None) -> None:
    """Let the cache of a model over a store evict the neurons of the least priority, until the next call of this.

    ``priorities``: site key -> float32 ``[I]`` in the model's order of neurons. Other layers keep theirs; those that
    were never given any have 0. Among equals the least recently used leaves. ``hot_share`` still pins its neurons (0:
    none), and those of the current call stay. None: the policy of ``OffloadConfig`` decides again. Results keep their
    bits. A call that evicts takes longer, in proportion to the cache; 4 bytes a neuron are not in the budget.

    Raises ConfigError: the model is not over a store or its engine is ``mmap``, or a tensor is not of its layer.
    """
    store, layers = store_and_budget(model)[0], _layers(model)
    if priorities is None:
        store.prioritize(0, None)
    for key, priority_I in (priorities or {}).items():
        layer = _of(layers, key, priority_I, torch.float32)
        if priority_I.isnan().any():
            argument(priority_I, f"priorities of {key}").wrong("numbers", "NaN")
        store.prioritize(layer.store_layer, priority_I[layer.order])


def _layers(model: nn.Module) -> dict[str, OffloadedFFN]:
    return {y.site.key: y for y in sparse_layers(model) if isinstance(y, OffloadedFFN)}


def _of(layers: Mapping[str, OffloadedFFN], key: str, value: torch.Tensor, dtype: torch.dtype) -> OffloadedFFN:
    """The layer ``key``. Raises ConfigError: there is none, or ``value`` has no ``dtype`` number for each neuron."""
    layer = layers.get(key)
    many = dtype == torch.bool  # a mask for each token
    if layer is None or value.dtype != dtype or value.shape[-1:] != layer.order.shape or value.dim() > 1 + many:
        expected = f"a key of {next(iter(layers))}, ..." if layer is None else f"{dtype} of shape [{len(layer.order)}]"
        argument(value, f"neurons of {shown(key)}").wrong(expected, f"{value.dtype} {list(value.shape)}")
    return layer
