"""``SamplingSettings``: how the tokens of a bundle's answers are chosen; defaults come from generation_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypedDict

import torch

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, ConfigError

GENERATION_FILE = "generation_config.json"
#: Field -> its name in that file. Not the temperature: answers are greedy unless a caller asks for one.
_NAMES = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop_strings",
}


class SamplingKeywords(TypedDict, total=False):
    """The fields of :class:`SamplingSettings`, as keywords."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    stop: str | Sequence[str] | None


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of ``export/runner/sampler.h``. None: the model's default, or no effect.

    Args:
        temperature: 0 is greedy, where only the penalty counts.
        top_k, top_p, min_p: draw from the so many most probable tokens (0: all), from those that together have this
            probability, from those that have this share of the most probable one's.
        repetition_penalty: divides positive logits of earlier tokens, and multiplies negative ones (Keskar et al.,
            arXiv 1909.05858, section 4.1, as in transformers).
        stop: the string, or strings, before which an answer ends.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = limited(0, 1e300, default=0.0)
    top_k: int | None = limited(0, default=None)
    top_p: float | None = limited(0, 1, above=True, default=None)
    min_p: float | None = limited(0, 1, default=None)
    repetition_penalty: float | None = limited(0.01, 100, default=None)
    stop: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        check_fields(self, "{}")
        if self.stop is not None and not all(isinstance(text, str) and text for text in self.stop):
            argument(self.stop, "stop").wrong("a list of texts, none of them empty")

    def with_defaults(self, other: SamplingSettings) -> SamplingSettings:
        """Settings that are None are those of ``other``."""
        unset = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **unset)

    def choose(self, logits_V: torch.Tensor, before: Sequence[int], random: torch.Generator) -> int:
        """The next token after ``before``: the most probable one (the first of equals), or drawn."""
        if self.repetition_penalty is not None and self.repetition_penalty != 1:
            logits_V = _penalised(logits_V, before, self.repetition_penalty)
        if self.temperature == 0:
            return int(torch.argmax(logits_V))
        # finite or -inf: never NaN
        shares_V = torch.softmax((logits_V.double() - logits_V.max()) / self.temperature, -1)
        sorted_V, order_V = shares_V.sort(descending=True, stable=True)
        if self.top_k:
            sorted_V[self.top_k :] = 0
        if self.top_p is not None and self.top_p < 1:
            sorted_V = sorted_V.where(sorted_V.cumsum(-1) - sorted_V < self.top_p * sorted_V.sum(), 0)
        if self.min_p:
            sorted_V = sorted_V.where(sorted_V >= self.min_p * sorted_V[0], 0)
        shares_V = torch.zeros_like(shares_V).scatter_(-1, order_V, sorted_V)
        return int(torch.multinomial(shares_V, 1, generator=random))


def _penalised(logits_V: torch.Tensor, before: Sequence[int], penalty: float) -> torch.Tensor:
    logits_V, tokens = logits_V.clone(), torch.tensor(sorted(set(before)), dtype=torch.int64)
    logits = logits_V[tokens]
    logits_V[tokens] = torch.where(logits < 0, logits * penalty, logits / penalty)
    return logits_V


def defaults_of(folder: Path) -> SamplingSettings:
    """The settings in a bundle's generation_config.json. Raises ArtifactError: one is out of range."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return SamplingSettings()
    config = parse(read_bytes(path), path, unique=False)
    try:
        return SamplingSettings(**{ours: config.get(theirs) for ours, theirs in _NAMES.items()})
    except ConfigError as error:
        raise ArtifactError(
            f"{path}, {_NAMES[error.what]}", expected=error.expected, found=error.found, fix="Export the bundle again."
        ) from error
