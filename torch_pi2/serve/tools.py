"""Tools: how models write calls of functions, found from chat templates, and grammars of what may be written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch_pi2.errors import ConfigError
from torch_pi2.serve.schemas import as_object


@dataclass(frozen=True)
class Form:
    """How calls are written: ``begin``, then one object, or several, ``{"name": ..., arguments: {...}}``, then ``end``.

    Attributes:
        opens, closes: what is between ``begin`` and the first object, and between the last and ``end``. between: two
            objects after one ``begin``; None: each has a ``begin`` of its own.
        bare: an answer that starts with an object is a call without ``begin``.
        several: whether models were taught more than one call in an answer.
        id_letters: of a call's id, where the template wants so many and no more; 0: it does not say.
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
HERMES = Form("<tool_call>", "</tool_call>", opens="\n", closes="\n")
#: ``{"name": ..., "parameters": ...}`` of Llama 3.
LLAMA = Form("<|python_tag|>", "", "parameters", bare=True, several=False)
#: ``[TOOL_CALLS] [...]`` of Mistral before 2025; its templates take ids of nine letters alone.
MISTRAL = Form("[TOOL_CALLS]", "]", opens=" [", between=", ", id_letters=9)


@dataclass(frozen=True)
class Function:
    """What may be called: ``schema`` of its arguments; ``strict``: an answer must have arguments that it allows."""

    name: str
    schema: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Offer:
    """Functions that an answer may call.

    Attributes:
        needed: it has to call one. several: or more.
    """

    form: Form
    functions: tuple[Function, ...]
    needed: bool
    several: bool

    @property
    def constrained(self) -> bool:
        """Whether calls have to be written as a grammar says."""
        return self.needed or not self.several or any(function.strict for function in self.functions)


@lru_cache(maxsize=64)
def form_of(template: str) -> Form:
    """The form that the text of a chat template shows.

    Raises:
        ConfigError: it takes no tools, or has calls in a form that is not known.
    """
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


def grammar_of(
    offer: Offer, mark: Callable[[str], str], written: dict[str, Any], answer: dict[str, Any] | bool | None
) -> str:
    """What may be answered, in llguidance's variant of Lark: calls, and, unless one is needed, something else.

    Args:
        mark: how a mark such as ``<tool_call>`` is said in the grammar. written: llguidance's options of JSON.
        answer: schema of what is no call; None: any text.

    Raises:
        ConfigError: a schema has what an answer could not be held to.
    """
    form = offer.form
    objects, rules = [], []
    for number, function in enumerate(offer.functions):
        schema = function.schema if offer.needed or function.strict else {"type": "object"}
        begin = f'{{"name": "{function.name}", "{form.arguments}": '
        objects.append(f'{_literal(begin)} arguments_{number} "}}"')
        # each on its own: what a schema refers to by "#" begins at its root
        rules.append(f"arguments_{number}: %json {_json(as_object(schema, 'tools'), written)}")
    more = f"({_literal(form.between)} object)*" if form.between is not None and offer.several else ""
    end = mark(form.end) if form.end else ""
    rules += [
        f"object: {' | '.join(objects)}",
        f"body: {_literal(form.opens)} object {more} {_literal(form.closes)} {end}",
        f"call: {'' if form.bare else mark(form.begin)} body",
    ]
    again = offer.several and form.several and form.between is None
    calls = 'call ("\\n" call)*' if again else "call"
    if offer.needed:
        start = calls
    elif answer is not None:
        start = f"{calls} | answer"
        rules.append(f"answer: %json {_json(as_object(answer, 'response_format'), written)}")
    else:
        start, more_rules = _after_text(form, mark(form.begin), again)
        rules += more_rules
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _after_text(form: Form, begin: str, again: bool) -> tuple[str, list[str]]:
    """The start of a grammar with calls in any text, which hold to it from their begin on, and more of its rules."""
    if form.bare:
        return 'call | "" | /[^{](.|\\n)*/', []
    rules = ["TEXT: /(.|\\n)*/"]
    if begin.startswith("<"):  # a token, which is no part of any text
        rules.append(f"later: TEXT {begin} body")
    else:
        rules += [f"head[lazy]: TEXT {begin}", "later: head body"]
    return "later* TEXT" if again else "later | TEXT", rules


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: dict[str, Any], written: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": written})
