"""What a plan says of guesses: the time of passes, and how many guesses must be right to pay."""

from __future__ import annotations

import pytest
from plan_fakes import FakeHardware, fake_shape

from torch_pi2.decode.decoder import VERIFIED
from torch_pi2.planner.cost import step_cost
from torch_pi2.planner.passes import least_right, pass_steps
from torch_pi2.planner.request import Task
from torch_pi2.planner.solve import solve

HARDWARE, CONTEXT = FakeHardware(), 64


def test_a_pass_is_a_step_of_several_tokens_with_the_keys_of_one_sequence() -> None:
    shape = fake_shape(2)
    task = Task(shape, HARDWARE, batches=(1, 4), context=CONTEXT)
    bucket = solve(shape, HARDWARE, batches=(1, 4), context=CONTEXT).buckets[0]
    how = {"hot": bucket.hot, "context": CONTEXT}
    step = step_cost(shape, HARDWARE, batch=1, **how)
    for tokens, steps in pass_steps(task, bucket).items():
        batch = step_cost(shape, HARDWARE, batch=tokens, **how)
        one = step_cost(shape, HARDWARE, batch=tokens, sequences=1, **how)
        assert one.ms["sdpa"] == step.ms["sdpa"] < batch.ms["sdpa"]
        assert one.memory["kv"] == step.memory["kv"]
        assert {part: ms for part, ms in one.ms.items() if part != "sdpa"} == {
            part: ms for part, ms in batch.ms.items() if part != "sdpa"
        }
        assert steps == pytest.approx(one.total_ms / step.total_ms)


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_plans_have_passes_that_cost_less_than_steps_and_more_than_nothing(share: float | None) -> None:
    shape = fake_shape(2)
    empty = Task(shape, HARDWARE, 0, batches=(1,), context=CONTEXT)
    budget = None if share is None else empty.smallest() + int(share * shape.slots) * shape.place_bytes
    plan = solve(shape, HARDWARE, budget_bytes=budget, batches=(1,), context=CONTEXT)
    assert list(plan.passes) == list(range(2, VERIFIED + 1))
    assert list(plan.passes.values()) == sorted(plan.passes.values())
    for guesses, cost in plan.guess_costs().items():
        assert 0 < cost < 1
        right = least_right(plan.passes, guesses)
        assert right is not None
        assert sum(right**i for i in range(guesses + 1)) == pytest.approx(plan.passes[guesses + 1], rel=1e-4)


def test_wrong_guesses_cost_more_where_their_neurons_are_read() -> None:
    shape = fake_shape(2)
    empty = Task(shape, HARDWARE, 0, batches=(1,), context=CONTEXT)
    budget = empty.smallest() + shape.slots // 2 * shape.place_bytes
    memory, store = (
        solve(shape, HARDWARE, budget_bytes=b, batches=(1,), context=CONTEXT).passes for b in (None, budget)
    )
    assert all(store[tokens] > memory[tokens] for tokens in memory)


def test_how_many_must_be_right() -> None:
    assert least_right({2: 1.5}, 1) == pytest.approx(0.5, abs=1e-5)
    assert least_right({3: 1.75}, 2) == pytest.approx(0.5, abs=1e-5)
    assert least_right({3: 3.0}, 2) == pytest.approx(1.0, abs=1e-5)
    assert least_right({3: 3.1}, 2) is None
    assert least_right({3: 0.9}, 2) == pytest.approx(0.0, abs=1e-5)
