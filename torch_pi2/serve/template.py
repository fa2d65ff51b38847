"""A talk as token ids, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_pi2.errors import ConfigError


def has_template(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` says how a talk is written."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The text of the template; of several, the one for ``tools`` if there are any.

    Raises:
        ConfigError: there is none.
    """
    if not has_template(tokenizer):
        raise ConfigError(
            "messages",
            expected="a model whose tokenizer has a chat template",
            found="one that has none",
            fix="Use /v1/completions, or put a chat_template.jinja into the model's folder.",
        )
    text: str = tokenizer.get_chat_template(tools=tools)
    return text


def ids_of_talk(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """``messages``, with ``tools`` that may be called, and the beginning of the answer.

    Raises:
        ConfigError: there is no template, or it does not take these.
    """
    template = template_of(tokenizer, tools)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises what its author likes
        raise ConfigError(
            "messages", expected="what the chat template takes", found=str(error), fix="Correct the messages."
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
