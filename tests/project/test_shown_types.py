"""Python that README and docs show passes mypy as written, and public functions have the types that one expects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pasted
import pytest

ROOT = Path(__file__).parents[2]

#: What blocks of pages that are no scripts (README and docs/USING.md are) use and leave to the reader.
GIVEN = """
from typing import Any
import torch
from torch import nn
import torch_pi2
from torch_pi2 import OffloadConfig
ids: torch.Tensor
hidden: int
intermediate: int
model: Any
small: nn.Module
text: str
held_out: str
tokenizer: Any
class Mine(torch_pi2.SparseMethod):
    def __init__(self, share: float = 0.5) -> None: ...
"""
SCRIPTS = [ROOT / "README.md", ROOT / "docs" / "USING.md"]

#: Lines that mypy has to refuse say so; it complains of those that it does not.
PROMISED = """
from typing import Any, assert_type
import torch
from torch import nn
import torch_pi2

class Mine(nn.Module): ...

mine = Mine()
assert_type(torch_pi2.optimize(mine, method="exact", target_recall=0.8), Mine)
assert_type(torch_pi2.restore(mine), Mine)
assert_type(torch_pi2.quantize_(mine, "int4"), Mine)
stats = torch_pi2.profile(mine, "text", sparsity=0.5)
torch_pi2.plan(mine, stats, torch_pi2.fit(mine, "text", stats=stats, seed=1), hot_frequency=0.2)
torch_pi2.optimise(mine)  # type: ignore[attr-defined]
assert_type(torch_pi2.generate(mine, "text").text, str)
assert_type(torch_pi2.generate(mine, torch.tensor([[1]])).texts, list[str])
assert_type(torch_pi2.stats(mine).generated, bool)
loaded = torch_pi2.load("folder", budget="2GB")
loaded.generate(torch.tensor([[1]]), max_new_tokens=3)
torch_pi2.set_budget(loaded, "1GB")
"""


def checked(texts: Mapping[str, str], folder: Path) -> str:
    """What mypy says of ``texts`` in files of their names, with this project's settings."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    files = [str(folder / f"{name}.py") for name in texts]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def shown(page: Path) -> str:
    """The Python of ``page``, with what it leaves to the reader."""
    code = "\n".join(block.code for block in pasted.blocks(page) if block.language == "python")
    return code if not code or page in SCRIPTS else f"{GIVEN}\n{code}"


@pytest.mark.slow
def test_pages_pass_mypy(tmp_path: Path) -> None:
    pages = {page.stem: shown(page) for page in (*SCRIPTS, *sorted((ROOT / "docs").glob("*.md")))}
    texts = {name: text for name, text in pages.items() if text}
    assert {"README", "USING", "SPECULATION"} <= {*texts}
    said = checked(texts, tmp_path)
    assert said.startswith("Success"), said


@pytest.mark.slow
def test_public_functions_have_the_types_that_one_expects(tmp_path: Path) -> None:
    assert checked({"promised": PROMISED}, tmp_path).startswith("Success")
