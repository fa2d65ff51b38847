"""``gathered_experts``: a mixture of experts on a GPU, by the kernels of a layer.

Each pair of a token and one of its slots is computed as a token is there; its expert is read from ``index`` by the
kernels, so that nothing waits for the GPU. On the CPU it is ``experts_ffn`` of the C++ library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from torch_pi2.ops import experts_ffn
from torch_pi2.ops.gpu.listed import NO_PREDICTOR, Routed, compute, parts_of


def launch(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    neuron_rows: torch.Tensor,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: torch.Tensor,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: torch.Tensor,
    weights: str,
    int8_activations: bool,
) -> torch.Tensor:
    """:func:`~torch_pi2.ops.experts_ffn.experts_ffn`; arguments as there, but ``cuts`` and ``thresholds``, which are
    float64 tensors ``[E]`` (``cuts`` of kind ``none``: any).

    An index below 0 adds nothing, as E does. A token's result has the same bits each time and in any company: slots are
    added in order, in float32; within one sums have another order than on the CPU.
    """
    y = x.new_zeros(x.shape)
    for part in parts_of(len(x) if index.numel() else 0):
        compute(
            y[part], x[part].contiguous(), neuron_rows, None, None, None, None, predictor, kind, cuts,
            predictor_weights, predictor_int8_activations, activation, activation_on_up, 0, thresholds, weights,
            int8_activations, Routed(index[part].contiguous(), routing[part].contiguous()),
        )  # fmt: skip
    return y


def _on_the_cpu(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    neuron_rows: torch.Tensor,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: torch.Tensor,
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: torch.Tensor,
    *stored: Any,
) -> torch.Tensor:
    cut_of_each = [] if kind == NO_PREDICTOR else cuts.tolist()
    of_predictor = (predictor, kind, cut_of_each, predictor_weights, predictor_int8_activations)
    settings = (activation, activation_on_up, thresholds.tolist(), *stored)
    y: torch.Tensor = torch.ops.pi2.experts_ffn(x, index, routing, neuron_rows, *of_predictor, *settings)
    return y


def register() -> Any:
    """``torch.ops.pi2.gathered_experts``, as long as what is returned is kept."""
    op: Any = custom_op("pi2::gathered_experts", launch, mutates_args=())
    op.register_kernel("cpu")(_on_the_cpu)
    op.register_fake(experts_ffn.fake)
    return op
