"""The web page: its files, and headers that bound what it may do in a browser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

_FOLDER = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

#: Nothing from anywhere else, no script or style in the page itself, and no page around it.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{what} {whence}" for what, whence in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_files() -> dict[str, Path]:
    """Path in the address -> file. They say nothing of any model, and need no key."""
    names = sorted(path for path in _FOLDER.iterdir() if path.suffix in _TYPES)
    return {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in names}


def add_page(app: FastAPI) -> None:
    """Let ``app`` serve the page at ``/``."""
    for where, path in page_files().items():
        app.add_api_route(where, _sender(path), methods=["GET", "HEAD"])


def _sender(path: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8"

    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
