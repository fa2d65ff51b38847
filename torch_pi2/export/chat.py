"""Chat templates: rendered in Python, and described in ``chat.json`` for runners without a template language.

``chat.json`` has the texts that a template writes around messages. They are found by rendering marked messages and
splitting the result at the marks, and confirmed by rendering many other messages: a template whose output depends on a
message in any further way (it escapes, cuts or searches it) is not described.
"""

from __future__ import annotations

import json
import logging
import sys
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch_pi2.base.files import atomic_write
from torch_pi2.errors import ConfigError

CHAT_FILE = "chat.json"
FORMAT = "torch_pi2.chat"
VERSION = 3  # in 2 there were no earlier answers

_log = logging.getLogger("torch_pi2")

#: Lines of a template that may run, and characters that it may write: usual ones take some 50 lines for a message.
MOST_STEPS = 1_000_000
MOST_TEXT = 1 << 24

#: White space around a marked message, some of it not ASCII.
_START, _END = "\u3000\x1c \n", "\n \x1f\u00a0"
#: Messages that are rendered to confirm a description, besides those made of the template's own constants.
_MESSAGES = (
    *("", " ", "\n", "\u3000", "\x1f", "a", "A", "7", " a", "a ", "a  b", "a\n\n\nb", "a\r\nb", "a\tb", "\n\na\n\n"),
    *("<a> & \"b\" 'c'", "a\\nb", "**a** _b_", "# a\n- b\n```\nc\n```", "{{ a }}", "{% a %}", "{# a #}", "{a} %s"),
    *("日本語。é ß ﬁ İ 🙂 \u200bx", "True", "none", "[]", "{}", "12345678901234567890", "ALL UPPER", "all lower"),
    *("/no_think", "a /think", "<think>a</think>b", "</think>", "<tool_call>", "<tool_response>a</tool_response>"),
    *("<|im_start|>a<|im_end|>", "[INST] a [/INST]", "<<SYS>>a<</SYS>>", "<s>a</s>", "<start_of_turn>user", "<image>"),
    *("user: a\nassistant:", "long text " * 2000, "x" * 20000, "https://a.b/c?d=e&f"),
)
#: Roles of the chats that are described: a question, what may precede it, and an earlier answer with its next question.
_USER, _SYSTEM, _TURN = ("user",), ("system",), ("assistant", "user")

#: Texts around the messages of a chat, and which messages are stripped.
_Description = tuple[list[str], list[bool]]


def render_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of ``messages`` by the tokenizer's template, up to the answer. Raises what the template raises.

    Raises:
        ConfigError: the template runs for more than ``MOST_STEPS`` lines or writes more than ``MOST_TEXT`` characters.
            Jinja's sandbox bounds one ``range``, but not nested loops.
    """
    with _bounded():
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


@contextmanager
def _bounded() -> Iterator[None]:
    """Bounds the templates that are rendered in the block, see :func:`render_messages`."""
    steps = text = 0

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal steps, text
        steps += 1
        text += len(value) if event == "return" and isinstance(value, str) else 0
        if steps > MOST_STEPS or text > MOST_TEXT:
            raise ConfigError(
                "chat template",
                expected=f"one that ends within {MOST_STEPS} lines and {MOST_TEXT} characters",
                found="more",
                fix="Correct tokenizer.chat_template, or shorten the chat.",
            )
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(count)  # of this thread
    try:
        yield
    finally:
        sys.settrace(before)


def describe_template(tokenizer: Any) -> dict[str, Any] | None:
    """What the template writes before, between and behind messages, up to the answer.

    The template is rendered now: a date that it writes is that of the export.

    Returns:
        ``user``: two texts around a question. ``system_user``: three around a system message and a question; None if
        the template takes no system message, or does more with it. ``assistant``: two around an earlier answer and
        before its next question; None if the template does more with answers. ``strips``: for each role whether white
        space at both ends of its messages (that of :meth:`str.strip`) is removed. None if there is no template, or if
        it does more with questions.

    Raises:
        ConfigError: see :func:`render_messages`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    probes = [*_MESSAGES, *_of_constants(tokenizer.get_chat_template())]
    user, both, turns = (_described(tokenizer, roles, probes) for roles in (_USER, _SYSTEM + _USER, _USER + _TURN))
    if user is None:
        return None
    if both is not None and both[1][1] != user[1][0]:
        both = None
    if turns is not None and not _repeats(tokenizer, user, both, turns):
        turns = None
    return {
        "user": user[0],
        "system_user": both and both[0],
        "assistant": turns and turns[0][1:3],
        "strips": {
            "system": both is not None and both[1][0],
            "user": user[1][0],
            "assistant": turns is not None and turns[1][1],
        },
    }


def _of_constants(template: str) -> Iterator[str]:
    """Messages that a template may treat specially: with the texts that it mentions, and longer than its numbers."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind in ("string", "integer")]
    except TemplateError:
        return
    for value in dict.fromkeys(literal_eval(text) for _, text in tokens):
        if isinstance(value, str) and value:
            yield from (value, f"{value} a", f"a {value}", f"a {value} b")
        elif isinstance(value, int) and 100 < value <= MOST_TEXT // 8:
            yield "x" * (value + 1)


def _described(tokenizer: Any, roles: Sequence[str], probes: Sequence[str]) -> _Description | None:
    """The texts around messages of ``roles``; None: the template does more with a message than strip it."""
    found = _split(tokenizer, roles)
    if found is None:
        return None
    texts, strips = found
    for which in range(len(roles)):
        for probe in probes:
            contents = [probe if i == which else "a" for i in range(len(roles))]
            inner = [content.strip() if cut else content for content, cut in zip(contents, strips, strict=True)]
            expected = texts[0] + "".join(a + b for a, b in zip(inner, texts[1:], strict=True))
            if _rendered(tokenizer, roles, contents) != expected:
                return None
    return found


def _split(tokenizer: Any, roles: Sequence[str]) -> _Description | None:
    """As :func:`_described`, of marked messages alone."""
    contents = [f"{_START}Mark7 {role} é日<b>{_END}" for role in roles]
    text = _rendered(tokenizer, roles, contents)
    texts: list[str] = []
    strips: list[bool] = []
    for content in contents:
        if text is None:
            return None
        strips.append(content not in text)
        before, mark, text = text.partition(content.strip() if strips[-1] else content)
        if not mark or (strips[-1] and (before.endswith(_START) or text.startswith(_END))):
            return None
        texts.append(before)
    return None if text is None or any("Mark7" in part for part in (*texts, text)) else ([*texts, text], strips)


def _rendered(tokenizer: Any, roles: Sequence[str], contents: Sequence[str]) -> str | None:
    """None: the template raises, which is how templates refuse roles."""
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        return render_messages(tokenizer, messages)
    except ConfigError:
        raise
    except Exception:
        return None


def _repeats(tokenizer: Any, user: _Description, both: _Description | None, turns: _Description) -> bool:
    """Whether every answer with its next question is written as the first one in ``turns``, whatever came before."""
    between, strips = turns[0][1:3], turns[1][1:]
    for before, start in ((_USER, user), (_SYSTEM + _USER, both)):
        for count in (1, 2):
            if start is not None:
                (*first, last), cut = start
                expected = [*first, *between * count, last], [*cut, *strips * count]
                if _split(tokenizer, [*before, *_TURN * count]) != expected:
                    return False
    return True


def write_chat(tokenizer: Any, folder: Path) -> bool:
    """Write ``folder``/chat.json; False, and no file, if there is no template that :func:`describe_template` can
    describe."""
    description = describe_template(tokenizer)
    if description is None:
        if getattr(tokenizer, "chat_template", None) is not None:
            _log.warning(
                "%s is left out: what the chat template writes depends on the messages in other ways than stripping "
                "them. The C++ runner has no --chat with this bundle; torch-pi2 run has.",
                CHAT_FILE,
            )
        return False
    atomic_write(folder / CHAT_FILE, json.dumps({"format": FORMAT, "version": VERSION, **description}, indent=1) + "\n")
    return True
