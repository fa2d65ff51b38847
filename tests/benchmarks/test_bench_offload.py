"""``bench offload``: modes in processes of their own, their budgets, the memory cap and the table of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

import torch_pi2
from benchmarks import cap, offload, table
from benchmarks.__main__ import main, render
from benchmarks.peer import PeerError
from benchmarks.subject import Rooms
from torch_pi2.errors import ConfigError
from torch_pi2.types.offload import OffloadConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("offload")
    torch_pi2.synthetic(root / "q", "tiny", layers=2, rank=32)
    torch_pi2.pack(root / "q", root / "store")
    return root / "store"


def has_groups():
    try:
        with cap.MemoryCap(1 << 30):
            return True
    except cap.CapError:
        return False


@pytest.mark.slow
@pytest.mark.long
def test_modes_from_the_command_line(folder, tmp_path, capsys):
    peer = has_groups() and find_spec("llama_cpp") is not None
    command = ["offload", "--folder", str(folder), "--eager", "--tokens", "3", "--rounds", "2", "--json"]
    command += ["--trace", str(tmp_path / "out.trace"), "--prompt", "40"]
    assert main([*command, *(["--peer", "llama.cpp"] if peer else [])]) == 0
    r = json.loads(capsys.readouterr().out)
    assert r["what"] == "offload"
    assert r["shape"] == "tiny with 2 layers"
    assert r["synthetic"]["active"] == 0.1
    assert r["tokens"].startswith("drawn at random")
    assert "one sequential" in r["file"]
    assert list(r["modes"]) == list(offload.MODES)
    for name, mode in r["modes"].items():
        assert mode["tokens_per_s"] > 0
        assert 0 < mode["p50_ms"] <= mode["p90_ms"] <= mode["p99_ms"]
        assert mode["ffn_ms"] < mode["p99_ms"]
        assert (mode["io_critical_share"] is None) == (name == "mmap") == (mode["hit_rate"] is None)
        assert name == "mmap" or 0 <= mode["io_critical_share"] < 1
        assert mode["capped"] == has_groups()
        assert mode["peak_rss_bytes"] > 1e8
        cached = offload.MODES[name].cached
        assert mode["ffn_in_memory"] == pytest.approx(0.5 if cached else 0, abs=1e-3)
        assert (mode["cache_bytes"] > 0) == cached
        assert mode["prompt_tokens_per_s"] > 0
        assert (mode["prompt_io_critical_share"] is None) == (name == "mmap")
        assert (mode["drive_share"] is None) == (name == "mmap")
        if name != "mmap":
            assert mode["drive_reads_per_s"] > 0
            assert mode["drive_share"] > 0
            assert mode["prompt_bytes_read"] > 0
            assert mode["bytes_read_per_token"] > mode["reads_per_token"] > 0
    bundle, pipeline = r["modes"]["bundle"], r["modes"]["pipeline"]
    traced = json.loads((tmp_path / "out.trace").read_text())
    assert {name: bool(mode["trace"]) for name, mode in r["modes"].items() if mode["trace"]} == {"pipeline": True}
    assert pipeline["trace"]["events"] == traced["otherData"]["events"]
    assert sum(event["name"] == "ffn" for event in traced["traceEvents"]) == 3 * 2  # tokens of a round, layers
    assert bundle["hit_rate"] == 0
    assert 0 < pipeline["hit_rate"] < 1
    assert pipeline["bytes_read_per_token"] < bundle["bytes_read_per_token"]
    assert r["against"]["bundle"] == pytest.approx(pipeline["tokens_per_s"] / bundle["tokens_per_s"], abs=0.01)
    assert set(r["against"]) == set(offload.MODES) - {"pipeline"}
    assert pipeline["budget_bytes"] == r["budget_bytes"] > bundle["budget_bytes"]
    assert list(r["peers"]) == (["llama.cpp"] if peer else [])
    if peer:
        theirs = r["peers"]["llama.cpp"]
        assert theirs["ratio"] == pytest.approx(pipeline["tokens_per_s"] / theirs["tokens_per_s"], rel=0.1, abs=0.01)
        assert theirs["prompt_ratio"] > 0
        assert "not repacked" in theirs["about"]["weights"]
        assert theirs["group_peak_bytes"] <= r["cap_bytes"]
    assert not list(cap.CONTROLLER.glob(f"pi2-bench-{os.getpid()}"))
    shown = render(r)
    assert "pipeline is " in shown
    assert "prompts of 40 tokens, tokens/s: mmap " in shown
    assert "pipeline (traced)" in shown
    assert "llm-in-a-flash" in shown
    (tmp_path / "run.json").write_text(json.dumps(r))
    page = table.write(tmp_path).read_text()
    assert "## Larger than memory" in page
    assert "50 % of neurons, pipeline (traced) |" in page
    assert ("run: llama.cpp" in page) == peer


@pytest.mark.slow
def test_a_mode_that_fails_is_named_and_the_others_are_kept(folder, monkeypatch, caplog):
    """By the kernel, where it can cap memory; else because its process finds no model."""
    measure = offload._mode

    def measured(settings, path, cap_bytes, *rest):
        if settings["offload"]["pipeline"]:
            return measure(settings, path, cap_bytes, *rest)
        return measure({**settings, "folder": settings["folder"] + "-gone"}, path, cap_bytes and 30 << 20, *rest)

    monkeypatch.setattr(offload, "_mode", measured)
    how = {"tokens": 2, "rounds": 1, "compiled": False}
    r = offload.run(folder, modes=("cache", "pipeline"), **how)
    assert list(r["modes"]) == ["pipeline"]
    assert list(r["failed"]) == ["cache"]
    reason = "found its end by signal 9, as the system ends" if has_groups() else "expected a loaded model, found"
    assert reason in r["failed"]["cache"]
    assert "mode cache: " in caplog.text
    assert r["against"] == {}
    assert "cache failed: benchmarks.peer_offload: expected" in render(r)
    with pytest.raises(PeerError, match=r"peer_offload: expected an? .*, found"):
        offload.run(folder, modes=("cache",), **how)


def test_the_steps_are_what_they_are_called():
    made = {name: mode.config("io_uring") for name, mode in offload.MODES.items()}
    assert made["mmap"].engine == "mmap"
    assert {c.engine for name, c in made.items() if name != "mmap"} == {"io_uring"}
    assert [name for name, c in made.items() if c.pipeline] == ["pipeline", "lookahead"]
    assert made["llm-in-a-flash"].window == 5
    assert made["llm-in-a-flash"].hot_share == 0
    assert made["cache"] == OffloadConfig(engine="io_uring", pipeline=False)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_budgets_have_room_for_a_share_of_the_neurons(folder, share):
    rooms = Rooms(folder, 64)
    total = rooms.budget(OffloadConfig(), share)
    model = torch_pi2.load(folder, budget=total, context=64)
    budget = model.torch_pi2.budget
    count = sum(layer.site.intermediate for layer in model.torch_pi2.plan.layers)
    assert asdict(budget)["cache"] == pytest.approx(share * rooms.neurons, abs=rooms.neurons / count)
    if share == 0:
        assert budget.cache == 0
        with pytest.raises(ConfigError, match="budget"):
            torch_pi2.load(folder, budget=total - 1, context=64)


def test_percentiles_are_measured_values():
    values = [float(i) for i in range(1, 101)]
    assert [offload._percentile(values, p) for p in (50, 90, 99)] == [50, 90, 99]
    assert [offload._percentile([7.0], p) for p in (50, 99)] == [7, 7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modes": ["mmap", "magic"]}, "mode: expected mmap or bundle or cache"),
        ({"modes": []}, "modes: expected 1 or more, found 0"),
        ({"tokens": 0}, "tokens: expected 1 or more, found 0"),
        ({"rounds": 0}, "rounds: expected 1 or more, found 0"),
        ({"prompt": -1}, "prompt: expected 0 or more, found -1"),
        ({"ffn_in_memory": 1.5}, "ffn_in_memory: expected 0 to 1, found 1.5"),
        ({"engine": "mmap"}, "engine: expected auto or pread or io_uring, found mmap"),
        ({"peers": ["torch"]}, "peer: expected llama.cpp, found torch"),
        ({"shape": "tiny"}, "--shape with --folder: expected one of them, found both"),
    ],
)
def test_settings_that_make_no_sense(folder, settings, message):
    with pytest.raises(ConfigError) as error:
        offload.run(folder, **settings)
    assert str(error.value).startswith(message)


def test_a_folder_without_a_store(folder):
    with pytest.raises(ConfigError, match=r"expected a folder with a neuron store \(pi2/model.pi2\), found none"):
        offload.run(folder.parent / "q")


# --- the cap ---


def test_no_controller(tmp_path):
    assert not cap.available(tmp_path)
    with pytest.raises(cap.CapError, match=r"memory controller of cgroup v1 in .*, found none. Mount it"):
        cap.MemoryCap(1 << 30, tmp_path).__enter__()


def test_a_group_that_cannot_be_made(tmp_path):
    (tmp_path / "memory.limit_in_bytes").write_text("0")
    target = tmp_path / f"pi2-bench-{os.getpid()}"
    target.write_text("in the way")
    with pytest.raises(cap.CapError, match=r"permission to make a group in .*4096\}, found File exists"):
        cap.MemoryCap(4096, tmp_path).__enter__()


def test_a_group_that_cannot_be_joined(tmp_path):
    with pytest.raises(cap.CapError, match=r"the cpu controller of cgroup v1 in .*, found none. Mount"):
        cap.CpuCap(0.5, tmp_path).__enter__()
    with pytest.raises(cap.CapError, match=r"expected a group in .* that may be joined, found No such file"):
        cap.join(tmp_path / "none")


def test_a_peer_is_refused_where_nothing_can_be_capped(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cap.available, "__defaults__", (tmp_path,))
    monkeypatch.setattr(cap.MemoryCap.__init__, "__defaults__", (tmp_path,))
    with pytest.raises(cap.CapError, match="measure without a cap"):
        offload.run(folder, peers=["llama.cpp"])


@pytest.mark.parametrize("extra", [0, 1, 4095, 4096])
def test_files_are_read_to_their_end(tmp_path, monkeypatch, extra):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2 * cap._BLOCK + extra))
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    assert cap.warm(path) in ("direct", "buffered")
    assert sum(read) == 2 * cap._BLOCK + extra


def test_bytes_read_are_those_of_this_process():
    before = cap.read_bytes()
    assert before is None or (isinstance(before, int) and before >= 0)
    assert Path("/proc/self/io").exists() == (before is not None)


_BUSY = """
import sys, time
from benchmarks import cap

cap.join(sys.argv[1])
end, used = time.monotonic() + 0.5, time.process_time()
while time.monotonic() < end:
    pass
print((time.process_time() - used) / 0.5)
"""


def test_a_share_of_a_core(tmp_path: Path) -> None:
    if not os.access(cap.CPU / "cpu.cfs_quota_us", os.W_OK):
        pytest.skip("no groups of the CPU controller may be made here")
    with cap.CpuCap(0.25, name="busy") as group:
        run = [sys.executable, "-c", _BUSY, str(group.folder)]
        share = float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert not group.folder.exists()
    assert share < 0.35
