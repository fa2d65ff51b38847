"""Chat templates that would run for ever, or fill any memory with text, end by name."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from test_eval import byte_tokenizer
from tiny_bundle import TEMPLATE, TEXT

from torch_pi2.errors import ConfigError
from torch_pi2.export.chat import around_messages, render_messages, write_chat
from torch_pi2.export.text import chat_text

LOOP = "{% for a in range(99999) %}"
NEVER = {
    "loops": LOOP * 4 + "{% set x = a %}" + "{% endfor %}" * 4,
    "loops of text": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "macros": "{% macro f(n) %}" + LOOP + "{% if n %}{{ f(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(9) }}",
    "text": LOOP + "{{ 'x' * 99999 }}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("name", NEVER)
def test_templates_that_never_end_are_refused(name: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = NEVER[name]
    start = time.monotonic()
    message = r"chat template: expected one that ends within 1000000 lines and 16777216 characters, found more\. "
    with pytest.raises(ConfigError, match=message):
        chat_text(tokenizer, MESSAGES)
    with pytest.raises(ConfigError, match=message):  # not left out of the bundle without a word
        write_chat(tokenizer, tmp_path)
    assert time.monotonic() - start < 30
    assert sys.gettrace() is None
    assert not list(tmp_path.iterdir())


def test_long_chats_are_rendered_as_before() -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = TEMPLATE + "{% for i in range(1000) %}{{ i }}{% endfor %}"
    chat = [{"role": "user", "content": f"{i} " * 100} for i in range(2000)]
    expected = "".join(f"user: {m['content']}\n" for m in chat) + "".join(map(str, range(1000)))
    assert render_messages(tokenizer, chat) == expected


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ] }}"])
def test_any_error_of_a_template_is_named(template: str) -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="messages that the tokenizer's template takes"):
        chat_text(tokenizer, MESSAGES)
    assert around_messages(tokenizer) is None
