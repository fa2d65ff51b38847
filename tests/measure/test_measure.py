"""Measuring: lines that are fitted to what is known, a quick look at this machine, and `doctor --measure`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torch_pi2 import cli
from torch_pi2.cli.doctor import describe_hardware as describe
from torch_pi2.errors import ArtifactError, LibraryMissingError
from torch_pi2.machine.find import cached_path, find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.measure.compute import Case, Grid, KernelCases, Samples, Size, Weights, fit
from torch_pi2.measure.measure import accelerator, measure
from torch_pi2.measure.reads import drive
from torch_pi2.ops import load

MIB = 1 << 20


#: Sizes too small for real figures.
QUICK = Grid(
    layers=((128, 512), (256, 512)),
    float_layers=((128, 256), (256, 256)),
    kernels=("int4/int8", "float32/float"),
    batches=(1, 4),
    tokens=(1, 40),
    store=(256, 1024),
    file_bytes=4 * MIB,
    weights_bytes=4 * MIB,
)


# --- lines ---


def test_a_line_is_found_again() -> None:
    sizes = [
        Size(hot=h * 1e6, cold=c * 1e6, gate=g * 1e6, macs=(h + 1) * (c + 1) * (g + 1) * 1e6)
        for h in (0, 1, 50)
        for c in (0, 2, 30)
        for g in (0, 3)
    ]
    us = [5 + 20 * s.hot * 1e-6 + 40 * s.cold * 1e-6 + 60 * s.gate * 1e-6 + 7 * s.macs * 1e-6 for s in sizes]
    line = fit(3, list(zip(sizes, us, strict=True)))
    found = (line.call_us, line.us_per_hot_mb, line.us_per_cold_mb, line.us_per_gate_mb, line.us_per_million_macs)
    assert line.tokens == 3
    assert found == pytest.approx((5, 20, 40, 60, 7), rel=1e-4)
    assert line.error < 1e-6


def test_small_calls_count_like_large_ones() -> None:
    """An error of ten microseconds is nothing beside a second, and all beside ten microseconds."""
    line = fit(1, [(Size(hot=1.0), 10.0), (Size(hot=1e9), 1e6)])
    assert line.us(hot=1.0) == pytest.approx(10, rel=1e-3)
    assert line.us(hot=1e9) == pytest.approx(1e6, rel=1e-3)


def test_batches_without_an_exact_gate_take_it_from_the_one_before() -> None:
    load()
    samples = Samples()
    for tokens, gate in ((1, 1e6), (16, 0.0)):
        samples.add(Case("k", tokens, Size(gate=gate), lambda: lambda: None), 50.0)
        samples.add(Case("k", tokens, Size(hot=1e6), lambda: lambda: None), 20.0)
    assert samples.lines("k")[1].us_per_gate_mb == samples.lines("k")[0].us_per_gate_mb > 0


# --- what is counted ---


def test_sizes_of_sparse_calls_are_those_of_the_operator() -> None:
    """Bytes and multiplications of a layer of 8 rows of int4, by hand."""
    hidden, neurons = 64, 512
    weights = Weights(MIB)
    cases = list(KernelCases("int4/float", weights.fill("int4", hidden), hidden, neurons).sparse((4,)))
    row = 2 * 18
    dense = cases[0].size  # 80 % hot, nothing cold, silu: every row is used
    assert (dense.hot, dense.cold, dense.gate) == (3 * row * 409, 0, 0)
    assert dense.macs == 3 * 4 * 409 * hidden
    tenth = cases[4].size  # a tenth of the neurons for each of four tokens, silu
    assert tenth.hot == tenth.gate == 0
    assert 0.25 < tenth.cold / (3 * row * neurons) < 0.45  # 1 - 0.9^4
    assert tenth.macs / (3 * hidden * 4 * neurons) == pytest.approx(0.1, abs=0.03)
    half = cases[5].size  # the same with relu: half of the down rows
    assert half.macs / (3 * hidden * 4 * neurons) == pytest.approx(0.1 * 2.5 / 3, abs=0.03)
    exact = cases[8].size  # the exact gate, a tenth firing
    assert (exact.hot, exact.gate) == (0, row * neurons)
    assert exact.macs / (hidden * 4 * neurons) == pytest.approx(1.2, abs=0.1)
    assert exact.cold / (2 * row * neurons) == pytest.approx(1 - 0.9**4, abs=0.08)


def test_calls_take_other_weights_each_time() -> None:
    weights = Weights(MIB).fill("bfloat16", 128)
    places = {weights.neuron_rows(8).data_ptr() for _ in range(20)}
    assert len(places) > 10
    assert weights.neuron_rows(8).shape == (8, 3, 128)
    assert weights.neuron_rows(8).float().std() == pytest.approx(128**-0.5, rel=0.2)
    quantised = Weights(MIB).fill("int4", 128).rows(64)
    assert torch.ops.pi2.dequantize(quantised, "int4", 128, torch.float32).std() == pytest.approx(128**-0.5, rel=0.2)


# --- reads ---


def test_reads_are_counted_and_mistakes_named(tmp_path: Path) -> None:
    load()
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    for engine in ("pread", "io_uring"):
        reads, wall, cpu = torch.ops.pi2.read_rates(str(path), engine, False, 4096, 4, MIB, False, 0.02).tolist()
        if engine == "pread" or reads:
            assert reads >= 1
            assert wall > 0
            assert cpu >= 0
    one = torch.ops.pi2.read_rates(str(path), "pread", False, MIB, 1, MIB, True, 1e-9).tolist()
    assert one[0] == 1  # however short
    for changed, message in (
        ({"engine": "mmap"}, "engine: expected io_uring or pread, found 'mmap'"),
        ({"block": 1000}, "blocks of a multiple of 4096 bytes"),
        ({"depth": 0}, "a depth of 1 to 1024"),
        ({"path": str(tmp_path / "none")}, "found: No such file or directory"),
        ({"range_bytes": 2 * MIB}, "expected a file of 2097152 bytes"),
    ):
        settings: dict[str, Any] = {"path": str(path), "engine": "pread", "direct": False, "block": 4096, "depth": 1}
        settings |= {"range_bytes": MIB, "sequential": False, "seconds": 0.01} | changed
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.read_rates(*settings.values())


def test_the_file_that_is_read_goes(tmp_path: Path) -> None:
    load()
    with drive(tmp_path / "new", 3 * MIB + 5, 1.0) as made:
        assert made.path.stat().st_size == made.nbytes == 3 * MIB
        assert made.stream_gb_per_s > 0
        assert made.rate("pread", 4096, made.nbytes, 2, 0.01)[0] > 0
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="a folder that can be written"), drive(tmp_path / "file", MIB, 1.0):
        pass


def test_too_little_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 2 * MIB

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(ArtifactError, match="4194304 free bytes or more, found 2097152"), drive(tmp_path, MIB, 1.0):
        pass


# --- the whole ---


@pytest.mark.slow
def test_a_quick_look_has_everything(tmp_path: Path) -> None:
    hardware = measure(folder=tmp_path, seconds=0.5, grid=QUICK, gpu=FakeGpu())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert (hardware.source, hardware.threads) == ("measured", torch.get_num_threads())
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert hardware.accelerator is not None
    assert hardware.accelerator.holds_rest
    assert "accelerator: a fake" in describe(hardware)
    assert "four a layer" in hardware.notes["accelerator"]
    for name, kernel in hardware.kernels.items():
        assert [line.tokens for line in kernel.sparse] == [1, 4]
        for part, tokens in (("sparse", 1), ("dense", 40), ("linear", 1)):
            assert 0 < hardware.line(part, name, tokens).us(hot=1e6, cold=1e6, macs=4e6) < math.inf
    assert hardware.memory_gb_per_s > 0
    assert hardware.reads.engine in ("pread", "io_uring")
    assert hardware.reads.us(100, 8192, hardware.reads.file_bytes, 16) > 0


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_pi2.measure.measure"], "find_spec", lambda name: None)
    with pytest.raises(LibraryMissingError, match=r"scipy: expected an installed scipy.*pip install .*scipy"):
        measure(seconds=1)


# --- doctor ---


def test_doctor_measures_saves_and_knows_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    found_here = replace(find_hardware("sm8650-ufs4.0"), source="measured", notes={})

    def quick(**how: Any) -> Hardware:
        asked.append(how)
        return found_here

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.modules["torch_pi2.measure.measure"], "measure", quick)
    assert cli.main(["doctor"]) == 0
    assert "not measured yet: torch-pi2 doctor --measure" in capsys.readouterr().out
    assert cli.main(["doctor", "--measure", "--measure-folder", str(tmp_path)]) == 0
    assert (asked[0]["folder"], asked[0]["progress"]) == (tmp_path, True)
    text = capsys.readouterr().out
    for part in ("memory 43.9 GB/s", "MB/s of 4 KiB", "all is well"):
        assert part in text
    assert find_hardware("measured") == found_here
    npu = "Hexagon NPU of Snapdragon 8 Gen 3"
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["hardware"]
    about = {"path": str(cached_path()), "hash": found_here.hash}
    assert found == about | {"profile": json.loads(found_here.to_json())}
    assert cli.main(["doctor"]) == 0
    assert f"accelerator: {npu}, " in capsys.readouterr().out
    cached_path().write_text("{")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "not measured yet" in text
    assert "expected JSON" in text


def test_doctor_names_a_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--measure", "--measure-folder", str(tmp_path / "none")]) == 2
    assert "--measure-folder: expected a folder" in capsys.readouterr().err


# --- a GPU ---


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


class FakeGpu:
    """2000 GB/s, 400,000 billion multiplications a second, 2 us a launch, 30 us to the CPU and back; slow at first."""

    name, free_bytes, cache_bytes = "a fake", 80 << 30, 50 * MIB
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
    gpu = FakeGpu()
    found = accelerator(gpu, 100.0)  # type: ignore[arg-type]
    assert (found.name, found.memory_bytes, found.holds_rest) == ("a fake", 80 << 30, True)
    assert found.stream_gb_per_s == pytest.approx(2000, rel=1e-4)
    assert found.shared_gb_per_s == pytest.approx(2100, rel=1e-4)
    assert found.gmacs_per_s == pytest.approx(400e3, rel=1e-4)
    assert (found.launch_us, found.merge_us) == (8.0, 30.0)
    reads = gpu.works[0]  # other weights in each call, far more than the cache holds, by one token
    assert len({id(weight) for weight in reads.weights}) * reads.weights[0].nbytes >= 8 * gpu.cache_bytes
    assert reads.macs == sum(weight.numel() for weight in reads.weights)


@pytest.mark.parametrize(("free", "cache", "parts"), [(1 << 40, 0, 4), (1 << 40, 1 << 40, 64), (300 * MIB, MIB, 2)])
def test_weights_have_room_and_are_no_fewer_than_four_parts(free: int, cache: int, parts: int) -> None:
    gpu = FakeGpu()
    gpu.free_bytes, gpu.cache_bytes = free, cache  # type: ignore[misc]
    accelerator(gpu, 1.0)  # type: ignore[arg-type]
    assert len(gpu.works[0].weights) == parts
