"""What an accelerator's memory holds: the best choice of all, never a byte too many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import GPU, NPU, fake_hardware, fake_shape

from torch_pi2.errors import ConfigError
from torch_pi2.planner.cost import FFN_PARTS, ffn_ms
from torch_pi2.planner.for_machine import HOT_SHARES, choose, hot_count, solve
from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.planner.request import Request
from torch_pi2.types.plan import HardwarePlan


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), layers=st.integers(1, 4), share=st.floats(0.0, 1.1))
def test_the_choice_is_the_best_of_all(seed: int, layers: int, share: float) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 6, layers)
    sizes = [[int(n) * size for n in range(count)] for count, size in zip(counts, random.integers(1, 1000, layers))]
    costs = [random.uniform(0.5, 2.0, count).tolist() for count in counts]  # more is not always faster
    capacity = int(share * sum(line[-1] for line in sizes))
    picked = choose(costs, sizes, capacity)
    assert sum(line[n] for line, n in zip(sizes, picked, strict=True)) <= capacity
    fits = (p for p in itertools.product(*map(range, counts)) if sum(s[n] for s, n in zip(sizes, p)) <= capacity)
    best = min(sum(c[n] for c, n in zip(costs, p)) for p in fits)
    assert sum(c[n] for c, n in zip(costs, picked, strict=True)) <= best * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("neuron", [1, 6912, 48_384])
@pytest.mark.parametrize("chunks", [1, 31])
def test_a_capacity_is_hard_to_the_byte(neuron: int, chunks: int) -> None:
    sizes = [[512 * n * neuron for n in range(17)]] * 2
    costs = [np.linspace(2.0, 1.0, 17).tolist(), np.linspace(2.0, 1.5, 17).tolist()]
    for less, kept in ((0, chunks), (1, chunks - 1)):
        assert sum(choose(costs, sizes, chunks * 512 * neuron - less)) == kept


# --- a GPU, which has the rest of the model ---


def planned(shape: ModelShape, merge_us: float, chunks: int, **gpu: Any) -> HardwarePlan:
    hardware = fake_hardware(accelerator=replace(GPU, merge_us=merge_us, **gpu))
    nbytes = chunks * 512 * shape.layers[0].neuron_bytes
    return solve(Request(shape, hardware, accelerator_bytes=nbytes, batches=(1, 8), context=64))


@pytest.mark.parametrize("merge_us", [0.0, 500.0])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("method", ["lowrank", "exact"])
def test_a_plan_for_a_gpu_is_the_best_of_all(merge_us: float, chunks: int, method: str) -> None:
    shape, hardware = (
        fake_shape(3, intermediate=1536, method=method),
        fake_hardware(accelerator=replace(GPU, merge_us=merge_us)),
    )
    plan = planned(shape, merge_us, chunks)

    def ms(firsts: Sequence[int]) -> float:
        """The fastest steps with so many neurons there, of any hot counts that are tried."""
        total = 0.0
        for layer, first in zip(shape.layers, firsts, strict=True):
            for batch in (1, 8):
                hots = {max(first, hot_count(layer, batch, share, 512)) for share in HOT_SHARES}
                total += min(sum(ffn_ms(layer, hardware, batch, hot, first).values()) for hot in hots) / batch
        return total

    first = plan.buckets[0].accelerator
    assert {bucket.accelerator for bucket in plan.buckets} == {first}  # the same neurons at all batch sizes
    every = (f for f in itertools.product((0, 512, 1024, 1536), repeat=3) if sum(f) <= 512 * chunks)
    assert ms(first) <= min(map(ms, every)) * (1 + 1e-4)
    assert sum(b.ms[part] / b.batch for b in plan.buckets for part in FFN_PARTS) == pytest.approx(ms(first))


def test_dear_transfers_make_whole_layers_and_cheap_ones_spread() -> None:
    shape = fake_shape(4, intermediate=2048)
    assert sorted(planned(shape, 1000.0, 8).buckets[0].accelerator) == [0, 0, 2048, 2048]
    cheap = planned(shape, 0.0, 8).buckets[0].accelerator
    assert all(0 < count < 2048 for count in cheap)
    assert sum(cheap) == 4096


def test_a_transfer_is_paid_by_layers_with_neurons_on_the_cpu_once_a_call() -> None:
    layer, hardware = fake_shape(1, intermediate=1024).layers[0], fake_hardware(accelerator=replace(GPU, merge_us=7.0))
    for batch in (1, 8):
        merge = [ffn_ms(layer, hardware, batch, 1024, first)["merge"] for first in (0, 512, 1024)]
        assert merge == [0.007, 0.007, 0.0]


def test_a_gpu_reads_at_its_own_speed_and_quantised_rows_of_many_tokens_again() -> None:
    """Bytes share no bus, which here would be far slower."""
    hardware, numbers = fake_hardware(accelerator=replace(GPU, stream_gb_per_s=200.0)), 1024 * 3 * 256
    layer = fake_shape(1, intermediate=1024).layers[0]
    floats = replace(layer, kernel="bfloat16/float", neuron_bytes=2 * 3 * 256)
    for about, tokens, bits in ((layer, 6, 4.5), (layer, 7, 36.5), (floats, 1, 16), (floats, 9, 16)):
        whole = ffn_ms(about, hardware, tokens, 1024, 1024)
        assert whole["hot"] * 1e3 == pytest.approx(5 + numbers * bits / 8 / 200e3)


def test_a_gpu_without_memory_for_the_model_changes_no_plan() -> None:
    shape, beside = fake_shape(2, intermediate=1024), fake_hardware(accelerator=replace(GPU, merge_us=1000.0))
    plans = [solve(Request(shape, hardware, batches=(1, 4), context=64)) for hardware in (fake_hardware(), beside)]
    assert plans[0].buckets == plans[1].buckets


def test_what_a_gpu_has_is_in_the_cpus_memory_too() -> None:
    shape, gpu = fake_shape(2, intermediate=1024), fake_hardware(accelerator=GPU)
    whole = 4 * 512 * shape.layers[0].neuron_bytes
    request = Request(shape, gpu, accelerator_bytes=whole, batches=(1,), context=64)
    assert solve(request).buckets[0].accelerator == (1024, 1024)
    with pytest.raises(ConfigError, match="everything in memory, for batches to 1 of 64 tokens"):
        solve(replace(request, hardware=replace(gpu, memory_bytes=whole)))


# --- an NPU, which shares the CPU's memory ---


@pytest.mark.parametrize("stored", [False, True])
def test_an_npus_memory_is_shared_by_batch_sizes(stored: bool) -> None:
    shape = fake_shape(3, intermediate=2048, hidden=1024)
    hardware, neuron = fake_hardware(accelerator=NPU), shape.layers[0].neuron_bytes
    least = Request(shape, hardware, 0, batches=(1, 8), context=64).smallest()
    budget = least + shape.slots * shape.place_bytes // 2 if stored else None
    last = float("inf")
    for chunks in (0, 1, 3, 5, 12):
        for less in (0, 1):
            nbytes = 512 * chunks * neuron - (less if chunks else 0)
            plan = solve(Request(shape, hardware, budget, nbytes, (1, 8), 64))
            used = [max(b.accelerator[i] for b in plan.buckets) for i in range(3)]
            assert sum(used) * neuron <= nbytes
            assert all(n % 512 == 0 for n in used)
            if less == 0:
                total = sum(b.total_ms / b.batch for b in plan.buckets)
                assert stored or total <= last * (1 + 1e-9)
                last = total
    assert sum(used) > 0
