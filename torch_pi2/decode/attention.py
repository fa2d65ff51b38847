"""Attention of prompts and steps: our operator reads what is used of a static cache, and no more.

transformers repeats keys and values for each group of query heads (``repeat_kv``) whenever it is compiled: of a 7B
model with 8 of 32 heads the whole cache four times over for each token. torch's SDPA reads all of the cache, whatever
its mask says, and its sums depend on how many tokens there are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.errors import ConfigError
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load
from torch_pi2.ops.attention import attention as reference

#: Under this name transformers finds it, in ``config._attn_implementation``.
NAME = "pi2_sdpa"
#: What transformers may ask for besides, and the operator has not.
_NOT_OURS = ("position_bias", "softcap", "cache")

_lock = threading.Lock()
#: id of a configuration that is changed -> how many have entered :func:`packed_attention` for it, and what it had.
_users: dict[int, tuple[int, str]] = {}


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. ``query [B, N, T, D]``, ``key``, ``value [B, K, L, D]`` -> ``[B, T, N, D]``.

    ``torch.ops.pi2.attention`` under a boolean mask for all heads, or none. What it has not (dropout, soft caps,
    biases, paged caches, masks that are added or of a head, values of another width than keys, gradients, GPUs)
    goes to transformers' own ``sdpa``; with sinks, which that one has not, to the operator's reference.

    Raises:
        ConfigError: sinks (``s_aux``), and something that the reference has not.
    """
    mask = attention_mask
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _NOT_OURS)
    known = not on_gpu(query) and query.dtype in DTYPES.values() and query.dtype == key.dtype == value.dtype
    known = known and key.shape == value.shape and query.shape[0] == key.shape[0]
    known = known and not any(t.requires_grad for t in (query, key, value))
    sinks: torch.Tensor | None = kwargs.get("s_aux")
    plain_masks = plain and _for_all_heads(mask)
    if sinks is not None and not plain_masks:
        raise ConfigError(
            f"attention of {type(module).__name__} with sinks",
            expected="boolean masks for all heads, and nothing that is added to scores or dropped",
            found="a mask of another kind" if plain else "dropout, soft caps, biases or a paged cache",
            fix="Leave attention_mask out or pass one of [sequences, tokens], and call model.eval().",
        )
    if sinks is None and not (plain_masks and known):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return result
    scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    causal = getattr(module, "is_causal", True) if causal is None else bool(causal)
    causal = causal and mask is None and query.shape[2] > 1  # as transformers has it
    attend = torch.ops.pi2.attention if known else reference
    return attend(query, key, value, mask, scale, causal, None if sinks is None else sinks.float()), None


def _for_all_heads(mask: torch.Tensor | None) -> bool:
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)


def uses_sdpa(config: Any) -> bool:
    """Whether a model of this configuration does, or would if no step were running elsewhere."""
    return getattr(config, "_attn_implementation", None) in ("sdpa", NAME)


def has_sinks(model: torch.nn.Module) -> bool:
    """Whether attention of a Hugging Face ``model`` has sinks (gpt-oss): scores that are in the softmax's sum alone.

    transformers computes it by ``eager``, as its ``sdpa`` has no sinks.
    """
    return any("sinks" in module._parameters for module in model.modules())


def adds_masks(config: Any) -> bool:
    """Whether a model of this configuration adds masks to its scores, as eager attention does (Gemma 2)."""
    return getattr(config, "_attn_implementation", None) == "eager"


@contextmanager
def packed_attention(model: torch.nn.Module) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` that uses ``sdpa``, or has sinks, uses :func:`packed_sdpa`.

    Parts of it with configurations of their own that use something else go on to do so, and so do classes that do not
    look attention up by its name (Falcon's).
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    deaf = {id(part.config) for part in parts if not part._supports_attention_backend}
    configs = [config for config in _configs(model.config) if id(config) not in deaf]
    load()
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    with _lock:
        sinks = any(map(adds_masks, configs)) and has_sinks(model)  # each step comes by, and a model has many modules
        changed = [config for config in configs if uses_sdpa(config) or (sinks and adds_masks(config))]
        for config in changed:
            users, before = _users.get(id(config), (0, config._attn_implementation))
            _users[id(config)] = users + 1, before
            config._attn_implementation = {"": NAME}  # its own alone
    try:
        yield
    finally:
        with _lock:
            for config in changed:
                users, before = _users.pop(id(config))
                if users > 1:  # other threads
                    _users[id(config)] = users - 1, before
                else:
                    config._attn_implementation = {"": before}


def _configs(config: Any) -> Iterator[Any]:
    """``config`` and those of parts of the model."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


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
