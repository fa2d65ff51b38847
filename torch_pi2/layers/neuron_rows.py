"""Making neurons' rows from a layer's matrices, float and quantised, and taking them apart again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_pi2.base.memory import new_tensor
from torch_pi2.formats import row_bytes
from torch_pi2.ops.quantized import quantize
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.types.site import FFNSite, FFNWeights

#: Float32 bytes of the rows that are quantised at a time.
_CHUNK_BYTES = 32 << 20


def make_rows(weights: FFNWeights, order: torch.Tensor) -> torch.Tensor:
    """``[I, R, H]`` contiguous: gate row, up row and down column of each neuron, in ``order`` (``[I]`` int64)."""
    rows = [w for w in (weights.gate, weights.up, weights.down.T) if w is not None]
    rows_IRH = new_tensor((len(order), len(rows), weights.up.shape[1]), weights.up.dtype)
    for r, row_IH in enumerate(rows):  # one matrix at a time keeps the peak at one copy
        rows_IRH[:, r] = row_IH.detach()[order]
    return rows_IRH


def make_quantized_rows(
    site: FFNSite,
    weights: FFNWeights,
    order: torch.Tensor,
    kind: str,
    importance: torch.Tensor | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, float]:
    """As :func:`make_rows`, quantised: uint8 ``[I, R, row_bytes(H)]``, and the relative error of all its weights.

    Args:
        kind: ``int4`` or ``int8``.
        importance: ``[H]`` float32, how much the squared error of a column of gate and up counts (their common input's
            mean square); a down column multiplies one number alone, so its errors count the same.
        given: role -> rows ``[I, row_bytes(H)]`` in the model's order, to be taken as they are.

    Raises:
        NonFiniteError: see :func:`torch_pi2.ops.quantized.quantize`.
    """
    refs = [("gate", weights.gate, site.gate), ("up", weights.up, site.up), ("down", weights.down.T, site.down)]
    rows = [(role, w, ref) for role, w, ref in refs if w is not None and ref is not None]
    hidden = weights.up.shape[1]
    neuron_rows = new_tensor((len(order), len(rows), row_bytes(kind, hidden)), torch.uint8)
    step = max(1, _CHUNK_BYTES // (4 * hidden))
    wrong = total = 0.0
    for r, (role, w_IH, ref) in enumerate(rows):
        for start in range(0, len(order), step):
            part = w_IH.detach()[order[start : start + step]].contiguous()
            weight = None if role == "down" else importance
            if given is not None and role in given:
                quantised = given[role][order[start : start + step]]
            else:
                quantised = quantize(f"{ref.weight} of {site.key}", part, kind, weight)
            neuron_rows[start : start + step, r] = quantised
            off = torch.ops.pi2.dequantize(quantised, kind, hidden, torch.float32).sub_(part)
            wrong += float(off.square_().sum(dtype=torch.float64))
            total += float(part.float().square_().sum(dtype=torch.float64))
    return neuron_rows, (wrong / total) ** 0.5 if total else 0.0


def row_of_each(neuron_rows: torch.Tensor, row: int, kind: str, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Row ``row`` of every neuron as ``[I, H]`` in ``dtype``: a view if they are stored so, else a copy."""
    if kind == "float":
        return neuron_rows[:, row].to(dtype)
    rows, of = row_of_neurons(neuron_rows, row, kind, hidden)
    w_IH: torch.Tensor = torch.ops.pi2.dequantize(rows, of, hidden, dtype)
    return w_IH


def permuted(bias: torch.Tensor | None, order: torch.Tensor) -> torch.Tensor | None:
    """A bias, if there is one, in ``order``."""
    return None if bias is None else bias.detach()[order]
