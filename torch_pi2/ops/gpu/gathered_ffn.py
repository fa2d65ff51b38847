"""``gathered_ffn``: a feed-forward layer on a GPU, of which listed neurons are computed, as Triton kernels.

An opaque operator to ``torch.compile``: of a ``triton_op`` Inductor takes the weights for written to (an address that
comes from a sum of what was read), and copies them in each call. On the CPU it is ``sparse_ffn`` or ``predicted_ffn``
of the C++ library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from torch_pi2.ops.gpu import gathered_experts
from torch_pi2.ops.gpu.listed import NO_PREDICTOR, compute, parts_of
from torch_pi2.ops.sparse_ffn import ffn_output

__all__ = ["NO_PREDICTOR", "launch", "register"]


def launch(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    n_hot: int,
    threshold: float,
    weights: str,
    int8_activations: bool,
) -> torch.Tensor:
    """:func:`~torch_pi2.ops.sparse_ffn.sparse_ffn` with ``active``, or
    :func:`~torch_pi2.ops.predicted_ffn.predicted_ffn` where ``kind`` is not ``none``; arguments as there.

    A token's result has the same bits each time and in any company; sums are taken in float32, in another order than on
    the CPU.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    y_TH, x_TH = y.view(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous()
    active_TC = None if active is None else active.reshape(len(x_TH), -1)
    for part in parts_of(len(x_TH)):
        compute(
            y_TH[part], x_TH[part], neuron_rows, bias_gate, bias_up, bias_down,
            None if active_TC is None else active_TC[part], predictor, kind, cut, predictor_weights,
            predictor_int8_activations, activation, activation_on_up, n_hot, threshold, weights, int8_activations,
        )  # fmt: skip
    return y


def _on_the_cpu(
    x: torch.Tensor,
    neuron_rows: torch.Tensor,
    bias_gate: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    bias_down: torch.Tensor | None,
    active: torch.Tensor | None,
    predictor: list[torch.Tensor],
    kind: str,
    cut: float,
    predictor_weights: str,
    predictor_int8_activations: bool,
    *settings: Any,
) -> torch.Tensor:
    y: torch.Tensor
    tensors = (x, neuron_rows, bias_gate, bias_up, bias_down)
    if kind == NO_PREDICTOR:
        y = torch.ops.pi2.sparse_ffn(*tensors, active, *settings)
    else:
        of_predictor = (predictor, kind, cut, predictor_weights, predictor_int8_activations)
        y = torch.ops.pi2.predicted_ffn(*tensors, *of_predictor, *settings)
    return y


def _fake(x: torch.Tensor, neuron_rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return ffn_output(x, neuron_rows, others[-2])


def register() -> Any:
    """``torch.ops.pi2.gathered_ffn`` and ``gathered_experts``, as long as what is returned is kept."""
    op: Any = custom_op("pi2::gathered_ffn", launch, mutates_args=())
    op.register_kernel("cpu")(_on_the_cpu)
    op.register_fake(_fake)
    return op, gathered_experts.register()
