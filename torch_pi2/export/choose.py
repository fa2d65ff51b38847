"""``Choosing``: how tokens of a bundle's answers are chosen, and what its model's generation_config.json says of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, ConfigError

GENERATION_FILE = "generation_config.json"
#: Setting of ours -> its name there. Not the temperature: answers are greedy unless one is asked for.
_NAMES = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop_strings",
}


@dataclass(frozen=True)
class Choosing:
    """``export/runner/sampler.h`` has the same settings. None: as the model has it, or else without effect.

    Args:
        temperature: 0 is greedy, where only the penalty counts.
        top_k, top_p, min_p: drawn from the so many most probable tokens (0: all), of these from those that make up this
            much, of these from those that have so many times the probability of the first.
        repetition_penalty: divides positive logits of tokens that were there before, and multiplies negative ones
            (Keskar et al., arXiv 1909.05858, section 4.1, as transformers has it).
        stop: answers end before one of these strings, or this one; then a list.

    Raises:
        ConfigError: one of them makes no sense.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name, fits, expected in _RULES:
            value = getattr(self, name)
            if (value is not None or name == "temperature") and not fits(value):
                raise ConfigError(name, expected=expected, found=str(value), fix="Correct it.")

    def or_as(self, other: Choosing) -> Choosing:
        """``other``'s settings where it has none."""
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
    logits_V, there = logits_V.clone(), torch.tensor(sorted(set(before)), dtype=torch.int64)
    found = logits_V[there]
    logits_V[there] = torch.where(found < 0, found * penalty, found / penalty)
    return logits_V


def _is_number(value: object, least: float, most: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= most  # type: ignore[operator]


def is_whole(value: object, least: int = 0, most: float = math.inf) -> bool:
    """Whether it is a whole number of ``least`` to ``most``."""
    return type(value) is int and least <= value <= most


def _are_stops(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(stop, str) and stop for stop in value)


#: Name, what fits, in words.
_RULES = (
    ("temperature", lambda v: _is_number(v, 0, sys.float_info.max), "0 (greedy) or more"),
    ("top_k", is_whole, "0 (all) or more"),
    ("top_p", lambda v: _is_number(v, 0, 1) and v > 0, "more than 0, at most 1"),
    ("min_p", lambda v: _is_number(v, 0, 1), "0 to 1"),
    ("repetition_penalty", lambda v: _is_number(v, 0.01, 100), "0.01 to 100; 1 is none"),
    ("stop", _are_stops, "a list of texts, none of them empty"),
)


def of_model(folder: Path) -> Choosing:
    """What the generation_config.json of a bundle says. Raises ArtifactError: it makes no sense."""
    path = folder / GENERATION_FILE
    if not path.is_file():
        return Choosing()
    said = parse(read_bytes(path), path, unique=False)
    found = {ours: said.get(theirs) for ours, theirs in _NAMES.items()}
    try:
        return Choosing(**found)
    except ConfigError as error:
        raise ArtifactError(
            f"{path}, {_NAMES[error.what]}", expected=error.expected, found=error.found, fix="Export the bundle again."
        ) from error
