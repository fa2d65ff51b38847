"""Methods of a Hugging Face decoder over one static KV cache of several lanes: ``forward``, ``decode_bN``, ``fork``.

A lane holds one sequence. Every method is told the positions of its tokens, so that the sequences of a batch may have
different lengths, and a new prompt simply begins at position 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import cached_attention
from torch_pi2.export.attention import Select, exportable_attention, lane_layers, reset_rotary, takes_attention
from torch_pi2.export.program import MethodSpec


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written: long contexts are large, and tracing only reads shapes."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class Lanes(nn.Module):
    """A causal language model with its KV cache as buffers ``key_i`` and ``value_i`` of each layer.

    ``[lanes, KV heads, max_tokens, head size]`` as :mod:`~torch_pi2.export.cached_attention` has it; for a model with
    attention of its own ``[lanes * max_tokens, KV heads, head size]``: ExecuTorch writes into a buffer in place where
    the index is a vector, so that lane and position are one number.

    Args:
        model: a Hugging Face causal language model.
        kv: one of ``KV_FORMATS``.

    Raises:
        UnsupportedModelError: its cache does not hold keys and values of all tokens.
    """

    def __init__(self, model: nn.Module, lanes: int, max_tokens: int, kv: str = "float32") -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        self.ours = takes_attention(model)
        _check_attention(model, config.get_text_config(decoder=True), max_tokens, kv, self.ours)
        reset_rotary(model)
        cached_attention.define()
        with torch.no_grad():  # what a token leaves in each layer; configurations say it in many ways
            seen = cache_of(model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=True)).layers
        self.layers, self.lanes, self.max_tokens = len(seen), lanes, max_tokens
        self._widths = [(layer.keys.shape[3], layer.values.shape[3]) for layer in seen]
        for i, layer in enumerate(seen):
            width = max(self._widths[i])
            for kind, one in (("key", layer.keys), ("value", layer.values)):
                if self.ours:
                    row = cached_attention.packed(torch.zeros(width), cached_attention.KV_DTYPES[kv])
                    cache = _zeros((lanes, one.shape[1], max_tokens, len(row)), row.dtype)
                else:
                    cache = _zeros((lanes * max_tokens, one.shape[1], one.shape[3]), torch.float32)
                self.register_buffer(f"{kind}_{i}", cache, persistent=False)
        self.register_buffer("slots", torch.arange(max_tokens), persistent=False)

    def variant(self) -> Lanes:
        """A copy with modules of its own, but the same weights and the same KV cache.

        Methods differ in their modules (what an accelerator computes), not in their tensors.
        """
        tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        return copy.deepcopy(self, tensors)

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer."""
        return [(getattr(self, f"key_{i}"), getattr(self, f"value_{i}")) for i in range(self.layers)]

    def lane(self, lane: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of one lane in each layer, ``[max_tokens, KV heads, ...]``."""

        def rows(cache: torch.Tensor) -> torch.Tensor:
            return cache[lane].transpose(0, 1) if self.ours else cache.view(self.lanes, -1, *cache.shape[1:])[lane]

        return [(rows(keys), rows(values)) for keys, values in self.caches()]

    def floats(self, lane: int, tokens: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first tokens of a lane in a layer, ``[tokens, KV heads, width]`` in float32."""
        keys, values = (
            cached_attention.unpacked(rows[:tokens])[..., :width]
            for rows, width in zip(self.lane(lane)[layer], self._widths[layer])
        )
        return keys, values

    def forget(self) -> None:
        """Empty all lanes."""
        for cache in (cache for pair in self.caches() for cache in pair):
            cache.zero_()

    def run(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        lane_B: torch.Tensor,
        select: Select,
        last: torch.Tensor | int = 1,
    ) -> Any:
        """Logits ``[B, 1, V]`` of the last tokens, or of those at ``last [1]``.

        ``select``: the rows of a cache that belong to ``lane_B``.
        """
        from transformers.cache_utils import Cache

        rows_BT = lane_B[:, None] * self.max_tokens + positions_BT
        layers = lane_layers(self.caches(), rows_BT, self.lanes, select, self.ours)
        slots: Any = self.slots
        seen_B1TL = slots[None, None, None, : 1 if self.ours else None] <= positions_BT[:, None, :, None]
        with exportable_attention(self.model, layers):
            output = self.model(
                input_ids=ids_BT,
                position_ids=positions_BT,
                attention_mask=torch.where(seen_B1TL, 0.0, float("-inf")),
                use_cache=True,
                logits_to_keep=last,
                **{cache_name(self.model): Cache(layers=layers)},
            )
        return output.logits


class Forward(nn.Module):
    """``(ids [1, T], start [1]) -> logits [1, 1, V]``: any number of tokens of one lane.

    ``start`` is the first token's row in the cache: its position, plus ``max_tokens`` for each lane before. In the
    first lane it is the position, as ExecuTorch's own LLM runner passes it. With a fixed T the prompt is padded, and
    ``last [1]`` is the index of its last token.
    """

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, ids: torch.Tensor, start: torch.Tensor, last: torch.Tensor | int = 1) -> Any:
        most = self.lanes.max_tokens
        lane_1 = torch.div(start, most, rounding_mode="floor")
        positions_1T = (start % most + torch.arange(ids.shape[1]))[None]
        return self.lanes.run(ids, positions_1T, lane_1, lambda cache: cache.index_select(0, lane_1), last)


class Decode(nn.Module):
    """``(ids [B, 1], positions [B, 1]) -> logits [B, 1, V]`` of lanes 0 to B - 1."""

    def __init__(self, lanes: Lanes, batch: int) -> None:
        super().__init__()
        self.lanes, self.batch = lanes, batch

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.lanes.run(ids, positions, torch.arange(self.batch), lambda cache: cache[: self.batch])


class Fork(nn.Module):
    """``(lanes [L]) -> lanes``: lane i continues the sequence of lane ``lanes[i]``."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, lanes: torch.Tensor) -> torch.Tensor:
        for cache in (cache for pair in self.lanes.caches() for cache in pair):
            rows = cache.view(self.lanes.lanes, -1)
            cache.copy_(rows.index_select(0, lanes).view(cache.shape))
        return lanes + 0


def _check_attention(model: nn.Module, config: Any, max_tokens: int, kv: str, ours: bool) -> None:
    """Raises UnsupportedModelError for attention that lanes cannot hold, ConfigError for too many tokens."""
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
    if kv != "float32" and not ours:
        raise UnsupportedModelError(
            f"export(kv='{kv}') of {type(model).__name__}",
            expected="a model that calls the attention of transformers that it is given",
            found="one with attention in its own code, which reads keys and values in float32",
            fix="Leave kv out.",
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True))
    found = sorted(kinds - {"full_attention", "sliding_attention"})
    if sliding and window and window < max_tokens and not ours:
        found.append(f"a sliding window of {window} tokens, fewer than {max_tokens}, in attention of its own code")
    if found:
        raise UnsupportedModelError(
            f"export of {type(model).__name__}",
            expected="attention to all tokens before, or to those of a window",
            found=", ".join(found),
            fix="Export with max_tokens within the window, or a model with such attention.",
        )


def method_names(batches: Sequence[int], prompts: Sequence[int] = ()) -> list[str]:
    """The methods of a decoder; ``prompts``: token counts of ``prefill_N``."""
    names = ["forward", *(f"prefill_{tokens}" for tokens in prompts), *(f"decode_b{batch}" for batch in batches)]
    return [*names, "fork"] if max(batches) > 1 else names


def method_spec(name: str, lanes: Lanes, forward_tokens: int) -> MethodSpec:
    """The method ``name`` of ``lanes``, to be traced. ``forward_tokens``: that one call of ``forward`` takes."""
    start = torch.zeros(1, dtype=torch.int64)
    if name == "fork":
        return MethodSpec(Fork(lanes), (torch.zeros(lanes.lanes, dtype=torch.int64),))
    if name == "forward":
        ids = torch.zeros((1, min(8, forward_tokens)), dtype=torch.int64)
        length = torch.export.Dim.DYNAMIC(min=1, max=forward_tokens)
        return MethodSpec(Forward(lanes), (ids, start), dynamic_shapes=({1: length}, None))
    batch, tokens = sizes_of(name)
    ids = torch.zeros((batch, tokens), dtype=torch.int64)
    if name.startswith("prefill_"):
        return MethodSpec(Forward(lanes), (ids, start, start + 1))
    return MethodSpec(Decode(lanes, batch), (ids, ids.clone()))


def sizes_of(method: str) -> tuple[int, int]:
    """Sequences and tokens per sequence of a method decode_bN or prefill_N."""
    kind, _, size = method.partition("_")
    return (1, int(size)) if kind == "prefill" else (int(size.removeprefix("b")), 1)


def prompt_sizes(methods: Iterable[str]) -> list[int]:
    """Token counts of the methods prefill_N among ``methods``."""
    return [sizes_of(name)[1] for name in methods if name.startswith("prefill_")]
