"""Questions made from any text, and how two models answer them, with confidence intervals of the difference.

Each question asks which of a few endings follows a context, in the style of lm-eval's multiple-choice tasks: the last
word of a line or sentence (cloze), an identifier used before, the right closing bracket, the next word of a repeated
line. No language is assumed, except that Python's keywords do not count as identifiers. A model's answer is the ending
of largest likelihood.
"""

from __future__ import annotations

import keyword
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.eval.loss import bos_of, finite
from torch_pi2.layers.prompt import sparse_only

#: A word that ends a line or a sentence.
_LAST_WORD = re.compile(r"(?<=\W)[^\W\d_]\w+(?=[^\w\n]{0,3}\n|[.!?]\s)")
#: A name that is called, indexed or assigned to, or that has attributes.
_IDENTIFIER = re.compile(r"\b[^\W\d]\w{2,}(?=[(\[=]|\.\w| = )")
_WORD = re.compile(r"\b[^\W\d_]{3,12}\b")
_LINE_END = re.compile("\n")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
#: Characters between two brackets, and before any question, at least.
_LEAST_INSIDE, _LEAST_CONTEXT = 8, 64
#: Words of a copied line.
_COPIED = 8
#: Endings of a question; of brackets there are three kinds.
_ENDINGS = 4


@dataclass(frozen=True)
class Item:
    """A question: which of ``endings`` follows ``context``?

    Attributes:
        task: a key of :data:`TASKS`. right: index of the true ending.
    """

    task: str
    context: str
    endings: tuple[str, ...]
    right: int


def make_items(text: str, *, limit: int = 200, context: int = 256, seed: int = 0) -> list[Item]:
    """Up to ``limit`` questions of each of :data:`TASKS`, from random places of ``text``.

    The same text and settings give the same questions.

    Args:
        text: a form feed and a newline separate documents; no context spans two.
        context: characters before an ending, at most.
    """
    documents = text.split("\f\n")
    items: list[Item] = []
    for task, make in TASKS.items():
        # own random numbers for each task, independent of the other tasks
        items += islice(make(documents, context, random.Random(f"{seed} {task}")), limit)
    return items


def _before(document: str, at: int, most: int) -> str:
    """Up to ``most`` characters before ``at``, from the start of a line if there is one."""
    start = max(0, at - most)
    line = document.find("\n", max(0, start - 1), at) + 1
    return document[line if start and line else start : at]


def _places(documents: Sequence[str], pattern: re.Pattern[str], draw: random.Random) -> list[tuple[str, re.Match[str]]]:
    """Matches of the pattern in random order, one of each document in turn, so that long documents do not dominate."""
    found = [[(document, match) for match in pattern.finditer(document, _LEAST_CONTEXT)] for document in documents]
    for some in found:
        draw.shuffle(some)
    draw.shuffle(found)
    return [place for turn in zip_longest(*found) for place in turn if place is not None]


def _item(task: str, context: str, true: str, others: Sequence[str], draw: random.Random) -> Item:
    endings = [true, *others]
    draw.shuffle(endings)
    return Item(task, context, tuple(endings), endings.index(true))


def _cloze(documents: Sequence[str], most: int, draw: random.Random) -> Iterator[Item]:
    """The last word of a line or sentence, among last words of other lines."""
    places = _places(documents, _LAST_WORD, draw)
    words = [match[0] for _, match in places]
    if len(set(words)) < _ENDINGS:
        return
    for document, match in places:
        chosen = {match[0]: None}
        while len(chosen) < _ENDINGS:
            chosen[draw.choice(words)] = None
        end = document[match.end() : match.end() + 1]  # that a word ends is a part of it
        true, *others = (word + end for word in chosen)
        yield _item("cloze", _before(document, match.start(), most), true, others, draw)


def _identifiers(documents: Sequence[str], most: int, draw: random.Random) -> Iterator[Item]:
    """Which identifier of the context comes next?"""
    for document, match in _places(documents, _IDENTIFIER, draw):
        context = _before(document, match.start(), most)
        known = {found[0] for found in _IDENTIFIER.finditer(context)}
        others = sorted(word for word in known - {match[0]} if not keyword.iskeyword(word))
        if match[0] not in known or keyword.iskeyword(match[0]) or len(others) < _ENDINGS - 1:
            continue
        end = document[match.end()]
        chosen = [word + end for word in draw.sample(others, _ENDINGS - 1)]
        yield _item("identifiers", context, match[0] + end, chosen, draw)


def _brackets(documents: Sequence[str], most: int, draw: random.Random) -> Iterator[Item]:
    """Which closing bracket comes next? Kinds alternate as long as there are places of each."""
    places: dict[str, list[tuple[str, int]]] = {kind: [] for kind in _CLOSING.values()}
    for document in documents:
        for opened, closed in _pairs(document):
            if closed - opened > _LEAST_INSIDE and len(_before(document, closed, most)) >= closed - opened:
                places[document[closed]].append((document, closed))
    for some in places.values():
        draw.shuffle(some)
    while any(places.values()):
        for kind, some in places.items():
            if some:
                document, at = some.pop()
                others = [other for other in places if other != kind]
                yield _item("brackets", _before(document, at, most), kind, others, draw)


def _pairs(document: str) -> Iterator[tuple[int, int]]:
    """Positions of matching brackets; a mismatch (in a string, say) drops all open ones."""
    opened: list[int] = []
    for match in re.finditer(r"[()\[\]{}]", document):
        if match[0] in _CLOSING:
            opened.append(match.start())
        elif opened and match[0] == _CLOSING[document[opened[-1]]]:
            yield opened.pop(), match.start()
        else:
            opened.clear()


def _copying(documents: Sequence[str], most: int, draw: random.Random) -> Iterator[Item]:
    """The next word of a repeated line of random words, among other words of the line."""
    words = sorted({match[0] for document in documents for match in _WORD.finditer(document)})
    if len(words) < _COPIED:
        return
    for document, match in _places(documents, _LINE_END, draw):
        line = draw.sample(words, _COPIED)
        at = draw.randrange(1, _COPIED)
        others = draw.sample([*line[: at - 1], *line[at + 1 :]], _ENDINGS - 1)  # not the word before
        around = _before(document, match.end(), most // 4)
        context = f"{around}{' '.join(line)}\n{around}{' '.join(line[:at])} "
        yield _item("copying", context, f"{line[at]} ", [f"{word} " for word in others], draw)


#: Name -> generator of questions, given documents, characters of context, and random numbers.
TASKS: dict[str, Callable[[Sequence[str], int, random.Random], Iterator[Item]]] = {
    "cloze": _cloze,
    "identifiers": _identifiers,
    "brackets": _brackets,
    "copying": _copying,
}

#: 95 % of a normal distribution lie within this many standard deviations.
_Z = 1.959964


@dataclass(frozen=True)
class Answer:
    """Index of the likeliest ending, and rank of the true one by likelihood, from 1."""

    chosen: int
    rank: int


@dataclass(frozen=True)
class Difference:
    """Differences between two models' answers to the same items.

    Attributes:
        items: how many. chance: accuracy of guessing. accuracy: of the first model and the second.
        difference: the second's accuracy less the first's. interval: its 95 % confidence interval (Bonett and Price,
            2012, for paired shares and independent items).
        changed: share of items with another answer. reciprocal_rank: mean of 1 / rank of the true ending, for both.
    """

    items: int
    chance: float
    accuracy: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    changed: float
    reciprocal_rank: tuple[float, float]


def answers(
    model: nn.Module, tokenizer: Any, items: Sequence[Item], *, window: int = 256, progress: bool = False
) -> list[Answer]:
    """The answers of ``model``, a causal model of transformers, to ``items``.

    Texts are compared from the first token that differs, so that tokens may span context and ending. Layers compute
    sparsely however many tokens there are, as in decoding. Contexts longer than ``window`` tokens lose their beginning.

    Raises:
        NonFiniteError: a likelihood is no number.
    """
    found = []
    with evaluating(model), sparse_only():
        for item in bar(items, "questions", progress, unit="item"):
            shared, endings = _tokens(tokenizer, item, window)
            logits = _logits(model, shared, [ids[:-1] for ids in endings])
            found.append(_answer(item, [_log_p(of, ids) for of, ids in zip(logits, endings, strict=True)]))
    return found


def _tokens(tokenizer: Any, item: Item, window: int) -> tuple[list[int], list[list[int]]]:
    """The tokens that the texts of all endings share, and the rest of each."""
    bos = bos_of(tokenizer)
    texts = (item.context + ending for ending in item.endings)
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    first = next((i for i, ids in enumerate(zip(*rows)) if len(set(ids)) > 1), min(map(len, rows)) - 1)
    fits = window - max(len(ids) - first for ids in rows) - len(bos)
    return [*bos, *rows[0][max(0, first - fits) : first]], [ids[first:] for ids in rows]


def _logits(model: nn.Module, shared: list[int], endings: list[list[int]]) -> list[torch.Tensor]:
    """For each ending, logits ``[1 + T, V]`` after ``shared`` and after each of its ``T`` tokens."""
    longest, n = max(map(len, endings)), len(endings)
    read = model(input_ids=torch.tensor([shared]), use_cache=True)
    logits_NTV = read.logits[:, -1:].expand(n, -1, -1)
    if longest:
        # padding at the end changes nothing before it
        padded_NT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in endings], dtype=torch.long)
        cache = cache_of(read)
        cache.batch_repeat_interleave(n)
        more = model(input_ids=padded_NT, use_cache=True, **{cache_name(model): cache})
        logits_NTV = torch.cat([logits_NTV, more.logits], 1)
    return [logits_TV[: 1 + len(ids)] for logits_TV, ids in zip(logits_NTV, endings, strict=True)]


def _log_p(logits_TV: torch.Tensor, ids: list[int]) -> float:
    total = logits_TV.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
    return finite("likelihood of an ending", float(total))


def _answer(item: Item, likelihoods: Sequence[float]) -> Answer:
    rank = 1 + sum(likelihood > likelihoods[item.right] for likelihood in likelihoods)
    return Answer(likelihoods.index(max(likelihoods)), rank)


def differences(items: Sequence[Item], first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Difference]:
    """Differences by task and of ``all`` tasks, from the :func:`answers` of two models to ``items``."""
    by_task: dict[str, list[tuple[Item, Answer, Answer]]] = defaultdict(list)
    for triple in zip(items, first, second, strict=True):
        by_task[triple[0].task].append(triple)
    found = {task: _difference(triples) for task, triples in by_task.items()}
    if len(found) > 1:
        found["all"] = _difference([triple for triples in by_task.values() for triple in triples])
    return found


def _difference(triples: Sequence[tuple[Item, Answer, Answer]]) -> Difference:
    n = len(triples)
    right = [(one.chosen == item.right, two.chosen == item.right) for item, one, two in triples]
    accuracy = (sum(one for one, _ in right) / n, sum(two for _, two in right) / n)
    return Difference(
        items=n,
        chance=sum(1 / len(item.endings) for item, _, _ in triples) / n,
        accuracy=accuracy,
        difference=accuracy[1] - accuracy[0],
        interval=_interval(sum(two > one for one, two in right), sum(one > two for one, two in right), n),
        changed=sum(one.chosen != two.chosen for _, one, two in triples) / n,
        reciprocal_rank=(sum(1 / one.rank for _, one, _ in triples) / n, sum(1 / two.rank for *_, two in triples) / n),
    )


def _interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired shares: Bonett and Price, J. Educ. Behav. Stat. 37 (2012), 479-488.

    Unlike a bootstrap's, it does not shrink to nothing where no item changed.
    """
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
