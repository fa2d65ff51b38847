"""Methods of a Hugging Face decoder over one static KV cache of several lanes: ``forward``, ``decode_bN``, ``fork``.

A lane is a sequence. Every method says where its tokens stand (``positions``), so that sequences of a batch may have
different lengths, and a new prompt simply begins at position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.kv import cache_name, cache_of
from torch_pi2.errors import ConfigError, UnsupportedModelError

Select = Callable[[torch.Tensor], torch.Tensor]
#: Under this name transformers finds :func:`grouped_attention`.
_ATTENTION = "pi2_export"
#: Arguments of attention that change its result, and are not known here.
_NOT_HERE = ("s_aux", "position_bias", "head_mask")


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface, of operators that XNNPACK has, without repeating keys for each query head.

    Args:
        query: ``[B, N, T, D]``. key, value: ``[B, K, L, D]``. attention_mask: additive, ``[B, 1, N / K * T, L]``; every
            token sees something, so that softmax needs no guard.

    Returns:
        ``[B, T, N, D]``.

    Raises:
        UnsupportedModelError: the model wants something else of its attention (sinks, biases).
    """
    strange = [name for name in _NOT_HERE if others.get(name) is not None]
    if strange:
        raise UnsupportedModelError(
            f"export of {type(module).__name__}",
            expected="attention of scores, a mask and softmax",
            found=f"one with {', '.join(strange)}",
            fix="Run it with PyTorch; this attention is not in the exporter yet.",
        )
    batch, heads, tokens, width = query.shape
    groups = batch * key.shape[1]  # bmm, as matmul of four dimensions would copy both of its sides
    packed = query.reshape(groups, -1, width) * (scaling or width**-0.5)
    scores = torch.bmm(packed, key.reshape(groups, -1, width).transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = scores.view(batch, key.shape[1], *scores.shape[1:]) + attention_mask
    weights = torch.softmax(seen, -1).view(scores.shape)
    y = torch.bmm(weights, value.reshape(groups, -1, value.shape[-1]))
    return y.view(batch, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


def takes_attention(model: nn.Module) -> bool:
    """Whether a Hugging Face ``model`` calls the attention that it is given; others have their own in their code."""
    return bool(getattr(model, "_supports_attention_backend", False))


@contextmanager
def exportable_attention(model: nn.Module) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` uses :func:`grouped_attention`, if it takes one.

    Rotary embeddings whose frequencies depend on the length of the sequence have those of short ones: a program that
    chose among them would read keys that it has written with others.
    """
    from transformers import AttentionInterface

    config: Any = model.config
    AttentionInterface.register(_ATTENTION, grouped_attention)
    before = config._attn_implementation
    if takes_attention(model):
        config._attn_implementation = _ATTENTION
    kinds: list[Any] = [(module, module.rope_type) for module in model.modules() if hasattr(module, "rope_type")]
    for module, kind in kinds:
        module.rope_type = {name: _fixed(k) for name, k in kind.items()} if isinstance(kind, dict) else _fixed(kind)
    try:
        yield
    finally:
        config._attn_implementation = before
        for module, kind in kinds:
            module.rope_type = kind


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


class Lanes(nn.Module):
    """A causal language model with its KV cache as buffers, ``[lanes * max_tokens, KV heads, head size]`` per layer.

    ExecuTorch writes into a buffer in place where the index is a vector, so that lane and position are one number.

    Args:
        model: a Hugging Face causal language model whose layers all have full attention.

    Raises:
        UnsupportedModelError: its cache is none of keys and values of all tokens.
    """

    def __init__(self, model: nn.Module, lanes: int, max_tokens: int) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        _check_attention(model, text, max_tokens)
        reset_rotary(model)
        with torch.no_grad():  # what a token leaves in each layer; configurations say it in many ways
            seen = cache_of(model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=True)).layers
        self.groups = text.num_attention_heads // seen[0].keys.shape[1]
        self.layers, self.lanes, self.max_tokens = len(seen), lanes, max_tokens
        for i, layer in enumerate(seen):
            for kind, one in (("key", layer.keys), ("value", layer.values)):
                cache = torch.zeros(lanes * max_tokens, one.shape[1], one.shape[3])
                self.register_buffer(f"{kind}_{i}", cache, persistent=False)
        self.register_buffer("slots", torch.arange(max_tokens), persistent=False)

    def run(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, lane_B: torch.Tensor, select: Select) -> Any:
        """Logits ``[B, 1, V]`` of the last tokens. ``select``: the rows of a cache that belong to ``lane_B``."""
        from transformers.cache_utils import Cache

        rows_N = (lane_B[:, None] * self.max_tokens + positions_BT).flatten()
        caches = [
            _lane_layer(getattr(self, f"key_{i}"), getattr(self, f"value_{i}"), rows_N, self.lanes, select)
            for i in range(self.layers)
        ]
        slots: Any = self.slots
        seen_B1TL = slots[None, None, None, :] <= positions_BT[:, None, :, None]
        mask_B1TL = torch.where(seen_B1TL, 0.0, float("-inf"))
        with exportable_attention(self.model):
            output = self.model(
                input_ids=ids_BT,
                position_ids=positions_BT,
                attention_mask=mask_B1TL.repeat(1, 1, self.groups, 1) if takes_attention(self.model) else mask_B1TL,
                use_cache=True,
                logits_to_keep=1,
                **{cache_name(self.model): Cache(layers=caches)},
            )
        return output.logits


class Forward(nn.Module):
    """``(ids [1, T], start [1]) -> logits [1, 1, V]``: any number of tokens of one lane.

    ``start`` is the row of the cache of the first: its position, and ``max_tokens`` for each lane before. In the first
    lane it is a position, as ExecuTorch's own LLM runner has it.
    """

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, ids: torch.Tensor, start: torch.Tensor) -> Any:
        most = self.lanes.max_tokens
        lane_1 = torch.div(start, most, rounding_mode="floor")
        positions_1T = (start % most + torch.arange(ids.shape[1]))[None]
        return self.lanes.run(ids, positions_1T, lane_1, lambda cache: cache.index_select(0, lane_1))


class Decode(nn.Module):
    """``(ids [B, 1], positions [B, 1]) -> logits [B, 1, V]`` of lanes 0 to B - 1."""

    def __init__(self, lanes: Lanes, batch: int) -> None:
        super().__init__()
        self.lanes, self.batch = lanes, batch

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.lanes.run(ids, positions, torch.arange(self.batch), lambda cache: cache[: self.batch])


class Fork(nn.Module):
    """``(lanes [L]) -> lanes``: lane i continues what ``lanes[i]`` has read."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, lanes: torch.Tensor) -> torch.Tensor:
        for i in range(self.lanes.layers):
            for kind in ("key", "value"):
                cache = getattr(self.lanes, f"{kind}_{i}")
                rows = cache.view(self.lanes.lanes, -1)
                cache.copy_(rows.index_select(0, lanes).view(cache.shape))
        return lanes + 0


def _lane_layer(keys: torch.Tensor, values: torch.Tensor, rows_N: torch.Tensor, lanes: int, select: Select) -> Any:
    """A layer of transformers' ``Cache`` over rows of two buffers."""
    from transformers.cache_utils import CacheLayerMixin

    class LaneLayer(CacheLayerMixin):
        is_compileable, is_sliding, is_initialized = True, False, True

        def lazy_initialization(self, *_: Any) -> None: ...

        def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            found = []
            for cache, new_BKTD in ((keys, key), (values, value)):
                cache.index_put_((rows_N,), new_BKTD.transpose(1, 2).flatten(0, 1))
                found.append(select(cache.view(lanes, -1, *cache.shape[1:])).transpose(1, 2))
            return tuple(found)

        def get_seq_length(self, *_: Any) -> int:
            return 0

        def get_max_length(self, *_: Any) -> int:
            return len(keys) // lanes

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return len(keys) // lanes, 0

    layer = LaneLayer()
    layer.keys, layer.values = keys, values
    return layer


def _check_attention(model: nn.Module, config: Any, max_tokens: int) -> None:
    """Raises UnsupportedModelError for what lanes cannot hold, ConfigError for more tokens than the model takes."""
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"export of {type(model).__name__}",
            expected="a decoder",
            found="an encoder and a decoder",
            fix="Export its parts as modules, with args=... and dynamic_shapes=....",
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModelError(
            f"export of {type(model).__name__}",
            expected="positions in rotary embeddings or tables",
            found="attention with linear biases (ALiBi), which it makes of a mask without positions",
            fix="Run it with PyTorch; this attention is not in the exporter yet.",
        )
    places = getattr(config, "max_position_embeddings", None)
    if places is not None and max_tokens > places:
        raise ConfigError(
            "export(max_tokens=...)",
            expected=f"at most {places}, the positions that the model has (max_position_embeddings)",
            found=str(max_tokens),
            fix="Export with fewer.",
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True))
    found = sorted(kinds - {"full_attention", "sliding_attention"})
    if sliding and window and window < max_tokens:
        found.append(f"a sliding window of {window} tokens, fewer than {max_tokens}")
    if found:
        raise UnsupportedModelError(
            f"export of {type(model).__name__}",
            expected="full attention in all layers",
            found=", ".join(found),
            fix="Export with max_tokens within the window, or a model with full attention.",
        )


def decoder_methods(lanes: Lanes, batches: Sequence[int]) -> dict[str, nn.Module]:
    """Every method of a decoder by its name."""
    methods: dict[str, nn.Module] = {"forward": Forward(lanes)}
    methods |= {f"decode_b{batch}": Decode(lanes, batch) for batch in batches}
    if max(batches) > 1:
        methods["fork"] = Fork(lanes)
    return methods
