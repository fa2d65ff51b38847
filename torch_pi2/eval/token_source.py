"""Ids that measured sequences are fed with: text where the model has a tokenizer, else drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_pi2.profiling.text import stdlib_text
from torch_pi2.store.firing import TokenStream
from torch_pi2.store.trust import trusted

#: Of a text that a real model is fed with.
TEXT_BYTES = 400_000


@dataclass
class Tokens:
    """Ids that sequences are fed with, whatever the model says: it repeats itself.

    Attributes:
        about: what they are.
    """

    about: str
    _draw: Callable[[int], torch.Tensor]

    def draw(self, tokens: int) -> torch.Tensor:
        """The next int64 ``[B, T]``."""
        return self._draw(tokens)


def tokens_of(model: Any, folder: Path, split: str, sequences: int, seed: int, trust_remote_code: bool) -> Tokens:
    """What ``sequences`` of them are fed with: of a real model's text, ``split`` ``train`` or ``heldout``, else random.

    folder: with the model's tokenizer, if it has one.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    synthetic = bool(getattr(model.config, "torch_pi2_synthetic", None))
    ids = None if synthetic else _text_ids(folder, split, vocabulary, trust_remote_code)
    if ids is None:
        streams = [TokenStream(vocabulary, topics=synthetic, generator=generator) for _ in range(sequences)]
        kind = "of one topic for a while" if synthetic else "independent"
        return Tokens(f"drawn at random, {kind}", lambda n: torch.stack([stream.draw(n) for stream in streams]))
    at_B = torch.randint(len(ids), (sequences,), generator=generator)

    def draw(tokens: int) -> torch.Tensor:
        where_BT = (at_B[:, None] + torch.arange(tokens)) % len(ids)
        at_B.add_(tokens).remainder_(len(ids))
        return ids[where_BT]

    return Tokens("source of Python's standard library, each sequence elsewhere in it", draw)


def _text_ids(folder: Path, split: str, vocabulary: int, trust_remote_code: bool) -> torch.Tensor | None:
    """Ids ``[N]`` of text; None if the folder has no tokenizer for its vocabulary."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trusted(folder, trust_remote_code), local_files_only=True
        )
    except (OSError, ValueError):
        return None
    text = stdlib_text(split, max_bytes=TEXT_BYTES)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids if len(ids) and int(ids.max()) < vocabulary else None
