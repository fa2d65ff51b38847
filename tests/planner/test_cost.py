"""The cost model: each term by hand, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_fakes import GB, NPU, fake_hardware, fake_layer, fake_shape

from torch_pi2.machine.hardware import Hardware
from torch_pi2.planner.cost import (
    PARTS,
    cold_neurons,
    expected_misses,
    expert_use,
    ffn_ms,
    predicted_share,
    prompt_ffn_ms,
    reads,
    resident_slots,
    step_ms,
    switch_point,
)
from torch_pi2.planner.model_shape import ModelShape, numbers
from torch_pi2.types.offload import OffloadConfig

HARDWARE = fake_hardware()
PHONE = fake_hardware(accelerator=NPU)
#: Two neurons of three rows of 32 floats: few enough to add up by hand.
PLAIN: dict[str, Any] = {
    "hidden": 32,
    "intermediate": 4,
    "rows": 3,
    "neuron_bytes": 384,
    "slot_bytes": 512,
    "kernel": "float32/float",
    "attention_kernel": "float32/float",
    "attention_bytes": 4 * 32 * 32 * 4,
    "kv_bytes": 256,
    "method": "exact",
    "frequencies": (
        (1, np.array([1.0, 0.5, 0.25, 0.0])),
        (2, np.array([1.0, 0.75, 0.5, 0.0])),
        (4, np.array([1.0, 1.0, 0.75, 0.0])),
    ),
}


def step(shape: ModelShape, hot: int = 0, hardware: Hardware = HARDWARE, **how: Any) -> dict[str, float]:
    return step_ms(shape, hardware, hot=[hot] * len(shape.layers), **({"batch": 1, "context": 64} | how))


def cache(shape: ModelShape, share: float) -> int:
    return int(share * shape.slots) * shape.place_bytes


def misses(shape: ModelShape, batch: int, slots: int, hot: int = 0, first: int = 0, resident: int = 0) -> np.ndarray:
    count = len(shape.layers)
    return expected_misses(shape, batch, slots, [resident] * count, [hot] * count, [first] * count)


# --- neurons ---


def test_an_exact_layer_by_hand() -> None:
    layer, row = fake_layer(**PLAIN), 128
    ms = ffn_ms(layer, HARDWARE, 1, 1)
    # neuron 0 in a run; gates of 1 to 3, up and down of 0.5 + 0.25 of them
    hot_bytes, gathered = 384, 3 * row + 0.75 * 2 * row
    pairs = 2 + 1.0 + 3 + 0.75 + 0.75  # gate, up and down of 0; gates; ups; downs
    us = 2.0 + hot_bytes / (20 * GB) + gathered / (10 * GB) + pairs * 32 / 100e3
    assert ms["predictor"] == ms["merge"] == 0
    assert ms["hot"] + ms["cold"] == pytest.approx(us / 1e3)
    assert ms["hot"] / ms["cold"] == pytest.approx(hot_bytes / gathered)
    assert cold_neurons(layer, 1, 1) == 3  # the gates of all are read
    two = ffn_ms(layer, HARDWARE, 2, 0)
    gathered, pairs = 4 * row + (1 + 0.75 + 0.5) * 2 * row, 2 * (4 + 2 * 1.75)
    assert two["cold"] * 1e3 == pytest.approx(2 + gathered / (10 * GB) + pairs * 32 / 100e3)
    whole = ffn_ms(layer, HARDWARE, 1, 4)
    assert whole["hot"] * 1e3 == pytest.approx(2 + 4 * 384 / (20 * GB) + (8 + 1.75) * 32 / 100e3)
    assert whole["cold"] == cold_neurons(layer, 1, 4) == 0


def test_a_predicted_layer_by_hand() -> None:
    layer = fake_layer(**PLAIN | {"method": "lowrank"}, predictor="int8/float", rank=8, recall=0.9)
    layer = replace(layer, predictor_bytes=8 * (32 + 4) * 4, predicted_active=0.5, base_hot=1)
    # of neurons 1 to 3, 0.75 fire: q (3 - 0.75) + 0.9 * 0.75 = 1.5
    q = (1.5 - 0.9 * 0.75) / 2.25
    share_4 = predicted_share(layer, 1)
    assert share_4[1:] == pytest.approx([0.45 + q * 0.5, 0.225 + q * 0.75, q])
    assert share_4[1:].mean() == pytest.approx(0.5)
    ms = ffn_ms(layer, HARDWARE, 1, 2)
    predicted = 0.225 + q * 0.75 + q
    assert ms["predictor"] * 1e3 == pytest.approx(2 + 8 * (32 + 2) * 4 / (20 * GB))
    assert cold_neurons(layer, 1, 2) == pytest.approx(predicted)
    pairs = 2 * 2 + 1.5 + 2 * predicted + 0.9 * 0.25
    us = 2 + 2 * 384 / (20 * GB) + predicted * 384 / (10 * GB) + pairs * 32 / 100e3
    assert ms["hot"] + ms["cold"] == pytest.approx(us / 1e3)
    all_hot = ffn_ms(layer, HARDWARE, 1, 4)
    assert all_hot["predictor"] == all_hot["cold"] == 0


def test_several_tokens_ask_for_more_but_not_for_all_of_each() -> None:
    layer = fake_layer()
    one, four = predicted_share(layer, 1), predicted_share(layer, 4)
    assert (one <= four).all()
    assert (four <= np.minimum(1, 4 * one + 1e-12)).all()
    # tokens that want the same share its reads: neurons fire for all of four tokens or for none
    same = replace(layer, frequencies=((1, layer.frequency(1)), (4, layer.frequency(1))), predicted_active=0.0)
    assert predicted_share(same, 4) == pytest.approx(layer.frequency(1) * (1 - 0.05**4))


def test_neurons_without_exact_zeros_are_used_when_they_are_computed() -> None:
    free = fake_hardware(call_us=0.0, macs_per_us=1e15)
    exact = fake_layer(**PLAIN, exact_zeros=False)
    assert ffn_ms(exact, free, 1, 0)["cold"] * 10e6 == pytest.approx(4 * 384)
    threshold = replace(exact, method="threshold")
    assert ffn_ms(threshold, free, 1, 0)["cold"] * 10e6 == pytest.approx(4 * 128 + 1.75 * 256)


def test_an_expert_has_its_share_of_tokens_and_of_the_call() -> None:
    assert expert_use(fake_layer(), 4) == (1, 4)
    layer = fake_layer(chosen=0.25, experts=8)
    use, tokens = expert_use(layer, 2)
    assert use == pytest.approx(1 - 0.75**2)
    assert use * tokens == pytest.approx(2 * 0.25)
    free, paid = (ffn_ms(layer, hardware, 1, 0)["cold"] for hardware in (fake_hardware(call_us=0.0), HARDWARE))
    assert 8 * (paid - free) == pytest.approx(2 / 1e3)  # eight experts: one call of 2 us


def test_frequencies_of_other_batches() -> None:
    layer = fake_layer(**PLAIN)
    assert layer.frequency(2).tolist() == [1, 0.75, 0.5, 0]
    between = 0.75 + 0.25 * math.log2(3 / 2)
    assert layer.frequency(3).tolist() == pytest.approx([1, between, 0.5 + 0.25 * math.log2(3 / 2), 0])
    assert layer.frequency(8).tolist() == pytest.approx([1, 1, 1 - 0.25**2, 0])
    assert layer.frequency(1.0).tolist() == [1, 0.5, 0.25, 0]


def test_an_accelerator_hides_the_cpu_or_the_other_way_round() -> None:
    layer, rows = fake_layer(hidden=1024), {"hidden": 1024, "rows": 3, "weight_bits": 4.5}
    assert ffn_ms(layer, PHONE, 1, 1024) == ffn_ms(layer, HARDWARE, 1, 1024)
    both = ffn_ms(layer, PHONE, 1, 1024, 1024)
    theirs = NPU.ffn_us(batch=1, neurons=1024, **rows) / 1e3
    assert both["hot"] == pytest.approx(max(0, theirs - both["predictor"] - both["cold"]))
    assert both["merge"] == NPU.merge_us / 1e3
    everything = ffn_ms(layer, PHONE, 1, 4096, 4096)
    assert everything["cold"] == everything["predictor"] == 0
    assert everything["hot"] == pytest.approx(NPU.ffn_us(batch=1, neurons=4096, **rows) / 1e3)
    # memory that both share is the limit where each alone would be faster
    slow = ffn_ms(layer, fake_hardware(accelerator=replace(NPU, shared_gb_per_s=5.0)), 1, 4096, 4096)
    assert slow["hot"] == pytest.approx(4096 * layer.neuron_bytes / (5 * GB) / 1e3)


# --- attention, head, prompts ---


def test_the_rest_by_hand() -> None:
    shape = fake_shape(2)
    first, second = shape.layers
    inner = replace(second, attention_bytes=0, kv_bytes=0)  # not the first of its block
    made = step(replace(shape, layers=(first, inner)), batch=3, context=10)
    assert tuple(made) == PARTS
    assert numbers("int4/int8", first.attention_bytes) == 4 * 256 * 256
    bytes_read = first.attention_bytes + 3 * 10 * first.kv_bytes + shape.head_bytes
    assert made["rest"] == pytest.approx((2 * 2 + bytes_read / 20e3) / 1e3)


def test_where_dense_begins_to_win() -> None:
    shape = fake_shape(1)
    layer = shape.layers[0]
    at = switch_point(HARDWARE, layer, 0)

    def dense_wins(tokens: int) -> bool:
        dense, sparse = (prompt_ffn_ms(layer, HARDWARE, tokens, hot) for hot in (4096, 0))
        return dense <= sparse

    assert at == 32  # where the machine multiplies faster
    assert [dense_wins(tokens) for tokens in (28, 32, 64, 512)] == [False, True, True, True]
    assert switch_point(fake_hardware(run=0.01), layer, 0) == 0
    busy = fake_shape(1, active=0.9)
    assert switch_point(HARDWARE, busy.layers[0], 0) < at


# --- the cache and the drive ---


def test_the_cache_has_what_is_wanted_most() -> None:
    layer = fake_layer(**PLAIN, base_hot=0)
    layer = replace(layer, method="signbit", predictor="signbit", predicted_active=0.4375, recall=1.0)
    shape = replace(fake_shape(1), layers=(layer,))
    assert predicted_share(layer, 1).tolist() == pytest.approx([1, 0.5, 0.25, 0])
    assert [float(misses(shape, 1, n)[0]) for n in range(5)] == pytest.approx([1.75, 0.75, 0.25, 0, 0])
    assert misses(shape, 1, 1, hot=2)[0] == pytest.approx(1.25)  # hot ones are wanted in every step
    assert misses(shape, 1, 1, hot=2, first=2)[0] == 0  # the accelerator's in none
    assert misses(shape, 1, 2, resident=2)[0] == pytest.approx(0.25)
    pairs = replace(shape, layers=(replace(layer, cluster=2),))
    assert float(misses(pairs, 1, 0)[0]) == pytest.approx(1 + 0.25)  # any of a slot's neurons
    assert resident_slots(pairs.layers[0], 3, 0) == (0, 2)


def test_equally_wanted_neurons_share_the_cache() -> None:
    shape = fake_shape(3, intermediate=1024, method="exact")  # every gate is wanted
    assert misses(shape, 1, 1024).tolist() == pytest.approx([2048 / 3] * 3)


def read(shape: ModelShape, missed: float, wanted: float, **settings: Any) -> tuple[float, float, float]:
    """Of the first layer: reads, and milliseconds for cold neurons and hot ones."""
    return reads(shape, shape.layers[0], HARDWARE, missed, wanted, 0, OffloadConfig(**settings))


def test_reads_by_hand() -> None:
    layer = fake_layer(slot_bytes=4096, stored_bytes=4096)
    shape = replace(fake_shape(1), layers=(layer,))
    apart = {"gap_bytes": 0, "run_bytes": 4096, "io_threads": 16, "in_flight": 8}
    missed = float(misses(shape, 1, shape.slots // 2)[0])
    count, cold_ms, hot_ms = read(shape, missed, cold_neurons(layer, 1, 0), **apart)
    assert count == pytest.approx(missed)  # none is near another
    assert (cold_ms, hot_ms) == (pytest.approx(missed / 16 * 0.08), 0)
    made = step(shape, cache_bytes=cache(shape, 0.5), offload=OffloadConfig(**apart))
    computing, cpu_ms = made["hot"] + made["cold"], missed * 6.0 / 2 / 1e3
    assert cold_ms > computing
    assert made["io"] == pytest.approx(cold_ms + computing / 16 - computing + cpu_ms)
    assert step(shape, cache_bytes=cache(shape, 1))["io"] == 0
    # without a cache and a predictor a layer is read in long runs
    exact = replace(shape, layers=(replace(layer, method="exact", predictor=None),))
    assert misses(exact, 1, 0)[0] == 4096
    assert read(exact, 4096, 4096)[0] == pytest.approx(4096 / (OffloadConfig().run_bytes / 4096))


def test_neighbours_come_with_one_read_and_hot_neurons_in_a_stream() -> None:
    shape = fake_shape(1)
    counts = [read(shape, 1000, 1000, gap_bytes=gap)[0] for gap in (0, 4096, 16384)]
    assert counts[0] > counts[1] > counts[2]
    nbytes = 300 * shape.layers[0].file_slot_bytes
    assert read(shape, 1300, 1000)[2] == pytest.approx(HARDWARE.reads.stream_us(nbytes) / 1e3)
    # a cache that does not even hold the hot ones
    two = fake_shape(2)
    cold = sum(cold_neurons(layer, 1, 2048) for layer in two.layers)
    assert misses(two, 1, int(0.25 * two.slots), hot=2048).sum() == pytest.approx(cold + 2048)


def test_a_layer_that_is_read_whole_hides_behind_all_before() -> None:
    shape = fake_shape(2, hidden=1024)
    made = step(shape, 4096, cache_bytes=cache(shape, 0.5), batch=64)
    _, cold_ms, hot_ms = read(shape, 2048, 0)
    before = made["rest"] - shape.head_bytes / 20e6 - 2e-3 + made["hot"]
    assert made["io"] == pytest.approx(2 * (cold_ms + hot_ms) - before)
    fast = fake_hardware(drive=1000.0, read_us=0.01)
    assert step(shape, 4096, fast, cache_bytes=cache(shape, 0.5), batch=64)["io"] == 0


SHAPES = st.builds(
    fake_shape,
    layers=st.integers(1, 3),
    hidden=st.sampled_from([64, 256]),
    intermediate=st.sampled_from([512, 1000]),
    active=st.floats(0.02, 0.9),
    method=st.sampled_from(["lowrank", "signbit", "exact"]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SHAPES, st.integers(1, 20), st.floats(0, 1), st.integers(0, 512))
def test_more_tokens_take_longer_and_more_cache_misses_less(
    shape: ModelShape, batch: int, share: float, hot: int
) -> None:
    for how in ({}, {"cache_bytes": cache(shape, share)}):
        one, more = (step(shape, hot, batch=b, **how) for b in (batch, batch + 1))
        for part in ("rest", "predictor"):
            assert more[part] >= one[part] * (1 - 1e-9)
        assert more["hot"] + more["cold"] >= (one["hot"] + one["cold"]) * (1 - 1e-9)
    few, many = (int(s * shape.slots) for s in (share / 2, share))
    assert misses(shape, batch, many, hot).sum() <= misses(shape, batch, few, hot).sum() * (1 + 1e-9)
    assert misses(shape, batch + 1, many, hot).sum() >= misses(shape, batch, many, hot).sum() * (1 - 1e-9)
    large = step(shape, hot, batch=batch, cache_bytes=cache(shape, share))
    assert math.fsum(step(shape, hot, batch=batch).values()) <= math.fsum(large.values()) * (1 + 1e-9)


def test_a_larger_cache_is_never_slower() -> None:
    for method in ("lowrank", "exact"):
        shape = fake_shape(3, method=method)
        for batch in (1, 8):
            steps = [step(shape, 128, batch=batch, cache_bytes=cache(shape, s / 20)) for s in range(21)]
            ms = [math.fsum(found.values()) for found in steps]
            assert ms == pytest.approx(sorted(ms, reverse=True), rel=1e-9)
