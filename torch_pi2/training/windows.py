"""Texts as windows of token ids, for training and held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from torch_pi2.errors import CalibrationError, ConfigError

#: Share of the text that is held back where no held-out text is given; at least so many windows.
_HELD_BACK = 0.02
_LEAST_HELD_BACK = 4


def windows_of(texts: Sequence[str], tokenizer: Any, window: int) -> torch.Tensor:
    """``[N, window]`` int32: tokens of ``texts``, each followed by an end of text; an incomplete window is dropped."""
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
    whole = len(ids) // window
    return torch.tensor(ids[: whole * window], dtype=torch.int32).view(whole, window)


def held_back(windows_NT: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to train on, and held-out ones from the end of the text. Raises CalibrationError: there are too few."""
    held = max(_LEAST_HELD_BACK, round(_HELD_BACK * len(windows_NT)))
    check_enough(len(windows_NT) - held, batch, windows_NT.shape[1])
    return windows_NT[:-held], windows_NT[-held:]


def check_enough(windows: int, batch: int, window: int, what: str = "text to train on") -> None:
    """Raises CalibrationError: fewer windows than a batch has."""
    if windows < batch:
        raise CalibrationError(
            what,
            expected=f"at least {batch} windows of {window} tokens",
            found=f"{max(0, windows)}",
            fix="Pass more text, or a smaller batch or window.",
        )


def check_model_takes(model: Any, *windows: torch.Tensor) -> None:
    """Raises ConfigError: ``model`` has fewer positions than ``windows``, or a smaller vocabulary."""
    places, window = getattr(model.config.get_text_config(), "max_position_embeddings", None), windows[0].shape[1]
    if places and window > places:
        raise ConfigError(
            "sparsify(window=...)",
            expected=f"at most {places}, the positions that the model has (max_position_embeddings)",
            found=str(window),
            fix="Pass a smaller window.",
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    highest = max(int(part.max()) for part in windows)
    if highest >= vocabulary:
        raise ConfigError(
            "sparsify(tokenizer=...)",
            expected=f"one that gives tokens of 0 to {vocabulary - 1}, the model's vocabulary",
            found=f"the token {highest}",
            fix="Use the tokenizer of this model.",
        )


def digest(*windows: torch.Tensor) -> str:
    """SHA-256 of the token ids."""
    found = hashlib.sha256()
    for part in windows:
        found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()
