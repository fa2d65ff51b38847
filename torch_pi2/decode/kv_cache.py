"""``KeyValues``: keys, values and recurrent states of sequences of different lengths that are decoded together."""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field
from torch_pi2.base.memory import untouched_zeros
from torch_pi2.errors import DtypeError, OutOfMemoryError, ShapeError, UnsupportedModelError
from torch_pi2.layers.choices import Choices
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load
from torch_pi2.ops.attention import KV_DTYPES, kv_row_bytes

#: A number of tokens and recurrent states after them, by layer.
States = tuple[int, list[torch.Tensor]]
#: How many times the usual spread of keys is too much for 4 bits: that of Qwen2.5's first layer.
_MUCH = 3
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


def _form(states: torch.Tensor) -> str:
    """The format, heads and width of ``[heads, T, width]``; width is of bytes in a format of ``kv``."""
    kind = next((kv for kv, dtype in KV_DTYPES.items() if dtype == states.dtype), dtype_name(states.dtype))
    return f"{kind} [{states.shape[0]}, T, {states.shape[-1]}]"


class LayerMemory:
    """Keys and values of one layer, ``[rows, heads, max_tokens, width]``, allocated by the first prompt. ``kv``: their
    format if it is not the model's dtype (:data:`torch_pi2.ops.attention.KV_DTYPES`); width is then bytes.
    """

    def __init__(self, rows: int, max_tokens: int, device: torch.device, kv: str | None = None) -> None:
        self.rows, self.max_tokens, self.device, self.kv = rows, max_tokens, device, kv
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        #: ``[1, heads, 1, width]``, subtracted from quantised keys: softmax does not see what all scores share.
        self.center: torch.Tensor | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: tuple[torch.Tensor, ...], at_BT: Any) -> None:
        """Quantise new keys and values into these rows of :meth:`tensors`."""
        keys = keys if self.center is None else keys - self.center
        for states, all_rows in zip((keys, values), rows, strict=True):
            torch.ops.pi2.write_kv(states, all_rows, at_BT)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Zeros of the heads and width of these. On the CPU they take no memory until they are written."""
        of_rows = [(t.shape[3], t.dtype) for t in (keys, values)]
        if self.kv is not None and keys.is_floating_point():  # else copies of what was written before
            of_rows = [(kv_row_bytes(self.kv, width), KV_DTYPES[self.kv]) for width, _ in of_rows]
        wanted = [((self.rows, keys.shape[1], self.max_tokens, width), dtype) for width, dtype in of_rows]
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
        quantized = self._memory.kv is not None
        if quantized:
            at_BT = torch.arange(before, self._tokens).expand(len(keys), -1)
            self._memory.write(key_states, value_states, (keys, values), at_BT)
        for all_rows, states in () if quantized else ((keys, key_states), (values, value_states)):
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
        self._lengths_B, self._memory = lengths_B, memory
        for tensor in (self.keys, self.values):
            # as mark_static_address does, which would import Dynamo
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, heads, T, width]`` each at the end of each row; returns all of the memory."""
        rows, new = key_states.shape[0], key_states.shape[2]
        at_BT = self._lengths_B[:, None] + torch.arange(new, device=key_states.device)
        if self._memory.kv is not None:
            self._memory.write(key_states, value_states, (self.keys, self.values), at_BT)
            return self.keys, self.values
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


class StateMemory:
    """Recurrent states of one layer (convolutions, state-space models, linear attention). ``tensors``: ``[rows, ...]``
    by kind (``conv`` or ``recurrent``) and number, allocated by the first prompt.
    """

    def __init__(self, rows: int, count: int) -> None:
        self.rows, self.count, self.tensors = rows, count, dict[tuple[str, int], torch.Tensor]()

    def of(self, kind: str, number: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if (kind, number) not in self.tensors:
            self.tensors[kind, number] = torch.zeros((self.rows, *shape), dtype=like.dtype, device=like.device)
        tensor = self.tensors[kind, number]
        check_dtype(tensor, like)
        if tensor.shape[1:] != shape:
            expected = f"the same size for every prompt, {list(tensor.shape[1:])}"
            found, fix = str(list(shape)), "Use model.generate."
            raise UnsupportedModelError(f"recurrent states ({kind})", expected=expected, found=found, fix=fix)
        return tensor


class _States:
    """Rows of a :class:`StateMemory` in place of the tensors of transformers' ``LinearAttentionLayer``."""

    def take(self, memory: StateMemory, rows: slice, known: bool) -> None:
        """``known``: the rows have states, which the next tokens change."""
        self._states, self._state_rows = memory, rows
        self.bound: dict[tuple[str, int], torch.Tensor] = {}
        for (kind, number), tensor in memory.tensors.items() if known else ():
            self._bind(kind, number, tensor)
        if known:
            self.has_previous_state = dict.fromkeys(range(memory.count), True)

    def _bind(self: Any, kind: str, number: int, tensor: torch.Tensor) -> None:
        bound = self.bound[kind, number] = tensor[self._state_rows]
        getattr(self, f"{kind}_states")[number] = bound
        getattr(self, f"is_{kind}_states_initialized")[number] = True
        self.device, self.dtype = tensor.device, tensor.dtype
        if kind == "conv":
            self.conv_kernel_size[number] = tensor.shape[-1]

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            shape = (*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1])
            self._bind("conv", state_idx, self._states.of("conv", state_idx, shape, conv_states))
        if recurrent_states is not None:
            made = self._states.of("recurrent", state_idx, tuple(recurrent_states.shape[1:]), recurrent_states)
            self._bind("recurrent", state_idx, made)


@functools.cache
def _with_states(attention: Any) -> Any:
    """The class of layers with states, beside keys and values if ``attention`` is the class of these."""
    from transformers.cache_utils import LinearAttentionLayer

    def init(self: Any, states: StateMemory, rows: slice, known: bool, *of_attention: Any) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states.count)
        if attention is not None:
            attention.__init__(self, *of_attention)
        self.take(states, rows, known)

    kinds = (_States, *(() if attention is None else (attention,)), LinearAttentionLayer)
    return type(LinearAttentionLayer)("StateLayer", kinds, {"__init__": init})


def _parts(layer: Any) -> tuple[bool, int]:
    """Whether a layer of transformers' cache has keys and values, and its number of recurrent states."""
    from transformers.cache_utils import CacheLayerMixin

    return isinstance(layer, CacheLayerMixin), getattr(layer, "number_of_states", 0)


class ForgottenStates(Exception):
    """A model's code begins with new states in a chunk of a prompt that is not the first."""


class _Uses(TorchFunctionMode):
    def __init__(self, states: list[torch.Tensor]) -> None:
        super().__init__()
        self.unused = {id(state) for state in states}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = args[1:] if getattr(func, "__name__", "") in ("copy_", "__get__") else args
        for value in (*read, *(kwargs or {}).values()):
            self.unused -= {id(part) for part in (value if isinstance(value, (tuple, list)) else (value,))}
        return func(*args, **(kwargs or {}))


@contextmanager
def check_continued(cache: Any) -> Iterator[None]:
    """Raises ForgottenStates at the end unless each state of ``cache`` is read (Mamba's first version has none)."""
    layers = [layer for layer in cache.layers if isinstance(layer, _States)]
    with _Uses([t for layer in layers for t in layer.bound.values()]) as uses:
        yield
    if uses.unused:
        raise ForgottenStates


class KeyValues:
    """Keys, values and states of up to ``rows`` sequences of ``max_tokens``, and transformers' caches over them.

    All caches are views of the same memory, which the first prompt allocates. Rows are copied but never reallocated:
    compiled code holds their addresses. States are those after all tokens of a row: none can be taken back. ``grows``:
    caches show attention only what is written (:func:`torch_pi2.decode.chunked_prefill.attends_itself`). ``lengths``:
    int64 ``[rows]``, tokens of each sequence. ``states``: memory of recurrent states, by layer that has some.
    ``kv``: of :class:`LayerMemory`.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int,
        rows: int,
        device: torch.device,
        grows: bool = False,
        kv: str | None = None,
    ) -> None:
        from transformers.cache_utils import CacheLayerMixin, DynamicCache  # only to decode its models

        for kind in (PromptLayer, StepLayer):
            CacheLayerMixin.register(kind)
        self._template: Any = static_cache(model, max_tokens)
        parts = [_parts(layer) for layer in self._template.layers]
        self._layers = [
            (
                LayerMemory(rows, max_tokens, device, kv) if attends else None,
                StateMemory(rows, states) if states else None,
            )
            for attends, states in parts
        ]
        self._memory = [memory for memory, _ in self._layers if memory is not None]
        self.states = [memory for _, memory in self._layers if memory is not None]
        chosen = [y.site.key for y in sparse_layers(model) if y.custom is not None and y.custom.scope == "prompt"]
        #: Numbers of the layers whose methods choose by prompt, and the memory of their choices.
        self.choosers, self.chosen = {key: number for number, key in enumerate(chosen)}, StateMemory(rows, 0)
        self.states += [self.chosen] if chosen else []
        self.has_attention = bool(self._memory)
        self._others = [layer for layer, part in zip(self._template.layers, parts, strict=True) if part == (False, 0)]
        self._template = DynamicCache() if grows else self._template
        self._prompt_layer = GrowingLayer if grows else PromptLayer
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._written = [0] * rows  # tokens of each row that may have been written
        self._stepping: dict[int, Any] = {}

    def measure_keys(
        self, model: nn.Module, read: Callable[[Any, torch.Tensor], object], places_1T: torch.Tensor
    ) -> None:
        """Find what keys have in common: their mean when ``read(cache, places_1T)`` has read some tokens there.

        Biases of Qwen2's keys are ten times as long as what differs, and slow rotations leave them alike at all
        positions. Layers whose keys then still differ several times as much as in others have 8 bits, not 4.
        """
        of_floats = KeyValues(model, places_1T.shape[1], 1, self.lengths.device)
        read(of_floats.reading(0, 1, places_1T.shape[1]), places_1T)
        keys = [memory.tensors()[0][:, :, 1:].float() for memory in of_floats._memory]  # the first is like no other
        centers = [keys_1KTD.mean(2, keepdim=True) for keys_1KTD in keys]
        spread = torch.stack([(each - mean).norm(dim=-1).mean() for each, mean in zip(keys, centers, strict=True)])
        for memory, center, much in zip(self._memory, centers, spread > _MUCH * spread.median(), strict=True):
            memory.center = center
            memory.kv = "int8" if much else memory.kv

    def choices(self, rows: slice, reading: bool) -> Choices | None:
        """Where methods that choose by prompt keep what they have chosen, if there are any."""
        return Choices(self.chosen, self.choosers, rows, reading) if self.choosers else None

    def reading(self, first: int, rows: int, tokens: int, known: int = 0) -> Any:
        """A cache for prompts of ``tokens`` tokens in ``rows`` rows from ``first`` on, which keep the ``known`` first.

        Earlier contents are set to zero: attention that multiplies masked values by zero would keep NaN.
        """
        taken = slice(first, first + rows)
        self.lengths[taken].zero_()
        for tensor in self.chosen.tensors.values() if not known else ():
            tensor[taken].zero_()
        most = max(self._written[taken])
        for memory in self._memory if most > known else []:
            for tensor in memory.tensors():
                tensor[taken, :, known:most].zero_()
        self._written[taken] = [tokens] * rows
        return self.growing(taken, known)

    def growing(self, rows: slice, known: int) -> Any:
        """A cache for more tokens of ``rows``, which have ``known`` tokens each."""
        return self._cache(self._prompt_layer, rows, known > 0, rows, known)

    def add(self, tokens: int, lengths: list[int]) -> None:
        """Count ``tokens`` more in the first rows, which then have ``lengths``. Until then a step can be repeated."""
        rows = len(lengths)
        self.lengths[:rows].add_(tokens)
        self._written[:rows] = (max(most, n + _MOST_STEPPED) for most, n in zip(self._written, lengths))

    def check_used(self, model: nn.Module) -> None:
        """Raises UnsupportedModelError: ``model`` has not used the cache for a prompt."""
        if any(memory.keys is None for memory in self._memory) or not all(states.tensors for states in self.states):
            raise no_causal_model(model, "one that leaves it empty: what it knows of the prompt is elsewhere")

    def stepping(self, rows: int) -> Any:
        """The cache for steps of the first ``rows`` sequences, the same object each time."""
        if rows not in self._stepping:
            lengths_B = self.lengths[:rows]
            self._stepping[rows] = self._cache(StepLayer, slice(rows), True, lengths_B)
        return self._stepping[rows]

    def _cache(self, kind: Any, rows: slice, known: bool, *given: Any) -> Any:
        """A cache of layers of ``kind`` for keys and values; ``known``: there are states before the next tokens."""
        cache, others = copy.copy(self._template), iter(self._others)
        cache.layers = [
            (kind(memory, *given) if memory is not None else next(others))
            if states is None
            else _with_states(None if memory is None else kind)(states, rows, known, memory, *given)
            for memory, states in self._layers
        ]
        return cache

    def _state_tensors(self) -> list[torch.Tensor]:
        """``[rows, ...]`` of each state, by layer."""
        return [tensor for states in self.states for tensor in states.tensors.values()]

    def saved_states(self, rows: int) -> list[torch.Tensor]:
        """Copies of the states of the first rows, for :meth:`restore_states`."""
        return [tensor[:rows].clone() for tensor in self._state_tensors()]

    def restore_states(self, saved: list[torch.Tensor]) -> None:
        for tensor, before in zip(self._state_tensors(), saved, strict=True):
            tensor[: len(before)] = before

    def copied_states(self, row: int) -> list[torch.Tensor]:
        """Copies of the states of a row, by layer, on the CPU."""
        return [tensor[row].to("cpu", copy=True) for tensor in self._state_tensors()]

    def put_states(self, row: int, copied: list[torch.Tensor]) -> None:
        """Write the result of :meth:`copied_states` into a row."""
        tensors = self._state_tensors()
        if len(tensors) != len(copied):
            expected, fix = f"{len(tensors)} tensors, as after the first prompt here", "Read a prompt first."
            raise ShapeError("recurrent states", expected=expected, found=str(len(copied)), fix=fix)
        for tensor, one in zip(tensors, copied, strict=True):
            tensor[row] = one

    def clear_states(self, row: int) -> None:
        """As before the first token."""
        for tensor in self._state_tensors():
            tensor[row].zero_()

    def copied(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Copies of keys and values ``[heads, last - first, width]`` of a row, by layer, on the CPU."""
        parts = (tensor[row, :, first:last] for memory in self._memory for tensor in memory.tensors())
        return [part.to("cpu", copy=True) for part in parts]

    def check_copied(self, copied: list[torch.Tensor]) -> None:
        """Raises ShapeError: tensors of other layers, or in another format, than :meth:`copied` gives here."""
        wanted = list[str]()
        for memory in self._memory:
            if memory.center is not None and memory.kv is not None:
                heads, width = memory.center.shape[1], kv_row_bytes(memory.kv, memory.center.shape[3])
                wanted += 2 * [f"{memory.kv} [{heads}, T, {width}]"]
            else:
                wanted += [_form(t[0]) for t in memory.tensors()] or 2 * ["float"]
        found = [_form(t) for t in copied]
        for one, other in zip(wanted, found):
            if one != other and (one != "float" or other.startswith(tuple(KV_DTYPES))):
                fix = "Copy them from a Decoder of this model with the same kv."
                raise ShapeError("known keys and values", expected=one, found=other, fix=fix)
        if len(wanted) != len(found):
            fix = "Copy them from a Decoder of this model."
            raise ShapeError("known keys and values", expected=f"{len(wanted)} tensors", found=f"{len(found)}", fix=fix)

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
        for tensor in self._state_tensors():
            tensor[target] = tensor[source]
        self.lengths[target], self._written[target] = tokens, max(self._written[target], tokens)

    def give_back(self, rows: int) -> None:
        """:meth:`LayerMemory.give_back` of all layers."""
        for memory in self._memory:
            memory.give_back(rows)


def static_cache(model: nn.Module, max_tokens: int) -> Any:
    """transformers' ``StaticCache`` for ``model``. Layers with windows keep all tokens, which masks hide. Raises
    UnsupportedModelError: see :class:`torch_pi2.Decoder`.
    """
    from transformers import PreTrainedModel, StaticCache
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
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        given = inspect.signature(part.forward).parameters.get(cache_name(part))
        own = re.search(r"\b(?!EncoderDecoder|Dynamic|Static)\w+Cache\b", str(given))
        if own is not None:
            unsupported.wrong("layers that use transformers' usual caches", f"a cache of its own, {own[0]}")
    makes_ids = [p for p in model.modules() if hasattr(p, "create_position_ids_from_input_ids")]
    from_ids = any("position_embeddings" in p._modules for p in makes_ids)
    window = config.window_size if "local" in getattr(config, "attention_layers", ()) else max_tokens
    if from_ids or window < max_tokens:
        found = f"windows of {window} tokens that end with the cache, not with the last token (GPT-Neo)"
        found = "positions that its code derives from the ids (RoBERTa)" if from_ids else found
        unsupported.wrong("positions that count from 0, and windows of the last tokens", found)
    cache = StaticCache(config=config, max_cache_len=max_tokens)
    known = {"StaticLayer", "LinearAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"}
    known |= {"LinearAttentionAndStaticSlidingWindowAttentionLayer"}
    if getattr(config.get_text_config(decoder=True), "kv_sharing_modes", None) is None:
        known.add("DummyLayer")  # of layers without a cache
    for i, layer in enumerate(cache.layers):
        states = getattr(layer, "number_of_states", None)
        if states is None and isinstance(layer, StaticLayer) and layer.is_sliding:
            cache.layers[i] = StaticLayer(max_cache_len=max_tokens)
        elif type(layer).__name__ not in known or (hasattr(layer, "conv_states") and states is None):
            expected = "keys and values of plain attention, or recurrent states as since transformers 5.24"
            found, fix = type(layer).__name__, "Use model.generate."
            raise UnsupportedModelError(f"KV cache of layer {i}", expected=expected, found=found, fix=fix)
    return cache


def no_causal_model(model: nn.Module, found: str) -> UnsupportedModelError:
    what = type(model).__name__
    expected = "a causal language model of transformers, whose layers use the cache that they are given"
    return UnsupportedModelError(what, expected=expected, found=found, fix="Pass such a model, or use model.generate.")
