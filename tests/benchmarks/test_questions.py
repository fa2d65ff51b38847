"""Questions made of a text, what models answer, and the difference between two: against own computations."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from tiny_models import _hf, randomise
from tiny_tokenizers import byte_tokenizer
from torch import nn

from benchmarks.questions import TASKS, Answer, Item, answers, differences, make_items

#: It has questions of every task.
TEXT = "".join(
    f"def name{i}(value{i}, other{i % 3}, things):\n"
    f'    """The sum of numbers that were given. It is kept in a table of results."""\n'
    f"    table = {{value{i}: [things.first, other{i % 3} * {i}], 'second': name{i}(other{i % 3} + 1, value{i})}}\n"
    f"    return table[value{i}] + things.last(other{i % 3} + value{i})\n\n\n"
    for i in range(40)
)


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
    for item in items:
        assert len(set(item.endings)) == len(item.endings) == (3 if item.task == "brackets" else 4)
        assert len(item.context) <= 256 or item.task == "copying"
        if item.task != "copying":
            assert item.context + item.endings[item.right] in TEXT
    assert {item.right for item in items} == {0, 1, 2, 3}  # where it stands says nothing


def test_each_task_asks_what_it_says() -> None:
    items = make_items(TEXT, limit=40)
    by_task = {task: [item for item in items if item.task == task] for task in TASKS}
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
