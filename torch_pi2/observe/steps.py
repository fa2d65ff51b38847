"""Decoding steps that are fed with given tokens, not with what the model says (that repeats itself), and timed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from torch_pi2.decode.decoder import Decoder
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe import timings


@dataclass(frozen=True)
class TimedSteps:
    """How long they took together, the core's clock, what the store counted (None: no store), and what the model would
    have said after each (as :meth:`Decoder.step` returns it).
    """

    seconds: float
    timings: list[list[int]]
    stats: dict[str, int] | None
    answers: list[torch.Tensor]

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.answers)

    def ms(self, kind: int) -> float:
        """Of one kind of :mod:`torch_pi2.observe.timings`, of all steps together."""
        return timings.milliseconds(self.timings, kind)

    @property
    def misses(self) -> float:
        """Neurons that were not in the cache of the store."""
        return float(self.stats["wanted"] - self.stats["hits"]) if self.stats else 0.0


def timed_steps(
    decoder: Decoder, ids_BT: torch.Tensor, store: Store | None = None, limit_s: float = math.inf
) -> TimedSteps:
    """Feed ``ids_BT``, a token of each sequence a step; after ``limit_s`` and two steps it ends early."""
    if store is not None:
        store.stats(reset=True)
    timings.read()  # forget what was before
    answers, seconds, started = list[torch.Tensor](), 0.0, time.perf_counter()
    for next_B1 in ids_BT.split(1, dim=1):
        answers.append(decoder.step(next_B1))
        seconds = time.perf_counter() - started
        if seconds > limit_s and len(answers) >= 2:
            break
    return TimedSteps(seconds, timings.read(), None if store is None else store.stats(), answers)
