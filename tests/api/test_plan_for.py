"""``plan_for`` and what follows a plan from there: optimise, save, load, pack, store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny
from torch import nn

import torch_pi2
from torch_pi2 import errors
from torch_pi2.decode.plan_controller import controller_of
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.machine.find import find_hardware
from torch_pi2.store.parts import Parts
from torch_pi2.types.plan import Plan

PRESET = "sm8650-ufs4.0"
IDS = torch.randint(VOCAB, (64, 24), generator=torch.Generator().manual_seed(0))
CONFIG = torch_pi2.Config(method="exact", calibration_tokens=1500)


def optimized(**how: Any) -> nn.Module:
    return torch_pi2.optimize(tiny("llama-relu"), IDS, CONFIG, **how)


def logits(model: nn.Module, batch: int = 1) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS[:batch, :1]).logits
    return found


def stats_of(folder: Path) -> Any:
    """How often the neurons of a packed model fire."""
    with Parts(folder / "pi2") as parts:
        return parts.stats()


def test_an_optimised_model_follows_the_plan_of_its_machine(tmp_path: Path) -> None:
    plain, planned = optimized(), optimized(hardware=PRESET)
    plan = planned.torch_pi2.plan
    assert plan.hardware is not None
    assert plan.hardware.made_for["hardware"] == find_hardware(PRESET).name
    assert [b.batch for b in plan.hardware.buckets] == [1, 2, 4, 8, 16]
    engine = controller_of(planned)
    assert engine is not None
    assert engine.plan is plan.hardware
    for batch in (1, 4, 16):
        engine.batch(batch)  # calls of the model alone do not say how many sequences there are
        assert torch.equal(logits(planned, batch), logits(plain, batch))  # the exact gate: every plan has the same bits
        assert engine.bucket.batch == batch
    folder = torch_pi2.save(planned, tmp_path / "m")
    loaded = torch_pi2.load(folder)
    assert loaded.torch_pi2.plan.to_json() == plan.to_json()
    assert controller_of(loaded) is not None
    assert torch.equal(logits(loaded, 4), logits(plain, 4))


def test_a_store_follows_the_plan_of_its_budget(tmp_path: Path) -> None:
    torch_pi2.save(optimized(), tmp_path / "m")
    torch_pi2.pack(tmp_path / "m", tmp_path / "s", cluster=1)
    how: dict[str, Any] = {"batches": (1, 2, 4), "context": 64}
    whole = torch_pi2.load(tmp_path / "s", budget="1GB", context=64)
    wanted = {batch: logits(whole, batch) for batch in how["batches"]}
    with pytest.raises(errors.ConfigError, match=r"expected at least \d+ bytes") as caught:
        torch_pi2.plan_for(whole, PRESET, budget=1000, **how)
    least = int(caught.value.expected.split()[2])  # with the plan's settings
    parts = torch_pi2.stats(whole)["budget"]
    room = least + parts.in_slots(parts.neurons // 2)
    plan = torch_pi2.plan_for(whole, PRESET, budget=room, **how)  # with the statistics of its folder
    given = torch_pi2.plan_for(whole, PRESET, budget=room, stats=stats_of(tmp_path / "s"), **how)
    assert given.to_json() == plan.to_json()
    hardware = plan.hardware
    assert hardware is not None
    assert hardware.bucket(4).cache_bytes == parts.neurons // 2 < hardware.bucket(1).cache_bytes
    assert hardware.bucket(4).resident < hardware.bucket(1).resident
    plan.save(tmp_path / "plan")
    model = torch_pi2.load(tmp_path / "s", budget=room, plan=tmp_path / "plan", context=64)
    assert torch_pi2.stats(model)["store"].config.policy == hardware.offload["policy"]
    for batch in (1, 4, 2, 1):
        model.torch_pi2.controller.batch(batch)
        assert torch.equal(logits(model, batch), wanted[batch])
        stats = torch_pi2.stats(model)
        assert stats["cache_bytes"] == hardware.bucket(batch).cache_bytes
        assert stats["store"].resident == hardware.bucket(batch).resident


def test_fewer_hot_neurons_than_the_first_plan_has() -> None:
    """Without a predictor there are no rows that would be missing."""
    model = torch_pi2.optimize(tiny("llama-relu"), IDS, torch_pi2.Config(method="exact", hot_frequency=0.1))
    assert min(layer.n_hot for layer in sparse_layers(model)) > 0
    before = logits(model)
    plan = torch_pi2.plan_for(model, PRESET)
    hot = plan.hardware
    assert hot is not None
    fewest = [min(b.hot[i] for b in hot.buckets) for i in range(len(plan.layers))]
    assert [layer.n_hot for layer in plan.layers] == fewest
    torch_pi2.follow(model, plan)
    assert torch.equal(logits(model), before)


def test_plans_are_the_same_each_time(tmp_path: Path) -> None:
    model = optimized()
    one, two = (torch_pi2.plan_for(model, PRESET, batches=(1, 4)) for _ in range(2))
    assert one.to_json() == two.to_json()
    one.save(tmp_path)
    assert Plan.load(tmp_path).to_json() == one.to_json()


def test_what_cannot_be_planned_is_said() -> None:
    bare = torch_pi2.optimize(tiny("llama-relu"))
    with pytest.raises(errors.CalibrationError, match=r"statistics: how often neurons fire.*pass its statistics"):
        torch_pi2.plan_for(bare, PRESET)
    model = tiny("llama-relu")
    with pytest.raises(errors.CalibrationError, match=r"optimize\(hardware=.*calibration data or statistics"):
        torch_pi2.optimize(model, hardware=PRESET)
    with pytest.raises(errors.ConfigError, match=r"sm8650-ufs4\.0"):
        torch_pi2.optimize(model, IDS, CONFIG, hardware="sm9999")
    assert not sparse_layers(model)
    with pytest.raises(errors.ConfigError, match="at least"):
        torch_pi2.plan_for(optimized(), PRESET, budget=1000)
