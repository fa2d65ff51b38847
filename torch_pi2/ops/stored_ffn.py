"""``stored_ffn``: a feed-forward layer whose neurons are in a store."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.call import arguments_of
from torch_pi2.ops.predicted_ffn import predicted
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
    parts: int = 0,
) -> torch.Tensor:
    """The feed-forward layer whose neurons are those of ``layer`` in a store: ``x [..., H]`` -> ``[..., H]``.

    Which of them are in memory changes nothing, so this is ``predicted_ffn`` (for ``kind`` ``none``: ``sparse_ffn``
    with every neuron) over what the reader gives.

    Args:
        reader: in the place of the operator's number of an open store, a ``torch_pi2.store.storefile.StoreReader``.
        first: neurons that are computed elsewhere, before all others in plan order; a multiple of 64, or some bits are
            others.
        parts: number of the layer's chunks: their sums, float32 ``[parts, T, H]``, without the bias of the down
            matrix, of fewer tokens than ``constants().gemm_tokens``; 0: the result. A layer of a shard
            (:mod:`torch_pi2.types.shard`) has chunks of the size of the whole layer's.
        The others: see :func:`torch_pi2.ops.predicted_ffn`.
    """
    neuron_rows = reader.as_computed(reader.read_layer(layer))[first:]
    gate, up, own = (None if values is None else values[first:] for values in (bias_gate, bias_up, thresholds))
    hot, neurons = max(0, n_hot - first), len(neuron_rows)
    weights = reader.operand_of(reader.keys[layer])
    active = None
    if kind != "none":
        marks = predicted(x, predictor, kind, cut, predictor_weights, predictor_int8_activations)
        active = marks[..., marks.shape[-1] - (neurons - hot) :]
    how = (activation, activation_on_up)
    if not parts:
        settings = (*how, hot, threshold, weights, int8_activations, own)
        return sparse_ffn(x, neuron_rows, gate, up, bias_down, active, *settings)
    size, sums = reader.entries[layer].chunk or torch.ops.pi2.chunk_neurons(neurons), []
    for at in range(0, neurons, size):
        end = min(at + size, neurons)
        here = [None if values is None else values[at:end] for values in (gate, up, own)]
        cold = None if active is None else active[..., max(0, at - hot) : max(0, end - hot)]
        settings = (*how, min(max(hot - at, 0), end - at), threshold, weights, int8_activations, here[2])
        part = sparse_ffn(x.float(), neuron_rows[at:end], here[0], here[1], None, cold, *settings)
        sums.append(part.view(-1, x.shape[-1]))
    return torch.stack(sums)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(stored_ffn, args)
    x: torch.Tensor = call.x
    if not call.parts:
        return x.new_empty(x.shape)
    return x.new_empty((call.parts, x.numel() // x.shape[-1], x.shape[-1]), dtype=torch.float32)
