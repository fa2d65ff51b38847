"""The time of attention in a decoding step: from torch's profiler, or from separate calls where it sees none.

With ``cpp_wrapper`` a compiled step calls the kernel without torch's dispatcher, so the profiler does not see it.
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
from torch_pi2.decode.decoder import Decoder
from torch_pi2.ops import load

#: Our operator or torch's SDPA, and its positional and keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

#: Decoding steps under the profiler.
_PROFILED = 3
#: Room in the cache that :func:`milliseconds` needs: those, and one to see what attention is called with.
SPARE_TOKENS = _PROFILED + 1
#: Passes over all layers, after one to warm up.
_PASSES = 7
#: As the profiler names them: of each line the first that there is, which the second contains.
_EVENTS = (
    ("pi2::attention",),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention"),
)


def milliseconds(
    model: nn.Module, decoder: Decoder, next_B1: torch.Tensor, evict: Callable[[], object]
) -> tuple[float | None, str | None]:
    """Milliseconds per token in all layers, and where they come from: ``profiler`` or ``timed apart``.

    Timed apart, the calls of one eager step (its own queries, cache and mask) are repeated outside it: the median of
    passes over all layers. The step of a model that calls neither our operator nor SDPA gives None twice.

    Args:
        next_B1: what ``decoder`` is to be fed next; it has room for ``SPARE_TOKENS``.
        evict: is called before each pass; leaves nothing of the KV cache in the CPU's caches, as a step's weights do.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            next_B1 = decoder.step(next_B1)
    us = {e.key: float(e.cpu_time_total) for e in profiler.key_averages()}
    seen = [us[next(name for name in names if name in us)] for names in _EVENTS if us.keys() & set(names)]
    if seen:
        return sum(seen) / 1e3 / _PROFILED, "profiler"
    calls = calls_of_step(model, decoder, next_B1)
    return (timed_apart(calls, evict), "timed apart") if calls else (None, None)


class Recorder(TorchFunctionMode):
    """Keeps every call of attention."""

    def __init__(self) -> None:
        super().__init__()
        load()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.scaled_dot_product_attention, torch.ops.pi2.attention, torch.ops.pi2.attention.default):
            self.calls.append((func, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def calls_of_step(model: nn.Module, decoder: Decoder, next_B1: torch.Tensor) -> list[Call]:
    """Each call of attention of one step, which is run eagerly; keys and values are the cache's own."""
    recorder = Recorder()
    with torch.inference_mode(), packed_attention(model), recorder:
        model(**decoder._inputs(next_B1), logits_to_keep=1)
    return recorder.calls


@torch.inference_mode()
def timed_apart(calls: list[Call], evict: Callable[[], object]) -> float:
    """Milliseconds that ``calls`` (of :func:`calls_of_step`) take one after another."""
    for _, args, kwargs in calls:
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            # a compiled step turns it into what is added together with other work, not inside SDPA
            kwargs["attn_mask"] = torch.zeros(mask.shape, dtype=args[0].dtype).masked_fill(~mask, -torch.inf)
    passes = []
    for _ in range(1 + _PASSES):
        evict()
        started = time.perf_counter()
        for op, args, kwargs in calls:
            op(*args, **kwargs)
        passes.append((time.perf_counter() - started) * 1e3)
    return statistics.median(passes[1:])
