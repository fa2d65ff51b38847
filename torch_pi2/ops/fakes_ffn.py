"""Shapes without data (fake kernels) of the feed-forward operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.errors import ShapeError
from torch_pi2.formats import QUANTIZED, row_bytes


def check_hidden(x: torch.Tensor, hidden: int, whose: str = "layer") -> None:
    """Raise unless the last size of ``x`` is ``hidden``."""
    if x.shape[-1] != hidden:
        raise ShapeError(
            "hidden size of x",
            expected=f"{hidden} (the {whose}'s)",
            found=str(x.shape[-1]),
            fix="Pass hidden states of this model.",
        )


def _sparse_ffn(
    x: torch.Tensor,
    bundles: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str = "float",
    int8_activations: bool = False,
) -> torch.Tensor:
    return ffn_output(x, bundles, weights)


def ffn_output(x: torch.Tensor, bundles: torch.Tensor, weights: str) -> torch.Tensor:
    """What a feed-forward operator returns for ``x``, after the checks that need no data."""
    if bundles.dim() != 3 or bundles.shape[1] not in (2, 3):
        raise ShapeError(
            "bundles",
            expected="[neurons, 3 or 2, hidden]",
            found=str(tuple(bundles.shape)),
            fix="Build them with torch_pi2.layers.ffn.",
        )
    if weights in QUANTIZED:
        wanted = row_bytes(weights, x.shape[-1])
        if bundles.shape[2] != wanted:
            raise ShapeError(
                "bundles",
                expected=f"rows of {wanted} bytes (hidden size {x.shape[-1]} of x in {weights})",
                found=str(bundles.shape[2]),
                fix="Pass hidden states of this model and the weights it was quantised to.",
            )
    else:
        check_hidden(x, bundles.shape[2])
    return x.new_empty(x.shape)


def _sparse_ffn_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    _sparse_ffn(*args, **kwargs)
    return out


#: Operator (with overload) -> fake.
FAKES: dict[str, Callable[..., Any]] = {"sparse_ffn": _sparse_ffn, "sparse_ffn.out": _sparse_ffn_out}
