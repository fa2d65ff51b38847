"""What the operators for mixtures of experts compute, readably; the C++ core must agree."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops import reference


def experts_ffn(
    x: torch.Tensor,
    index: torch.Tensor,
    routing: torch.Tensor,
    bundles: torch.Tensor,
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
) -> torch.Tensor:
    """Each token's sum of what its experts compute, weighted by the router: ``x [T, H]`` -> ``[T, H]``.

    Slots are added in order, in float32, and the sum is rounded to ``x``'s dtype once.

    Args:
        x: ``[T, H]`` float32, bfloat16 or float16.
        index: int64 ``[T, k]``, the experts of each token, 0 to E - 1; E itself is no expert and adds nothing (what
            expert parallelism makes of experts that are elsewhere).
        routing: ``[T, k]``, what the router weighs them with, any of these dtypes.
        bundles: ``[E, I, R, H]``, the bundles of every expert as in :func:`torch_pi2.ops.reference.sparse_ffn`; no
            biases, and no neurons that are always computed.
        predictor: tensors of :func:`torch_pi2.ops.reference.predicted_ffn`, each ``[E, ...]``; empty for ``kind``
            ``none``, where every neuron is looked at.
        cuts: E thresholds or margins of the predictors; empty for ``none``.
        thresholds: E cuts on ``|act(gate)|``; empty: 0 for all.
        The others: as in ``predicted_ffn``, the same for all experts.
    """

    def expert(e: int, x_H: torch.Tensor) -> torch.Tensor:
        layer = (bundles[e], None, None, None)
        threshold = thresholds[e] if thresholds else 0.0
        settings: tuple[Any, ...] = (activation, activation_on_up, 0, threshold, weights, int8_activations)
        if kind == "none":
            return reference.sparse_ffn(x_H, *layer, None, *settings)
        tensors = [tensor[e] for tensor in predictor]
        how: tuple[Any, ...] = (tensors, kind, cuts[e], predictor_weights, predictor_int8_activations)
        return reference.predicted_ffn(x_H, *layer, *how, *settings)

    y_TH = x.new_zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        for j in range(index.shape[1]):
            e = int(index[t, j])
            if e < bundles.shape[0]:
                y_TH[t] += routing[t, j].float() * expert(e, x[t].float())
    return y_TH.to(x.dtype)


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
) -> torch.Tensor:
    """:func:`experts_ffn` with the bundles of ``experts`` layers of a store, from ``first_layer`` on.

    Args:
        reader: in the place of the operator's number of an open store, a ``torch_pi2.store.storefile.StoreReader``.
        The others: see :func:`experts_ffn`.
    """
    bundles = torch.stack([reader.as_computed(reader.read_layer(first_layer + e)) for e in range(experts)])
    how: tuple[Any, ...] = (predictor, kind, cuts, predictor_weights, predictor_int8_activations)
    settings: tuple[Any, ...] = (activation, activation_on_up, thresholds, reader.weights, int8_activations)
    return experts_ffn(x, index, routing, bundles, *how, *settings)
