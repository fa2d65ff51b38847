"""``Calls``: calls of functions in a text that comes piece by piece."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass

from torch_pi2.decode.stops import begun
from torch_pi2.serve.tools import Form

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Called:
    """More of the call ``number``: of its ``arguments``, JSON as it was written; first its ``id`` and ``name``."""

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


#: What is told of, and in the end whether to go on reading.
_Reading = Generator[str | Called, None, bool]


class Calls:
    """Parts a text into what is said (``str``) and what is called (:class:`Called`).

    A call is told of as soon as its name is known, and its arguments as they come. What looks like a call and is none
    (of a function that nobody offered, or no JSON) is said.

    Args:
        names: of functions that may be called.

    Attributes:
        count: of calls so far.
    """

    def __init__(self, form: Form, names: Collection[str]) -> None:
        self._form, self._names, self.count = form, names, 0
        self._rest = ""  # what has come and is not told of
        self._begin = ""  # what to say where no call follows
        self._said = False
        self._value = _Value()
        self._reads: Callable[[bool], _Reading] = self._text

    @property
    def whole(self) -> bool:
        """Whether there is the end of each call that was begun."""
        return self._reads in (self._text, self._between)

    def add(self, text: str, last: bool = False) -> Iterator[str | Called]:
        """What is sure now. ``last``: no more text follows."""
        self._rest += text
        while (yield from self._reads(last)):
            pass

    # Each reads one part of a call from the rest.

    def _text(self, last: bool) -> _Reading:
        form, rest = self._form, self._rest
        if form.bare and not self._said and rest.lstrip().startswith("{"):
            self._rest, self._begin, self._reads = rest.lstrip(), "", self._object
            return True
        at = rest.find(form.begin)
        if at >= 0:
            yield from self._says(rest[:at].rstrip())
            self._rest, self._begin, self._reads = rest[at + len(form.begin) :], form.begin, self._between
            return True
        if last and self.count:
            rest = rest.rstrip()
        # blanks before a call are no text of their own
        sure = rest if last else rest[: len(rest) - begun(rest, [form.begin])].rstrip()
        self._rest = self._rest[len(sure) :]
        yield from self._says(sure)
        return False

    def _between(self, last: bool) -> _Reading:
        form, rest = self._form, self._rest.lstrip(" \n[,;")
        if rest.startswith("{"):
            self._rest, self._reads = rest, self._object
        elif form.end and rest.startswith(form.end):
            self._rest, self._begin, self._reads = rest[len(form.end) :], "", self._text
        elif form.end.startswith(rest) and not (last and self._begin):
            self._rest = "" if last else self._rest  # of an end that was cut
            return False
        else:
            yield from self._says(self._begin)
            self._begin, self._reads = "", self._text
        return True

    def _object(self, last: bool) -> _Reading:
        head = _HEAD.match(self._rest)
        if head and head[1] in self._names:
            yield self._calls(head[1], "")
            self._rest, self._value, self._reads = self._rest[head.end() :], _Value(), self._arguments
            return True
        end = self._value.end(self._rest)
        if end is None and not last:
            return False
        whole, self._rest, self._value = self._rest[:end], "" if end is None else self._rest[end:], _Value()
        called = _called(whole)
        if called is not None and called[0] in self._names:
            yield self._calls(*called)
            self._begin, self._reads = "", self._between
        else:
            yield from self._says(self._begin + whole)
            self._begin, self._reads = "", self._text
        return True

    def _arguments(self, last: bool) -> _Reading:
        end = self._value.end(self._rest)
        new, self._rest = self._rest[:end], "" if end is None else self._rest[end:]
        self._value.forget()
        if new:
            yield Called(self.count - 1, new)
        if end is not None:
            self._value, self._reads = _Value(depth=1), self._tail
        return end is not None

    def _tail(self, last: bool) -> _Reading:
        """What follows the arguments in their object is nobody's."""
        end = self._value.end(self._rest)
        self._rest = "" if end is None else self._rest[end:]
        self._value.forget()
        if end is not None:
            self._value, self._begin, self._reads = _Value(), "", self._between
        yield from ()  # a generator, as the others
        return end is not None

    def _says(self, text: str) -> Iterator[str]:
        if text:
            self._said = True
            yield text

    def _calls(self, name: str, arguments: str) -> Called:
        letters = self._form.id_letters
        known = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(letters or 24))
        self.count += 1
        return Called(self.count - 1, arguments, known if letters else f"call_{known}", name)


def _called(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another order."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _Value:
    """Where a JSON object ends that comes piece by piece; ``depth``: of braces that are open before it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._at = depth, 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Behind its last brace; None: it is not in ``text``, which what was looked at before begins."""
        for at in range(self._at, len(text)):
            letter = text[at]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._quoted = False
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self._at = len(text)
        return None

    def forget(self) -> None:
        """What was looked at is not in the next text."""
        self._at = 0
