"""``Talk``: each answer is the one to all that was said, which is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import always_draft
from tiny_models import overflowing
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2
from torch_pi2.decode.sequence import Sampling
from torch_pi2.errors import ConfigError, NonFiniteError, ShapeError
from torch_pi2.serve.chat import ChatSession

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant: "


@pytest.fixture(scope="module")
def model() -> nn.Module:
    dense = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()
    return torch_pi2.optimize(dense, weights="int4", activations="int8")


@pytest.fixture
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    found.chat_template = TEMPLATE
    return found


def alone(model: nn.Module, tokenizer: Any, text: str, tokens: int) -> str:
    ids_1T = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    found: str = tokenizer.decode(torch_pi2.generate(model, ids_1T, max_new_tokens=tokens).sequences[0])
    return found


def test_answers_are_those_to_all_that_was_said(model: nn.Module, tokenizer: Any) -> None:
    talk = ChatSession(model, tokenizer, max_tokens=400, limit=12, system="Be brief.")
    assert talk.last is None
    text = "# system: Be brief.\n"
    for question in ("def main(", "import os", "class A"):
        text += f"# user: {question}\n# assistant: "
        answer = "".join(talk.say(question))
        assert answer == alone(model, tokenizer, text, 12)
        text = text.removesuffix("# assistant: ") + f"# assistant: {answer}\n"
        assert (talk.last.tokens, talk.last.ended) == (12, "length")
    assert talk.last.known > 0.7 * talk.last.prompt_tokens
    assert talk.last.prompt_tokens - talk.last.known < 25
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]
    talk.reset()
    assert "".join(talk.say("def main(")) == alone(
        model, tokenizer, "# system: Be brief.\n# user: def main(\n# assistant: ", 12
    )


@pytest.mark.parametrize("sampling", [None, Sampling(0.3)])
def test_drafts_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, tokenizer: Any, sampling: Sampling | None
) -> None:
    always_draft(monkeypatch)
    how: dict[str, Any] = {"max_tokens": 600, "limit": 40, "sampling": sampling}
    ways: list[dict[str, Any]] = [{"prompt_lookup": 3}, {"assistant_model": model, "draft_tokens": 2}]
    plain, *drafted = [ChatSession(model, tokenizer, **how, **way) for way in ({"prompt_lookup": 0}, {}, *ways)]
    for question in ("def main(", "import os\nimport os\nimport", "class A"):
        answer = "".join(plain.say(question))
        for talk in drafted:
            assert "".join(talk.say(question)) == answer
            assert talk.last is not None
            assert plain.last is not None
            assert (talk.last.tokens, talk.last.known) == (plain.last.tokens, plain.last.known)
    assert plain.drafts is None
    assert all(talk.drafts is not None and talk.drafts.passes > 0 for talk in drafted)


def test_without_a_template_it_goes_on_with_the_text(model: nn.Module, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    talk = ChatSession(model, tokenizer, max_tokens=200, limit=8)
    assert not talk.template
    first = "".join(talk.say("def main("))
    assert first == alone(model, tokenizer, "def main(", 8)
    assert "".join(talk.say("\n\nclass")) == alone(model, tokenizer, f"def main({first}\n\nclass", 8)


def test_an_answer_that_is_ended_early_is_a_part_of_the_talk(model: nn.Module, tokenizer: Any) -> None:
    talk = ChatSession(model, tokenizer, max_tokens=200, limit=30)
    pieces = talk.say("def main(")
    begun = next(pieces) + next(pieces)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)  # Ctrl-C
    assert talk.last.ended == "interrupted"
    assert talk.messages[-1] == {"role": "assistant", "content": begun}
    text = f"# user: def main(\n# assistant: {begun}\n# user: x\n# assistant: "
    assert "".join(talk.say("x")) == alone(model, tokenizer, text, 30)


def test_interrupted_while_the_question_is_read(
    model: nn.Module, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ChatSession(model, tokenizer, max_tokens=200, limit=5)
    list(talk.say("a"))

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            list(talk.say("b"))
    talk.reset()
    assert "".join(talk.say("c")) == alone(model, tokenizer, "# user: c\n# assistant: ", 5)
    assert talk.last.known == 0


def test_seeds_go_on_from_answer_to_answer(model: nn.Module, tokenizer: Any) -> None:
    def answers(seed: int) -> list[str]:
        talk = ChatSession(model, tokenizer, max_tokens=200, limit=9, sampling=Sampling(1.3), seed=seed)
        found = []
        for _ in range(2):
            talk.reset()
            found.append("".join(talk.say("import")))
        return found

    assert answers(3) == answers(3)
    assert answers(4)[0] == answers(3)[1] != answers(3)[0]


def test_a_talk_without_room(model: nn.Module, tokenizer: Any) -> None:
    talk = ChatSession(model, tokenizer, max_tokens=40, limit=1000)
    "".join(talk.say("a"))  # as much as there is room for
    assert talk.last.prompt_tokens + talk.last.tokens == 40
    said = list(talk.messages)
    with pytest.raises(ShapeError, match="talk: expected 1 to 39 tokens before an answer, found"):
        list(talk.say("b"))
    assert talk.messages == said


def test_what_a_template_does_not_take(model: nn.Module, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    tokenizer.chat_template += "{% endfor %}"
    talk = ChatSession(model, tokenizer, max_tokens=40, limit=5, system="Be brief.")
    with pytest.raises(ConfigError, match="messages: expected what the chat template takes, found no system"):
        list(talk.say("a"))
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_an_answer_whose_numbers_overflow_is_no_part_of_the_talk(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    token = tokenizer("zz")["input_ids"][-1]
    made = overflowing(7)
    made.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        made.get_input_embeddings().weight[token] = made.get_input_embeddings().weight[7]
    talk = ChatSession(made, tokenizer, max_tokens=64, limit=4)
    with pytest.raises(NonFiniteError, match="bfloat16"):
        list(talk.say("zz"))
    assert talk.messages == []
    assert "".join(talk.say("a")) == talk.messages[1]["content"]
