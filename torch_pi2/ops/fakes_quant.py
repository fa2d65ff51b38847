"""Shapes without data (fake kernels) of the operators over quantised rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.errors import ShapeError
from torch_pi2.formats import row_bytes


def _linear(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    _check_rows(rows, weights, x.shape[-1])
    return x.new_empty((*x.shape[:-1], rows.shape[0]))


def _linear_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    _linear(*args, **kwargs)
    return out


def _quantize(w: torch.Tensor, weights: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    if w.dim() != 2:
        raise ShapeError(
            "w", expected="[rows, columns]", found=str(tuple(w.shape)), fix="Pass the weight of a linear layer."
        )
    return w.new_empty((w.shape[0], row_bytes(weights, w.shape[1])), dtype=torch.uint8)


def _dequantize(rows: torch.Tensor, weights: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
    _check_rows(rows, weights, columns)
    return rows.new_empty((rows.shape[0], columns), dtype=dtype)


def _check_rows(rows: torch.Tensor, weights: str, columns: int) -> None:
    wanted = row_bytes(weights, columns)
    if rows.dim() != 2 or rows.shape[1] != wanted:
        raise ShapeError(
            "rows",
            expected=f"[rows, {wanted}] ({columns} columns of {weights})",
            found=str(tuple(rows.shape)),
            fix="Pass the columns and the format it was quantised with.",
        )


#: Operator (with overload) -> fake.
FAKES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "linear.out": _linear_out,
    "quantize": _quantize,
    "dequantize": _dequantize,
}
