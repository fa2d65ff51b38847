"""``KeyValues``: keys and values of sequences that are decoded together, of which some come and go before others."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.kv_layers import Memory, Reading, Stepping, registered
from torch_pi2.errors import UnsupportedModelError

#: New tokens of a step, at most: so many more than they have may have been written to rows by one that failed.
_MOST_STEPPED = 8


def cache_name(model: nn.Module) -> str:
    """What the forward of a model calls its cache: in transformers ``cache`` since version 5.24, but for older code."""
    inherited = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    for forward in (model.forward, *inherited):  # the first that names its arguments
        for name in ("cache", "past_key_values"):
            if name in inspect.signature(forward).parameters:
                return name
    return "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in what a forward returns, by either name."""
    return output["cache"] if "cache" in output else output["past_key_values"]


class KeyValues:
    """Keys and values of up to ``rows`` sequences, each of a length of its own, and transformers' caches over them.

    All caches are views of the same memory, which the first prompt makes. Rows are copied, never moved to other memory:
    what was compiled goes on to find them.

    Args:
        model: see :func:`static_cache`.
        max_tokens: of each sequence.
        rows: sequences.
        device: where all of it is.

    Attributes:
        lengths: int64 ``[rows]``, tokens that each sequence has.
    """

    def __init__(self, model: nn.Module, max_tokens: int, rows: int, device: torch.device) -> None:
        registered()
        self._made = static_cache(model, max_tokens)
        self._memory = [Memory(rows, max_tokens, device) for _ in self._made.layers]
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._most = [0] * rows  # that each row may have had
        self._stepping: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: pickled, views would be of other memory than what they are views of."""
        return vars(self) | {"_stepping": {}}

    def reading(self, first: int, rows: int, tokens: int, known: int = 0) -> Any:
        """A cache for prompts of ``tokens`` of ``rows`` sequences from row ``first`` on; ``known`` of them are there.

        What was there before is zeros: attention that multiplies what a mask hides by zero would make NaN of NaN.
        """
        taken = slice(first, first + rows)
        self.lengths[taken].zero_()
        most = max(self._most[taken])
        for memory in self._memory if most > known else []:
            for tensor in memory.tensors():
                tensor[taken, :, known:most].zero_()
        self._most[taken] = [tokens] * rows
        return self._cache([Reading(memory, taken, known) for memory in self._memory])

    def add(self, tokens: int, lengths: list[int]) -> None:
        """The first rows have so many tokens more, and ``lengths`` by that. Layers do not say it: a step that fails can
        be repeated.
        """
        rows = len(lengths)
        self.lengths[:rows].add_(tokens)
        self._most[:rows] = (max(most, n + _MOST_STEPPED) for most, n in zip(self._most, lengths))

    def check_used(self, model: nn.Module) -> None:
        """After a prompt: raises UnsupportedModelError if ``model`` has ignored the cache."""
        if any(memory.keys is None for memory in self._memory):
            raise no_causal_model(model, "one that leaves it empty: what it knows of the prompt is elsewhere")

    def stepping(self, rows: int) -> Any:
        """The cache for steps of the first ``rows`` sequences: the same object each time. Their prompts were read."""
        if rows not in self._stepping:
            lengths_B = self.lengths[:rows]
            self._stepping[rows] = self._cache([Stepping(memory, lengths_B) for memory in self._memory])
        return self._stepping[rows]

    def _cache(self, layers: list[Any]) -> Any:
        cache = copy.copy(self._made)
        cache.layers = layers
        return cache

    def copied(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Keys and values ``[heads, last - first, width]`` of some tokens of a row, by layer, on the CPU."""
        parts = (tensor[row, :, first:last] for memory in self._memory for tensor in memory.tensors())
        return [part.to("cpu", copy=True) for part in parts]

    def put(self, row: int, first: int, copied: list[torch.Tensor]) -> None:
        """Put what :meth:`copied` gave into a row, from token ``first`` on."""
        for memory, keys, values in zip(self._memory, copied[::2], copied[1::2], strict=True):
            if memory.keys is None:
                memory.make(keys[None], values[None])
        tensors = [tensor for memory in self._memory for tensor in memory.tensors()]
        for tensor, part in zip(tensors, copied, strict=True):
            tensor[row, :, first : first + part.shape[1]] = part

    def copy_row(self, source: int, target: int) -> None:
        """Row ``source`` into another."""
        tokens = int(self.lengths[source])
        for memory in self._memory:
            for tensor in memory.tensors():
                tensor[target, :, :tokens] = tensor[source, :, :tokens]
        self.lengths[target], self._most[target] = tokens, max(self._most[target], tokens)

    def give_back(self, rows: int) -> None:
        """The memory of all but the first ``rows`` to the system; whoever writes there has it again, zero at first."""
        for memory in self._memory:
            memory.give_back(rows)


def static_cache(model: nn.Module, max_tokens: int) -> Any:
    """transformers' ``StaticCache`` for ``model``; layers with windows keep all tokens, too: masks hide them.

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
