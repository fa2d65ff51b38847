"""What a GPU beside the CPU computes and reads, and what a layer takes that is divided between both.

No GPU ever ran this: tests replace :class:`Gpu`, which is all that asks a GPU itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torch_pi2.errors import DeviceError
from torch_pi2.layers.gpu import TransferBuffer, check_gpu
from torch_pi2.machine.hardware import Accelerator
from torch_pi2.machine.reads import six_digits

#: Of the weights: numbers of a row and rows of a part (64 MiB of bfloat16), whose tokens are multiplied in prompts.
_HIDDEN, _ROWS, _TOKENS = 4096, 8192, 2048
#: Parts: so many times the cache, within these, and of the memory that is free at most a half.
_TIMES, _PARTS = 8, (4, 64)
#: Launches of a layer (docs/GPU.md), and those that are timed together.
_LAUNCHES, _TOGETHER = 4, 64
#: Calls to warm up, and those whose median counts.
_WARM, _CALLS = 3, 21


@dataclass
class Gpu:
    """torch's current GPU: its memory that is free, and what holds weights from one call to the next."""

    device: torch.device

    def __post_init__(self) -> None:
        about = torch.cuda.get_device_properties(self.device)
        self.name, self.cache_bytes = about.name, about.L2_cache_size
        self.free_bytes = torch.cuda.mem_get_info(self.device)[0]
        self.link = TransferBuffer(self.device)

    def device_us(self, work: Callable[[], object]) -> float:
        """Microseconds of ``work`` by its own clock."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def wall_us(self, work: Callable[[], object]) -> float:
        """Microseconds from before ``work`` until the GPU has done all of it, by the wall's clock."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e6


def gpu_here() -> Gpu | None:
    """torch's current GPU, if there is one that has kernels."""
    try:
        check_gpu(torch.device("cuda"))
    except DeviceError:
        return None
    return Gpu(torch.device("cuda", torch.cuda.current_device()))


@torch.inference_mode()
def accelerator(gpu: Gpu, cpu_gb_per_s: float) -> Accelerator:
    """Rates of ``gpu``, medians: of bfloat16 weights that one token reads, parts of a buffer far larger than its cache
    in turn; of products of matrices; of small calls, as many as a layer has; and of the way of a layer's input to the
    CPU and back, with waiting for it.

    cpu_gb_per_s: that the CPU reads meanwhile, from memory of its own.
    """
    nbytes, (least, most) = 2 * _ROWS * _HIDDEN, _PARTS
    wanted = min(most, max(least, -(-_TIMES * gpu.cache_bytes // nbytes)))
    parts = [_drawn(gpu, _ROWS) for _ in range(max(1, min(wanted, gpu.free_bytes // 2 // nbytes)))]
    one_1H, many_TH = _drawn(gpu, 1), _drawn(gpu, _TOKENS)
    read_us = _median(gpu.device_us, lambda: [F.linear(one_1H, part) for part in parts])
    multiply_us = _median(gpu.device_us, lambda: F.linear(many_TH, parts[0]))
    launch_us = _median(gpu.wall_us, lambda: [one_1H.add(1.0) for _ in range(_TOGETHER)])
    gb_per_s = six_digits(sum(part.nbytes for part in parts) / read_us / 1e3)
    return Accelerator(
        name=gpu.name,
        memory_bytes=gpu.free_bytes,
        launch_us=six_digits(launch_us / _TOGETHER * _LAUNCHES),
        stream_gb_per_s=gb_per_s,
        shared_gb_per_s=six_digits(gb_per_s + cpu_gb_per_s),
        gmacs_per_s=six_digits(_TOKENS * _ROWS * _HIDDEN / multiply_us / 1e3),
        merge_us=six_digits(_median(gpu.wall_us, lambda: gpu.link.enter(gpu.link.leave(one_1H)()))),
        holds_rest=True,
    )


def _drawn(gpu: Gpu, rows: int) -> torch.Tensor:
    """Random numbers: a GPU multiplies zeros faster than it multiplies others."""
    return torch.randn(rows, _HIDDEN, dtype=torch.bfloat16, device=gpu.device)


def _median(clock: Callable[[Callable[[], object]], float], work: Callable[[], object]) -> float:
    return statistics.median([clock(work) for _ in range(_WARM + _CALLS)][_WARM:])
