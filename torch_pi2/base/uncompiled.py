"""``torch.compiler.disable`` that imports no compiler: processes that compile nothing start a second earlier."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """A function, or a decorator of one, that runs as it is in compiled code, which breaks the graph at its call."""
    if fn is None:
        return functools.partial(uncompiled, recursive=recursive, reason=reason)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn, recursive, reason=reason))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable, call._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return call
