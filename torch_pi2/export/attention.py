"""Tracing the attention of Hugging Face decoders over a KV cache in buffers of the program. Models with their own
attention code read whole lanes of the cache under a mask; the others call our operator.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.ops import attention, load
from torch_pi2.types.config import KV_FORMATS

#: Storage dtypes of the cache formats.
KV_DTYPES = dict(zip(KV_FORMATS, (torch.float32, torch.float16, torch.uint8)))
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor rows, Tensor(a!) keys, Tensor(b!) values, "
    "float scale, int window, float softcap, Tensor? sinks=None"
)
_WRITE_ARGUMENTS = "Tensor key, Tensor value, Tensor rows, Tensor(a!) keys, Tensor(b!) values"


@functools.cache
def define() -> torch.library.Library:
    """Register the operators with torch, once."""
    load()
    library = torch.library.Library("pi2", "FRAGMENT")
    for function, arguments, fake in (
        (cached_attention, _ARGUMENTS, lambda query, *_: query.new_empty(query.transpose(1, 2).shape)),
        (write_cache, _WRITE_ARGUMENTS, lambda key, *_: key.new_empty(len(key), dtype=torch.int64)),
    ):
        name = function.__name__
        library.define(f"{name}({arguments}) -> Tensor")
        library.define(f"{name}.out({arguments}, *, Tensor(c!) out) -> Tensor(c!)")
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(f"{name}.out", lambda *x, out, of=function: out.copy_(of(*x)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"pi2::{name}", fake, lib=library)
    return library


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``key`` and ``value`` into the cache, then attend to it (grouped-query: N query heads, K key heads).

    Args:
        query: float32 ``[B, N, T, D]``. key, value: float32 ``[B, K, T, D]``.
        rows: int64 ``[B, T]``: lane * L + position of each token; a sequence has one lane.
        keys, values: the cache ``[lanes, K, L, D]`` in float32 or float16, or uint8 ``[lanes, K, L, D + 4]``: see
            :func:`packed`.
        scale: of scores. softcap c: c tanh(scores / c); 0: none.
        window: positions that a token sees, including itself; 0: all.
        sinks: float32 ``[N]``: attention sinks (gpt-oss), scores that only enter the softmax's sum.

    Returns:
        float32 ``[B, T, N, D]``.
    """
    lane_B, position_BT = write_cache(key, value, rows, keys, values), rows % keys.shape[2]
    used = int(position_BT.max()) + 1  # the rest of the cache is empty
    group = query.shape[1] // key.shape[1]
    key_BNLD, value_BNLD = (unpacked(c[lane_B, :, :used]).repeat_interleave(group, 1) for c in (keys, values))
    slots_L, y = torch.arange(used, device=rows.device), []
    for q_BND, last_B in zip(query.unbind(2), position_BT.unbind(1), strict=True):
        seen_BL = slots_L <= last_B[:, None]
        if window:
            seen_BL = seen_BL & (slots_L > last_B[:, None] - window)
        scores_BNL = scale * (q_BND[:, :, None] @ key_BNLD.mT)[:, :, 0]
        if softcap:
            scores_BNL = softcap * torch.tanh(scores_BNL / softcap)
        scores_BNL = scores_BNL.masked_fill(~seen_BL[:, None], -torch.inf)
        if sinks is not None:
            scores_BNL = torch.cat((scores_BNL, sinks[:, None].expand(len(scores_BNL), -1, 1)), -1)
        weights_BNL = scores_BNL.softmax(-1)[..., :used]
        y.append((weights_BNL[:, :, None] @ value_BNLD.where(seen_BL[:, None, :, None], 0))[:, :, 0])
    return torch.stack(y, 1)


def write_cache(
    key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Write ``key`` and ``value`` into the cache, see :func:`cached_attention`. Returns lanes ``[B]``."""
    length = keys.shape[2]
    lane_B, position_BT = rows[:, 0] // length, rows % length
    for cache, new_BKTD in ((keys, key), (values, value)):
        cache[lane_B[:, None], :, position_BT] = packed(new_BKTD, cache.dtype).transpose(1, 2)
    return lane_B


def packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[..., D]`` in a cache's format.

    uint8 holds int8 rows (:func:`torch_pi2.ops.attention.packed`).
    """
    return attention.packed(x, "int8").view(dtype) if dtype == torch.uint8 else x.to(dtype)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`packed`, in float32."""
    return attention.unpacked(rows.view(torch.int8), 0) if rows.dtype == torch.uint8 else rows.float()


Select = Callable[[torch.Tensor], torch.Tensor]
_NAME = "pi2_export"
#: Unsupported arguments that change the result of attention.
_NOT_HERE = ("position_bias", "head_mask")


def takes_attention(model: nn.Module) -> bool:
    """Whether a Hugging Face ``model`` uses transformers' attention interface, not attention code of its own."""
    return bool(getattr(model, "_supports_attention_backend", False))


def lane_layers(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], rows_BT: torch.Tensor, lanes: int, select: Select, ours: bool
) -> list[Any]:
    """Layers of transformers' ``Cache`` over the given keys and values, for new tokens at ``rows_BT``. ``ours``:
    attention gets only the new tokens, which identify the layer in :func:`exportable_attention`, and sets ``caller``
    and ``window``; otherwise it gets the rows that ``select`` takes of a cache.
    """
    from transformers.cache_utils import CacheLayerMixin

    masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    class LaneLayer(CacheLayerMixin):
        is_compileable, is_sliding, is_initialized = True, False, True

        def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.rows_BT, self.new_key = keys, values, rows_BT, keys
            self.tokens = keys.shape[2] if ours else len(keys) // lanes
            self.caller: nn.Module | None = None
            self.window = 0

        def before(self) -> tuple[torch.Tensor, torch.Tensor]:
            return select(self.keys), select(self.values)

        def masks(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
            """:func:`masks_of` the new tokens."""
            if window not in masks:  # the same in all layers
                masks[window] = masks_of(rows_BT % self.tokens, self.tokens, window)
            return masks[window]

        def lazy_initialization(self, *_: Any) -> None: ...

        def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            self.new_key = key
            if ours:
                return key, value
            found = []
            for cache, new_BKTD in ((self.keys, key), (self.values, value)):
                cache.index_put_((rows_BT.flatten(),), new_BKTD.transpose(1, 2).flatten(0, 1))
                found.append(select(cache.view(lanes, -1, *cache.shape[1:])).transpose(1, 2))
            return tuple(found)

        def get_seq_length(self, *_: Any) -> int:
            return 0

        def get_max_length(self, *_: Any) -> int:
            return self.tokens

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return self.tokens, 0

    return [LaneLayer(keys, values) for keys, values in caches]


def masks_of(positions_BT: torch.Tensor, slots: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of new tokens over slots ``[B, 1, T, L]`` and themselves ``[B, 1, T, T]``: 0 where visible, else 1."""
    positions_B1T1 = positions_BT[:, None, :, None]
    slots_L, own_B11T = torch.arange(slots), positions_B1T1.transpose(2, 3)
    found = []
    for at, sees in ((slots_L, slots_L < positions_B1T1[:, :, :1]), (own_B11T, own_B11T <= positions_B1T1)):
        if window:
            sees = sees & (at > positions_B1T1 - window)
        found.append(torch.where(sees.expand(-1, -1, positions_BT.shape[1], -1), 0.0, 1.0))
    return found[0], found[1]


@contextmanager
def exportable_attention(model: nn.Module, layers: Sequence[Any]) -> Iterator[None]:
    """Within the block a Hugging Face ``model`` uses our attention function, over :func:`lane_layers`, and rotary
    embeddings with length-dependent frequencies keep those of short sequences, as cached keys have them.
    """
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        return _attention(module, query, key, value, layers, text, **others), None

    config: Any = model.config
    text = config.get_text_config(decoder=True)
    AttentionInterface.register(_NAME, attention)
    before = config._attn_implementation
    if takes_attention(model):
        config._attn_implementation = _NAME
    kinds: list[Any] = [(module, module.rope_type) for module in model.modules() if hasattr(module, "rope_type")]
    for module, kind in kinds:
        module.rope_type = {name: _fixed(k) for name, k in kind.items()} if isinstance(kind, dict) else _fixed(kind)
    try:
        yield
    finally:
        config._attn_implementation = before
        for module, kind in kinds:
            module.rope_type = kind


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layers: Sequence[Any],
    config: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """transformers' attention interface. Positions and the window replace the mask."""
    index = next((i for i, layer in enumerate(layers) if layer.new_key is key), None)
    strange = [name for name in _NOT_HERE if others.get(name) is not None]
    if strange or index is None:
        raise _unsupported(module, f"one with {', '.join(strange)}" if strange else "one that changes them")
    layer = layers[index]
    window = _window(module, config, index, sliding_window, layer.tokens)
    layer.caller, layer.window = module, window
    widths = query.shape[-1], value.shape[-1]  # the cache has one width for keys and values
    if len({*widths}) > 1:
        query, key, value = (F.pad(x, (0, max(widths) - x.shape[-1])) for x in (query, key, value))
    scale = float(widths[0] ** -0.5 if scaling is None else scaling)
    settings = (scale, window, float(softcap or 0), None if s_aux is None else s_aux.float())
    cache = (layer.rows_BT, layer.keys, layer.values)
    y: torch.Tensor = torch.ops.pi2.cached_attention(query, key, value, *cache, *settings)
    return y[..., : widths[1]]


def _window(module: nn.Module, config: Any, layer: int, called_with: int | None, tokens: int) -> int:
    """The window of a layer; 0: none below ``tokens``. Call and configuration have to agree."""
    kinds, width = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    slides = kinds[layer] == "sliding_attention" if kinds else getattr(config, "use_sliding_window", True)
    by_config, by_call = (w if w < tokens else 0 for w in (width if slides else 0, called_with or 0))
    if by_config != by_call and not (kinds and by_call == 0):
        raise _unsupported(module, f"a window of {by_call or 'all'} tokens, but {by_config or 'all'} in its config")
    return by_config


def _unsupported(module: nn.Module, found: str) -> UnsupportedModelError:
    expected = "attention of scores, a window and softmax, of the keys that its cache gives"
    fix = "Run it with PyTorch; this attention is not in the exporter yet."
    return UnsupportedModelError(f"export of {type(module).__name__}", expected=expected, found=found, fix=fix)


def _fixed(kind: Any) -> Any:
    """The kind of rotary embedding, or the default if its frequencies depend on the length."""
    return "default" if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") else kind


def reset_rotary(model: nn.Module) -> None:
    """Reset rotary embeddings that long sequences have changed."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            original = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
            if name.endswith("inv_freq") and "original" not in name and original is not None and buffer is not None:
                with torch.no_grad():
                    buffer.copy_(original)
