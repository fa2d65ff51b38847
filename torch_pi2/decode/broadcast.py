"""Calls of a ``Decoder`` that a coordinator broadcasts to all processes of its group (docs/DISTRIBUTED.md)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from torch_pi2.distributed.coordinator import Call, Coordinator
from torch_pi2.distributed.group import Group
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import call_mode
from torch_pi2.rewrite.state import ModelState

Method = TypeVar("Method", bound=Callable[..., Any])


#: Names of methods that were marked with :func:`broadcast_call`.
BROADCAST_CALLS: set[str] = set()


def group_of(model: nn.Module) -> Group | None:
    """The processes that compute ``model`` together; None: only this one."""
    handle = ModelState.of(model)
    return None if handle is None else handle.group


def coordinator_of(model: nn.Module) -> Coordinator | None:
    """The coordinator of the group of ``model`` if this process leads it."""
    group = group_of(model)
    return None if group is None else group.coordinator


def broadcast_call(method: Method) -> Method:
    """Mark a method that all processes have to call. Objects passed to :func:`announce` broadcast its calls."""
    BROADCAST_CALLS.add(method.__name__)
    return method


def announce(made: Any, **settings: Any) -> None:
    """If this process leads: the others make such an object (``made.number``: its id) and repeat its calls."""
    coordinator = coordinator_of(made.model)
    if coordinator is None:
        return
    made.number = coordinator.number(made)
    with coordinator.call(Call(type(made).__name__, made.number, (), settings)):
        kind: Any = type(made)
        made.__class__ = _broadcasting(kind)


def check_coordinated(group: Group) -> None:
    """Raises ConfigError: there is a coordinator, and this call is not broadcast by it."""
    if group.coordinator is not None and not group.coordinator.within:
        raise _unknown_to_others("Decoder")


@functools.cache
def _broadcasting(kind: type) -> type:
    return type(kind.__name__, (kind,), {name: _broadcast(getattr(kind, name)) for name in BROADCAST_CALLS})


def _broadcast(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        coordinator = coordinator_of(self.model)
        if coordinator is None:  # it has been closed
            return method(self, *args, **kwargs)
        if not coordinator.knows(self.number):
            raise _unknown_to_others(type(self).__name__)
        with coordinator.call(Call(method.__name__, self.number, args, kwargs, call_mode.sparse_only)):
            return method(self, *args, **kwargs)

    return call


def _unknown_to_others(name: str) -> ConfigError:
    what = f"{name} of a model that several processes compute"
    found = "an older one or a copy, which the other processes do not have"
    return ConfigError(what, expected="one that was made after torch_pi2.lead", found=found, fix="Make it again.")
