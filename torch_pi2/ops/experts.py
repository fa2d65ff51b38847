"""Mixtures of experts: ``experts_ffn``, and ``stored_experts`` over a neuron store."""

from typing import Any

import torch

from torch_pi2.ops.ffn import predicted_ffn, sparse_ffn
from torch_pi2.ops.operators import like_x, operator


@operator(like_x)
def experts_ffn(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    neuron_rows: torch.Tensor,
    predictor: list[torch.Tensor],
    kind: str,
    cuts: list[float],
    predictor_weights: str,
    predictor_int8_activations: bool,
    activation: str,
    activation_on_up: bool,
    thresholds: list[float],
    weights: str,
    int8_activations: bool = False,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Each token's sum of its experts' results, weighted by the router: ``x [T, H]`` -> ``[T, H]``.

    Slots are added in order, in float32, and the sum is rounded to ``x``'s dtype once.

    Args:
        x: ``[T, H]`` float32, bfloat16 or float16.
        index: int64 ``[T, k]``, each token's experts, 0 to E - 1; E adds nothing (expert parallelism: an expert
            elsewhere).
        routing: ``[T, k]``, their weights, in any of these dtypes.
        neuron_rows: ``[E, I, ...]``, as in :func:`torch_pi2.ops.ffn.sparse_ffn` per expert; no neuron is hot.
        predictor: tensors of :func:`torch_pi2.ops.ffn.predicted_ffn`, each ``[E, ...]``; empty for ``kind`` ``none``,
            which computes every gate. For ``gate``, with the bits of ``none``: ``[rows, of_E]``, the first rows of all
            neurons of some experts, ``[n, I, ...]``, and which of them are each expert's, int64 ``[E]`` (negative:
            none); of fewer than ``constants().gemm_tokens`` tokens ``stored_experts`` reads only what fires there. For
            ``mask``: ``[active]``, a choice made already, contiguous bool ``[T, k, I]``: each token's neurons of each
            of its experts (of an expert that it names twice, in the first place).
        cuts: E thresholds or margins of the predictors; empty for ``none``, ``gate`` and ``mask``.
        thresholds: E cuts on ``|act(gate)|``; empty: 0 for all.
        bias_gate, bias_up: ``[E, I]`` or None; bias_down: ``[E, H]`` or None.
        first: number of first neurons of each expert that are computed elsewhere, a multiple of 64: the result has the
            bits of experts without them. Predictors have rows for all neurons.
        The others: as in ``predicted_ffn``, the same for all experts.
    """

    def expert(e: int, t: int, x_H: torch.Tensor) -> torch.Tensor:
        biases = [None if bias is None else bias[e, first:] for bias in (bias_gate, bias_up)]
        layer: tuple[Any, ...] = (neuron_rows[e, first:], *biases, None if bias_down is None else bias_down[e])
        threshold = thresholds[e] if thresholds else 0.0
        settings: tuple[Any, ...] = (activation, activation_on_up, 0, threshold, weights, int8_activations)
        if kind in ("none", "gate"):
            return sparse_ffn(x_H, *(*layer, None), *settings)
        of_e = (t, index[t].tolist().index(e)) if kind == "mask" else e
        tensors, cut = [tensor[of_e] for tensor in predictor], cuts[e] if cuts else 0.0
        how: tuple[Any, ...] = (tensors, kind, cut, predictor_weights, predictor_int8_activations)
        return predicted_ffn(x_H, *layer, *how, *settings)

    y_TH = x.new_zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        for j in range(index.shape[1]):
            e = int(index[t, j])
            if e < neuron_rows.shape[0]:
                y_TH[t] += routing[t, j].float() * expert(e, t, x[t].float())
    return y_TH.to(x.dtype)


@operator(like_x)
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
    """:func:`experts_ffn` with the neurons of ``experts`` layers of a store, from ``first_layer`` on. ``reader``: a
    ``torch_pi2.store.storefile.StoreReader``; the operator takes the number of an open store.
    """
    neuron_rows = torch.stack([reader.as_computed(reader.read_layer(first_layer + e)) for e in range(experts)])
    how: tuple[Any, ...] = (predictor, kind, cuts, predictor_weights, predictor_int8_activations)
    weights = reader.operand_of(reader.keys[first_layer])
    settings: tuple[Any, ...] = (activation, activation_on_up, thresholds, weights, int8_activations)
    rest: tuple[Any, ...] = (bias_gate, bias_up, bias_down, first)
    return experts_ffn(x, index, routing, neuron_rows, *how, *settings, *rest)
