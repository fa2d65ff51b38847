"""What earlier states wrote (``tests/data/written``) opens, and decodes to the tokens that they decoded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import torch_pi2
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.observe.accesses import Accesses
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats

WRITTEN = Path(__file__).resolve().parent.parent / "data" / "written"
IDS = torch.tensor([[5, 6, 7, 8, 9]])
CASES = [(path.parent.name, name) for path in WRITTEN.glob("*/expected.json") for name in json.loads(path.read_text())]


def expected(version: str, name: str) -> list[int]:
    return json.loads((WRITTEN / version / "expected.json").read_text())[name]


@pytest.mark.parametrize(("version", "name"), [case for case in CASES if case[1] != "bundle"])
def test_models_decode_the_same_tokens(version: str, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / version / name, tmp_path / name)
    budget = "1GiB" if (folder / "pi2" / "model.pi2").exists() else None
    model = torch_pi2.load(folder, budget=budget)
    out = model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert out[0, IDS.shape[1] :].tolist() == expected(version, name)


def test_a_bundle_decodes_the_same_tokens() -> None:
    assert json.loads((WRITTEN / "2" / "bundle" / "manifest.json").read_text())["version"] == 4
    with torch_pi2.Bundle(WRITTEN / "2" / "bundle") as bundle:
        assert bundle.generate(IDS[0].tolist(), 8).sequences[0].ids == expected("2", "bundle")


def test_plans_statistics_hardware_and_accesses_are_read() -> None:
    first, second = (Plan.load(WRITTEN / path) for path in ("1/int4/pi2", "2/planned"))
    assert first.hardware is None
    assert second.hardware is not None
    stats = ActivationStats.load(WRITTEN / "2" / "optimised" / "pi2", model_hash=second.model_hash)
    assert sorted(stats.layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert Hardware.load(WRITTEN / "2" / "hardware.json").hash == find_hardware("sm8650-ufs4.0").hash
    assert Accesses.load(WRITTEN / "2" / "run.accesses").passes > 0
