"""Tool calls: their format by chat template, and ``ToolCallParser``, which finds them in streamed text."""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch_pi2.decode.sequence import partial_match
from torch_pi2.errors import ConfigError
from torch_pi2.serve.requests import ToolFunction


@dataclass(frozen=True)
class ToolCallFormat:
    """Syntax of calls: ``begin``, one or more objects ``{"name": ..., arguments: {...}}``, then ``end``. ``opens``,
    ``closes``: text between these and the objects. ``between``: separates objects after one ``begin``; None: each has
    its own ``begin``. ``bare``: an answer that starts with an object is a call without ``begin``. ``several``: models
    were trained to make more than one call in an answer. ``id_letters``: length of a call's id if the template requires
    it, else 0.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    opens: str = ""
    closes: str = ""
    between: str | None = None
    bare: bool = False
    several: bool = True
    id_letters: int = 0


#: ``<tool_call>`` of Hermes and Qwen.
HERMES = ToolCallFormat("<tool_call>", "</tool_call>", opens="\n", closes="\n")
#: ``{"name": ..., "parameters": ...}`` of Llama 3.
LLAMA = ToolCallFormat("<|python_tag|>", "", "parameters", bare=True, several=False)
#: ``[TOOL_CALLS] [...]`` of Mistral before 2025; its templates only take ids of nine letters.
MISTRAL = ToolCallFormat("[TOOL_CALLS]", "]", opens=" [", between=", ", id_letters=9)


@dataclass(frozen=True)
class ToolSet:
    """Functions that an answer may call; ``required``: it has to; ``several``: more than one call is allowed."""

    form: ToolCallFormat
    functions: tuple[ToolFunction, ...]
    required: bool
    several: bool

    @property
    def constrained(self) -> bool:
        """Whether a grammar has to constrain the calls."""
        return self.required or not self.several or any(function.strict for function in self.functions)


@lru_cache(maxsize=64)
def format_of(template: str) -> ToolCallFormat:
    """The format in a chat template's text. Raises ConfigError: no tools, or an unknown format."""
    if not re.search(r"\btools\b", template):
        fix = "Ask without tools, or put a chat_template.jinja that takes them into the model's folder."
        expected = "a model whose chat template takes tools"
        raise ConfigError("tools", expected=expected, found="one that does not", fix=fix)
    text = template.replace("\\", "")
    if "[TOOL_CALLS]" in text and "[ARGS]" not in text and "[CALL_ID]" not in text:
        return MISTRAL
    if "<tool_call>" in text and '"arguments"' in text and "<function=" not in text:
        return HERMES
    if re.search(r'\{"name": [^{}]*, "parameters": [^{}]*\}', text):
        return LLAMA
    forms = '<tool_call> (Hermes, Qwen), [TOOL_CALLS] [...] (Mistral) or {"name": ..., "parameters": ...} (Llama 3)'
    fix = "Describe the functions in a message, and ask for their arguments by response_format."
    raise ConfigError("tools", expected=f"a chat template with calls as {forms}", found="another form", fix=fix)


@dataclass(frozen=True)
class ToolCallDelta:
    """More ``arguments`` (raw JSON) of call ``number``; the first delta has its ``id`` and ``name``."""

    number: int
    arguments: str
    id: str | None = None
    name: str | None = None


_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
#: Yields text and deltas; returns whether to go on reading.
_Reading = Generator[str | ToolCallDelta, None, bool]


class ToolCallParser:
    """Splits streamed text into plain text (``str``) and calls (:class:`ToolCallDelta`).

    A call is reported as soon as its name is known, and its arguments as they come. Calls of unknown functions, or
    with invalid JSON, are plain text. ``names``: callable functions. ``count``: calls so far.
    """

    def __init__(self, form: ToolCallFormat, names: Collection[str]) -> None:
        self._form, self._names, self.count = form, names, 0
        self._rest = ""  # text that has come and was not reported
        self._begin = ""  # the begin mark, which is plain text if no call follows
        self._has_text = False
        self._object_end = _ObjectEnd()
        self._reads: Callable[[bool], _Reading] = self._text

    @property
    def complete(self) -> bool:
        """Whether each call that began has ended."""
        return self._reads in (self._text, self._between)

    def add(self, text: str, last: bool = False) -> Iterator[str | ToolCallDelta]:
        """Parse more text; yields what is certain. ``last``: no more text follows."""
        self._rest += text
        while (yield from self._reads(last)):
            pass

    # Each method below reads one part of a call from ``_rest`` and sets ``_reads`` to what comes next.

    def _text(self, last: bool) -> _Reading:
        form, rest = self._form, self._rest
        if form.bare and not self._has_text and rest.lstrip().startswith("{"):
            self._rest = rest.lstrip()
            self._begin, self._reads = rest[: -len(self._rest)], self._object
            return True
        at = rest.find(form.begin)
        if at >= 0:
            before = rest[:at].rstrip()
            yield from self._plain(before)
            self._rest, self._reads = rest[at + len(form.begin) :], self._between
            self._begin = rest[len(before) : at] + form.begin
            return True
        if last and self.count:
            rest = rest.rstrip()
        # blanks before a call are dropped
        certain = rest if last else rest[: len(rest) - partial_match(rest, [form.begin])].rstrip()
        self._rest = self._rest[len(certain) :]
        yield from self._plain(certain)
        return False

    def _between(self, last: bool) -> _Reading:
        form, rest = self._form, self._rest.lstrip(" \n[,;")
        if rest.startswith("{"):
            self._begin += self._rest[: -len(rest)] if self._begin else ""
            self._rest, self._reads = rest, self._object
        elif form.end and rest.startswith(form.end):
            self._rest, self._begin, self._reads = rest[len(form.end) :], "", self._text
        elif form.end.startswith(rest) and not (last and self._begin):
            self._rest = "" if last else self._rest  # a truncated end mark
            return False
        else:
            yield from self._plain(self._begin)
            self._begin, self._reads = "", self._text
        return True

    def _object(self, last: bool) -> _Reading:
        head = _HEAD.match(self._rest)
        if head and head[1] in self._names:
            yield self._call(head[1], "")
            self._rest, self._object_end, self._reads = self._rest[head.end() :], _ObjectEnd(), self._arguments
            return True
        end = self._object_end.find(self._rest)
        if end is None and not last:
            return False
        whole, self._rest, self._object_end = self._rest[:end], "" if end is None else self._rest[end:], _ObjectEnd()
        call = _call_in(whole)
        if call is not None and call[0] in self._names:
            yield self._call(*call)
            self._begin, self._reads = "", self._between
        else:
            yield from self._plain(self._begin + whole)
            self._begin, self._reads = "", self._text
        return True

    def _arguments(self, last: bool) -> _Reading:
        end = self._object_end.find(self._rest)
        new, self._rest = self._rest[:end], "" if end is None else self._rest[end:]
        self._object_end.restart()
        if new:
            yield ToolCallDelta(self.count - 1, new)
        if end is not None:
            self._object_end, self._reads = _ObjectEnd(depth=1), self._tail
        return end is not None

    def _tail(self, last: bool) -> _Reading:
        """Drop the rest of the call's object after its arguments."""
        end = self._object_end.find(self._rest)
        self._rest = "" if end is None else self._rest[end:]
        self._object_end.restart()
        if end is not None:
            self._object_end, self._begin, self._reads = _ObjectEnd(), "", self._between
        yield from ()  # a generator, as the others
        return end is not None

    def _plain(self, text: str) -> Iterator[str]:
        if text:
            self._has_text = True
            yield text

    def _call(self, name: str, arguments: str) -> ToolCallDelta:
        letters = self._form.id_letters
        key = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(letters or 24))
        self.count += 1
        return ToolCallDelta(self.count - 1, arguments, key if letters else f"call_{key}", name)


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose fields are in another order, or that has none; None if it is not a call."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters")) or {}
    try:
        known = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    if not isinstance(name, str) or not isinstance(known, dict):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _ObjectEnd:
    """Finds the end of a JSON object in streamed text. ``depth``: open braces before it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._at = depth, 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """The index after the last brace, if it is in ``text``, which begins with the text of the last call."""
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

    def restart(self) -> None:
        """The next text does not begin with the searched one."""
        self._at = 0
