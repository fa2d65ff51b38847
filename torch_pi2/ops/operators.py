"""The list of operators: a reference, which has the operator's signature, and a fake kernel of each.

A file of this folder has the references of one family, listed by :func:`operator`. :mod:`torch_pi2.ops.library`
registers the fake kernels; a test compares signatures with the schemas of the C++ library, which checks arguments.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

Reference = TypeVar("Reference", bound=Callable[..., Any])

#: Operator -> its reference, and operator (with overload) -> its fake kernel: shapes without data.
REFERENCES: dict[str, Callable[..., Any]] = {}
FAKES: dict[str, Callable[..., Any]] = {}


def operator(
    result: Callable[[SimpleNamespace], torch.Tensor | None], out: bool = False
) -> Callable[[Reference], Reference]:
    """Decorator that lists an operator's reference. ``result``: makes an empty result from the arguments of a call by
    name. ``out``: there is also a variant that writes into ``out``, as ExecuTorch needs it.
    """

    def listed(reference: Reference) -> Reference:
        def fake(*args: Any) -> torch.Tensor | None:
            return result(arguments_of(reference, args))

        def into(*args: Any, out: torch.Tensor) -> torch.Tensor:
            return out

        REFERENCES[reference.__name__] = reference
        FAKES[reference.__name__] = fake
        if out:
            FAKES[f"{reference.__name__}.out"] = into
        return reference

    return listed


def like_x(call: SimpleNamespace) -> torch.Tensor:
    return call.x.new_empty(call.x.shape)


def arguments_of(reference: Callable[..., Any], args: tuple[Any, ...]) -> SimpleNamespace:
    """The arguments of an operator's call by name, with the trailing defaults that PyTorch omits."""
    defaults = _defaults(reference)
    return SimpleNamespace(**defaults | dict(zip(defaults, args)))


@cache
def _defaults(reference: Callable[..., Any]) -> dict[str, Any]:
    """Every parameter with its default, in order; cached, as GPU operators need it in each call."""
    return {name: parameter.default for name, parameter in inspect.signature(reference).parameters.items()}
