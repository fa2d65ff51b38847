"""Chat templates: which are described for the runner, errors that they raise, and templates without end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tiny_bundle import TEXT
from tiny_tokenizers import byte_tokenizer

from torch_pi2.errors import ConfigError
from torch_pi2.export.text import chat_text, describe_template, write_chat

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


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ] }}"])
def test_any_error_of_a_template_is_named(template: str) -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="messages that the tokenizer's template takes"):
        chat_text(tokenizer, MESSAGES)
    assert describe_template(tokenizer) is None


EACH, END = "{% for m in messages %}", "{% endfor %}A:"
#: Templates that do more with what is said than write or strip it.
DEPEND = [
    *[
        "{{ m.content | e }}",
        "{{ m.content | tojson }}",
        "{{ m.content | replace('  ', ' ') }}",
        "{{ m.content | upper }}",
    ],
    *["{{ m.content.lower() }}", "{{ m.content | title }}", "{{ m.content | length }}{{ m.content }}"],
    *["{{ m.content[:64] }}", "{{ m.content[:999999] }}", "{{ m.content.split('</think>')[-1] }}"],
    *["{{ m.content }}{% if '/no_think' in m.content %}x{% endif %}", "{% if m.content %}{{ m.content }}x{% endif %}"],
    *["{% if m.content.startswith('never said') %}x{% endif %}{{ m.content }}", "{{ m.content.strip('\\n') }}"],
    *[
        "{% if m.content == 'x' %}x{% endif %}{{ m.content }}",
        "{{ (m.role + m.content) | trim }}",
        "{{ m.content }}" * 2,
    ],
    *["{% set c = m.content ~ '' %}{{ c | wordwrap(30) }}", "{% filter upper %}{{ m.content }}{% endfilter %}"],
]
#: And that do not, however they find that out.
PLAIN = [
    *["{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"],
    *["{{ '[' + m.content + ']' }}", "{% macro f(c) %}{{ c }}{% endmacro %}{{ f(m.content) }}"],
    "{% if m.role == 'assistant' and '</think>' in m.content %}x{% endif %}{{ m.content }}",
    "{% set ns = namespace(n=1) %}{% if not (m.content.startswith('<a>') and m.content.endswith('</a>')) %}"
    "{% set ns.n = 2 %}{% endif %}{{ m.content }}",
]


@pytest.mark.parametrize("body", DEPEND)
def test_templates_that_depend_on_what_is_said_are_not_described(
    body: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = EACH + body + END
    assert not write_chat(tokenizer, tmp_path)
    assert "chat.json is left out: what the chat template writes depends on the messages in other ways" in caplog.text
    tokenizer.chat_template = EACH + "{% if m.role == 'user' %}{{ m.content }}{% else %}" + body + "{% endif %}" + END
    found = describe_template(tokenizer)
    assert found is not None
    assert found["system_user"] is None


@pytest.mark.parametrize("body", PLAIN)
def test_templates_that_write_what_is_said_are_described(body: str) -> None:
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = EACH + body + END
    found = describe_template(tokenizer)
    assert found is not None
    assert found["system_user"] is not None
    assert found["strips"] == {"system": False, "user": False, "assistant": False}


def test_each_role_is_stripped_or_not() -> None:
    tokenizer = byte_tokenizer(TEXT)
    for role, other in (("system", "user"), ("user", "system")):
        tokenizer.chat_template = EACH + f"{{% if m.role == '{role}' %}}{{{{ m.content | trim }}}}"
        tokenizer.chat_template += "{% else %}{{ m.content }}{% endif %}" + END
        found = describe_template(tokenizer)
        assert found is not None
        assert found["strips"] == {role: True, other: False, "assistant": False}
    # Llama 2's: a question alone is stripped at both ends, one behind a system message at one.
    tokenizer.chat_template = (
        "{% set c = messages[-1].content %}"
        "{% if messages | length > 1 %}{% set c = messages[0].content + c %}{% endif %}{{ '[' + c.strip() + ']' }}"
    )
    assert describe_template(tokenizer) == {
        "user": ["[", "]"],
        "system_user": None,
        "assistant": None,
        "strips": {"system": False, "user": True, "assistant": False},
    }


def test_tags_of_transformers_do_not_hide_what_a_template_looks_for() -> None:
    tokenizer = byte_tokenizer(TEXT)
    body = "{% if m.content.startswith('rare') %}x{% endif %}{{ m.content }}"
    tokenizer.chat_template = EACH + body + "{% generation %}{% endgeneration %}" + END
    assert describe_template(tokenizer) is None
