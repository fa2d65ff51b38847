"""Questions made of any text, in the style of lm-eval: which of a few endings is the true one?

Nothing but the text is needed, so that the text can be one that no model was trained on. Where words of code are meant,
Python's keywords are none of them; otherwise no language is assumed.
"""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch_pi2.base.arguments import checked
from torch_pi2.errors import CalibrationError, ConfigError, check_choice

#: A word that ends a line or a sentence.
_LAST_WORD = re.compile(r"(?<=\W)[^\W\d_]\w+(?=[^\w\n]{0,3}\n|[.!?]\s)")
#: A word that is called, indexed, assigned to, or has attributes.
_IDENTIFIER = re.compile(r"\b[^\W\d]\w{2,}(?=[(\[=]|\.\w| = )")
_WORD = re.compile(r"\b[^\W\d_]{3,12}\b")
_LINE_END = re.compile("\n")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
#: Characters between two brackets at least, and before any question.
_LEAST_INSIDE, _LEAST_CONTEXT = 8, 64
#: Words of a copied line.
_COPIED = 8
#: Of a question, but for brackets, of which there are three kinds.
_ENDINGS = 4


@dataclass(frozen=True)
class Item:
    """A question: which of ``endings`` follows ``context``?

    Attributes:
        task: a key of :data:`TASKS`. right: place of the true ending.
    """

    task: str
    context: str
    endings: tuple[str, ...]
    right: int


@checked
def make_items(
    text: str, tasks: Sequence[str] = (), *, limit: int = 200, context: int = 256, seed: int = 0
) -> list[Item]:
    """Up to ``limit`` questions of each of ``tasks`` (none: all of :data:`TASKS`), drawn from places of ``text``.

    The same text and settings give the same questions, whatever model they are for.

    Args:
        text: a form feed and a newline end a document; no context reaches over that.
        context: characters before an ending, at most.

    Raises:
        ConfigError: there is no such task, or ``limit`` or ``context`` is too small. CalibrationError: nothing in the
            text is a question of one of the tasks.
    """
    for name, value, least in (("limit", limit, 1), ("context", context, 2 * _LEAST_CONTEXT)):
        if value < least:
            raise ConfigError(name, expected=f"{least} or more", found=str(value), fix="Choose a larger number.")
    documents, items = text.split("\f\n"), []
    for task in tasks or TASKS:
        check_choice("task", task, TASKS, "Choose one of them.")
        # each task has its own random numbers: which others are asked for changes nothing
        found = TASKS[task](documents, context, random.Random(f"{seed} {task}"))
        some = [item for item, _ in zip(found, range(limit))]
        if not some:
            raise CalibrationError(
                f"text for {task}",
                expected=f"at least one place for a question of it, after {_LEAST_CONTEXT} characters or more",
                found=f"none in {len(text)} characters",
                fix="Pass a longer text, or leave this task out.",
            )
        items += some
    return items


def _before(document: str, at: int, most: int) -> str:
    """Up to ``most`` characters before ``at``, from the beginning of a line where there is one."""
    start = max(0, at - most)
    line = document.find("\n", max(0, start - 1), at) + 1
    return document[line if start and line else start : at]


def _places(documents: Sequence[str], pattern: re.Pattern[str], draw: random.Random) -> list[tuple[str, re.Match[str]]]:
    """Where the pattern is, in random order; of each document one in turn, or most would be of the longest table."""
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
    """The last word of a line or sentence, among last words of others."""
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
    """An identifier that the context has, among others that it has."""
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
    """The closing bracket of the kind that was opened; of each kind as many, as long as there are."""
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
    """Places of brackets that belong together; one of the wrong kind (in a string, say) ends all that are open."""
    opened: list[int] = []
    for match in re.finditer(r"[()\[\]{}]", document):
        if match[0] in _CLOSING:
            opened.append(match.start())
        elif opened and match[0] == _CLOSING[document[opened[-1]]]:
            yield opened.pop(), match.start()
        else:
            opened.clear()


def _copying(documents: Sequence[str], most: int, draw: random.Random) -> Iterator[Item]:
    """The next word of a line that is said again, among others of it: words drawn at random, which no model knows."""
    words = sorted({match[0] for document in documents for match in _WORD.finditer(document)})
    if len(words) < _COPIED:
        return
    for document, match in _places(documents, _LINE_END, draw):
        line = draw.sample(words, _COPIED)
        at = draw.randrange(1, _COPIED)
        others = draw.sample([*line[: at - 1], *line[at + 1 :]], _ENDINGS - 1)  # not the word that stands before
        around = _before(document, match.end(), most // 4)
        context = f"{around}{' '.join(line)}\n{around}{' '.join(line[:at])} "
        yield _item("copying", context, f"{line[at]} ", [f"{word} " for word in others], draw)


#: Name -> its questions about documents, with so many characters of context, in random order.
TASKS: dict[str, Callable[[Sequence[str], int, random.Random], Iterator[Item]]] = {
    "cloze": _cloze,
    "identifiers": _identifiers,
    "brackets": _brackets,
    "copying": _copying,
}
