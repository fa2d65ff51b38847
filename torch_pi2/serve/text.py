"""Between tokens and text: ``TextStream`` decodes tokens one by one; chat templates turn messages into token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch_pi2.decode.sequence import StopStrings
from torch_pi2.errors import ConfigError


class TextStream:
    """Decodes tokens as they come, up to the first of some stop strings.

    Held back are tokens that are a part of a character, and text that may be the beginning of a stop string.

    Args:
        tokenizer: of Hugging Face.
        stops: strings before which the text ends.
        hidden: ids that are left out of the text; None: those that the tokenizer calls special.
        before: ids in front of the text; its first space may depend on them.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        hidden: Collection[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._stops, self._hidden = tokenizer, StopStrings(stops), hidden
        self._ids = list(before)
        self._from, self._to = 0, len(before)  # the ids whose text was returned last

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; all text after it is dropped."""
        return self._stops.reached

    def add(self, token: int) -> str:
        """The text that ``token`` completes."""
        if self.stopped:
            return ""
        self._ids.append(token)
        # a token's text depends on the tokens before it (spaces); an incomplete character decodes to U+FFFD
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        if whole.endswith("\ufffd"):
            return ""
        self._from, self._to = self._to, len(self._ids)
        return self._stops.add(whole[len(known) :])

    def end(self) -> str:
        """The text that was held back, when no token follows."""
        if self.stopped:
            return ""
        known, whole = self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :])
        self._from = self._to = len(self._ids)
        return self._stops.add(whole[len(known) :]) + self._stops.flush()

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None)
        return text


def has_template(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The chat template; of several, the one for ``tools`` if there are any. Raises ConfigError: there is none."""
    if not has_template(tokenizer):
        raise ConfigError(
            "messages",
            expected="a model whose tokenizer has a chat template",
            found="one that has none",
            fix="Use /v1/completions, or put a chat_template.jinja into the model's folder.",
        )
    text: str = tokenizer.get_chat_template(tools=tools)
    return text


def chat_ids(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of ``messages``, with ``tools`` that may be called, and of the beginning of the answer.

    Raises:
        ConfigError: there is no template, or it does not take these messages.
    """
    template = template_of(tokenizer, tools)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises whatever its author chose
        raise ConfigError(
            "messages", expected="what the chat template takes", found=str(error), fix="Correct the messages."
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
