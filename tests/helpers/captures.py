"""Dynamo runs once in a process for all models of Hugging Face that are built alike: most of a test's time, otherwise.

What is found in the graphs, and what is done with it, is computed anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from torch_pi2.graph.capture import CapturedGraph

Capture = Callable[..., list[CapturedGraph]]

#: Where the code of a model may be that is remembered: nobody changes it.
_KNOWN = (
    "torch.nn.modules.",
    "transformers.",
    "transformers_modules.",
    "modeling_drelu_llama",
    "torch_pi2.graph.experts",
)
#: What tells where a model came from, and not how it computes.
_ORIGIN = frozenset(("_is_hf_initialized", "name_or_path", "training"))
_ORIGIN_OF_CONFIG = frozenset(("_name_or_path", "architectures", "dtype", "transformers_version"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def remembering(capture: Capture) -> Capture:
    """``capture`` with a memory for graphs, in which tensors have names instead of values."""
    known: dict[Hashable, list[tuple[fx.GraphModule, dict[fx.Node, str]]]] = {}

    def captured(
        model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, on_meta: bool = False
    ) -> list[CapturedGraph]:
        key = _key(model, args, dict(kwargs or {}), on_meta)
        if key is None:
            return capture(model, args, kwargs, on_meta=on_meta)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        if key in known:
            return [CapturedGraph(gm, {node: tensors[name] for node, name in of.items()}) for gm, of in known[key]]
        graphs, names = capture(model, args, kwargs, on_meta=on_meta), {id(t): n for n, t in tensors.items()}
        known[key] = [(g.gm, {n: names[id(t)] for n, t in g.tensors.items() if id(t) in names}) for g in graphs]
        return graphs

    return captured


def _key(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], on_meta: bool) -> Hashable:
    """All that the graphs can depend on; None: too much."""
    modules = list(model.named_modules(remove_duplicate=False))
    if not hasattr(model, "config") or any(_is_changed(module) for _, module in modules):
        return None
    if not on_meta and any(p.is_meta for p in model.parameters()):
        return None
    first: dict[int, int] = {}
    tensors = [
        (name, type(t), tuple(t.shape), t.stride(), t.dtype, t.device, first.setdefault(id(t), len(first)))
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, t in named
    ]
    plain = [(name, type(module).forward, repr(sorted(_plain(module).items()))) for name, module in modules]
    leaves, spec = tree_flatten((tuple(args), kwargs))
    given = [(x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    config = {k: v for k, v in model.config.to_dict().items() if k not in _ORIGIN_OF_CONFIG}
    return (tuple(tensors), tuple(plain), repr(config), tuple(given), repr(spec), on_meta)


def _is_changed(module: nn.Module) -> bool:
    own = vars(module)
    return not type(module).__module__.startswith(_KNOWN) or "forward" in own or any(own.get(hooks) for hooks in _HOOKS)


def _plain(module: nn.Module) -> dict[str, object]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | None) and k not in _ORIGIN}
