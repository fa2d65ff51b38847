"""``chat.json`` of a bundle: what a chat template puts around messages, so that no runner needs a template language."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

#: Lines of a template that run, and characters that it writes: templates of models take some 50 lines for a message.
MOST_STEPS = 1_000_000
MOST_TEXT = 1 << 24


def render_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of ``messages`` by the tokenizer's template, up to where the answer begins; what the template raises.

    Raises:
        ConfigError: the template runs for more than ``MOST_STEPS`` lines or writes more than ``MOST_TEXT`` characters.
            Jinja's sandbox bounds one ``range``, not loops in loops. What it keeps in variables is not bounded.
    """
    with _bounded():
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


@contextmanager
def _bounded() -> Iterator[None]:
    """Templates that run in the block end: see :func:`render_messages`."""
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


#: White space at the ends of what somebody says, some of it no ASCII; what is between has all that a template may
#: escape, replace or write in another case. No template has it.
_ENDS = ("\u3000\x1c \n", "\n \x1f\u00a0")
_BETWEEN = "Qz7{}\n\n\r\n \t  é日<b>&\"'`\\{{{{ x }}}}{{% y %}} QZ qz 7 {}7zQ"

#: Answers that templates may get to questions about what somebody says, together; more are not tried.
_MOST_PATHS = 256

#: What else is said to a template, whose answer must be what is described.
_SAID = (
    "",
    " ",
    "\n",
    "\u3000",
    "\x1f",
    "a",
    "A",
    "0",
    "7",
    " a",
    "a ",
    "a  b",
    "a\n\n\nb",
    "a\r\nb",
    "a\tb",
    "\n\na\n\n",
    "<a>",
    "a & b",
    "\"a\" 'b'",
    "a\\nb",
    "**a** _b_",
    "# a\n- b\n```\nc\n```",
    "{{ a }}",
    "{% a %}",
    "{# a #}",
    "{a} %s",
    "日本語。",
    "é ß ﬁ İ",
    "🙂",
    "\u200bx",
    "True",
    "none",
    "[]",
    "{}",
    "12345678901234567890",
    "ALL UPPER",
    "all lower",
    "/no_think",
    "a /no_think",
    "/think a",
    "/nothink",
    "/system_override",
    "<think>a</think>b",
    "</think>",
    "<tool_call>",
    "<tool_response>a</tool_response>",
    "<|im_start|>a<|im_end|>",
    "[INST] a [/INST]",
    "<<SYS>>a<</SYS>>",
    "<s>a</s>",
    "<|start_header_id|>user",
    "<start_of_turn>user",
    "[TOOL_CALLS]",
    "<image>",
    "<|endoftext|>",
    "user: a\nassistant:",
    *("long text " * 2000, "x" * 20000, "https://a.b/c?d=e&f"),
)


class _NotDescribedError(Exception):
    """A template does something with what is said that depends on it."""


class _Said(str):
    """What somebody says, as a template sees it that is run once for all that could be said.

    It may be printed, put together with other text, and stripped of white space. A question (is it empty? has it this
    within it?) gets an answer of ``path``, whatever is within it; all else raises.
    """

    ask: Callable[[object], bool]

    @staticmethod
    def of(text: str, ask: Callable[[object], bool]) -> _Said:
        said = _Said(text)
        said.ask = ask
        return said

    def __bool__(self) -> bool:
        return self.ask((str(self), "bool"))

    def __contains__(self, part: object) -> bool:
        return self.ask((str(self), "in", part))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (other is self or self.ask((str(self), "==", str(other))))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, *of: Any) -> bool:
        return self.ask((str(self), "startswith", of))

    def endswith(self, *of: Any) -> bool:
        return self.ask((str(self), "endswith", of))

    def __add__(self, other: str) -> _Said:
        return _Said.of(str.__add__(self, other), self.ask)

    def __radd__(self, other: str) -> _Said:
        return _Said.of(other + str(self), self.ask)

    def strip(self, chars: str | None = None) -> _Said:
        if chars is not None:
            raise _NotDescribedError
        return _Said.of(str.strip(self), self.ask)

    def __iter__(self) -> Iterator[str]:  # ``is iterable`` asks for one, but not for what it gives
        raise _NotDescribedError
        yield


def _refuse(*of: object, **options: object) -> Any:
    raise _NotDescribedError


_ALLOWED = {"strip", "startswith", "endswith"}
for _name in [name for name in dir(str) if not name.startswith("_") and name not in _ALLOWED] + [
    *("__getitem__", "__len__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__mul__", "__rmul__")
]:
    setattr(_Said, _name, _refuse)


def _texts_of_all_paths(tokenizer: Any, roles: Sequence[str]) -> Iterator[str]:
    """The text of a chat for each way in which the template's questions about what is said can be answered."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # Not apply_chat_template: it makes plain text of what is said.
    template = _compile_jinja_template(tokenizer.get_chat_template())
    path: list[bool] = []
    for _ in range(_MOST_PATHS):
        answers: dict[object, bool] = {}

        def ask(question: object, answers: dict[object, bool] = answers) -> bool:
            if question not in answers:
                if len(answers) == len(path):
                    path.append(True)
                answers[question] = path[len(answers)]
            return answers[question]

        messages = [{"role": role, "content": _Said.of(_said_by(role), ask)} for role in roles]
        options = {"tools": None, "documents": None, "add_generation_prompt": True}
        with _bounded():
            yield str(template.render(messages=messages, **{**tokenizer.special_tokens_map, **options}))
        while path and not path[-1]:
            path.pop()
        if not path:
            return
        path[-1] = False
    raise _NotDescribedError


def _said_by(role: str) -> str:
    return _ENDS[0] + _BETWEEN.format(role, role) + _ENDS[1]


def _around(tokenizer: Any, roles: Sequence[str]) -> tuple[list[str], list[bool]] | None:
    """The texts around what ``roles`` say, and which of it is stripped; None: that depends on what they say."""
    try:
        text, *others = _texts_of_all_paths(tokenizer, roles)
    except ConfigError:
        raise
    except Exception:  # a template says by any error that it does not take these roles
        return None
    if any(other != text for other in others):
        return None
    texts, strips = [], []
    for role in roles:
        whole = _said_by(role)
        strips.append(whole not in text)
        before, once, text = text.partition(whole.strip() if strips[-1] else whole)
        if not once or (strips[-1] and (before.endswith(_ENDS[0]) or text.startswith(_ENDS[1]))):
            return None
        texts.append(before)
    return None if any("Qz7" in part for part in (*texts, text)) else ([*texts, text], strips)


def _as_described(tokenizer: Any, roles: Sequence[str], texts: Sequence[str], strips: Sequence[bool]) -> bool:
    """Whether transformers writes what ``texts`` and ``strips`` say, whatever one of ``roles`` says."""
    for which in range(len(roles)):
        for said in _SAID:
            contents = [said if i == which else "a" for i in range(len(roles))]
            inner = [content.strip() if cut else content for content, cut in zip(contents, strips, strict=True)]
            expected = texts[0] + "".join(a + b for a, b in zip(inner, texts[1:], strict=True))
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            try:
                if render_messages(tokenizer, messages) != expected:
                    return False
            except ConfigError:
                raise
            except Exception:
                return False
    return True


def around_messages(tokenizer: Any) -> dict[str, Any] | None:
    """What the template writes before, between and behind the messages of a chat, up to where the answer begins.

    The template is rendered now: a date that it writes is that of the export. It is run for all that could be said at
    once (:class:`_Said`), and then, as what has become plain text in between is not followed, for much that is said.

    Args:
        tokenizer: transformers'.

    Returns:
        ``user``: two texts around a question. ``system_user``: three around a system message and a question; None if
        the template takes no system message, or does more with it. ``assistant``: two around an earlier answer, behind
        which the next question comes; None if the template does more with answers. ``strips``: for each role whether it
        strips what that says of white space at both ends (that of :meth:`str.strip`). None in all if there is no
        template, or what it writes depends on what is said by more than that.

    Raises:
        ConfigError: see :func:`render_messages`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    user, both, turns = (_described(tokenizer, roles) for roles in (_USER, _SYSTEM + _USER, _USER + _TURN))
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


#: A question, what may come before it, and an earlier answer with the next question.
_USER, _SYSTEM, _TURN = ("user",), ("system",), ("assistant", "user")


def _described(tokenizer: Any, roles: Sequence[str]) -> tuple[list[str], list[bool]] | None:
    around = _around(tokenizer, roles)
    return around if around and _as_described(tokenizer, roles, *around) else None


def _repeats(tokenizer: Any, user: Any, both: Any, turns: Any) -> bool:
    """Whether each answer with the next question is written as the first one of ``turns`` is, whatever was before."""
    between, strips = turns[0][1:3], turns[1][1:]
    for before, start in ((_USER, user), (_SYSTEM + _USER, both)):
        for count in (1, 2):
            if start is not None:
                (*first, last), cut = start
                expected = [*first, *between * count, last], [*cut, *strips * count]
                if _around(tokenizer, [*before, *_TURN * count]) != expected:
                    return False
    return True


def write_chat(tokenizer: Any, folder: Path) -> bool:
    """Write ``folder``/chat.json; False, and no file, if the tokenizer has no template that it can describe."""
    found = around_messages(tokenizer)
    if found is None:
        if getattr(tokenizer, "chat_template", None) is not None:
            _log.warning(
                "%s is left out: what the chat template writes depends on what is said. The C++ runner has no --chat "
                "with this bundle; torch-pi2 run has.",
                CHAT_FILE,
            )
        return False
    atomic_write(folder / CHAT_FILE, json.dumps({"format": FORMAT, "version": VERSION, **found}, indent=1) + "\n")
    return True
