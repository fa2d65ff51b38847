"""A vocabulary for synthetic models that are served, the same for a folder and for a GGUF file.

Every letter of a prompt is one token. Every token of an answer is text that can be sent at once. Token 0 ends a text.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

from torch_pi2.errors import ConfigError

#: Begins and ends texts. Answers never contain it: its row in the head of GGUF files is zero, our folders have no end.
END, END_ID = "<s>", 0
#: Merges of the tokenizer, which needs at least one; prompts have no spaces.
MERGES = (("Ġ", "Ġ"),)
_LETTERS = ["Ġ", "Ċ", *string.ascii_letters, *string.digits, *string.punctuation]


def vocabulary(size: int) -> list[str]:
    """Tokens in the notation of byte-level tokenizers (a space is a G with a dot). Raises ConfigError: fewer than
    letters need.
    """
    fixed = [END, *_LETTERS, *("".join(pair) for pair in MERGES)]
    if size < len(fixed):
        fix = "Choose another shape."
        raise ConfigError("vocabulary", expected=f"{len(fixed)} tokens or more, for letters", found=str(size), fix=fix)
    return fixed + [f"Ġw{number}" for number in range(size - len(fixed))]


def save_tokenizer(folder: Path, size: int) -> None:
    """Write the vocabulary as a Hugging Face tokenizer into a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: number for number, token in enumerate(vocabulary(size))}
    raw = Tokenizer(models.BPE(ids, list(MERGES)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=END, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)


def text(tokens: int, drawn: random.Random) -> str:
    """Random text of so many tokens."""
    return "".join(drawn.choices(string.ascii_lowercase, k=tokens))
