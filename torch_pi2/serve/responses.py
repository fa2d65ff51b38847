"""Response bodies and stream chunks of OpenAI's API."""

from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Any

from torch_pi2.serve.batch import TokenEvent
from torch_pi2.serve.model import Piece, ServedModel
from torch_pi2.serve.requests import AnyRequest
from torch_pi2.serve.tools import ToolCallDelta, ToolCallParser


class Response:
    """An answer of several choices, as it grows; ``name``: its id; ``created``: Unix time; ``ids``: of prompts."""

    kind = chunk_kind = ""

    def __init__(self, name: str, created: int, served: ServedModel, request: AnyRequest, ids: list[list[int]]) -> None:
        self._head = {"id": name, "created": created, "model": served.name}
        self._served, self._request = served, request
        count = request.n * len(ids)
        self._texts, self._tokens = [""] * count, [list[TokenEvent]() for _ in range(count)]
        self._finish: list[str | None] = [None] * count
        self._prompt_tokens = sum(map(len, ids))

    def add(self, number: int, piece: Piece) -> None:
        self._texts[number] += piece.text
        self._tokens[number] += piece.tokens
        self._finish[number] = piece.finish

    def usage(self) -> dict[str, int]:
        read, answered = self._prompt_tokens, sum(map(len, self._tokens))
        return {"prompt_tokens": read, "completion_tokens": answered, "total_tokens": read + answered}

    def body(self) -> dict[str, Any]:
        choices = [self._choice(i, self._texts[i], self._tokens[i]) for i in range(len(self._texts))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        options = self._request.stream_options
        usage = {} if options is None or not options.include_usage else {"usage": None}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, number: int, text: str, tokens: list[TokenEvent]) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, token: int) -> str:
        """Text of a token; bytes in OpenAI's form if it is part of a character."""
        data = self._served.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionResponse(Response):
    """``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def __init__(self, name: str, created: int, served: ServedModel, request: AnyRequest, ids: list[list[int]]) -> None:
        super().__init__(name, created, served, request, ids)
        count = len(self._texts)
        self._letters, self._decoders = [0] * count, [getincrementaldecoder("utf-8")("ignore") for _ in range(count)]

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        self.add(number, piece)
        if piece.text or piece.finish or (piece.tokens and self._request.top is not None):
            yield self.chunk([self._choice(number, piece.text, piece.tokens)])

    def _offset(self, number: int, token: int) -> int:
        """Number of characters in the tokens before this one, sent or held back."""
        before = self._letters[number]
        if token not in self._served.hidden:
            self._letters[number] += len(self._decoders[number].decode(self._served.bytes_of(token)))
        return before

    def _top(self, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """Log probabilities by text; of tokens with the same text, the less likely are called by their ids."""
        found: dict[str, float] = {}
        for token, value in top:
            text = self._text(token)
            found[f"token_id:{token}" if text in found else text] = value
        return found

    def _choice(self, number: int, text: str, tokens: list[TokenEvent]) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._request.top is not None:
            logprobs = {
                "tokens": [self._text(event.token) for event in tokens],
                "token_logprobs": [event.logprob for event in tokens],
                "top_logprobs": [self._top(event.top) for event in tokens],
                "text_offset": [self._offset(number, event.token) for event in tokens],
            }
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": self._finish[number]}


class ChatResponse(Response):
    """``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, name: str, created: int, served: ServedModel, request: AnyRequest, ids: list[list[int]]) -> None:
        super().__init__(name, created, served, request, ids)
        tools, count = served.tools(request), len(self._texts)
        names = [] if tools is None else [function.name for function in tools.functions]
        self._parsers = [None if tools is None else ToolCallParser(tools.form, names) for _ in range(count)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._started = [False] * count

    def add(self, number: int, piece: Piece) -> None:
        self._delta(number, piece)

    def chunks(self, number: int, piece: Piece) -> Iterator[dict[str, Any]]:
        delta = self._delta(number, piece)
        if not self._started[number]:
            self._started[number] = True
            delta = {"role": "assistant", "content": None if self._parsers[number] else ""} | delta
        if delta or piece.finish or (piece.tokens and self._request.top is not None):
            logprobs = self._logprobs(piece.tokens)
            more = {"delta": delta, "logprobs": logprobs, "finish_reason": self._finish[number]}
            yield self.chunk([{"index": number, **more}])

    def _delta(self, number: int, piece: Piece) -> dict[str, Any]:
        """Add ``piece`` to the choice; returns OpenAI's delta."""
        parser, text, calls = self._parsers[number], piece.text, list[dict[str, Any]]()
        if parser is not None:
            parts = list(parser.add(piece.text, last=piece.finish is not None))
            text = "".join(part for part in parts if isinstance(part, str))
            calls = _merged([part for part in parts if isinstance(part, ToolCallDelta)])
            for call in calls:
                _extend(self._calls[number], call)
        super().add(number, Piece(text, piece.tokens, piece.finish))
        if piece.finish == "stop" and parser is not None and parser.count and parser.complete:
            self._finish[number] = "tool_calls"
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _choice(self, number: int, text: str, tokens: list[TokenEvent]) -> dict[str, Any]:
        calls = [{name: value for name, value in call.items() if name != "index"} for call in self._calls[number]]
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        about = {"logprobs": self._logprobs(tokens), "finish_reason": self._finish[number]}
        return {"index": number, "message": message | ({"tool_calls": calls} if calls else {}), **about}

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any] | None:
        if self._request.top is None:
            return None
        tops = ({"top_logprobs": [self._logprob(*pair) for pair in event.top]} for event in tokens)
        return {"content": [self._logprob(event.token, event.logprob) | top for event, top in zip(tokens, tops)]}

    def _logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._served.bytes_of(token))}


def _merged(parts: list[ToolCallDelta]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for part in parts:
        head = {} if part.name is None else {"id": part.id, "type": "function"}
        function = {} if part.name is None else {"name": part.name}
        _extend(deltas, {"index": part.number, **head, "function": {**function, "arguments": part.arguments}})
    return deltas


def _extend(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if calls and calls[-1]["index"] == delta["index"]:
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    else:
        calls.append({**delta, "function": dict(delta["function"])})
