"""The cost model: each term by hand, and what must hold whatever the numbers are."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_fakes import GB, FakeAccelerator, FakeHardware, fake_layer, fake_shape, fake_stats
from shared import small_store
from tiny_models import tiny

import torch_pi2
from torch_pi2.errors import ConfigError, StaleArtifactError
from torch_pi2.machine.hardware import Accelerator, Hardware
from torch_pi2.ops.constants import constants
from torch_pi2.planner.cost import PARTS, _io_ms, step_cost
from torch_pi2.planner.layer_cost import TIMES, expert_use, layer_curve, predicted_share
from torch_pi2.planner.model_shape import LayerShape, ModelShape, numbers
from torch_pi2.planner.prompt_cost import best_chunk, prompt_cost, switch_point
from torch_pi2.types.offload import OffloadConfig

HARDWARE = FakeHardware()
PHONE = FakeHardware(accelerator=FakeAccelerator())
#: Two neurons of two rows of 32 floats... enough to add up by hand.
PLAIN = {
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


def cost(shape: ModelShape, hot: int = 0, hardware: FakeHardware = HARDWARE, **how):
    return step_cost(shape, hardware, hot=[hot] * len(shape.layers), **({"batch": 1, "context": 64} | how))


def cache(shape: ModelShape, share: float) -> int:
    return int(share * shape.slots) * shape.place_bytes


def test_the_fake_machine_takes_what_a_real_one_takes() -> None:
    for real, fake in ((Hardware, FakeHardware), (Accelerator, FakeAccelerator)):
        for name, method in inspect.getmembers(real, inspect.isfunction):
            if name.endswith("_us") or name == "best_depth":
                wanted = inspect.signature(method).parameters
                assert list(inspect.signature(getattr(fake, name)).parameters) == list(wanted), name


def test_an_exact_layer_by_hand() -> None:
    layer = fake_layer(**PLAIN)
    curve = layer_curve(layer, HARDWARE, 1, [1])
    row = 128
    # neuron 0 in a run; gates of 1 to 3, up and down of 0.5 + 0.25 of them
    hot_bytes, gathered = 384, 3 * row + 0.75 * 2 * row
    pairs = 2 + 1.0 + 3 + 0.75 + 0.75  # gate, up and down of 0; gates; ups; downs
    us = 2.0 + max(hot_bytes / (20 * GB) + gathered / (10 * GB), pairs * 32 / 100e3)
    assert curve["predictor"][0] == curve["merge"][0] == 0
    assert curve["hot"][0] + curve["cold"][0] == pytest.approx(us / 1e3)
    assert curve["hot"][0] / curve["cold"][0] == pytest.approx(hot_bytes / gathered)
    assert curve["wanted"][0] == 4  # gates of all are read
    assert curve["cpu_bytes"][0] == pytest.approx(hot_bytes + gathered)
    two = layer_curve(layer, HARDWARE, 2, [0])
    assert two["cpu_bytes"][0] == pytest.approx(4 * row + (1 + 0.75 + 0.5) * 2 * row)
    whole = layer_curve(layer, HARDWARE, 1, [4])
    assert whole["hot"][0] == pytest.approx((2 + 4 * 384 / (20 * GB)) / 1e3)
    assert whole["cold"][0] == whole["cold_wanted"][0] == 0


def test_a_predicted_layer_by_hand() -> None:
    layer = fake_layer(**PLAIN | {"method": "lowrank"}, predictor="lowrank/float", rank=8, recall=0.9)
    layer = replace(layer, predictor_bytes=8 * (32 + 4) * 4, predicted_active=0.5, base_hot=1)
    # of neurons 1 to 3, 0.75 fire: q (3 - 0.75) + 0.9 * 0.75 = 1.5
    q = (1.5 - 0.9 * 0.75) / 2.25
    share_4 = predicted_share(layer)
    assert share_4[1:] == pytest.approx([0.45 + q * 0.5, 0.225 + q * 0.75, q])
    assert share_4[1:].mean() == pytest.approx(0.5)
    curve = layer_curve(layer, HARDWARE, 1, [2])
    predicted = 0.225 + q * 0.75 + q
    numbers_ = 8 * (32 + 2)
    assert curve["predictor"][0] == pytest.approx((2 + max(numbers_ * 4 / (20 * GB), numbers_ / 100e3)) / 1e3)
    assert curve["wanted"][0] == pytest.approx(2 + predicted)
    assert curve["cold_wanted"][0] == pytest.approx(predicted)
    pairs = 2 * 2 + 1.5 + 2 * predicted + 0.9 * 0.25
    us = 2 + max(2 * 384 / (20 * GB) + predicted * 384 / (10 * GB), pairs * 32 / 100e3)
    assert curve["hot"][0] + curve["cold"][0] == pytest.approx(us / 1e3)
    assert curve["cpu_bytes"][0] == pytest.approx((2 + predicted) * 384 + numbers_ * 4)
    all_hot = layer_curve(layer, HARDWARE, 1, [4])
    assert all_hot["predictor"][0] == all_hot["cold"][0] == 0


def test_several_tokens_ask_for_more_but_not_for_all_of_each() -> None:
    layer = fake_layer()
    one, four = predicted_share(layer, 1), predicted_share(layer, 4)
    assert (one <= four).all()
    assert (four <= np.minimum(1, 4 * one + 1e-12)).all()
    # tokens that want the same share its reads: neurons fire for all of four tokens or for none
    same = replace(layer, frequencies=((1, layer.frequency(1)), (4, layer.frequency(1))), predicted_active=0.0)
    assert predicted_share(same, 4) == pytest.approx(layer.frequency(1) * (1 - 0.05**4))


def test_neurons_without_exact_zeros_are_used_when_they_are_computed() -> None:
    exact = fake_layer(**PLAIN, exact_zeros=False)
    assert layer_curve(exact, HARDWARE, 1, [0])["cpu_bytes"][0] == 4 * 384
    threshold = replace(exact, method="threshold")
    assert layer_curve(threshold, HARDWARE, 1, [0])["cpu_bytes"][0] == 4 * 128 + 1.75 * 256


def test_an_expert_has_its_share_of_tokens_and_of_the_call() -> None:
    assert expert_use(fake_layer(), 4) == (1, 4)
    layer = fake_layer(chosen=0.25, experts=8)
    use, tokens = expert_use(layer, 2)
    assert use == pytest.approx(1 - 0.75**2)
    assert use * tokens == pytest.approx(2 * 0.25)
    free = replace(HARDWARE, call_us=0.0)
    once, paid = (layer_curve(layer, hardware, 1, [0])["cold"][0] for hardware in (free, HARDWARE))
    assert 8 * (paid - once) == pytest.approx(HARDWARE.call_us / 1e3)  # eight experts: one call


def test_an_accelerator_hides_the_cpu_or_the_other_way_round() -> None:
    layer = fake_layer(hidden=1024)
    alone = layer_curve(layer, PHONE, 1, [1024])
    cold_only = layer_curve(layer, replace(PHONE, accelerator=None), 1, [1024])
    assert alone["cold"][0] == cold_only["cold"][0]
    both = layer_curve(layer, PHONE, 1, [1024], accelerator=1024)
    ours = both["predictor"][0] + both["cold"][0]
    theirs = PHONE.accelerator.ffn_us(batch=1, neurons=1024, hidden=1024, rows=3, weight_bits=4.5) / 1e3
    assert both["hot"][0] == pytest.approx(max(0, theirs - ours))
    assert both["merge"][0] == PHONE.accelerator.merge_us / 1e3
    assert both["wanted"][0] == pytest.approx(both["cold_wanted"][0])
    everything = layer_curve(layer, PHONE, 1, [4096], accelerator=4096)
    assert everything["cold"][0] == everything["predictor"][0] == everything["cpu_bytes"][0] == 0
    # memory that both share is the limit where each alone would be faster
    narrow = replace(PHONE, accelerator=replace(PHONE.accelerator, shared_gb_per_s=5.0))
    slow = layer_curve(layer, narrow, 1, [1024], accelerator=1024)
    total = sum(slow[part][0] for part in ("predictor", "hot", "cold"))
    assert total == pytest.approx((slow["cpu_bytes"][0] + 1024 * layer.neuron_bytes) / (5 * GB) / 1e3)


def test_vectors_are_the_scalars() -> None:
    for layer in (fake_layer(), fake_layer(method="exact"), fake_layer(method="signbit"), fake_layer(chosen=0.25)):
        hots = np.arange(0, 4097, 512)
        for batch in (1, 3, 16, 40):
            curve = layer_curve(layer, PHONE, batch, hots, accelerator=np.minimum(hots, 1024))
            for i, hot in enumerate(hots.tolist()):
                one = layer_curve(layer, PHONE, batch, hot, accelerator=min(hot, 1024))
                assert {name: column[i] for name, column in curve.items()} == {k: v[0] for k, v in one.items()}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"hots": [100]}, "expected 128 to 4096, found 100"),
        ({"hots": [128, 5000]}, "expected 128 to 4096, found 128 to 5000"),
        ({"hots": [512], "accelerator": 512}, "fake has no accelerator, found 512"),
        ({"hots": [512], "accelerator": 1024}, "expected 0 to the number of hot ones, found 1024"),
    ],
)
def test_counts_that_a_layer_cannot_have(how: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_curve(fake_layer(base_hot=128), HARDWARE, 1, **how)


def test_a_count_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="expected a count for each of 4 layers, found 1"):
        step_cost(fake_shape(), HARDWARE, batch=1, hot=[0], context=1)


def test_blocks_and_head_by_hand() -> None:
    shape = fake_shape(2)
    first, second = shape.layers
    shape = replace(shape, layers=(first, replace(second, block=False)))
    made = cost(shape, batch=3, context=10)
    values = 4 * 256 * 256
    assert numbers("int4/int8", first.attention_bytes) == values
    assert made.ms["attention"] == pytest.approx((2 + max(first.attention_bytes / 20e3, 3 * values / 100e3)) / 1e3)
    assert made.ms["sdpa"] == pytest.approx((2 + 3 * 10 * first.kv_bytes / 20e3) / 1e3)
    assert made.ms["glue"] == pytest.approx(0.01)
    assert made.ms["head"] == pytest.approx((2 + 3 * 1000 * 256 / 100e3) / 1e3)
    twice = cost(replace(shape, layers=(replace(first, attention_calls=2), second)), batch=3)
    once = cost(replace(shape, layers=(first, second)), batch=3)
    assert twice.ms["attention"] - once.ms["attention"] == pytest.approx(HARDWARE.call_us / 1e3)


def test_reads_by_hand() -> None:
    layer = fake_layer(slot_bytes=4096, stored_bytes=4096)
    shape = replace(fake_shape(1), layers=(layer,))
    apart = {"gap_bytes": 0, "run_bytes": 4096, "io_threads": 16, "in_flight": 8, "pipeline": False}
    made = cost(shape, cache_bytes=cache(shape, 0.5), offload=apart)
    (row,) = made.layers
    assert row["reads"] == pytest.approx(row["misses"])  # none is near another
    assert row["read_ms"] == pytest.approx(row["misses"] / 16 * 0.08)
    assert made.ms["io"] == pytest.approx(row["read_ms"])
    piped = cost(shape, cache_bytes=cache(shape, 0.5), offload=apart | {"pipeline": True})
    reading, computing = 1.25 * row["read_ms"], made.ms["hot"] + made.ms["cold"]
    assert reading > computing
    assert piped.ms["io"] == pytest.approx(reading + computing / 16 - computing + 0.1 * computing)
    assert cost(shape, cache_bytes=cache(shape, 1)).ms["io"] == 0
    # without a cache and a predictor a layer is read in long runs
    exact = replace(shape, layers=(replace(layer, method="exact", predictor=None),))
    (row,) = cost(exact, cache_bytes=0).layers
    assert row["misses"] == 4096
    assert row["reads"] == pytest.approx(4096 / (OffloadConfig().run_bytes / 4096))


def test_neighbours_come_with_one_read() -> None:
    shape = fake_shape(2)
    reads = [
        cost(shape, cache_bytes=cache(shape, 0.3), offload={"gap_bytes": gap}).layers[0]["reads"]
        for gap in (0, 4096, 16384)
    ]
    assert reads[0] > reads[1] > reads[2]


def test_missing_hot_neurons_are_streamed() -> None:
    """A cache that does not even hold the hot ones: what comes before the layer hides reading them if asked for."""
    shape = fake_shape(2)
    made = cost(shape, 2048, cache_bytes=cache(shape, 0.25))
    cold = sum(float(layer_curve(y, HARDWARE, 1, [2048])["cold_wanted"][0]) for y in shape.layers)
    assert made.misses == pytest.approx(cold + 2048)
    ahead = cost(shape, 2048, cache_bytes=cache(shape, 0.25), offload={"lookahead": True})
    assert made.layers[0]["read_ms"] == ahead.layers[0]["read_ms"]
    assert ahead.ms["io"] < made.ms["io"]
    assert ahead.ms["predictor"] == pytest.approx(2 * made.ms["predictor"])  # guesses ask it, too
    assert made.ms["predictor"] > 0


def test_what_is_read_ahead_is_hidden_by_all_that_is_computed_meanwhile() -> None:
    """10 ms of reads, beside 2 ms of neurons and 3 before them; computing takes 1.5 times as long while reading."""
    machine = FakeHardware(compute_while_reading=1.5, read_while_computing=1.0)
    ahead, chunks = OffloadConfig(lookahead=True), constants().chunks
    assert _io_ms(machine, (10.0, 0.0), 2.0, 3.0, ahead, False) == pytest.approx(5.0 + 0.5 * 5.0)
    assert _io_ms(machine, (4.0, 0.0), 2.0, 3.0, ahead, False) == pytest.approx(0.5 * 4.0)  # nothing is waited for
    assert _io_ms(machine, (4.0, 6.0), 2.0, 3.0, ahead, False) == pytest.approx(5.0 + 0.5 * 5.0)  # hot ones as well
    asked = _io_ms(machine, (10.0, 0.0), 2.0, 3.0, OffloadConfig(), False)
    assert asked == pytest.approx(10.0 + 2.0 / chunks - 2.0 + 0.5 * 2.0)


def test_parts_add_up_and_memory_is_the_budgets() -> None:
    shape = fake_shape(3)
    config = OffloadConfig()
    for cache_bytes in (0, cache(shape, 0.4), 1 << 40):
        made = cost(shape, 512, cache_bytes=cache_bytes, resident=[100, 0, 20], batch=2) if cache_bytes else cost(shape)
        assert tuple(made.ms) == PARTS
        assert made.total_ms == pytest.approx(sum(made.ms.values()))
        assert made.tokens_per_s == pytest.approx(made.batch * 1e3 / made.total_ms)
        for part in PARTS:
            extra = made.ms["head"] if part == "head" else 0
            assert sum(row[part] for row in made.layers) + extra == pytest.approx(made.ms[part])
        if cache_bytes:
            budget = shape.budget(cache_bytes, batch=2, context=64, config=config)
            assert made.memory_bytes == budget.total == budget.smallest + budget.in_slots(budget.cache)
            assert made.memory["resident"] == 120 * shape.place_bytes
            assert made.memory["resident"] + made.memory["cold"] == budget.cache
    whole = shape.budget(1 << 40, batch=2, context=64, config=config)
    assert whole.total == whole.whole
    on_both = cost(shape, 512, PHONE, accelerator=[512] * 3)
    assert on_both.memory["accelerator"] == 3 * 512 * shape.layers[0].neuron_bytes
    assert on_both.memory["resident"] == 3 * (4096 - 512) * shape.layers[0].neuron_bytes


SHAPES = st.builds(
    fake_shape,
    layers=st.integers(1, 3),
    hidden=st.sampled_from([64, 256]),
    intermediate=st.sampled_from([512, 1000]),
    active=st.floats(0.02, 0.9),
    method=st.sampled_from(["lowrank", "signbit", "exact"]),
    cluster=st.just(1),
)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(SHAPES, st.integers(1, 20), st.floats(0, 1), st.integers(0, 512))
def test_more_tokens_take_longer_and_more_cache_misses_less(
    shape: ModelShape, batch: int, share: float, hot: int
) -> None:
    for how in ({}, {"cache_bytes": cache(shape, share)}):
        one, more = (cost(shape, hot, batch=b, **how) for b in (batch, batch + 1))
        assert more.misses >= one.misses * (1 - 1e-9)
        for part in ("attention", "sdpa", "predictor", "head"):
            assert more.ms[part] >= one.ms[part] * (1 - 1e-9)
        assert more.ms["hot"] + more.ms["cold"] >= (one.ms["hot"] + one.ms["cold"]) * (1 - 1e-9)
    small, large = (cost(shape, hot, batch=batch, cache_bytes=cache(shape, s)) for s in (share / 2, share))
    assert large.misses <= small.misses * (1 + 1e-9)
    assert large.memory_bytes >= small.memory_bytes
    whole = cost(shape, hot, batch=batch)
    assert whole.total_ms <= large.total_ms * (1 + 1e-9)


def test_a_larger_cache_is_never_slower() -> None:
    for method in ("lowrank", "exact"):
        shape = fake_shape(3, method=method)
        for batch in (1, 8):
            ms = [cost(shape, 128, batch=batch, cache_bytes=cache(shape, s / 20)).total_ms for s in range(21)]
            assert ms == pytest.approx(sorted(ms, reverse=True), rel=1e-9)


def test_clusters_of_neurons_come_together() -> None:
    shape = fake_shape(2)
    four = shape.with_cluster(4)
    assert four.slots == shape.slots / 4
    assert four.layers[0].slot_bytes == -(-4 * 432 // 512) * 512
    assert four.layers[0].file_slot_bytes == 4 * 432 // 512 * 512 + 512
    made = cost(four, cache_bytes=cache(four, 0.3))
    one = cost(shape, cache_bytes=cache(shape, 0.3))
    assert one.misses < made.misses <= 4 * 4096  # neurons that nobody wants come along


def test_frequencies_of_other_batches() -> None:
    layer = fake_layer(**PLAIN)
    assert layer.frequency(2).tolist() == [1, 0.75, 0.5, 0]
    between = 0.75 + 0.25 * math.log2(3 / 2)
    assert layer.frequency(3).tolist() == pytest.approx([1, between, 0.5 + 0.25 * math.log2(3 / 2), 0])
    assert layer.frequency(8).tolist() == pytest.approx([1, 1, 1 - 0.25**2, 0])
    assert layer.frequency(1.0).tolist() == [1, 0.5, 0.25, 0]


# --- prompts ---


def test_where_dense_begins_to_win() -> None:
    shape = fake_shape(1)
    at = switch_point(shape, HARDWARE, 0)
    assert at == 32  # where the fake machine has its tiles

    def dense_wins(tokens: int) -> bool:
        dense, sparse = (prompt_cost(shape, HARDWARE, tokens=tokens, dense=[how]) for how in (True, False))
        return dense <= sparse

    assert [dense_wins(tokens) for tokens in (28, 32, 64, 512)] == [False, True, True, True]
    assert switch_point(shape, replace(HARDWARE, run_gb_per_s=0.01), 0) == 0
    busy = fake_shape(1, active=0.9)
    assert switch_point(busy, HARDWARE, 0) < at


def test_prompts_over_a_store_read_while_they_compute() -> None:
    shape = fake_shape(3)
    dense = [True] * 3
    in_memory = prompt_cost(shape, HARDWARE, tokens=512, dense=dense)
    slow = replace(HARDWARE, drive_gb_per_s=0.01)
    read_ms = 4096 * 512 / (0.01 * GB) / 1e3
    took = prompt_cost(shape, slow, tokens=512, dense=dense, in_memory=False)
    # the drive is the limit; the last layer is computed, and the head
    assert took == pytest.approx(read_ms + 2 * 1.25 * read_ms + in_memory / 3, rel=1e-3)
    assert prompt_cost(shape, slow, tokens=512, dense=dense, in_memory=False, chunk_tokens=128) > 3.5 * took
    fast = replace(HARDWARE, drive_gb_per_s=1e6)
    assert prompt_cost(shape, fast, tokens=512, dense=dense, in_memory=False) == pytest.approx(in_memory, rel=1e-3)
    assert best_chunk(shape, slow, dense) == 512
    assert best_chunk(shape, replace(fast, call_us=0.0), dense) < 512


# --- of a model ---


def test_shape_of_a_model_in_memory() -> None:
    model = tiny("llama-relu")
    size = sum(p.nbytes for p in model.parameters())
    data = torch.randint(0, 64, (24, 32), generator=torch.Generator().manual_seed(0))
    model = torch_pi2.optimize(model, data, torch_pi2.Config(method="exact"))
    parts = model.torch_pi2
    shape = ModelShape.of(model, parts.stats, parts.plan, compiled=False)
    layer = shape.layers[0]
    assert [y.key for y in shape.layers] == [y.site.key for y in parts.plan.layers]
    assert (layer.hidden, layer.intermediate, layer.rows, layer.neuron_bytes) == (32, 48, 3, 3 * 32 * 4)
    assert (layer.kernel, layer.attention_kernel, layer.method) == ("float32/float", "float32/float", "exact")
    assert layer.attention_bytes == 4 * (32 * 32 + 2 * 32 * 16 + 32 * 32)
    assert (layer.attention_calls, layer.kv_bytes, shape.kv_dtype) == (4, 2 * 2 * 8 * 4, "float32")
    assert shape.head_bytes == 64 * 32 * 4
    neurons = sum(y.intermediate * y.neuron_bytes for y in shape.layers)
    assert 0 <= shape.fixed_bytes + neurons - size <= 1024  # and the rotary frequencies
    often_I = parts.stats.frequency(layer.key)[parts.plan.layers[0].order.long()]
    assert layer.frequency().tolist() == often_I.tolist()
    assert layer.base_hot == parts.plan.layers[0].n_hot
    made = step_cost(shape, HARDWARE, batch=2, hot=[y.base_hot for y in shape.layers], context=16)
    assert made.memory_bytes == shape.fixed_bytes + neurons + made.memory["kv"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "store"


def test_shape_of_a_model_over_a_store(store: Path) -> None:
    model = torch_pi2.load(store, activations="int8", budget="1GiB", context=100)
    plan, budget = model.torch_pi2.plan, model.torch_pi2.budget
    shape = ModelShape.of(model, fake_stats(plan), plan)
    layer = shape.layers[0]
    assert (layer.kernel, layer.predictor) == ("int4/int8", "lowrank/int4/int8")
    made = shape.budget(budget.cache, batch=1, context=100, config=OffloadConfig())
    ours, theirs = ({**vars(b), "total": 0, "token": 0} for b in (made, budget))
    assert ours == theirs
    assert cost(shape, layer.base_hot, cache_bytes=budget.cache, context=100).memory_bytes == made.total <= budget.total
    in_memory = torch_pi2.load(store, activations="int8")
    whole = ModelShape.of(in_memory, fake_stats(plan), plan)
    assert whole.place_bytes == shape.place_bytes
    assert whole.fixed_bytes == pytest.approx(shape.fixed_bytes, rel=0.02)
    assert [y.predictor_bytes for y in whole.layers] == [y.predictor_bytes for y in shape.layers]
    assert whole.layers[0].recall == in_memory.torch_pi2.predictors[layer.key].card.recall
    watched = fake_stats(plan)
    watched.made_by["watched"] = True  # counted while the predictor ran: what it misses was not seen
    assert ModelShape.of(in_memory, watched, plan).layers[0].recall == 1


def test_shape_of_experts() -> None:
    from tiny_experts import build

    model = torch_pi2.optimize(build("Mixtral", hidden_act="relu"))
    plan = model.torch_pi2.plan
    shape = ModelShape.of(model, fake_stats(plan), plan)
    experts = shape.layers[0].experts
    assert [layer.block for layer in shape.layers[: experts + 1]] == [True] + [False] * (experts - 1) + [True]
    assert shape.layers[0].chosen == model.config.num_experts_per_tok / experts
    assert shape.layers[1].attention_bytes == shape.layers[1].kv_bytes == 0
    one, two = (cost(shape, batch=b).ms["cold"] for b in (1, 2))
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


def test_times_are_parts() -> None:
    assert set(TIMES) < set(PARTS)
