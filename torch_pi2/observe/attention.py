"""What attention itself takes in a decoding step: as torch's profiler sees it, or timed apart where it sees nothing.

With ``cpp_wrapper`` a compiled step calls the kernel past torch's dispatcher, and so past the profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_pi2.decode.attention import packed_attention
from torch_pi2.decode.decode import Decoder

#: Positional and keyword arguments of one SDPA.
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: Decoding steps under the profiler.
_PROFILED = 3
#: Room in the cache that :func:`milliseconds` needs: those, and one to see what attention is called with.
SPARE_TOKENS = _PROFILED + 1
#: Passes over all layers, after one to warm up.
_PASSES = 7
_EVENTS = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention")


def milliseconds(
    model: nn.Module, decoder: Decoder, next_B1: torch.Tensor, evict: Callable[[], object]
) -> tuple[float | None, str | None]:
    """Milliseconds per token in all layers, and where they come from: ``profiler`` or ``timed apart``.

    Timed apart, the calls of one eager step (its own queries, cache and mask) are repeated outside it: the median of
    passes over all layers. The step of a model that does not call SDPA gives None twice.

    Args:
        next_B1: what ``decoder`` is to be fed next; it has room for ``SPARE_TOKENS``.
        evict: is called before each pass; leaves nothing of the KV cache in the CPU's caches, as a step's weights do.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            next_B1 = decoder.step(next_B1)
    averages = profiler.key_averages()
    for name in _EVENTS:  # the second contains the first
        events = [e for e in averages if e.key == name]
        if events:
            return float(sum(e.cpu_time_total for e in events)) / 1e3 / _PROFILED, "profiler"
    calls = calls_of_step(model, decoder, next_B1)
    return (timed_apart(calls, evict), "timed apart") if calls else (None, None)


class _Recorder(TorchFunctionMode):
    """Keeps the arguments of every SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append((args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def calls_of_step(model: nn.Module, decoder: Decoder, next_B1: torch.Tensor) -> list[Call]:
    """Each SDPA of one step, which is run eagerly; keys and values are the cache's own."""
    recorder = _Recorder()
    with torch.inference_mode(), packed_attention(model), recorder:
        model(input_ids=next_B1, past_key_values=decoder.cache, use_cache=True, logits_to_keep=1)
    return recorder.calls


@torch.inference_mode()
def timed_apart(calls: list[Call], evict: Callable[[], object]) -> float:
    """Milliseconds that ``calls`` (of :func:`calls_of_step`) take one after another."""
    for args, kwargs in calls:
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            # a compiled step turns it into what is added together with other work, not inside SDPA
            kwargs["attn_mask"] = torch.zeros(mask.shape, dtype=args[0].dtype).masked_fill(~mask, -torch.inf)
    passes = []
    for _ in range(1 + _PASSES):
        evict()
        started = time.perf_counter()
        for args, kwargs in calls:
            F.scaled_dot_product_attention(*args, **kwargs)
        passes.append((time.perf_counter() - started) * 1e3)
    return statistics.median(passes[1:])
