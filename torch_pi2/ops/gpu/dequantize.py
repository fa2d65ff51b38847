"""``dequantize`` on a GPU: one kernel, which reads quantised rows and writes floats."""

from __future__ import annotations

import torch

from torch_pi2.formats import GGML
from torch_pi2.ops import quantize
from torch_pi2.ops.gpu.listed import power_of_two

#: Numbers of a row that a program writes, at most.
MOST_BLOCK = 4096


def launch(rows: torch.Tensor, weights: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """``torch.ops.pi2.dequantize`` there, the same bits: each number is rounded once, to ``dtype``. Rows may be those
    of every neuron, with others between them; ggml's blocks are taken apart by PyTorch's operations."""
    if weights in GGML:
        return quantize.dequantize(rows, weights, columns, dtype)
    from torch_pi2.ops.gpu import kernels

    quantize.check_format(rows, weights, columns)
    y = rows.new_empty((len(rows), columns), dtype=dtype)
    if y.numel():
        if rows.stride(1) != 1 or rows.stride(0) % 2 or rows.storage_offset() % 2:  # scales are of two bytes
            rows = rows.clone(memory_format=torch.contiguous_format)
        block = min(MOST_BLOCK, max(32, power_of_two(columns)))
        kernels.dequantize_rows[(len(rows), -(-columns // block))](
            rows, rows.view(torch.float16), y, STRIDE=rows.stride(0), H=columns, FORMAT=weights, BLOCK=block
        )
    return y
