"""``predict_signbit``: which cold neurons will fire, say the signs of their gates."""

from __future__ import annotations

import torch

from torch_pi2.ops.call import check_hidden, check_rows
from torch_pi2.ops.predict_lowrank import mask_like
from torch_pi2.ops.predict_lowrank_q import FIX


def predict_signbit(x: torch.Tensor, signs: torch.Tensor, columns: int, margin: float) -> torch.Tensor:
    """Sign-bit predictor (SparseInfer, arXiv 2411.12692): the sign of a sum from the signs of its products.

    Of the H products of a gate row with ``x``, those whose signs differ are taken to be negative, the others to be
    positive; a neuron is predicted active iff ``agreeing >= margin * differing``. The paper's rule (skip where
    ``alpha * agreeing < differing``) with ``margin = 1 / alpha``. A NaN in a token makes all its neurons active.

    Args:
        x: ``[..., H]``; signs: uint8 ``[C, ceil(H / 64) * 8]``, bit k % 8 of byte k // 8 is 1 where weight k < 0.
        columns: H; margin: 0 predicts everything active.

    Returns:
        bool ``[..., C]``.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
    bits_CH = (signs[..., None] >> shifts & 1).flatten(-2)[:, :columns].float()
    bits_TH = (x < 0).float()
    differing = bits_TH @ (1 - bits_CH).T + (1 - bits_TH) @ bits_CH.T
    active = (columns - differing).double() >= margin * differing.double()
    return active | x.isnan().any(-1, keepdim=True)


def most_differing(columns: int, margin: float) -> int:
    """With how many differing signs, at most, :func:`predict_signbit` finds a neuron active; -1: with none at all."""
    lowest, highest = -1, columns  # fewer are active wherever more are
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        active = float(columns - middle) >= margin * float(middle)
        lowest, highest = (middle, highest) if active else (lowest, middle - 1)
    return lowest


def fake(x: torch.Tensor, signs: torch.Tensor, columns: int, margin: float) -> torch.Tensor:
    check_hidden(x, columns)
    check_rows("signs", signs, -(-columns // 64) * 8, "bytes", FIX)
    return mask_like(x, signs.shape[0])
