"""``KeyValues``: keys and values of sequences that are decoded together, of which some end before others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.ops import load


class KeyValues:
    """Static keys and values of up to ``rows`` sequences of one length, and a cache of transformers' for the first n.

    Caches for different n are views of the same memory and share their length, so that each can have a compiled step
    of its own. Rows are copied, never moved to other memory: what was compiled goes on to find them.

    Args:
        model: see :func:`static_cache`.
        max_tokens: of each sequence.
        rows: sequences.
    """

    def __init__(self, model: nn.Module, max_tokens: int, rows: int) -> None:
        self.rows, self._max_tokens, self._model = rows, max_tokens, model
        self._made = static_cache(model, max_tokens)  # transformers fills in its sizes with the first prompt
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []  # by layer, [rows, heads, max_tokens, width]
        self._caches: dict[int, Any] = {}

    def check_used(self) -> None:
        """After a prompt: raises UnsupportedModelError if the model has ignored the cache."""
        if not all(layer.is_initialized for layer in self._made.layers):
            raise no_causal_model(self._model, "one that leaves it empty: what it knows of the prompt is elsewhere")

    def cache(self, rows: int) -> Any:
        """For the first ``rows`` sequences. Until a prompt has been read there is one, and its batch decides."""
        if not self._whole:
            known = [layer.is_initialized for layer in self._made.layers]
            if not all(known):
                if any(known):  # a prompt that failed half-way, perhaps of another batch
                    self._made = static_cache(self._model, self._max_tokens)
                return self._made
            self._settle()
        if rows not in self._caches:
            cache = copy.copy(self._made)
            cache.layers = [copy.copy(layer) for layer in self._made.layers]  # the tensor of their length is shared
            for layer, (keys, values) in zip(cache.layers, self._whole, strict=True):
                layer.batch_size, layer.keys, layer.values = rows, keys[:rows], values[:rows]
                torch._dynamo.mark_static_address(layer.keys)
                torch._dynamo.mark_static_address(layer.values)
            self._caches[rows] = cache
        return self._caches[rows]

    def _settle(self) -> None:
        """Room for all rows. The cache of the first prompt stays the one for as many sequences as it had."""
        first: int = self._made.layers[0].batch_size
        load()
        for layer in self._made.layers:
            tensors = (layer.keys, layer.values)
            if first < self.rows:
                whole = [t.new_zeros((self.rows, *t.shape[1:])) for t in tensors]
                for new, old in zip(whole, tensors, strict=True):
                    new[:first] = old
                    torch.ops.pi2.give_back(new[first:])  # zeros as they are, but without memory until they are used
                layer.keys, layer.values = whole[0][:first], whole[1][:first]
                tensors = (whole[0], whole[1])
            self._whole.append(tensors)
        self._caches[first] = self._made

    def copy_rows(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """The first ``tokens`` of row ``source`` into other rows."""
        for tensors in self._whole:
            for tensor in tensors:
                for target in targets:
                    tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def give_back(self, rows: int) -> None:
        """The memory of all but the first ``rows`` to the system; whoever writes there has it again, zero at first."""
        if rows < self.rows:
            for tensors in self._whole:
                for tensor in tensors:
                    torch.ops.pi2.give_back(tensor[rows:])

    def set_length(self, tokens: int) -> None:
        """So many tokens are valid in each layer: after a step that failed in some of them."""
        for layer in self._made.layers:
            layer.cumulative_length.fill_(tokens)


def static_cache(model: nn.Module, max_tokens: int) -> Any:
    """transformers' ``StaticCache`` for ``model``; windows that ``max_tokens`` never fills are left out (lossless).

    Raises:
        UnsupportedModelError: see :class:`torch_pi2.decode.decode.Decoder`.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        raise no_causal_model(model, "a model without a configuration" if config is None else "an encoder-decoder")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(
            type(model).__name__,
            expected="positions in rotary embeddings or tables",
            found="attention with linear biases (ALiBi), which it makes for as many tokens as there are",
            fix="Use model.generate.",
        )
    cache = StaticCache(config=config, max_cache_len=max_tokens)
    for i, layer in enumerate(cache.layers):
        if type(layer) is not StaticLayer and isinstance(layer, StaticLayer) and layer.is_sliding:
            window = layer.max_cache_len  # no more than max_tokens
            if window < max_tokens:
                raise UnsupportedModelError(
                    f"KV cache of layer {i}",
                    expected=f"a window of at least {max_tokens} tokens",
                    found=f"a sliding window of {window}",
                    fix="Decode fewer tokens, or use model.generate.",
                )
            cache.layers[i] = StaticLayer(max_cache_len=max_tokens)
        elif type(layer) is not StaticLayer:
            raise UnsupportedModelError(
                f"KV cache of layer {i}",
                expected="keys and values of plain attention",
                found=type(layer).__name__,
                fix="Use model.generate.",
            )
    return cache


def no_causal_model(model: nn.Module, found: str) -> UnsupportedModelError:
    """To be raised where ``model`` keeps no keys and values that a :class:`KeyValues` could hold."""
    return UnsupportedModelError(
        type(model).__name__,
        expected="a causal language model of transformers, whose layers use the cache that they are given",
        found=found,
        fix="Pass such a model, or use model.generate.",
    )
