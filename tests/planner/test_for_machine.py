"""Plans for a machine: budgets are obeyed, no simple plan is faster, and what cannot be is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_fakes import NPU, fake_hardware, fake_layer, fake_shape

from torch_pi2.errors import ConfigError
from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import resident_slots, step_ms, switch_point
from torch_pi2.planner.for_machine import hot_count, solve
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.planner.request import Request
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import HardwarePlan

QUICK = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
CONTEXT = 64
HARDWARE = fake_hardware()


def small(layers: int = 2, **changes: Any) -> ModelShape:
    return fake_shape(layers, **{"intermediate": 1024, "hidden": 128, **changes})


def request(shape: ModelShape, hardware: Hardware = HARDWARE, **asked: Any) -> Request:
    return Request(shape, hardware, **({"batches": (1,), "context": CONTEXT} | asked))


def budget_of(shape: ModelShape, share: float, batches: tuple[int, ...] = (1,)) -> int:
    """With so much of the neurons in the cache."""
    least = request(shape, budget_bytes=0, batches=batches).smallest()
    return least + int(share * shape.slots) * (shape.place_bytes + 64)


def checked(shape: ModelShape, plan: HardwarePlan) -> HardwarePlan:
    """Asserts what must hold for every plan."""
    sizes = [(y.key, y.base_hot, y.intermediate) for y in shape.layers]
    assert HardwarePlan.from_json(json.loads(json.dumps(plan.to_json())), sizes, "here").buckets  # as it is loaded
    for bucket in plan.buckets:
        stored = plan.budget_bytes is not None
        config = OffloadConfig(**plan.offload)
        step = step_ms(
            shape,
            HARDWARE,
            batch=bucket.batch,
            hot=bucket.hot,
            resident=bucket.resident,
            cache_bytes=bucket.cache_bytes if stored else None,
            context=plan.context,
            offload=config,
        )
        assert step == pytest.approx(bucket.ms)
        if plan.budget_bytes is not None:
            made = shape.budget(bucket.cache_bytes, batch=bucket.batch, context=plan.context, config=config)
            assert made.total <= plan.budget_bytes
            ranges = [resident_slots(layer, n, 0) for layer, n in zip(shape.layers, bucket.resident, strict=True)]
            assert sum(end - begin for begin, end in ranges) <= bucket.cache_bytes // shape.place_bytes
        else:
            assert bucket.cache_bytes == sum(bucket.resident) == 0
    return plan


def _fitting(layer: LayerShape) -> LayerShape:
    """A slot of a cluster, and every neuron hot if the layer is dense."""
    base, nbytes = (layer.intermediate if layer.method == "dense" else 0), layer.cluster * layer.neuron_bytes
    return replace(layer, base_hot=base, slot_bytes=-(-nbytes // 512) * 512)


SHAPES = st.builds(
    small,
    st.integers(1, 3),
    active=st.sampled_from([0.02, 0.1, 0.4]),
    method=st.sampled_from(["lowrank", "exact", "signbit", "threshold", "dense"]),
    intermediate=st.sampled_from([192, 1000, 1024]),
    cluster=st.sampled_from([1, 1, 4]),
).map(lambda s: replace(s, layers=tuple(_fitting(y) for y in s.layers)))


@QUICK
@given(SHAPES, st.floats(0, 1), st.sampled_from([(1,), (1, 4), (2, 16)]), st.booleans(), st.booleans())
def test_plans_obey_budgets_and_no_simple_plan_is_faster(shape, share, batches, stored, fixed) -> None:
    budget = budget_of(shape, share, batches) if stored else None
    asked = request(shape, budget_bytes=budget, batches=batches, fixed_hot_set=fixed)
    plan = checked(shape, solve(asked))
    for kind in (0.5, 0.0, 1.1):  # the most frequent, all, none
        if fixed:
            hots = [tuple(hot_count(layer, batches[0], kind) for layer in shape.layers)] * len(batches)
        else:
            hots = [tuple(hot_count(layer, batch, kind) for layer in shape.layers) for batch in batches]
        ms = [math.fsum(asked.step(b, hot).values()) for b, hot in zip(batches, hots, strict=True)]
        pairs = zip(plan.buckets, ms, strict=True)
        if fixed:
            assert sum(b.total_ms / b.batch for b in plan.buckets) <= 1.02 * sum(
                m / b for m, b in zip(ms, batches, strict=True)
            )
        else:
            assert all(bucket.total_ms <= 1.02 * other for bucket, other in pairs)
    if fixed:
        assert len({bucket.hot for bucket in plan.buckets}) == 1
    again = solve(request(shape, budget_bytes=budget, batches=batches, fixed_hot_set=fixed))
    assert json.dumps(again.to_json()) == json.dumps(plan.to_json())


def test_a_layer_is_read_whole_where_the_union_of_a_batch_is_large() -> None:
    """The rule that measured 1.98 (docs/RESULTS.md): 16 sequences over a store want nearly all of a layer."""
    shape = small(4, intermediate=4096, hidden=512, active=0.2)
    plan = solve(request(shape, budget_bytes=budget_of(shape, 0.5, (1, 16)), batches=(1, 16)))
    one, many = plan.buckets
    assert sum(one.hot) < 4096
    assert many.hot == (4096,) * 4
    slow = fake_hardware(drive=0.02, read_us=0.02)  # reads cost bytes alone: nothing is won by long ones
    few = small(4, intermediate=4096, hidden=512, active=0.01)
    assert sum(solve(request(few, slow, budget_bytes=budget_of(few, 0.5))).buckets[0].hot) < 4096


def test_usual_hot_neurons_are_preferred_to_a_small_gain() -> None:
    layer = fake_layer(intermediate=1024, hidden=4096, method="exact", base_hot=0)
    fires = np.concatenate((np.full(256, 0.51), np.full(768, 0.45)))
    shape = replace(small(1), layers=(replace(layer, frequencies=((1, fires),)),))
    level = fake_hardware(gather=20.0)  # gathered as fast as in runs: hot or cold is nearly the same
    assert solve(request(shape, level)).buckets[0].hot == (256,)
    always = replace(small(1), layers=(replace(layer, frequencies=((1, np.ones(1024)),)),))
    assert solve(request(always)).buckets[0].hot == (1024,)


def test_hot_counts() -> None:
    layer = fake_layer(intermediate=1000, base_hot=70)
    often = (layer.frequency(1) >= 0.2).sum()
    assert hot_count(layer, 1, 0.2) == often // 64 * 64 > 70
    assert hot_count(layer, 1, 0.2, 512) == 70
    assert hot_count(layer, 16, 0.2) > hot_count(layer, 1, 0.2)
    assert (hot_count(layer, 1, 0.0), hot_count(layer, 1, 1.1)) == (1000, 70)
    for fixed, count in (
        (fake_layer(method="dense", base_hot=4096), 4096),
        (fake_layer(method="threshold"), 0),
        (fake_layer(method="exact", chosen=0.25, experts=8), 0),
    ):
        assert {hot_count(fixed, 1, share) for share in (0.0, 0.5, 1.1)} == {count}


def test_steps_are_never_prompts() -> None:
    """Where a layer is dense from few tokens on, it still is not for as many as are decoded together."""
    shape = small(2, active=0.9, method="exact")
    for most in (1, 4, 64):
        plan = solve(request(shape, batches=(1, most)))
        at = [switch_point(HARDWARE, y, hot) for y, hot in zip(shape.layers, plan.buckets[-1].hot)]
        assert list(plan.prompt.dense_from) == [max(n, most + 1) if n else 0 for n in at]
    assert 65 in plan.prompt.dense_from


def test_reading_follows_the_drive() -> None:
    shape = small(2, hidden=1024)
    budget = budget_of(shape, 1.0)
    fast = solve(request(shape, budget_bytes=budget)).offload
    # a read costs 80 us / 32; 1 GB/s carries 2500 bytes in that time, less than a sector beside the slot itself
    assert (fast["io_threads"], fast["gap_bytes"]) == (32, 0)
    far = solve(request(shape, fake_hardware(read_us=1600.0), budget_bytes=budget)).offload
    assert far["gap_bytes"] > 16384  # 50 us a read: far neurons are read along
    assert far["run_bytes"] >= fast["run_bytes"]
    plan = solve(request(shape, fake_hardware(lanes=4, cores=3), budget_bytes=budget))
    assert plan.offload["in_flight"] == 4
    assert plan.threads == {"compute": 2, "io": 1}
    assert solve(request(shape)).threads == {"compute": 2, "io": 0}


# --- what cannot be ---


@QUICK
@given(SHAPES, st.sampled_from([(1,), (1, 16)]), st.integers(1, 4096))
def test_the_smallest_budget_that_is_named_is_enough(shape, batches, context) -> None:
    how: dict[str, Any] = {"batches": batches, "context": context}
    with pytest.raises(ConfigError, match=r"budget of 0\.0 MiB for batches to .* expected at least \d+ bytes") as info:
        solve(request(shape, budget_bytes=1, **how))
    named = int(str(info.value).split("at least ")[1].split(" bytes")[0])
    assert solve(request(shape, budget_bytes=named, **how)).budget_bytes == named
    with pytest.raises(ConfigError, match=f"at least {named} bytes"):
        solve(request(shape, budget_bytes=named - 1, **how))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batches": ()}, r"plan_for\(batches\): expected batch sizes of 1 or more"),
        ({"batches": (0, 1)}, r"batch sizes of 1 or more, found \(0, 1\)"),
        ({"batches": (1.5,)}, r"batch sizes of 1 or more, found \(1.5,\)"),
        ({"batches": ("1", True)}, r"batch sizes of 1 or more, found \('1', True\)"),
        ({"context": 0}, r"plan_for\(context\): expected 1 or more tokens, found 0"),
        ({"accelerator_bytes": -1}, r"plan_for\(accelerator_memory\): expected 0 or more bytes"),
        ({"accelerator_bytes": 1}, "expected 0 bytes, found fake, which has no accelerator"),
        (
            {"accelerator_bytes": 1001, "hardware": fake_hardware(accelerator=replace(NPU, memory_bytes=1000))},
            "expected at most 1000 bytes, which fake npu has, found more",
        ),
    ],
)
def test_settings_that_make_no_sense(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve(request(small(1), **how))


def test_more_than_the_machine_has() -> None:
    shape = small(2)
    budget = budget_of(shape, 1.0)
    tight = fake_hardware(memory_bytes=budget, accelerator=NPU)
    how: dict[str, Any] = {"budget_bytes": budget, "accelerator_bytes": 512}
    assert solve(request(shape, tight, budget_bytes=budget)).budget_bytes == budget
    message = f"accelerator memory of 512 bytes, .* at most {budget} bytes, which fake has"
    with pytest.raises(ConfigError, match=message):
        solve(request(shape, tight, **how))
    with pytest.raises(ConfigError, match=f"budget of {budget} bytes: expected at most {budget - 1} bytes, which fake"):
        solve(request(shape, replace(tight, memory_bytes=budget - 1), budget_bytes=budget))
    # without a budget: what is predicted for the largest batch
    parts = shape.budget(0, batch=4, context=CONTEXT, config=OffloadConfig())
    needs = parts.fixed + parts.predictors + parts.kv + sum(y.intermediate * y.neuron_bytes for y in shape.layers)
    assert solve(request(shape, fake_hardware(memory_bytes=needs), batches=(1, 4))).budget_bytes is None
    with pytest.raises(ConfigError, match=f"for batches to 4 of {CONTEXT} tokens: expected at most {needs - 1} bytes"):
        solve(request(shape, fake_hardware(memory_bytes=needs - 1), batches=(1, 4)))
