"""``pi2::delegate_*``: what a feed-forward layer is in a program before ExecuTorch lowers it. No weights in the graph.

* ``delegate_ffn(x, model, layer, queue) -> y``: a whole layer.
* ``delegate_submit(x, model, layer, first, queue) -> x'`` and ``delegate_collect(h, model, layer, first, queue) -> y``:
  the cold part of a layer, whose first neurons are computed by something else on ``x'`` in between: y = h + cold part.
  ``x'`` is a copy of ``x``, so that what is in between depends on submit, and ``y`` on both.
* ``delegate_experts(x, model, layer, index, routing) -> y``: a mixture of experts; the router is not ours.

``model`` names layers that are registered by :func:`registered`; with them the operators compute, which is their
reference. In a lowered program each is a call of the ``Pi2Backend`` delegate (csrc/bindings/executorch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_pi2.errors import ConfigError
from torch_pi2.export.hot import rows_of
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.layers.prompt import skips_predictor, takes_prompt_path
from torch_pi2.ops import load

#: What becomes a call of the delegate, and its role in the blob.
ROLES = {"pi2.delegate_ffn": 0, "pi2.delegate_submit": 1, "pi2.delegate_collect": 2, "pi2.delegate_experts": 0}

_models: dict[str, Sequence[SparseLayer]] = {}
_waiting: dict[tuple[str, int, int], torch.Tensor] = {}
_numbers = itertools.count()
_library: torch.library.Library | None = None


@contextmanager
def registered(layers: Sequence[SparseLayer]) -> Iterator[str]:
    """A name by which the operators know ``layers`` while this is entered."""
    define()
    name = f"model{next(_numbers)}"
    _models[name] = layers
    try:
        yield name
    finally:
        del _models[name]


def define() -> None:
    """Make the operators known to torch. A second call does nothing."""
    global _library
    if _library is not None:
        return
    load()
    library = torch.library.Library("pi2", "FRAGMENT")
    ops = {
        "delegate_ffn": ("Tensor x, str model, int layer, int queue", _whole),
        "delegate_submit": ("Tensor x, str model, int layer, int first, int queue", _submit),
        "delegate_collect": ("Tensor h, str model, int layer, int first, int queue", _collect),
        "delegate_experts": ("Tensor x, str model, int layer, Tensor index, Tensor routing", _mixture),
    }
    for name, (arguments, kernel) in ops.items():
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pi2::{name}", _like_first, lib=library)
    _library = library


def _like_first(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _layer(model: str, layer: int) -> SparseLayer:
    if model not in _models:
        raise ConfigError(
            f"delegate operators of {model}",
            expected="layers that are registered",
            found="none: they have been exported",
            fix="Run the model that torch_pi2.optimize returned, or the bundle.",
        )
    return _models[model][layer]


def _whole(x: torch.Tensor, model: str, layer: int, queue: int) -> torch.Tensor:
    ffn = _layer(model, layer)
    assert isinstance(ffn, SparseFFN)
    return ffn.whole(x).contiguous()


def _mixture(x: torch.Tensor, model: str, layer: int, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    experts = _layer(model, layer)
    assert isinstance(experts, SparseExperts)
    y: torch.Tensor = experts(x, index, routing)
    return y.contiguous()


def _submit(x: torch.Tensor, model: str, layer: int, first: int, queue: int) -> torch.Tensor:
    ffn = _layer(model, layer)
    assert isinstance(ffn, SparseFFN)
    _waiting[(model, layer, queue)] = cold_part(ffn, x, first)
    return x.clone(memory_format=torch.contiguous_format)


def _collect(h: torch.Tensor, model: str, layer: int, first: int, queue: int) -> torch.Tensor:
    return h + _waiting.pop((model, layer, queue))


def cold_part(ffn: SparseFFN, x: torch.Tensor, first: int) -> torch.Tensor:
    """What the neurons from ``first`` on in plan order add to the output, with down's bias; the reference of submit."""
    site = ffn.site
    if first == site.intermediate:  # the accelerator has them all
        return torch.zeros_like(x) if ffn.bias_down is None else ffn.bias_down.expand_as(x).to(x.dtype)
    active_TC = None
    if ffn.has_predictor and not (takes_prompt_path(ffn, x) or skips_predictor(ffn, x)):
        predict, settings = ffn.predictor_call()
        active_TC = predict(x, *ffn.predictor(), *settings)[..., max(0, first - ffn.n_hot) :].contiguous()
    gate, up, own = (None if b is None else b[first:] for b in (ffn.bias_gate, ffn.bias_up, ffn.thresholds))
    y: torch.Tensor = torch.ops.pi2.sparse_ffn(
        x,
        rows_of(ffn, first, site.intermediate).contiguous(),
        gate,
        up,
        ffn.bias_down,
        active_TC,
        *ffn.settings(max(0, ffn.n_hot - first), ffn.threshold)[:-1],
        own,
    )
    return y
