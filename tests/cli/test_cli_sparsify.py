"""``torch-pi2 sparsify``, as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from cli_calls import Ran
from sparsifying import TEXTS, dense_llama

from torch_pi2.cli import build_parser
from torch_pi2.training.settings import SparsifySettings

FEW = ["--steps", "10", "--batch", "4", "--window", "32", "--learning-rate", "3e-3"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sparsify")
    dense_llama(root / "dense")
    for name in "ab":
        (root / f"{name}.txt").write_text(TEXTS[0] * 2)
    return root


@pytest.mark.slow
def test_a_checkpoint_is_made_and_said(root: Path, command: Callable[..., Ran]) -> None:
    texts = ["--text", root / "a.txt", root / "b.txt"]
    ran = command("sparsify", root / "dense", "--out", root / "out", *texts, *FEW)
    for words in ("zeros:", "% of the neurons' values (by layer: ", "held-out tokens", f"wrote {root / 'out'}; next: "):
        assert words in ran.out
    assert "torch-pi2: step 10 of 10: " in ran.err
    found = command(
        "sparsify", root / "dense", "--out", root / "out", *texts, *FEW, "--heldout", root / "a.txt", "--json"
    )
    assert found.json["settings"]["steps"] == 10
    assert found.json["heldout_tokens"] % 32 == 0
    assert found.json["out"] == str(root / "out")
    made = command("optimize", root / "out", "--out", root / "fast", "--method", "exact", "--no-verdict")
    assert str(root / "fast") in made.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "/nowhere"], "--text /nowhere: expected a UTF-8 text file, found No such file"),
        (["--target-sparsity", "1"], "sparsify(target_sparsity=...): expected a number, above 0, below 1, found 1.0"),
        (["--distill", "3"], "sparsify(distill=...): expected a number, 0 or more, at most 1, found 3.0"),
        (["--activation", "gelu"], "argument --activation"),
    ],
)
def test_mistakes(root: Path, command: Callable[..., Ran], more: list[str], message: str) -> None:
    try:
        ran = command("sparsify", root / "dense", "--out", root / "x", "--text", root / "a.txt", *FEW, *more, ok=False)
    except SystemExit:  # of argparse
        return
    assert (ran.code, (root / "x").exists()) == (2, False)
    assert message in ran.err


def test_defaults_are_those_of_the_settings() -> None:
    args = vars(build_parser().parse_args(["sparsify", "m", "--out", "o", "--text", "t"]))
    settings = asdict(SparsifySettings())
    assert settings.pop("bf16") != args["float32"]
    assert {name: args[name] for name in settings} == settings
