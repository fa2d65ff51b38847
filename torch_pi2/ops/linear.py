"""``linear``: a linear layer over quantised rows."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.call import arguments_of
from torch_pi2.ops.quantize import check_format
from torch_pi2.ops.rows import rounded_activations, values


def linear(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    """``x W^T + bias`` over quantised rows: ``[..., K] -> [..., N]`` in ``x``'s dtype; sums are taken in float32.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        rows: uint8 ``[N, row_bytes(K)]``; bias: ``[N]`` float32 or None.
        weights: ``int4``, ``int8`` or one of ``GGML``, of whose blocks K is a whole number.
        int8_activations: ``x`` is rounded to int8 per group of 32 first (lossy).
    """
    seen = rounded_activations(x) if int8_activations else x.float()
    y = seen @ values(rows, weights, x.shape[-1]).T
    return (y if bias is None else y + bias).to(x.dtype)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(linear, args)
    check_format(call.rows, call.weights, call.x.shape[-1])
    out: torch.Tensor = call.x.new_empty((*call.x.shape[:-1], call.rows.shape[0]))
    return out
