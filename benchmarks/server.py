"""Servers of OpenAI's API in processes of their own, on free ports of this machine: ours and llama.cpp's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer import PeerError, ended
from torch_pi2.base.package import how_to_install
from torch_pi2.errors import LibraryMissingError

#: Seconds that a server may take to load its model.
_LOADING = 300.0


class Server:
    """A running server.

    Args:
        name: for results. module: for ``python -m``. settings: its arguments, where ``{port}`` is the port.
            about: facts for results.

    Attributes:
        url: with ``/v1``. model: name of the served model.

    Raises:
        PeerError: it ended or did not start in time; the message has the last line it wrote.
    """

    def __init__(self, name: str, module: str, settings: Sequence[str], about: Mapping[str, Any]) -> None:
        self.name, self.about = name, dict(about)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        words = [sys.executable, "-m", module, *(word.format(port=port) for word in settings)]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        try:
            self.model = self._first_model()
        except BaseException:
            self.close()
            raise

    def _first_model(self) -> str:
        import httpx

        until = time.monotonic() + _LOADING
        while time.monotonic() < until:
            code = self._process.poll()
            if code is not None:
                raise self._failed(f"{ended(code)}, after {self._last_line()!r}")
            try:
                listed = httpx.get(f"{self.url}/models", timeout=10)
                if listed.status_code == httpx.codes.OK:
                    return str(listed.json()["data"][0]["id"])
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise self._failed(f"none after {_LOADING:.0f} seconds")

    def _failed(self, found: str) -> PeerError:
        return PeerError(self.name, expected="a server with a loaded model", found=found, fix="Run it by itself.")

    def _last_line(self) -> str:
        self._log.seek(0)
        return next((line.strip() for line in reversed(self._log.readlines()) if line.strip()), "")

    def peak_rss_bytes(self) -> int:
        """Since its start."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def close(self) -> None:
        """End the process and give its memory back."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def ours(
    folder: Path,
    *,
    activations: str,
    threads: int,
    max_batch_size: int,
    prefix_cache: str,
    compiled: bool,
    context: int,
) -> Server:
    """``torch-pi2 serve``; ``context``: tokens of prompt and answer, at most."""
    about = {"max_batch_size": max_batch_size, "prefix_cache": prefix_cache, "compiled": compiled, "context": context}
    settings = ["serve", str(folder), "--port", "{port}", "--activations", activations, "--threads", str(threads)]
    settings += ["--max-batch-size", str(max_batch_size), "--max-tokens", str(context), "--prefix-cache", prefix_cache]
    settings += ["--compile"] if compiled else []
    kept = "no prefix cache" if prefix_cache == "0" else f"prefix cache {prefix_cache}"
    return Server(f"torch-pi2, {kept}", "torch_pi2", settings, {"engine": "torch-pi2", **about})


def llama(gguf: Path, *, threads: int, context: int) -> Server:
    """llama-cpp-python's own server. It answers one request at a time, and reuses the prefix of the one before.

    Unlike its defaults, it computes logits of the last token alone, and a new request does not end the current one.
    Raises LibraryMissingError: llama-cpp-python, or its extra ``server``, is not installed.
    """
    for package in ("llama_cpp", "sse_starlette"):
        if importlib.util.find_spec(package) is None:
            fix = how_to_install("bench")
            expected = f"an installed {package}"
            raise LibraryMissingError("llama-cpp-python[server]", expected=expected, found="none", fix=fix)
    settings = ["--model", str(gguf), "--host", "127.0.0.1", "--port", "{port}", "--n_ctx", str(context)]
    settings += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--logits_all", "false"]
    settings += ["--interrupt_requests", "false", "--verbose", "false"]
    version = importlib.metadata.version("llama-cpp-python")
    about = {"engine": f"llama-cpp-python {version}", "weights": "Q4_0, every matrix", "context": context}
    return Server("llama.cpp", "llama_cpp.server", settings, about | {"at_once": 1})
