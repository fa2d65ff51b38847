"""``Batch`` where prompts are cancelled or fail while others are decoded: these go on as if nothing had been."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import always_draft
from runner_http import until
from serving import greedy_alone, quantised
from tiny_models import overflowing, tiny

import torch_pi2
from torch_pi2.decode.sequence import Sampling
from torch_pi2.errors import ConfigError, NonFiniteError, ShapeError
from torch_pi2.layers.prompt import has_tiles
from torch_pi2.serve.batch import Batch, EndEvent, Sequence, TokenEvent

PIECES = pytest.mark.skipif(not has_tiles(), reason="prompts are read in pieces where the kernels have tiles")


@pytest.fixture(scope="module")
def model() -> Any:
    return quantised()


def fail() -> None:
    raise MemoryError("no room")


class Heard:
    """A greedy sequence of ``ids``, and what is told of it."""

    def __init__(self, ids: list[int], limit: int) -> None:
        self.tokens: list[int] = []
        self.ended: EndEvent | None = None
        self.sequence = Sequence(ids, limit, self._tell)

    @property
    def error(self) -> Exception | None:
        return None if self.ended is None else self.ended.error

    @property
    def reason(self) -> str | None:
        return None if self.ended is None else self.ended.reason

    def _tell(self, what: TokenEvent | EndEvent) -> None:
        if isinstance(what, TokenEvent):
            self.tokens.append(what.token)
        else:
            self.ended = what


@pytest.mark.parametrize("when", ["before", pytest.param("between", marks=PIECES), "after"])
@pytest.mark.parametrize("how", ["cancelled", "error"])
def test_a_prompt_that_comes_to_nothing(model: Any, monkeypatch: pytest.MonkeyPatch, when: str, how: str) -> None:
    """``before`` its first piece is read, ``between`` two, ``after`` the last, where it has a row already."""
    chance = random.Random(0)
    prompts = [[chance.randrange(3, 90) for _ in range(tokens)] for tokens in (30, 150, 70, 200)]
    others = [Heard(ids, 12) for ids in prompts]
    wanted = [greedy_alone(model, ids, 12) for ids in prompts]
    batch = Batch(model, max_tokens=256, max_batch_size=2, max_queue=8, prefix_bytes=1 << 24)
    gone = Heard([chance.randrange(3, 90) for _ in range(180)], 12)
    come_to_nothing: Callable[[], None] = gone.sequence.cancel if how == "cancelled" else fail

    def at(owner: Any, name: str, does: Callable[[Any], bool]) -> None:
        real = getattr(owner, name)

        def wrapped(ids: Any, *rest: Any) -> Any:
            if does(ids):
                come_to_nothing()
            return real(ids, *rest)

        monkeypatch.setattr(owner, name, wrapped)

    its_own = gone.sequence.prompt[:-1]
    if when == "between":
        at(batch._decoder, "_read_chunk", lambda ids_1T: ids_1T[0].tolist() == its_own[60:120])
    else:
        at(batch.prefixes, "find" if when == "before" else "add", lambda ids: ids == its_own)
    for heard in (others[0], gone, *others[1:]):
        batch.submit(heard.sequence)
    batch.start()
    batch.close()
    assert [heard.tokens for heard in others] == wanted
    assert {heard.ended for heard in others} == {EndEvent("length")}
    assert gone.tokens == []
    assert gone.ended is not None
    assert gone.ended.reason == how
    assert isinstance(gone.ended.error, MemoryError if how == "error" else type(None))
    assert batch.counts.ended == {"length": len(others), how: 1}


@pytest.mark.parametrize("sampling", [None, Sampling(0.5)])
def test_drafts_change_no_answer(model: Any, monkeypatch: pytest.MonkeyPatch, sampling: Sampling | None) -> None:
    """One sequence has drafts while it is alone; a constraint that fails, a bias and log probabilities are its own."""

    always_draft(monkeypatch)
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 90) for _ in range(tokens)] for tokens in (1, 20, 60, 9)]
    answers = list[Any]()
    ways: list[dict[str, Any]] = [{"prompt_lookup": 0}, {}, {"assistant_model": model, "draft_tokens": 3}]
    for way in (*ways, {"prompt_lookup": 5}):
        batch = Batch(model, max_tokens=200, max_batch_size=2, prefix_bytes=1 << 20, **way)
        batch.start()
        heard = [Heard(ids, 30) for ids in prompts]
        for one in heard:
            one.sequence.sampling, one.sequence.bias, one.sequence.top = sampling, {5: 1.0, 6: -1.0}, 2
        for one in heard[:2]:  # alone, one after another
            batch.submit(one.sequence)
            until(lambda one=one: one.ended is not None)
        for one in heard[2:]:  # together
            batch.submit(one.sequence)
        batch.close()
        answers.append([(one.tokens, one.reason, one.error) for one in heard])
        assert batch.counts.answer_tokens == 4 * 30
        assert (batch.drafts is None) == (way == ways[0] or (not way and not has_tiles()))
        if batch.drafts is not None:
            assert batch.drafts.passes > 0
            assert batch.counts.steps < 4 * 30 - batch.drafts.accepted
    assert all(found == answers[0] for found in answers)


def test_a_model_whose_sequences_need_one_length(caplog: pytest.LogCaptureFixture) -> None:
    """It answers one request after another, and says so: two at a time had one of them fail."""
    model = quantised()
    rotary = model.model.rotary_emb
    rotary.rope_type, rotary.original_max_seq_len = "dynamic", 32
    rotary.config.rope_parameters = {"rope_type": "dynamic"}
    batch = Batch(model, max_tokens=64, max_batch_size=3)
    assert (batch.max_batch_size, caplog.messages) == (
        1,
        [f"{type(model).__name__} answers one request at a time: its sequences need one length"],
    )
    heard = [Heard([5, 6, 7 + i], 6) for i in range(3)]
    for one in heard:
        batch.submit(one.sequence)
    batch.start()
    batch.close()
    assert [(one.ended and one.ended.reason, len(one.tokens)) for one in heard] == [("length", 6)] * 3


def test_an_answer_whose_numbers_overflow_ends_alone() -> None:
    batch = Batch(torch_pi2.optimize(overflowing(7)), max_tokens=64, max_batch_size=3)
    heard = {name: Heard(ids, 12) for name, ids in {"one": [1, 2, 7], "good": [1, 2, 3], "other": [7, 5]}.items()}
    for one in heard.values():
        batch.submit(one.sequence)
    batch.start()
    batch.close(20)
    assert isinstance(heard["one"].error, NonFiniteError)
    assert isinstance(heard["other"].error, NonFiniteError)
    assert (heard["good"].reason, len(heard["good"].tokens)) == ("length", 12)


def test_one_answer_does_not_end_another_where_positions_end() -> None:
    with pytest.raises(ConfigError, match="at most 64: OPTForCausalLM has a table of so many positions, found 65"):
        Batch(tiny("opt"), max_tokens=65)
    batch = Batch(tiny("opt"), max_tokens=64, max_batch_size=2)
    short, long = Heard([5], 40), Heard([4] * 40, 24)
    for one in (short, long):
        batch.submit(one.sequence)
    with pytest.raises(ShapeError, match="at most 64 together, found 40 and 25"):
        batch.submit(Heard([4] * 40, 25).sequence)
    batch.start()
    batch.close(20)
    assert [len(one.tokens) for one in (short, long)] == [40, 24]


def test_a_token_that_only_the_head_has_ends_its_own_answer() -> None:
    model: Any = tiny("llama-relu")
    head = torch.nn.Linear(32, 70, bias=False)
    with torch.no_grad():
        head.weight.zero_()[:64] = model.lm_head.weight
    model.lm_head = head
    batch = Batch(model, max_tokens=64, max_batch_size=2)
    bad, good = Heard([1, 2], 12), Heard([1, 2, 3], 12)
    bad.sequence.bias = {66: 100.0}
    for one in (bad, good):
        batch.submit(one.sequence)
    batch.start()
    batch.close(20)
    assert "expected tokens of 0 to 63, the model's vocabulary, found the token 66" in str(bad.error)
    assert (good.reason, len(good.tokens)) == ("length", 12)
