"""The C++ runner as a server (``pi2_runner BUNDLE --http 0``), and raw connections to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import openai
import runner_calls


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    """Fails if it does not become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Raw:
    """A connection, byte for byte."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.send, self.close = self._socket.sendall, self._socket.close

    def half_close(self) -> None:
        """It sends nothing more, and reads."""
        self._socket.shutdown(socket.SHUT_WR)

    def ask(self, head: str, body: str = "") -> None:
        """``head``: the first line and headers but those of the host and the body."""
        length = f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}" if body else ""
        self.send(f"{head}\r\nHost: localhost{length}\r\n\r\n{body}".encode())

    def all(self) -> bytes:
        """What comes until its end."""
        found = b""
        while piece := self._socket.recv(1 << 16):
            found += piece
        return found

    def some(self, until: bytes) -> bytes:
        """What comes until this has."""
        found = b""
        while until not in found:
            piece = self._socket.recv(1 << 16)
            assert piece, found
            found += piece
        return found


class Server:
    """A program that prints ``http://...:PORT/...`` once clients are let in."""

    def __init__(self, *command: object) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        parts = [*map(str, command)]
        env = {"LD_LIBRARY_PATH": str(runner_calls.FOLDER)}
        self.process = subprocess.Popen(parts, env=env, stdout=subprocess.PIPE, stderr=self._said, text=True)
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()
        assert self.first.startswith("http://"), self.said()
        self.port = int(self.first.split("/")[2].rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        """All of standard error. The file's position, where the process writes, is not moved."""
        file = self._said.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def raw(self) -> Raw:
        return Raw(self.port)

    def end(self, by: int = signal.SIGTERM) -> int:
        self.process.send_signal(by)
        return self.process.wait(timeout=30)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """It ends as it does when it is well: on a signal, and by it."""
        code = self.process.poll()
        if kind is not None:
            self.process.kill()
        elif code is None:
            assert self.end() == -signal.SIGTERM, self.said()
        self.process.wait()
        assert "Sanitizer" not in self.said(), self.said()


def served(bundle: Path, *options: object) -> Server:
    return Server(runner_calls.FOLDER / "pi2_runner", bundle, "--http", "0", *options)


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
