"""Processes of a group are killed at random moments: each time the others name who, all begin again, no token is wrong.

``PI2_KILLS``: how many times (default: 3).
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from serving import greedy_alone
from sharding import Torchrun
from shared import shared_folder
from transformers import AutoTokenizer

import torch_pi2

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
KILLS = int(os.environ.get("PI2_KILLS", "3"))
PROMPT, TOKENS = "def main(", 120
#: Seconds until a group has begun again, at most; and until a lost process is named.
RECOVERS_S, NAMES_S = 60, 10

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``store``, and its shards in ``2``."""

    def make(base: Path) -> None:
        torch_pi2.pack(MODEL, base / "store", weights="int4", trust_remote_code=True)
        torch_pi2.pack(base / "store", base / "2", ranks=2)

    return shared_folder(tmp_path_factory, "killed-ranks", make)


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    """What one machine says after ``PROMPT``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch_pi2.load(folder / "store", budget="1GiB", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    served = greedy_alone(model, tokenizer(PROMPT)["input_ids"], TOKENS, {tokenizer.eos_token_id})
    torch.set_num_threads(threads)
    said: str = tokenizer.decode(served, skip_special_tokens=True)
    return said


class _Client(threading.Thread):
    """Asks again and again, until :meth:`stop`; what was answered."""

    def __init__(self, url: str, wanted: str) -> None:
        super().__init__()
        self._url, self._wanted, self._ends = url, wanted, threading.Event()
        self.right, self.refused, self.wrong = 0, list[str](), list[str]()

    def run(self) -> None:
        body = {"model": "2", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        while not self._ends.is_set():
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=30)
            except httpx.HTTPError:  # while there is no server
                time.sleep(0.1)
                continue
            if answer.status_code == 503:
                self.refused.append(answer.json()["error"]["message"])
            elif answer.status_code == 200:
                self._look_at(answer.json()["choices"][0]["text"])
            else:
                self.wrong.append(answer.text)

    def _look_at(self, said: str) -> None:
        self.wrong += [] if said == self._wanted else [said]
        self.right += said == self._wanted

    def stop(self) -> None:
        self._ends.set()
        self.join()


def _until(said: object, seconds: float, run: Torchrun) -> None:
    """``said`` becomes true in time."""
    assert callable(said)
    looks = round(seconds / 0.05)
    while not said():
        looks -= 1  # no clock: whoever stops this process may stop those as well
        assert looks > 0, run.log.read_text()
        assert run.process.poll() is None, run.log.read_text()
        time.sleep(0.05)


def test_serve(folder: Path, text: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    draw, client = random.Random(1), _Client(f"http://127.0.0.1:{port}", text)
    serve = ("serve", folder / "2", "--port", port, "--trust-remote-code")
    run = Torchrun(tmp_path / "log", 2, KILLS + 1, *serve)
    client.start()
    try:
        _until(lambda: client.right, RECOVERS_S, run)
        victims = []
        for _ in range(KILLS):
            victims.append(draw.randrange(2))
            time.sleep(draw.uniform(0, 2))
            run.kill(victims[-1])
            _until(lambda: run.lost() == victims, NAMES_S, run)
            wanted = client.right + 2
            _until(lambda wanted=wanted: client.right >= wanted, RECOVERS_S, run)
    finally:
        client.stop()
        run.end()
    assert client.wrong == []
    followers = victims.count(1)
    assert len(client.refused) >= followers  # what was under way, and more until the server had ended
    assert all("found none of process 1. See what it says" in message for message in client.refused)
