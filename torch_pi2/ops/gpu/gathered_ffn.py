"""``sparse_ffn`` and ``predicted_ffn`` on a GPU: listed neurons are gathered and computed, by Triton kernels.

To ``torch.compile`` they are as opaque as on the CPU: of a ``triton_op`` Inductor takes the weights for written to (an
address that comes from a sum of what was read), and copies them in each call.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.formats import FLOAT
from torch_pi2.ops.gpu.listed import NO_PREDICTOR, compute, parts_of


def _check_one(thresholds: torch.Tensor | None) -> None:
    """Raises UnsupportedModelError: neurons have thresholds of their own, which no kernel here compares with."""
    if thresholds is not None:
        raise UnsupportedModelError(
            "thresholds on a GPU",
            expected="one threshold for a layer",
            found="one for each neuron",
            fix="Leave the model on the CPU, or choose score='gate'.",
        )


def launch(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    *how: Any,
) -> torch.Tensor:
    """:func:`~torch_pi2.ops.sparse_ffn.sparse_ffn` with ``active``, or
    :func:`~torch_pi2.ops.predicted_ffn.predicted_ffn`; ``how``: what :func:`~torch_pi2.ops.gpu.listed.compute` takes
    from ``predictor`` on.

    A token's result has the same bits each time and in any company; sums are taken in float32, in another order than on
    the CPU.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    y_TH, x_TH = y.view(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
    active_TC = None if active is None else active.reshape(len(x_TH), -1)
    for part in parts_of(len(x_TH)):
        wanted = None if active_TC is None else active_TC[part]
        compute(y_TH[part], x_TH[part], neuron_rows, bias_gate, bias_up, bias_down, wanted, *how)
    return y


def sparse_ffn(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str = FLOAT,
    int8_activations: bool = False,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.ops.pi2.sparse_ffn`` there."""
    _check_one(thresholds)
    layer, settings = (x, neuron_rows, bias_gate, bias_up, bias_down), (activation, activation_on_up, n_hot, threshold)
    return launch(*layer, active, [], NO_PREDICTOR, 0.0, "", False, *settings, weights, int8_activations)


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
    weights: str = FLOAT,
    int8_activations: bool = False,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.ops.pi2.predicted_ffn`` there."""
    _check_one(thresholds)
    layer, settings = (x, neuron_rows, bias_gate, bias_up, bias_down), (activation, activation_on_up, n_hot, threshold)
    how = (predictor, kind, cut, predictor_weights, predictor_int8_activations)
    return launch(*layer, None, *how, *settings, weights, int8_activations)
