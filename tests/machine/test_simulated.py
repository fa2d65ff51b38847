"""The flash simulator: presets give back what was published, descriptions that make no sense are refused, and a model
over a simulated device computes the bits of the one in memory, later."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from offloading import logits, smallest
from shared import small_store

import torch_pi2
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.machine.device import PRESETS, Device, find_device, parse_device
from torch_pi2.types.offload import OffloadConfig

Description = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the store packed from it."""
    base = small_store(tmp_path_factory)
    return base / "plain", base / "store"


def driven(device: Device, block: float, *, depth: float, range_bytes: float = 1, sequential: bool = False) -> float:
    """MB/s of a closed loop."""
    reads, size = 20_000, int(block)
    step = size if sequential else 3 * size
    times = device.read_times(
        range(0, reads * step, step), [size] * reads, depth=int(depth), range_bytes=int(range_bytes)
    )
    assert times.dtype == torch.float64
    assert (times.diff() > 0).all()
    return reads * size / float(times[-1]) / 1e6


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_give_back_every_figure_of_their_tables(preset: str) -> None:
    device, description = find_device(preset), PRESETS[preset]
    for row in description["random"]:
        found = driven(device, row["block_bytes"], depth=row["depth"], range_bytes=row["range_bytes"])
        assert found == pytest.approx(row["mb_per_s"], rel=0.01), row
    for row in description["sequential"]:
        found = driven(device, row["block_bytes"], depth=row["depth"], sequential=True)
        assert found == pytest.approx(row["mb_per_s"], rel=0.01), row


def test_the_papers_figures() -> None:
    """As published, not as the presets repeat them."""
    ufs = find_device("ufs-4.0")
    near = {128: 128 << 20, 512: 512 << 20}
    assert driven(ufs, 4096, depth=32, range_bytes=near[128]) == pytest.approx(1076.10, rel=0.01)
    assert driven(ufs, 4096, depth=32, range_bytes=near[512]) <= 850
    assert driven(ufs, 512 << 10, depth=32) == pytest.approx(3500, rel=0.01)
    assert driven(ufs, 512 << 10, depth=32, sequential=True) == pytest.approx(4000, rel=0.01)
    assert driven(ufs, 4096, depth=1, sequential=True) == pytest.approx(450, rel=0.01)
    # Figure 3b's curves go from about 1.0 GB/s at 4 KB to about 1.75 at 32.
    assert driven(ufs, 32 << 10, depth=32, range_bytes=near[128]) == pytest.approx(1750, rel=0.03)
    # One queue: more than it holds gives nothing more.
    assert driven(ufs, 4096, depth=64) == pytest.approx(driven(ufs, 4096, depth=32), rel=1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_more_bytes_never_finish_earlier(preset: str) -> None:
    device = find_device(preset)
    generator = torch.Generator().manual_seed(3)
    offsets = (torch.randperm(200, generator=generator) * (64 << 20)).tolist()
    sizes = torch.randint(1, 2048, (200,), generator=generator).mul(512).tolist()
    before = device.read_times(offsets, sizes, depth=8, range_bytes=1 << 29)
    for at in range(0, 200, 20):
        more = list(sizes)
        more[at] += 512 * (1 + at)
        after = device.read_times(offsets, more, depth=8, range_bytes=1 << 29)
        assert (after >= before - 1e-12).all()
        assert after[-1] > before[-1]


def changed(path: list[Any], value: Any) -> Description:
    description = copy.deepcopy(dict(PRESETS["ufs-4.0"]))
    at: Any = description
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    elif path:
        at[path[-1]] = value
    return description


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["source"], ..., "device: expected a field source, found none"),
        (["speed"], 3, "device: expected no other fields than name, source, latency_us"),
        (["name"], "", "device, name: expected text, found ''"),
        (["latency_us", "value"], -1, "device, latency_us, value: expected a number, 0 or more, found -1"),
        (["latency_us", "value"], 2e6, "device: expected a device that makes sense, found latency: expected 0 to 1 s"),
        (["latency_us", "value"], 9.2, "sense, found sequential: latency: expected less than what a read of 4096"),
        (["latency_us", "assumed"], ..., r"latency_us: expected where the figure is from, or what is assumed"),
        (["max_depth", "value"], 0, "device, max_depth, value: expected a number, 1 or more, found 0"),
        (["max_depth", "value"], 2.5, "sense, found max_depth: expected a whole number up to 65536, found 2.5"),
        (["max_depth", "value"], 16, "sense, found random: depths: expected at most the device's 16"),
        (["random", 1, "mb_per_s"], -850, "device, random, 1, mb_per_s: expected a number, 0.1 or more, found -850"),
        (["random", 1, "mb_per_s"], 2e6, "sense, found random: bandwidth: expected 100000 to 1e12 bytes/s"),
        (["random", 3, "mb_per_s"], 2e5, "bandwidth: expected larger blocks to take longer, found 524288 bytes quick"),
        (["random", 1, "range_bytes"], 128 << 20, "device, random, 1: expected each block, range and depth once"),
        (["random", 1, "block_bytes"], 8192, "random: expected a row for every combination .* found none for block_b"),
        (["random", 1, "core"], "big", "device, random, 1: expected no other fields than block_bytes, range_bytes"),
    ],
)
def test_descriptions_that_make_no_sense(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as error:
        parse_device(changed(path, value))
    assert str(error.value).endswith("Correct the description; its format is in docs/DEVICES.md.")


def test_devices_are_found_by_preset_and_file(tmp_path: Path) -> None:
    description = changed(["name"], "mine")
    path = tmp_path / "a@b.json"
    path.write_text(json.dumps(description))
    assert find_device(path) == Device("mine", find_device("ufs-4.0").numbers)
    with pytest.raises(ConfigError, match=r"device: expected ufs-4.0 or a JSON file, found 'tape'"):
        find_device("tape")
    path.write_text("{")
    with pytest.raises(ArtifactError, match=r"a@b.json: expected JSON, found damage"):
        find_device(path)
    path.write_text("[]")
    with pytest.raises(ArtifactError, match=r"a@b.json: expected an object, found \[\]"):
        find_device(path)


def test_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"OffloadConfig.device: expected engine pread or io_uring, found mmap"):
        OffloadConfig(engine="mmap", device="ufs-4.0")
    with pytest.raises(ConfigError, match=r"device: expected ufs-4\.0"):
        OffloadConfig(device="drum")


SLOW: Description = {
    "name": "slow",
    "source": "for a test",
    "latency_us": {"value": 2000, "assumed": "far more than a thread takes to wake"},
    "max_depth": {"value": 8, "assumed": "so"},
    "random": [{"block_bytes": 4096, "range_bytes": 1 << 20, "depth": 8, "mb_per_s": 4, "assumed": "1 ms"}],
    "sequential": [{"block_bytes": 4096, "depth": 8, "mb_per_s": 4, "assumed": "1 ms"}],
}


@pytest.mark.parametrize("pipeline", [True, False])
def test_the_bits_over_a_simulated_device_and_its_time(
    folders: tuple[Path, Path],
    tmp_path: Path,
    pipeline: bool,
) -> None:
    plain, store = folders
    (tmp_path / "slow.json").write_text(json.dumps(SLOW))
    in_memory = torch_pi2.load(plain)
    ids = torch.arange(1, 4)[None]
    with torch_pi2.layers.prompt.sparse_only():
        wanted = logits(in_memory, ids)
    real = OffloadConfig(engine="pread", pipeline=pipeline)
    model = torch_pi2.load(store, budget=smallest(store), offload=real)
    assert torch_pi2.stats(model)["simulated"] is False
    assert torch_pi2.stats(model)["late"] == 0
    config = OffloadConfig(engine="pread", pipeline=pipeline, device=tmp_path / "slow.json")
    model = torch_pi2.load(store, budget=smallest(store), offload=config)
    started = time.perf_counter()
    assert torch.equal(logits(model, ids), wanted)
    took = time.perf_counter() - started
    stats = torch_pi2.stats(model, reset=True)
    assert stats["simulated"] is True
    assert stats["store"].describe().startswith("simulated slow over pread, ")
    # A millisecond for up to 4096 bytes, more for more, and nothing beside anything.
    assert took >= max(stats["reads"] * 4096, stats["bytes_read"]) / 4e6 * 0.999
    assert stats["late"] < stats["reads"]
    assert torch_pi2.stats(model)["late"] == 0
