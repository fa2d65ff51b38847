"""``linear`` and ``linear_blocks``: a linear layer over quantised rows, in plain order or in blocks of 16.

Blocks exist only in memory, for vector kernels, never in files. A block has the bytes of its rows in another order
(``csrc/include/pi2/kernels.h``, dot_blocks): for every two groups of 32 columns, four bytes of each row at a time, then
the groups' scales of all rows; for ggml's blocks (of q5_0 turned, so that the scale comes last) four bytes of each
row's at a time, then the rest of each.
"""

from __future__ import annotations

import torch

from torch_pi2.formats import FORMATS, GROUP
from torch_pi2.ops.operators import operator
from torch_pi2.ops.rows import rounded_activations, values

#: Rows of a block, and columns per run in it.
ROWS, COLUMNS = 16, 2 * GROUP
#: Suffix of a format's name for rows in blocks.
IN_BLOCKS = "_blocks"


@operator(lambda call: call.x.new_empty((*call.x.shape[:-1], call.rows.shape[0])), out=True)
def linear(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, weights: str, int8_activations: bool = False
) -> torch.Tensor:
    """``x W^T + bias`` over quantised rows: ``[..., K] -> [..., N]`` in ``x``'s dtype; sums are taken in float32.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        rows: uint8 ``[N, row_bytes(K)]``; bias: ``[N]`` float32 or None.
        weights: ``int4``, ``int8`` or one of ``GGML``; K is a multiple of its block.
        int8_activations: ``x`` is rounded to int8 per group of 32 first (lossy).
    """
    seen = rounded_activations(x) if int8_activations else x.float()
    y = seen @ values(rows, weights, x.shape[-1]).T
    return (y if bias is None else y + bias).to(x.dtype)


def fits(rows: int, columns: int) -> bool:
    """Whether a matrix of this size can be in blocks, if its format can."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def to_blocks(rows: torch.Tensor, weights: str, columns: int) -> torch.Tensor:
    """Rows uint8 ``[N, row_bytes(K)]`` in blocks: the same shape."""
    if FORMATS[weights].block:
        supers = rows.view(-1, ROWS, columns // FORMATS[weights].block, FORMATS[weights].block_bytes)
        if weights == "q5_0":
            supers = supers.roll(-2, -1)  # the scale comes last
        words, left = supers.transpose(1, 2).split(_words(weights), -1)
        words = words.unflatten(-1, (-1, 4)).transpose(2, 3)
        return torch.cat((words.flatten(2), left.flatten(2)), 2).view(rows.shape)
    values, scales = rows.split(_sizes(weights, columns), 1)
    values = values.view(-1, ROWS, columns // COLUMNS, 2 * FORMATS[weights].group_bytes // 4, 4).permute(0, 2, 3, 1, 4)
    scales = scales.view(-1, ROWS, columns // COLUMNS, 2, 2).permute(0, 2, 3, 1, 4)
    if weights == "int8":
        values = values ^ 128  # unsigned
    return torch.cat((values.flatten(2), scales.flatten(2)), 2).view(rows.shape)


def from_blocks(blocks: torch.Tensor, weights: str, columns: int) -> torch.Tensor:
    """Inverse of :func:`to_blocks`."""
    if FORMATS[weights].block:
        supers = blocks.view(-1, columns // FORMATS[weights].block, ROWS * FORMATS[weights].block_bytes)
        words, left = supers.split([ROWS * n for n in _words(weights)], -1)
        words = words.unflatten(-1, (-1, ROWS, 4)).transpose(2, 3).flatten(3)
        supers = torch.cat((words, left.unflatten(-1, (ROWS, -1))), 3)
        supers = supers.roll(2, -1) if weights == "q5_0" else supers
        return supers.transpose(1, 2).reshape(blocks.shape)
    pairs = columns // COLUMNS
    sizes = [ROWS * n // pairs for n in _sizes(weights, columns)]
    values, scales = blocks.view(-1, pairs, sum(sizes)).split(sizes, 2)
    values = values.unflatten(2, (-1, ROWS, 4)).permute(0, 3, 1, 2, 4)
    scales = scales.unflatten(2, (2, ROWS, 2)).permute(0, 3, 1, 2, 4)
    if weights == "int8":
        values = values ^ 128
    return torch.cat((values.flatten(2), scales.flatten(2)), 2).view(blocks.shape)


def _words(weights: str) -> list[int]:
    """Bytes of a ggml block in whole words, and the rest."""
    size = FORMATS[weights].block_bytes
    return [size // 4 * 4, size % 4]


def _sizes(weights: str, columns: int) -> list[int]:
    """Bytes of a row's values and of its scales."""
    groups = columns // GROUP
    return [groups * FORMATS[weights].group_bytes, 2 * groups]


@operator(lambda call: call.x.new_empty((*call.x.shape[:-1], call.blocks.shape[0])))
def linear_blocks(x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None, weights: str) -> torch.Tensor:
    """:func:`linear` with int8 activations. A token's bits do not depend on the other tokens.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16; K a multiple of 64.
        blocks: uint8 ``[N, row_bytes(K)]``, of :func:`to_blocks`; N a multiple of 16.
        bias: ``[N]`` float32 or None. weights: ``int4``, ``int8`` or one of ``GGML``.
    """
    return linear(x, from_blocks(blocks, weights, x.shape[-1]), bias, weights, True)
