"""The operators' one list: a reference, whose signature is the operator's, and the fake kernel beside it.

A file of this folder has the references of one family. :func:`fake_of` lists each, with what its result looks like;
:mod:`torch_pi2.ops.library` registers what is listed, and a test compares the signatures with the schemas of the C++
library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from torch_pi2.errors import ShapeError

Reference = Callable[..., torch.Tensor]
Fake = Callable[[SimpleNamespace], torch.Tensor]

#: Operator -> its reference, and operator (with overload) -> its fake kernel: shapes without data.
REFERENCES: dict[str, Reference] = {}
FAKES: dict[str, Callable[..., torch.Tensor]] = {}


def fake_of(reference: Reference, out: bool = False) -> Callable[[Fake], Fake]:
    """Lists the operator of ``reference``'s name with the fake kernel that follows, which takes its arguments by name.

    Args:
        out: there is also a variant that writes into ``out``, as ExecuTorch needs it.
    """

    def listed(fake: Fake) -> Fake:
        def call(*args: Any) -> torch.Tensor:
            return fake(arguments_of(reference, args))

        def into(*args: Any, out: torch.Tensor) -> torch.Tensor:
            call(*args)
            return out

        REFERENCES[reference.__name__] = reference
        FAKES[reference.__name__] = call
        if out:
            FAKES[f"{reference.__name__}.out"] = into
        return fake

    return listed


def arguments_of(reference: Callable[..., Any], args: tuple[Any, ...]) -> SimpleNamespace:
    """The arguments of an operator's call by name. PyTorch omits trailing defaults; they are filled in."""
    defaults = _defaults(reference)
    return SimpleNamespace(**defaults | dict(zip(defaults, args)))


@cache
def _defaults(reference: Callable[..., Any]) -> dict[str, Any]:
    """Every parameter, in order, with its default: read once, as a GPU's operators ask for it in each call."""
    return {name: parameter.default for name, parameter in inspect.signature(reference).parameters.items()}


def check_hidden(x: torch.Tensor, hidden: int, whose: str = "layer") -> None:
    """Raise unless the last size of ``x`` is ``hidden``."""
    if x.shape[-1] != hidden:
        raise ShapeError(
            "hidden size of x",
            expected=f"{hidden} (the {whose}'s)",
            found=str(x.shape[-1]),
            fix="Pass hidden states of this model.",
        )


def check_rows(what: str, rows: torch.Tensor, wanted: int, of: str, fix: str) -> None:
    """Raise unless ``rows`` are rows of ``wanted`` bytes."""
    if rows.dim() != 2 or rows.shape[1] != wanted:
        raise ShapeError(what, expected=f"[rows, {wanted}] {of}", found=str(tuple(rows.shape)), fix=fix)
