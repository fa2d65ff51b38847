"""``linear`` and ``linear_blocks``: a linear layer over quantised rows, in plain order or in blocks of 16; and
``sparse_input_linear``, which reads the weights of some input channels alone.

Blocks are for vector kernels: in memory, and in files imported from GGUF (docs/FORMATS.md). A block has the bytes of
its rows in another order (``csrc/include/pi2/kernels.h``, dot_blocks): for every two groups of 32 columns, four bytes
of each row at a time, then the groups' scales of all rows; for ggml's blocks (of q5_0 turned, so that the scale comes
last) four bytes of each row's at a time, then the rest of each.
"""

import torch

from torch_pi2.formats import FLOAT, FORMATS, GROUP
from torch_pi2.ops.operators import operator
from torch_pi2.ops.rows import rounded_activations, values

#: Rows of a block, and columns per run in it.
ROWS, COLUMNS = 16, 2 * GROUP
#: Turns the sign bit of four bytes: ``int8`` is unsigned in blocks.
_UNSIGNED = -0x7F7F7F80
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
    runs, size, left = _run(rows, weights, columns)
    halves, count = rows.view(torch.int16), len(rows) // ROWS
    if FORMATS[weights].block:
        by_run = halves.view(-1, size).roll(-1, -1) if weights == "q5_0" else halves.view(-1, size)
        words, rest = by_run.split([size - left, left], -1)
    else:
        words, rest = halves.split([runs * (size - left), runs * left], -1)
    words = words.contiguous().view(torch.int32).view(count, ROWS, runs, -1).permute(0, 2, 3, 1)
    words = words ^ _UNSIGNED if weights == "int8" else words
    rest = rest.reshape(count, ROWS, runs, left).permute(0, 2, 3, 1)
    return torch.cat((words.flatten(2).view(torch.int16), rest.flatten(2)), 2).view(torch.uint8).view(rows.shape)


def from_blocks(blocks: torch.Tensor, weights: str, columns: int) -> torch.Tensor:
    """Inverse of :func:`to_blocks`."""
    runs, size, left = _run(blocks, weights, columns)
    halves = blocks.view(torch.int16).view(-1, runs, ROWS * size)
    words, rest = halves.split([ROWS * (size - left), ROWS * left], -1)
    words = words.view(torch.int32).unflatten(-1, (-1, ROWS)).permute(0, 3, 1, 2)
    words = (words ^ _UNSIGNED if weights == "int8" else words).contiguous().view(torch.int16)
    rest = rest.unflatten(-1, (left, ROWS)).permute(0, 3, 1, 2)
    if not FORMATS[weights].block:
        words, rest = words.flatten(2), rest.flatten(2)
    rows = torch.cat((words, rest), -1)
    return (rows.roll(1, -1) if weights == "q5_0" else rows).reshape(len(blocks), -1).view(torch.uint8)


def _run(rows: torch.Tensor, weights: str, columns: int) -> tuple[int, int, int]:
    """Runs in a row (two groups, or a ggml block), and numbers of two bytes in a run: all, and those behind words."""
    runs = columns // (FORMATS[weights].block or COLUMNS)
    size = rows.shape[1] // (2 * runs)
    return runs, size, size % 2 if FORMATS[weights].block else 2


@operator(lambda call: call.x.new_empty((*call.x.shape[:-1], call.blocks.shape[0])))
def linear_blocks(x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None, weights: str) -> torch.Tensor:
    """:func:`linear` with int8 activations over ``blocks`` of :func:`to_blocks`, uint8 ``[N, row_bytes(K)]``; N a
    multiple of 16, K of 64; ``x [..., K]`` float32, bfloat16 or float16. A token's bits depend on it alone.
    """
    return linear(x, from_blocks(blocks, weights, x.shape[-1]), bias, weights, True)


@operator(lambda call: call.x.new_empty((*call.x.shape[:-1], call.outputs)))
def sparse_input_linear(
    x: torch.Tensor,
    rows: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    active: torch.Tensor | None,
    threshold: float = 0.0,
    weights: str = FLOAT,
) -> torch.Tensor:
    """A linear layer that reads the weights of the input channels each token uses, and no others: the sum of
    ``x_k * rows[k]`` over channels k with ``|x_k| > threshold`` and, where there is a mask, ``active[k]``. TEAL
    (arXiv 2408.14690) cuts by the magnitude of inputs; WINA (arXiv 2505.19427) chooses them by magnitude times the norm
    of their weights. With ``active=None, threshold=0`` it is the dense layer.

    For a few tokens: each reads its own channels, and a prompt that uses most of them is faster in :func:`linear`. A
    token's bits depend on neither other tokens nor threads.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        rows: the weight by input channel (a linear layer's weight transposed), contiguous: ``[K, N]`` float32, bfloat16
            or float16, or quantised uint8 ``[K, row_bytes(N)]``.
        outputs: N; bias: ``[N]`` float32 or None.
        active: bool ``[..., K]`` or None: the channels that may be used.
        threshold: cut on the magnitude of inputs, 0 or more; NaN is above it.
        weights: ``float``, ``int4`` or ``int8``.

    Returns:
        ``[..., N]`` in ``x``'s dtype; sums are taken in float32.
    """
    used = ~(x.float().abs() <= threshold)
    if active is not None:
        used &= active.reshape(x.shape)
    y = torch.where(used, x.float(), 0.0) @ (rows.float() if weights == FLOAT else values(rows, weights, outputs))
    return (y if bias is None else y + bias).to(x.dtype)
