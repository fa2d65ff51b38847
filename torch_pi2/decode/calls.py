"""Which calls of a Decoder, and of its model, several processes make together when one of them leads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import nn

from torch_pi2.base.calls import Call, Leader
from torch_pi2.base.group import Group
from torch_pi2.errors import ConfigError
from torch_pi2.layers.prompt import is_sparse_only
from torch_pi2.rewrite.handle import Handle

P = ParamSpec("P")
Result = TypeVar("Result")


class Led(Protocol):
    """What has methods that are :func:`led`."""

    model: nn.Module
    number: int | None


Some = TypeVar("Some", bound=Led)

#: Names of methods that are :func:`led`.
LED: set[str] = set()


def group_of(model: nn.Module) -> Group | None:
    """The processes that compute ``model`` together; None: this one does so alone."""
    handle = Handle.of(model)
    return None if handle is None else handle.group


def leader_of(model: nn.Module) -> Leader | None:
    """That of this process, if it leads others that compute ``model`` with it."""
    group = group_of(model)
    leader: Leader | None = None if group is None else group.leader
    return leader


def led(method: Callable[Concatenate[Some, P], Result]) -> Callable[Concatenate[Some, P], Result]:
    """``method``, which changes what an object has, or computes: where this process leads, the others do the same."""
    name = method.__name__
    LED.add(name)

    @functools.wraps(method)
    def call(self: Some, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        leader = leader_of(self.model)
        if leader is None:
            return method(self, *args, **kwargs)
        if not leader.knows(self.number):
            raise ConfigError(
                f"{type(self).__name__} of a model that several processes compute",
                expected="one that was made since torch_pi2.lead",
                found="one from before, or a copy, which the other processes have not",
                fix="Make it again.",
            )
        with leader.call(Call(name, self.number, args, kwargs, is_sparse_only())):
            return method(self, *args, **kwargs)

    return call


def number_of(made: Led, **settings: Any) -> int | None:
    """By which the other processes know what was made with these ``settings``; None: there are none that are led."""
    leader = leader_of(made.model)
    if leader is None:
        return None
    number = leader.number(made)
    with leader.call(Call(type(made).__name__, number, (), settings)):
        return number
