"""What an accelerator's memory holds: the best choice of all, never a byte too many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import FakeAccelerator, FakeHardware, fake_shape

from torch_pi2.errors import ConfigError
from torch_pi2.planner.accelerator import _most_frequent, choose
from torch_pi2.planner.choices import Space
from torch_pi2.planner.request import Task


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
