"""What the operators on neuron stores compute, readably; the C++ core must agree."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops import reference


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
) -> torch.Tensor:
    """The feed-forward layer whose bundles are those of ``layer`` in a store: ``x [..., H]`` -> ``[..., H]``.

    Which of them are in memory changes nothing, so this is ``predicted_ffn`` (for ``kind`` ``none``: ``sparse_ffn``
    with every neuron) over what the reader gives.

    Args:
        reader: in the place of the operator's number of an open store, a ``torch_pi2.store.storefile.StoreReader``.
        The others: see :func:`torch_pi2.ops.reference.predicted_ffn`.
    """
    bundles = reader.as_computed(reader.read_layer(layer))
    biases = (bias_gate, bias_up, bias_down)
    settings: tuple[Any, ...] = (activation, activation_on_up, n_hot, threshold, reader.weights, int8_activations)
    if kind == "none":
        return reference.sparse_ffn(x, bundles, *biases, None, *settings)
    how: tuple[Any, ...] = (predictor, kind, cut, predictor_weights, predictor_int8_activations)
    return reference.predicted_ffn(x, bundles, *biases, *how, *settings)
