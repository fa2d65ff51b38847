"""Measuring a GPU: one in its place that counts what it is asked to do, and takes the time that this would take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_link import ThreadLink
from torch.overrides import TorchFunctionMode

from torch_pi2.cli.hardware_text import describe
from torch_pi2.machine.hardware import Hardware
from torch_pi2.measure import gpu as measure_gpu
from torch_pi2.measure.gpu import Cuda, accelerator, gpu_here
from torch_pi2.measure.measure import measure

MIB = 1 << 20


class Counting(TorchFunctionMode):
    """Bytes of weights and multiplications of linear layers, and other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []
        self.macs = self.others = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x_TH, weight_OH = args
            self.weights.append(weight_OH)
            self.macs += len(x_TH) * weight_OH.numel()
        elif func is torch.Tensor.add:
            self.others += 1
        return func(*args, **(kwargs or {}))


class StandIn:
    """2000 GB/s, 400,000 billion multiplications a second, 2 us a launch, 30 us to the CPU and back; slow at first."""

    name, free_bytes, cache_bytes = "a stand-in", 80 << 30, 50 * MIB
    device = torch.device("meta")

    def __init__(self) -> None:
        self.link = self
        self.works: list[Counting] = []
        self.calls: list[str] = []

    def leave(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.calls.append("leave")

        def wait() -> torch.Tensor:
            self.calls.append("wait")
            return x

        return wait

    def enter(self, y: torch.Tensor) -> torch.Tensor:
        self.calls.append("enter")
        return y

    def device_us(self, work: Callable[[], object]) -> float:
        with Counting() as found:
            work()
        self.works.append(found)
        slow = 1e3 if len(self.works) % 24 < 4 else 1.0  # the first three, and one more
        return slow * max(sum(w.nbytes for w in found.weights) / 2000e3, found.macs / 400e6)

    def wall_us(self, work: Callable[[], object]) -> float:
        self.calls.clear()
        with Counting() as found:
            work()
        return 2.0 * found.others + 30.0 * (self.calls == ["leave", "wait", "enter"])


def test_rates_are_found_again() -> None:
    gpu = StandIn()
    found = accelerator(gpu, 100.0)  # type: ignore[arg-type]
    assert (found.name, found.memory_bytes, found.holds_rest) == ("a stand-in", 80 << 30, True)
    assert found.stream_gb_per_s == pytest.approx(2000, rel=1e-4)
    assert found.shared_gb_per_s == pytest.approx(2100, rel=1e-4)
    assert found.gmacs_per_s == pytest.approx(400e3, rel=1e-4)
    assert (found.launch_us, found.merge_us) == (8.0, 30.0)
    reads = gpu.works[0]  # other weights in each call, far more than the cache holds, by one token
    assert len({id(weight) for weight in reads.weights}) * reads.weights[0].nbytes >= 8 * gpu.cache_bytes
    assert reads.macs == sum(weight.numel() for weight in reads.weights)


@pytest.mark.parametrize(("free", "cache", "parts"), [(1 << 40, 0, 4), (1 << 40, 1 << 40, 64), (300 * MIB, MIB, 2)])
def test_weights_have_room_and_are_no_fewer_than_four_parts(free: int, cache: int, parts: int) -> None:
    gpu = StandIn()
    gpu.free_bytes, gpu.cache_bytes = free, cache  # type: ignore[misc]
    accelerator(gpu, 1.0)  # type: ignore[arg-type]
    assert len(gpu.works[0].weights) == parts


def test_a_profile_has_the_gpu(tmp_path: Path) -> None:
    assert gpu_here() is None or torch.cuda.is_available()
    hardware = measure(folder=tmp_path, seconds=0.5, gpu=StandIn())  # type: ignore[arg-type]
    assert hardware.accelerator is not None
    assert hardware.accelerator.holds_rest
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert "a stand-in, 85.9 GB free: 2000 GB/s" in describe(hardware)
    assert "four a layer" in hardware.notes["accelerator"]


def test_what_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of ``torch.cuda`` alone; what they do is another matter."""
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("record")

        def synchronize(self) -> None:
            asked.append("wait")

        def elapsed_time(self, last: Event) -> float:
            assert last is not self
            return 1.5  # milliseconds

    class About:
        name, L2_cache_size = "a GPU", MIB

    fakes = {
        "current_device": lambda: 0,
        "get_device_properties": lambda _: About,
        "mem_get_info": lambda _: (3 * MIB, 4 * MIB),
        "Event": Event,
        "synchronize": lambda _: asked.append("all"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(measure_gpu, "check_gpu", lambda _: None)
    monkeypatch.setattr(measure_gpu, "CudaLink", lambda _: ThreadLink())
    gpu = gpu_here()
    assert isinstance(gpu, Cuda)
    assert (gpu.name, gpu.cache_bytes, gpu.free_bytes) == ("a GPU", MIB, 3 * MIB)
    assert gpu.device_us(lambda: asked.append("work")) == 1500.0
    assert asked == ["record", "work", "record", "wait"]
    asked.clear()
    assert gpu.wall_us(lambda: asked.append("work")) > 0
    assert asked == ["all", "work", "all"]
