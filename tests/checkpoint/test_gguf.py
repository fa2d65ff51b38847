"""GGUF files: written from checkpoints, read back in every type, compared with what their numbers give in PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import ggufs
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2
from torch_pi2.errors import ConfigError, UnsupportedModelError

TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> the model, its folder, and its float32 file."""
    root, known = tmp_path_factory.mktemp("gguf"), {}

    def of(name: str) -> tuple[Any, Path, Path]:
        if name not in known:
            model, folder, file = ggufs.tiny(name), root / name, root / f"{name}.gguf"
            model.save_pretrained(folder)
            ggufs.tokenizer(folder)
            report = torch_pi2.export_gguf(folder, file, type="f32")
            assert (report.tokenizer, report.type) == ("", "f32")
            known[name] = model, folder, file
        return known[name]

    return of


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.parametrize("name", ggufs.MODELS)
def test_there_and_back(made: Any, tmp_path: Path, name: str) -> None:
    """In float32 nothing is rounded, so that what comes back is the model; experts are, as neurons."""
    model, _, file = made(name)
    report = torch_pi2.import_gguf(file, tmp_path / "out")
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    off = (logits(again) - logits(model)).abs().max() / logits(model).abs().max()
    assert off < (0.05 if report.neurons else 1e-5)
    assert report.tokenizer == ""
    assert bool(report.rounded) == bool(report.neurons)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma2", "phi3"])
def test_rows_are_kept(made: Any, tmp_path: Path, name: str, kind: str) -> None:
    model, _, file = made(name)
    typed = tmp_path / "typed.gguf"
    values = ggufs.retyped(file, typed, kind)
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    assert not report.rounded and report.types.keys() == {kind} and not any(report.errors.values())
    wanted = logits(ggufs.with_values(copy.deepcopy(model), file, values))
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


_ = (gguf, AutoModelForCausalLM, AutoTokenizer, ConfigError, UnsupportedModelError)
