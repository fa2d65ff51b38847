"""4-bit weights with a scale for each group of inputs: QNN's block-wise expansion.

A group's scale is a whole multiple, 1 to 16, of a sixteenth of the largest in its row: 8 stored bits for each group,
and a float for each row. ExecuTorch's observer takes any float, and its encoder rounds that to a multiple after the
weights were divided by it, so that the NPU computed with other weights than PyTorch (3e-2 of the output). Here scales
are multiples before any weight is divided.
"""

from __future__ import annotations

import torch

#: Weights of a group, along the input.
SIZES = (16, 32, 64)

#: Largest value of a symmetric 4-bit weight, as the compiler's quantiser uses it: -7 to 7.
MOST = 7
STEPS = 16

#: Multiples below the one that clips nothing that are tried, too: coarser clipping, finer steps.
_FEWER = 3


def block_scales(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Scales ``[out, in / size]`` of ``weight`` ``[out, in]``: of the multiples, those with the least squared error."""
    groups = weight.reshape(len(weight), -1, size)
    most = groups.abs().amax(2)
    step = most.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * STEPS * MOST) / (STEPS * MOST)
    whole = (most / MOST / step).ceil().clamp(1, STEPS)
    best, least = whole, torch.full_like(most, torch.inf)
    for fewer in range(_FEWER + 1):
        multiple = (whole - fewer).clamp_min(1)
        scale = (multiple * step)[..., None]
        error = ((groups / scale).round().clamp(-MOST, MOST) * scale - groups).square().sum(2)
        best, least = torch.where(error < least, multiple, best), torch.minimum(error, least)
    # the encoder finds the step from the largest scale of a row
    return best.scatter(1, most.argmax(1, keepdim=True), float(STEPS)) * step
