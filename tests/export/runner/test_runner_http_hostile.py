"""What clients and pages of others send to the C++ runner's port, and may not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from runner_calls import PROMPTS, run
from runner_http import Server, served, until


@pytest.fixture(scope="module")
def made(bundle: Path) -> Iterator[Server]:
    with served(bundle) as server:
        yield server


@pytest.mark.parametrize(
    ("head", "status", "message"),
    [
        ("GET /v1/completions HTTP/1.1\r\nHost: localhost", 405, "method: expected POST, found GET. "),
        ("POST /health HTTP/1.1\r\nHost: localhost", 405, "method: expected GET, HEAD, found POST. "),
        (
            "GET / HTTP/1.1\r\nHost: localhost",
            404,
            "path: expected /v1/chat/completions, /v1/completions, /v1/models or",
        ),
        ("GET /v1/../health HTTP/1.1\r\nHost: localhost", 404, "path: expected /v1/chat/completions, "),
        (
            "GET /health HTTP/1.1\r\nHost: evil.example",
            403,
            "host: expected localhost or an address, found evil.example",
        ),
        ("GET /health HTTP/1.1\r\nHost: localhost.evil.example:80", 403, "host: expected localhost or an address, "),
        ("GET /health?x HTTP/1.1\r\nHost: localhost:99", 200, ""),
        ("GET /health HTTP/1.1\r\nHost: 10.0.0.1:99", 200, ""),
        ("GET /health HTTP/1.1\r\nHost: [::1]:99", 200, ""),
        (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost",
            415,
            "content-type: expected application/json, found none. ",
        ),
        (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain",
            415,
            "content-type: expected application/json, found text/plain. ",
        ),
    ],
)
def test_what_pages_of_others_may_not_ask(made: Server, head: str, status: int, message: str) -> None:
    raw = made.raw()
    raw.send(f"{head}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    answer, _, body = raw.all().partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status != 200:
        assert json.loads(body)["error"]["message"].startswith(message)
    if status == 405:
        assert b"Allow: " in answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "request: expected JSON, found "),
        ("{", "request: expected JSON, found "),
        ("[" * 100, "request: expected JSON of at most 64 levels, found more"),
        ("[]", "request: expected an object, found []"),
        ('{"prompt": "\\ud800"}', "request: expected JSON, found "),
        ('{"prompt": "d", "seed": 1e99}', "request, seed: expected a whole number, 0 to 2^53, found 1e+99"),
        ('{"prompt": "d", "temperature": NaN}', "request: expected JSON, found "),
    ],
)
def test_bodies_that_make_no_sense(made: Server, body: str, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{made.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_the_runner_survives_what_is_sent_to_it(bundle: Path) -> None:
    """And says the same afterwards."""
    sound = json.dumps({"prompt": PROMPTS[0], "max_tokens": 6, "stream": True})

    def spoil(seed: int) -> None:
        draw = random.Random(seed)
        body = bytearray(sound.encode())
        for _ in range(draw.randrange(5)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw = made.raw()
        raw.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + bytes(body[: draw.choice([10, 9999, 9999])]))
        raw.close()

    with served(bundle) as made:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(spoil, range(150)))
        wanted = run(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 6)["sequences"][0]["text"]

        def ask() -> httpx.Response:
            body = {"prompt": PROMPTS[0], "max_tokens": 6}
            return httpx.post(f"{made.url}/v1/completions", json=body, timeout=60)

        until(lambda: ask().status_code == 200)  # those that still wait fill the queue
        assert ask().json()["choices"][0]["text"] == wanted


def test_memory_of_what_is_sent_is_bounded(bundle: Path) -> None:
    """Whatever is sent: texts without spaces are the most for a tokenizer, and small values the most for JSON."""
    size = (16 << 20) - 99
    sent = [
        (json.dumps({"prompt": "d" * size}), "prompt: expected at most 39 tokens: the bundle has room for 40, "),
        (json.dumps({"prompt": ["def f(x): " * (size // 10)]}), "prompt: expected at most 39 tokens: the bundle has "),
        ('{"prompt": [1' + ",1" * (size // 2) + "]}", "request: expected JSON of at most 262144 values, found more."),
        ('{"x": [[]' + ",[]" * (size // 3) + "]}", "request: expected JSON of at most 262144 values, found more."),
        ('{"x": [{}' + ',{"a":1}' * (1 << 16) + "]}", "request, prompt: expected a text, token ids, or a list of "),
    ]
    with served(bundle) as made:
        for body, message in sent:
            answer = httpx.post(
                f"{made.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{made.process.pid}/status").read_text())
        assert found is not None
        assert int(found[1]) << 10 < 9 * len(sent[0][0]) + (20 << 20)
