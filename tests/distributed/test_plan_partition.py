"""How a model is partitioned among machines: by hand, and against every other partition."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_fakes import fake_hardware, fake_shape
from sharding import together

from torch_pi2.distributed.partition import partition_layers, partition_neurons
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.link import Link
from torch_pi2.measure.link import measure_link
from torch_pi2.planner.group import (
    Member,
    PartitionPlan,
    Task,
    neurons_of,
    plan_partition,
    read_machines,
    stage_of,
)
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.request import Request

FAST = Link(1e9, 0.0)


def member(budget: int | None = None, **rates: Any) -> Member:
    return Member(fake_hardware(**rates), budget)


def alone(shape: ModelShape, machine: Member, context: int = 64) -> float:
    request = Request(shape, machine.hardware, machine.budget_bytes, batches=(1,), context=context)
    return request.cost(1, tuple(layer.base_hot for layer in shape.layers)).total_ms


def least(shape: ModelShape) -> int:
    return Request(shape, fake_hardware(), 0, batches=(1,), context=64).smallest()


def by_way(plans: list[PartitionPlan]) -> dict[str, PartitionPlan]:
    return {plan.way: plan for plan in plans}


def predicted(
    way: str, shares: tuple[int, ...], shape: ModelShape, members: list[Member], link: Link
) -> PartitionPlan | None:
    task = Task(shape, tuple(members), link, context=64)
    return task.by_layers(shares) if way == "layers" else task.by_neurons(way, shares)


def test_machines_that_are_alike_get_as_much() -> None:
    shape = fake_shape(8)
    found = by_way(plan_partition(shape, [member()] * 2, FAST, context=64))
    assert {way: plan.shares for way, plan in found.items()} == {
        "chunks": (8, 8),
        "ranks": (8, 8),
        "layers": (4, 4),
    }
    assert found["layers"].ms == pytest.approx(alone(shape, member()))  # one after another, in memory
    assert alone(shape, member()) / 2 < found["chunks"].ms < alone(shape, member())
    assert [plan.ms for plan in plan_partition(shape, [member()] * 2, FAST, context=64)] == sorted(
        plan.ms for plan in found.values()
    )


def test_the_link_by_hand() -> None:
    shape = fake_shape(3)
    link = Link(8.0, 50.0)  # a byte takes a microsecond
    for way, each in (("chunks", 4 * 256 * 4), ("ranks", 4 * 256)):
        plan = predicted(way, (4, 4, 4, 4), shape, [member()] * 4, link)
        assert plan is not None
        logits = 2 * (50 + 4 * 1000)
        assert plan.link_ms == pytest.approx((3 * 3 * (50 + each) + logits) / 1e3)
        assert plan.sent_bytes == 3 * each
    stages = predicted("layers", (1, 1, 1), shape, [member()] * 3, link)
    assert stages is not None
    assert stages.link_ms == pytest.approx((2 * (50 + 256 * 4) + 2 * (50 + 4 * 1000)) / 1e3)
    assert stages.ms - stages.link_ms == pytest.approx(alone(shape, member()), rel=1e-4)  # of blocks that are alike


def test_a_layer_waits_for_the_slowest() -> None:
    shape = fake_shape(4)
    slow = member(run=5.0, gather=2.5)
    found = by_way(plan_partition(shape, [member(), slow], FAST, context=64))
    fast_chunks, slow_chunks = found["ranks"].shares
    assert fast_chunks > 2 * slow_chunks
    assert sum(found["ranks"].shares) == 16
    assert found["layers"].shares == (3, 1)  # each machine has one at least
    for count in range(1, 16):
        other = predicted("ranks", (count, 16 - count), shape, [member(), slow], FAST)
        assert other is not None
        assert found["ranks"].ms <= other.ms + 1e-9


def test_no_other_cut_into_stages_is_faster() -> None:
    shape = fake_shape(7)
    room = least(shape)
    members = [member(room + 400_000), member(room + 3_000_000), member(room + 1_000_000, run=15.0)]
    best = by_way(plan_partition(shape, members, FAST, context=64))["layers"]
    for ends in itertools.combinations(range(1, 7), 2):
        cut = (ends[0], ends[1] - ends[0], 7 - ends[1])
        other = predicted("layers", cut, shape, members, FAST)
        assert other is not None
        assert best.ms <= 1.001 * other.ms, cut
    assert best.shares[1] == max(best.shares)  # what has memory for most


def test_more_memory_in_all_is_what_machines_are_for() -> None:
    shape = fake_shape(8)
    every = shape.slots * shape.place_bytes
    machine = member(least(shape) + every // 2)
    found = plan_partition(shape, [machine] * 2, FAST, context=64)
    assert alone(shape, machine) / found[0].ms > 1.5
    for plan in found:
        assert all(one["in_memory"] > 0.95 for one in plan.members), plan
        assert all(one["memory_bytes"] <= machine.budget_bytes for one in plan.members)


def test_a_machine_with_room_for_few_neurons_gets_few() -> None:
    """What a neuron takes besides its cache, of its predictor and of tables, decides how many there can be."""
    shape = fake_shape(8)
    small = member(least(neurons_of(shape, 2)))
    assert predicted("ranks", (3, 13), shape, [small, member()], FAST) is None
    found = by_way(plan_partition(shape, [small, member()], FAST, context=64))
    assert found["ranks"].shares[0] <= 2


def test_parts_have_what_they_say() -> None:
    shape = fake_shape(6, method="exact", base_hot=64)
    part = neurons_of(shape, 4)
    assert {layer.intermediate for layer in part.layers} == {1024}
    assert {layer.base_hot for layer in part.layers} == {16}
    for layer, whole in zip(part.layers, shape.layers, strict=True):
        assert np.mean(layer.frequency()) == pytest.approx(np.mean(whole.frequency()), rel=0.01)
    stage = stage_of(shape, 2, 4, head=False)
    assert stage.layers == shape.layers[2:4]
    assert stage.head_bytes == 0
    assert stage.fixed_bytes == shape.fixed_bytes - 4 * shape.layers[0].attention_bytes
    with_rank = neurons_of(fake_shape(1), 8).layers[0]
    assert with_rank.predictor_bytes == round(32 * (256 + 2048) * 9 / 16)


def test_experts_are_added_by_machine() -> None:
    whole = fake_shape(4, method="exact", predictor=None, chosen=0.5)
    experts = replace(
        whole,
        layers=tuple(replace(layer, experts=2, block=i % 2 == 0) for i, layer in enumerate(whole.layers)),
    )
    found = by_way(plan_partition(experts, [member()] * 2, Link(8.0, 50.0), context=64))
    assert {*found} == {"ranks", "layers"}
    assert found["ranks"].link_ms == pytest.approx((2 * (50 + 4 * 256) + 50 + 4 * 1000) / 1e3)
    assert found["layers"].shares == (1, 1)


def test_impossible_partitions_are_refused() -> None:
    shape = fake_shape(2)
    for members, link in (([member()], FAST), ([member()] * 65, FAST), ([member()] * 2, Link(0, 1))):
        with pytest.raises(ConfigError, match="expected 2 to 64 machines, a link of more than 0 Mbit/s"):
            plan_partition(shape, members, link)
    with pytest.raises(ConfigError, match=r"memory of 2 machines: expected room on each of them .*, found 1 MiB, any"):
        plan_partition(shape, [member(1 << 20), member()], FAST)
    assert {plan.way for plan in plan_partition(shape, [member()] * 3, FAST)} == {"chunks", "ranks"}  # two blocks
    assert {d.way for d in plan_partition(fake_shape(17), [member()] * 17, FAST)} == {"layers"}  # 16 chunks of neurons
    assert predicted("ranks", (8, 8), shape, [member(), member(1)], FAST) is None
    assert predicted("layers", (1, 1), shape, [member(), member(1)], FAST) is None


@pytest.mark.parametrize("shares", [(3, 13), (5, 4, 7), (1, 1, 14)])
def test_pack_makes_the_planned_partition(shares: tuple[int, ...]) -> None:
    """The shares that ``plan --machines`` prints are those that ``pack --shares`` makes."""
    from torch_pi2.types.plan import LayerPlan, Plan
    from torch_pi2.types.site import FFNSite, LinearRef

    def layer(i: int) -> LayerPlan:
        refs = LinearRef(f"l.{i}.up"), LinearRef(f"l.{i}.down")
        site = FFNSite(f"l.{i}.mlp", i, "relu", False, None, *refs, 8, 1024, f"l.{i}.mlp")
        return LayerPlan(site, "lowrank", 0, torch.arange(1024, dtype=torch.int32), expected_active=0.1)

    plan = Plan([layer(i) for i in range(16)], "ab")
    assert (
        tuple(len(shard.layers["l.0.mlp"].chunks) for shard in partition_neurons(plan, len(shares), shares)) == shares
    )
    assert tuple(len(shard.blocks(16)) for shard in partition_layers(plan, len(shares), shares)) == shares


def test_a_description_of_machines(tmp_path: Path) -> None:
    replace(find_hardware("sm8650-ufs4.0"), name="mine").save(tmp_path / "mine.json")
    about: dict[str, Any] = {
        "machines": [{"hardware": "mine.json", "budget": "1GiB"}, {"hardware": "sm8475-ufs3.1"}],
        "link": {"mbit_per_s": 1000, "exchange_us": 200},
    }

    def read(**changes: Any) -> tuple[list[Member], Link]:
        (tmp_path / "machines.json").write_text(json.dumps(about | changes))
        return read_machines(tmp_path / "machines.json")

    members, link = read()
    assert [(one.hardware.name, one.budget_bytes) for one in members] == [("mine", 1 << 30), ("sm8475-ufs3.1", None)]
    assert link == Link(1000, 200)
    for changes, expected in (
        ({"machines": about["machines"][:1]}, "machines: expected a list of 2 or more, at most 64"),
        ({"machines": [{"budget": "1GiB"}] * 2}, "expected a field hardware, found none"),
        ({"machines": [{"hardware": "sm8475-ufs3.1", "memory": 1}] * 2}, "no other fields than hardware, budget"),
        ({"link": {"mbit_per_s": 0, "exchange_us": 1}}, "link, mbit_per_s: expected a number, above 0"),
        ({"link": {"mbit_per_s": 1}}, "expected a field exchange_us"),
        ({"more": 1}, "no other fields than machines, link"),
    ):
        with pytest.raises(ArtifactError, match=expected):
            read(**changes)
    with pytest.raises(ConfigError, match="no-such"):
        read(machines=[{"hardware": "no-such"}] * 2)
    with pytest.raises(ArtifactError, match="nowhere"):
        read_machines(tmp_path / "nowhere.json")


@pytest.mark.slow
def test_a_link_is_measured(tmp_path: Path) -> None:
    script = """
from torch_pi2.measure.link import measure_link
from torch_pi2.observe import timings
found = measure_link()
print(found.mbit_per_s, found.exchange_us, sum(row[3] for row in timings.read() if row[0] == timings.LINEAR))
dist.destroy_process_group()
"""
    first, second, third = together(tmp_path, script, 3)
    assert first == second == third
    rate, exchange_us, calls = map(float, first.split())
    assert calls > 20  # something is computed before each of the exchanges
    assert 10 < rate < math.inf
    assert 0 <= exchange_us < 1e6
    with pytest.raises(ConfigError, match="a link to measure: expected at least two processes, found one"):
        measure_link()
