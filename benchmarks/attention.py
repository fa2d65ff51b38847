"""Milliseconds of attention, by repeating the calls of one step.

torch's profiler does not see attention inside a step compiled to C++, so the calls of one eager step are repeated and
timed alone.
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

#: Our attention operator or torch's SDPA, and its positional and keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: Timed passes over the attention of all layers, after one to warm up.
_PASSES = 7


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


@torch.inference_mode()
def attention_ms(
    model: nn.Module, decoder: Decoder, next_B1: torch.Tensor, evict: Callable[[], object] = lambda: None
) -> float:
    """Milliseconds of attention in all layers of a step with ``next_B1``, by repeating the calls of one eager step.

    ``evict`` is called before each pass, to remove the KV cache from the CPU's caches as a step's weights do.
    """
    recorder = Recorder()
    with packed_attention(model), recorder:
        model(**decoder._inputs(next_B1), logits_to_keep=1)
    for _, args, kwargs in recorder.calls:
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            # a compiled step converts the mask outside SDPA, fused with other work
            kwargs["attn_mask"] = torch.zeros(mask.shape, dtype=args[0].dtype).masked_fill(~mask, -torch.inf)
    passes = []
    for _ in range(1 + _PASSES):
        evict()
        started = time.perf_counter()
        for op, args, kwargs in recorder.calls:
            op(*args, **kwargs)
        passes.append((time.perf_counter() - started) * 1e3)
    return statistics.median(passes[1:])
