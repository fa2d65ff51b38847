"""``Served``: one model with its tokenizer, its batch, and what a request is to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_pi2.decode.generate import Sampling, end_tokens
from torch_pi2.errors import ConfigError
from torch_pi2.serve.batch import Batch, Ended, Sequence, Taken
from torch_pi2.serve.constraint import Constraint, Grammars
from torch_pi2.serve.requests import Asked, Chat, Completion
from torch_pi2.serve.template import ids_of_talk
from torch_pi2.serve.text import Text


@dataclass
class Piece:
    """What is new of an answer: sure text, tokens that came, and at the end why (``stop`` or ``length``)."""

    text: str
    tokens: list[Taken] = field(default_factory=list)
    finish: str | None = None


class Served:
    """A model that answers requests.

    Args:
        name: as clients call it. model, tokenizer: of Hugging Face. batch: of this model, started.

    Attributes:
        created: seconds since 1970.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, batch: Batch) -> None:
        self.name, self.tokenizer, self.batch, self.created = name, tokenizer, batch, int(time.time())
        self._ends = end_tokens(model, None)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._grammars = Grammars(tokenizer, self._ends, self._vocabulary)

    def constraints(self, asked: Completion | Chat, count: int) -> list[Constraint | None]:
        """Of each of ``count`` choices: ``response_format``. Raises ConfigError: it cannot be followed."""
        wanted = None if asked.response_format is None else asked.response_format.schema_wanted
        return [None if wanted is None else self._grammars.of_schema(wanted) for _ in range(count)]

    def prompts(self, asked: Completion | Chat) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ConfigError: no tokens, tokens that the model has not, or a chat without a template.
        """
        if isinstance(asked, Chat):
            return [self._checked(ids_of_talk(self.tokenizer, asked.messages))]
        return [
            self._checked(prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"])
            for prompt in asked.prompts
        ]

    def _checked(self, ids: list[int]) -> list[int]:
        wrong = next((token for token in ids if not 0 <= token < self._vocabulary), None)
        if not ids or wrong is not None:
            raise ConfigError(
                "prompt",
                expected=f"one token or more, of 0 to {self._vocabulary - 1}",
                found="none" if wrong is None else f"the token {wrong}",
                fix="Send some text.",
            )
        return ids

    async def answer(self, asked: Completion | Chat, prompts: list[list[int]]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of the answers as they come, each with the number of its choice: ``asked.n`` of each prompt.

        Whoever stops listening cancels what is not done.

        Raises:
            ShapeError: prompt and answer have no room. BusyError: too many wait. ConfigError: of the request.
        """
        told: asyncio.Queue[tuple[int, Taken | Ended]] = asyncio.Queue()
        constraints = await asyncio.to_thread(self.constraints, asked, asked.n * len(prompts))
        sequences = [
            self._sequence(asked, prompts[number // asked.n], number, told, constraint)
            for number, constraint in enumerate(constraints)
        ]
        texts = [Text(self.tokenizer, asked.stop) for _ in sequences]
        try:
            for sequence in sequences:
                self.batch.submit(sequence)
            going = set(range(len(sequences)))
            while going:
                number, what = await told.get()
                if number not in going:
                    continue
                piece = _piece(what, texts[number], sequences[number])
                yield number, piece
                if piece.finish is not None:
                    going.remove(number)
                    sequences[number].cancel()
        finally:
            for sequence in sequences:
                sequence.cancel()

    def _sequence(
        self,
        asked: Completion | Chat,
        ids: list[int],
        number: int,
        told: asyncio.Queue[Any],
        constraint: Constraint | None,
    ) -> Sequence:
        loop = asyncio.get_running_loop()
        wrong = next((token for token in asked.logit_bias if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ConfigError(
                "logit_bias",
                expected=f"tokens of 0 to {self._vocabulary - 1}",
                found=str(wrong),
                fix="Use the tokenizer of this model.",
            )
        seed = secrets.randbits(48) if asked.seed is None else asked.seed & (1 << 48) - 1
        return Sequence(
            ids,
            limit=_limit(asked, self.batch.max_tokens - len(ids)),
            tell=lambda what: loop.call_soon_threadsafe(told.put_nowait, (number, what)),
            ends=self._ends,
            sampling=Sampling(asked.temperature, 0, asked.top_p) if asked.temperature > 0 else None,
            seed=seed + number % asked.n,
            bias=asked.logit_bias,
            top=asked.top,
            constraint=constraint,
        )


def _limit(asked: Asked, room: int) -> int:
    """New tokens: OpenAI's defaults are 16 of a completion, and what there is room for of a chat."""
    if isinstance(asked, Chat):
        return asked.max_completion_tokens or asked.max_tokens or max(1, room)
    return asked.max_tokens or 16


def _piece(what: Taken | Ended, text: Text, sequence: Sequence) -> Piece:
    if isinstance(what, Ended):
        if what.error is not None:
            raise what.error
        return Piece(text.end(), finish="stop" if text.stopped else what.reason)
    new = "" if what.token in sequence.ends else text.add(what.token)
    return Piece(new, [what], "stop" if text.stopped else None)
