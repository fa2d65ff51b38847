"""Hooks of modules that give way to a sparse layer: kept where they go on meaning the same, never dropped in silence.

A module that is replaced shares its hooks with what stands in its place, in both directions. A way of rewriting that
would silence a hook is not taken: an FFN with hooks inside runs through lazy tensors
(:mod:`torch_pi2.layers.lazy`), where they see and may change every value, or is refused by name. A module that does
not run any more after a rewrite has :class:`NoHooks`: registering one there raises ConfigError. So does assigning to
it (:class:`Unheeded`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

from torch_pi2.errors import ConfigError

_FORWARD = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_PRE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
#: Around state_dict() and load_state_dict(). Those before loading run wherever they are.
_STATE = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_BEFORE_LOADING = "_load_state_dict_pre_hooks"


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
    for attribute in (*_FORWARD, *_PRE, *_STATE, _BEFORE_LOADING):
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
        if has_hooks(part) or any(getattr(part, attribute) for attribute in _STATE):
            return f"{name} has a hook"
    return own_forward({prefix: module, **parts})


def has_stand_ins(model: nn.Module) -> bool:
    """Whether a rewrite has put anything into ``model``; asked by rooms that do not know what it puts there."""
    return any(getattr(part, "is_stand_in", False) for part in model.modules())


def refuse_global_hooks(what: str) -> None:
    """Raise ConfigError, of ``what``, if PyTorch calls hooks around the forward of every module there is."""
    common = nn.modules.module
    if common._global_forward_hooks or common._global_forward_pre_hooks:
        raise ConfigError(
            what,
            expected="hooks on modules of the model",
            found="hooks on all modules (register_module_forward_hook), some of which do not run in an optimised model",
            fix="Remove them, or register them on the modules that they are for.",
        )


class Unheeded(nn.Module):
    """Mixed into the class of a module that does not run any more: nothing would heed what is assigned to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        # parameters: runtime/absent.py has what becomes of those
        ours = name.startswith("_") or name == "training" or name in self._parameters
        if not ours and hasattr(self, name):
            raise ConfigError(
                f"assigning {name} of a {type(self).__name__} in a feed-forward layer",
                expected="a module that runs",
                found="one whose layer the optimised model computes as a whole",
                fix="Assign it before torch_pi2.optimize, or call torch_pi2.restore(model) first.",
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, (kind, *arguments), *state = reduced
        return _made_unheeded, (made, kind.__mro__[2], *arguments), *state


@cache
def _unheeded(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Unheeded, kind), names)


def _made_unheeded(made: Any, kind: Any, *arguments: Any) -> Any:
    return made(_unheeded(kind), *arguments)


def refuse_assignments(module: nn.Module) -> None:
    """``module`` does not run any more: assigning its attributes (``forward``, a part of it) raises ConfigError."""
    kind: Any = type(module)
    if not issubclass(kind, Unheeded):
        object.__setattr__(module, "__class__", _unheeded(kind))


def allow_assignments(module: nn.Module) -> None:
    """Undo :func:`refuse_assignments`."""
    if isinstance(module, Unheeded):
        object.__setattr__(module, "__class__", type(module).__mro__[2])


def refuse_hooks(modules: Iterable[nn.Module], runs: str) -> None:
    """``modules`` do not run any more, being parts of the FFN ``runs``."""
    for module in modules:
        for attribute in (_FORWARD[0], _PRE[0], *_STATE):
            object.__setattr__(module, attribute, NoHooks(runs))


def allow_hooks(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`refuse_hooks`."""
    for module in modules:
        for attribute in (_FORWARD[0], _PRE[0], *_STATE):
            if isinstance(getattr(module, attribute), NoHooks):
                object.__setattr__(module, attribute, OrderedDict())
