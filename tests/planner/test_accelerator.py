"""What an accelerator's memory holds: the best choice of all, never a byte too many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import FakeAccelerator, FakeHardware, fake_shape

from torch_pi2.errors import ConfigError
from torch_pi2.planner.accelerator import _most_frequent, choose
from torch_pi2.planner.choices import Space
from torch_pi2.planner.cost import step_cost
from torch_pi2.planner.layer_cost import TIMES, layer_curve
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.request import Task
from torch_pi2.planner.solve import solve
from torch_pi2.types.machine_plan import HardwarePlan


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), layers=st.integers(1, 4), room=st.floats(0.0, 1.1))
def test_the_choice_is_the_best_of_all(seed: int, layers: int, room: float) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 6, layers)
    sizes = [[int(n) * size for n in range(count)] for count, size in zip(counts, random.integers(1, 1000, layers))]
    costs = [random.uniform(0.5, 2.0, count).tolist() for count in counts]  # more is not always faster
    capacity = int(room * sum(line[-1] for line in sizes))
    picked = choose(costs, sizes, capacity)
    assert sum(line[n] for line, n in zip(sizes, picked, strict=True)) <= capacity
    fits = (p for p in itertools.product(*map(range, counts)) if sum(s[n] for s, n in zip(sizes, p)) <= capacity)
    best = min(sum(c[n] for c, n in zip(costs, p)) for p in fits)
    assert sum(c[n] for c, n in zip(costs, picked, strict=True)) <= best * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("neuron", [1, 432, 6912, 48_384])
@pytest.mark.parametrize("chunks", [1, 5, 31])
def test_a_capacity_is_hard_to_the_byte(neuron: int, chunks: int) -> None:
    sizes = [[512 * n * neuron for n in range(17)]] * 2
    costs = [np.linspace(2.0, 1.0, 17).tolist(), np.linspace(2.0, 1.5, 17).tolist()]
    for less, kept in ((0, chunks), (1, chunks - 1)):
        assert sum(choose(costs, sizes, chunks * 512 * neuron - less)) == kept


def test_layers_without_a_choice() -> None:
    assert choose([[1.0], [2.0]], [[0], [0]], 100) == [0, 0]
    assert choose([[1.0], [2.0, 1.0]], [[0], [0, 50]], 100) == [0, 1]


def test_no_solution_in_the_time_given() -> None:
    random = np.random.default_rng(0)
    sizes = [np.cumsum([0, *random.integers(1, 1000, 200)]).tolist() for _ in range(60)]
    costs = [random.uniform(size=201).tolist() for _ in range(60)]
    with pytest.raises(ConfigError, match="a solution in 0 seconds"):
        choose(costs, sizes, 100_000, seconds=0.0)


@pytest.mark.parametrize("less", [0, 1])
def test_the_most_frequent_fit(less: int) -> None:
    shape = fake_shape(3, intermediate=2048)
    room = 5 * 512 * shape.layers[0].neuron_bytes - less
    task = Task(shape, FakeHardware(accelerator=FakeAccelerator()), None, room, (1,))  # type: ignore[arg-type]
    space = Space(shape, task.hardware, (1,), accelerated=True)
    sizes = [[int(a) * layer.neuron_bytes for a in f] for layer, f in zip(shape.layers, space.firsts, strict=True)]
    picked = _most_frequent(task, space, sizes)
    assert sum(picked) == 5 - less
    chunks = sorted(
        (float(layer.frequency()[512 * n : 512 * n + 512].sum()) for layer in shape.layers for n in range(4)),
        reverse=True,
    )
    there = [
        float(layer.frequency()[512 * n : 512 * n + 512].sum())
        for layer, count in zip(shape.layers, picked, strict=True)
        for n in range(count)
    ]
    assert sorted(there, reverse=True) == pytest.approx(chunks[: 5 - less])


# --- a GPU, which has the rest of the model ---


def with_gpu(**changes: float) -> FakeHardware:
    """2000 GB/s, a hundred times as fast as the CPU, 5 us a call; ``merge_us``: to the CPU and back."""
    gpu = FakeAccelerator("gpu", launch_us=5.0, stream_gb_per_s=2000.0, shared_gb_per_s=1.0, holds_rest=True)
    return FakeHardware(accelerator=replace(gpu, **changes))  # type: ignore[arg-type]


def planned(shape: ModelShape, hardware: FakeHardware, chunks: int, batches: tuple[int, ...] = (1, 8)) -> HardwarePlan:
    room = chunks * 512 * shape.layers[0].neuron_bytes
    return solve(shape, hardware, accelerator_bytes=room, batches=batches, context=64)  # type: ignore[arg-type]


def ffn_ms(shape: ModelShape, hardware: FakeHardware, batch: int, first: tuple[int, ...]) -> float:
    """The fastest step with so many neurons there, of any hot counts: by looking at all of them."""
    total = 0.0
    for layer, count in zip(shape.layers, first, strict=True):
        hots = np.array([h for h in (0, *range(512, layer.intermediate + 1, 512)) if h >= count])
        curve = layer_curve(layer, hardware, batch, hots, accelerator=count)  # type: ignore[arg-type]
        total += float(sum(curve[part] for part in TIMES).min())
    return total


@pytest.mark.parametrize("merge_us", [0.0, 20.0, 500.0])
@pytest.mark.parametrize("chunks", [1, 4, 7])
@pytest.mark.parametrize("method", ["lowrank", "exact"])
def test_a_plan_for_a_gpu_is_the_best_of_all(merge_us: float, chunks: int, method: str) -> None:
    shape, hardware = fake_shape(3, intermediate=1536, method=method), with_gpu(merge_us=merge_us)
    plan = planned(shape, hardware, chunks)
    every = [f for f in itertools.product((0, 512, 1024, 1536), repeat=3) if sum(f) <= 512 * chunks]

    def ms(first: tuple[int, ...]) -> float:
        return sum(ffn_ms(shape, hardware, batch, first) / batch for batch in (1, 8))

    first = plan.buckets[0].accelerator
    assert {bucket.accelerator for bucket in plan.buckets} == {first}  # they are there whatever the batch
    assert ms(first) <= min(map(ms, every)) * (1 + 1e-4)
    found = sum(b.ms[part] / b.batch for b in plan.buckets for part in TIMES)
    assert found <= ms(first) * 1.011  # of counts within 1 % the fewest hot


def test_dear_transfers_make_whole_layers_and_cheap_ones_spread() -> None:
    shape = fake_shape(4, intermediate=2048)
    dear = planned(shape, with_gpu(merge_us=1000.0), 8).buckets[0].accelerator
    assert sorted(dear) == [0, 0, 2048, 2048]
    cheap = planned(shape, with_gpu(merge_us=0.0), 8).buckets[0].accelerator
    assert all(0 < count < 2048 for count in cheap)
    assert sum(cheap) == 4096


def test_a_transfer_is_paid_by_layers_with_neurons_on_the_cpu_once_a_call() -> None:
    shape, hardware = fake_shape(1, intermediate=1024), with_gpu(merge_us=7.0, stream_gb_per_s=200.0)
    for batch in (1, 8):
        curve = layer_curve(shape.layers[0], hardware, batch, 1024, accelerator=[0, 512, 1024])  # type: ignore[arg-type]
        assert curve["merge"].tolist() == [0.007, 0.007, 0.0]


def test_a_gpu_reads_at_its_own_speed_and_quantised_rows_of_many_tokens_again() -> None:
    """Bytes share no bus, which here would be far slower."""
    shape, hardware, numbers = fake_shape(1, intermediate=1024), with_gpu(stream_gb_per_s=200.0), 1024 * 3 * 256
    floats = replace(shape.layers[0], kernel="bfloat16/float", neuron_bytes=2 * 3 * 256)
    for layer, tokens, bits in (
        (shape.layers[0], 6, 4.5),
        (shape.layers[0], 7, 36.5),
        (floats, 1, 16),
        (floats, 9, 16),
    ):
        whole = layer_curve(layer, hardware, tokens, 1024, accelerator=1024)  # type: ignore[arg-type]
        assert whole["hot"][0] * 1e3 == pytest.approx(5 + numbers * bits / 8 / 200e3)


def test_a_gpu_without_memory_for_the_model_changes_no_plan() -> None:
    shape = fake_shape(2, intermediate=1024)
    without, beside = (
        solve(shape, hardware, batches=(1, 4), context=64)  # type: ignore[arg-type]
        for hardware in (FakeHardware(), with_gpu(merge_us=1000.0))
    )
    assert beside.to_json() == without.to_json()


def test_what_a_gpu_has_is_in_the_cpus_memory_too() -> None:
    shape, gpu = fake_shape(2, intermediate=1024), with_gpu()
    whole = 4 * 512 * shape.layers[0].neuron_bytes
    least = solve(shape, gpu, batches=(1,), context=64, accelerator_bytes=whole)  # type: ignore[arg-type]
    assert least.buckets[0].accelerator == (1024, 1024)
    cost = step_cost(shape, gpu, batch=1, hot=[1024] * 2, accelerator=[1024] * 2, context=64)  # type: ignore[arg-type]
    assert cost.memory["resident"] == cost.memory["accelerator"] == whole
    tight = replace(gpu, memory_bytes=whole)
    with pytest.raises(ConfigError, match="everything in memory, for batches to 1 of 64 tokens"):
        solve(shape, tight, batches=(1,), context=64, accelerator_bytes=whole)  # type: ignore[arg-type]
