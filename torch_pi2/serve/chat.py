"""Chat templates, and ``ChatSession``, a conversation with one model that reuses its KV cache."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.sequence import GeneratedSequence, Sampling, TextStream, end_tokens, hidden_tokens, pick
from torch_pi2.decode.speculate import Drafts, speculator
from torch_pi2.errors import ConfigError, Pi2Error, ShapeError


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The chat template; of several, the one for ``tools`` if there are any. Raises ConfigError: there is none."""
    if not has_template(tokenizer):
        found, fix = "one that has none", "Use /v1/completions, or put a chat_template.jinja into the model's folder."
        raise ConfigError("messages", expected="a model whose tokenizer has a chat template", found=found, fix=fix)
    return tokenizer.get_chat_template(tools=tools)


def chat_ids(tokenizer: Any, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> list[int]:
    """Token ids of ``messages``, with ``tools``, up to the answer. Raises ConfigError: no template, or a refusal."""
    template = template_of(tokenizer, tools)
    try:
        how: Any = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(list(messages), tools=tools, **how)
    except Exception as error:  # a template raises whatever its author chose
        fix = "Correct the messages."
        raise ConfigError("messages", expected="what the chat template takes", found=str(error), fix=fix) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class ReplyStats:
    """Statistics of one answer. ``prompt_tokens``: of the conversation with the question, of which ``known`` were in
    the KV cache. ``tokens``: of the answer. ``prompt_seconds``: prefill; ``seconds``: decoding. ``ended``: ``eos``,
    ``length`` or ``interrupted``.
    """

    prompt_tokens: int
    known: int
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    ended: str = "interrupted"


class ChatSession:
    """A conversation with ``model`` (its ``messages`` so far, and statistics of the ``last`` answer); without a chat
    ``template``, the model continues the messages, each on its own line.

    Args:
        max_tokens: of the whole conversation. limit: of an answer. sampling: None: greedy. system: the system message.
            compiled, kv: see :class:`~torch_pi2.decode.decoder.Decoder`. drafting: ``prompt_lookup``, or
            ``assistant_model`` and ``draft_tokens`` of :func:`torch_pi2.generate`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_tokens: int,
        limit: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        system: str | None = None,
        compiled: bool = False,
        kv: str | None = None,
        **drafting: Any,
    ) -> None:
        self._decoder = Decoder(model, max_tokens=max_tokens, compiled=compiled, logits=True, kv=kv)
        self._drafts = speculator(self._decoder, max_tokens, **drafting)
        self._tokenizer, self._ends = tokenizer, end_tokens(model, None, tokenizer)
        self._limit, self._sampling, self._seed = limit, sampling, seed
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.template = has_template(tokenizer)
        self.messages = list(self._system)
        self.last: ReplyStats | None = None
        self._fed: list[int] = []  # ids in the KV cache

    @property
    def drafts(self) -> Drafts | None:
        """Statistics of drafts of all answers, if there are any."""
        return None if self._drafts is None else self._drafts.drafts

    def reset(self) -> None:
        self.messages = list(self._system)

    def say(self, text: str) -> Iterator[str]:
        """The answer to ``text``, piece by piece; it ends early if the caller stops iterating.

        Raises (the conversation is as before):
            ShapeError: no tokens are left for an answer. ConfigError: the chat template refuses the messages.
            NonFiniteError: see :func:`torch_pi2.generate`.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._ids()
            available = self._decoder.max_tokens - len(ids)
            if available < 1 or not ids:
                expected = f"1 to {self._decoder.max_tokens - 1} tokens before an answer"
                fix = "Begin another (/reset), or make room for more tokens (--max-tokens)."
                raise ShapeError("talk", expected=expected, found=str(len(ids)), fix=fix)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": ""})
        try:
            for piece in self._answer(ids, min(self._limit, available)):
                self.messages[-1]["content"] += piece
                yield piece
        except Pi2Error:
            del self.messages[-2:]
            raise

    def _answer(self, ids: list[int], limit: int) -> Iterator[str]:
        length = min(len(ids) - 1, self._decoder.length, len(self._fed))
        known = next((i for i in range(length) if ids[i] != self._fed[i]), max(0, length))
        self.last = stats = ReplyStats(len(ids), known)
        growing = GeneratedSequence(0, self._seed, limit, self._ends)
        text = TextStream(self._tokenizer, hidden=hidden_tokens(self._tokenizer, self._ends))
        self._seed += 1
        started = time.perf_counter()
        logits_1V = self._decoder.prompt(torch.tensor([ids]), known=known).cpu()
        if self._drafts is not None:
            self._drafts.source.begin(ids)
        stats.prompt_seconds = time.perf_counter() - started
        self._fed = list(ids)

        def take(logits_V: torch.Tensor) -> None:
            growing.append(pick(logits_V, self._sampling, growing.random))

        while growing.ended is None:
            started, before = time.perf_counter(), len(growing.tokens)
            if before and self._drafts is not None:
                self._drafts.forward(self._decoder, ids, growing, take)
            else:
                if before:
                    logits_1V = self._decoder.step(torch.tensor([[growing.tokens[-1]]])).cpu()
                take(logits_1V[0])
            self._fed += growing.tokens[max(0, before - 1) : -1]
            stats.tokens, stats.seconds = len(growing.tokens), stats.seconds + time.perf_counter() - started
            for token in growing.tokens[before:]:
                yield text.add(token)
        stats.ended = growing.ended
        yield text.end()

    def _ids(self) -> list[int]:
        if self.template:
            return chat_ids(self._tokenizer, self.messages)
        text = ""
        for message in self.messages:
            new = message["content"]
            if message["role"] != "assistant" and text and not (text[-1].isspace() or new[:1].isspace()):
                text += "\n"  # a line was entered, after an answer that may have been cut
            text += new
        return self._tokenizer(text)["input_ids"]
