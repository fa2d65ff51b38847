"""``predict_lowrank_q``: as ``predict_lowrank``, over quantised rows."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.formats import row_bytes
from torch_pi2.ops import rows as quantized
from torch_pi2.ops.call import arguments_of, check_rows
from torch_pi2.ops.linear_blocks import IN_BLOCKS, from_blocks
from torch_pi2.ops.predict_lowrank import mask_like

#: What to do about bytes of another length.
FIX = "Pass hidden states of this model and a predictor fitted to it."


def predict_lowrank_q(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    b_bias: torch.Tensor | None,
    weights: str,
    int8_activations: bool,
    threshold: float,
) -> torch.Tensor:
    """:func:`predict_lowrank` over rows quantised in groups.

    Args:
        x: ``[..., H]``; a: uint8 ``[r, row_bytes(H)]``; b: uint8 ``[C, row_bytes(r)]``; b_bias: float32
            ``[C]`` or None.
        weights: format of ``a`` and ``b``, ``int4`` or ``int8``; ``int4_blocks``, ``int8_blocks``: both in blocks of
            16 rows (:mod:`torch_pi2.ops.linear_blocks`; int8 activations only), where b may have rows before those
            that there are biases for.
        int8_activations: ``x`` and ``relu(a x)`` are seen rounded to int8 per group of 32.
        threshold: on the logit.
    """

    if weights.endswith(IN_BLOCKS):
        weights = weights.removesuffix(IN_BLOCKS)
        a, b = from_blocks(a, weights, x.shape[-1]), from_blocks(b, weights, len(a))
        b = b if b_bias is None else b[len(b) - len(b_bias) :]

    def seen(v: torch.Tensor) -> torch.Tensor:
        return quantized.rounded_activations(v) if int8_activations else v

    z_Tr = torch.relu(seen(x.float()) @ quantized.values(a, weights, x.shape[-1]).T)
    s_TC = seen(z_Tr) @ quantized.values(b, weights, a.shape[0]).T
    return ~((s_TC if b_bias is None else s_TC + b_bias) < threshold)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(predict_lowrank_q, args)
    weights = call.weights.removesuffix(IN_BLOCKS)
    check_rows("predictor tensor a", call.a, row_bytes(weights, call.x.shape[-1]), "bytes", FIX)
    shifted = weights != call.weights and call.b_bias is not None
    return mask_like(call.x, len(call.b_bias if shifted else call.b))
