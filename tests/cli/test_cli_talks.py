"""``torch-pi2 chat`` and ``serve``: a talk through a pipe, and a server from its start to the end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from cli_calls import Ran
from shared import shared_folder
from thread_link import ThreadLink
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2
from torch_pi2.cli import main
from torch_pi2.cli.serve import url_of
from torch_pi2.rewrite import gpu

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(new: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()
        tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
        model = torch_pi2.optimize(model, weights="int4", activations="int8")
        torch_pi2.save(model, new, tokenizer=tokenizer)

    return shared_folder(tmp_path_factory, "talks", make)


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(typed: str, *more: str, **stdin: io.TextIOWrapper | None) -> Ran:
        monkeypatch.setattr(sys, "stdin", stdin.get("stdin", io.StringIO(typed)))
        asked = ["chat", str(folder), "--trust-remote-code", "--max-new-tokens", "9", "--activations", "int8", *more]
        code = main(asked)
        return Ran(code, *capsys.readouterr())

    return run


def alone(folder: Path, text: str, tokens: int) -> str:
    model = torch_pi2.load(folder, trust_remote_code=True, activations="int8")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids_1T = torch.tensor([tokenizer(text)["input_ids"]])
    found: str = tokenizer.decode(torch_pi2.generate(model, ids_1T, max_new_tokens=tokens).sequences[0])
    return found


@pytest.mark.slow
def test_a_talk_through_a_pipe(talk: Any, folder: Path) -> None:
    first = alone(folder, "def main(", 9)
    second = alone(folder, f"def main({first}\nimport os\n\nclass A", 9)
    ran = talk("def main(\n/stats\n\\\nimport os\\\n\\\nclass A\n/exit\nnever read\n")
    assert ran.code == 0
    assert ran.out == f"{first}\n{second}\n\n"
    assert "has no chat template: the model continues your text" in ran.err
    assert re.search(r"^9 tokens, [\d.]+ a second \(length\)$", ran.err, re.MULTILINE)
    assert re.search(r"^[\d.]+ % of FFN rows used", ran.err, re.MULTILINE)
    again = talk("def \\\nmain(\n", "--json")
    said = again.json["messages"]
    assert [message["role"] for message in said] == ["user", "assistant"]
    assert said[0]["content"] == "def \nmain("


def test_what_can_be_typed_besides(talk: Any) -> None:
    ran = talk("/stats\n/nothing\n/reset\n\n")
    assert ran.out.strip() == ""
    assert "no answer yet" in ran.err
    assert "/nothing is not known" in ran.err
    assert talk("/EXIT now\nnever read\n").out.strip() == ""
    assert [said["content"] for said in talk("a\\\n b\\", "--json").json["messages"][:1]] == ["a\n b"]
    full = talk("def main(\n" + "x " * 60 + "\n", "--max-tokens", "30")
    assert full.code == 0
    assert "talk: expected 1 to 29 tokens before an answer" in full.err
    assert "Begin another (/reset), or make room for more tokens (--max-tokens)." in full.err
    assert "(cut after 9 tokens: --max-new-tokens" in full.err
    assert talk("   \n").out.strip() == ""


def test_what_is_typed_in_another_encoding(talk: Any) -> None:
    ran = talk("", "--json", stdin=io.TextIOWrapper(io.BytesIO(b"caf\xe9\ncaf\xc3\xa9\n"), "utf-8"))
    assert ran.json["messages"][0]["content"] == "caf\u00e9"
    assert "expected UTF-8, found other bytes; this was not sent: caf?" in ran.err


def test_a_closed_standard_input_is_the_end(talk: Any) -> None:
    ran = talk("", stdin=None)
    assert (ran.code, ran.out) == (0, "\n")


def test_two_models_of_one_name(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["serve", str(folder), str(folder), "--trust-remote-code"]) == 2
    assert "folders: expected a name for each model, found talks, talks" in capsys.readouterr().err


def test_addresses_that_cannot_be_listened_on(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """They are refused before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, found in (
            (["--port", str(taken.getsockname()[1])], "and a port that is free, found Address already in use. Name"),
            (["--host", "192.0.2.1"], "found Cannot assign requested address"),
        ):
            assert main(["serve", str(folder), *options]) == 2
            said = capsys.readouterr().err
            assert found in said
            assert "load" not in said
    assert main(["serve", str(folder), "--port", "65536"]) == 2
    assert "argument --port: expected at most 65535, found 65536" in capsys.readouterr().err


def test_addresses_as_urls() -> None:
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("::1", 8000) == "http://[::1]:8000"


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "torch_pi2", "serve", str(folder), "--trust-remote-code", "--port", "0", "--json"]
    asked = [*command, "--activations", "int8", "--max-batch-size", "2", "--max-tokens", "128"]
    environment = os.environ | {"TORCH_PI2_API_KEY": "secret"}
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+/v1", line)))
        yield process, url
        process.kill()


@pytest.mark.slow
def test_a_server_from_start_to_end(server: tuple[subprocess.Popen[str], str], folder: Path) -> None:
    process, url = server
    client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
    asked: dict[str, Any] = {"model": "talks", "prompt": "def main(", "max_tokens": 100, "temperature": 0}
    stream = client.completions.create(**asked, stream=True)
    first = next(iter(stream)).choices[0].text
    process.send_signal(signal.SIGTERM)  # what has begun is answered to its end
    assert first + "".join(chunk.choices[0].text for chunk in stream) == alone(folder, "def main(", 100)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["talks"]["ended"] == {"length": 1}


def test_a_talk_with_a_gpu_in_it(
    talk: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same talk with some of the neurons on a thread in a GPU's place; without a GPU, a word before loading."""
    wanted = talk("hello\n").out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for memory in ("all", "1GiB"):
        said = talk("hello\n", "--gpu-memory", memory)
        assert (said.code, said.out) == (2, "")
        assert "layers on a GPU: expected a GPU, and a torch that was built for it, found torch" in said.err
        assert "load " not in said.err
    monkeypatch.setattr(gpu, "check_gpu", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "TransferBuffer", lambda _: ThreadLink())
    said = talk("hello\n", "--gpu-memory", "12MiB")
    assert (said.code, said.out) == (0, wanted), said.err
    assert main(["generate", str(MODEL), "--prompt", "a", "--gpu-memory", "1GiB"]) == 2
    assert "--gpu-memory 1GiB: expected all for a model that is not optimised" in capsys.readouterr().err
    assert "--gpu-memory 1GiB with --compile: expected one of them" in talk("", "--gpu-memory", "1GiB", "--compile").err
    assert (
        "--gpu-memory all with --budget 1GB: expected one of them"
        in talk("", "--gpu-memory", "all", "--budget", "1GB").err
    )
