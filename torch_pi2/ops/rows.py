"""Quantised rows in plain torch: what the bytes mean (``csrc/include/pi2/types.h``). For references and checks.

A row of n numbers is stored in groups of 32 (the last one padded with zeros): the values of all groups, then a
float16 scale per group; a number is its stored integer times its group's scale.

* ``int4``: 16 bytes a group; byte k holds number k in its low and number k + 16 in its high half, each plus 8.
* ``int8``: 32 bytes a group, signed.

Rows in ggml's blocks are another thing: :mod:`torch_pi2.ops.ggml`.
"""

from __future__ import annotations

import torch

from torch_pi2.formats import FORMATS, GGML, GROUP, formats_of, has_two_formats, row_bytes
from torch_pi2.ops import ggml


def values(rows: torch.Tensor, weights: str, columns: int) -> torch.Tensor:
    """The numbers of quantised rows, uint8 ``[..., row_bytes]`` -> float32 ``[..., columns]``; exact."""
    if weights in GGML:
        return ggml.values(rows, weights)
    groups = -(-columns // GROUP)
    split = groups * FORMATS[weights].group_bytes
    stored = rows[..., :split].contiguous()
    scale_G = rows[..., split:].contiguous().view(torch.float16).float()
    if weights == "int4":
        stored = stored.unflatten(-1, (groups, GROUP // 2))
        integers = torch.cat((stored & 15, stored >> 4), -1).float() - 8
    else:
        integers = stored.view(torch.int8).unflatten(-1, (groups, GROUP)).float()
    return (integers * scale_G[..., None]).flatten(-2)[..., :columns]


def row_of_neurons(neuron_rows: torch.Tensor, row: int, weights: str, hidden: int) -> tuple[torch.Tensor, str]:
    """Row ``row`` of every neuron, a view ``[I, bytes]`` (of floats ``[I, H]``), and its format.

    Args:
        neuron_rows, weights: as :func:`torch_pi2.ops.sparse_ffn.sparse_ffn` takes them. row: 0 to R - 1.
    """
    if not has_two_formats(weights):
        return neuron_rows[:, row], weights
    first, down = formats_of(weights)
    start, stop = row * row_bytes(first, hidden), neuron_rows.shape[1]
    if stop - start == row_bytes(down, hidden):
        return neuron_rows[:, start:], down
    return neuron_rows[:, start : start + row_bytes(first, hidden)], first


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """``x [..., n]`` as int8 activations see it: rounded to 255 steps per group of 32; float32.

    A group's scale is its largest magnitude / 127. A group with a NaN or an infinity is all NaN.
    """
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -n % GROUP)).unflatten(-1, (-1, GROUP))
    largest = padded.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127.0) / largest  # 127 / tensor would be a reciprocal times 127: two roundings
    usable = inverse.isfinite() & largest.isfinite()
    steps = torch.where(usable, torch.round(padded * inverse), 0.0)
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return (steps * scale).flatten(-2)[..., :n]
