"""A server under load for hours: whole, cancelled and refused requests at once; answers stay right, nothing leaks.

``PI2_SOAK_REQUESTS``: how many requests are sent (an hour has some ten thousand; the default takes half a minute).
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import greedy_alone, quantised, tokenizer_of_example

import torch_pi2

STEM = "import os\nimport sys\nfrom pathlib import Path\n\n\ndef main(arguments):\n    " + "x = x + 1\n    " * 12
#: Some begin alike, for the prefix cache.
TEXTS = ["def main(", "for", "import os\n\nclass", STEM, STEM + "return", STEM + "if x:", "# été \N{SNOWMAN}\n", "\n"]
LONGEST, CLIENTS = 48, 5
OPTIONS = "--activations int8 --threads 1 --max-batch-size 3 --max-queue 6 --max-tokens 320 --prefix-cache 2MiB"
#: Threads that asyncio may start for blocking calls.
EXECUTOR = min(32, (os.cpu_count() or 1) + 4)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def metrics(url: str) -> dict[str, float]:
    """By name with its kind: ``sequences/length``, ``sequences_now/live``."""
    found = re.findall(
        r'^torch_pi2_(\w+?)(?:_total)?\{kind="(\w+)",model="\w+"\} (\S+)$', httpx.get(f"{url}/metrics").text, re.M
    )
    return {f"{name}/{kind}": float(value) for name, kind, value in found}


def usage(pid: int) -> tuple[int, int, float]:
    """Files, threads, and MiB of memory."""
    folder = Path("/proc") / str(pid)
    kib = int(re.findall(r"^VmRSS:\s*(\d+) kB", (folder / "status").read_text(), re.MULTILINE)[0])
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), kib / 1024


def ask(url: str, name: str, wanted: dict[str, list[str]], count: int, seed: int) -> None:
    """Random requests, one after another, whose answers are checked."""
    chance = random.Random(seed)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    for _ in range(count):
        text, tokens = chance.choice(TEXTS), chance.choice((1, 2, 7, 20, LONGEST))
        request: dict[str, Any] = {"model": name, "prompt": text, "max_tokens": tokens, "temperature": 0}
        endless = request | {"max_tokens": 200, "logit_bias": {"0": -100}}
        kind = chance.choice(["whole", "stream"] * 4 + ["leave", "time out"] * 2 + ["refused"])
        try:
            if kind == "whole":
                assert client.completions.create(**request).choices[0].text == wanted[text][tokens], request
            elif kind == "stream":
                chunks = client.completions.create(**request, stream=True)
                assert "".join(chunk.choices[0].text for chunk in chunks) == wanted[text][tokens], request
            elif kind == "leave":
                stream = client.completions.create(**endless, stream=True, n=chance.randrange(1, 3))
                for _ in zip(range(chance.randrange(4)), stream, strict=False):
                    pass
                stream.close()
            elif kind == "time out":
                with suppress(openai.APITimeoutError):
                    client.completions.create(**endless, timeout=chance.random() / 10 + 0.001)
            else:
                with pytest.raises(openai.BadRequestError):
                    client.completions.create(**request | chance.choice([{"max_tokens": 10**6}, {"prompt": [10**6]}]))
        except openai.RateLimitError:
            time.sleep(0.05)


def ask_all(url: str, name: str, wanted: dict[str, list[str]], count: int, seed: int) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda i: ask(url, name, wanted, -(-count // CLIENTS), seed + i), range(CLIENTS)))
    until(lambda: metrics(url)["sequences_now/live"] == metrics(url)["sequences_now/waiting"] == 0)


@pytest.mark.slow
@pytest.mark.long
def test_load(tmp_path: Path) -> None:
    """Over a store. No file, thread or slot is lost, and at most 20 MiB of memory."""
    tokenizer, folder, err = tokenizer_of_example(), tmp_path / "store", tmp_path / "stderr"
    torch_pi2.save(quantised(), tmp_path / "memory", tokenizer=tokenizer)
    torch_pi2.pack(tmp_path / "memory", folder, trust_remote_code=True)
    model = torch_pi2.load(tmp_path / "memory", trust_remote_code=True, activations="int8")
    alone = {t: greedy_alone(model, tokenizer(t)["input_ids"], LONGEST, {tokenizer.eos_token_id}) for t in TEXTS}
    wanted = {
        text: [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(LONGEST + 1)]
        for text, ids in alone.items()
    }
    command = [sys.executable, "-m", "torch_pi2", "serve", str(folder), "--trust-remote-code", "--port", "0"]
    command += [*OPTIONS.split(), "--budget", "40MB"]
    with err.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as server:
        try:
            until(lambda: "/v1" in err.read_text() or server.poll() is not None, 120)
            found = re.search(r"(http://\S+)/v1", err.read_text())
            assert found, err.read_text()
            files, _, _ = usage(server.pid)
            ask_all(found[1], folder.name, wanted, 200, seed=1000)
            _, threads, rss_mib = usage(server.pid)
            ask_all(found[1], folder.name, wanted, int(os.environ.get("PI2_SOAK_REQUESTS", "300")), seed=0)
            until(lambda: usage(server.pid)[0] <= files)
            assert usage(server.pid)[1] <= threads + EXECUTOR
            assert usage(server.pid)[2] <= rss_mib + 20
            counts = metrics(found[1])
            assert "sequences/error" not in counts
            assert min(counts["sequences/cancelled"], counts["prefix_blocks/memory"]) > 0
            server.send_signal(signal.SIGTERM)
            assert server.wait(90) == 0, err.read_text()
            assert "Traceback" not in err.read_text()
        finally:
            server.kill()
