"""``stored_ffn``: a feed-forward layer whose neurons are in a store."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.predicted_ffn import predicted_ffn
from torch_pi2.ops.sparse_ffn import sparse_ffn


def stored_ffn(
    x: torch.Tensor,
    reader: Any,
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
    first: int = 0,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """The feed-forward layer whose neurons are those of ``layer`` in a store: ``x [..., H]`` -> ``[..., H]``.

    Which of them are in memory changes nothing, so this is ``predicted_ffn`` (for ``kind`` ``none``: ``sparse_ffn``
    with every neuron) over what the reader gives.

    Args:
        reader: in the place of the operator's number of an open store, a ``torch_pi2.store.storefile.StoreReader``.
        first: neurons that are computed elsewhere, before all others in plan order; a multiple of 64, or some bits are
            others.
        The others: see :func:`torch_pi2.ops.predicted_ffn`.
    """
    neuron_rows = reader.as_computed(reader.read_layer(layer))[first:]
    gate, up, own = (None if values is None else values[first:] for values in (bias_gate, bias_up, thresholds))
    biases = (gate, up, bias_down)
    hot = max(0, n_hot - first)
    weights = reader.operand_of(reader.keys[layer])
    settings: tuple[Any, ...] = (activation, activation_on_up, hot, threshold, weights, int8_activations, own)
    if kind == "none":
        return sparse_ffn(x, neuron_rows, *biases, None, *settings)
    how: tuple[Any, ...] = (predictor, kind, cut, predictor_weights, predictor_int8_activations)
    return predicted_ffn(x, neuron_rows, *biases, *how, *settings)


def fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)
