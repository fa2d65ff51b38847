"""``torch_pi2.sparsify``: dense models become ordinary checkpoints with zeros, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import by_hand
from sparsifying import FEW, TEXTS, dense_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_pi2
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    Pi2Error,
    StaleArtifactError,
)
from torch_pi2.training.sparsify import SparsifyReport, windows_of
from torch_pi2.training.trainer import Steering
from torch_pi2.training.zeros import Zeros, measure

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_llama(tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def done(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SparsifyReport]:
    """What the other tests look at: one training that nothing interrupts."""
    out = tmp_path_factory.mktemp("done") / "relu"
    return out, torch_pi2.sparsify(dense, out, TEXTS, **FEW)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return found


@pytest.mark.slow
def test_the_result_is_an_ordinary_checkpoint_with_zeros(dense: Path, done: tuple[Path, SparsifyReport]) -> None:
    out, report = done
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (type(model).__name__, model.config.hidden_act, model.config.use_cache) == ("LlamaForCausalLM", "relu", True)
    assert model.dtype == AutoModelForCausalLM.from_pretrained(dense).dtype
    assert not out.with_name("relu.training").exists()
    sites = torch_pi2.find_sites(model)
    windows = windows_of(TEXTS, AutoTokenizer.from_pretrained(out), 32)
    zeros = Zeros(model, sites)
    found = measure(model, zeros, windows[-4:])
    zeros.remove()
    assert found.nats_per_token == pytest.approx(report.after.nats_per_token, rel=1e-5)
    assert found.zeros == pytest.approx(report.after.zeros, abs=1e-3)
    assert report.before.mean_zeros == 0
    assert report.after.mean_zeros > report.changed.mean_zeros + 0.1
    assert report.after.nats_per_token < report.before.nats_per_token - 1
    # also says that weights which autocast keeps in bfloat16 are those of the last step
    assert report.curve[-1]["heldout_nats_per_token"] == pytest.approx(report.after.nats_per_token, rel=0.01)
    plan = torch_pi2.optimize(model).torch_pi2.plan
    assert {layer.method for layer in plan.layers} == {"exact"}


def test_the_report_says_what_was_done(done: tuple[Path, SparsifyReport]) -> None:
    out, report = done
    said = json.loads((out / "sparsify.json").read_text())
    assert said.pop("crc32c")
    assert said == json.loads(json.dumps(report.to_json()))
    assert (said["format"], said["version"], said["settings"]["steps"]) == ("torch_pi2.sparsify", 1, 40)
    assert [row["step"] for row in said["curve"]] == [10, 20, 30, 40]
    assert [row["weight"] for row in said["curve"][1:]] == [row["weight_next"] for row in said["curve"][:-1]]
    assert [len(row["zeros"]) for row in said["curve"]] == [2] * 4
    assert (report.tokens, report.text_tokens % 32, report.heldout_tokens) == (40 * 4 * 32, 0, 4 * 32)


def seed_all() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def interrupted_at(step: int) -> Callable[..., None]:
    before = Steering.on_step_end

    def stop(self: Steering, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt
        before(self, args, state, control, **more)

    return stop


def test_an_interrupted_training_resumes_with_the_same_bits(
    dense: Path, done: tuple[Path, SparsifyReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "relu", tmp_path / "relu.training"
    with monkeypatch.context() as patch:
        patch.setattr(Steering, "on_step_end", interrupted_at(33))
        with pytest.raises(KeyboardInterrupt, match=r"the same command resumes from .*relu\.training"):
            torch_pi2.sparsify(dense, out, TEXTS, **FEW)
    assert not out.exists()
    assert sorted(p.name for p in folder.iterdir()) == ["begun.json", "checkpoint-20"]
    with pytest.raises(
        StaleArtifactError,
        match=r"training begun in .*: expected the same model, text and settings as before, "
        r"found another learning_rate \(0.003, now 0.001\). Use the command that",
    ):
        torch_pi2.sparsify(dense, out, TEXTS, **(FEW | {"learning_rate": 1e-3}))
    with pytest.raises(StaleArtifactError, match="found another text"):
        torch_pi2.sparsify(dense, out, [*TEXTS[1:], TEXTS[0].upper()], **FEW)
    begun = by_hand((folder / "begun.json").read_text())
    for damage, message in (
        (begun[:-9], "damage"),
        (begun.replace('"version": 1', '"version": 2'), "expected torch_pi2.sparsify.begun version 1, found"),
        (begun.replace('"nats_per_token"', '"nats"', 1), r"begun\.json.*before.*expected .*nats_per_token"),
    ):
        (folder / "begun.json").write_text(damage)
        with pytest.raises(ArtifactError, match=message):
            torch_pi2.sparsify(dense, out, TEXTS, **FEW)
    (folder / "begun.json").write_text(begun)
    # one that was being written when the process was killed has no state, or part of it
    (folder / "checkpoint-40").mkdir()
    (folder / "checkpoint-40" / "trainer_state.json").write_text('{"epoch": 1')
    report = torch_pi2.sparsify(dense, out, TEXTS, **FEW)
    whole, there = weights(done[0]), weights(out)
    assert all(torch.equal(whole[name], there[name]) for name in whole)
    assert report.after == done[1].after
    drop = ("grad_norm", "loss", "epoch")
    assert [{k: v for k, v in row.items() if k not in drop} for row in report.curve] == [
        {k: v for k, v in row.items() if k not in drop} for row in done[1].curve
    ]
    assert os.listdir(tmp_path) == ["relu"]


def test_the_model_and_every_generator_are_left_as_they_were(dense: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seed_all()
    wanted = random.random(), np.random.rand(), torch.rand(1)
    seed_all()
    report = torch_pi2.sparsify(model, tmp_path / "o", TEXTS, **(FEW | {"steps": 10, "save_every": 10}), distill=0.5)
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config.hidden_act == "silu"
    assert report.curve[-1]["divergence"] > 0


@pytest.mark.slow
def test_drelu_brings_its_own_code(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "drelu"
    report = torch_pi2.sparsify(dense, out, TEXTS, **FEW, activation="drelu")
    assert report.changed.mean_zeros == pytest.approx(0.75, abs=0.05)
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert {site.form for site in torch_pi2.find_sites(model)} == {"relu(gate)*relu(up)"}
    windows = windows_of(TEXTS, AutoTokenizer.from_pretrained(out), 32)
    found = measure(model, Zeros(model, torch_pi2.find_sites(model)), windows[-4:])
    assert found.nats_per_token == pytest.approx(report.after.nats_per_token, rel=1e-5)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(out)
    again = torch_pi2.sparsify(
        out, tmp_path / "more", TEXTS, **(FEW | {"steps": 10, "save_every": 10}), trust_remote_code=True
    )
    assert again.changed == again.before
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "more", trust_remote_code=True).config.model_type == (
        "drelu_llama"
    )


@pytest.mark.slow
def test_two_processes_train_what_one_does(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXTS[0] * 4)
    found = {}
    for processes in (1, 2):
        out = tmp_path / f"by-{processes}"
        argv = ["sparsify", dense, "--out", out, "--text", tmp_path / "text", "--float32", "--json", "--quiet"]
        argv += ["--steps", 20, "--batch", 4, "--window", 32, "--learning-rate", 3e-3, "--threads", 1]
        # what `accelerate launch` runs for several processes; on a machine without GPUs they talk by gloo
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "torch_pi2"]
        ran = subprocess.run(
            [sys.executable, *launch, *map(str, argv)], capture_output=True, text=True, timeout=500, cwd=REPO
        )
        assert ran.returncode == 0, ran.stderr
        found[processes] = json.loads(ran.stdout)  # one of them tells
        assert len(list(out.glob("*.safetensors"))) == 1
    one, two = found[1], found[2]
    for a, b in zip(one["curve"], two["curve"], strict=True):
        # the same windows in every step, each once: another one would change the loss by more
        assert b["nats_per_token"] == pytest.approx(a["nats_per_token"], rel=1e-4)
        assert b["zeros"] == pytest.approx(a["zeros"], abs=1e-3)
    assert two["before"]["nats_per_token"] == pytest.approx(one["before"]["nats_per_token"], rel=1e-6)
    assert two["after"]["nats_per_token"] == pytest.approx(one["after"]["nats_per_token"], rel=1e-3)


def test_folders_that_cannot_be_written_are_refused_by_name(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"writing .*: expected a folder that can be written, found "):
        torch_pi2.sparsify(dense, tmp_path / "file" / "relu", TEXTS, **FEW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # a longer file cannot be written, as on a full disk
    try:
        with pytest.raises(ArtifactError, match=r"writing .*relu\.training: expected a folder that can be written"):
            torch_pi2.sparsify(dense, tmp_path / "relu", TEXTS, **FEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch_pi2.sparsify(dense, tmp_path / "relu", TEXTS, **FEW).steps == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "relu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ["def f"]}, r"text to train on: expected at least 4 windows of 32 tokens, found 0"),
        ({"heldout": ["def f"]}, r"held-out text: expected at least 1 windows of 32 tokens, found 0"),
        ({"text": [3]}, r"sparsify\(text\): expected a list of texts, found other values"),
        ({"out": "dense"}, r"writing .*dense: expected a new folder, or one written by sparsify"),
        ({"out": "dense/inside"}, r"sparsify's folders: expected two separate ones"),
        ({"model": torch.nn.Linear(2, 2)}, r"sparsify\(model\): expected a causal language model .*, found a Linear"),
        ({"steps": 9}, r"sparsify\(steps=...\): expected at least 10: .* found 9. Pass more steps"),
        ({"steps": 0, "batch": 16}, r"expected at least 10: .* found 7, one pass over the text"),
        (
            {"text": TEXTS * 4, "window": 129},
            r"sparsify\(window=...\): expected at most 128, .*, found 129",
        ),
    ],
    ids=str,
)
def test_what_is_refused_before_any_training(
    dense: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    given = {"model": dense, "out": "o", "text": TEXTS, **FEW} | arguments
    given["out"] = (dense.parent if "dense" in given["out"] else tmp_path) / given["out"]
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.sparsify(**given)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_model(dense: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense)
    vocabulary = model.config.vocab_size
    model.resize_token_embeddings(2)
    expected = rf"tokens of 0 to 1, the model's vocabulary, found the token {vocabulary - 1}. Use the tokenizer of this"
    with pytest.raises(ConfigError, match=expected):
        torch_pi2.sparsify(model, tmp_path / "o", TEXTS, **FEW)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"activation": "gelu"}, r"sparsify\(activation=...\): expected relu-gate or drelu, found 'gelu'"),
        ({"target_sparsity": 1.0}, "target_sparsity=...: expected a number, above 0, below 1, found 1.0"),
        ({"window": 1}, "window=...: expected a whole number, 2 or more, found 1"),
        ({"distill": 2.0}, "distill=...: expected a number, 0 or more, at most 1, found 2.0"),
        ({"save_every": 15}, "save_every=...: expected a multiple of 10, found 15"),
        ({"accumulate": 3}, r"batch=...: expected a multiple of accumulate \(3\), found 4"),
    ],
)
def test_settings_that_make_no_sense(dense: Path, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(Pi2Error, match=message.replace("=...:", r"=...\):")):
        torch_pi2.sparsify(dense, tmp_path / "o", TEXTS, **(FEW | wrong))
