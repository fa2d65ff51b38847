"""``bench sparsify``: the same training with and without a penalty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import _hf, randomise
from tiny_tokenizers import TEXT, byte_tokenizer

from benchmarks import sparsify, table
from benchmarks.__main__ import main


@pytest.mark.usefixtures("small_stdlib")
def test_zeros_and_losses_beside_the_dense_model_trained_as_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "swiglu"
    randomise(_hf("Llama", vocab_size=300)).save_pretrained(path)
    byte_tokenizer(TEXT).save_pretrained(path)
    sizes = ["--targets", "0.6,0.9", "--steps", "150", "--batch", "2", "--window", "32", "--tokens", "500"]
    assert main(["sparsify", str(path), *sizes, "--learning-rate", "0.003", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"].startswith("python -m benchmarks sparsify swiglu")
    cases = result["cases"]
    assert list(cases) == ["before", "dense", "60.0%", "90.0%"]
    assert cases["before"]["zeros"] == cases["dense"]["zeros"] == 0
    assert 0.4 < cases["60.0%"]["zeros"] < cases["90.0%"]["zeros"]
    assert cases["dense"]["nats_per_token"] < cases["before"]["nats_per_token"]
    shown = sparsify.render(result)
    assert "silu(gate)*up, then relu-gate; 150 steps of 2 windows of 32 tokens" in shown
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "sparsify-swiglu-stdlib.json").write_text(json.dumps(result))
    page = table.write(tmp_path / "results").read_text()
    assert "| sparsify-swiglu-stdlib: relu-gate, 150 steps | dense | 0.0 % |" in page


@pytest.fixture
def small_stdlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little of it, which a byte tokenizer is soon done with."""
    whole = sparsify.stdlib_text
    monkeypatch.setattr(sparsify, "stdlib_text", lambda split: whole(split, max_bytes=20_000))
