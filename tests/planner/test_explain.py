"""Predicted milliseconds beside measured ones: parts that hang together, and what a run could not tell apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_fakes import FakeHardware, fake_stats
from shared import small_store
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.planner.explain import MEASURED, Explained, compare, explained_tokens, render
from torch_pi2.rewrite.handle import store_and_budget
from torch_pi2.types.budget import Budget
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.plan import Plan


def explained(model: Any, plan: Plan | None = None, **how: Any) -> Explained:
    plan = plan or model.torch_pi2.plan
    return compare(
        model,
        plan,
        FakeHardware(),
        fake_stats(plan),
        **{"tokens": 2, "rounds": 3, "warm_up": 1, "compiled": False} | how,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "store"


@pytest.fixture(scope="module")
def half(store: Path) -> nn.Module:
    """Over a store, with a cache for half of the neurons."""
    parts: Budget = torch_pi2.load(store, budget="1GiB").torch_pi2.budget
    budget = parts.smallest + parts.in_slots(parts.neurons // 2)
    return torch_pi2.load(store, activations="int8", budget=budget)


def test_parts_of_a_quantised_model_hang_together(store: Path) -> None:
    found = explained(torch_pi2.load(store, activations="int8"), batch=2)
    assert [row.part for row in found.rows] == list(MEASURED)
    assert sum(row.predicted_ms for row in found.rows) == pytest.approx(found.predicted.total_ms)
    assert sum(row.measured_ms for row in found.rows) == pytest.approx(found.measured_ms, rel=0.5)
    assert all(row.measured_ms > 0 for row in found.rows if row.part != "glue")  # medians of parts may take all of it
    assert found.spread_ms[0] <= found.measured_ms <= found.spread_ms[1]
    assert found.ratio == pytest.approx(found.measured_ms / found.predicted.total_ms)
    assert found.measured_misses is None
    assert found.about["batch"] == found.predicted.batch == 2
    data = found.to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["measured_tokens_per_s"] == pytest.approx(2e3 / found.measured_ms)
    lines = render(found.to_json()).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*MEASURED, "step", "tokens/s"]
    assert lines[-1].startswith("ffn, predicted: hot ")


def test_a_model_with_too_few_positions() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    model.config.max_position_embeddings = 18  # 8 + 1 + 2 * 3 tokens, and 4 that attention is measured with
    with pytest.raises(ConfigError, match=r"explaining a plan with 15 tokens: expected at most 14: .* 18 positions"):
        explained(model)
    model.config.max_position_embeddings = 19
    assert explained(model).measured_ms > 0


def test_what_float_linears_take_is_with_the_rest() -> None:
    """The core's clock sees no layers of torch's own: they are in one row with what is left, on both sides."""
    found = explained(torch_pi2.optimize(tiny("llama-relu")))
    assert [row.part for row in found.rows] == ["sdpa", "predictor", "ffn", "attention + head + glue"]
    rest = found.rows[-1]
    assert rest.predicted_ms == pytest.approx(sum(found.predicted.ms[p] for p in ("attention", "head", "glue")))
    assert rest.measured_ms > 0
    predictor = found.rows[1]
    assert (predictor.measured_ms, predictor.ratio) == (0, None)
    assert "attention + head + glue" in render(found.to_json())


def test_over_a_store_misses_are_compared(half: nn.Module) -> None:
    found = explained(half, tokens=4)
    assert 0 < found.measured_misses < 2 * 1024
    assert found.predicted.misses > 0
    assert found.predicted.ms["io"] > 0
    store, _ = store_and_budget(half)
    assert found.predicted.memory["cold"] == store.stats()["cache_bytes"]
    assert "neurons read a step" in render(found.to_json())


def test_the_plan_that_layers_follow_is_predicted(half: nn.Module) -> None:
    plan: Plan = half.torch_pi2.plan
    sizes = [layer.site.intermediate for layer in plan.layers]
    bucket = Bucket(4, tuple(layer.n_hot for layer in plan.layers), (0,) * len(sizes), (5,) * len(sizes))
    hardware = HardwarePlan({}, None, 0, 64, (bucket,), PromptPlan((0,) * len(sizes)))
    planned = replace(plan, hardware=hardware)
    found = explained(half, planned)
    assert found.about["follows_plan"]
    assert found.predicted.layers[0]["resident_neurons"] == 5
    other = replace(bucket, hot=tuple(sizes))
    found = explained(half, replace(plan, hardware=replace(hardware, buckets=(other,))))
    assert not found.about["follows_plan"]  # layers do as they are set, and that is what is predicted
    assert found.predicted.layers[0]["hot_neurons"] == plan.layers[0].n_hot


def test_tokens_are_given_and_must_be_enough(half: nn.Module) -> None:
    needed = explained_tokens(2, 3, 1)
    ids_BT = torch.ones((2, needed), dtype=torch.int64)
    assert explained(half, ids_BT=ids_BT, batch=2).predicted.batch == 2
    with pytest.raises(ConfigError, match=rf"explain a plan with: expected \[2, {needed}\] or more, found \[2, 4\]"):
        explained(half, ids_BT=ids_BT[:, :4], batch=2)
