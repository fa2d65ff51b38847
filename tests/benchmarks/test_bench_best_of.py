"""``bench best-of``: sequences that end one by one, under plans that follow and plans that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import torch_pi2
from benchmarks import best_of
from benchmarks.__main__ import render
from benchmarks.table import page as results_page
from torch_pi2.base import process as machine
from torch_pi2.decode.adapt import engine_of
from torch_pi2.errors import ConfigError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan

PROMPT, EVERY, ROUNDS = 5, 2, 2


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("best-of") / "m"
    torch_pi2.synthetic(folder, "tiny", layers=2, rank=16, hot_frequency=1.01)
    model = torch_pi2.load(folder)
    own = model.torch_pi2.plan
    neurons = [layer.site.intermediate for layer in sparse_layers(model)]
    buckets = tuple(Bucket(b, (n, n), (0, 0), (0, 0), ms={"hot": 2.0 * b}) for b, n in ((1, 64), (3, neurons[0])))
    plan = HardwarePlan({}, None, 0, 64, buckets, PromptPlan((0, 0)))
    plans = best_of.compared(plan, own, 3)
    assert {name: [b.batch for b in p.buckets] for name, p in plans.items()} == {
        "follows": [1, 3], "for 1": [1], "for 3": [3], "unplanned": [1],
    }  # fmt: skip
    assert plans["unplanned"].buckets[0].hot == tuple(layer.n_hot for layer in own.layers)
    drawn = [torch.randint(1024, (3, PROMPT + 3 * EVERY)) for _ in range(8)]
    made = best_of.measure(
        dict.fromkeys(plans, model), plans, drawn, sequences=3, every=EVERY, rounds=ROUNDS, compiled=False
    )
    assert engine_of(model) is not None
    return made


def test_figures_hang_together(result: dict[str, Any]) -> None:
    assert [row["batch"] for row in result["batches"]] == [3, 2, 1]
    names = ["follows", "for 1", "for 3", "unplanned"]
    for row in (*result["batches"], result["whole"]):
        assert list(row["tokens_per_s"]) == names
        assert list(row["over"]) == names[1:]
        for name in names:
            low, high = row["spread"][name]
            assert 0 < low <= row["tokens_per_s"][name] <= high
    hot = [row["hot"] for row in result["batches"]]
    assert [h["follows"] for h in hot] == [1, 1, 0.0625]
    assert [h["for 1"] for h in hot] == [0.0625] * 3
    assert [h["for 3"] for h in hot] == [1] * 3
    assert [h["unplanned"] for h in hot] == [0] * 3
    assert [row["predicted_tokens_per_s"] for row in result["batches"]] == [500.0, pytest.approx(333.333), 500.0]
    # what lies between steps is part of the whole
    fastest = max(row["spread"]["follows"][1] / row["batch"] for row in result["batches"])  # steps a second
    assert result["whole"]["spread"]["follows"][1] < sum((3, 2, 1)) * EVERY / (3 * EVERY / fastest)
    switch = result["switch"]
    assert 0 < switch["ms"] <= switch["most_ms"]
    assert 0 < switch["of_a_step"] <= switch["most_of_a_step"]
    assert json.loads(json.dumps(result)) == result


def test_table(result: dict[str, Any]) -> None:
    about = {
        "what": "best-of", "shape": "tiny", "weights": "int4", "activations": "int8", "synthetic": {"active": 0.1},
        "threads": 2, "compiled": False, "ffn_in_memory": 0.5, "hardware": {"name": "x", "source": "measured"},
        "tokens": "random", "statistics": "few",
    }  # fmt: skip
    text = render(result | about)
    lines = text.splitlines()
    assert "50.0 % of the neurons in memory" in lines[0]
    assert lines[1].split()[:4] == ["sequences", "follows", "for", "1"]
    assert [line.split()[0] for line in lines[3:7]] == ["3", "2", "1", "all"]
    assert "one of 3 sequences ends every 2 steps" in text
    assert "a change of plan takes" in text
    assert lines[-1].startswith("(synthetic:")


def test_results_page(result: dict[str, Any]) -> None:
    about = {"what": "best-of", "shape": "tiny", "weights": "int4", "activations": "int8", "ffn_in_memory": 0.5}
    page = results_page({"run": machine.describe() | about | result})
    assert "## A batch that shrinks" in page
    rows = [line for line in page.splitlines() if line.startswith("| run: tiny int4")]
    assert len(rows) == len(result["batches"]) + 1
    assert f"| {result['whole']['tokens_per_s']['follows']:.2f} |" in rows[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequences": 1}, r"sequences: expected 2 or more, found 1\."),
        ({"every": 0}, r"every: expected 1 or more, found 0\."),
        ({"rounds": 0}, r"rounds: expected 1 or more, found 0\."),
        ({"ffn_in_memory": 1.5}, r"ffn_in_memory: expected 0 to 1, found 1\.5\."),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        best_of._check(**({"sequences": 4, "every": 4, "rounds": 5, "ffn_in_memory": 1.0} | settings))
