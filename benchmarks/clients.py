"""Clients of OpenAI's API: each sends a request, reads its stream to the end, and sends the next (a closed loop)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peer import PeerError
from benchmarks.server import Server


@dataclass(frozen=True)
class Request:
    """A prompt of ``prompt_tokens`` tokens, whose greedy answer has ``answer_tokens``."""

    prompt: str
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Answered:
    """Seconds from sending a request to its first text (``first_s``) and to its end (``whole_s``)."""

    first_s: float
    whole_s: float
    answer_tokens: int


@dataclass(frozen=True)
class Load:
    """All answers; ``wall_s`` of all requests together; ``client_s``: CPU time of the clients."""

    answers: list[Answered]
    wall_s: float
    client_s: float


def _body(server: Server, request: Request) -> dict[str, Any]:
    # the penalty: llama-cpp-python's default is another than OpenAI's
    greedy = {"temperature": 0, "repeat_penalty": 1.0}
    return {"model": server.model, "prompt": request.prompt, "max_tokens": request.answer_tokens, **greedy}


def load(server: Server, requests: Sequence[Request], clients: int) -> Load:
    """Send all ``requests``, by so many clients at once; streamed. Raises PeerError: an answer is an error or has
    another length.
    """
    return asyncio.run(_load(server, requests, clients))


async def _load(server: Server, requests: Sequence[Request], clients: int) -> Load:
    import httpx

    left, answers = iter(requests), list[Answered]()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:

        async def client() -> None:
            for request in left:
                answers.append(await _streamed(http, server, request))

        started, processor = time.perf_counter(), time.process_time()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Load(answers, time.perf_counter() - started, time.process_time() - processor)


async def _streamed(http: Any, server: Server, request: Request) -> Answered:
    started, first, texts, finish, last = time.perf_counter(), 0.0, 0, None, ""
    async with http.stream("POST", f"{server.url}/completions", json={**_body(server, request), "stream": True}) as got:
        if got.status_code != 200:
            raise _wrong(server, "an answer", f"{got.status_code} {(await got.aread())[:200].decode(errors='replace')}")
        async for line in got.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = line
            chunk = json.loads(line[len("data: ") :])
            for choice in chunk.get("choices", ()):
                finish = choice["finish_reason"] or finish
                if choice["text"]:
                    texts += 1
                    first = first or time.perf_counter()
    # each token is text of its own, but who ends may send two at once
    if finish != "length" or not request.answer_tokens - 1 <= texts <= request.answer_tokens:
        found = f"{texts} that ended by {finish}: {last[:200]}"
        raise _wrong(server, f"{request.answer_tokens} tokens that end by length", found)
    return Answered(first - started, time.perf_counter() - started, request.answer_tokens)


def check(server: Server, requests: Sequence[Request]) -> None:
    """Check that the server counts the tokens of ``requests`` as :class:`Request` does. Raises PeerError: it counts
    other tokens.
    """
    import httpx

    for request in requests:
        got = httpx.post(f"{server.url}/completions", json=_body(server, request), timeout=None)
        usage = got.json().get("usage", {})
        found = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if found != (request.prompt_tokens, request.answer_tokens):
            expected = f"{request.prompt_tokens} tokens of a prompt and {request.answer_tokens} of its answer"
            raise _wrong(server, expected, f"{found[0]} and {found[1]}: {got.text[:200]}")


def _wrong(server: Server, expected: str, found: str) -> PeerError:
    return PeerError(server.name, expected=expected, found=found, fix="Is it the model that the benchmark wrote?")
