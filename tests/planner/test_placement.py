"""The integer program over tiers: against every placement of tiny cases, and its conditions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pi2.errors import ConfigError
from torch_pi2.planner.accelerator import Tier, _fit, least_neurons, place

FLASH = Tier("flash", 1.0)


def _saved(frequencies, nbytes, tiers, counts) -> float:
    """What counts of the first tiers (the most frequent in the first) save, in microseconds."""
    saved = 0.0
    for layer, f in enumerate(frequencies):
        start = 0
        for tier, count in zip(tiers[:-1], counts, strict=True):
            part = f[start : start + count[layer]].sum()
            saved += part * nbytes[layer] * (1 / tiers[-1].gb_per_s - 1 / tier.gb_per_s) / 1e3
            start += count[layer]
    return saved


def _best(frequencies, nbytes, tiers, group, whole) -> float:
    """The best of all counts of whole groups (a layer's last may be smaller)."""
    per_layer = []
    for layer, f in enumerate(frequencies):
        ends = sorted({min(len(f), i * group) for i in range(len(f) // group + 2)})
        options = []
        for first, second in itertools.product(ends, ends) if len(tiers) == 3 else ((e, None) for e in ends):
            if second is not None and second < first:
                continue
            used = [first] if second is None else [first, second - first]
            good = not (whole and first % group and first != len(f))
            for t, n in enumerate(used):
                if tiers[t].sync_us and n:
                    least = least_neurons(nbytes[layer], tiers[t], tiers[t + 1])
                    good = good and least is not None and n >= least
            if good:
                options.append(used)
        per_layer.append(options)
    best = 0.0
    for chosen in itertools.product(*per_layer):
        counts = list(zip(*chosen, strict=True))
        room = all(
            tier.capacity_bytes is None or sum(n * b for n, b in zip(c, nbytes, strict=True)) <= tier.capacity_bytes
            for tier, c in zip(tiers, counts, strict=False)
        )
        if room:
            best = max(best, _saved(frequencies, nbytes, tiers, counts))
    return best


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([2, 3]), st.booleans(), st.integers(0, 12), st.integers(0, 20))
def test_the_placement_is_the_best_of_all(seed, n_tiers, whole, room, more) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 5, 2) * 4
    frequencies = [np.sort(random.uniform(0, 1, n))[::-1] for n in sizes]
    nbytes = [int(n) for n in random.integers(50, 200, 2)]
    fast = Tier("acc", 50.0, room * 100, sync_us=float(random.choice([0.0, 0.05, 0.1])))
    memory = Tier("ram", 10.0, more * 100)
    tiers = [fast, memory, FLASH][3 - n_tiers :] if n_tiers == 2 else [fast, memory, FLASH]
    found = place(frequencies, nbytes, tiers, group=4, whole=whole)
    whole = whole and tiers[0] is fast
    assert found.tiers == tuple(t.name for t in tiers)
    assert found.saved_us == pytest.approx(_best(frequencies, nbytes, tiers, 4, whole), rel=1e-3, abs=1e-9)
    for index, f in enumerate(frequencies):
        assert sum(counts[index] for counts in found.counts) == len(f)
    for tier, counts in zip(tiers[:-1], found.counts, strict=False):
        assert sum(n * b for n, b in zip(counts, nbytes, strict=True)) <= tier.capacity_bytes
    assert found.gap <= 1e-3


def test_without_conditions_it_is_a_sort_by_frequency() -> None:
    frequencies = [np.linspace(1, 0.5, 128), np.linspace(0.9, 0.0, 128)]
    found = place(frequencies, [100, 100], [Tier("ram", 10.0, 128 * 100), FLASH], group=16)
    kept = sum(found.counts[0])
    assert kept == 128
    # All that is kept is read as often as what is not, up to a group.
    first, second = (f[c - 1] for f, c in zip(frequencies, found.counts[0], strict=True))
    assert abs(first - second) < 0.15


def test_a_layer_uses_an_accelerator_for_enough_neurons_or_not_at_all() -> None:
    fast, memory = Tier("acc", 40.0, 64 * 1000, sync_us=2.0), Tier("ram", 20.0)
    least = least_neurons(1000, fast, memory)
    assert least == 80  # 2 us at 25 ns a neuron
    frequencies = [np.full(128, 0.9), np.full(128, 0.8)]
    none = place(frequencies, [1000, 1000], [fast, memory], group=16)
    assert none.counts[0] == (0, 0)  # 64 have room: too few
    some = place(frequencies, [1000, 1000], [Tier("acc", 40.0, 100 * 1000, sync_us=2.0), memory], group=16)
    assert some.counts[0] == (96, 0)  # all in one layer; shared, neither has enough
    assert least_neurons(1000, Tier("acc", 20.0, None, 1.0), memory) is None
    same = place(frequencies, [1000, 1000], [Tier("acc", 20.0, None, 1.0), memory], group=16)
    assert same.counts == ((0, 0), (128, 128))


def test_whole_groups_only() -> None:
    found = place([np.ones(40)], [10], [Tier("acc", 10.0, 399), FLASH], group=16, whole=True)
    assert found.counts[0] == (32,)  # the last 8 alone would have room, but are no whole group
    assert place([np.ones(40)], [10], [Tier("acc", 10.0, 400), FLASH], group=16, whole=True).counts[0] == (40,)


@pytest.mark.parametrize("bundle", [1, 432, 6912, 48_384])
@pytest.mark.parametrize("chunks", [1, 5, 31])
def test_a_capacity_is_hard_to_the_byte(bundle, chunks) -> None:
    frequencies = [np.linspace(1.0, 0.1, 16 * 512), np.linspace(0.9, 0.3, 16 * 512)]
    for less, kept in ((0, chunks), (1, chunks - 1)):
        for sync_us in (0.0, 1e-3):
            fast = Tier("acc", 50.0, chunks * 512 * bundle - less, sync_us)
            found = place(frequencies, [bundle, bundle], [fast, FLASH], group=512, whole=True)
            assert sum(found.counts[0]) == 512 * kept
            assert found.saved_us == pytest.approx(_saved(frequencies, [bundle] * 2, [fast, FLASH], found.counts[:1]))


def test_what_is_over_a_capacity_is_taken_out() -> None:
    layer, sizes = np.array([0, 0, 0, 1, 1]), np.array([16.0, 16, 8, 16, 16])
    nbytes, gained = np.full(5, 10.0), np.array([9.0, 5, 1, 8, 4])
    for capacity, least, kept in (
        (None, (0, 0), [1, 1, 1, 1, 1]),
        (720, (0, 0), [1, 1, 1, 1, 1]),
        (719, (0, 0), [1, 1, 0, 1, 1]),  # the last one of a layer goes first
        (500, (0, 0), [1, 1, 0, 1, 0]),
        (719, (40, 32), [1, 1, 1, 0, 0]),  # too few would be left of either layer: all of the one that costs less
        (0, (0, 0), [0, 0, 0, 0, 0]),
    ):
        taken = np.ones(5)
        _fit(taken, layer, sizes, nbytes, gained, capacity, least)
        assert taken.tolist() == kept


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([FLASH], "tiers of a placement: expected two or more, the last without a capacity, found flash"),
        ([FLASH, Tier("ram", 0.5, 10)], "the last without a capacity"),
        ([FLASH, Tier("ram", 2.0)], "tiers flash and ram: expected the faster first, with GB/s above 0, found 1 and 2"),
    ],
)
def test_tiers_that_make_no_sense(tiers, message) -> None:
    with pytest.raises(ConfigError, match=message):
        place([np.ones(16)], [10], tiers)


def test_no_solution_in_the_time_given() -> None:
    frequencies = [np.random.default_rng(i).uniform(size=4096) for i in range(8)]
    tiers = [Tier("acc", 50.0, 3_333_333, 0.5), Tier("ram", 10.0, 3_333_333), FLASH]
    with pytest.raises(ConfigError, match="a solution in 0 seconds"):
        place(frequencies, [1000 + i for i in range(8)], tiers, group=2, seconds=0.0)
