"""Decoding steps that are fed with given tokens, timed, and taken back: the next round begins where this one did."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.observe import timings
from torch_pi2.observe.steps import timed_steps
from torch_pi2.rewrite.handle import store_of

#: Tokens of each sequence's prompt.
PROMPT = 8
#: Parts of a step that our operators are, in the core's clock.
KINDS = {"linears": timings.LINEAR, "predictor": timings.PREDICTOR, "ffn": timings.FFN}


@dataclass(frozen=True)
class Round:
    """Steps that were timed.

    Attributes:
        ms: of a step by part: ``KINDS``, and ``rest`` (attention, norms, Python). stats: of the store, or None.
    """

    steps: int
    seconds: float
    ms: dict[str, float]
    stats: dict[str, int] | None = None


class Steps:
    """Decoding of a model at one batch size, after one prompt.

    Args:
        prompt_BT: int64 ids that every round continues. tokens: most steps of a round.
        compiled: else each step is Hugging Face's forward, with Python around every layer.
    """

    def __init__(
        self, model: nn.Module, batch: int, prompt_BT: torch.Tensor, tokens: int, *, compiled: bool = False
    ) -> None:
        self.model, self.batch = model, batch
        self.context = prompt_BT.shape[1] + tokens
        self._decoder = Decoder(model, max_tokens=self.context, batch=batch, compiled=compiled)
        self._decoder.prompt(prompt_BT)
        self._start = self._decoder.length
        self._store = store_of(model)

    def run(self, ids_BT: torch.Tensor, limit_s: float = math.inf) -> Round:
        """Feed ``ids_BT``, a token of each sequence a step; after ``limit_s`` and two steps it ends early."""
        found = timed_steps(self._decoder, ids_BT, self._store, limit_s)
        by_kind = {part: found.ms(kind) / found.steps for part, kind in KINDS.items()}
        self._rewind()
        ms = {**by_kind, "rest": found.seconds * 1e3 / found.steps - sum(by_kind.values())}
        return Round(found.steps, found.seconds, ms, found.stats)

    def _rewind(self) -> None:
        """As after the prompt: keys and values beyond it are not seen, and overwritten."""
        self._decoder.rollback(self._decoder.length - self._start)
