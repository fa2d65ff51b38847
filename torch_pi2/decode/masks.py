"""Which positions of a static cache new tokens see, as transformers' models take it: masks, by kind of layer."""

from __future__ import annotations

from typing import Any

import torch


def masks_of(
    config: Any, positions_BT: torch.Tensor, room: int, dtype: torch.dtype = torch.bool
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Of tokens at ``positions_BT``, over a cache with ``room`` positions: ``[B, 1, T, room]``, True where it is seen;
    in a float dtype what is added to scores.

    A model whose configuration has ``layer_types`` takes one mask of each kind: all before a token, a window of
    ``sliding_window`` positions with itself the last, or its chunk of ``attention_chunk_size`` (Llama 4). Another one
    that has ``sliding_window`` has windows in all layers (Mistral, Phi-3). Of windows that are never filled: one mask.
    """
    text = config.get_text_config(decoder=True)
    slots, last_B1T1 = torch.arange(room, device=positions_BT.device), positions_BT[:, None, :, None]
    before = slots <= last_B1T1
    window, chunk = (getattr(text, name, None) or room for name in ("sliding_window", "attention_chunk_size"))
    masks = {"full_attention": before}
    if window < room:
        masks["sliding_attention"] = before & (slots > last_B1T1 - window)
    if chunk < room:
        masks["chunked_attention"] = before & (slots // chunk == last_B1T1 // chunk)
    if dtype != torch.bool:
        masks = {kind: torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype) for kind, seen in masks.items()}
    before, kinds = masks["full_attention"], getattr(text, "layer_types", None)
    if kinds is None:
        return masks.get("sliding_attention", before)
    return before if len(masks) == 1 else {kind: masks.get(kind, before) for kind in {*masks, *kinds}}
