"""A bundle's tokenizer: prompts and chats to tokens, tokens to text while they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.extras import how_to_install
from torch_pi2.base.fields import argument
from torch_pi2.errors import ArtifactError, ConfigError, LibraryMissingError
from torch_pi2.export.chat import render_messages

#: Tokens of the prompt that are decoded with an answer: the text of a token depends on the one before.
_CONTEXT = 8
#: A token that is one byte of a character.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a bundle, with transformers; no code of the folder is run.

    Raises:
        LibraryMissingError: transformers is not installed. ArtifactError: there is no tokenizer, or it is damaged.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise LibraryMissingError(
            "transformers",
            expected="it, for text",
            found=str(error),
            fix=f"{how_to_install('hf')}, or pass token ids.",
        ) from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of unknown model types, which do not matter for tokenizers
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types for damaged files
        raise ArtifactError(
            f"tokenizer of {folder}",
            expected="tokenizer.json and tokenizer_config.json, as the model's folder has them",
            found=(str(error).strip() or type(error).__name__).splitlines()[0],
            fix="Export again with tokenizer=..., or pass token ids.",
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def encode(
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | torch.Tensor, tokenizer: Callable[[], Any], vocab: int
) -> list[int]:
    """Token ids of text, of messages of a chat, or of ids themselves (``[T]`` or ``[1, T]``).

    Raises:
        ConfigError: there are no tokens, one is not below ``vocab``, or the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer()(prompt)["input_ids"])
    elif isinstance(prompt, torch.Tensor):
        ids = prompt.flatten().tolist() if prompt.dim() == 1 or prompt.shape[0] == 1 else []
    elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        argument(prompt, "prompt").wrong("text, messages, or tokens of one sequence")
    elif prompt and isinstance(prompt[0], Mapping):
        ids = list(tokenizer()(chat_text(tokenizer(), prompt), add_special_tokens=False)["input_ids"])
    else:
        ids = list(prompt)
    wrong = next((t for t in ids if type(t) is not int or not 0 <= t < vocab), None)
    if not ids or wrong is not None:
        raise ConfigError(
            "prompt",
            expected=f"text, messages, or tokens of one sequence below {vocab}",
            found=f"the token {wrong!r}" if ids else "no tokens",
            fix="Pass at least one token, and the tokenizer of this model.",
        )
    return ids


def chat_text(tokenizer: Any, messages: Any) -> str:
    """The text of ``messages`` by the tokenizer's template, up to where the answer begins. Raises ConfigError."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "chat",
            expected="a tokenizer with a chat template",
            found="none in tokenizer_config.json",
            fix="Pass the prompt as text, or export with a tokenizer that has one.",
        )
    try:
        return render_messages(tokenizer, messages)
    except ConfigError:
        raise
    except Exception as error:  # a template raises what it likes: it is a program
        raise ConfigError(
            "chat",
            expected="messages that the tokenizer's template takes: a role and a content each",
            found=str(error) or type(error).__name__,
            fix="Correct them.",
        ) from error


class Detokenizer:
    """Text of a growing sequence, in pieces.

    A token may be part of a character, and some tokenizers write a space before a word only if a word precedes it. So
    new text is the difference of two decodings that begin at an earlier token, held back while it ends within a
    character. Later tokens do not change it, with one exception: a byte token that forms no character with those before
    it turns them into U+FFFD, too. ``export/runner/tokenizer/text_stream.cc`` does the same.

    Args:
        tokenizer: transformers'. prompt: tokens before the first that is added.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        first = max(len(prompt) - _CONTEXT, 0)
        # Do not begin within a run of bytes, which is decoded as a whole.
        while first > 0 and not self._stands_alone(prompt[first]):
            first -= 1
        self._ids = list(prompt[first:])
        # A character whose first bytes are the prompt's belongs to the answer.
        ends = range(len(self._ids), max(len(self._ids) - 4, -1), -1)
        self._answer = next((n for n in ends if not self._decode(self._ids[:n]).endswith("\ufffd")), len(self._ids))
        self._start, self._shown = 0, self._answer

    def add(self, token: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._ids.append(token)
        piece = self._new()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return piece

    def rest(self) -> str:
        """Text that was held back, at the end."""
        piece = self._new()
        self._shown = len(self._ids)
        return piece

    def text(self) -> str:
        """The text of all added tokens, decoded at once."""
        return _behind(self._decode(self._ids[: self._answer]), self._decode(self._ids))

    def _new(self) -> str:
        return _behind(self._decode(self._ids[self._start : self._shown]), self._decode(self._ids[self._start :]))

    def _stands_alone(self, token: int) -> bool:
        """Whether the token has text (special ones have none) and is no byte of a character."""
        text = self._tokenizer.convert_ids_to_tokens(token)
        return text is not None and not _BYTE.fullmatch(text) and self._decode([token]) != ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _behind(before: str, whole: str) -> str:
    """``whole`` without its common beginning with ``before``."""
    same = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
    return whole[same:]
