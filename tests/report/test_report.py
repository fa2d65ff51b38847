"""The report: its numbers are those of the files, every plot is drawn by a browser, and damage is named."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass, replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import Tab, browser, needs_browser
from tiny_models import tiny

import torch_pi2
from torch_pi2 import report
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, LibraryMissingError, Pi2Error, StaleArtifactError
from torch_pi2.eval.verdict import unmeasured
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.replay import as_run
from torch_pi2.report import facts, figures_plan, looks, page
from torch_pi2.report.collect import firing
from torch_pi2.report.glossary import GLOSSARY, marked
from torch_pi2.report.measured import read_measured
from torch_pi2.report.planned import planned
from torch_pi2.report.style import THEMES
from torch_pi2.report.timeline import ACTIVITIES, MOST_SPANS, read_trace
from torch_pi2.store.parts import Parts
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

BATCHES = (1, 4, 16)
MS = {"attention": 1.0, "predictor": 0.5, "hot": 0.25, "cold": 2.0, "io": 1.5, "glue": 0.75}
DECODE = {
    "what": "decode",
    "shape": "tiny",
    "weights": "float",
    "batch": 1,
    "buckets": [{"batch": 1, "tokens_per_s": 200.0, "gain": {"greedy": 1.1}}],
    "ms_per_token": {
        "total": 5.0,
        "linears": 1.0,
        "sdpa": None,
        "predictor": 0.5,
        "ffn": 2.5,
        "head": 0.1,
        "python": 1,
    },
}


@dataclass(frozen=True)
class Made:
    """A model that was optimised and saved, the store packed from it, and what runs of it recorded."""

    saved: Path
    store: Path
    accesses: Path
    trace: Path
    measured: Path

    @property
    def arguments(self) -> list[str]:
        files = {"trace": self.trace, "accesses": self.accesses, "measured": self.measured}
        return [word for name, path in files.items() for word in (f"--{name}", str(path))]


def with_hardware(folder: Path) -> None:
    """Give the plan in ``folder`` buckets by hand."""
    plan = Plan.load(folder)
    n = plan.layers[0].site.intermediate
    buckets = []
    for batch in BATCHES:
        hot = tuple(max(layer.n_hot, min(n, 4 * batch + i)) for i, layer in enumerate(plan.layers))
        resident = tuple(min(n, h + 2) if i else h - 1 for i, h in enumerate(hot))
        buckets.append(Bucket(batch, hot, (0,) * len(hot), resident, 20_000 * batch, MS | {"cold": batch**0.5}))
    made_for = {"hardware": "made-up-phone", "hash": "0" * 64, "source": "published"}
    prompt = PromptPlan((32,) * len(plan.layers), 256)
    plan.hardware = HardwarePlan(made_for, 12_000_000, 0, 64, tuple(buckets), prompt, {"policy": "lfu"}, {"io": 2})
    plan.save(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    base = tmp_path_factory.mktemp("report")
    ids = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(5))
    config = torch_pi2.Config(method="lowrank", tolerance=0.5, calibration_tokens=512, seq_len=32)
    model = torch_pi2.optimize(tiny("llama-relu"), ids, config)
    torch_pi2.save(model, base / "saved")
    torch_pi2.pack(base / "saved", base / "plain")
    with_hardware(base / "saved" / "pi2")
    torch_pi2.pack(base / "saved", base / "store")
    found = Made(base / "saved", base / "store", base / "accesses", base / "trace.json", base / "now.json")
    # Of the plan without a machine: a model that follows one changes its cache, which no replay repeats.
    parts: Any = torch_pi2.stats(torch_pi2.load(base / "plain", budget="1GiB"))["budget"]
    half = parts.smallest + parts.in_slots(parts.neurons // 2)
    stored = torch_pi2.load(base / "plain", budget=half, offload=torch_pi2.OffloadConfig(policy="lfu"))
    with torch_pi2.record_accesses(stored, found.accesses), torch_pi2.trace(found.trace), torch.no_grad():
        for step in range(12):
            stored(ids[:1, step : step + 1])
    found.measured.write_text(json.dumps(DECODE))
    return found


@pytest.fixture(scope="module")
def whole(made: Made) -> facts.Report:
    """With every plot."""
    return report.collect(made.store, trace=made.trace, accesses=made.accesses, measured=[made.measured])


def all_plots(found: facts.Report) -> dict[str, looks.Plot]:
    return {plot.name: plot for plots in page.plots(found).values() for plot in plots}


# --- numbers ---


def test_what_is_in_the_folder(made: Made, whole: facts.Report) -> None:
    with Parts(made.store / "pi2") as parts:
        plan, stats, predictors = parts.plan(), parts.stats(), parts.predictors()
    assert stats is not None
    assert [row.key for row in whole.firing] == list(stats.layers)
    for row, layer in zip(whole.firing, stats, strict=True):
        assert row.active_share == pytest.approx(layer.active_share)
        assert row.cdf[0] == (0, 0)
        assert row.cdf[-1] == (1, 1)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(row.cdf)]
        assert all(b <= a + 1e-9 for a, b in pairwise(slopes))  # the most frequent first
        top = float(layer.fired.sort(descending=True).values[: layer.intermediate // 2].sum() / layer.fired.sum())
        assert dict(row.cdf)[0.5] == pytest.approx(top)
        assert row.by_batch == {b: pytest.approx(float(layer.frequency(b).mean())) for b in row.by_batch}
        assert len(row.by_batch) > 1
    assert whole.plan is not None
    assert plan.hardware is not None
    assert [bucket.batch for bucket in whole.plan.buckets] == list(BATCHES)
    for number, row in enumerate(whole.plan.rows):
        assert row.hot == tuple(bucket.hot[number] for bucket in plan.hardware.buckets)
        card = predictors[row.key].card
        assert card is not None
        assert row.predictor is not None
        assert (row.predictor.recall, row.predictor.bytes) == (pytest.approx(card.recall), card.bytes)
    assert whole.model.bytes["neurons"] == sum(row.bytes or 0 for row in whole.plan.rows)
    assert sum(whole.model.bytes.values()) == (made.store / "pi2" / "model.pi2").stat().st_size
    assert whole.missing == ()


def test_saved_and_packed_say_the_same(made: Made, whole: facts.Report) -> None:
    saved = report.collect(made.saved)
    assert saved.firing == whole.firing
    assert saved.plan == whole.plan
    assert (saved.model.weights, saved.model.stored) == ("float32", False)
    assert saved.model.bytes["neurons"] == whole.model.bytes["neurons"]


def test_hits_are_those_of_the_run(made: Made, whole: facts.Report) -> None:
    cache, accesses = whole.cache, Accesses.load(made.accesses)
    assert cache is not None
    assert cache.whole
    assert cache.windows[-1] == cache.passes == 12
    assert len(cache.windows) == len(cache.over_time["lfu"]) == 12
    rows = accesses.wanted.reshape(len(accesses.layers), -1)  # two layers of as many neurons, and one token a call
    wanted = [sum(int(byte).bit_count() for byte in row) for row in rows.reshape(12, -1).tolist()]
    assert sum(wanted) == accesses.run["wanted"]
    hits = sum(rate * count for rate, count in zip(cache.over_time["lfu"], wanted, strict=True))
    assert hits == pytest.approx(accesses.run["hits"]) == pytest.approx(as_run(accesses).hits)
    assert [size.share for size in cache.sizes] == pytest.approx([n / 10 for n in range(1, 11)], abs=0.01)
    assert cache.sizes[-1].hit_rate["lru"] == 1
    assert all(size.hit_rate["optimal"] >= max(size.hit_rate.values()) - 1e-9 for size in cache.sizes)


def test_a_trace_is_all_there(made: Made, whole: facts.Report) -> None:
    events = json.loads(made.trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] in ("X", "b")]
    timeline = whole.timeline
    assert timeline is not None
    assert len(timeline.spans) == len(spans) <= MOST_SPANS
    assert timeline.lost == 0
    assert "read 0" in timeline.lanes
    step = timeline.total_ms / len(timeline.bins)
    in_step = sum(event["dur"] for event in events if event["name"] in ("ffn", "predict", "linear")) / 1e3
    workers = sum(sum(threads) for threads in timeline.busy.values()) * step
    assert workers >= in_step - 0.01  # other threads help
    counted = [event["args"]["bytes"] for event in events if event["name"] == "bytes read"]
    assert sum(timeline.read_mb_per_s) * step / 1e3 * 1e6 == pytest.approx(max(counted) - counted[0], rel=1e-6)


def write_trace(path: Path, spans: list[tuple[int, str, float, float]], reads: list[tuple[float, float]] = []) -> Path:  # noqa: B006
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "ts": 0, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "compute 0"), (2, "I/O 0"))
    ]
    for tid, name, begin, ms in spans:
        events.append({"ph": "X", "name": name, "ts": 1e3 * begin, "dur": 1e3 * ms, "tid": tid, "args": {"layer": 0}})
    for begin, ms in reads:
        both = {"name": "read", "id": 0, "tid": 2}
        events.append({"ph": "b", **both, "ts": 1e3 * begin, "args": {}})
        events.append({"ph": "e", **both, "ts": 1e3 * (begin + ms)})
    path.write_text(json.dumps({"otherData": {"lost_events": 3}, "traceEvents": events}))
    return path


def test_the_innermost_span_counts(tmp_path: Path) -> None:
    spans = [(1, "ffn", 10.0, 100.0), (1, "begin", 10.0, 20.0), (1, "submit", 20.0, 5.0), (1, "wait", 50.0, 40.0)]
    timeline = read_trace(write_trace(tmp_path / "t", [*spans, (2, "verify", 60.0, 90.0)]))
    step = timeline.total_ms / len(timeline.bins)
    busy = {name: sum(threads) * step for name, threads in timeline.busy.items()}
    assert timeline.total_ms == pytest.approx(140)
    assert busy == {
        "cache and requests": pytest.approx(20),
        "waiting for reads": pytest.approx(40),
        "rest of the layer": pytest.approx(40),
    }
    assert max(sum(threads) for threads in zip(*timeline.busy.values(), strict=True)) <= 1 + 1e-9
    assert timeline.lost == 3
    assert "3 events were lost" in all_plots(facts_of(timeline))["busy"].read


def test_the_densest_part_of_a_long_trace_is_whole(tmp_path: Path) -> None:
    quiet = [(1, "compute", 10.0 * i, 5.0) for i in range(3000)]
    reads = [(20_000 + 0.5 * i, 0.4) for i in range(2000)]
    timeline = read_trace(write_trace(tmp_path / "t", quiet, reads))
    begin, end = timeline.begin_ms, timeline.end_ms
    assert len(timeline.spans) <= MOST_SPANS
    assert sum(span.stage == "read" for span in timeline.spans) > 1500
    inside = [*((b, b + ms) for _, _, b, ms in quiet), *((b, b + ms) for b, ms in reads)]
    assert len(timeline.spans) == sum(b < end and e > begin for b, e in inside)
    plot = all_plots(facts_of(timeline))["spans"]
    assert f"all {len(timeline.spans):,} spans of it, none left out" in plot.read
    assert plot.read.startswith(f"The {end - begin:.3g} ms of the trace")


def facts_of(timeline: facts.Timeline) -> facts.Report:
    model = facts.Model("m", "", None, True, "int4", "", {})
    return facts.Report(model, (), None, (), (), None, timeline, ())


def test_experts_of_a_block_are_one_row() -> None:
    def ref(name: str, expert: int) -> LinearRef:
        return LinearRef(f"layers.0.experts.{name}", None, None, expert)

    sites = [
        FFNSite(f"layers.0.experts.{i}", i, "relu", False, ref("gate", i), ref("up", i), ref("down", i), 8, 4, "o")
        for i in range(2)
    ]
    plan = Plan([LayerPlan(site, "exact", 0, torch.arange(4, dtype=torch.int32), 0.0, 0.5) for site in sites], "ab")
    stats = ActivationStats({site.key: counts(site.key, i, "layers.0.experts") for i, site in enumerate(sites)}, "ab")
    (row,) = planned(plan, {}, {site.key: 100 for site in sites}).rows
    assert (row.key, row.experts, row.neurons, row.bytes, row.hot) == ("layers.0.experts", 2, 8, 200, (0,))
    (fires,) = firing(stats)
    assert (fires.key, fires.neurons, fires.never) == ("layers.0.experts", 8, 2)
    assert fires.by_batch == {1: pytest.approx(0.5), 2: pytest.approx(0.75)}
    assert dict(fires.cdf)[1 / 8] == pytest.approx(9 / 32)


def counts(key: str, index: int, experts: str | None = None) -> LayerStats:
    """Of four neurons and 9 tokens."""
    fired = torch.tensor([9, 5, 2, 0])
    batches = torch.tensor([[8, 4, 4, 0], [4, 4, 4, 0]])
    nothing = torch.zeros(4, dtype=torch.int64)
    histogram = torch.zeros(HIST_BINS, dtype=torch.int64)
    bits = torch.zeros((0, 1), dtype=torch.uint8)
    groups = torch.tensor([8, 4])
    return LayerStats(
        key, index, 0.0, 9, fired, nothing, nothing.double(), (1, 2), groups, batches, histogram, bits, experts
    )


def test_neurons_are_somewhere_in_every_bucket(whole: facts.Report) -> None:
    assert whole.plan is not None
    bars = [trace for trace in all_plots(whole)["plan"].figure["data"] if trace["type"] == "bar"]
    names = len(bars) // len(BATCHES)
    for number in range(len(BATCHES)):
        own = bars[number * names : (number + 1) * names]
        assert [sum(shares) for shares in zip(*(bar["y"] for bar in own), strict=True)] == pytest.approx(
            [1.0] * len(whole.plan.rows)
        )
        hot = [sum(bar["y"][i] for bar in own if bar["name"].startswith("hot")) for i in range(len(whole.plan.rows))]
        assert hot == pytest.approx([row.hot[number] / row.neurons for row in whole.plan.rows])
        assert [bar["visible"] for bar in own] == [number == 0] * names
    row = facts.Row("k", 1, 100, 8, "exact", 0.1, (40,), (10,), (50,), None, None)
    places = figures_plan._places(row, 0, stored=True)  # resident ones begin after the accelerator's
    assert places == {"accelerator": 10, "hot": 30, "hot_read": 0, "resident": 20, "cold_read": 40}
    assert figures_plan._places(row, 0, stored=False) == {"accelerator": 10, "hot": 30, "cold": 60}


def test_a_budget_that_leaves_no_cache_has_all_neurons_read(whole: facts.Report) -> None:
    assert whole.plan is not None
    assert whole.plan.hardware is not None
    buckets = tuple(replace(bucket, cache_bytes=0) for bucket in whole.plan.buckets)
    rows = tuple(replace(row, resident=(0,) * len(buckets)) for row in whole.plan.rows)
    none = replace(whole.plan, buckets=buckets, rows=rows)
    assert figures_plan._counts(none, "cold_read", 0) == [row.neurons - row.hot[0] for row in rows]
    assert figures_plan._counts(none, "cold", 0) == []
    in_memory = replace(none, hardware=replace(whole.plan.hardware, budget_bytes=None))
    assert figures_plan._counts(in_memory, "cold", 0) == [row.neurons - row.hot[0] for row in rows]
    assert figures_plan._counts(in_memory, "cold_read", 0) == []


def test_times_are_per_token(whole: facts.Report, tmp_path: Path) -> None:
    bars = [trace for trace in all_plots(whole)["times"].figure["data"] if trace["type"] == "bar"]
    groups, labels = bars[0]["x"]
    assert groups == ["predicted"] * 3 + ["measured"]
    assert labels == ["1", "4", "16", "1"]
    totals = [sum(bar["y"][i] for bar in bars) for i in range(4)]
    steps = [sum(MS.values()) - MS["cold"] + batch**0.5 for batch in BATCHES]
    assert totals == pytest.approx([*(step / b for step, b in zip(steps, BATCHES, strict=True)), 5.1])
    told = {"batch": 4, "parts": [{"part": "ffn", "measured_ms": 8.0}, {"part": "sdpa + glue", "measured_ms": -0.5}]}
    told |= {"measured_total_ms": 8.0, "predicted_ms": {"hot": 2.0, "cold": 4.0}}
    (tmp_path / "now.json").write_text(json.dumps({"buckets": [], "explained": [told]}))
    (run,), _ = read_measured(tmp_path / "now.json")
    assert (run.batch, run.ms) == (4, {"ffn": 8.0, "sdpa + glue": 0.0})
    bars = figures_plan.times(None, [run]).figure["data"]
    assert bars[0]["x"] == [["measured", "modelled"], ["4", "4"]]
    assert {bar["name"]: bar["y"] for bar in bars if bar["type"] == "bar"} == {
        "hot neurons": [0, 0.5],
        "cold neurons": [0, 1.0],
        "all of the FFN, as one": [2.0, 0],
    }
    assert "published figures" in all_plots(whole)["times"].read


def test_what_planning_gains(tmp_path: Path) -> None:
    bucket = {"batch": 4, "tokens_per_s": 30.0, "gain": {"greedy": 1.25, "all-hot": 2}}
    row = {"memory": "store", "batch": 1, "tokens_per_s": {"planned": 10.0, "greedy": 11.0}}
    files = []
    for name, data in (("p", {"buckets": [bucket]}), ("b", {"what": "plan", "rows": [row, row | {"memory": "whole"}]})):
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(data))
    cases = [case for file in files for case in read_measured(file)[1]]
    assert [(case.case, case.measured) for case in cases] == [
        ("batch 4", False),
        ("batch 1, over a store", True),
        ("batch 1, in memory", True),
    ]
    assert cases[0].tokens_per_s == {"this plan": 30, "greedy": 24, "all-hot": 15}
    bars = {bar["name"]: bar["y"] for bar in figures_plan.rivals(cases).figure["data"]}
    assert bars == {"this plan": [1, 1, 1], "greedy": [0.8, 1.1, 1.1], "all-hot": [0.5, None, None]}


# --- the page ---


def test_figures_are_ones_that_plotly_knows(whole: facts.Report) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    plots = all_plots(whole)
    assert list(plots) == ["cdf", "sparsity", "plan", "predictors", "times", "rivals", "hits", "sizes", "busy", "spans"]
    for plot in plots.values():
        text = json.dumps(plot.figure, allow_nan=False)
        names = set(re.findall(r'"@(\w+)"', text))
        assert names <= set(THEMES["light"])
        go.Figure(json.loads(re.sub(r'"@(\w+)"', lambda found: json.dumps(THEMES["dark"][found[1]]), text)))


def test_the_command_writes_one_file(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(made.store), "-o", str(out), *made.arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["bytes"]) == (str(out), out.stat().st_size)
    assert result["report"]["missing"] == []
    assert len(result["report"]["plan"]["rows"]) == 2
    assert [p.name for p in out.parent.iterdir()] == ["report.html"]
    text = out.read_text()
    assert text.count("* plotly.js v") == 1
    ours = text[: text.index("* plotly.js v")] + text[text.rindex("<script>") :]
    ours = re.sub("</?abbr[^>]*>", "", ours)
    assert len(text) < 3_000_000
    for said in ("This report", "torch-pi2 report store", "Nobody measured it"):
        assert said in ours
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", ours)
    assert "default-src 'none'" in ours
    for said in ("PUBLISHED figures of made-up-phone", "12.0 MB", "LlamaForCausalLM", "hot (16)", "model.layers.1.mlp"):
        assert said in ours


def test_what_is_missing_is_said(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(made.saved, tmp_path / "a folder"))
    plan = Plan.load(folder / "pi2")
    plan.hardware = None
    plan.save(folder / "pi2")
    (folder / "pi2" / "stats.safetensors").unlink()
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    text = (tmp_path / "r.html").read_text()
    for said in (
        "There are no statistics in the folder.",
        f"torch-pi2 plan '{folder}' --hardware measured",
        "No measurement was given.",
        "The model is in memory as a whole",
        f"torch-pi2 generate '{folder}'",
    ):
        assert said in out
        assert said.replace("'", "&#x27;") in text
    assert list(all_plots(report.collect(folder))) == ["plan", "predictors"]


def test_a_synthetic_model_says_so(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "m", "tiny", active=0.25, weights="int4", layers=2)
    found = report.collect(tmp_path / "m")
    assert found.model.synthetic == "random weights of the shape tiny, made so that 25% of neurons fire"
    assert found.model.weights == "int4"
    report.write(found, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "SYNTHETIC: random weights" in text
    assert f"watched.stats().save({str(tmp_path / 'm' / 'pi2')!r})" in unescape(text)


def test_names_in_files_are_no_code(whole: facts.Report, tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    model = replace(whole.model, name=bad, shape=bad)
    assert whole.plan is not None
    rows = tuple(replace(row, key=bad, method=bad) for row in whole.plan.rows)
    hostile = replace(whole, model=model, plan=replace(whole.plan, rows=rows, planner=bad))
    report.write(hostile, tmp_path / "r.html")
    assert "<script>alert" not in (tmp_path / "r.html").read_text()
    # What plotly shows as text of ours may have tags, but not those of names.
    firing = tuple(replace(layer, key="<b>") for layer in whole.firing)
    named = replace(whole.plan, rows=tuple(replace(row, key="<b>") for row in whole.plan.rows))
    figures = [plot.figure for plot in all_plots(replace(whole, firing=firing, plan=named)).values()]
    assert "&lt;b&gt;" in json.dumps(figures)
    assert "<b>" not in json.dumps(figures)


def browsed(path: Path) -> tuple[str, list[str]]:
    """The page's elements once its scripts ran, and what they said on the console."""
    with browser() as found, Tab(found) as tab:
        tab.page.goto(path.as_uri())
        tab.page.evaluate("new Promise((done) => requestIdleCallback(done))")
        return tab.page.content(), tab.complaints


@needs_browser
def test_a_browser_draws_every_plot(whole: facts.Report, tmp_path: Path) -> None:
    page_text, console = browsed(report.write(whole, tmp_path / "r.html"))
    assert console == []
    elements = re.sub(r"<script\b.*?</script>", "", page_text, flags=re.DOTALL)
    parts = re.split(r'<div class="plot js-plotly-plot" id="(\w+)"', elements)
    drawn = dict(zip(parts[1::2], parts[2::2], strict=True))
    plots = all_plots(whole)
    assert list(drawn) == list(plots)
    for name, plot in plots.items():
        svg = drawn[name]
        assert svg.count('class="main-svg"') >= 2
        traces = [t for t in plot.figure["data"] if t.get("visible", True)]
        if name == "sparsity":
            assert "<image" in svg or 'class="hm"' in svg
            continue
        bars = [t for t in traces if t["type"] == "bar"]
        lines = [t for t in traces if t["type"] == "scatter"]
        assert len(re.findall(r'class="trace bars', svg)) == len(bars)
        assert len(re.findall(r'class="trace scatter', svg)) == len(lines)
        points = sum(len(t["y"]) for t in bars)
        assert len(re.findall(r'class="point"', svg)) >= points
    # A page that fails is seen to fail.
    broken = tmp_path / "broken.html"
    text = (tmp_path / "r.html").read_text()
    broken.write_text(text[: text.index("</main>")] + text[text.rindex("<script>") :])  # without plotly.js
    assert any("TypeError" in line for line in browsed(broken)[1])


@needs_browser
def test_a_browser_draws_32_layers(whole: facts.Report, tmp_path: Path) -> None:
    keys = [f"model.layers.{i}.mlp" for i in range(32)]
    assert whole.plan is not None
    rows = tuple(replace(whole.plan.rows[0], key=key) for key in keys)
    firing = tuple(replace(whole.firing[0], key=key) for key in keys)
    path = report.write(replace(whole, firing=firing, plan=replace(whole.plan, rows=rows)), tmp_path / "r.html")
    assert path.stat().st_size < 3_000_000
    text, console = browsed(path)
    assert console == []
    assert len(re.findall(r'<div class="plot js-plotly-plot"', text)) == len(all_plots(whole))
    assert len(re.findall(r"updatemenu-item-rect", text)) >= len(BATCHES)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "found nothing"),
        ('{"traceEvents": [', r"found damage \(Expecting value"),
        ("[]", r"found damage \(TypeError"),
        ('{"otherData": {"lost_events": 0}, "traceEvents": []}', "none of its spans is of a stage"),
        ('{"otherData": {"lost_events": 0}, "traceEvents": [{"ph": "X", "name": "ffn", "ts": 1}]}', "KeyError: 'dur'"),
        (
            '{"otherData": {"lost_events": 0}, "traceEvents": [{"ph": "X", "name": "ffn", "ts": NaN, "dur": 1, '
            '"tid": 1, "args": {}}]}',
            "times that are no times",
        ),
        (
            '{"otherData": {"lost_events": 0}, "traceEvents": [{"ph": "e", "name": "read", "ts": 1, "tid": 1, "id": 0'
            "}]}",
            r"KeyError: \(1, 0\)",
        ),
        (b"\xff\xfe", "invalid start byte"),
    ],
)
def test_damaged_traces_are_refused(tmp_path: Path, text: str | bytes | None, found: str) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ArtifactError, match=r"trace .*trace\.json: expected a trace written by torch_pi2\.trace") as e:
        read_trace(path)
    assert re.search(found, str(e.value))
    assert "Record it again" in str(e.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "found nothing"),
        ("{", r"found damage \(Expecting"),
        ('{"what": "layer"}', "found none of them"),
        ('{"explained": [{}]}', "KeyError: 'parts'"),
        ('{"buckets": [{"batch": 1, "tokens_per_s": 1, "gain": {"greedy": 0}}]}', "ZeroDivisionError"),
        (json.dumps(DECODE | {"ms_per_token": {"linears": 1}}), "KeyError: 'sdpa'"),
        (json.dumps(DECODE).replace("2.5", '"much"'), "'much' is no number"),
        (json.dumps(DECODE).replace("2.5", "NaN"), "nan is no number"),
    ],
)
def test_damaged_measurements_are_refused(tmp_path: Path, text: str | None, found: str) -> None:
    path = tmp_path / "now.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtifactError, match=r"measured times .*now\.json: expected JSON of `torch-pi2 plan") as e:
        read_measured(path)
    assert re.search(found, str(e.value))


def test_another_plan_for_the_folder(made: Made, tmp_path: Path) -> None:
    with Parts(made.saved / "pi2") as parts:
        plan = parts.plan()
    plan.hardware = None
    plan.save(tmp_path / "anew")
    found = report.collect(made.store, plan=tmp_path / "anew")
    assert found.plan is not None
    assert found.plan.hardware is None
    plan.layers[0].order = plan.layers[0].order.flip(0)
    plan.save(tmp_path / "other")
    with pytest.raises(StaleArtifactError, match=r"plan for .*store: expected neuron orders as in its own plan"):
        report.collect(made.store, plan=tmp_path / "other")


def test_other_files_that_are_damaged(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.saved, tmp_path / "m"))
    (folder / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"config\.json: expected a model's configuration, found damage"):
        report.collect(folder)
    with pytest.raises(ArtifactError, match=r"nowhere: expected a model folder.*found no such folder"):
        report.collect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"empty: expected a model folder.*found none of them"):
        report.collect(tmp_path / "empty")
    cut = tmp_path / "accesses"
    cut.write_bytes(made.accesses.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"accesses: expected a whole safetensors file"):
        report.collect(made.store, accesses=cut)
    other = replace(Accesses.load(made.accesses), model_hash="f" * 64)
    other.save(cut)
    with pytest.raises(StaleArtifactError, match=r"accesses: expected accesses of FFN weights .* found ffffffffffff"):
        report.collect(made.store, accesses=cut)


def test_the_file_cannot_be_written(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.html").mkdir()
    assert main(["report", str(made.saved), "-o", str(tmp_path / "r.html")]) == 2
    assert "r.html: expected" in capsys.readouterr().err


def test_plotly_is_missing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report.collect(made.saved)
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(
        LibraryMissingError, match=r"plotly: expected an installed plotly.*pip install 'plotly>=6'"
    ) as e:
        report.write(found, tmp_path / "r.html")
    assert isinstance(e.value, Pi2Error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_a_page_on_standard_output_has_nothing_else_there(
    made: Made, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["report", str(made.saved), "-o", name]) == 0
    page_text, said = capfd.readouterr()
    assert page_text.startswith("<!doctype html>")
    assert page_text.endswith("</html>\n")
    assert f"{name}\nnot in it: " in said


def test_every_activity_has_a_colour() -> None:
    assert set(ACTIVITIES.values()) <= set(looks.STAGES)


def luminance(colour: str) -> float:
    """Relative, of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_buttons_are_seen(theme: str) -> None:
    colours = THEMES[theme]
    for count in (1, 2, 3, 4, 32):
        assert min(contrast(looks.layer_colour(i, count), colours["card"]) for i in range(count)) >= 3
    assert contrast(colours["ink"], colours["grid"]) >= 4.5  # a button that is pressed


def test_hit_rates_are_drawn_to_all(whole: facts.Report) -> None:
    for name in ("hits", "sizes"):
        assert all_plots(whole)[name].figure["layout"]["yaxis"]["range"] == [0, 1.02]


def test_words_have_their_meaning(whole: facts.Report, tmp_path: Path) -> None:
    text = report.write(whole, tmp_path / "r.html").read_text()
    for word in ("neuron", "hot", "cold", "plan", "store", "recall"):
        assert f'<abbr title="{GLOSSARY[word]}">' in text
    assert marked("<b> a Plan, plans") == f'&lt;b&gt; a <abbr title="{GLOSSARY["plan"]}">Plan</abbr>, plans'


def test_the_verdict_is_first(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.saved, tmp_path / "judged"))
    plan = Plan.load(folder / "pi2")
    judged = unmeasured(folder, plan, "float", made=["torch-pi2 optimize <x>"], not_measured={"speed": "no time"})
    judged.save(folder / "pi2")
    text = report.write(report.collect(folder), tmp_path / "r.html").read_text()
    head = text[: text.index('class="facts"')]
    for said in ("not measured (no time)", "torch-pi2 optimize &lt;x&gt;", "2 of 2 layers lowrank", "lossy"):
        assert said in head
    replace(judged, model_hash="ab" * 32).save(folder / "pi2")
    with pytest.raises(StaleArtifactError, match="verdict"):
        report.collect(folder)
