"""``stored_experts``: a mixture of experts whose neurons are in a store."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.experts_ffn import check_routed, experts_ffn


def stored_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    reader: Any,
    first_layer: int,
    experts: int,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: list[float],
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: list[float],
    int8_activations: bool = False,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """:func:`experts_ffn` with the neurons of ``experts`` layers of a store, from ``first_layer`` on.

    Args:
        reader: in the place of the operator's number of an open store, a ``torch_pi2.store.storefile.StoreReader``.
        The others: see :func:`experts_ffn`.
    """
    neuron_rows = torch.stack([reader.as_computed(reader.read_layer(first_layer + e)) for e in range(experts)])
    how: tuple[Any, ...] = (predictor, kind, cuts, predictor_weights, predictor_int8_activations)
    weights = reader.operand_of(reader.keys[first_layer])
    settings: tuple[Any, ...] = (activation, activation_on_up, thresholds, weights, int8_activations)
    rest: tuple[Any, ...] = (bias_gate, bias_up, bias_down, first)
    return experts_ffn(x, index, routing, neuron_rows, *how, *settings, *rest)


def fake(x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor, *_: object) -> torch.Tensor:
    check_routed(x, index, routing)
    return x.new_empty(x.shape)
