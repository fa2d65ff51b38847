"""Milliseconds per generated token.

Decoding is a plain greedy loop over the KV cache of the model or of a Decoder, without the bookkeeping of ``generate``.
Models are compared in alternating rounds, so that a machine that slows down slows all of them.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torch_pi2.base.modules import evaluating
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.kv_cache import cache_name, cache_of


@dataclass(frozen=True)
class DecodeTiming:
    """Milliseconds per token: the median over rounds, and each round."""

    total_ms: float
    rounds: tuple[float, ...]


def _decode_round(model: nn.Module | Decoder, ids_BT: torch.Tensor, new_tokens: int) -> float:
    """Milliseconds per decoding step, without the prompt."""
    if isinstance(model, Decoder):
        next_B1 = model.prompt(ids_BT).cpu()
        started = time.perf_counter()
        for _ in range(new_tokens):
            next_B1 = model.step(next_B1)
        next_B1.cpu()  # waits for a GPU
        return (time.perf_counter() - started) * 1e3 / new_tokens
    name = cache_name(model)
    with evaluating(model):
        output = model(input_ids=ids_BT, use_cache=True)
        started = time.perf_counter()
        for _ in range(new_tokens):
            next_B1 = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=next_B1, use_cache=True, **{name: cache_of(output)})
        return (time.perf_counter() - started) * 1e3 / new_tokens


def time_decode(
    models: Sequence[nn.Module | Decoder],
    input_ids: torch.Tensor,
    *,
    new_tokens: int = 32,
    warmup: int = 1,
    rounds: int = 5,
) -> list[DecodeTiming]:
    """Decoding speed of each of ``models`` (of transformers, or decoders), in alternating rounds.

    Args:
        input_ids: int64 ``[B, T]`` prompt, processed before the clock starts. new_tokens: decoding steps per round.
            warmup, rounds: rounds that are discarded, and rounds whose median is reported.
    """
    timings: list[list[float]] = [[] for _ in models]
    for _ in range(warmup + rounds):
        for model, of_model in zip(models, timings, strict=True):
            of_model.append(_decode_round(model, input_ids, new_tokens))
    return [DecodeTiming(statistics.median(ms[warmup:]), tuple(ms[warmup:])) for ms in timings]
