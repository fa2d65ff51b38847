"""Bodies and chunks of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_pi2.serve.batch import Taken
from torch_pi2.serve.requests import Asked
from torch_pi2.serve.served import Piece


class Answer:
    """An answer of several choices, as it grows.

    Args:
        name: its id. model: its name. created: seconds since 1970. prompts: token ids.
    """

    kind = chunk_kind = ""

    def __init__(
        self, name: str, model: str, created: int, tokenizer: Any, asked: Asked, prompts: list[list[int]]
    ) -> None:
        self._head = {"id": name, "created": created, "model": model}
        self._tokenizer, self._asked = tokenizer, asked
        count = asked.n * len(prompts)
        self._texts, self._tokens = [""] * count, [list[Taken]() for _ in range(count)]
        self._finish: list[str | None] = [None] * count
        self._prompt_tokens = sum(map(len, prompts))

    def add(self, number: int, piece: Piece) -> None:
        self._texts[number] += piece.text
        self._tokens[number] += piece.tokens
        self._finish[number] = piece.finish

    def usage(self) -> dict[str, int]:
        answered = sum(map(len, self._tokens))
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": answered,
            "total_tokens": self._prompt_tokens + answered,
        }

    def body(self) -> dict[str, Any]:
        """All of it."""
        choices = [self._choice(i, self._texts[i], self._tokens[i]) for i in range(len(self._texts))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """What is sent of a piece."""
        raise NotImplementedError

    def _choice(self, number: int, text: str, tokens: list[Taken]) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


class CompletionAnswer(Answer):
    """``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        offset = len(self._texts[number])
        self.add(number, piece)
        if piece.text or piece.finish or (piece.tokens and self._asked.top is not None):
            yield self.chunk([self._choice(number, piece.text, piece.tokens, offset)])

    def _choice(self, number: int, text: str, tokens: list[Taken], offset: int = 0) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._asked.top is not None:
            texts = [self._text(taken.token) for taken in tokens]
            offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
            logprobs = {
                "tokens": texts,
                "token_logprobs": [taken.logprob for taken in tokens],
                "top_logprobs": [{self._text(token): value for token, value in taken.top} for taken in tokens],
                "text_offset": offsets,
            }
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": self._finish[number]}


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        first = not self._tokens[number] and self._finish[number] is None
        self.add(number, piece)
        delta: dict[str, Any] = {"role": "assistant", "content": piece.text} if first else {}
        if piece.text:
            delta["content"] = piece.text
        if delta or piece.finish or (piece.tokens and self._asked.top is not None):
            logprobs = self._logprobs(piece.tokens)
            more = {"delta": delta, "logprobs": logprobs, "finish_reason": piece.finish}
            yield self.chunk([{"index": number, **more}])

    def _choice(self, number: int, text: str, tokens: list[Taken]) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": text},
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finish[number],
        }

    def _logprobs(self, tokens: list[Taken]) -> dict[str, Any] | None:
        if self._asked.top is None:
            return None
        return {
            "content": [
                {
                    **self._said(taken.token, taken.logprob),
                    "top_logprobs": [self._said(token, value) for token, value in taken.top],
                }
                for taken in tokens
            ]
        }

    def _said(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
