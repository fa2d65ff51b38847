"""OpenAI's API over models that are served, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_pi2.errors import BusyError, Pi2Error
from torch_pi2.serve.answers import ChatAnswer, CompletionAnswer
from torch_pi2.serve.metrics import metrics
from torch_pi2.serve.requests import Asked, Chat, Completion
from torch_pi2.serve.served import Served

_log = logging.getLogger("torch_pi2")

#: Bytes of a request, at most.
MOST_BYTES = 8 << 20


class Refusal(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else {}
        return JSONResponse(self.body, self.status, headers)


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, BusyError):
        return Refusal(429, str(error), "rate_limit_error", "queue_full")
    if isinstance(error, Pi2Error):
        return Refusal(400, str(error), "invalid_request_error", param=error.what)
    _log.error("a request failed", exc_info=error)
    return Refusal(500, f"{type(error).__name__} while answering", "server_error")


class Allowed:
    """Refuses requests without the key, and bodies that are too long, before anything of them is read."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app(scope, receive, send) if refusal is None else refusal.response()(scope, receive, send))

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] != "/health":
            sent = headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {self._key}".encode()):
                message = "expected the server's API key as a bearer token, found another or none"
                return Refusal(401, message, "invalid_request_error", "invalid_api_key")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdigit() or int(length) > MOST_BYTES:
            message = f"expected a body of at most {MOST_BYTES} bytes, whose length is said before it"
            return Refusal(413, message, "invalid_request_error")
        return None


def application(models: Mapping[str, Served], *, api_key: str | None = None) -> FastAPI:
    """``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/health`` and ``/metrics``.

    Args:
        models: by name. api_key: that clients have to send as a bearer token (all but ``/health``); None: none.
    """
    app = FastAPI(title="torch_pi2", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Allowed, api_key=api_key)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        message = f"{param}: {first['msg']}" if param else first["msg"]
        return Refusal(400, message, "invalid_request_error", param=param).response()

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def told() -> PlainTextResponse:
        return PlainTextResponse(metrics(models), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": [_described(served) for served in models.values()]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        return _described(_known(models, name))

    @app.post("/v1/completions")
    async def completions(asked: Completion, request: Request) -> Any:
        return await _answer(_known(models, asked.model), asked, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, request: Request) -> Any:
        return await _answer(_known(models, asked.model), asked, request)

    return app


def _described(served: Served) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "torch_pi2"}


def _known(models: Mapping[str, Served], name: str) -> Served:
    if name not in models:
        message = f"expected one of the models {', '.join(models)}, found {name[:200]}"
        raise Refusal(404, message, "invalid_request_error", "model_not_found", "model")
    return models[name]


async def _answer(served: Served, asked: Completion | Chat, request: Request) -> Any:
    try:
        return await _answered(served, asked, request)
    except Exception as error:
        raise _refusal(error) from error


async def _answered(served: Served, asked: Completion | Chat, request: Request) -> Any:
    prompts = await asyncio.to_thread(served.prompts, asked)
    kind = ChatAnswer if isinstance(asked, Chat) else CompletionAnswer
    ids = f"{'chatcmpl' if isinstance(asked, Chat) else 'cmpl'}-{uuid.uuid4().hex}"
    answer = kind(ids, served.name, int(time.time()), served.tokenizer, asked, prompts)
    pieces = served.answer(asked, prompts)
    # what can be refused is, before a stream begins
    first = await anext(pieces)
    if asked.stream:
        return StreamingResponse(_events(asked, answer, first, pieces), media_type="text/event-stream")
    gone = asyncio.ensure_future(_gone(request))
    whole = asyncio.ensure_future(_whole(answer, first, pieces))
    try:
        await asyncio.wait({gone, whole}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(whole.result() if whole.done() else None)
    finally:
        for task in (gone, whole):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Any, first: Any, pieces: AsyncIterator[Any]) -> dict[str, Any]:
    answer.add(*first)
    async for number, piece in pieces:
        answer.add(number, piece)
    body: dict[str, Any] = answer.body()
    return body


async def _events(asked: Asked, answer: Any, first: Any, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
    try:
        for chunk in answer.chunks(*first):
            yield _event(chunk)
        async for number, piece in pieces:
            for chunk in answer.chunks(number, piece):
                yield _event(chunk)
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event(answer.chunk([]) | {"usage": answer.usage()})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent
        yield _event(_refusal(error).body)
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
