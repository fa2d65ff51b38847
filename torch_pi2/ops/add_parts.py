"""``add_parts``: partial sums of a feed-forward layer, of one machine or of several, become its result."""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops.call import arguments_of


def add_parts(parts: torch.Tensor, order: list[int], bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The sum of ``parts[i]`` for i in ``order``, added one by one from zero on, and of ``bias``: as a layer adds the
    partial sums of its chunks, so that the bits are those of a layer that has them all.

    Args:
        parts: float32 ``[P, T, H]``. order: indices into the first dimension, any number of them.
        bias: ``[H]`` float32, bfloat16 or float16, or None. like: ``[..., H]`` of T tokens: gives shape and dtype.
    """
    y = torch.zeros_like(parts[0])
    for part in order:
        y = y + parts[part]
    if bias is not None:
        y = y + bias.float()
    return y.to(like.dtype).view(like.shape)


def fake(*args: Any) -> torch.Tensor:
    call = arguments_of(add_parts, args)
    like: torch.Tensor = call.like
    return like.new_empty(like.shape)
