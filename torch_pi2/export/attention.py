"""Attention of a Hugging Face decoder whose KV cache is a buffer of the program: what is traced of it.

Models that call the attention which transformers gives them get :mod:`~torch_pi2.export.cached_attention`. Others have
their own in their code: they read whole lanes of the cache, under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.errors import UnsupportedModelError

Select = Callable[[torch.Tensor], torch.Tensor]
#: Under this name transformers finds what is given to it.
_NAME = "pi2_export"
#: Arguments of attention that change its result, and are not known here.
_NOT_HERE = ("position_bias", "head_mask")


def takes_attention(model: nn.Module) -> bool:
    """Whether a Hugging Face ``model`` calls the attention that it is given; others have their own in their code."""
    return bool(getattr(model, "_supports_attention_backend", False))


def lane_layers(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], rows_BT: torch.Tensor, lanes: int, select: Select, ours: bool
) -> list[Any]:
    """Layers of transformers' ``Cache`` over keys and values of each layer, for new tokens at ``rows_BT``.

    Args:
        select: rows of a cache that belong to the sequences.
        ours: attention is given the new tokens alone, and :func:`exportable_attention` knows by them which layer it is;
            or else what ``select`` gives.

    Of each layer, ``caller``, ``window`` and ``has_sinks`` are set by the first attention of ours that reads it.
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
            self.window, self.has_sinks = 0, False

        def before(self) -> tuple[torch.Tensor, torch.Tensor]:
            """What the lanes of the sequences have."""
            return select(self.keys), select(self.values)

        def masks(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Which slots ``[B, 1, T, L]`` and which new tokens ``[B, 1, T, T]`` a new token sees: 0, or else 1."""
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


def masks_of(positions_BT: torch.Tensor, room: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens at successive positions: which slots of a cache ``[B, 1, T, L]``, which has what was before them, and
    which of themselves ``[B, 1, T, T]`` each of them sees: 0, or else 1. window: as of ``cached_attention``.
    """
    positions_B1T1 = positions_BT[:, None, :, None]
    slots, own_B11T = torch.arange(room), positions_B1T1.transpose(2, 3)
    found = []
    for at, sees in ((slots, slots < positions_B1T1[:, :, :1]), (own_B11T, own_B11T <= positions_B1T1)):
        if window:
            sees = sees & (at > positions_B1T1 - window)
        found.append(torch.where(sees.expand(-1, -1, positions_BT.shape[1], -1), 0.0, 1.0))
    return found[0], found[1]


@contextmanager
def exportable_attention(model: nn.Module, layers: Sequence[Any]) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` that takes its attention has ours, over :func:`lane_layers`.

    Rotary embeddings whose frequencies depend on the length of the sequence have those of short ones: a program that
    chose among them would read keys that it has written with others.
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
    """transformers' attention interface. The mask is not looked at: positions and the window say what a token sees."""
    index = next((i for i, layer in enumerate(layers) if layer.new_key is key), None)
    strange = [name for name in _NOT_HERE if others.get(name) is not None]
    if strange or index is None:
        raise _unsupported(module, f"one with {', '.join(strange)}" if strange else "one that changes them")
    layer = layers[index]
    window = _window(module, config, index, sliding_window, layer.tokens)
    layer.caller, layer.window, layer.has_sinks = module, window, s_aux is not None
    widths = query.shape[-1], value.shape[-1]  # of a cache they are the same
    query, key, value = (
        F.pad(x, (0, max(widths) - x.shape[-1])) if len({*widths}) > 1 else x for x in (query, key, value)
    )
    scale = float(widths[0] ** -0.5 if scaling is None else scaling)
    settings = (scale, window, float(softcap or 0), None if s_aux is None else s_aux.float())
    y: torch.Tensor = torch.ops.pi2.cached_attention(
        query, key, value, layer.rows_BT, layer.keys, layer.values, *settings
    )
    return y[..., : widths[1]]


def _window(module: nn.Module, config: Any, layer: int, called_with: int | None, tokens: int) -> int:
    """Of a layer, 0: none that is shorter than ``tokens``. Masks follow the configuration, calls say it besides."""
    kinds, width = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    slides = kinds[layer] == "sliding_attention" if kinds else getattr(config, "use_sliding_window", True)
    by_config, by_call = (w if w < tokens else 0 for w in (width if slides else 0, called_with or 0))
    if by_config != by_call and not (kinds and by_call == 0):
        raise _unsupported(
            module, f"a window of {by_call or 'all'} tokens, and {by_config or 'all'} in its configuration"
        )
    return by_config


def _unsupported(module: nn.Module, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"export of {type(module).__name__}",
        expected="attention of scores, a window and softmax, of the keys that its cache gives",
        found=found,
        fix="Run it with PyTorch; this attention is not in the exporter yet.",
    )


def _fixed(kind: Any) -> Any:
    """In place of a kind of rotary embedding whose frequencies depend on the length, the one that leaves them alone."""
    return "default" if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") else kind


def reset_rotary(model: nn.Module) -> None:
    """Forget what long sequences have made of rotary embeddings."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            original = getattr(module, name.replace("inv_freq", "original_inv_freq"), None)
            if name.endswith("inv_freq") and "original" not in name and original is not None and buffer is not None:
                with torch.no_grad():
                    buffer.copy_(original)
