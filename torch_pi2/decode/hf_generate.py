"""``model.generate`` of an optimised model: transformers' loop with the steps of a pooled :class:`Decoder`.

Settings, logits processors, stopping criteria, streamers and sampling stay transformers' own. Calls that a Decoder
cannot serve (padded prompts, beams, other caches, outputs of layers, hooks) run unchanged.
"""

import functools
import math
from types import FunctionType
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.chunked_prefill import most_positions
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.guards import is_known
from torch_pi2.decode.plan_controller import controller_of
from torch_pi2.decode.sequence import not_finite, pick
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.gpu import device_of
from torch_pi2.rewrite.state import store_of

#: The attribute of a model whose ``generate`` uses our steps.
ATTRIBUTE = "_torch_pi2_answers"
#: Longest static cache: a ``max_length`` may be any number if an answer has no expected end.
_MOST_TOKENS = 1 << 15
#: Names of a cache, the second before transformers 5.24.
_CACHES = ("cache", "past_key_values")
#: Arguments of transformers' loop that a Decoder handles itself or does not need.
_KNOWN = {*_CACHES, "position_ids", "attention_mask", "logits_to_keep", "use_cache", "streamer"}
_KNOWN |= {"synced_gpus", "tokenizer", "logits_processor", "stopping_criteria"}
#: Settings that a Decoder does not support.
_UNSUPPORTED = ("return_dict_in_generate", "prefill_chunk_size", "cache_implementation", "compile_config")
#: Methods that models with special inputs override.
_PLAIN = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
#: Caches of transformers' loop, which a Decoder's takes the place of.
_REPLACED = ("Cache", "DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer")
#: Size of a pooled Decoder in tokens: this, or the next power of two (on a GPU multiple).
_LEAST_TOKENS = 256


class DecoderPool:
    """Keeps at most one Decoder of a model in memory (over a store, where memory has a budget, none); thread-safe. It
    keeps neither the model alive nor, on the CPU, memory of keys and values. A copy of the model gets an empty pool.
    ``kind``: the model's class, whose ``generate`` uses our steps from then on (also where it is unpickled).
    """

    def __init__(self, kind: Any) -> None:
        self._free: list[tuple[Decoder, object]] = []
        self._class = kind
        _install(kind)

    def __reduce__(self) -> Any:
        return type(self), (self._class,)

    def acquire(self, model: nn.Module, tokens: int, sequences: int) -> Decoder:
        """A Decoder for this many tokens and sequences: the pooled one if it is free and fits, else a new one."""
        if store_of(model) is not None:
            return decoder_for(model, tokens, sequences)
        try:
            decoder, kind = self._free.pop()
        except IndexError:
            pass
        else:
            same = decoder.attach(model)  # a shallow copy has the decoder of another model
            same = same and kind == (getattr(model, "dtype", None), device_of(model))
            if same and decoder.rows >= sequences and decoder.max_tokens >= tokens:
                return decoder
        # a size that fits later answers too; on the CPU only the used part takes memory
        if device_of(model).type == "cpu":
            more = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        else:
            more = -(-tokens // _LEAST_TOKENS) * _LEAST_TOKENS
        rounded = max(tokens, min(more, most_positions(model)))
        return decoder_for(model, rounded, sequences)

    def release(self, decoder: Decoder) -> None:
        """Keep ``decoder`` for the next call of :meth:`acquire`."""
        if store_of(decoder.model) is None:
            kind = getattr(decoder.model, "dtype", None), decoder.device
            decoder.detach()
            self._free[:] = [(decoder, kind)]


def decoder_for(
    model: nn.Module, tokens: int, sequences: int, compiled: bool = False, kv: str | None = None
) -> Decoder:
    return Decoder(model, max_tokens=tokens, batch=sequences, compiled=compiled, logits=True, kv=kv)


def _install(kind: Any) -> None:
    """Let ``generate`` of a class of transformers use our steps for models that have the attribute :data:`ATTRIBUTE`: a
    method of the model itself would be a cycle, which only the garbage collector frees.
    """
    usual = kind.generate
    if hasattr(usual, ATTRIBUTE):  # the class, or one that it inherits from, has it already
        return

    @functools.wraps(usual)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        actual: Any = type(self)
        if ATTRIBUTE in vars(self) and len(args) < 3:
            kwargs["logits_processor"] = [_Finite(), *(kwargs.get("logits_processor") or ())]  # theirs may set infinity
        ours = ATTRIBUTE in vars(self) and not hasattr(actual, "_stepping_for")
        if ours and all(kwargs.get(name) is None for name in ("custom_generate", *_CACHES)) and _is_plain(self):
            own = object.__new__(_stepping(actual))
            object.__setattr__(own, "__dict__", vars(self))
            object.__setattr__(own, "_stepping_for", self)  # a slot: __dict__ is the model's
            self = own
        return usual(self, *args, **kwargs)

    setattr(generate, ATTRIBUTE, True)
    kind.generate = generate


class _Finite:
    """A logits processor of transformers, which would take token 0 for ever; of a function it parses the signature."""

    def __call__(self, _ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        if not float(scores_BV.sum(dtype=torch.float32)) < math.inf:  # NaN, too; a third of the time of a maximum
            raise not_finite()
        return scores_BV


def _sample(model: Any, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> Any:
    """transformers' loop with our steps if a Decoder supports the call, else with the model's own."""
    loop, pool = type(model)._sample, pool_of(model)
    if (controller := controller_of(model)) is not None:
        controller.batch(len(input_ids))
    if pool is not None and _supports(input_ids, config, kwargs):
        try:
            most = min(config.max_length, most_positions(model))  # the answer may end before
            decoder = pool.acquire(model, max(2, most), len(input_ids))
            if not decoder.is_hooked():
                if config.do_sample or [type(one) for one in kwargs["logits_processor"]] != [_Finite]:
                    result = loop(_Steps(model, decoder), input_ids, generation_config=config, **kwargs)
                else:
                    result = _greedy(decoder, input_ids, config, **kwargs)
                pool.release(decoder)
                return result
        except UnsupportedModelError:  # raised before the first token
            pass
    return loop(model, input_ids, generation_config=config, **kwargs)


def _greedy(
    decoder: Decoder, ids_BT: torch.Tensor, config: Any, stopping_criteria: Any, streamer: Any = None, **_kwargs: Any
) -> torch.Tensor:
    """transformers' loop where nothing else sees the scores: its copies and its argmax take 0.5 ms a step."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    going_B1, logits_BV = torch.ones_like(ids_BT[:, :1]), decoder.prompt(ids_BT)
    while True:
        next_B1 = torch.tensor([[pick(logits_V, None)] for logits_V in logits_BV], device="cpu")
        if ends:  # a sequence that has ended is padded
            next_B1 = next_B1 * going_B1 + config._pad_token_tensor.cpu() * (1 - going_B1)
        ids_BT = torch.cat((ids_BT, next_B1), dim=1)
        going_B1 = going_B1 & ~stopping_criteria(ids_BT, None)[:, None]
        if streamer is not None:
            streamer.put(next_B1[:, 0])
        if not going_B1.any():
            break
        logits_BV = decoder.step(next_B1)
    if streamer is not None:
        streamer.end()
    return ids_BT


class _Steps:
    """Takes the place of the model in the loop: its forwards are those of ``decoder``."""

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        self._model, self._decoder = model, decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, input_ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return _output(self._decoder.prompt(input_ids))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_kwargs: Any) -> dict[str, Any]:
        return {"ids_B1": input_ids[:, -1:]}

    def _update_model_kwargs_for_generation(self, _output: Any, kwargs: dict[str, Any], **_more: Any) -> dict[str, Any]:
        return kwargs  # masks and positions of the next token, of which our steps use none

    def __call__(self, ids_B1: torch.Tensor, return_dict: bool = True) -> Any:
        return _output(self._decoder.step(ids_B1))


def _output(logits_BV: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=logits_BV[:, None])


@functools.cache
def _stepping(kind: Any) -> Any:
    """``kind`` with our loop: transformers looks it up in the class."""

    def sample(self: Any, input_ids: torch.Tensor, *, generation_config: Any, **kwargs: Any) -> Any:
        return _sample(self._stepping_for, input_ids, generation_config, kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ("_stepping_for",)}
    return type(kind)(kind.__name__, (kind,), {"_sample": sample, **names})


def _is_plain(model: Any) -> bool:
    """Whether a Decoder's step does what a step of ``model`` does."""
    from transformers import GenerationMixin

    kind = type(model)
    own = any(getattr(kind, name, None) is not getattr(GenerationMixin, name, None) for name in _PLAIN)
    own = own or not vars(model).keys().isdisjoint(_PLAIN)  # as PEFT's prompt tuning puts them on a model
    called = model.training or model._compiled_call_impl is not None or torch.is_autocast_enabled("cpu")
    return _is_unpatched() and not (own or called or torch.compiler.is_compiling() or model.config.is_encoder_decoder)


def _is_unpatched() -> bool:
    """Whether the steps and caches of transformers' loop, which ours replace, are transformers' own."""
    from transformers import GenerationMixin, cache_utils
    from transformers.generation import utils

    functions = [getattr(GenerationMixin, name, None) for name in _PLAIN]
    functions += [value for kind in _REPLACED for value in vars(getattr(cache_utils, kind, object)).values()]
    known = all(is_known(f.__code__, f.__globals__) for f in functions if isinstance(f, FunctionType))
    return known and utils.DynamicCache is cache_utils.DynamicCache


def _supports(input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> bool:
    tokens, position_ids, mask = input_ids.shape[-1], kwargs.get("position_ids"), kwargs.get("attention_mask")
    others = {name for name, value in kwargs.items() if value is not None} - _KNOWN
    plain = not others and not any(getattr(config, name, None) for name in _UNSUPPORTED)
    plain = plain and kwargs.get("use_cache") is True and not kwargs.get("synced_gpus")
    plain = plain and kwargs.get("logits_to_keep", 1) == 1 and tokens >= 1 and config.max_length <= _MOST_TOKENS
    plain = plain and input_ids.dtype == torch.int64 and input_ids.device.type == "cpu"
    plain = plain and (mask is None or (mask.shape == input_ids.shape and bool(mask.all())))  # transformers < 5.20
    return plain and (position_ids is None or bool((position_ids == torch.arange(tokens, device="cpu")).all()))


def pool_of(model: nn.Module) -> DecoderPool | None:
    """The pool of ``model``; None: each answer makes its own Decoder."""
    return vars(model).get(ATTRIBUTE)


def attach(model: nn.Module) -> None:
    """Let ``model.generate`` use our steps, if transformers' ``generate`` is a method of its class."""
    detach(model)
    if hasattr(type(model), "_sample") and hasattr(type(model), "generate"):
        object.__setattr__(model, ATTRIBUTE, DecoderPool(type(model)))


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    vars(model).pop(ATTRIBUTE, None)
