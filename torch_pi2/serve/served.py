"""``Served``: one model with its tokenizer, its batch, and what a request is to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.decode import check_vocabulary
from torch_pi2.decode.generate import LEAST_TEMPERATURE, Sampling, end_tokens
from torch_pi2.errors import ConfigError
from torch_pi2.serve.batch import Batch, Ended, Sequence, Taken, closed
from torch_pi2.serve.constraint import Constraint, Grammars, Penalised, token_of
from torch_pi2.serve.requests import Asked, Chat, Completion
from torch_pi2.serve.template import ids_of_talk, template_of
from torch_pi2.serve.text import Text
from torch_pi2.serve.tools import Form, Function, Offer, form_of

#: Tokens before an answer that are looked at for how it begins.
_BEFORE = 16


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
        created: seconds since 1970. model, tokenizer, batch: as given.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, batch: Batch) -> None:
        self.name, self.tokenizer, self.batch, self.created = name, tokenizer, batch, int(time.time())
        self.model, self._ends = model, end_tokens(model, None)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._grammars = Grammars(tokenizer, self._ends, self._vocabulary)

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 of a token, which may be a part of a character."""
        return self._grammars.bytes_of(token)

    def offer(self, asked: Completion | Chat) -> Offer | None:
        """Functions that an answer may call; None: none. Raises ConfigError: the model's template has no calls."""
        if not isinstance(asked, Chat) or not asked.offered:
            return None
        functions = [tool.function for tool in asked.offered]
        return Offer(
            form_of(template_of(self.tokenizer, asked.tools_told)),
            tuple(Function(known.name, known.schema_wanted, bool(known.strict)) for known in functions),
            asked.needed,
            asked.several,
        )

    def constraints(self, asked: Completion | Chat, count: int) -> list[Constraint | None]:
        """Of each of ``count`` choices. Raises ConfigError: a schema cannot be followed."""
        return [self._constraint(asked) for _ in range(count)]

    def _constraint(self, asked: Completion | Chat) -> Constraint | None:
        wanted = None if asked.response_format is None else asked.response_format.schema_wanted
        offer, made = self.offer(asked), None
        if offer is not None and (offer.constrained or wanted is not None):
            made = self._grammars.of_offer(offer, wanted)
        elif wanted is not None:
            made = self._grammars.of_schema(wanted)
        if asked.frequency_penalty or asked.presence_penalty:
            return Penalised(asked.frequency_penalty, asked.presence_penalty, made)
        return made

    def prompts(self, asked: Completion | Chat) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ConfigError: no tokens, tokens that the model has not, more choices than the batch takes at a time, a chat
                without a template, or tools that it has not.
        """
        self._check_count(asked)
        if asked.top is not None:
            self.bytes_of(0)  # takes a second the first time, which is not the event loop's
        if isinstance(asked, Chat):
            self.offer(asked)
            return [self._checked(ids_of_talk(self.tokenizer, asked.talk, asked.tools_told))]
        return [
            self._checked(prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"])
            for prompt in asked.prompts
        ]

    def _check_count(self, asked: Completion | Chat) -> None:
        count, most = asked.n * (len(asked.prompts) if isinstance(asked, Completion) else 1), self.batch.most
        if count > most:
            raise ConfigError(
                "n",
                expected=f"at most {most} answers of all prompts: those that are decoded, and that may wait",
                found=str(count),
                fix="Ask for fewer, or start with more that may wait (--waiting).",
            )

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ConfigError("prompt", expected="one token or more", found="none", fix="Send some text.")
        most = torch.iinfo(torch.int64).max
        check_vocabulary(self.model, torch.tensor([max(-1, min(token, most)) for token in ids]), "prompt")
        return ids

    @cached_property
    def _special(self) -> set[int]:
        return {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}

    def _text(self, asked: Completion | Chat, form: Form | None, prompt: list[int]) -> Text:
        """Of an answer; a completion goes on with its prompt, on which its first space may depend."""
        before = prompt[-_BEFORE:] if isinstance(asked, Completion) else ()
        marks = {token_of(self.tokenizer, mark) for mark in (form.begin, form.end)} if form else set()
        return Text(self.tokenizer, asked.stop, self._special - marks if marks & self._special else None, before)

    async def answer(self, asked: Completion | Chat, prompts: list[list[int]]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of the answers as they come, each with the number of its choice: ``asked.n`` of each prompt.

        Whoever stops listening cancels what is not done.

        Raises:
            ShapeError: prompt and answer have no room. BusyError: too many wait.
            ClosedError: the server ends before it is whole. ConfigError: of the request.
        """
        told: asyncio.Queue[tuple[int, Taken | Ended]] = asyncio.Queue()
        constraints = await asyncio.to_thread(self.constraints, asked, asked.n * len(prompts))
        sequences = [
            self._sequence(asked, prompts[number // asked.n], number, told, constraint)
            for number, constraint in enumerate(constraints)
        ]
        offer = self.offer(asked)
        form = None if offer is None else offer.form
        texts = [self._text(asked, form, sequence.prompt) for sequence in sequences]
        try:
            for sequence in sequences:
                self.batch.submit(sequence)
            if isinstance(asked, Completion) and asked.echo:
                for number in range(len(sequences)):
                    prompt = asked.prompts[number // asked.n]
                    yield number, Piece(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))
            going = set(range(len(sequences)))
            while going:
                number, what = await told.get()
                if number not in going:
                    continue
                piece = _piece(what, texts[number], sequences[number])
                yield number, piece
                if piece.finish is not None:
                    going.remove(number)
                    sequences[number].cancel("stop")
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

        def tell(what: Taken | Ended) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended, and nobody listens
                loop.call_soon_threadsafe(told.put_nowait, (number, what))

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
            tell=tell,
            ends=self._ends,
            sampling=Sampling(asked.temperature, 0, asked.top_p) if asked.temperature >= LEAST_TEMPERATURE else None,
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
        if what.reason == "cancelled":  # by nobody who listens: they do not
            raise closed()
        return Piece(text.end(), finish="stop" if text.stopped else what.reason)
    new = "" if what.token in sequence.ends else text.add(what.token)
    return Piece(new, [what], "stop" if text.stopped else None)
