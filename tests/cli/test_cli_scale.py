"""A checkpoint becomes sparse without ever being in memory as a whole: the commands, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_tokenizers import TEXT, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2 import cli

TOKENS = ["--tokens", "2048", "--hot-frequency", "0.6", "--tolerance", "0.5"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, hidden_act="relu", bos_token_id=0))
    model.save_pretrained(folder)
    byte_tokenizer(TEXT).save_pretrained(folder)
    (folder / "text.py").write_text(TEXT * 3)
    return folder


@pytest.mark.slow
def test_from_a_checkpoint_to_a_sparse_model_by_mapped_weights(command, checkpoint: Path, tmp_path: Path) -> None:
    parts, text = tmp_path / "parts", ["--text", checkpoint / "text.py", *TOKENS]
    command("profile", checkpoint, "--mapped", "--out", parts, *text)
    command("fit", checkpoint, "--mapped", "--stats", parts, "--out", parts, *text, "--method", "lowrank")
    made = ["--stats", parts, "--predictors", parts, "--out", parts, "--method", "lowrank", "--hot-frequency", "0.6"]
    command("plan", checkpoint, "--mapped", *made)
    assert {"plan.json", "predictors.safetensors", "stats.safetensors"} <= {path.name for path in parts.iterdir()}
    command("quantize", checkpoint, tmp_path / "small", "--plan", parts, "--no-verdict")
    optimized = ["--stats", parts, "--predictors", parts, "--method", "lowrank", "--hot-frequency", "0.6"]
    command("optimize", checkpoint, "--out", tmp_path / "sparse", *optimized, *text[:2], "--no-verdict")
    command("quantize", tmp_path / "sparse", tmp_path / "by-memory", "--no-verdict")
    ids = torch.arange(1, 33).reshape(1, 32)
    small, by_memory = (torch_pi2.load(tmp_path / name) for name in ("small", "by-memory"))
    assert {layer.method for layer in small.torch_pi2.plan.layers} == {"lowrank"}
    with torch.no_grad():
        assert torch.equal(small(ids).logits, by_memory(ids).logits)
    assert not (tmp_path / "parts.fitting").exists()


@pytest.mark.slow
def test_what_does_not_belong_together_is_refused(command, checkpoint: Path, tmp_path: Path) -> None:
    parts, text = tmp_path / "parts", ["--text", checkpoint / "text.py", *TOKENS]
    ran = command("profile", checkpoint, "--mapped", "--dtype", "bfloat16", "--out", parts, *text, ok=False)
    assert "--mapped with --dtype bfloat16: expected one of them" in ran.err
    command("profile", checkpoint, "--out", parts, *text)
    ran = command("quantize", checkpoint, tmp_path / "small", "--plan", parts, ok=False)
    assert "plan.json" in ran.err
    command("fit", checkpoint, "--stats", parts, "--out", parts, *text, "--method", "lowrank")
    made = ["--stats", parts, "--predictors", parts, "--method", "lowrank", "--hot-frequency", "0.6"]
    command("plan", checkpoint, *made, "--out", parts)
    command("optimize", checkpoint, "--out", tmp_path / "sparse", *made, *text[:2], "--no-verdict")
    ran = command("quantize", tmp_path / "sparse", tmp_path / "small", "--plan", parts, ok=False)
    assert "quantize(plan=...): expected none: the folder has its own" in ran.err
    (parts / "predictors.safetensors").unlink()
    ran = command("quantize", checkpoint, tmp_path / "small", "--plan", parts, ok=False)
    assert "predictors of" in ran.err
    assert "found none" in ran.err
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("verb", ["profile", "fit", "optimize"])
def test_calibration_is_of_one_process(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    more = ["--stats", str(tmp_path)] if verb == "fit" else []
    assert cli.main([verb, "model", "--out", str(tmp_path / "out"), *more]) == 2
    assert f"torch-pi2 {verb}: expected one process, found 2. Start one process" in capsys.readouterr().err
