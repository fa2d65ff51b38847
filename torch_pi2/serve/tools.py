"""Tool calls: the format that a chat template shows, and ``ToolCallParser``, which finds calls in streamed text."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch_pi2.decode.sequence import partial_match
from torch_pi2.errors import ConfigError
from torch_pi2.serve.requests import ToolFunction


@dataclass(frozen=True)
class ToolCallFormat:
    """How a model writes calls: ``begin``, one or more objects ``{"name": ..., arguments: {...}}``, then ``end``.

    Attributes:
        opens, closes: between ``begin`` and the first object, and between the last object and ``end``.
        between: separates objects after one ``begin``; None: each has its own ``begin``.
        bare: an answer that starts with an object is a call without ``begin``.
        several: whether models were trained to make more than one call in an answer.
        id_letters: of a call's id, where the template requires a fixed length; 0: it does not.
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
    """Functions that an answer may call.

    Attributes:
        required: it has to call one. several: it may call more than one.
    """

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
    """The format in the text of a chat template. Raises ConfigError: it takes no tools, or has an unknown format."""
    if not re.search(r"\btools\b", template):
        raise ConfigError(
            "tools",
            expected="a model whose chat template takes tools",
            found="one that does not",
            fix="Ask without tools, or put a chat_template.jinja that takes them into the model's folder.",
        )
    text = template.replace("\\", "")
    if "[TOOL_CALLS]" in text and "[ARGS]" not in text and "[CALL_ID]" not in text:
        return MISTRAL
    if "<tool_call>" in text and '"arguments"' in text and "<function=" not in text:
        return HERMES
    if re.search(r'\{"name": [^{}]*, "parameters": [^{}]*\}', text):
        return LLAMA
    raise ConfigError(
        "tools",
        expected="a chat template with calls as <tool_call> (Hermes, Qwen), [TOOL_CALLS] [...] (Mistral) or "
        '{"name": ..., "parameters": ...} (Llama 3)',
        found="another form",
        fix="Describe the functions in a message, and ask for their arguments by response_format.",
    )


class ToolCallParser:
    """Splits streamed text into plain text (``str``) and calls, in OpenAI's form, which come when they are complete.

    What looks like a call and is none (of an unknown function, cut off, or not JSON) is plain text.

    Args:
        names: of functions that may be called.

    Attributes:
        count: calls so far.
    """

    def __init__(self, form: ToolCallFormat, names: Collection[str]) -> None:
        self._form, self._names, self.count = form, names, 0
        self._rest = ""  # text that has come and was not reported
        #: While calls are read: the mark before them, which is plain text if none follows. None: text is read.
        self._mark: str | None = None
        self._has_text = False

    def add(self, text: str, last: bool = False) -> Iterator[str | dict[str, Any]]:
        """What is certain now. ``last``: no more text follows."""
        self._rest += text
        going = True
        while going:
            going = yield from (self._text(last) if self._mark is None else self._calls(self._mark, last))

    # Both methods take text from ``_rest`` and return whether there may be more in it.

    def _text(self, last: bool) -> Generator[str | dict[str, Any], None, bool]:
        form, rest = self._form, self._rest
        if form.bare and not self._has_text and rest.lstrip().startswith("{"):
            self._mark = ""
            return True
        at = rest.find(form.begin)
        if at >= 0:
            yield from self._plain(rest[:at].rstrip())
            self._rest, self._mark = rest[at + len(form.begin) :], form.begin
            return True
        if last and self.count:
            rest = rest.rstrip()
        # blanks before a call are dropped
        certain = rest if last else rest[: len(rest) - partial_match(rest, [form.begin])].rstrip()
        self._rest = self._rest[len(certain) :]
        yield from self._plain(certain)
        return False

    def _calls(self, mark: str, last: bool) -> Generator[str | dict[str, Any], None, bool]:
        form, rest = self._form, self._rest.lstrip(" \n[,;")
        if rest.startswith("{"):
            value, end = _decoded(rest)
            if value is None and not last:
                return False
            call = self._call(value)
            self._rest, self._mark = rest[end:], "" if call else None
            if call:
                yield call
            else:
                yield from self._plain(mark + rest[:end])
        elif form.end and rest.startswith(form.end):
            self._rest, self._mark = rest[len(form.end) :], None
        elif form.end.startswith(rest) and not (last and mark):
            self._rest = "" if last else self._rest  # a truncated end mark
            return False
        else:
            self._mark = None
            yield from self._plain(mark)
        return True

    def _plain(self, text: str) -> Iterator[str]:
        if text:
            self._has_text = True
            yield text

    def _call(self, value: Any) -> dict[str, Any] | None:
        """The call that ``value`` describes; None: none."""
        name = (value or {}).get("name")
        arguments = (value or {}).get("arguments", (value or {}).get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, (dict, str)):
            return None
        letters = self._form.id_letters
        key = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(letters or 24))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.count += 1
        call = {"id": key if letters else f"call_{key}", "type": "function"}
        return call | {"function": {"name": name, "arguments": text}}


def _decoded(text: str) -> tuple[dict[str, Any] | None, int]:
    """The JSON object that ``text`` begins with, and where it ends; None: it is not complete, or not JSON."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, len(text)
    return value, end
