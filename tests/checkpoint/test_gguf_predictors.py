"""Predictors of PowerInfer's files: what they say is what they said, and how much that misses is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2 import cli
from torch_pi2.errors import ArtifactError, CalibrationError, Pi2Error, UnsupportedModelError
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.predict.file import load_predictors
from torch_pi2.types.plan import Plan

IDS = torch.randint(0, ggufs.VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(1))
KEYS = [f"model.layers.{i}.mlp" for i in range(2)]
#: Written in a type: (the file, the model that it is of).
Made = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("powerinfer")
    model = ggufs.tiny("llama")
    model.save_pretrained(folder / "model")
    ggufs.tokenizer(folder / "model")
    ggufs.written(folder / "model", folder / "f32.gguf")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    return model, folder / "f32.gguf"


def bad(model: Any) -> dict[str, torch.Tensor]:
    """Predictors that know nothing."""
    made = {}
    for i in range(2):
        made |= {f"blk.{i}.fc1.weight": torch.randn(96, 256), f"blk.{i}.fc2.weight": torch.randn(512, 96)}
    return made


def good(model: Any) -> dict[str, torch.Tensor]:
    """Predictors that compute the gate itself, of the input before its norm."""
    made, one = {}, torch.eye(256)
    for i, layer in enumerate(model.model.layers):
        gate_IH = (layer.mlp.gate_proj.weight * layer.post_attention_layernorm.weight).detach()
        made[f"blk.{i}.fc1.weight"] = torch.cat((one, -one))
        made[f"blk.{i}.fc2.weight"] = torch.cat((gate_IH, -gate_IH), 1)
    return made


@pytest.fixture
def made(source: tuple[Any, Path], tmp_path: Path) -> Made:
    def make(predictors: Any = good, kind: str = "Q4_0", **how: Any) -> tuple[Path, Any]:
        model, file = source
        values = ggufs.powerinfer(file, tmp_path / "powerinfer.gguf", kind, predictors(model), **how)
        return tmp_path / "powerinfer.gguf", values

    return make


def theirs(x_TH: torch.Tensor, values: Any, block: int) -> torch.Tensor:
    """PowerInfer's scores ``[T, I]`` of the hidden state before the norm."""
    fc1, fc2 = (torch.from_numpy(values[f"blk.{block}.fc{part}.weight"]) for part in (1, 2))
    return torch.relu(x_TH @ fc1.T) @ fc2.T


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0"])
def test_scores_are_theirs_divided_by_the_norm(made: Made, tmp_path: Path, kind: str) -> None:
    file, values = made(bad, kind)
    torch_pi2.import_gguf(file, tmp_path / "out", predictors=IDS)
    predictors = load_predictors(tmp_path / "out" / "pi2")
    x_TH = torch.randn(50, 256) * 7
    rms_T1 = x_TH.square().mean(1, keepdim=True).sqrt()
    for i, key in enumerate(KEYS):
        seen_TH = torch.from_numpy(values[f"blk.{i}.ffn_norm.weight"]) * x_TH / rms_T1
        wanted_TI, found_TI = theirs(x_TH, values, i) / rms_T1, predictors[key].scores(seen_TH)
        assert float((found_TI - wanted_TI).norm() / wanted_TI.norm()) < 0.02
        assert float((predictors[key].active(seen_TH) == (wanted_TI >= 0)).float().mean()) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("predictors", "least", "most"), [(good, 0.93, 1.0), (bad, 0.3, 0.7)])
def test_recall_is_what_the_model_shows(
    made: Made, source: tuple[Any, Path], tmp_path: Path, predictors: Any, least: float, most: float
) -> None:
    """Beside a count over PyTorch's own layers with the file's numbers, which see both sides of the norm."""
    file, values = made(predictors)
    report = torch_pi2.import_gguf(file, tmp_path / "out", predictors=IDS)
    assert (report.predictors, list(report.recall), report.rounded) == (0, KEYS, {})
    model = ggufs.with_values(ggufs.tiny("llama"), source[1], values)
    before: dict[int, torch.Tensor] = {}
    gates: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = nn.ReLU()
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, args, i=i: before.update({i: args[0].flatten(0, 1)})
        )
        layer.mlp.gate_proj.register_forward_hook(lambda _, args, y, i=i: gates.update({i: y.flatten(0, 1)}))
    with torch.no_grad():
        model(IDS)
    for i, key in enumerate(KEYS):
        fires_TI, says_TI = gates[i] > 0, theirs(before[i], values, i) >= 0
        wanted = float((fires_TI & says_TI).sum() / fires_TI.sum())
        assert report.recall[key] == pytest.approx(wanted, abs=0.02)
        assert least < report.recall[key] <= most
        layer = Plan.load(tmp_path / "out" / "pi2").by_key()[key]
        assert (layer.method, layer.n_hot) == ("lowrank", 0)
        assert layer.expected_active == pytest.approx(float(says_TI.float().mean()), abs=0.02)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[:2]).logits.float()


@pytest.mark.slow
def test_used_in_memory_and_over_a_store(made: Made, tmp_path: Path) -> None:
    """The same bits under a budget; near the exact gate's with predictors that find nearly all."""
    file, _ = made(good, "Q8_0")
    torch_pi2.import_gguf(file, tmp_path / "exact")
    report = torch_pi2.import_gguf(file, tmp_path / "out", predictors=IDS)
    assert min(report.recall.values()) > 0.98
    model, exact = (torch_pi2.load(tmp_path / name, dtype=torch.float32) for name in ("out", "exact"))
    with sparse_only():  # prompts of so many tokens ask no predictor
        found, wanted = logits(model), logits(exact)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    stored = torch_pi2.load(tmp_path / "packed", dtype=torch.float32, budget="40MB")
    torch_pi2.save(model, tmp_path / "again")
    again = torch_pi2.load(tmp_path / "again", dtype=torch.float32)
    with sparse_only():
        assert torch.equal(logits(stored), found)
        assert torch.equal(logits(again), found)


@pytest.mark.slow
def test_at_the_command_line(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, _ = made()
    command = ["import", str(file), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    assert "4 tensors of PowerInfer's predictors left out" in capfd.readouterr().out
    (tmp_path / "some.txt").write_text("the cat sat on the mat " * 200)
    assert cli.main([*command, "--predictors", str(tmp_path / "some.txt")]) == 0
    said = capfd.readouterr().out
    assert "predictors of 2 layers (lossy) find 9" in said
    assert "left out" not in said
    assert cli.main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    layers = json.loads(capfd.readouterr().out)["layers"]
    assert all(layer["method"] == "lowrank" and layer["recall"] > 0.9 and layer["rank"] == 512 for layer in layers)
    (tmp_path / "none").mkdir()
    assert cli.main(["import", str(tmp_path / "none"), "--out", str(tmp_path / "o"), "--predictors", "stdlib"]) == 2
    assert "--predictors: expected a GGUF file beside it, found folder" in capfd.readouterr().err


def other(name: str, *shape: int) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Predictors of which one matrix is of another shape, or missing."""
    return lambda model: (
        {n: t for n, t in bad(model).items() if n != name} | ({name: torch.randn(shape)} if shape else {})
    )


ZERO = np.concatenate((np.zeros(3, np.float32), np.ones(253, np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "settings", "error", "message"),
    [
        ({"threshold": 0.5}, {}, UnsupportedModelError, "a threshold of 0, found powerinfer.sparse_threshold 0.5"),
        ({"predictors": lambda _: {}}, {}, UnsupportedModelError, "found no blk.0.fc1.weight.*Leave predictors out"),
        (
            {"change": {"blk.1.ffn_norm.weight": ZERO}},
            {},
            UnsupportedModelError,
            "predictor of block 1 in .*: expected a norm that lets every number through, found 3 of its 256 weights",
        ),
        ({"predictors": other("blk.1.fc2.weight")}, {}, ArtifactError, "expected a tensor blk.1.fc2.weight"),
        (
            {"predictors": other("blk.0.fc1.weight", 96, 128)},
            {},
            ArtifactError,
            r"expected fc1 \[r, 256\] and fc2 \[512, r\], found \[96, 128\] and \[512, 96\]",
        ),
        ({}, {"predictors": IDS[:1, :20]}, CalibrationError, "at least 64 tokens"),
    ],
)
def test_refused_by_name(
    made: Made, tmp_path: Path, how: dict[str, Any], settings: dict[str, Any], error: type[Pi2Error], message: str
) -> None:
    """And nothing is left."""
    file, _ = made(**{"predictors": bad, **how})
    with pytest.raises(error, match=message):
        torch_pi2.import_gguf(file, tmp_path / "out", **{"predictors": IDS, **settings})
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_text_without_a_tokenizer(made: Made, source: tuple[Any, Path], tmp_path: Path) -> None:
    """A vocabulary whose way of splitting is not known."""
    file, _ = made()
    data = file.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modeL")
    file.write_bytes(data)
    with pytest.raises(CalibrationError, match="calibration text: expected a tokenizer"):
        torch_pi2.import_gguf(file, tmp_path / "out", predictors="the cat sat on the mat " * 50)
    assert torch_pi2.import_gguf(file, tmp_path / "out", predictors=IDS).tokenizer
