"""``bench serve`` and ``bench prefix``: requests that are what they say, figures that hang together, two servers.

Those of llama-cpp-python's server need the extra ``bench``; they are skipped, and say so, where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import prefix, serve, table
from benchmarks.__main__ import main, render
from benchmarks.clients import Answered, Load, Request, check, load
from benchmarks.gguf import write_gguf
from benchmarks.peer import PeerError
from benchmarks.serve import Requests, percentile
from benchmarks.server import Server, llama
from benchmarks.words import END_ID, save_tokenizer, text, vocabulary
from torch_pi2.errors import ConfigError, LibraryMissingError
from torch_pi2.store.shapes import build_config

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="package gguf is not installed (extra bench)"
)
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("sse_starlette") is None,
    reason="package llama-cpp-python with its server is not installed (extra bench)",
)
SMALL = ["--shape", "tiny", "--lanes", "2", "--threads", "1", "--json"]
LOADED = ["--clients", "1,2", "--requests", "3", "--rounds", "2", "--prompts", "8,40", "--answers", "2,5"]


def drawn_requests(count: int = 40) -> list[Request]:
    return Requests([32, 256], [16, 128], 128, seed=0).of("one", count)


# --- what is asked ---


def test_letters_are_tokens_and_every_token_is_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 1024)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(vocabulary(1024)) == len(set(vocabulary(1024))) == 1024
    prompt = text(50, random.Random(0))
    assert len(tokenizer(prompt)["input_ids"]) == 50
    said = [tokenizer.decode([token], skip_special_tokens=True) for token in range(1024)]
    assert [token for token, word in enumerate(said) if not word or "\ufffd" in word] == [END_ID]


def test_a_vocabulary_without_room_for_letters() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary: expected \d+ tokens or more, for letters, found 9"):
        vocabulary(9)


def test_requests_are_as_long_as_they_say_and_half_begin_alike() -> None:
    asked = drawn_requests()
    assert asked == drawn_requests()
    assert len({request.prompt for request in asked}) == len(asked)
    for request in asked:
        assert len(request.prompt) == request.prompt_tokens
        assert 32 <= request.prompt_tokens <= 256
        assert 16 <= request.answer_tokens <= 128
    begin = asked[0].prompt[:16]
    assert [request.prompt.startswith(begin) for request in asked] == [True, False] * 20
    long = [request.prompt for request in asked[::2] if request.prompt_tokens >= 144]
    assert len(long) > 1
    assert len({prompt[:128] for prompt in long}) == 1


def test_warm_up_has_each_number_of_sequences() -> None:
    falling = Requests([32, 256], [16, 128], 128, seed=0).falling(8)
    assert [request.answer_tokens for request in falling] == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": [3]}, "prompts: expected the least and the most, such as 32,256, found 3"),
        ({"answers": [9, 2]}, "answers: expected the least and the most, .*found 9,2"),
        ({"shared": 256}, "shared: expected less than 256 tokens, found 256"),
        ({"clients": []}, "clients: expected 1 or more, found 0"),
        ({"prefix_caches": []}, "prefix-cache: expected one or more, found none"),
        ({"peers": ["other"]}, "peer: expected llama.cpp, found other"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve.run("tiny", **settings)


# --- figures ---


@pytest.mark.parametrize(("share", "found"), [(0.5, 2), (0.51, 3), (0.99, 4), (0.25, 1), (0, 1)])
def test_percentiles(share: float, found: int) -> None:
    assert percentile([4, 2, 1, 3], share) == found


def test_who_is_ahead_is_above_one() -> None:
    def loads(*walls: float) -> list[Load]:
        return [Load([Answered(wall / 8, wall / 2, 10)] * 2, wall, 0.1) for wall in walls]

    over = serve._over({"ours": loads(1, 2), "its": loads(2, 8)}, ["its"])["ours"]["ours"]
    assert over["spread"] == [2, 4]
    assert over["requests_per_s"] == 3
    assert over["latency_p50_ms"] == 2
    assert over["first_p99_ms"] == 4


# --- servers ---


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``work/bench`` is made."""
    monkeypatch.setattr(serve, "WORK", tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    try:
        code = main(list(command))
    finally:
        torch.set_num_threads(threads)
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    return told


def hangs_together(result: dict[str, Any], servers: list[str]) -> None:
    assert list(result["servers"]) == servers
    assert result["threads"] == 1
    assert result["requests"] == [3, 3]
    for server in result["servers"].values():
        assert server["peak_rss_bytes"] > 1e7
        assert [at["clients"] for at in server["loads"]] == [1, 2]
        assert [at["answers"] for at in server["loads"]] == [6, 6]
        for at in server["loads"]:
            assert 0 < at["first_p50_ms"] <= at["first_p99_ms"] <= at["latency_p99_ms"]
            assert 0 < at["first_p50_ms"] <= at["latency_p50_ms"] <= at["latency_p99_ms"]
            for rate in ("requests_per_s", "tokens_per_s"):
                low, high = at["spread"][rate]
                assert 0 < low <= at[rate] <= high
    assert "(synthetic: " in render(result)


@pytest.mark.slow
def test_our_server_under_load(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed(capsys, "serve", *SMALL, *LOADED, "--shared", "20", "--prefix-cache", "1MiB")
    hangs_together(result, ["torch-pi2, prefix cache 1MiB"])
    assert result["over"] == [{"clients": 1, "ours": {}}, {"clients": 2, "ours": {}}]
    assert "| serve-tiny: tiny int4, int8 activations | torch-pi2, prefix cache 1MiB | 2 |" in table.page(
        {"serve-tiny": result}
    )


@pytest.mark.slow
@needs_gguf
@needs_llama
def test_servers_under_load_in_alternation(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed(capsys, "serve", *SMALL, *LOADED, "--shared", "20", "--peer", "llama.cpp")
    ours = ["torch-pi2, prefix cache 256MiB", "torch-pi2, no prefix cache"]
    hangs_together(result, [*ours, "llama.cpp"])
    for over in result["over"]:
        assert list(over["ours"]) == ours
        assert all(ratio["requests_per_s"] > 0 for ratio in over["ours"].values())
    assert "times as many as llama.cpp" in render(result)


@pytest.mark.slow
def test_prompts_that_begin_alike(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed(capsys, "prefix", *SMALL, "--prefix", "320", "--suffix", "1,9", "--rounds", "3")
    (server,) = result["servers"].values()
    assert [row["suffix"] for row in server["rows"]] == [1, 9]
    for row in server["rows"]:
        assert 0 < row["warm_ms"] < row["cold_ms"]
        assert row["ratio"] > 1
    page = table.page({"prefix-tiny": result})
    elsewhere = result | {"machine": result["machine"] | {"kernels": "others"}}
    assert "\n\nOf b, c: " in table.page({"a": result, "b": elsewhere, "c": elsewhere})
    assert "\nOf " not in page
    assert "| torch-pi2, prefix cache 256MiB | 320 + 9 |" in page
    assert "320 + 1 " in render(result)


@pytest.mark.slow
@needs_gguf
@needs_llama
def test_a_server_that_counts_other_tokens(tmp_path: Path) -> None:
    config = build_config("tiny", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, tokens=vocabulary(config.vocab_size))
    server = llama(path, threads=1, context=64)
    try:
        check(server, [Request("abcdef", 6, 3)])
        with pytest.raises(PeerError, match=r"expected 5 tokens of a prompt and 3 of its answer, found 6 and 3"):
            check(server, [Request("abcdef", 5, 3)])
        with pytest.raises(PeerError, match=r"llama.cpp: expected 3 tokens that end by length, found 0 that ended by"):
            load(server, [Request("abcdef" * 20, 120, 3)], 1)  # no room
    finally:
        server.close()


def test_a_server_that_ends_at_once() -> None:
    with pytest.raises(PeerError, match=r"ours: expected a server .*exit code 1, after .*No module named absent"):
        Server("ours", "absent", [], {})


class Curt(BaseHTTPRequestHandler):
    """Ends every stream after one token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "w", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


def test_answers_of_another_length() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Curt) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        server: Any = SimpleNamespace(name="ours", model="m", url=f"http://127.0.0.1:{http.server_port}/v1")
        try:
            with pytest.raises(PeerError, match="ours: expected 5 tokens that end by length, found 1 that ended by st"):
                load(server, [Request("a", 1, 5)], 1)
        finally:
            http.shutdown()
            thread.join()


def test_without_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibraryMissingError, match=r"llama-cpp-python\[server\]: expected an installed llama_cpp"):
        llama(Path("none.gguf"), threads=1, context=1)


def test_prefix_settings() -> None:
    with pytest.raises(ConfigError, match="suffixes: expected 1 or more, found 0"):
        prefix.run("tiny", suffixes=[])
