"""Damaged files of every kind that is written: none is used, and what is wrong is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import torch_pi2
from torch_pi2.errors import StaleArtifactError

WRITTEN = Path(__file__).parents[1] / "data" / "written" / "2"


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("owner",), "model.layebs.1.mlp", r"a module model\.layebs\.1\.mlp"),
        (("owner",), "model.layers.0.mlp", r"a module model\.layers\.0\.mlp that holds all parameters of"),
        (("inner",), ["model.nothing"], r"a module model\.nothing"),
        (("up", "weight"), "model.layers.1.up", r"a parameter model\.layers\.1\.up"),
    ],
)
def test_names_of_a_plan_that_the_model_does_not_have(tmp_path: Path, way: tuple, value: object, message: str) -> None:
    folder = shutil.copytree(WRITTEN / "optimised", tmp_path / "folder")
    plan = json.loads((folder / "pi2" / "plan.json").read_text())
    at = plan["layers"][1]["site"]
    for name in way[:-1]:
        at = at[name]
    at[way[-1]] = value
    (folder / "pi2" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(StaleArtifactError, match=f"expected a model with {message}"):
        torch_pi2.load(folder)
