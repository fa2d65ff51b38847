"""Attention of prompts and steps with our operator, which reads only the used part of a static cache; masks.

Compiled, transformers copies keys and values for each query head of a group (``repeat_kv``): with 8 key heads for 32
query heads, the whole cache four times per token. torch's SDPA reads all of the cache, whatever the mask, and its sums
depend on the number of tokens.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.errors import ConfigError
from torch_pi2.layers.gpu import on_gpu
from torch_pi2.ops import load
from torch_pi2.ops.attention import KV_DTYPES
from torch_pi2.ops.attention import attention as reference

#: Its name in ``config._attn_implementation`` of transformers.
NAME = "pi2_sdpa"
#: Arguments of transformers that the operator does not support.
_NOT_OURS = ("position_bias", "softcap", "cache")

#: ``layer_types`` of configurations whose layers have recurrent states and no attention.
RECURRENT = {"linear_attention", "conv"}

_lock = threading.Lock()
#: id of a changed configuration -> number of users inside :func:`packed_attention`, and its original implementation.
USERS: dict[int, tuple[int, str]] = {}


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: ``query [B, N, T, D]``, ``key``, ``value [B, K, L, D]`` -> ``[B, T, N, D]`` by
    ``torch.ops.pi2.attention``, with a boolean mask for all heads or none. Everything else (dropout, caps, biases,
    paged caches, masks that are added or differ by head, values of another width than keys, gradients, GPUs) goes to
    transformers' ``sdpa``, or to the operator's reference with sinks, which ``sdpa`` lacks. Raises ConfigError: sinks
    (``s_aux``) with an argument that the reference does not support.
    """
    mask = attention_mask
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _NOT_OURS)
    quantized = key.dtype in KV_DTYPES.values()
    known = not on_gpu(query) and query.dtype in DTYPES.values() and key.dtype == value.dtype
    known = known and (quantized or query.dtype == key.dtype)
    known = known and key.shape == value.shape and query.shape[0] == key.shape[0]
    known = known and not any(t.requires_grad for t in (query, key, value))
    sinks: torch.Tensor | None = kwargs.get("s_aux")
    for_all_heads = mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1)
    plain_masks = plain and for_all_heads
    if quantized and not (plain_masks and known):
        expected, fix = "boolean masks for all heads, heads of one width, nothing added or dropped", "Leave kv out."
        what = f"attention of {type(module).__name__} with int8 or int4 keys"
        raise ConfigError(what, expected=expected, found="another attention", fix=fix)
    if sinks is not None and not plain_masks:
        expected = "boolean masks for all heads, and nothing that is added to scores or dropped"
        found = "a mask of another kind" if plain else "dropout, soft caps, biases or a paged cache"
        fix = "Leave attention_mask out or pass one of [sequences, tokens], and call model.eval()."
        raise ConfigError(f"attention of {type(module).__name__} with sinks", expected=expected, found=found, fix=fix)
    if sinks is None and not (plain_masks and known):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    causal = getattr(module, "is_causal", True) if causal is None else bool(causal)
    causal = causal and mask is None and query.shape[2] > 1  # as transformers has it
    attend = torch.ops.pi2.attention if known else reference
    return attend(query, key, value, mask, scale, causal, None if sinks is None else sinks.float()), None


def uses_sdpa(config: Any) -> bool:
    """Whether a model of this configuration uses ``sdpa``, which ours may replace while another thread runs a step."""
    return getattr(config, "_attn_implementation", None) in ("sdpa", NAME)


def has_sinks(model: torch.nn.Module) -> bool:
    """Whether attention of ``model`` has sinks (gpt-oss), scores only in the softmax's sum, which ``sdpa`` lacks."""
    return any("sinks" in module._parameters for module in model.modules())


def adds_masks(config: Any) -> bool:
    """Whether a model of this configuration adds masks to its scores, as eager attention does (Gemma 2)."""
    return getattr(config, "_attn_implementation", None) == "eager"


@contextmanager
def packed_attention(model: torch.nn.Module) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` that uses ``sdpa``, or has sinks, uses :func:`packed_sdpa`.

    Parts whose own configurations name another attention keep it, as do classes that do not look attention up by name
    (Falcon's), and all if ``sdpa``, or PyTorch's function that it calls, has been replaced.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    deaf = {id(part.config) for part in parts if not part._supports_attention_backend}
    configs = [config for config in _configs(model.config) if id(config) not in deaf]
    load()
    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    with _lock:
        sinks = any(map(adds_masks, configs)) and has_sinks(model)  # called in each step, and a model has many modules
        kernel = torch.nn.functional.scaled_dot_product_attention
        used = ALL_ATTENTION_FUNCTIONS.get("sdpa"), ALL_MASK_ATTENTION_FUNCTIONS.get("sdpa"), kernel
        replaceable = used == (sdpa_attention_forward, sdpa_mask, torch._C._nn.scaled_dot_product_attention)
        changed = [c for c in configs if (uses_sdpa(c) and replaceable) or (sinks and adds_masks(c))]
        for config in changed:
            users, before = USERS.get(id(config), (0, config._attn_implementation))
            USERS[id(config)] = users + 1, before
            config._attn_implementation = {"": NAME}  # not that of parts
    try:
        yield
    finally:
        with _lock:
            for config in changed:
                users, before = USERS.pop(id(config))
                if users > 1:  # other threads
                    USERS[id(config)] = users - 1, before
                else:
                    config._attn_implementation = {"": before}


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


def masks_of(
    config: Any, positions_BT: torch.Tensor, max_tokens: int, dtype: torch.dtype = torch.bool
) -> torch.Tensor | dict[str, torch.Tensor | None]:
    """Masks ``[B, 1, T, max_tokens]`` of tokens at ``positions_BT``: True for positions that a token sees; in a float
    dtype, the numbers to add to scores.

    A model whose configuration has ``layer_types`` takes one mask for each type: all earlier positions, the last
    ``sliding_window`` ones, or the token's chunk of ``attention_chunk_size`` (Llama 4). Without types,
    ``sliding_window`` holds for all layers (Mistral, Phi-3). If no window is ever full there is one mask.
    """
    text = config.get_text_config(decoder=True)
    slots, last_B1T1 = torch.arange(max_tokens, device=positions_BT.device), positions_BT[:, None, :, None]
    before = slots <= last_B1T1
    window, chunk = (getattr(text, name, None) or max_tokens for name in ("sliding_window", "attention_chunk_size"))
    masks = {"full_attention": before}
    if window < max_tokens:
        masks["sliding_attention"] = before & (slots > last_B1T1 - window)
    if chunk < max_tokens:
        masks["chunked_attention"] = before & (slots // chunk == last_B1T1 // chunk)
    if dtype != torch.bool:
        masks = {kind: torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype) for kind, seen in masks.items()}
    before, kinds = masks["full_attention"], getattr(text, "layer_types", None)
    if kinds is None:
        return masks.get("sliding_attention", before)
    others: dict[str, torch.Tensor | None] = {kind: None if kind in RECURRENT else before for kind in kinds}
    return before if len(masks) == 1 else {**others, **masks}
