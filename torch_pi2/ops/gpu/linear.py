"""``linear`` on a GPU: quantised rows times few tokens in Triton, times many as a product of floats."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_pi2.formats import GGML
from torch_pi2.ops.gpu.listed import block_of_part, kernel_rows, rounded
from torch_pi2.ops.quantize import dequantize

#: Up to so many tokens each reads the rows by itself, from the cache but for the first.
MOST_TOKENS = 8
#: What dequantising for a product of matrices may take at a time.
TEMPORARY_BYTES = 64 << 20
#: Of a number on its way: integers, the same as floats, times their scales, in another dtype.
_BYTES_OF_NUMBER = 16


def rows_at_once(columns: int) -> int:
    """Quantised rows that are dequantised together."""
    return max(1, TEMPORARY_BYTES // (_BYTES_OF_NUMBER * columns))


def launch(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    """See :func:`torch_pi2.ops.linear.linear`; of few tokens each has the same bits in any company, except over ggml's
    blocks, which are dequantised for any number of tokens."""
    from torch_pi2.ops.gpu import kernels

    x_TK = rounded(x.reshape(-1, x.shape[-1])) if int8_activations else x.reshape(-1, x.shape[-1]).contiguous()
    tokens, columns = x_TK.shape
    shape = (*x.shape[:-1], len(rows))
    if tokens > MOST_TOKENS or weights in GGML:
        x_TK = x_TK.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            slices = rows.split(rows_at_once(columns))
            y_TN = torch.cat([F.linear(x_TK, dequantize(part, weights, columns, x.dtype)) for part in slices], -1)
        return (y_TN if bias is None else (y_TN + bias).to(x.dtype)).reshape(shape)
    y = x.new_empty(shape)
    if tokens:
        held, scales, row, form = kernel_rows(rows.contiguous(), weights, columns)
        kernels.project[(-(-len(rows) // kernels.NEURONS), tokens)](
            x_TK, held, scales, None, bias, y, len(rows),
            H=columns, ROW=row, FORMAT=form, RELU=False, N=kernels.NEURONS,
            BLOCK=block_of_part(form, columns),
        )  # fmt: skip
    return y
