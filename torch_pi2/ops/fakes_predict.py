"""Shapes without data (fake kernels) of the predictor operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.errors import ShapeError
from torch_pi2.formats import row_bytes
from torch_pi2.ops.fakes_ffn import check_hidden, ffn_output


def _predict_lowrank(
    x: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_bias: torch.Tensor | None,
    threshold: float,
) -> torch.Tensor:
    check_hidden(x, a.shape[1], "predictor")
    return _mask(x, b.shape[0])


def _predict_lowrank_q(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    b_bias: torch.Tensor | None,
    weights: str,
    int8_activations: bool,
    threshold: float,
) -> torch.Tensor:
    _check_bytes("predictor tensor a", a, row_bytes(weights, x.shape[-1]))
    return _mask(x, b.shape[0])


def _predict_signbit(x: torch.Tensor, signs: torch.Tensor, columns: int, margin: float) -> torch.Tensor:
    check_hidden(x, columns)
    _check_bytes("signs", signs, -(-columns // 64) * 8)
    return _mask(x, signs.shape[0])


def _predicted_ffn(
    x: torch.Tensor,
    bundles: torch.Tensor,
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
    weights: str = "float",
    int8_activations: bool = False,
) -> torch.Tensor:
    return ffn_output(x, bundles, weights)


def _predicted_ffn_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    _predicted_ffn(*args, **kwargs)
    return out


def _check_bytes(what: str, rows: torch.Tensor, wanted: int) -> None:
    if rows.dim() != 2 or rows.shape[1] != wanted:
        raise ShapeError(
            what,
            expected=f"[rows, {wanted}] bytes",
            found=str(tuple(rows.shape)),
            fix="Pass hidden states of this model and a predictor fitted to it.",
        )


def _mask(x: torch.Tensor, cold: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], cold), dtype=torch.bool)


#: Operator (with overload) -> fake.
FAKES: dict[str, Callable[..., Any]] = {
    "predict_lowrank": _predict_lowrank,
    "predict_lowrank_q": _predict_lowrank_q,
    "predict_signbit": _predict_signbit,
    "predicted_ffn": _predicted_ffn,
    "predicted_ffn.out": _predicted_ffn_out,
}
