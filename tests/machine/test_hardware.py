"""Hardware profiles: interpolation that never makes more work faster, files that are what they say, presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import sm8650
from torch_pi2.base.files import cache_folder, not_written
from torch_pi2.cli import main
from torch_pi2.cli.doctor import describe_hardware as describe
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.machine.find import PRESETS, cached_path, find_hardware
from torch_pi2.machine.hardware import KERNELS, Accelerator, Hardware, Kernel, Line, StoreCosts
from torch_pi2.machine.reads import ReadRate, Reads, monotone

MIB = 1 << 20


def lines(scale: float = 1.0) -> tuple[Line, ...]:
    return (
        Line(1, 10.0 * scale, 20.0, 40.0, 60.0, 5.0, 0.01),
        Line(4, 20.0 * scale, 20.0, 30.0, 60.0, 8.0, 0.02),
        Line(16, 40.0 * scale, 10.0, 30.0, 90.0, 8.0, 0.02),
    )


def make(**changes: Any) -> Hardware:
    table = monotone(
        [
            ReadRate(block, reach, depth, 1e4 * depth**0.5 / (block / 4096) ** 0.5)
            for block in (4096, 16384, 65536)
            for reach in (64 * MIB, 512 * MIB)
            for depth in (1, 8, 64)
        ]
    )
    made = Hardware(
        name="a machine",
        source="measured",
        machine={"cpu": "x"},
        versions={"torch": "2"},
        notes={},
        cores=4,
        threads=4,
        memory_bytes=1 << 34,
        memory_gb_per_s=20.0,
        kernels={"int4/int8": Kernel(lines(), lines(2), lines(3))},
        reads=Reads("io_uring", True, True, 512 * MIB, 2.0, 7.0, table),
        store=StoreCosts(0.1, 3.0),
        accelerator=Accelerator("an NPU", 1 << 32, 50.0, 50.0, 60.0, 5000.0, 3.0),
    )
    return replace(made, **changes)


# --- what it computes ---


def test_a_line_at_its_point_and_between() -> None:
    hardware = make()
    us = hardware.line("sparse", "int4/int8", 4).us(hot=2e6, cold=1e6, macs=3e6, calls=2, gate=5e5)
    assert us == pytest.approx(2 * 20 + 2 * 20 + 1 * 30 + 0.5 * 60 + 3 * 8)
    assert hardware.line("sparse", "int4/int8", 10).us(hot=2e6) == pytest.approx(30 + 2 * 15)
    assert hardware.line("dense", "int4/int8", 1).us(hot=1e6, macs=1e6) == pytest.approx(20 + 20 + 5)
    assert hardware.line("linear", "int4/int8", 16).us(hot=1e6, calls=3) == pytest.approx(3 * 120 + 10)
    linear = [hardware.line("linear", "int4/int8", n).us(hot=1e6) for n in (1, 16, 100, 0.5)]
    assert linear == pytest.approx([50, 130, 130, 50])  # beyond what was measured: the nearest line


def test_an_accelerator_takes_the_longer_of_reading_and_multiplying() -> None:
    npu = make().accelerator
    assert npu is not None
    size = {"neurons": 1000, "hidden": 1000, "rows": 3, "weight_bits": 4}
    assert npu.ffn_us(batch=1, **size) == pytest.approx(50 + 1.5e6 / 50e3)
    assert npu.ffn_us(batch=1000, **size) == pytest.approx(50 + 3e9 / 5e6)
    assert npu.ffn_us(batch=1, **(size | {"neurons": 0})) == 0


def test_what_does_not_fit_its_lines_is_said() -> None:
    assert make().error == pytest.approx((0.01 + 0.02 + 0.02) / 3)
    assert "NOT STEADY" not in describe(make())
    noisy = tuple(replace(line, error=0.5) for line in lines())
    unsteady = make(kernels={"int4/int8": Kernel(noisy, noisy, noisy)})
    assert "NOT STEADY: calls differ by 50% from their lines" in describe(unsteady)


def test_reads_at_points_between_and_beyond() -> None:
    reads, reach = make().reads, 512 * MIB
    assert reads.us(100, 4096, reach, 1) == pytest.approx(100 * 100, rel=1e-4)
    assert reads.us(800, 4096, reach, 64) == pytest.approx(800 * 100 / 8, rel=1e-4)
    assert reads.us(100, 8192, reach, 1) == pytest.approx(100 * 100 * 2**0.5, rel=1e-4)
    # larger blocks than the largest have its bandwidth, deeper queues than the deepest its reads a second
    assert reads.us(1, 131072, reach, 1) == pytest.approx(800, rel=1e-4)
    assert reads.us(800, 4096, reach, 500) == pytest.approx(10_000, rel=1e-4)
    # one read cannot be eight deep, and a part of one takes a part of its time
    assert reads.us(1, 4096, reach, 8) == pytest.approx(100, rel=1e-4)
    assert reads.us(0.5, 4096, reach, 8) == pytest.approx(50, rel=1e-4)
    assert reads.us(0, 4096, reach, 8) == 0
    assert reads.stream_us(2e9) == pytest.approx(1e6)
    assert reads.best_depth(4096, reach) == 64


def test_the_best_depth_is_the_smallest_that_is_enough() -> None:
    table = tuple(ReadRate(4096, MIB, depth, per_s) for depth, per_s in ((1, 1e4), (4, 3.9e4), (16, 4e4), (64, 4e4)))
    reads = Reads("pread", True, True, MIB, 1.0, 0.0, table)
    assert reads.best_depth(4096, MIB) == 4


def test_noise_in_reads_is_evened_out() -> None:
    noisy = [ReadRate(4096, MIB, 1, 1e4), ReadRate(8192, MIB, 1, 1.21e4), ReadRate(16384, MIB, 1, 5e3)]
    even = [round(row.reads_per_s) for row in monotone(noisy)]
    assert even == [11000, 11000, 5000]


@settings(deadline=None)
@given(
    st.lists(st.floats(1, 1e6), min_size=12, max_size=12),
    st.tuples(*[st.floats(0, 1e5), st.floats(512, 1e6), st.floats(1, 1e10), st.floats(1, 200)]),
    st.tuples(*[st.floats(0, 1e5), st.floats(0, 1e6), st.floats(0, 1e10)]),
)
def test_more_larger_and_wider_reads_are_never_faster_whatever_was_measured(
    per_s: list[float], read: tuple[float, float, float, float], more: tuple[float, float, float]
) -> None:
    points = [(b, r, d) for b in (4096, 65536) for r in (MIB, 64 * MIB) for d in (1, 4, 32)]
    table = monotone([ReadRate(*point, reads_per_s=rate) for point, rate in zip(points, per_s, strict=True)])
    hardware = replace(HARDWARE, reads=Reads("pread", False, False, MIB, 1.0, 0.0, table))
    assert Hardware.from_json(hardware.to_json()) == hardware  # what monotone gives is accepted
    count, block, reach, depth = read
    few = hardware.reads.us(count, block, reach, depth)
    many = hardware.reads.us(count + more[0], block + more[1], reach + more[2], depth)
    assert many >= few * (1 - 1e-4)


HARDWARE = make()


# --- files ---


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    hardware = make()
    hardware.save(tmp_path / "h.json")
    again = Hardware.load(tmp_path / "h.json")
    assert again == hardware
    assert again.to_json() == hardware.to_json() == (tmp_path / "h.json").read_text()
    assert find_hardware(tmp_path / "h.json") == hardware
    assert find_hardware(str(tmp_path / "h.json")).hash == hardware.hash


def test_the_hash_is_of_numbers_alone() -> None:
    hardware = make()
    assert hardware.hash == make(name="another", machine={}, versions={"torch": "3"}, notes={"store": "x"}).hash
    assert hardware.hash != make(store=StoreCosts(0.1, 3.1)).hash
    assert hardware.hash != make(source="published").hash


def _rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = data["reads"]["rates"]
    return rows


def _sparse(data: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data["kernels"]["int4/int8"]["sparse"]
    return found


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda d: d.update(format="other"), "expected torch_pi2.hardware version 2, found other version 2"),
    "version": (lambda d: d.update(version=9), "expected torch_pi2.hardware version 2, found"),
    "version 1": (lambda d: d.update(version=1), "expected torch_pi2.hardware version 2, found"),
    "missing": (lambda d: d.pop("store"), "where: expected a field store, found none"),
    "unknown": (lambda d: d.update(speed=1), "where: expected no other fields than name, source"),
    "source": (lambda d: d.update(source="guessed"), "where, source: expected measured or published, found 'guessed'"),
    "negative": (lambda d: d["store"].update(slot_us=-1), "where, store, slot_us: expected a number, 0 or more"),
    "kernel": (
        lambda d: d["kernels"].update({"int3/int8": d["kernels"]["int4/int8"]}),
        "where, kernels: expected names of int4/int8, int4/float",
    ),
    "nothing": (lambda d: d.update(kernels={}), "where, kernels: expected names of int4/int8"),
    "order": (
        lambda d: _sparse(d).reverse(),
        "where, kernels, int4/int8, sparse: expected one line or more, each for more tokens than the one before",
    ),
    "empty": (lambda d: _sparse(d).clear(), "where, kernels, int4/int8, sparse: expected one line or more"),
    "line": (
        lambda d: _sparse(d)[0].update(call_us=-3),
        "where, kernels, int4/int8, sparse, 0, call_us: expected a number, 0 or more",
    ),
    "gap": (
        lambda d: _rows(d).pop(),
        "where, reads, rates: expected one row for every combination of its blocks, ranges and depths",
    ),
    "no reads": (lambda d: _rows(d)[0].update(reads_per_s=0), "reads_per_s: expected a number, above 0"),
    "accelerator": (
        lambda d: d["accelerator"].update(gmacs_per_s=0),
        "where, accelerator, gmacs_per_s: expected a number, above 0",
    ),
}


def test_a_gpu_holds_the_rest() -> None:
    npu = make().accelerator
    assert npu is not None
    gpu = make(accelerator=replace(npu, name="a GPU", holds_rest=True))
    assert Hardware.from_json(gpu.to_json()) == gpu
    assert gpu.hash != make().hash
    assert "accelerator: a GPU, 4.3 GB" in describe(gpu)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    data = json.loads(by_hand(make().to_json()))
    damage, message = DAMAGE[name]
    damage(data)
    with pytest.raises(ArtifactError) as raised:
        Hardware.from_json(json.dumps(data), "where")
    assert message in str(raised.value)
    assert raised.value.fix


WHOLE = json.loads(by_hand(HARDWARE.to_json()))


# --- what is asked for ---


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match="kernels of hardware a machine: expected int4/int8, found 'int8/int8'"):
        make().line("sparse", "int8/int8", 1)
    with pytest.raises(ConfigError, match="tokens: expected a number above 0, found 0"):
        make().line("linear", "int4/int8", 0)


def test_where_profiles_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cached_path()
    assert path.parent == tmp_path / "torch_pi2"
    assert path == cached_path()
    with pytest.raises(ConfigError, match="torch-pi2 doctor --measure"):
        find_hardware("measured")
    make().save(path)
    assert find_hardware("measured") == make()
    with pytest.raises(ConfigError, match=r"expected measured, sm8650-ufs4.0, or a file"):
        find_hardware("sm9999")


# --- presets ---


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_published_and_say_where_each_part_is_from(name: str) -> None:
    hardware = find_hardware(name)
    assert hardware.source == "published"
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert set(hardware.notes) == set(WHOLE) - {
        "format", "version", "name", "source", "machine", "versions", "notes"
    }  # fmt: skip
    assert all(note.startswith(("assumed", "PowerInfer-2, arXiv 2406.06282v3")) for note in hardware.notes.values())
    assert set(hardware.kernels) == set(KERNELS)
    assert hardware.accelerator is not None


def test_the_file_is_what_the_figures_give() -> None:
    assert find_hardware("sm8650-ufs4.0") == sm8650()


def test_the_figures_of_the_paper() -> None:
    """As published (section 1.1), not as the preset repeats them."""
    phone = find_hardware("sm8650-ufs4.0")
    layers, weights = 32, 32 * (4096 * 2 * (4096 + 1024) + 3 * 4096 * 14336) + 4096 * 32000
    assert phone.memory_gb_per_s == 43.9
    npu = phone.accelerator
    assert npu is not None
    assert (npu.stream_gb_per_s, npu.shared_gb_per_s) == (56.0, 59.6)
    # a 7B INT4 prompt: 8 tokens/s on the CPU, 770 on the NPU
    cpu_us = phone.line("dense", "int4/int8", 1024).us(hot=weights / 2, macs=1024.0 * weights)
    assert 1024e6 / cpu_us == pytest.approx(8, rel=0.05)
    rows = weights // (layers * 4096)
    npu_us = layers * npu.ffn_us(batch=1024, neurons=rows, hidden=4096, rows=1, weight_bits=4)
    assert 1024e6 / npu_us == pytest.approx(770, rel=0.05)
    # one token reads at 43.9 GB/s
    one_us = phone.line("sparse", "int4/int8", 1).us(hot=43.9e6, macs=1e9)
    assert one_us == pytest.approx(1000, rel=0.01)
    # Table 1: 4 KB random over 128 MB on a big core
    assert 4096 * 1e4 / phone.reads.us(1e4, 4096, 128 * MIB, 32) == pytest.approx(1076.1, rel=0.01)
    assert phone.reads.stream_us(4e9) == pytest.approx(1e6, rel=0.01)
    assert phone.memory_bytes == 19e9


def test_without_a_home_directory_the_cache_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_entry() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_entry)
    with pytest.raises(ArtifactError, match=r"found no HOME, .* Set XDG_CACHE_HOME to a folder"):
        find_hardware("measured")
    assert main(["doctor"]) == 0
    assert "Set XDG_CACHE_HOME" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "torch_pi2"
    assert "Set XDG_CACHE_HOME" in str(not_written(cache_folder() / "x.json", OSError(13, "Permission denied")))
    assert "Choose another output folder" in str(not_written(tmp_path / "x.json", OSError(13, "Permission denied")))
