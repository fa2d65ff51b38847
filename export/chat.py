"""``chat.json`` of a bundle: what a chat template puts around messages, so that no runner needs a template language."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch_pi2.errors import ConfigError
from torch_pi2.runtime.files import atomic_write

CHAT_FILE = "chat.json"
FORMAT = "torch_pi2.chat"
VERSION = 1

#: Stand for what somebody says; no template has them.
_SYSTEM, _USER, _OTHER = "Qz7systemQz7", "Qz7userQz7", "Qz7otherQz7"

#: Lines of a template that run, and characters that it writes: templates of models take some 50 lines for a message.
MOST_STEPS = 1_000_000
MOST_TEXT = 1 << 24


def render_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of ``messages`` by the tokenizer's template, up to where the answer begins; what the template raises.

    Raises:
        ConfigError: the template runs for more than ``MOST_STEPS`` lines or writes more than ``MOST_TEXT`` characters.
            Jinja's sandbox bounds one ``range``, not loops in loops. What it keeps in variables is not bounded.
    """
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
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    finally:
        sys.settrace(before)


def around_messages(tokenizer: Any) -> dict[str, Any] | None:
    """What the template writes before, between and behind the messages of a chat, up to where the answer begins.

    The template is rendered now: a date that it writes is that of the export.

    Args:
        tokenizer: transformers'.

    Returns:
        ``user``: two texts around a question. ``system_user``: three around a system message and a question; None if
        the template takes no system message. ``strips``: it strips messages of white space at both ends. None in all
        if there is no template, or it writes something else than messages and fixed texts.

    Raises:
        ConfigError: see :func:`render_messages`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None

    def render(*contents: str) -> str:
        roles = ("system", "user")[-len(contents) :]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        return render_messages(tokenizer, messages)

    def parts(*contents: str) -> list[str] | None:
        try:
            text = render(*contents)
        except ConfigError:
            raise
        except Exception:  # a template says by any error that it does not take these roles
            return None
        found = []
        for content in contents:
            before, once, text = text.partition(content)
            if not once:
                return None
            found.append(before)
        again = any(content in text for content in contents)
        return None if again else [*found, text]

    user = parts(_USER)
    if user is None or parts(_OTHER) != user:
        return None
    padded = render(f" \n{_USER} \n")
    strips = padded == user[0] + _USER + user[1]
    if not strips and padded != f"{user[0]} \n{_USER} \n{user[1]}":
        return None
    return {"user": user, "system_user": parts(_SYSTEM, _USER), "strips": strips}


def write_chat(tokenizer: Any, folder: Path) -> bool:
    """Write ``folder``/chat.json; False, and no file, if the tokenizer has no template that it can describe."""
    found = around_messages(tokenizer)
    if found is None:
        return False
    atomic_write(folder / CHAT_FILE, json.dumps({"format": FORMAT, "version": VERSION, **found}, indent=1) + "\n")
    return True
