"""``torch-pi2 import``, and verbs that are given a GGUF file."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import ggufs
import pytest

import torch_pi2
from torch_pi2 import cli

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "qwen"
    ggufs.tiny("qwen2").save_pretrained(folder)
    ggufs.tokenizer(folder)
    return folder


def test_import_then_generate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert cli.main(["import", str(GOLDEN), "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert said.startswith("kept bit for bit: 5 Q4_K, 3 Q6_K\n")
    assert "tokenizer" not in said
    assert cli.main(["generate", str(out), "--prompt", "the cat", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["new_tokens"] == 4
    assert cli.main(["inspect", str(out)]) == 0
    said = capfd.readouterr().out
    assert "no layers of neurons" in said
    assert "linear layers and embeddings: 5 q4_k, 4 q6_k" in said  # the head has the embedding's rows
    assert cli.main(["import", str(GOLDEN), "--out", str(out), "--neurons", "all", "--json"]) == 0  # in its place
    found = json.loads(capfd.readouterr().out)
    assert (found["neurons"], found["weights"]) == (1, "q4_k+int8")
    assert set(found["rounded"].values()) == {"Q6_K to int8"}
    assert cli.main(["import", str(GOLDEN), "--out", str(out), "--neurons", "int8"]) == 0
    said = capfd.readouterr().out
    assert "1 layers are neurons now" in said
    assert re.search(r"^rounded again, Q6_K to int8: 1 matrices, 0\.\d+ % off at most$", said, re.MULTILINE), said


@pytest.mark.parametrize("neurons", ["auto", "all"])
def test_a_dense_import_is_called_so(tmp_path: Path, neurons: str, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "model")
    assert cli.main(["import", str(GOLDEN), "--out", out, "--neurons", neurons, "-q"]) == 0
    assert cli.main(["generate", out, "--prompt", "the cat", "--max-new-tokens", "2"]) == 0
    assert capfd.readouterr().out.endswith("with the prompt, dense]\n")
    assert cli.main(["eval", out, "--max-tokens", "60", "--window", "32"]) == 0
    table = capfd.readouterr().out
    assert re.search("^dense ", table, re.MULTILINE)
    assert ("methods: dense; " if neurons == "all" else "no layer is sparse; ") in table
    assert cli.main(["inspect", out]) == 0
    verdict = capfd.readouterr().out.splitlines()[-1]
    assert verdict.startswith("verdict:  dense: every neuron is computed; speed not measured (torch-pi2 eval ")
    assert ("import it with --neurons all for torch-pi2 pack" in verdict) == (neurons == "auto")
    for verb in (["optimize", out, "--out", str(tmp_path / "b")], ["quantize", out, str(tmp_path / "b")]):
        assert cli.main(verb) == 2
        said = capfd.readouterr().err
        assert "found a quantised model. Name the float checkpoint that it was made of; in Python, " in said
    assert torch_pi2.supported(torch_pi2.load_dense(out)).layers  # as is said there
    assert cli.main(["generate", out, "--prompt", "a", "--dense"]) == 2
    assert "Leave --dense out" in capfd.readouterr().err
    if neurons == "all":
        assert cli.main(["pack", out, str(tmp_path / "store")]) == 0
        assert "quality:  lossy (q4_k+int8 weights)" in capfd.readouterr().out


def test_mistakes(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", str(checkpoint / "config.json"), "--out", str(tmp_path / "b")]) == 2
    assert "expected a GGUF file, found one that begins with" in capfd.readouterr().err
    for verb in (["inspect", str(GOLDEN)], ["pack", str(GOLDEN), str(tmp_path / "b")]):
        assert cli.main(verb) == 2
        assert f"found a GGUF file. Use: torch-pi2 import {GOLDEN} --out DIR" in capfd.readouterr().err
    assert cli.main(["import", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "b")]) == 2
    assert "expected a GGUF file, found nothing" in capfd.readouterr().err
    assert cli.main(["profile", str(GOLDEN), "--out", str(tmp_path / "b")]) == 2
    assert f"a GGUF file, which runs as it is. Use: torch-pi2 generate {GOLDEN} PROMPT" in capfd.readouterr().err
    for verb in ("chat", "serve", "eval", "inspect"):  # absent, relative
        assert cli.main([verb, "none.gguf"]) == 2
        assert re.search("none.gguf: expected .*a folder, found nothing of that name", capfd.readouterr().err)


def test_a_folder_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "TINY.GGUF"
    file.write_bytes(GOLDEN.read_bytes())
    for given in (file, tmp_path / "model"):
        assert cli.main(["generate", str(given), "--prompt", "the cat", "--max-new-tokens", "4", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["new_tokens"] == 4
        assert cli.main(["inspect", str(given)]) == 2
        assert f"found a GGUF file. Use: torch-pi2 import {file} --out DIR" in capfd.readouterr().err
    assert cli.main(["import", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["types"] == {"Q4_K": 5, "Q6_K": 3}


def test_a_file_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert cli.main(["generate", str(GOLDEN), "--prompt", "the cat", "--max-new-tokens", "4", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["new_tokens"] == 4
    assert len(list((tmp_path / "torch_pi2" / "gguf").iterdir())) == 1


def test_a_file_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would make one up that knows no words: Qwen's reads nothing in any text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ggufs.tiny("qwen2").save_pretrained(tmp_path / "float")
    ggufs.written(tmp_path / "float", tmp_path / "a.gguf")
    assert cli.main(["generate", str(tmp_path / "a.gguf"), "--prompt", "the cat", "--max-new-tokens", "4"]) == 2
    said = capfd.readouterr().err
    assert f"no tokenizer of {tmp_path / 'a.gguf'}: the file has none" in said
    assert "expected files of a Hugging Face tokenizer, found none. Copy those of its model there." in said


@pytest.mark.parametrize("words", [["the cat", "-n", "4"], ["-n", "4", "the cat"], ["-n", "4", "-p", "the cat"]])
def test_a_prompt_in_any_place(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["generate", str(GOLDEN), *words]) == 0
    assert capfd.readouterr().out.startswith("the cat")


def test_a_warning_comes_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both = io.StringIO()
    monkeypatch.setattr("sys.stdout", both)
    monkeypatch.setattr("sys.stderr", both)
    cli.main(["generate", str(GOLDEN), "the cat", "-n", "3000"])
    warned, answer = both.getvalue().index("\ntorch-pi2: generate: 300"), both.getvalue().index("the cat")
    assert warned < answer
