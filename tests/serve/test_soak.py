"""A server under load for hours: whole, cancelled and refused requests at once; answers stay right, nothing leaks.

``PI2_SOAK_REQUESTS``: how many requests are sent (an hour has some ten thousand; the default takes half a minute).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import greedy_alone, quantised, tokenizer_of_example

import torch_pi2

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEM = "import os\nimport sys\nfrom pathlib import Path\n\n\ndef main(arguments):\n    " + "x = x + 1\n    " * 12
#: Some begin alike, for the prefix cache.
TEXTS = ["def main(", "for", "import os\n\nclass", STEM, STEM + "return", STEM + "if x:", "# été \N{SNOWMAN}\n", "\n"]
LONGEST, CLIENTS = 48, 5
OPTIONS = "--activations int8 --threads 1 --max-batch-size 3 --max-queue 6 --max-tokens 320 --prefix-cache 2MiB"
#: Threads that asyncio may start for blocking calls.
EXECUTOR = min(32, (os.cpu_count() or 1) + 4)
REFUSED: list[dict[str, Any]] = [{"max_tokens": 10**6}, {"temperature": 9}, {"n": 10**9}, {"prompt": [10**6]}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``memory`` and, packed from it, ``store``."""
    base = tmp_path_factory.mktemp("soak")
    torch_pi2.save(quantised(), base / "memory", tokenizer=tokenizer_of_example())
    torch_pi2.pack(base / "memory", base / "store", trust_remote_code=True)
    return base


@pytest.fixture(scope="module")
def alone(folders: Path) -> Callable[[str, int], str]:
    """The greedy text after one of ``TEXTS``, decoded alone."""
    model = torch_pi2.load(folders / "memory", trust_remote_code=True, activations="int8")
    tokenizer = tokenizer_of_example()
    ends = {tokenizer.eos_token_id}
    tokens = {text: greedy_alone(model, tokenizer(text)["input_ids"], LONGEST, ends) for text in TEXTS}
    return lambda text, count: tokenizer.decode(tokens[text][:count], skip_special_tokens=True)


class Process:
    """``torch-pi2 serve`` as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], name: str, url: str) -> None:
        self.process, self.name, self.url = process, name, url

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def metrics(self) -> dict[str, float]:
        """By name with its kind: ``sequences/length``, ``sequences_now/live``."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(r'^torch_pi2_(\w+?)(?:_total)?\{kind="(\w+)",model="\w+"\} (\S+)$', text, re.MULTILINE)
        return {f"{name}/{kind}": float(value) for name, kind, value in found}

    def usage(self) -> tuple[int, int, float]:
        """Files, threads, and MiB of memory."""
        folder = Path("/proc") / str(self.process.pid)
        kib = int(re.findall(r"^VmRSS:\s*(\d+) kB", (folder / "status").read_text(), re.MULTILINE)[0])
        return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), kib / 1024


@contextmanager
def serving(folder: Path, scratch: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "torch_pi2", "serve", str(folder), "--trust-remote-code", "--port", "0", "--json"]
    command += [*OPTIONS.split(), *options]
    path = scratch / "stderr"
    with path.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as server:
        try:
            until(lambda: "/v1" in path.read_text() or server.poll() is not None, 120)
            found = re.search(r"(http://\S+)/v1", path.read_text())
            assert found, path.read_text()
            yield Process(server, folder.name, found[1])
        finally:
            server.kill()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


class Customer:
    """Sends random requests and checks the answers."""

    def __init__(self, server: Process, alone: Callable[[str, int], str], seed: int) -> None:
        self._server, self._alone, self._chance, self._client = server, alone, random.Random(seed), server.client()
        self._kinds = [self.complete, self.stream] * 4 + [self.sampled, self.leave, self.time_out, self.hang_up] * 2
        self._kinds += [self.refused]

    def run(self, requests: int) -> Counter[str]:
        done: Counter[str] = Counter()
        for _ in range(requests):
            kind = self._chance.choice(self._kinds)
            try:
                kind()
                done[kind.__name__] += 1
            except openai.RateLimitError:
                done["429"] += 1
                time.sleep(0.05)
        return done

    def _request(self, **more: Any) -> dict[str, Any]:
        tokens = self._chance.choice((1, 2, 7, 20, LONGEST))
        request = {"prompt": self._chance.choice(TEXTS), "max_tokens": tokens, "temperature": 0}
        return {"model": self._server.name, **request, **more}

    def complete(self) -> None:
        request = self._request()
        text = self._client.completions.create(**request).choices[0].text
        assert text == self._alone(request["prompt"], request["max_tokens"]), request

    def stream(self) -> None:
        request = self._request()
        chunks = self._client.completions.create(**request, stream=True)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == self._alone(request["prompt"], request["max_tokens"]), request

    def sampled(self) -> None:
        """A seed gives the same text, whatever else is in the batch."""
        request = self._request(temperature=0.8, top_p=0.9, seed=self._chance.randrange(50), n=2)
        one, two = (self._client.completions.create(**request) for _ in range(2))
        assert [choice.text for choice in one.choices] == [choice.text for choice in two.choices]

    def leave(self) -> None:
        request = self._request(max_tokens=LONGEST, logit_bias={"0": -100}, n=self._chance.randrange(1, 3))
        stream = self._client.completions.create(**request, stream=True)
        for _, _ in zip(range(self._chance.randrange(4)), stream, strict=False):
            pass
        stream.close()

    def time_out(self) -> None:
        request = self._request(max_tokens=200, logit_bias={"0": -100}, timeout=self._chance.random() / 10 + 0.001)
        with suppress(openai.APITimeoutError):
            self._client.completions.create(**request)

    def hang_up(self) -> None:
        """Close the connection within a request, or right after it."""
        body = json.dumps(self._request(stream=True)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        whole = head.encode() + b"\r\n\r\n" + body
        host, port = self._server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(whole[: self._chance.choice((1, 30, len(whole) - 3, len(whole)))])

    def refused(self) -> None:
        with pytest.raises(openai.BadRequestError):
            self._client.completions.create(**self._request() | self._chance.choice(REFUSED))


def ask_all(server: Process, alone: Callable[[str, int], str], requests: int, seed: int) -> Counter[str]:
    customers = [Customer(server, alone, seed + i) for i in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = sum(pool.map(lambda customer: customer.run(-(-requests // CLIENTS)), customers), Counter[str]())
    until(lambda: server.metrics()["sequences_now/live"] == server.metrics()["sequences_now/waiting"] == 0)
    return done


@pytest.mark.parametrize("name", ["memory", "store"])
def test_load(folders: Path, alone: Callable[[str, int], str], tmp_path: Path, name: str) -> None:
    """No file, thread or slot is lost, and at most 20 MiB of memory."""
    requests = int(os.environ.get("PI2_SOAK_REQUESTS", "300"))
    with serving(folders / name, tmp_path, *(("--budget", "40MB") if name == "store" else ())) as server:
        files, _, _ = server.usage()
        ask_all(server, alone, 200, seed=1000)
        _, threads, rss_mib = server.usage()
        done = ask_all(server, alone, requests, seed=0)
        assert sum(done.values()) >= requests
        assert len(done) > 6
        until(lambda: server.usage()[0] <= files)
        assert server.usage()[1] <= threads + EXECUTOR
        assert server.usage()[2] <= rss_mib + 20
        counts = server.metrics()
        assert "sequences/error" not in counts
        assert counts["sequences/cancelled"] > 0
        assert counts["prefix_blocks/memory"] > 0
        request: dict[str, Any] = {"model": name, "prompt": TEXTS[0], "max_tokens": LONGEST, "temperature": 0}
        stream = server.client().completions.create(**request, stream=True)
        first = next(iter(stream)).choices[0].text
        server.process.send_signal(signal.SIGTERM)  # running answers end in order
        assert first + "".join(chunk.choices[0].text for chunk in stream) == alone(TEXTS[0], LONGEST)
        out, _ = server.process.communicate(timeout=90)
        said = (tmp_path / "stderr").read_text()
        assert server.process.returncode == 0, said
        assert "Traceback" not in said
        assert json.loads(out)[name]["ended"]["length"] > 0
