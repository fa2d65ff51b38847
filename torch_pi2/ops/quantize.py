"""``quantize`` and ``dequantize``: floats and quantised rows (:mod:`torch_pi2.ops.rows` has their layout).

The C++ core mirrors ``quantize`` bit for bit: each step rounds once in float32 (sums: float64, column by column).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from torch_pi2.formats import FORMATS, GROUP, row_bytes
from torch_pi2.ops.operators import operator
from torch_pi2.ops.rows import values

#: int4: quantised values tried for the value of largest magnitude. -8 is llama.cpp's Q4_0; the others give a finer
#: step and clip, or use the other end. On normal numbers the best has a 4 % smaller error than -8 alone.
INT4_ENDS = (-8.0, -8.5, -9.0, -9.5, -7.5, 7.0, 7.5, 8.0)


def _rows(call: SimpleNamespace) -> torch.Tensor:
    w: torch.Tensor = call.w
    return w.new_empty((w.shape[0], row_bytes(call.weights, w.shape[1])), dtype=torch.uint8)


@operator(_rows)
def quantize(w: torch.Tensor, weights: str) -> torch.Tensor:
    """Rows of floats as quantised rows: round to nearest, with a scale per group of 32 columns.

    A group's scale is fixed by its value of largest magnitude v (the first of several): v / 127 without sign for
    ``int8``; for ``int4`` that of v / end, end in :data:`INT4_ENDS`, for which the sum of (w - q * scale)^2 over the
    group is smallest (the first of equals). It is rounded to float16 before the integers are computed. A scale that
    float16 cannot tell from zero makes the group zero.

    Args:
        w: ``[N, K]`` float32, bfloat16 or float16, finite.
        weights: ``int4`` or ``int8``.

    Returns:
        uint8 ``[N, row_bytes(K)]``.
    """
    pad = (0, -w.shape[1] % GROUP)
    w_NGk = F.pad(w.float(), pad).unflatten(1, (-1, GROUP))
    extreme_NG1 = w_NGk.gather(2, w_NGk.abs().argmax(2, keepdim=True)) + 0.0  # -0.0 becomes 0.0
    if weights == "int8":
        return pack(w_NGk, _half(extreme_NG1.abs() / 127), weights)
    best_NG1 = torch.zeros_like(extreme_NG1)
    least_NG1 = torch.full_like(extreme_NG1, torch.inf, dtype=torch.float64)
    for end in INT4_ENDS:
        scale_NG1 = _half(extreme_NG1 / end)
        off_NGk = w_NGk - scale_NG1 * integers(w_NGk, scale_NG1, weights)
        error_NG1 = torch.zeros_like(least_NG1)
        for k in range(GROUP):  # not .sum(), whose order of summation is unspecified
            error_NG1 += (off_NGk[..., k] * off_NGk[..., k]).double()[..., None]
        better = error_NG1 < least_NG1
        best_NG1 = torch.where(better, scale_NG1, best_NG1)
        least_NG1 = torch.where(better, error_NG1, least_NG1)
    return pack(w_NGk, best_NG1, weights)


def integers(w_NGk: torch.Tensor, scale_NG1: torch.Tensor, weights: str) -> torch.Tensor:
    """The stored integers of ``w [..., 32]`` under its groups' scales, as float32; all 0 where a scale is 0."""
    nearest = torch.round(w_NGk / scale_NG1).clamp(FORMATS[weights].least, FORMATS[weights].most)
    return torch.where(scale_NG1 == 0, torch.zeros_like(nearest), nearest)


def pack(w_NGk: torch.Tensor, scale_NG1: torch.Tensor, weights: str) -> torch.Tensor:
    """Quantised rows ``[N, row_bytes]`` of groups ``[N, G, 32]`` with given scales, representable in float16."""
    return pack_integers(integers(w_NGk, scale_NG1, weights).to(torch.int8), scale_NG1, weights)


def pack_integers(stored: torch.Tensor, scale_NG1: torch.Tensor, weights: str) -> torch.Tensor:
    """As :func:`pack`, from the stored integers, int8 ``[N, G, 32]``; for ``tq2_0`` -1, 0 and 1, G a multiple of 8."""
    if weights == "tq2_0":
        q_NB24k = (stored + 1).view(torch.uint8).unflatten(1, (-1, 2, 4))
        bits_NBb = (q_NB24k << torch.tensor([[0], [2], [4], [6]]).byte()).sum(-2, dtype=torch.uint8).flatten(2)
        return torch.cat((bits_NBb, scale_NG1[:, ::8].half().contiguous().view(torch.uint8)), 2).flatten(1)
    if weights == "int4":
        low, high = (stored + 8).view(torch.uint8).chunk(2, -1)
        stored_bytes = low | high << 4
    else:
        stored_bytes = stored.view(torch.uint8)
    scale_bytes = scale_NG1.squeeze(-1).half().contiguous().view(torch.uint8)
    return torch.cat((stored_bytes.flatten(1), scale_bytes), 1)


def ternary_rows(w: torch.Tensor) -> torch.Tensor:
    """Rows ``[N, K]`` of numbers -d, 0 and d, with one d in each block of ``tq2_0``, in that format."""
    w_NB8k = w.float().unflatten(1, (-1, 8, GROUP))
    scale_NB1 = w_NB8k.abs().amax((2, 3))[..., None]
    return pack_integers(w_NB8k.sign().to(torch.int8).flatten(1, 2), scale_NB1.repeat_interleave(8, 1), "tq2_0")


def _half(scale: torch.Tensor) -> torch.Tensor:
    return scale.half().float()


@operator(lambda call: call.rows.new_empty((call.rows.shape[0], call.columns), dtype=call.dtype), out=True)
def dequantize(rows: torch.Tensor, weights: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of quantised rows: uint8 ``[N, row_bytes(columns)]`` -> ``[N, columns]`` in ``dtype``."""
    return values(rows, weights, columns).to(dtype).contiguous()
