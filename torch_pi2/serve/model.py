"""``ServedModel``: a model with tokenizer and batch; converts requests to sequences, and tokens to text."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.decode.decoder import check_vocabulary
from torch_pi2.decode.sequence import LEAST_TEMPERATURE, Sampling, TextStream, end_tokens, hidden_tokens
from torch_pi2.errors import ConfigError
from torch_pi2.serve.batch import Batch, EndEvent, Sequence, TokenEvent, closed
from torch_pi2.serve.chat import chat_ids, template_of
from torch_pi2.serve.constraint import Constraint, Grammars, Penalties, token_of
from torch_pi2.serve.requests import AnyRequest, ChatRequest, CompletionRequest
from torch_pi2.serve.tools import ToolCallFormat, ToolSet, format_of

#: Last tokens of a prompt that are used to detokenise its completion.
_BEFORE = 16


@dataclass
class Piece:
    """The next part of an answer: text, its tokens, and at the end ``finish`` (``stop`` or ``length``)."""

    text: str
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None


class ServedModel:
    """A model that answers requests under ``name``. ``batch``: of this model, started. ``created``: Unix time.
    ``hidden``: tokens that texts leave out.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer: Any, batch: Batch) -> None:
        self.name, self.tokenizer, self.batch, self.created = name, tokenizer, batch, int(time.time())
        self.model, self._ends = model, end_tokens(model, None, tokenizer)
        self.hidden = hidden_tokens(tokenizer, self._ends)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._grammars = Grammars(tokenizer, self._ends, self._vocabulary)

    def bytes_of(self, token: int) -> bytes:
        return self._grammars.bytes_of(token)

    def tools(self, request: AnyRequest) -> ToolSet | None:
        """Functions that an answer may call, if any. Raises ConfigError: the chat template has no calls."""
        if not isinstance(request, ChatRequest) or not request.callable_tools:
            return None
        form = format_of(template_of(self.tokenizer, request.template_tools))
        functions = tuple(tool.function for tool in request.callable_tools)
        return ToolSet(form, functions, request.call_required, request.several)

    def _constraint(self, request: AnyRequest) -> Constraint | None:
        schema = None if request.response_format is None else request.response_format.schema_wanted
        tools = self.tools(request)
        constraint: Constraint | None = None
        if tools is not None and (tools.constrained or schema is not None):
            constraint = self._grammars.of_tools(tools, schema)
        elif schema is not None:
            constraint = self._grammars.of_schema(schema)
        if request.frequency_penalty or request.presence_penalty:
            return Penalties(request.frequency_penalty, request.presence_penalty, constraint)
        return constraint

    def prompts(self, request: AnyRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises ConfigError: the model, its tokenizer or the batch cannot take them."""
        count = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        if count > self.batch.capacity:
            expected, found = f"at most {self.batch.capacity} answers to all prompts, decoded or waiting", str(count)
            argument(count, "n", "Ask for fewer, or start with a longer queue (--max-queue).").wrong(expected, found)
        if request.top is not None:
            self.bytes_of(0)  # takes a second the first time: not in the event loop
        if isinstance(request, ChatRequest):
            self.tools(request)
            return [self._checked(chat_ids(self.tokenizer, request.template_messages, request.template_tools))]
        return [self._checked(p if isinstance(p, list) else self.tokenizer(p)["input_ids"]) for p in request.prompts]

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ConfigError("prompt", expected="one token or more", found="none", fix="Send some text.")
        most = torch.iinfo(torch.int64).max
        check_vocabulary(self.model, torch.tensor([max(-1, min(token, most)) for token in ids]), "prompt")
        return ids

    def _text(self, request: AnyRequest, form: ToolCallFormat | None, prompt: list[int]) -> TextStream:
        """The text of an answer. The first space of a completion may depend on its prompt."""
        before = prompt[-_BEFORE:] if isinstance(request, CompletionRequest) else ()
        marks = {token_of(self.tokenizer, mark) for mark in (form.begin, form.end)} if form else set()
        return TextStream(self.tokenizer, request.stop, self.hidden - marks, before)

    async def answer(self, request: AnyRequest, prompts: list[list[int]]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of answers as they come, each with its choice's number; cancelled if the caller stops iterating."""
        events: asyncio.Queue[tuple[int, TokenEvent | EndEvent]] = asyncio.Queue()
        count = request.n * len(prompts)
        constraints = await asyncio.to_thread(lambda: [self._constraint(request) for _ in range(count)])
        ids = [prompt for prompt in prompts for _ in range(request.n)]
        sequences = [self._sequence(request, ids[i], i, events, made) for i, made in enumerate(constraints)]
        tools = self.tools(request)
        form = None if tools is None else tools.form
        texts = [self._text(request, form, sequence.prompt) for sequence in sequences]
        try:
            for sequence in sequences:
                self.batch.submit(sequence)
            if isinstance(request, CompletionRequest) and request.echo:
                for number in range(count):
                    prompt = request.prompts[number // request.n]
                    yield number, Piece(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))
            going = set(range(count))
            while going:
                number, event = await events.get()
                if number not in going:
                    continue
                piece = _piece(event, texts[number])
                yield number, piece
                if piece.finish is not None:
                    going.remove(number)
                    sequences[number].cancel("stop")
        finally:
            for sequence in sequences:
                sequence.cancel()

    def _sequence(
        self, request: AnyRequest, ids: list[int], number: int, events: asyncio.Queue[Any], within: Constraint | None
    ) -> Sequence:
        loop = asyncio.get_running_loop()

        def tell(event: TokenEvent | EndEvent) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(events.put_nowait, (number, event))

        wrong = next((token for token in request.logit_bias if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            fix = "Use the tokenizer of this model."
            argument(wrong, "logit_bias", fix).wrong(f"tokens of 0 to {self._vocabulary - 1}", str(wrong))
        seed = secrets.randbits(48) if request.seed is None else request.seed & (1 << 48) - 1
        greedy = request.temperature < LEAST_TEMPERATURE
        limit = _limit(request, self.batch.max_tokens - len(ids))
        sampling = None if greedy else Sampling(request.temperature, 0, request.top_p)
        how: Any = {"seed": seed + number % request.n, "bias": request.logit_bias, "top": request.top}
        return Sequence(ids, limit, tell, self._ends, sampling, constraint=within, **how)


def _limit(request: AnyRequest, available: int) -> int:
    """Maximum new tokens. OpenAI's defaults are 16 for a completion, and as many as fit for a chat."""
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens or max(1, available)
    return request.max_tokens or 16


def _piece(event: TokenEvent | EndEvent, text: TextStream) -> Piece:
    if isinstance(event, EndEvent):
        if event.error is not None:
            raise event.error
        if event.reason == "cancelled":  # not by the client, who does not listen then
            raise closed()
        return Piece(text.end(), finish="stop" if text.stopped else event.reason)
    return Piece(text.add(event.token), [event], "stop" if text.stopped else None)
