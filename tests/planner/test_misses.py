"""How many neurons a step reads: from frequencies, and replayed with the cache that runs in stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import fake_layer, fake_shape

from torch_pi2.errors import ConfigError
from torch_pi2.observe.accesses import Accesses, StoredLayer
from torch_pi2.observe.replay import replay
from torch_pi2.planner.layer_cost import layer_curve, predicted_share
from torch_pi2.planner.misses import FrequencyMisses, ReplayMisses, resident_slots
from torch_pi2.planner.model_shape import ModelShape

NONE = [0, 0]


def two_layers(**changes: Any) -> ModelShape:
    return fake_shape(2, hidden=64, intermediate=64, **changes)


def recorded(wanted: list[list[list[int]]], neurons: int = 64, cluster: int = 1, prompts: int = 0) -> Accesses:
    """Accesses of passes over the layers of :func:`two_layers`: by pass and layer the neurons that are wanted."""
    layers, streamed, rows = [], [], []
    for number, calls in enumerate(wanted):
        for layer, ids in enumerate(calls):
            bits = np.zeros(neurons, dtype=np.uint8)
            bits[ids] = 1
            row = np.packbits(bits, bitorder="little")
            is_prompt = number < prompts
            layers.append(layer)
            streamed.append(int(is_prompt))
            rows += [row, row] if is_prompt else [row]
    stored = tuple(StoredLayer(f"layers.{i}.mlp", neurons, cluster, 512) for i in range(len(wanted[0])))
    run = {"policy": "lfu", "slots": 8, "hot_share": 0.25, "preload": True, "window": 0}
    return Accesses(
        stored,
        "0" * 64,
        512,
        run,
        torch.tensor(layers, dtype=torch.int32),
        torch.tensor(streamed, dtype=torch.uint8),
        torch.from_numpy(np.concatenate(rows)),
    )


def drawn(passes: int, seed: int = 0) -> list[list[list[int]]]:
    """Passes in which neurons are wanted as often as :func:`two_layers` says, independently."""
    random = np.random.default_rng(seed)
    shares = [predicted_share(layer) for layer in two_layers().layers]
    return [[np.flatnonzero(random.random(64) < share).tolist() for share in shares] for _ in range(passes)]


# --- from frequencies ---


def test_the_cache_has_what_is_wanted_most() -> None:
    shape = two_layers()
    share_0, share_1 = (predicted_share(layer) for layer in shape.layers)
    everything = np.sort(np.concatenate((share_0, share_1)))[::-1]
    curve = FrequencyMisses(shape)
    for slots in (0, 1, 17, 100, 127):
        found = curve.misses(1, slots, NONE, NONE)
        assert found.shape == (2,)
        assert found.sum() == pytest.approx(everything[slots:].sum())
        least = everything[slots]
        assert found[0] == pytest.approx(share_0[share_0 <= least].sum(), abs=2 * least)
    assert curve.misses(1, 128, NONE, NONE).sum() == curve.misses(1, 1 << 20, NONE, NONE).sum() == 0


def test_what_is_wanted_equally_often_is_missed_equally_often() -> None:
    shape = two_layers(method="exact")  # gates of all are read
    assert FrequencyMisses(shape).misses(1, 32, NONE, NONE).tolist() == pytest.approx([48, 48])


def test_hot_neurons_are_wanted_always_and_resident_ones_never_read() -> None:
    shape = two_layers()
    curve = FrequencyMisses(shape)
    plain = curve.misses(1, 40, NONE, NONE)
    assert curve.misses(1, 40, NONE, [16, 0]).sum() >= plain.sum()
    nothing_else = curve.misses(1, 8, [8, 0], [8, 0])
    cold = layer_curve(shape.layers[0], FakeNone(), 1, [8])["cold_wanted"][0]
    assert nothing_else[0] == pytest.approx(cold)
    # rare neurons that stay take room from frequent ones
    assert curve.misses(1, 40, [40, 0], NONE).sum() > plain.sum()
    theirs = curve.misses(1, 0, NONE, [32, 0], [32, 0])
    assert theirs[0] == pytest.approx(predicted_share(shape.layers[0])[32:].sum())


class FakeNone:
    """A machine that takes no time."""

    name, accelerator = "none", None

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: 0.0


def test_no_room_for_the_resident() -> None:
    for curve in (FrequencyMisses(two_layers()), ReplayMisses(recorded(drawn(4)), two_layers())):
        with pytest.raises(ConfigError, match="resident neurons: expected at most the 9 slots of the cache, found 10"):
            curve.misses(1, 9, [4, 6], NONE)


def test_clusters_share_slots() -> None:
    shape = two_layers().with_cluster(8)
    assert resident_slots(shape, [9, 16]) == 4
    layer = shape.layers[0]
    share = predicted_share(layer).reshape(8, 8)
    wanted = FrequencyMisses(shape).misses(1, 0, NONE, NONE)
    assert wanted[0] == pytest.approx((1 - np.prod(1 - share, axis=1)).sum())


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0.02, 0.8),
    st.integers(1, 20),
    st.integers(0, 127),
    st.lists(st.integers(0, 64), min_size=2, max_size=2),
    st.sampled_from(["lowrank", "exact"]),
)
def test_a_larger_cache_misses_no_more_and_a_larger_batch_no_less(
    active: float, batch: int, slots: int, hot: list[int], method: str
) -> None:
    curve = FrequencyMisses(two_layers(active=active, method=method))
    found = curve.misses(batch, slots, NONE, hot).sum()
    assert curve.misses(batch, slots + 1, NONE, hot).sum() <= found + 1e-9
    assert curve.misses(batch + 1, slots, NONE, hot).sum() >= found - 1e-9


# --- replayed ---


def test_a_replay_has_the_misses_of_the_replay() -> None:
    """Of the second half: what the whole has and the first half has not."""
    wanted = drawn(40)
    curve = ReplayMisses(recorded(wanted), two_layers())
    for slots in (0, 10, 60, 128):
        halves = [
            replay(recorded(w), "lfu", slots, hot_share=0.0, preload=True, window=0) for w in (wanted, wanted[:20])
        ]
        missed = [round(r.reads_per_pass * n) for r, n in zip(halves, (40, 20), strict=True)]
        assert curve.misses(1, slots, NONE, NONE).sum() == pytest.approx((missed[0] - missed[1]) / 20)
    assert curve.misses(1, 1 << 20, NONE, NONE).sum() == 0


def test_prompts_are_left_out() -> None:
    wanted = drawn(20)
    prompt = [[list(range(64))] * 2] * 3
    curves = [ReplayMisses(recorded(w, prompts=n), two_layers()) for w, n in ((wanted, 0), (prompt + wanted, 3))]
    found = [curve.misses(1, 30, NONE, NONE).tolist() for curve in curves]
    assert found[0] == found[1]


def test_a_batch_wants_what_any_of_its_sequences_wants() -> None:
    # sequences that want the same, and ones that want others
    same = [[[1, 2, 3], [7]]] * 8
    apart = [[[1, 2, 3], [7]]] * 4 + [[[11, 12], [7]]] * 4
    for wanted, one, two in ((same, 4, 4), (apart, 2 + 1, 5 + 1)):
        curve = ReplayMisses(recorded(wanted), two_layers())
        assert curve.misses(1, 0, NONE, NONE).sum() == one
        assert curve.misses(2, 0, NONE, NONE).sum() == two
    with pytest.raises(ConfigError, match="for a batch of 5: expected at least 10 decoded tokens, found 8"):
        curve.misses(5, 0, NONE, NONE)


def test_hot_resident_and_accelerated_neurons_of_a_replay() -> None:
    wanted = [[[0, 20, 40], [30]]] * 8
    curve = ReplayMisses(recorded(wanted), two_layers())
    assert curve.misses(1, 0, NONE, NONE).tolist() == [3, 1]
    assert curve.misses(1, 0, NONE, [10, 0]).tolist() == [3 + 9, 1]
    assert curve.misses(1, 10, [10, 0], [10, 0]).tolist() == [2, 1]
    assert curve.misses(1, 0, NONE, [10, 0], [10, 0]).tolist() == [2, 1]  # not a whole byte of bits
    assert curve.misses(1, 0, NONE, [32, 64], [32, 64]).tolist() == [1, 0]


def test_replays_see_that_tokens_repeat_themselves() -> None:
    """Neurons in turns of 16 passes each: as often as the frequencies say, and in a cache most of the time."""
    turns = [[[16 * (p // 16 % 4) + i for i in range(16)]] * 2 for p in range(128)]
    often = tuple((b, np.full(64, 0.25)) for b in (1,))
    shape = ModelShape(
        tuple(replace(y, frequencies=often, predicted_active=0.25, recall=1.0) for y in two_layers().layers),
        *(0, "int4/int8", 0, 64, True),
    )
    replayed = ReplayMisses(recorded(turns), shape, "lru").misses(1, 64, NONE, NONE).sum()
    assert 0 < replayed < 0.2 * FrequencyMisses(shape).misses(1, 64, NONE, NONE).sum()


def test_a_recording_of_another_model() -> None:
    with pytest.raises(ConfigError, match=r"expected those of 2 layers of this model .* found 1 layers, clusters of 1"):
        ReplayMisses(recorded([[[1]]] * 4), two_layers())
    one = ModelShape((fake_layer(hidden=64, intermediate=64),), 0, "int4/int8", 0, 64, True)
    alone = recorded([[[1]], [[1, 2]], [[1]], [[1]]])
    assert ReplayMisses(alone, one).misses(1, 0, [0], [0]).tolist() == [1]
    with pytest.raises(ConfigError, match="for a batch of 1: expected at least 2 decoded tokens, found 1"):
        ReplayMisses(recorded([[[1], [1]]]), two_layers())


def test_the_last_steps_alone_may_be_counted() -> None:
    """What the last of four steps lacks, of a cache with room for what one step wants."""
    passes = [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]]
    last = ReplayMisses(recorded(passes), two_layers(), "lru", counted=1)
    assert last.misses(1, 4, NONE, NONE).tolist() == [0, 0]
    three = ReplayMisses(recorded(passes), two_layers(), "lru", counted=3)
    assert three.misses(1, 4, NONE, NONE).tolist() == pytest.approx([4 / 3, 4 / 3])
