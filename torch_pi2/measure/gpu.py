"""Rates of a GPU, and the cost of a layer that it shares with the CPU.

Not yet run on a GPU: tests replace :class:`Gpu`, the only class that touches one.
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

#: Columns and rows of a weight (64 MiB of bfloat16), and tokens of a prompt.
_HIDDEN, _ROWS, _TOKENS = 4096, 8192, 2048
#: Weights: this many times the L2 cache, within these bounds and half of the free memory.
_TIMES, _PARTS = 8, (4, 64)
#: Launches per layer (docs/GPU.md), and launches timed together.
_LAUNCHES, _TOGETHER = 4, 64
#: Warm-up calls, and calls whose median counts.
_WARM, _CALLS = 3, 21


@dataclass
class Gpu:
    """torch's current GPU: free memory, L2 cache, clocks and the transfer buffer."""

    device: torch.device

    def __post_init__(self) -> None:
        about = torch.cuda.get_device_properties(self.device)
        self.name, self.cache_bytes = about.name, about.L2_cache_size
        self.free_bytes = torch.cuda.mem_get_info(self.device)[0]
        self.link = TransferBuffer(self.device)

    def device_us(self, work: Callable[[], object]) -> float:
        """Microseconds of ``work`` by CUDA events."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def wall_us(self, work: Callable[[], object]) -> float:
        """Microseconds of ``work`` by the wall clock, until the GPU is idle."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e6


def gpu_here() -> Gpu | None:
    """torch's current GPU if our kernels support it."""
    try:
        check_gpu(torch.device("cuda"))
    except DeviceError:
        return None
    return Gpu(torch.device("cuda", torch.cuda.current_device()))


@torch.inference_mode()
def accelerator(gpu: Gpu, cpu_gb_per_s: float) -> Accelerator:
    """Median rates of ``gpu``: reading bfloat16 weights for one token, matrix products, the launches of a layer, and
    the round trip of a layer's input to the CPU, whose own memory bandwidth is ``cpu_gb_per_s``.
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
    """Random numbers: a GPU multiplies zeros faster."""
    return torch.randn(rows, _HIDDEN, dtype=torch.bfloat16, device=gpu.device)


def _median(clock: Callable[[Callable[[], object]], float], work: Callable[[], object]) -> float:
    return statistics.median([clock(work) for _ in range(_WARM + _CALLS)][_WARM:])
