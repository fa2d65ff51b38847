"""The report: its facts are those of the files, every plot is drawn by a browser, and damage is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
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
from torch_pi2.errors import ArtifactError, LibraryMissingError, StaleArtifactError
from torch_pi2.report.plots import Plot, places, plots
from torch_pi2.store.parts import Parts
from torch_pi2.types.plan import Bucket, HardwarePlan, Plan, PromptPlan

BATCHES = (1, 4, 16)
MS = {"attention": 1.0, "predictor": 0.5, "hot": 0.25, "cold": 2.0, "io": 1.5, "glue": 0.75}
Report = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """A model that was optimised and saved, and the store packed from it."""

    saved: Path
    store: Path


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
    prompt = PromptPlan((32,) * len(plan.layers))
    plan.hardware = HardwarePlan(made_for, 12_000_000, 0, 64, tuple(buckets), prompt, {"policy": "lfu"}, {"io": 2})
    plan.save(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    base = tmp_path_factory.mktemp("report")
    ids = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(5))
    config = torch_pi2.Config(method="lowrank", tolerance=0.5, calibration_tokens=512, seq_len=32)
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu"), ids, config), base / "saved")
    with_hardware(base / "saved" / "pi2")
    torch_pi2.pack(base / "saved", base / "store")
    return Made(base / "saved", base / "store")


@pytest.fixture(scope="module")
def whole(made: Made) -> Report:
    """With every plot."""
    return report.collect(made.store)


def by_name(found: Report) -> dict[str, Plot]:
    return {plot.name: plot for of in plots(found).values() for plot in of}


def test_facts_are_those_of_the_folder(made: Made, whole: Report) -> None:
    with Parts(made.store / "pi2") as parts:
        plan, stats, predictors = parts.plan(), parts.stats(), parts.predictors()
    assert stats is not None
    assert plan.hardware is not None
    assert [row["key"] for row in whole["firing"]] == list(stats.layers)
    for row, layer in zip(whole["firing"], stats, strict=True):
        assert row["active_share"] == pytest.approx(layer.active_share)
        assert (row["cdf"][0], row["cdf"][-1]) == ((0, 0), (1, 1))
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(row["cdf"])]
        assert all(b <= a + 1e-9 for a, b in pairwise(slopes))  # the most frequent first
        assert row["by_batch"] == {b: pytest.approx(float(layer.frequency(b).mean())) for b in row["by_batch"]}
    for number, row in enumerate(whole["plan"]["rows"]):
        assert row["hot"] == [bucket.hot[number] for bucket in plan.hardware.buckets]
        card = predictors[row["key"]].card
        assert card is not None
        assert (row["predictor"]["recall"], row["predictor"]["bytes"]) == (pytest.approx(card.recall), card.bytes)
    assert sum(whole["model"]["bytes"].values()) == (made.store / "pi2" / "model.pi2").stat().st_size
    saved = report.collect(made.saved)  # a saved folder and a packed one say the same
    assert (saved["firing"], saved["plan"]) == (whole["firing"], whole["plan"])
    assert (saved["model"]["weights"], saved["model"]["stored"], whole["missing"]) == ("float32", False, [])


def test_neurons_are_somewhere_in_every_bucket(whole: Report) -> None:
    bars = by_name(whole)["plan"].figure["data"]
    names = len(bars) // len(BATCHES)
    for number in range(len(BATCHES)):
        own = bars[number * names : (number + 1) * names]
        assert [sum(shares) for shares in zip(*(bar["y"] for bar in own), strict=True)] == pytest.approx([1.0] * 2)
        assert [bar["visible"] for bar in own] == [number == 0] * names
    row = {"neurons": 100, "hot": [40], "accelerator": [10], "resident": [50]}
    found = places(row, 0, stored=True)  # resident ones begin after the accelerator's
    assert found == {"accelerator": 10, "hot": 30, "hot_read": 0, "resident": 20, "cold_read": 40}
    assert places(row, 0, stored=False) == {"accelerator": 10, "hot": 30, "cold": 60}


def test_the_command_writes_one_file(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    assert main(["report", str(made.store), "-o", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["bytes"]) == (str(out), out.stat().st_size)
    assert result["report"]["missing"] == []
    text = out.read_text()
    assert len(text) < 3_000_000
    ours = re.sub("</?abbr[^>]*>", "", text[: text.index("* plotly.js v")] + text[text.rindex("<script>") :])
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", ours)
    for said in (
        "default-src 'none'",
        "PUBLISHED figures of made-up-phone",
        "12.0 MB",
        "hot (16)",
        "Nobody measured it",
    ):
        assert said in ours


def test_what_is_missing_is_said(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(made.saved, tmp_path / "a folder"))
    plan = Plan.load(folder / "pi2")
    plan.hardware = None
    plan.save(folder / "pi2")
    (folder / "pi2" / "stats.safetensors").unlink()
    assert main(["report", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    out, text = capsys.readouterr().out, unescape((tmp_path / "r.html").read_text())
    wanted = (
        "no statistics in the folder",
        f"torch-pi2 plan '{folder}' --hardware measured",
        "the plan is not made for a machine",
    )
    for said in wanted:
        assert said in out
        assert said in text


def test_a_synthetic_model_says_so(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "m", "tiny", active=0.25, weights="int4", layers=2)
    found = report.collect(tmp_path / "m")
    assert found["model"]["synthetic"] == "random weights: speed means something, quality does not"
    assert "SYNTHETIC: random weights" in report.write(found, tmp_path / "r.html").read_text()


def test_names_in_files_are_no_code(whole: Report, tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    rows = [row | {"key": bad, "method": bad} for row in whole["plan"]["rows"]]
    hostile = whole | {"model": whole["model"] | {"name": bad}, "plan": whole["plan"] | {"rows": rows, "planner": bad}}
    assert "<script>alert" not in report.write(hostile, tmp_path / "r.html").read_text()
    assert "<script>" not in json.dumps([plot.figure for plot in by_name(hostile).values()])


def test_figures_are_ones_that_plotly_knows(whole: Report) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    found = by_name(whole)
    assert list(found) == ["cdf", "sparsity", "plan", "times"]
    for plot in found.values():
        go.Figure(json.loads(json.dumps(plot.figure, allow_nan=False)))


@needs_browser
def test_a_browser_draws_every_plot(whole: Report, tmp_path: Path) -> None:
    with browser() as found, Tab(found) as tab:
        tab.page.goto(report.write(whole, tmp_path / "r.html").as_uri())
        tab.page.evaluate("new Promise((done) => requestIdleCallback(done))")
        text, complaints = tab.page.content(), tab.complaints
    assert complaints == []
    drawn = re.findall(r'<div class="plot js-plotly-plot" id="([\w-]+)"', text)
    assert drawn == list(by_name(whole))


def test_files_of_other_models_are_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere: expected a model folder.*found no such folder"):
        report.collect(tmp_path / "nowhere")
    with Parts(made.saved / "pi2") as parts:
        plan = parts.plan()
    plan.hardware = None
    plan.save(tmp_path / "anew")
    assert report.collect(made.store, plan=tmp_path / "anew")["plan"]["hardware"] is None
    plan.layers[0].order = plan.layers[0].order.flip(0)
    plan.save(tmp_path / "other")
    with pytest.raises(StaleArtifactError, match=r"plan for .*store: expected neuron orders as in its own plan"):
        report.collect(made.store, plan=tmp_path / "other")


def test_plotly_is_missing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report.collect(made.saved)
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(LibraryMissingError, match=r"plotly: expected an installed plotly.*pip install 'plotly>=6'"):
        report.write(found, tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []
