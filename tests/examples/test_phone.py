"""``make phone``: what it compares, and that it would see what is wrong. Exporting and running is its own job."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.phone.__main__ import check, judge
from examples.phone.models import CHAT_TEMPLATE, PROMPTS, WINDOW, Case, cases
from examples.phone.runtimes import Answers, Expected, pytorch

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
SMALL = [case.name for case in cases(FOLDER, 1)[1:]]


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    made.chat_template = CHAT_TEMPLATE
    return made


@cache
def said(name: str) -> tuple[Case, Any, Expected]:
    case = next(case for case in cases(FOLDER, 1) if case.name == name)
    model = case.make(tokenizer())
    with torch.no_grad():
        return case, model, pytorch(model, tokenizer(), case)


def right(wanted: Expected) -> Answers:
    known = len(wanted.read[0]) + len(wanted.talk[0]) - 1
    return Answers(wanted.alone, wanted.alone, wanted.talk, known, wanted.logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_answers_of_small_models_tell_right_from_wrong(name: str) -> None:
    case, _, wanted = said(name)
    check(case, wanted)
    with pytest.raises(SystemExit, match=f"{name}: two tokens are as good as one another"):
        check(case, replace(wanted, margin=1e-4))
    with pytest.raises(SystemExit, match=f"{name}: its answer has other tokens"):
        check(case, replace(wanted, read=[wanted.read[0], wanted.read[0]]))
    with pytest.raises(SystemExit, match=f"{name}: it says the same"):
        check(case, replace(wanted, alone=[[1], [1], [2], [3]]))


def test_every_prompt_is_longer_than_the_window_which_counts() -> None:
    case, model, wanted = said("window")
    assert min(len(tokenizer()(prompt).input_ids) for prompt in PROMPTS) > WINDOW == model.config.sliding_window
    model.config.sliding_window = None
    with torch.no_grad():
        whole = pytorch(model, tokenizer(), case)
    model.config.sliding_window = WINDOW
    assert all(one != other for one, other in zip(wanted.alone, whole.alone))
    assert wanted.talk[1] != whole.talk[1]


def test_what_is_other_is_seen() -> None:
    wanted = said("mixture")[2]
    good = right(wanted)
    assert judge(good, wanted, tokenizer()).good
    one_off = [*wanted.alone[:3], [*wanted.alone[3][:-1], 5]]
    for wrong in (
        {"alone": one_off},
        {"alone": wanted.alone[:3]},
        {"together": one_off},
        {"together": wanted.alone[::-1]},
        {"talk": [wanted.talk[0], wanted.talk[0]]},
        {"talk": [wanted.talk[0], wanted.talk[1][:-1]]},
        {"known_tokens": 0},
        {"logits": wanted.logits * 1.001},
        {"logits": wanted.logits * float("nan")},
    ):
        assert not judge(replace(good, **wrong), wanted, tokenizer()).good, wrong  # type: ignore[arg-type]
