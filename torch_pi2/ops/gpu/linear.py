"""``linear`` and ``dequantize`` on a GPU: quantised rows times few tokens in Triton, times many as a product of floats.

Where one becomes the other is arithmetic, for feed-forward layers, too (:func:`products_from`); it was never measured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_pi2.formats import FORMATS, GGML
from torch_pi2.ops import quantize as reference
from torch_pi2.ops.gpu.ffn import block_of_part, kernel_rows, power_of_two, rounded
from torch_pi2.ops.quantize import check_format

#: What dequantising for a product of matrices may take at a time.
TEMPORARY_BYTES = 64 << 20
#: Of a number on its way: a float; of ggml's blocks integers, the same as floats, times their scales, in another dtype.
_BYTES_OF_NUMBER, _BYTES_OF_GGML = 4, 16
#: Of the bytes that would then be read and written, so many are worth reading again: kernels unpack, too.
_WORTH = 0.75
#: Numbers of a row that a program writes, at most.
MOST_BLOCK = 4096


def products_from(stored: str, columns: int, factor_bytes: int, share: float = 1.0) -> int:
    """Tokens of a call, 2 or more, from which on all rows are multiplied as floats, by cuBLAS.

    Kernels read ``share`` of the bytes for each token, mostly again from the cache, which is no slower than memory. A
    product reads all of them once; rows that it cannot take are read, written as factors and read again.

    Args:
        stored: format of the rows. factor_bytes: of a number that is written; 0: rows are taken as they are.
    """
    times = 1.0
    if factor_bytes:
        times = _WORTH * (1 + 2 * factor_bytes * columns / FORMATS[stored].row_bytes(columns))
    return max(2, int(times / max(share, 1 / 1024)) + 1)


def rows_at_once(weights: str, columns: int) -> int:
    """Quantised rows that are dequantised together."""
    return max(1, TEMPORARY_BYTES // ((_BYTES_OF_GGML if weights in GGML else _BYTES_OF_NUMBER) * columns))


def linear(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    """See :func:`torch_pi2.ops.linear.linear`; of few tokens each has the same bits in any company, except over ggml's
    blocks, which are dequantised for any number of tokens."""
    from torch_pi2.ops.gpu import kernels

    x_TK = rounded(x.reshape(-1, x.shape[-1])) if int8_activations else x.reshape(-1, x.shape[-1]).contiguous()
    tokens, columns = x_TK.shape
    shape = (*x.shape[:-1], len(rows))
    if weights in GGML or tokens >= products_from(weights, columns, x.dtype.itemsize):
        x_TK = x_TK.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            slices = rows.split(rows_at_once(weights, columns))
            parts = [F.linear(x_TK, dequantize(part, weights, columns, x.dtype)) for part in slices]
            y_TN = torch.cat(parts, -1)
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


def dequantize(rows: torch.Tensor, weights: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """``torch.ops.pi2.dequantize`` there, the same bits: each number is rounded once, to ``dtype``. Rows may be those
    of every neuron, with others between them; ggml's blocks are taken apart by PyTorch's operations."""
    if weights in GGML:
        return reference.dequantize(rows, weights, columns, dtype)
    from torch_pi2.ops.gpu import kernels

    check_format(rows, weights, columns)
    y = rows.new_empty((len(rows), columns), dtype=dtype)
    if y.numel():
        if rows.stride(1) != 1 or rows.stride(0) % 2 or rows.storage_offset() % 2:  # scales are of two bytes
            rows = rows.clone(memory_format=torch.contiguous_format)
        block = min(MOST_BLOCK, max(32, power_of_two(columns)))
        kernels.dequantize_rows[(len(rows), -(-columns // block))](
            rows, rows.view(torch.float16), y, STRIDE=rows.stride(0), H=columns, FORMAT=weights, BLOCK=block
        )
    return y
