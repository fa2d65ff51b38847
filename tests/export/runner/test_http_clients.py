"""The runner's server of HTTP and clients that are slow, silent, gone, greedy, or do not speak HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from runner_calls import BUILT
from runner_http import Raw, Server, until

#: As pi2_http_test takes them: waiting, connections, bytes of bodies, milliseconds of a request, idle and of writing.
LIMITS = (3, 8, 1 << 20, 700, 1500, 1000)
BIG = 16 << 20
#: Of another build: a folder with pi2_http_test (make sanitize has one).
PROGRAM = Path(os.environ.get("PI2_HTTP_TEST", BUILT / "pi2_http_test"))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(PROGRAM, *LIMITS) as made:
        yield made


@pytest.fixture
def roomy() -> Iterator[Server]:
    """With the limits of the runner."""
    with Server(PROGRAM) as made:
        yield made


def is_well(server: Server) -> bool:
    answer = httpx.post(f"{server.url}/echo", content="x", timeout=10)
    return answer.status_code == 200 and answer.json()["body"] == "x"


@pytest.mark.parametrize(
    ("bytes_sent", "status", "message"),
    [
        (b"hello\r\n\r\n", 400, "request: expected HTTP/1.1, found none: "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "request: expected HTTP/1.1, found none: "),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "request: expected HTTP/1.1, found another version."),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "host: expected the header, found none. Send it."),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "host: expected one header, found several."),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n", 400, "request: expected HTTP/1.1, found none: "),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400, "request: expected HTTP/1.1, found none: "),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, "request: expected HTTP/1.1, found none: "),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "request: expected "),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "request: expec",
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "request: expected HTTP/1.1"),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc",
            400,
            "request: expected HTTP/1.1",
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 16777217\r\n\r\n", 413, f"body: expected at most {BIG} bytes"),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "headers: expected at most 16384 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: \r\n" * 5000, 431, "headers: expected at most 16384 bytes"),
    ],
)
def test_requests_that_are_none(roomy: Server, bytes_sent: bytes, status: int, message: str) -> None:
    """Each has an answer, and its connection ends."""
    raw = roomy.raw()
    raw.send(bytes_sent)
    head, _, body = raw.all().partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nConnection: close" in head
    error = json.loads(body)["error"]
    assert error["message"].startswith(message)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert is_well(roomy)


def test_bodies_come_as_they_like(roomy: Server) -> None:
    whole = "é日本🙂" * 5000
    assert httpx.post(f"{roomy.url}/a", content=whole).json()["body"] == whole
    pieces = [whole[i : i + 777].encode() for i in range(0, len(whole), 777)]
    assert httpx.post(f"{roomy.url}/a", content=iter(pieces)).json()["body"] == whole  # in chunks
    raw = roomy.raw()
    text = whole[:200].encode()
    request = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    for byte in request:  # one at a time
        raw.send(bytes([byte]))
    assert json.loads(raw.some(b"}\n").partition(b"\r\n\r\n")[2])["body"] == text.decode()
    raw.ask("POST /b HTTP/1.1\r\nExpect: 100-continue", "later")  # the same connection; the body has come, too
    assert b"200 OK" in raw.some(b"later")
    slow = roomy.raw()
    slow.send(b"POST /c HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
    assert slow.some(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    slow.send(b"ok")
    assert json.loads(slow.some(b"}\n").partition(b"\r\n\r\n")[2])["body"] == "ok"
    old = roomy.raw()
    old.send(b"POST /d HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
    assert json.loads(old.all().partition(b"\r\n\r\n")[2]) == {"path": "/d", "body": "x", "host": ""}
    head = roomy.raw()
    head.send(b"HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert head.all().endswith(b"\r\n\r\n")


def test_requests_behind_each_other_are_answered_in_order(roomy: Server) -> None:
    raw = roomy.raw()
    one = "".join(
        f"POST /p{i} HTTP/1.1\r\nHost: a\r\nContent-Length: {i % 7}\r\n\r\n{'y' * (i % 7)}"
        f"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        for i in range(50)
    )
    raw.send(f"{one}POST /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    bodies = [line for line in raw.all().decode().splitlines() if line.startswith("{")]
    assert [json.loads(line).get("path") for line in bodies] == [
        path for i in range(50) for path in (f"/p{i}", None)
    ] + ["/last"]


def test_who_is_slow_is_let_go(server: Server) -> None:
    """A byte now and then is no request; silence ends a connection, too."""
    begun = time.monotonic()
    slow, silent, body = server.raw(), server.raw(), server.raw()
    body.send(b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
    ended: dict[str, float] = {}

    def drip(name: str, raw: Raw, byte: bytes) -> None:
        try:
            while time.monotonic() < begun + 20:
                raw.send(byte)
                time.sleep(0.05)
        except OSError:
            ended[name] = time.monotonic() - begun

    slow.send(b"GET /")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(drip, "headers", slow, b"a")
        pool.submit(drip, "body", body, b"b")
        assert silent.all() == b""
        ended["silence"] = time.monotonic() - begun
    assert {"headers", "body", "silence"} == set(ended)
    assert 0.6 < min(ended["headers"], ended["body"]) <= max(ended["headers"], ended["body"]) < 5
    assert 1.4 < ended["silence"] < 6
    assert is_well(server)


def test_who_does_not_read_is_let_go(server: Server) -> None:
    raw = server.raw()
    raw.ask("POST /stream HTTP/1.1", "100000")
    until(lambda: server.said() == "gone\n")
    whole = server.raw()
    whole.ask("POST /echo HTTP/1.1\r\nConnection: close", "x" * 1_000_000)  # not a stream: until nothing is taken
    whole.some(b"HTTP/1.1 200")
    assert is_well(server)
    raw.close()


def test_an_answer_ends_when_its_client_goes(server: Server) -> None:
    held, waits = server.raw(), server.raw()
    for raw in (held, waits):
        raw.ask("POST /hold HTTP/1.1", "x")
        assert httpx.get(f"{server.url}/health").status_code == 200  # so it has come
    waits.close()  # never begun
    held.close()
    until(lambda: server.said() == "gone\n")
    cut = server.raw()  # not before: on a busy machine it would have been idle for too long by now
    cut.ask("POST /stream HTTP/1.1", "1000000")
    cut.some(b"xxxx")
    cut.close()
    until(lambda: server.said() == "gone\n" * 2)
    assert is_well(server)
    until(lambda: server.said().count("\n") == 3)  # this client, too, is gone as soon as it has its answer


def test_who_only_sends_nothing_more_is_answered(server: Server) -> None:
    """As `nc -N` and others do: whether it waits for its turn, is answered already, or has asked for several things."""
    held, waits, stream, two = (server.raw() for _ in range(4))
    held.ask("POST /hold HTTP/1.1", "x")
    waits.ask("POST /echo HTTP/1.1", "y")
    for raw in (held, waits):
        raw.half_close()
    assert httpx.get(f"{server.url}/health").status_code == 200
    time.sleep(0.2)
    httpx.get(f"{server.url}/release")
    for raw, body in ((held, "x"), (waits, "y")):
        interim, _, answer = raw.all().partition(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue"  # had it gone, this would have come back
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["body"] == body
    stream.ask("POST /stream HTTP/1.1", "100")
    stream.half_close()
    assert stream.all().count(b"data: x") == 100
    two.ask("POST /first HTTP/1.1", "x")
    two.ask("POST /second HTTP/1.1", "x")
    two.half_close()
    found = two.all()
    assert found.index(b"/first") < found.index(b"/second")
    old = server.raw()
    old.send(b"POST /hold HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
    old.half_close()
    assert old.all() == b""  # nothing can be sent to it that would tell whether it is there
    assert is_well(server)


def test_more_than_may_wait_are_told(server: Server) -> None:
    raws = list[Raw]()
    for _ in range(6):
        raws.append(server.raw())
        raws[-1].ask("POST /hold HTTP/1.1\r\nConnection: close", "x")
        httpx.get(f"{server.url}/health")
    for _ in range(4):
        httpx.get(f"{server.url}/release")
    answers = [raw.all().decode() for raw in raws]
    assert [answer.split()[1] for answer in answers] == ["200"] * 4 + ["503"] * 2
    assert "requests: expected at most 3 that wait, found as many. Ask again later." in answers[-1]
    assert "Retry-After: 1\r\n" in answers[-1]
    assert is_well(server)


def test_bodies_of_all_together_have_a_limit(server: Server) -> None:
    """A MiB here."""
    raws = [server.raw() for _ in range(3)]
    for raw in raws:
        raw.send(b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 600000\r\n\r\n")
    raws[0].send(b"a" * 500_000)
    time.sleep(0.1)
    raws[1].send(b"a" * 599_999)
    answer = raws[1].all()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"requests: expected at most 1048576 bytes at once, found more. Ask again later." in answer
    raws[0].send(b"a" * 100_000)
    assert len(raws[0].some(b"}\n")) > 600_000


def test_who_is_silent_makes_room_for_who_asks(server: Server) -> None:
    held = server.raw()
    held.ask("POST /hold HTTP/1.1\r\nConnection: close", "x")
    httpx.get(f"{server.url}/health")
    silent = [server.raw() for _ in range(40)]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert silent[0].all() == b""
    httpx.get(f"{server.url}/release")
    assert held.all().startswith(b"HTTP/1.1 200 ")
    assert is_well(server)


def test_answers_that_are_not_given_or_not_ended(roomy: Server) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{roomy.url}/cut", content="3")
    answer = httpx.post(f"{roomy.url}/none", content="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("request: expected an answer, found none.")
    old = roomy.raw()
    old.send(b"POST /stream HTTP/1.0\r\nContent-Length: 1\r\n\r\n2")  # without chunks: until the connection ends
    body = old.all().partition(b"\r\n\r\n")[2]
    assert body == b"".join(b"data: " + b"x" * 1024 + b"\n\n" for _ in range(2))
    assert is_well(roomy)
