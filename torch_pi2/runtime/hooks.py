"""Hooks of modules that give way to a sparse layer: kept where they go on meaning the same, never dropped in silence.

A module that is replaced shares its hooks with what stands in its place, in both directions. A way of rewriting that
would silence a hook is not taken: an FFN with hooks inside runs through lazy tensors
(:mod:`torch_pi2.runtime.lazy`), where they see and may change every value, or is refused by name. A module that does
not run any more after a rewrite has :class:`NoHooks`: registering one there raises ConfigError.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from torch_pi2.errors import ConfigError

_FORWARD = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_PRE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class NoHooks(OrderedDict[int, Any]):
    """The hooks of a module that does not run any more: there are none, and registering one raises."""

    def __init__(self, runs: str) -> None:
        super().__init__()
        self._runs = runs

    def __setitem__(self, key: int, hook: Any) -> None:
        raise ConfigError(
            f"a hook inside {self._runs}",
            expected="a module that runs",
            found="a part of a feed-forward layer that the optimised model computes as a whole",
            fix="Register it before torch_pi2.optimize, or on the layer; torch_pi2.restore(model) undoes optimize.",
        )

    def __reduce__(self) -> Any:
        return NoHooks, (self._runs,)


def share_hooks(original: nn.Module, stand_in: nn.Module) -> None:
    """What was or will be registered on either is registered on both."""
    for attribute in (*_FORWARD, *_PRE):
        object.__setattr__(stand_in, attribute, getattr(original, attribute))


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
    """A part of ``module`` that would be silenced if ``module`` were replaced, in words."""
    parts = {name: part for name, part in module.named_modules(prefix=prefix) if part is not module}
    for name, part in parts.items():
        if has_hooks(part):
            return f"{name} has a hook"
    return own_forward({prefix: module, **parts})


def refuse_global_hooks() -> None:
    """Raise ConfigError if PyTorch calls hooks around the forward of every module there is."""
    common = nn.modules.module
    if common._global_forward_hooks or common._global_forward_pre_hooks:
        raise ConfigError(
            "torch_pi2.optimize",
            expected="hooks on modules of the model",
            found="hooks on all modules (register_module_forward_hook), of which some will not run any more",
            fix="Remove them, or register them on the modules that they are for.",
        )


def refuse_hooks(modules: Iterable[nn.Module], runs: str) -> None:
    """``modules`` do not run any more, being parts of the FFN ``runs``."""
    for module in modules:
        for attribute in (_FORWARD[0], _PRE[0]):
            object.__setattr__(module, attribute, NoHooks(runs))


def allow_hooks(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`refuse_hooks`."""
    for module in modules:
        for attribute in (_FORWARD[0], _PRE[0]):
            if isinstance(getattr(module, attribute), NoHooks):
                object.__setattr__(module, attribute, OrderedDict())
