"""Sequences that grow token by token, whoever computes the logits: :func:`torch_pi2.generate`, and bundles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch


class Growing:
    """A sequence that is being generated.

    Args:
        seed: with ``number`` added, that of its own generator ``random``.
        limit: of tokens. ends: tokens that end it.
        streamer: called with (number, token) for each.

    Attributes:
        tokens: so far, with the one that ended it. ended: "eos", "length" or None: not yet.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        limit: int,
        ends: Collection[int],
        streamer: Callable[[int, int], object] | None = None,
    ) -> None:
        self.number, self.random = number, torch.Generator().manual_seed(seed + number)
        self.tokens: list[int] = []
        self.ended: str | None = None
        self._limit, self._ends, self._streamer = limit, ends, streamer

    def take(self, token: int) -> None:
        """It goes on with ``token``."""
        self.tokens.append(token)
        self.ended = "eos" if token in self._ends else "length" if len(self.tokens) == self._limit else None
        if self._streamer is not None:
            self._streamer(self.number, token)


_Kind = TypeVar("_Kind", bound=Growing)


def grow(
    sequences: Sequence[_Kind],
    first: Iterable[torch.Tensor],
    step: Callable[[list[_Kind]], Iterable[tuple[_Kind, torch.Tensor]]],
    choose: Callable[[_Kind, torch.Tensor], int],
) -> None:
    """Let ``sequences`` grow until each has ended.

    Args:
        first: of each the logits ``[V]`` after its prompt. step: sequences that go on -> each with its next logits
            ``[V]``, in the order in which tokens are chosen from these. choose: the next token of a sequence.
    """
    live = list(zip(sequences, first))
    while live:
        for sequence, logits_V in live:
            sequence.take(choose(sequence, logits_V))
        going = [sequence for sequence, _ in live if sequence.ended is None]
        live = list(step(going)) if going else []
