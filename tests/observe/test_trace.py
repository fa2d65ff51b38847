"""Traces: what is in the file, that it agrees with itself and with ``torch_pi2.stats``, and what goes wrong."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_pi2
from benchmarks.__main__ import call
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.observe.trace import COUNTERS, STAGES
from torch_pi2.types.offload import OffloadConfig

IDS = torch.arange(1, 9).reshape(1, 8)
#: Rounding of the file's microseconds.
NEAR = 2e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small synthetic model with predictors, quantised; and the store packed from it."""
    base = tmp_path_factory.mktemp("trace")
    torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4", layers=2, rank=32)
    torch_pi2.pack(base / "plain", base / "store")
    return base / "plain", base / "store"


def stored(folder: Path, **settings: Any) -> nn.Module:
    """The model over its store, with room for next to no neurons."""
    least = torch_pi2.stats(torch_pi2.load(folder, budget="1GiB"))["budget"].smallest
    return torch_pi2.load(folder, budget=least, offload=OffloadConfig(preload=False, **settings))


def run(model: nn.Module, times: int = 1) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(IDS)


def opened(model: nn.Module) -> str:
    """How the model's store is read."""
    (store,) = {m.store for m in model.modules() if isinstance(m, OffloadedFFN)}
    return store.describe()


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    return found["otherData"], found["traceEvents"]


def spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["name"] == name]


def lanes(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(inner["ts"] >= outer["ts"] - NEAR and end(inner) <= end(outer) + NEAR)


def check(events: list[dict[str, Any]]) -> None:
    """What holds for every trace."""
    named = lanes(events)
    args = dict(STAGES)
    depths: dict[int, float] = {}  # place of the track of reads -> end of what was there last
    open_spans: dict[int, list[dict[str, Any]]] = defaultdict(list)
    last = 0.0
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["tid"] in named
        if event["ph"] != "e":
            assert event["ts"] >= last, "not in the order of time"
            last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["args"].keys() <= set(args[event["name"]])
            stack = open_spans[event["tid"]]
            while stack and end(stack[-1]) <= event["ts"] + NEAR and not within(event, stack[-1]):
                stack.pop()
            assert not stack or within(event, stack[-1]), "spans of a lane overlap"
            stack.append(event)
        elif event["ph"] == "C":
            assert (event["name"], *event["args"]) in COUNTERS
        elif event["ph"] == "b":
            assert event["ts"] >= depths.get(event["id"], 0.0)
            assert event["id"] <= len(depths), "a place was left free"
            depths[event["id"]] = float("inf")
        else:
            assert event["ph"] == "e"
            assert event["ts"] >= last
            depths[event["id"]] = event["ts"]
    assert all(ended < float("inf") for ended in depths.values()), "a read without its end"


def chunks_of(neurons: int) -> int:
    """As chunk_neurons in csrc/include/pi2/ffn.h."""
    size = ((neurons + 15) // 16 + 63) // 64 * 64
    return (neurons + size - 1) // size


def test_layers_in_memory(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = torch_pi2.load(folders[0])
    run(model)
    with torch_pi2.layers.prompt.sparse_only(), torch_pi2.trace(tmp_path / "out.json") as recorded:
        run(model, 3)
    about, events = read(tmp_path / "out.json")
    check(events)
    assert recorded.lost == about["lost_events"] == 0
    assert recorded.events == about["events"] == sum(e["ph"] != "M" for e in events)
    assert about["versions"]["torch"] == torch.__version__
    assert about["machine"]["kernels"]
    assert set(lanes(events).values()) <= {f"compute {i}" for i in range(torch.get_num_threads())}
    layers = spans(events, "ffn")
    assert [s["args"] for s in layers] == [{"tokens": IDS.numel()}] * 6
    neurons = next(m.site.intermediate for m in model.modules() if hasattr(m, "site"))
    for layer in layers:
        computed = [s["args"]["chunk"] for s in spans(events, "compute") if within(s, layer)]
        assert sorted(computed) == list(range(chunks_of(neurons)))
        assert any(within(s, layer) for s in spans(events, "reduce"))
    assert len(spans(events, "predict")) == 6
    for whole, part in (("predict", "predict rows"), ("linear", "linear rows")):
        assert spans(events, part)
        assert all(any(within(p, w) for w in spans(events, whole)) for p in spans(events, part))
    assert not any(e["ph"] in "bC" for e in events)


@pytest.mark.parametrize("engine", ["pread", "auto"])
def test_layers_over_a_store(folders: tuple[Path, Path], tmp_path: Path, engine: str, one_thread: None) -> None:
    model = stored(folders[1], engine=engine, io_threads=3)
    run(model)
    torch_pi2.stats(model, reset=True)
    with torch_pi2.trace(tmp_path / "out.json"):
        run(model, 3)
    stats = torch_pi2.stats(model)
    _, events = read(tmp_path / "out.json")
    check(events)
    named = lanes(events)
    compute = {tid for tid, name in named.items() if name == "compute 0"}
    assert len(compute) == 1
    assert any(name == "I/O 0" for name in named.values())
    assert set(named.values()) <= {"compute 0", "I/O 0", "I/O 1", "I/O 2"}
    layers = spans(events, "ffn")
    assert [s["args"]["layer"] for s in layers] == [0, 1] * 3
    for layer in layers:
        number = layer["args"]["layer"]
        inside = [e for e in events if e["ph"] == "X" and within(e, layer) and e["args"].get("layer") == number]
        (begin,) = spans(inside, "begin")
        assert sorted(s["args"]["chunk"] for s in spans(inside, "compute")) == list(range(begin["args"]["chunks"]))
    # Nothing is read that is not verified, and all of it is on the track of reads.
    begun = [e for e in events if e["ph"] == "b"]
    assert stats["reads"] == len(begun) == sum(s["args"]["reads"] for s in spans(events, "submit"))
    verified = spans(events, "verify")
    assert verified
    assert {s["tid"] for s in verified}.isdisjoint(compute)
    assert {s["tid"] for s in spans(events, "wait")} <= compute
    # Engine auto is io_uring wherever the kernel has it, whatever this build's machine had installed.
    plain = engine == "pread" or opened(model).startswith("pread")
    assert sum(s["args"]["bytes"] for s in spans(events, "pread")) == (stats["bytes_read"] if plain else 0)
    values = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            values[e["name"]] += e["args"].values()
    assert max(values["reads under way"]) > 0
    assert values["reads under way"][-1] == 0
    assert values["bytes read"][-1] == stats["bytes_read"]
    assert values["cache: hot"][-1] + values["cache: cold"][-1] == stats["resident"]
    # Of one thread these are disjoint parts of its time in layers, and most of it.
    parts = ("predict", "begin", "compute", "wait", "join", "reduce")
    seen = sum(s["dur"] for name in parts for s in spans(events, name))
    assert 0.3 < seen / (stats["busy_ns"] / 1e3) < 1.01
    assert sum(s["dur"] for s in spans(events, "wait")) >= stats["wait_ns"] / 1e3 - NEAR * len(events)


def test_nothing_is_recorded_unless_it_is_asked_for(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = torch_pi2.load(folders[0])
    run(model)
    assert torch.ops.pi2.trace_stop().shape == (0, 7)
    with torch_pi2.trace(tmp_path / "out.json"):
        pass
    _, events = read(tmp_path / "out.json")
    assert [e["name"] for e in events] == ["process_name"]
    run(model)
    assert torch.ops.pi2.trace_stop().shape == (0, 7)


def test_lost_events_are_counted(
    folders: tuple[Path, Path], tmp_path: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch_pi2.load(folders[0])
    whole = torch_pi2.trace(tmp_path / "whole.json").start()
    run(model)
    assert whole.stop() == tmp_path / "whole.json"
    with caplog.at_level(logging.WARNING, "torch_pi2"), torch_pi2.trace(tmp_path / "few.json", capacity=5) as few:
        run(model)
    about, events = read(tmp_path / "few.json")
    check(events)
    assert (few.events, few.lost) == (about["events"], about["lost_events"]) == (5, whole.events - 5)
    assert few.summary() == {"path": str(tmp_path / "few.json"), "events": 5, "lost_events": whole.events - 5}
    lane = next(e for e in events if e["name"] == "thread_name")
    assert lane["args"]["lost_events"] == few.lost
    assert f"few.json: {few.lost} events were lost: more than 5 on a thread" in caplog.text
    # the newest stay: the last is the model's head
    assert spans(events, "linear")[-1]["args"] == spans(read(tmp_path / "whole.json")[1], "linear")[-1]["args"]


def test_what_was_recorded_before_an_error_is_written(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = torch_pi2.load(folders[0])
    folder = tmp_path / "gone"
    folder.mkdir()

    def fails(path: Path, last_words: Callable[[], None]) -> None:
        with torch_pi2.trace(path):
            run(model)
            last_words()
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        fails(tmp_path / "out.json", lambda: None)
    assert spans(read(tmp_path / "out.json")[1], "ffn")
    with pytest.raises(ValueError, match="of the block") as caught:
        fails(folder / "out.json", lambda: (folder.rmdir(), folder.write_text("in its place"), None)[-1])
    assert "writing" in caught.value.__notes__[0]
    assert "expected a folder that can be written" in caught.value.__notes__[0]
    assert torch_pi2.trace(tmp_path / "out.json").start().stop()  # neither is still under way


def test_what_cannot_be_done_says_so(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(ConfigError, match=r"capacity: expected 1 to 16777216 events per thread, found 0\. Leave"):
        torch_pi2.trace(path, capacity=0)
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(ArtifactError, match=r"writing .*expected a folder that can be written, found"):
            torch_pi2.trace(wrong)
    with pytest.raises(ConfigError, match=r"out\.json: expected one that was started, found one that was not"):
        torch_pi2.trace(path).stop()
    one_at_a_time = r"other\.json: expected one trace at a time, found another one running"
    with torch_pi2.trace(path), pytest.raises(ConfigError, match=one_at_a_time):
        torch_pi2.trace(tmp_path / "other.json").start()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out.json"]
    with pytest.raises(ArtifactError, match="found the name of a folder"):
        call("offload", folder=tmp_path, trace=tmp_path)
