"""``ModelShape``: the sizes, formats and frequencies that are read from a model, in memory and over a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_fakes import fake_hardware, fake_stats
from shared import small_store
from tiny_models import tiny

import torch_pi2
from torch_pi2.errors import ConfigError, StaleArtifactError
from torch_pi2.planner.cost import step_ms
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.offload import OffloadConfig

HARDWARE = fake_hardware()


def test_shape_of_a_model_in_memory() -> None:
    model = tiny("llama-relu")
    size = sum(p.nbytes for p in model.parameters())
    data = torch.randint(0, 64, (24, 32), generator=torch.Generator().manual_seed(0))
    model = torch_pi2.optimize(model, data, torch_pi2.Config(method="exact"))
    parts = model.torch_pi2
    shape = ModelShape.of(model, parts.stats, parts.plan)
    layer = shape.layers[0]
    assert [y.key for y in shape.layers] == [y.site.key for y in parts.plan.layers]
    assert (layer.hidden, layer.intermediate, layer.rows, layer.neuron_bytes) == (32, 48, 3, 3 * 32 * 4)
    assert (layer.kernel, layer.attention_kernel, layer.method) == ("float32/float", "float32/float", "exact")
    assert layer.attention_bytes == 4 * (32 * 32 + 2 * 32 * 16 + 32 * 32)
    assert layer.kv_bytes == 2 * 2 * 8 * 4
    assert shape.head_bytes == 64 * 32 * 4
    neurons = sum(y.intermediate * y.neuron_bytes for y in shape.layers)
    assert 0 <= shape.fixed_bytes + neurons - size <= 1024  # and the rotary frequencies
    often_I = parts.stats[layer.key].frequency()[parts.plan.layers[0].order.long()]
    assert layer.frequency(1).tolist() == often_I.tolist()
    assert layer.base_hot == parts.plan.layers[0].n_hot


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "store"


def test_shape_of_a_model_over_a_store(store: Path) -> None:
    model = torch_pi2.load(store, activations="int8", budget="1GiB", context=100)
    plan, budget = model.torch_pi2.plan, model.torch_pi2.budget
    shape = ModelShape.of(model, fake_stats(plan), plan)
    layer = shape.layers[0]
    assert (layer.kernel, layer.predictor) == ("int4/int8", "int4/int8")
    made = shape.budget(budget.cache, batch=1, context=100, config=OffloadConfig())
    ours, theirs = ({**vars(b), "total": 0, "token": 0} for b in (made, budget))
    assert ours == theirs
    assert made.total <= budget.total
    in_memory = torch_pi2.load(store, activations="int8")
    whole = ModelShape.of(in_memory, fake_stats(plan), plan)
    assert whole.place_bytes == shape.place_bytes
    assert whole.fixed_bytes == pytest.approx(shape.fixed_bytes, rel=0.02)
    assert [y.predictor_bytes for y in whole.layers] == [y.predictor_bytes for y in shape.layers]
    assert whole.layers[0].recall == in_memory.torch_pi2.predictors[layer.key].card.recall


def test_shape_of_experts() -> None:
    from tiny_experts import build

    model = torch_pi2.optimize(build("Mixtral", hidden_act="relu"))
    plan = model.torch_pi2.plan
    shape = ModelShape.of(model, fake_stats(plan), plan)
    experts = shape.layers[0].experts
    first = [layer.attention_bytes > 0 for layer in shape.layers[: experts + 1]]
    assert first == [True] + [False] * (experts - 1) + [True]
    assert shape.layers[0].chosen == model.config.num_experts_per_tok / experts
    assert shape.layers[1].kv_bytes == 0
    hot = [0] * len(shape.layers)
    one, two = (step_ms(shape, HARDWARE, batch=b, hot=hot, context=64)["cold"] for b in (1, 2))
    assert one < two


def test_statistics_and_plan_must_be_the_models() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    plan = model.torch_pi2.plan
    with pytest.raises(StaleArtifactError, match="statistics to plan with: expected those of FFN weights"):
        ModelShape.of(model, replace(fake_stats(plan), model_hash="0" * 64), plan)
    fewer = replace(plan, layers=plan.layers[:1])
    with pytest.raises(ConfigError, match="expected a model with the 1 layers of its plan, found 2 layers"):
        ModelShape.of(model, fake_stats(plan), fewer)
    with pytest.raises(ConfigError, match="found none of model"):
        ModelShape.of(tiny("llama-relu"), fake_stats(plan), plan)


def test_layers_without_groups_of_tokens_have_their_counts() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    plan, stats = model.torch_pi2.plan, fake_stats(model.torch_pi2.plan)
    first = next(iter(stats))
    first.batch_groups[:] = 0
    layer: LayerShape = ModelShape.of(model, stats, plan).layers[0]
    assert [size for size, _ in layer.frequencies] == [1]
    assert layer.frequency(1)[0] == float(first.fired.double().max() / first.tokens)
    assert layer.frequency(2)[1] == pytest.approx(1 - (1 - layer.frequency(1)[1]) ** 2)
