"""Milliseconds per generated token, in total and inside the feed-forward layers.

Decoding is a plain greedy loop over the KV cache of the model or of a Decoder, without the bookkeeping of ``generate``.
Models are compared in alternating rounds, so that a machine that slows down slows all of them.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.base.modules import evaluating
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.types.site import FFNSite


@dataclass(frozen=True)
class DecodeTiming:
    """Medians over rounds, in ms per token (``ffn_ms``: 0 if no modules were named), and the total of each round."""

    total_ms: float
    ffn_ms: float
    rounds: tuple[float, ...]

    def to_json(self) -> dict[str, float]:
        return {"total_ms": self.total_ms, "ffn_ms": self.ffn_ms}


@contextmanager
def _clocked(model: nn.Module, names: Iterable[str]) -> Iterator[list[float]]:
    """The seconds of each call of the named modules, by forward hooks."""
    seconds, started = list[float](), 0.0

    def enter(*_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def leave(*_: Any) -> None:
        seconds.append(time.perf_counter() - started)

    with ExitStack() as hooks:
        for module in map(model.get_submodule, names):
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        yield seconds


def _decode_round(
    model: nn.Module | Decoder, ids_BT: torch.Tensor, new_tokens: int, names: Iterable[str]
) -> tuple[float, float]:
    """(total, FFN) milliseconds per decoding step, without the prompt."""
    if isinstance(model, Decoder):
        next_B1 = model.prompt(ids_BT).cpu()
        started = time.perf_counter()
        for _ in range(new_tokens):
            next_B1 = model.step(next_B1)
        next_B1.cpu()  # waits for a GPU
        return (time.perf_counter() - started) * 1e3 / new_tokens, 0.0
    name = cache_name(model)
    with evaluating(model):
        output = model(input_ids=ids_BT, use_cache=True)
        with _clocked(model, names) as seconds:
            started = time.perf_counter()
            for _ in range(new_tokens):
                next_B1 = output.logits[:, -1:].argmax(-1)
                output = model(input_ids=next_B1, use_cache=True, **{name: cache_of(output)})
            total = time.perf_counter() - started
    return total * 1e3 / new_tokens, sum(seconds) * 1e3 / new_tokens


def ffn_modules(dense: nn.Module, sites: Iterable[FFNSite]) -> list[str]:
    """Names of modules that compute the FFNs of ``sites``; without one of its own, its linears and what is between."""
    names: list[str] = []
    for site in sites:
        own = set(site.parameter_names)
        owner = site.owner if site.experts is None else site.experts
        prefix = f"{owner}." if owner else ""
        if {prefix + name for name, _ in dense.get_submodule(owner).named_parameters()} <= own:
            names.append(owner)
        else:
            names += [*dict.fromkeys(ref.weight.rpartition(".")[0] for ref in site.refs.values()), *site.inner]
    return list(dict.fromkeys(names))  # experts of a module are computed together


def time_decode(
    models: Sequence[nn.Module | Decoder],
    input_ids: torch.Tensor,
    *,
    new_tokens: int = 32,
    warmup: int = 1,
    rounds: int = 5,
    ffn_modules: Iterable[str] = (),
) -> list[DecodeTiming]:
    """Decoding speed of each of ``models`` (of transformers, or decoders), in alternating rounds.

    Args:
        input_ids: int64 ``[B, T]`` prompt, processed before the clock starts. new_tokens: decoding steps per round.
            warmup, rounds: rounds that are discarded, and rounds whose median is reported. ffn_modules: fully-qualified
            names of the feed-forward modules (:func:`ffn_modules`).
    """
    names = list(ffn_modules)
    timings: list[list[tuple[float, float]]] = [[] for _ in models]
    for _ in range(warmup + rounds):
        for model, of_model in zip(models, timings, strict=True):
            of_model.append(_decode_round(model, input_ids, new_tokens, names))
    found = (tuple(zip(*of_model[warmup:], strict=True)) for of_model in timings)
    return [DecodeTiming(statistics.median(totals), statistics.median(ffns), totals) for totals, ffns in found]
