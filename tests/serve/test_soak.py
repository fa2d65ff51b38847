"""A server for hours, in counts: requests of all kinds, whole, left and malformed, at once; nothing is lost or leaks.

``PI2_SOAK_REQUESTS``: how many the slow test sends (an hour has some ten thousand; its default is half a minute).
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
from serving import greedy_alone
from shared import shared_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
STEM = "import os\nimport sys\nfrom pathlib import Path\n\n\ndef main(arguments):\n    " + "x = x + 1\n    " * 12
#: Some begin alike, so that prefixes are found; tokens of the longest answer.
TEXTS = ["def main(", "for", "import os\n\nclass", STEM, STEM + "return", STEM + "if x:", "# été \N{SNOWMAN}\n", "\n"]
LONGEST = 48
BATCH, QUEUE, CLIENTS = 3, 6, 5
#: Threads that asyncio may start for what blocks.
EXECUTOR = min(32, (os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count() or 1) + 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``memory`` and, packed from it, ``store``."""

    def make(new: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()
        tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
        tokenizer.chat_template = TEMPLATE
        model = torch_pi2.optimize(model, weights="int4", activations="int8")
        torch_pi2.save(model, new / "memory", tokenizer=tokenizer)
        torch_pi2.pack(new / "memory", new / "store", trust_remote_code=True)

    return shared_folder(tmp_path_factory, "soaked", make)


class Alone:
    """Greedy texts of ``TEXTS``, as completions and as chats, each decoded alone."""

    def __init__(self, folder: Path) -> None:
        model = torch_pi2.load(folder, trust_remote_code=True, activations="int8")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        self._tokens = {
            text: greedy_alone(model, self._tokenizer(text)["input_ids"], LONGEST, {self._tokenizer.eos_token_id})
            for text in (*TEXTS, *(chatted(text) for text in TEXTS))
        }

    def __call__(self, text: str, tokens: int) -> str:
        found: str = self._tokenizer.decode(self._tokens[text][:tokens], skip_special_tokens=True)
        return found


def chatted(text: str) -> str:
    return f"# user: {text}\n"


class Process:
    """``torch-pi2 serve`` as a user starts it."""

    def __init__(self, process: subprocess.Popen[str], name: str, url: str, said: Path) -> None:
        self.process, self.name, self.url, self._said = process, name, url, said

    def client(self, timeout: float = 120) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout)

    def stderr(self) -> str:
        return self._said.read_text()

    def metrics(self) -> dict[str, float]:
        """By name with its kind: ``sequences/length``, ``sequences_now/live``."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(r'^torch_pi2_(\w+?)(?:_total)?\{kind="(\w+)",model="\w+"\} (\S+)$', text, re.MULTILINE)
        return {f"{name}/{kind}": float(value) for name, kind, value in found}

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"^VmRSS:\s*(\d+) kB", status, re.MULTILINE)[0]) / 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def idle(self) -> bool:
        now = self.metrics()
        return now["sequences_now/live"] == now["sequences_now/waiting"] == 0

    def end(self) -> dict[str, Any]:
        """As a service manager ends it; what it says then."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, self.stderr()
        assert "Traceback" not in self.stderr()
        said = json.loads(out)[self.name]
        assert isinstance(said, dict)
        return said


@contextmanager
def serving(folder: Path, scratch: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "torch_pi2", "serve", str(folder), "--trust-remote-code", "--port", "0", "--json"]
    command += [
        "--activations",
        "int8",
        "--threads",
        "1",
        "--max-batch-size",
        str(BATCH),
        "--max-queue",
        str(QUEUE),
        "--max-tokens",
        "320",
    ]
    command += ["--prefix-cache", "2MiB", *options]
    path = scratch / "stderr"
    with path.open("w") as said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
        try:
            until(lambda: "/v1" in path.read_text() or process.poll() is not None, 120)
            found = re.search(r"(http://\S+)/v1", path.read_text())
            assert found, path.read_text()
            assert httpx.get(f"{found[1]}/health").json()["status"] == "ok"
            yield Process(process, folder.name, found[1], path)
        finally:
            process.kill()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to it"
        time.sleep(0.02)


class Customer:
    """Asks for one thing after another, by chance, and looks at what comes."""

    def __init__(self, server: Process, alone: Alone, seed: int) -> None:
        self._server, self._alone, self._chance = server, alone, random.Random(seed)
        self._client, self._raw = server.client(), httpx.Client(base_url=server.url, timeout=120)
        self.done: Counter[str] = Counter()
        self._kinds = (
            [self.complete, self.stream, self.chat, self.stream_chat] * 3
            + [self.sampled, self.of_a_schema] * 2
            + [self.leave_a_stream, self.leave_an_answer, self.hang_up] * 2
            + [self.refused]
        )

    def run(self, requests: int) -> Counter[str]:
        with self._client, self._raw:
            for _ in range(requests):
                kind = self._chance.choice(self._kinds)
                try:
                    kind()
                    self.done[kind.__name__] += 1
                except openai.RateLimitError:
                    self.done["told to come again"] += 1
                    time.sleep(0.05)
        return self.done

    def _asked(self) -> tuple[str, int, dict[str, Any]]:
        text, tokens = self._chance.choice(TEXTS), self._chance.choice((1, 2, 7, 20, LONGEST))
        return text, tokens, {"model": self._server.name, "max_tokens": tokens, "temperature": 0}

    def complete(self) -> None:
        text, tokens, asked = self._asked()
        made = self._client.completions.create(**asked, prompt=text)
        assert made.choices[0].text == self._alone(text, tokens), (text, tokens)
        assert made.usage is not None
        assert made.usage.completion_tokens <= tokens

    def stream(self) -> None:
        text, tokens, asked = self._asked()
        chunks = self._client.completions.create(**asked, prompt=text, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == self._alone(text, tokens), (text, tokens)

    def _messages(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def chat(self) -> None:
        text, tokens, asked = self._asked()
        made = self._client.chat.completions.create(**asked, messages=self._messages(text))
        assert made.choices[0].message.content == self._alone(chatted(text), tokens), (text, tokens)

    def stream_chat(self) -> None:
        text, tokens, asked = self._asked()
        chunks = self._client.chat.completions.create(**asked, messages=self._messages(text), stream=True)
        found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert found == self._alone(chatted(text), tokens), (text, tokens)

    def sampled(self) -> None:
        """What a seed gives is that in whatever company."""
        text, _, asked = self._asked()
        asked |= {"prompt": text, "temperature": 0.8, "top_p": 0.9, "seed": self._chance.randrange(50), "n": 2}
        one, two = (self._client.completions.create(**asked) for _ in range(2))
        assert [choice.text for choice in one.choices] == [choice.text for choice in two.choices]

    def of_a_schema(self) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["yes", 17]}}}
        _, _, asked = self._asked()
        asked |= {"max_tokens": 20, "response_format": wanted}
        made = self._client.chat.completions.create(**asked, messages=self._messages("JSON"))
        assert json.loads(made.choices[0].message.content or "") in ("yes", 17)

    def leave_a_stream(self) -> None:
        text, _, asked = self._asked()
        asked |= {"max_tokens": LONGEST, "logit_bias": {"0": -100}}
        stream = self._client.completions.create(**asked, prompt=text, stream=True, n=self._chance.randrange(1, 3))
        for _, _ in zip(range(self._chance.randrange(4)), stream, strict=False):
            pass
        stream.close()

    def leave_an_answer(self) -> None:
        text, _, asked = self._asked()
        asked |= {"max_tokens": 200, "logit_bias": {"0": -100}, "timeout": self._chance.random() / 10 + 0.001}
        with suppress(openai.APITimeoutError):
            self._client.completions.create(**asked, prompt=text)

    def _connected(self) -> socket.socket:
        host, port = self._server.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def hang_up(self) -> None:
        """In the middle of a request, or as soon as it is sent."""
        text, _, asked = self._asked()
        body = json.dumps(asked | {"prompt": text, "stream": self._chance.random() < 0.5}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        whole = head.encode() + b"\r\n\r\n" + body
        with self._connected() as connection:
            connection.sendall(whole[: self._chance.choice((1, 30, len(whole) - 3, len(whole)))])

    def refused(self) -> None:
        _, _, asked = self._asked()
        wrong = self._chance.choice(
            (
                {"max_tokens": 0},
                {"max_tokens": 10**6},
                {"temperature": 9},
                {"n": 0},
                {"n": 10**9},
                {"stop": [""]},
                {"logit_bias": {"999999": 1}},
                {"prompt": ""},
                {"prompt": [10**6]},
                {"prompt": "x " * 400},
                {"echo": True, "logprobs": 1},
                {"extra_body": {"response_format": {"type": "json_schema"}}},
                {"seed": "seven"},
            )
        )
        asked |= {"prompt": "x", "stream": self._chance.random() < 0.5} | dict(wrong)
        with pytest.raises(openai.BadRequestError) as found:
            self._client.completions.create(**asked)
        assert isinstance(found.value.body, dict)
        assert found.value.body["message"]


def ask_all(server: Process, alone: Alone, requests: int, seed: int) -> Counter[str]:
    customers = [Customer(server, alone, seed + i) for i in range(CLIENTS)]
    done: Counter[str] = Counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for found in pool.map(lambda customer: customer.run(-(-requests // CLIENTS)), customers):
            done += found
    until(server.idle)
    return done


def soak(server: Process, alone: Alone, requests: int, warm_up: int, more_mb: float) -> None:
    """Not a thread, a file, a slot and, after the first of them, no more than ``more_mb`` of memory are lost."""
    files = server.files()
    ask_all(server, alone, warm_up, seed=1000)
    threads, rss_mb = server.threads(), server.rss_mb()
    done = ask_all(server, alone, requests, seed=0)
    assert sum(done.values()) >= requests
    assert len(done) > 8
    until(lambda: server.files() <= files)
    assert server.threads() <= threads + EXECUTOR
    assert server.rss_mb() <= rss_mb + more_mb
    counts = server.metrics()
    assert "sequences/error" not in counts
    assert counts["sequences/cancelled"] > 0
    assert counts["prefix_blocks/memory"] > 0
    assert httpx.get(f"{server.url}/health").status_code == 200
    with server.client() as client:
        last = client.completions.create(model=server.name, prompt=STEM, max_tokens=LONGEST, temperature=0)
        assert last.choices[0].text == alone(STEM, LONGEST)


def ends_well(server: Process, alone: Alone) -> None:
    """What has begun is answered."""
    with server.client() as client:
        stream = client.completions.create(
            model=server.name, prompt=TEXTS[0], max_tokens=LONGEST, temperature=0, stream=True
        )
        first = next(iter(stream)).choices[0].text
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(server.end)
            assert first + "".join(chunk.choices[0].text for chunk in stream) == alone(TEXTS[0], LONGEST)
            assert said.result()["ended"]["length"] > 0


@pytest.fixture(scope="module")
def alone(folders: Path) -> Alone:
    return Alone(folders / "memory")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["memory", "store"])
def test_an_hour_of_it(folders: Path, alone: Alone, tmp_path: Path, name: str) -> None:
    requests = int(os.environ.get("PI2_SOAK_REQUESTS", "300"))
    with serving(folders / name, tmp_path, *(("--budget", "40MB") if name == "store" else ())) as server:
        soak(server, alone, requests, warm_up=200, more_mb=20)
        ends_well(server, alone)
