"""OpenAI's API, the web page and Prometheus metrics, as an ASGI application."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.responses import Response as PlainResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_pi2.base.progress import log
from torch_pi2.errors import BusyError, ClosedError, GroupError, NonFiniteError, Pi2Error
from torch_pi2.serve.chat import has_template
from torch_pi2.serve.live import Live
from torch_pi2.serve.model import ServedModel
from torch_pi2.serve.requests import AnyRequest, ChatRequest, CompletionRequest
from torch_pi2.serve.responses import ChatResponse, CompletionResponse, Response

#: Maximum bytes of a request.
MOST_BYTES = 8 << 20

_PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

#: The page loads nothing from elsewhere, has no inline script or style, and cannot be framed.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

_Result = TypeVar("_Result")


class Refusal(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else {}
        return JSONResponse(self.body, self.status, headers)


_REFUSALS = (
    *((GroupError, 503, "server_error", "group_failed"), (ClosedError, 503, "server_error", "server_ends")),
    *((BusyError, 429, "rate_limit_error", "queue_full"), (NonFiniteError, 500, "server_error", "not_finite")),
)


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    for cause, status, kind, code in _REFUSALS:
        if isinstance(error, cause):
            return Refusal(status, str(error), kind, code)
    if isinstance(error, Pi2Error):
        return Refusal(400, str(error), "invalid_request_error", param=error.what)
    log.error("a request failed", exc_info=error)
    return Refusal(500, f"{type(error).__name__} while answering", "server_error")


class AccessCheck:
    """Refuses requests without the key, and too long ones, before their body is read."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._key, self._open = app, api_key, {"/health", *page_files()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app(scope, receive, send) if refusal is None else refusal.response()(scope, receive, send))

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in self._open:
            sent = headers.get("authorization", "")
            kind, _, key = sent.partition(" ")
            if not (hmac.compare_digest(key.strip().encode(), self._key.encode()) and kind.lower() == "bearer"):
                message = "expected the server's API key as a bearer token, found another or none"
                return Refusal(401, message, "invalid_request_error", "invalid_api_key")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            message = "expected a body with a Content-Length, found one in chunks"
            return Refusal(411, message, "invalid_request_error")
        if not length.isdigit() or int(length) > MOST_BYTES:
            message = f"expected a body of at most {MOST_BYTES} bytes, found {length[:20]}"
            return Refusal(413, message, "invalid_request_error")
        return None


def page_files() -> dict[str, Path]:
    """URL path -> file of the web page. These contain no model data and need no key."""
    names = sorted(path for path in _PAGE.iterdir() if path.suffix in _TYPES)
    return {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in names}


def _sender(path: Path) -> Callable[[], Awaitable[PlainResponse]]:
    content, kind = path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8"

    async def send() -> PlainResponse:
        return PlainResponse(content, media_type=kind, headers=PAGE_HEADERS)

    return send


class _Collector:
    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        def family(name: str, about: str, kind: Callable[..., Any] = CounterMetricFamily) -> Any:
            return kind(f"torch_pi2_{name}", about, labels=["model", "kind"])

        about = "Tokens of prompts, of these found in the prefix cache, and of answers; drafted, of these accepted."
        tokens = family("tokens", about)
        seconds = family("seconds", "Seconds of prefill and of decoding steps.")
        ended = family("sequences", "Sequences that ended, by reason.")
        blocks = family("prefix_blocks", "Blocks of 32 tokens found in the prefix cache.")
        prefix = family("prefix_bytes", "Bytes of the prefix cache.", GaugeMetricFamily)
        now = family("sequences_now", "Sequences decoded (live) and waiting.", GaugeMetricFamily)
        for name, served in self._models.items():
            counts = served.batch.counts
            tokens.add_metric([name, "prompt"], counts.prompt_tokens)
            tokens.add_metric([name, "answer"], counts.answer_tokens)
            tokens.add_metric([name, "prefix"], served.batch.prefixes.tokens_found)
            if (drafts := served.batch.drafts) is not None:
                tokens.add_metric([name, "drafted"], drafts.drafted)
                tokens.add_metric([name, "accepted"], drafts.accepted)
            seconds.add_metric([name, "prompt"], counts.prompt_seconds)
            seconds.add_metric([name, "step"], counts.step_seconds)
            blocks.add_metric([name, "memory"], served.batch.prefixes.hits)
            prefix.add_metric([name, "memory"], served.batch.prefixes.bytes)
            for reason, count in list(counts.ended.items()):
                ended.add_metric([name, reason], count)
            for kind, count in served.batch.state().items():
                now.add_metric([name, kind], count)
        yield from (tokens, seconds, ended, blocks, prefix, now)


def application(models: Mapping[str, ServedModel], *, api_key: str | None = None) -> FastAPI:
    """``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/v1/live``, ``/health``, ``/metrics``; ``/``.
    ``models``: by name, also ``app.state.models``, with ``app.state.live``: their :class:`~torch_pi2.serve.live.Live`.
    ``api_key``: bearer token for everything except ``/health`` and the page's files; None: none.
    """
    app = FastAPI(title="torch_pi2", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AccessCheck, api_key=api_key)
    for where, path in page_files().items():
        app.add_api_route(where, _sender(path), methods=["GET", "HEAD"])
    app.state.models = models
    app.state.live = streams = {name: Live(served, together=len(models)) for name, served in models.items()}

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        why = first.get("ctx", {}).get("error")
        if first["type"] == "json_invalid":
            message = f"expected a body of JSON, found none: {why} (character {first['loc'][-1]})"
            return Refusal(400, message, "invalid_request_error").response()
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        message = f"{param or 'body'}: {why if isinstance(why, ValueError) else first['msg']}"
        return Refusal(400, message, "invalid_request_error", param=param).response()

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        response = Refusal(error.status_code, str(error.detail), "invalid_request_error").response()
        response.headers.update(error.headers or {})  # 405 names the allowed methods
        return response

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        for served in models.values():
            if served.batch.failure is not None:
                raise _refusal(served.batch.failure)
        return {"status": "ok"}

    counters = CollectorRegistry()
    counters.register(_Collector(models))

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(counters).decode(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/live")
    async def live(model: str | None = None) -> StreamingResponse:
        name = next(iter(models)) if model is None else _known(models, model).name
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_live_events(streams[name]), media_type="text/event-stream", headers=headers)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_described(served) for served in models.values()]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return _described(_known(models, name))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await _answer(_known(models, body.model), body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await _answer(_known(models, body.model), body, request)

    return app


def _described(served: ServedModel) -> dict[str, Any]:
    ours = {"max_tokens": served.batch.max_tokens, "chat": has_template(served.tokenizer)}
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "torch_pi2", **ours}


def _known(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    if name not in models:
        message = f"expected one of the models {', '.join(models)}, found {name[:200]}"
        raise Refusal(404, message, "invalid_request_error", "model_not_found", "model")
    return models[name]


async def _answer(served: ServedModel, body: AnyRequest, request: Request) -> Any:
    try:
        return await _answered(served, body, request)
    except Exception as error:
        raise _refusal(error) from error


async def _answered(served: ServedModel, body: AnyRequest, request: Request) -> Any:
    prompts = await asyncio.to_thread(served.prompts, body)
    key, now = uuid.uuid4().hex, int(time.time())
    answer: Response
    if isinstance(body, ChatRequest):
        answer = ChatResponse(f"chatcmpl-{key}", now, served, body, prompts)
    else:
        answer = CompletionResponse(f"cmpl-{key}", now, served, body, prompts)
    pieces = served.answer(body, prompts)
    if not body.stream:
        return JSONResponse(await _unless_disconnected(request, _whole(answer, pieces)))
    # an error gets its own status only before the stream begins
    first = await _unless_disconnected(request, anext(pieces))
    if first is None:
        return JSONResponse(None)
    return StreamingResponse(_events(body, answer, first, pieces), media_type="text/event-stream")


async def _unless_disconnected(request: Request, work: Awaitable[_Result]) -> _Result | None:
    """The result of ``work``; None if the client has disconnected, which cancels it."""
    gone, task = asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(answer: Response, pieces: AsyncIterator[Any]) -> dict[str, Any]:
    async for number, piece in pieces:
        answer.add(number, piece)
    return answer.body()


async def _events(body: AnyRequest, answer: Response, first: Any, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
    try:
        for chunk in answer.chunks(*first):
            yield _event(chunk)
        async for number, piece in pieces:
            for chunk in answer.chunks(number, piece):
                yield _event(chunk)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event(answer.chunk([]) | {"usage": answer.usage()})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status was sent already
        yield _event(_refusal(error).body)
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


async def _live_events(live: Live) -> AsyncIterator[str]:
    async with aclosing(live.events()) as events:
        try:
            async for name, body in events:
                yield f"event: {name}\n{_event(body)}"
        except Exception as error:  # the status was sent already
            yield f"event: error\n{_event(_refusal(error).body)}"


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
