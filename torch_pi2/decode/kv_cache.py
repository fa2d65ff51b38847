"""``KeyValues``: keys and values of sequences of different lengths that are decoded together."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.base.memory import untouched_zeros
from torch_pi2.errors import DtypeError, OutOfMemoryError, UnsupportedModelError
from torch_pi2.ops import load

#: Maximum new tokens of a step: a failed one may have written this many beyond a row's length.
_MOST_STEPPED = 8


def cache_name(model: nn.Module) -> str:
    """The name of the cache in a model's forward: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    inherited = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    for forward in (model.forward, *inherited):  # the first that names its arguments
        for name in ("cache", "past_key_values"):
            if name in inspect.signature(forward).parameters:
                return name
    return "past_key_values"


def cache_of(output: Any) -> Any:
    return output["cache"] if "cache" in output else output["past_key_values"]


def of_another_dtype(expected: str, found: str) -> DtypeError:
    fix = "Keep torch.autocast and the model's dtype until the answer ends, and make a new Decoder for another."
    return DtypeError("keys and values", expected=f"{expected}, as in the first prompt", found=found, fix=fix)


def check_dtype(before: torch.Tensor, new: torch.Tensor) -> None:
    if new.dtype != before.dtype:
        raise of_another_dtype(dtype_name(before.dtype), dtype_name(new.dtype))


class LayerMemory:
    """Keys and values of one layer, ``[rows, heads, max_tokens, width]``, allocated by the first prompt."""

    def __init__(self, rows: int, max_tokens: int, device: torch.device) -> None:
        self.rows, self.max_tokens, self.device = rows, max_tokens, device
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Zeros of the heads and width of these. On the CPU they take no memory until they are written."""
        wanted = [((self.rows, t.shape[1], self.max_tokens, t.shape[3]), t.dtype) for t in (keys, values)]
        try:
            if self.device.type == "cpu":
                self.keys, self.values = (untouched_zeros(*each) for each in wanted)
            else:
                self.keys, self.values = (
                    torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in wanted
                )
        except (OSError, OverflowError, RuntimeError) as error:  # RuntimeError: of torch's allocators
            expected, fix = f"memory for {self.rows} x {self.max_tokens} tokens", "Lower max_new_tokens or max_tokens."
            found = str(error).splitlines()[0][:200].rstrip(".")
            raise OutOfMemoryError("keys and values", expected=expected, found=found, fix=fix) from error

    def give_back(self, rows: int) -> None:
        """Return the memory of all but the first ``rows`` to the system (not on a GPU); it then reads as zeros."""
        if self.device.type == "cpu":
            load()
            for tensor in self.tensors():
                torch.ops.pi2.give_back(tensor[rows:])


class _Layer:
    """The interface of a static cache's layer in transformers."""

    is_compileable, is_croppable, is_sliding = True, False, False
    is_initialized = True

    def __init__(self, memory: LayerMemory) -> None:
        self.max_cache_len = memory.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class PromptLayer(_Layer):
    """Rows of ``memory`` while their prompts, of equal length, are read in chunks after ``known`` tokens."""

    def __init__(self, memory: LayerMemory, rows: slice, known: int = 0) -> None:
        super().__init__(memory)
        self._memory, self._rows, self._tokens = memory, rows, known

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[rows, heads, T, width]`` each; returns all keys and values of the rows."""
        if self._memory.keys is None:
            self._memory.allocate(key_states, value_states)
        before, self._tokens = self._tokens, self._tokens + key_states.shape[2]
        keys, values = (t[self._rows] for t in self._memory.tensors())
        for all_rows, states in ((keys, key_states), (values, value_states)):
            check_dtype(all_rows, states)
            all_rows[:, :, before : self._tokens] = states
        return keys[:, :, : self._tokens], values[:, :, : self._tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._tokens


class GrowingLayer(PromptLayer):
    """As transformers' ``DynamicLayer``: also for steps of attention that masks nothing in them."""

    is_compileable = False

    def get_max_length(self) -> int:
        return -1


class StepLayer(_Layer):
    """The first rows of ``memory`` while they are decoded. The caller increases their lengths, ``lengths_B``."""

    def __init__(self, memory: LayerMemory, lengths_B: torch.Tensor) -> None:
        super().__init__(memory)
        self.keys, self.values = (t[: len(lengths_B)] for t in memory.tensors())
        self._lengths_B = lengths_B
        for tensor in (self.keys, self.values):
            # as mark_static_address does, which would import Dynamo
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, heads, T, width]`` each at the end of each row; returns all of the memory."""
        rows, new = key_states.shape[0], key_states.shape[2]
        at_BT = self._lengths_B[:, None] + torch.arange(new, device=key_states.device)
        for all_rows, states in ((self.keys, key_states), (self.values, value_states)):
            check_dtype(all_rows, states)
            if rows == 1:
                all_rows.index_copy_(2, at_BT[0], states)
            else:
                all_rows[torch.arange(rows, device=key_states.device)[:, None], :, at_BT] = states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> torch.Tensor:
        """One length for all rows: transformers asks for it only if no positions are passed."""
        return self._lengths_B[0]


class KeyValues:
    """Keys and values of up to ``rows`` sequences of ``max_tokens`` each, and transformers' caches over them.

    All caches are views of the same memory, which the first prompt allocates. Rows are copied but never reallocated:
    compiled code holds their addresses.

    Args:
        grows: caches show attention only what is written (:func:`torch_pi2.decode.chunked_prefill.attends_itself`).

    Attributes:
        lengths: int64 ``[rows]``, tokens of each sequence.
    """

    def __init__(self, model: nn.Module, max_tokens: int, rows: int, device: torch.device, grows: bool = False) -> None:
        from transformers.cache_utils import CacheLayerMixin, DynamicCache  # only to decode its models

        for kind in (PromptLayer, StepLayer):
            CacheLayerMixin.register(kind)
        self._template: Any = static_cache(model, max_tokens)
        self._memory = [LayerMemory(rows, max_tokens, device) for _ in self._template.layers]
        self._template = DynamicCache() if grows else self._template
        self._prompt_layer = GrowingLayer if grows else PromptLayer
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._written = [0] * rows  # tokens of each row that may have been written
        self._stepping: dict[int, Any] = {}

    def reading(self, first: int, rows: int, tokens: int, known: int = 0) -> Any:
        """A cache for prompts of ``tokens`` tokens in ``rows`` rows from ``first`` on, which keep the ``known`` first.

        Earlier contents are set to zero: attention that multiplies masked values by zero would keep NaN.
        """
        taken = slice(first, first + rows)
        self.lengths[taken].zero_()
        most = max(self._written[taken])
        for memory in self._memory if most > known else []:
            for tensor in memory.tensors():
                tensor[taken, :, known:most].zero_()
        self._written[taken] = [tokens] * rows
        return self.growing(taken, known)

    def growing(self, rows: slice, known: int) -> Any:
        """A cache for more tokens of ``rows``, which have ``known`` tokens each."""
        return self._cache([self._prompt_layer(memory, rows, known) for memory in self._memory])

    def add(self, tokens: int, lengths: list[int]) -> None:
        """Count ``tokens`` more in the first rows, which then have ``lengths``. Until then a step can be repeated."""
        rows = len(lengths)
        self.lengths[:rows].add_(tokens)
        self._written[:rows] = (max(most, n + _MOST_STEPPED) for most, n in zip(self._written, lengths))

    def check_used(self, model: nn.Module) -> None:
        """Raises UnsupportedModelError: ``model`` has not used the cache for a prompt."""
        if any(memory.keys is None for memory in self._memory):
            raise no_causal_model(model, "one that leaves it empty: what it knows of the prompt is elsewhere")

    def stepping(self, rows: int) -> Any:
        """The cache for steps of the first ``rows`` sequences, the same object each time."""
        if rows not in self._stepping:
            lengths_B = self.lengths[:rows]
            self._stepping[rows] = self._cache([StepLayer(memory, lengths_B) for memory in self._memory])
        return self._stepping[rows]

    def _cache(self, layers: list[Any]) -> Any:
        cache = copy.copy(self._template)
        cache.layers = layers
        return cache

    def copied(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Copies of keys and values ``[heads, last - first, width]`` of a row, by layer, on the CPU."""
        parts = (tensor[row, :, first:last] for memory in self._memory for tensor in memory.tensors())
        return [part.to("cpu", copy=True) for part in parts]

    def put(self, row: int, first: int, copied: list[torch.Tensor]) -> None:
        """Write the result of :meth:`copied` into a row, from token ``first`` on."""
        for memory, keys, values in zip(self._memory, copied[::2], copied[1::2], strict=True):
            if memory.keys is None:
                memory.allocate(keys[None], values[None])
        tensors = [tensor for memory in self._memory for tensor in memory.tensors()]
        for tensor, part in zip(tensors, copied, strict=True):
            tensor[row, :, first : first + part.shape[1]] = part

    def copy_row(self, source: int, target: int) -> None:
        tokens = int(self.lengths[source])
        for memory in self._memory:
            for tensor in memory.tensors():
                tensor[target, :, :tokens] = tensor[source, :, :tokens]
        self.lengths[target], self._written[target] = tokens, max(self._written[target], tokens)

    def give_back(self, rows: int) -> None:
        """:meth:`LayerMemory.give_back` of all layers."""
        for memory in self._memory:
            memory.give_back(rows)


def static_cache(model: nn.Module, max_tokens: int) -> Any:
    """transformers' ``StaticCache`` for ``model``. Layers with windows keep all tokens, which masks hide. Raises
    UnsupportedModelError: see :class:`torch_pi2.Decoder`.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        raise no_causal_model(model, "a model without a configuration" if config is None else "an encoder-decoder")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise no_causal_model(model, "an adapter that puts virtual tokens before each prompt")
    unsupported = Field(model, type(model).__name__, "Use model.generate.", UnsupportedModelError)
    if getattr(config, "alibi", False):
        found = "attention with linear biases (ALiBi), which it computes for the tokens that there are"
        unsupported.wrong("positions in rotary embeddings or tables", found)
    from_ids = any(
        hasattr(p, "create_position_ids_from_input_ids") and "position_embeddings" in p._modules
        for p in model.modules()
    )
    window = config.window_size if "local" in getattr(config, "attention_layers", ()) else max_tokens
    if from_ids or window < max_tokens:
        found = f"windows of {window} tokens that end with the cache, not with the last token (GPT-Neo)"
        found = "positions that its code derives from the ids (RoBERTa)" if from_ids else found
        unsupported.wrong("positions that count from 0, and windows of the last tokens", found)
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
    return UnsupportedModelError(
        type(model).__name__,
        expected="a causal language model of transformers, whose layers use the cache that they are given",
        found=found,
        fix="Pass such a model, or use model.generate.",
    )
