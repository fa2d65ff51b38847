"""torch's SDPA for one new token without repeating keys and values for each group of query heads.

transformers repeats them (``repeat_kv``) whenever it is compiled; of a 7B model with 8 of 32 heads that copies the
whole cache four times over for each token. Here the query heads of a group become positions of one head instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

#: Under this name transformers finds it, in ``config._attn_implementation``.
NAME = "pi2_sdpa"


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. ``query [B, N, T, D]``, ``key``, ``value [B, K, L, D]`` -> ``[B, T, N, D]``.

    More than one token, or as many key as query heads, or a mask per head: transformers' own ``sdpa``.
    """
    heads_per_key, plain = query.shape[1] // key.shape[1], not kwargs.get("dropout")
    plain = plain and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    if query.shape[2] != 1 or heads_per_key == 1 or not (plain and shared_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return result
    batch, heads, _, width = query.shape
    packed = query.reshape(batch, key.shape[1], heads_per_key, width)
    y = F.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return y.reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def packed_attention(model: torch.nn.Module) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` that uses ``sdpa`` uses :func:`packed_sdpa`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config: Any = model.config
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
