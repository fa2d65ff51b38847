"""Python that README.md shows passes mypy as written, and public functions have the types that one expects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What blocks use and leave to the reader.
GIVEN = """
from typing import Any
import torch
from torch import nn
import torch_pi2
ids: torch.Tensor
inputs: dict[str, torch.Tensor]
plan: Any
predictors: dict[str, Any]
"""

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
torch_pi2.optimize(mine, metod="exact")  # type: ignore[call-arg]
torch_pi2.optimize(mine, method=3)  # type: ignore[arg-type]
torch_pi2.profile(mine, "text", tolerance="high")  # type: ignore[arg-type]
torch_pi2.optimise(mine)  # type: ignore[attr-defined]
assert_type(torch_pi2.generate(mine, "text").text, str)
assert_type(torch_pi2.generate(mine, torch.tensor([[1]])).texts, list[str])
assert_type(torch_pi2.stats(mine).generated, bool)
loaded = torch_pi2.load("folder", budget="2GB")
loaded.generate(torch.tensor([[1]]), max_new_tokens=3)
torch_pi2.set_budget(loaded, "1GB")
"""


def checked(text: str, folder: Path) -> str:
    """What mypy says of ``text`` in a file of its own, with this project's settings."""
    (folder / "shown.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(folder / "shown.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.slow
def test_readme_passes_mypy(tmp_path: Path) -> None:
    shown = blocks()
    assert shown
    assert checked("\n".join([GIVEN, *shown]), tmp_path).startswith("Success")


@pytest.mark.slow
def test_public_functions_have_the_types_that_one_expects(tmp_path: Path) -> None:
    assert checked(PROMISED, tmp_path).startswith("Success")
