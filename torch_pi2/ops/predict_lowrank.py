"""``predict_lowrank``: which cold neurons will fire, says a low-rank predictor."""

from __future__ import annotations

import torch

from torch_pi2.ops.call import check_hidden


def predict_lowrank(
    x: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    b_bias: torch.Tensor | None,
    threshold: float,
) -> torch.Tensor:
    """Low-rank activation predictor ``b relu(a x) + bias >= threshold`` (PowerInfer, LLM in a flash).

    Args:
        x: ``[..., H]``; a: ``[r, H]`` int8 with ``a_scale [r]`` float32; b: ``[C, r]`` int8 with
            ``b_scale [C]`` float32; b_bias: ``[C]`` float32 or None.
        threshold: on the logit.

    Returns:
        bool ``[..., C]``: which cold neurons are predicted to fire (a NaN score counts as firing).
    """
    hidden = a.shape[1]
    z_Tr = torch.relu(x.reshape(-1, hidden).float() @ a.float().T * a_scale)
    s_TC = z_Tr @ b.float().T * b_scale
    if b_bias is not None:
        s_TC = s_TC + b_bias
    return (~(s_TC < threshold)).reshape(*x.shape[:-1], b.shape[0])


def fake(x: torch.Tensor, a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, *_: object) -> torch.Tensor:
    check_hidden(x, a.shape[1], "predictor")
    return mask_like(x, b.shape[0])


def mask_like(x: torch.Tensor, cold: int) -> torch.Tensor:
    """What a predictor of so many neurons returns."""
    return x.new_empty((*x.shape[:-1], cold), dtype=torch.bool)
