"""Hooks of modules in a feed-forward layer: heeded, or refused by name; none is dropped in silence.

Hooks on a module whose ``forward`` is replaced run as ever. A replacement that would silence a hook is not chosen: an
FFN with hooks inside runs through lazy tensors (:mod:`torch_pi2.layers.lazy`), where they see and may change every
value, or stays dense. A module that does not run after a rewrite has :class:`NoHooks`: registering one raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from torch_pi2.errors import ConfigError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class NoHooks(OrderedDict[int, Any]):
    """The forward hooks of a module that does not run: there are none, and registering one raises ConfigError."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __setitem__(self, key: int, hook: Any) -> None:
        raise ConfigError(
            f"a hook inside {self._key}",
            expected="a module that runs",
            found="a part of a feed-forward layer that the optimised model computes as a whole",
            fix="Register it before torch_pi2.optimize, or on the layer; torch_pi2.restore(model) undoes optimize.",
        )

    def __reduce__(self) -> Any:
        return NoHooks, (self._key,)


def refuse_hooks(module: nn.Module, key: str) -> None:
    """``module`` does not run any more, being a part of the FFN ``key``."""
    for attribute in _HOOKS:
        object.__setattr__(module, attribute, NoHooks(key))


def allow_hooks(module: nn.Module) -> None:
    """Undo :func:`refuse_hooks`."""
    for attribute in _HOOKS:
        if isinstance(getattr(module, attribute), NoHooks):
            object.__setattr__(module, attribute, OrderedDict())


def share_hooks(original: nn.Module, replacement: nn.Module) -> None:
    """Hooks that were or will be registered on either module are registered on both."""
    for attribute, value in vars(original).items():
        if attribute.endswith("_hooks") or "_hooks_" in attribute:
            object.__setattr__(replacement, attribute, value)


def has_hooks(module: nn.Module, *, pre: bool = True, post: bool = True) -> bool:
    """Whether ``module`` has hooks before, or after, its forward."""
    return bool((pre and module._forward_pre_hooks) or (post and module._forward_hooks))


def own_forward(modules: Mapping[str, nn.Module]) -> str | None:
    """A module of these whose forward was replaced on the object, in words: nobody can know when that will change."""
    for name, module in modules.items():
        if "forward" in vars(module):
            return f"{name} has a forward of its own (accelerate, or a patch)"
    return None


def hooks_inside(prefix: str, module: nn.Module) -> str | None:
    """A part of ``module`` whose hooks would not run if ``module`` were computed as a whole, in words."""
    parts = {name: part for name, part in module.named_modules(prefix=prefix) if part is not module}
    for name, part in parts.items():
        if has_hooks(part):
            return f"{name} has a hook"
    return own_forward({prefix: module, **parts})


def has_sparse_layers(model: nn.Module) -> bool:
    """Whether ``model`` is optimised: by an attribute, since some packages must not import the sparse layers."""
    return any(getattr(part, "is_sparse_layer", False) for part in model.modules())


def refuse_global_hooks(what: str) -> None:
    """Raise ConfigError, about ``what``, if PyTorch calls hooks around the forward of every module there is."""
    common = nn.modules.module
    if common._global_forward_hooks or common._global_forward_pre_hooks:
        raise ConfigError(
            what,
            expected="hooks on modules of the model",
            found="hooks on all modules (register_module_forward_hook), some of which do not run in an optimised model",
            fix="Remove them, or register them on the modules that they are for.",
        )
