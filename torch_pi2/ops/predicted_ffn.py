"""``predicted_ffn``: a prediction of neurons, and the layer with it."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.call import arguments_of
from torch_pi2.ops.predict_lowrank import predict_lowrank
from torch_pi2.ops.predict_lowrank_q import predict_lowrank_q
from torch_pi2.ops.predict_signbit import predict_signbit
from torch_pi2.ops.sparse_ffn import ffn_output, sparse_ffn


def predicted_ffn(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
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
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """A prediction and :func:`sparse_ffn` with it as ``active``, in one call.

    Args:
        predictor, kind: ``lowrank`` with ``[a, a_scale, b, b_scale]`` of :func:`predict_lowrank`, ``lowrank_q`` with
            ``[a, b]`` of :func:`predict_lowrank_q`, either with a bias as last tensor if there is one; ``signbit`` with
            ``[signs]`` of :func:`predict_signbit`. The last rows are of the cold neurons, any before them of hot ones.
        cut: threshold of a low-rank predictor, margin of a sign-bit one.
        predictor_weights, predictor_int8_activations: of ``lowrank_q``; others ignore them.
    """
    active = predicted(x, predictor, kind, cut, predictor_weights, predictor_int8_activations)
    active = active[..., active.shape[-1] - (neuron_rows.shape[0] - n_hot) :]
    layer = (active, activation, activation_on_up, n_hot, threshold, weights, int8_activations, thresholds)
    return sparse_ffn(x, neuron_rows, bias_gate, bias_up, bias_down, *layer)


def predicted(
    x: torch.Tensor, predictor: list[torch.Tensor], kind: str, cut: float, weights: str, int8_activations: bool
) -> torch.Tensor:
    """Which neurons the predictor of :func:`predicted_ffn` wants, bool ``[..., rows]``: of all rows that it has."""
    if kind == "signbit":
        return predict_signbit(x, predictor[0], x.shape[-1], cut)
    if kind == "lowrank":
        a, a_scale, b, b_scale, *bias = predictor
        return predict_lowrank(x, a, a_scale, b, b_scale, bias[0] if bias else None, cut)
    a, b, *bias = predictor
    return predict_lowrank_q(x, a, b, bias[0] if bias else None, weights, int8_activations, cut)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(predicted_ffn, args)
    return ffn_output(call.x, call.neuron_rows, call.weights)
