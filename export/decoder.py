"""Methods of a Hugging Face decoder over one static KV cache of several lanes: ``prefill``, ``decode_bN``, ``fork``.

A lane is a sequence. Every method says where its tokens stand (``positions``), so that sequences of a batch may have
different lengths, and a new prompt simply begins at position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.runtime.prompt import sparse_only

Select = Callable[[torch.Tensor], torch.Tensor]
#: Under this name transformers finds :func:`grouped_attention`.
_ATTENTION = "pi2_export"
#: Tokens on which lanes are compared with the model, and the relative difference that they may have.
_CHECKED, _CHECK_TOLERANCE = 40, 2e-2
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
    return y.view(batch, heads, tokens, value.shape[-1]).transpose(1, 2), None


@contextmanager
def exportable_attention(model: nn.Module) -> Iterator[None]:
    """While this is entered, a Hugging Face ``model`` uses :func:`grouped_attention`."""
    from transformers import AttentionInterface

    config: Any = model.config
    AttentionInterface.register(_ATTENTION, grouped_attention)
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


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
        with torch.no_grad():  # what a token leaves in each layer; configurations say it in many ways
            seen = model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=True).past_key_values.layers
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
                attention_mask=mask_B1TL.repeat(1, 1, self.groups, 1),
                past_key_values=Cache(layers=caches),
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits


class Prefill(nn.Module):
    """``(ids [1, T], positions [1, T], lane [1]) -> logits [1, 1, V]``."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, lane: torch.Tensor) -> Any:
        return self.lanes.run(ids, positions, lane, lambda cache: cache.index_select(0, lane))


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


def check_lanes(lanes: Lanes) -> None:
    """See that a sequence in a lane gives what the model gives: prefill, then a token beside other lanes.

    Models do things to their attention that no configuration tells (local windows, masks of their own).

    Raises:
        UnsupportedModelError: it does not.
    """
    count = min(lanes.max_tokens, _CHECKED)
    vocab = lanes.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(0))
    last, length = lanes.lanes - 1, count - 1
    tokens, positions = ids[:, -1:].repeat(lanes.lanes, 1), torch.zeros((lanes.lanes, 1), dtype=torch.int64)
    positions[last] = length
    with torch.no_grad(), sparse_only():  # long prompts may be computed otherwise
        wanted = lanes.model(input_ids=ids).logits[0, -1].float()
        Prefill(lanes)(ids[:, :length], torch.arange(length)[None], torch.tensor([last]))
        found = Decode(lanes, lanes.lanes)(tokens, positions)[last, -1].float()
        for buffer in lanes.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.zero_()
    off = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if not off <= _CHECK_TOLERANCE:
        raise UnsupportedModelError(
            f"export of {type(lanes.model).__name__}",
            expected="the same logits with keys and values of fixed size as without",
            found=f"others ({100 * off:.0f} % off after {count} tokens): its attention is of another kind",
            fix="Run it with PyTorch; this attention is not in the exporter yet.",
        )


def decoder_methods(lanes: Lanes, batches: Sequence[int]) -> dict[str, nn.Module]:
    """Every method of a decoder by its name."""
    methods: dict[str, nn.Module] = {"prefill": Prefill(lanes)}
    methods |= {f"decode_b{batch}": Decode(lanes, batch) for batch in batches}
    if max(batches) > 1:
        methods["fork"] = Fork(lanes)
    return methods
