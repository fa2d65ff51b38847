"""Questions made of a text, what models answer, and the difference between two: against own computations."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from questions import TEXT
from tiny_models import _hf, randomise
from tiny_tokenizers import byte_tokenizer
from torch import nn

from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError
from torch_pi2.eval import Answer, Item, answers, differences, make_items
from torch_pi2.eval.suite import TASKS


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(TEXT)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return randomise(_hf("Llama", vocab_size=300, max_position_embeddings=512)).eval()


def test_items_are_places_of_the_text_and_the_same_each_time() -> None:
    items = make_items(TEXT, limit=30, seed=3)
    assert items == make_items(TEXT, limit=30, seed=3)
    assert items != make_items(TEXT, limit=30, seed=4)
    assert Counter(item.task for item in items) == dict.fromkeys(TASKS, 30)
    # what else is asked for changes no question
    assert make_items(TEXT, ["brackets"], limit=30, seed=3) == [item for item in items if item.task == "brackets"]
    for item in items:
        assert len(set(item.endings)) == len(item.endings) == (3 if item.task == "brackets" else 4)
        assert len(item.context) <= 256 or item.task == "copying"
        if item.task != "copying":
            assert item.context + item.endings[item.right] in TEXT
    assert {item.right for item in items} == {0, 1, 2, 3}  # where it stands says nothing


def test_each_task_asks_what_it_says() -> None:
    by_task = {task: make_items(TEXT, [task], limit=40) for task in TASKS}
    last_words = set(re.findall(r"(\w+)\W*\n", TEXT)) | {"given"}
    for item in by_task["cloze"]:
        assert {ending[:-1] for ending in item.endings} <= last_words
        assert len({ending[-1] for ending in item.endings}) == 1  # what follows is the same
    for item in by_task["identifiers"]:
        for ending in item.endings:
            assert re.search(rf"\b{re.escape(ending[:-1])}\b", item.context)
    kinds = Counter(item.endings[item.right] for item in by_task["brackets"])
    assert set(kinds) == {")", "]", "}"}
    assert max(kinds.values()) - min(kinds.values()) <= 1  # or always the same bracket would be a good guess
    for item in by_task["brackets"]:
        opened = []
        for sign in re.findall(r"[()\[\]{}]", item.context):
            opened = [*opened, sign] if sign in "([{" else opened[:-1]
        assert "([{".index(opened[-1]) == ")]}".index(item.endings[item.right])
    for item in by_task["copying"]:
        given = item.context.rpartition("\n")[2]
        (line,) = (line for line in item.context.splitlines()[:-1] if line.startswith(given))
        assert line.split()[len(given.split())] == item.endings[item.right].strip()
        assert {ending.strip() for ending in item.endings} <= set(line.split())


def likelihoods(model: nn.Module, tokenizer, item: Item) -> list[float]:
    """Of the whole text with each ending, one after the other."""
    found = []
    for ending in item.endings:
        ids = tokenizer(item.context + ending)["input_ids"]
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found.append(sum(float(log_p[i, after]) for i, after in enumerate(ids[1:])))
    return found


@pytest.mark.parametrize("bos", [False, True])
def test_answers_are_the_endings_with_which_the_text_is_likeliest(model, bos) -> None:
    tokenizer = byte_tokenizer(TEXT, bos=bos)
    items = make_items(TEXT, limit=6)
    found = answers(model, tokenizer, items, window=2000)
    for item, answer in zip(items, found, strict=True):
        wanted = likelihoods(model, tokenizer, item)
        assert answer.chosen == wanted.index(max(wanted))
        assert answer.rank == 1 + sorted(wanted, reverse=True).index(wanted[item.right])


class Plain(nn.Module):
    """The same numbers, of a module that has no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.model(ids_BT).logits


class Steps:
    """The same numbers, of what is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    @torch.no_grad()
    def logits(self, ids, prompt: int = 1) -> torch.Tensor:
        self.calls += 1
        return self.model(torch.tensor([ids])).logits[0]


def test_models_with_and_without_caches_and_bundles_answer_alike(model, tokenizer) -> None:
    items, steps = make_items(TEXT, limit=6), Steps(model)
    wanted = answers(model, tokenizer, items)
    assert answers(Plain(model), tokenizer, items) == wanted
    assert answers(steps, tokenizer, items) == wanted
    assert len(items) < steps.calls < sum(len(item.endings) for item in items)  # what is read twice is read once


def test_a_window_cuts_the_beginning_and_must_hold_the_ending(model, tokenizer) -> None:
    (item,) = make_items(TEXT, ["brackets"], limit=1)
    ids = tokenizer(item.context)["input_ids"]
    short = Item("brackets", tokenizer.decode(ids[-20:]), item.endings, item.right)
    assert answers(model, tokenizer, [item], window=21) == answers(model, tokenizer, [short], window=300)
    with pytest.raises(
        ConfigError, match="window: expected more than 1 tokens, the length of an ending of brackets, found 1"
    ):
        answers(model, tokenizer, [item], window=1)


def test_a_model_is_left_as_it_was(model, tokenizer) -> None:
    before = torch.get_rng_state()
    model.train()
    answers(model, tokenizer, make_items(TEXT, ["brackets"], limit=2))
    assert model.training
    model.eval()
    assert torch.equal(before, torch.get_rng_state())


def test_the_interval_is_that_of_paired_shares() -> None:
    """Of 100 items 60 are right twice, 12 were right and 5 became right; by hand from Bonett and Price's formula."""
    items = [Item("cloze", "", ("a", "b"), 0)] * 100
    first = [Answer(0, 1)] * 72 + [Answer(1, 2)] * 28
    second = [Answer(0, 1)] * 60 + [Answer(1, 2)] * 12 + [Answer(0, 1)] * 5 + [Answer(1, 2)] * 23
    found = differences(items, first, second)
    assert list(found) == ["cloze"]
    of = found["cloze"]
    assert (of.items, of.chance, of.accuracy, of.changed) == (100, 0.5, (0.72, 0.65), 0.17)
    assert of.difference == pytest.approx(-0.07)
    assert of.interval == pytest.approx((-0.15132, 0.01406), abs=1e-5)
    assert of.reciprocal_rank == pytest.approx((0.86, 0.825))
    same = differences(items, first, first)["cloze"]
    assert same.interval[0] == -same.interval[1] < 0  # nobody knows that nothing would ever change


@pytest.mark.parametrize(
    ("error", "text", "arguments", "message"),
    [
        (
            ConfigError,
            TEXT,
            {"tasks": ["spelling"]},
            "task: expected cloze or identifiers or brackets or copying",
        ),
        (ConfigError, TEXT, {"limit": 0}, "limit: expected 1 or more, found 0"),
        (ConfigError, TEXT, {"context": 5}, "context: expected 128 or more, found 5"),
        *(
            (
                CalibrationError,
                "nothing",
                {"tasks": [task]},
                f"text for {task}: expected at least one place .* found none",
            )
            for task in TASKS
        ),
    ],
)
def test_what_is_refused(error, text, arguments, message) -> None:
    with pytest.raises(error, match=message):
        make_items(text, **arguments)


def test_weights_that_are_not_finite(model, tokenizer) -> None:
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.lm_head.weight[0] += float("nan")
    with pytest.raises(NonFiniteError, match="likelihood of an ending: expected a finite number, found nan"):
        answers(damaged, tokenizer, make_items(TEXT, ["brackets"], limit=1))


def split_between_tokens(tokenizer, item: Item) -> bool:
    """Whether no token is of context and ending, which lm-eval puts together from tokens of each."""
    ids = tokenizer(item.context.rstrip())["input_ids"]
    return all(tokenizer(item.context + ending)["input_ids"][: len(ids)] == ids for ending in item.endings)


@pytest.mark.slow
def test_lm_eval_has_the_same_accuracy(model, tokenizer, tmp_path, monkeypatch) -> None:
    """Its interface can carry these questions: JSON lines and a task of multiple choice."""
    pytest.importorskip("lm_eval", reason="without the extra eval")
    import datasets.config

    from torch_pi2.eval.harness import harness

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    items = [item for item in make_items(TEXT, limit=30) if split_between_tokens(tokenizer, item)]
    for task in TASKS:  # one at a time: of several, lm-eval mixes up questions whose tokens but the last are the same
        some = [item for item in items if item.task == task]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(json.dumps(asdict(item)) for item in some))
        (tmp_path / f"{task}.yaml").write_text(TASK.format(name=task, data=tmp_path / f"{task}.jsonl"))
        found = harness(model, tokenizer, [str(tmp_path / f"{task}.yaml")])
        ours = answers(model, tokenizer, some)
        assert found[task]["acc"] == differences(some, ours, ours)[task].accuracy[0]


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: endings
doc_to_target: right
target_delimiter: ""
metric_list:
  - metric: acc
"""
