"""Shapes without data (fake kernels) of the operators on neuron stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.errors import ShapeError


def _stored_ffn(
    x: torch.Tensor,
    store: int,
    layer: int,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    int8_activations: bool = False,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _crc32c(rows: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 2 or rows.dtype != torch.uint8:
        raise ShapeError("rows", expected="uint8 [n, bytes]", found=str(tuple(rows.shape)), fix="View them as bytes.")
    return rows.new_empty((rows.shape[0],), dtype=torch.int64)


#: Operator -> fake.
FAKES: dict[str, Callable[..., Any]] = {"stored_ffn": _stored_ffn, "crc32c": _crc32c}
