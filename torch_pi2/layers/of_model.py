"""The sparse layers of a model, and the modules whose ``forward`` they replace."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_pi2.graph.routed import Routed
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown, LazySource
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.layers.rows import SparseModule
from torch_pi2.layers.sequence import FusedIdentity, only_input

#: A module that holds weights: a layer, or all experts of a block.
SparseLayer = SparseFFN | SparseExperts
#: Objects whose methods replace the ``forward`` of a module.
Replacement = SparseFFN | SparseExperts | FusedIdentity | LazySource | LazyDown


def sparse_layers(model: nn.Module) -> list[SparseFFN]:
    """The sparse layers in ``model`` in order of execution; experts as layers over views of their buffers."""
    layers = [layer for home in homes(model) for layer in layers_of(home)]
    return sorted(layers, key=lambda layer: layer.site.layer)


def layers_of(home: SparseLayer) -> list[SparseFFN]:
    return home.experts() if isinstance(home, SparseExperts) else [home]


def homes(model: nn.Module) -> list[SparseLayer]:
    """Modules in ``model`` that hold the weights of sparse layers: layers, and modules of experts."""
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def _own(kind: type) -> dict[str, object]:
    return {n: m for n in dir(kind) if callable(m := getattr(kind, n)) and getattr(m, "__module__", "") in _OURS}


_OURS = {kind.__module__ for kind in (SparseModule, SparseFFN, SparseExperts, OffloadedFFN, OffloadedExperts)}
_METHODS = {kind: _own(kind) for kind in (SparseFFN, SparseExperts, OffloadedFFN, OffloadedExperts)}


def is_changed(home: SparseLayer) -> bool:
    """Whether ``home`` is of another class than ours, or a method of it or of its class was replaced."""
    own = _METHODS.get(type(home), {})
    patched = any(getattr(type(home), name) != method or name in vars(home) for name, method in own.items())
    return not own or patched


def replacement_of(module: nn.Module) -> Replacement | None:
    """The object whose method replaces the ``forward`` of ``module``, or None."""
    found = getattr(vars(module).get("forward"), "__self__", None)
    return found if isinstance(found, Replacement) else None


def replacements(model: nn.Module) -> list[tuple[nn.Module, Replacement]]:
    """All modules of ``model`` with a replaced forward, each with its replacement."""
    found = ((module, replacement_of(module)) for module in model.modules())
    return [(module, replacement) for module, replacement in found if replacement is not None]


def called_modules(model: nn.Module) -> dict[SparseLayer, nn.Module]:
    """Sparse layer -> the module that it replaces, whose hooks see its inputs; itself, behind lazy tensors."""
    called: dict[SparseLayer, nn.Module] = {home: home for home in homes(model)}
    return called | {part: module for module, part in replacements(model) if isinstance(part, SparseLayer)}


@contextmanager
def seeing_inputs(model: nn.Module, see: Callable[[SparseLayer, torch.Tensor, Sequence], None]) -> Iterator[None]:
    """In the block ``see(layer, x_TH, routing)`` is called before each call of a sparse layer. ``routing``: empty; of
    experts, ``index_TK`` and ``routing_TK``.
    """

    def hook(home: SparseLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(home, SparseExperts):
            x_TH, *routing = Routed.of(args, kwargs, len(home.sites))
            see(home, x_TH, routing)
        else:
            see(home, only_input(home.keyword, home.site.key, args, kwargs).reshape(-1, home.site.hidden), ())

    with ExitStack() as hooks:
        for home, module in called_modules(model).items():
            hooks.enter_context(module.register_forward_pre_hook(partial(hook, home), with_kwargs=True))
        yield
