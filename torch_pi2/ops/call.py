"""A call of an operator: the signature of its reference is the operator's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from torch_pi2.errors import ShapeError


def arguments_of(reference: Callable[..., Any], args: tuple[Any, ...]) -> SimpleNamespace:
    """What an operator was called with, by name: PyTorch leaves out defaults at the end."""
    bound = inspect.signature(reference).bind(*args)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


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
