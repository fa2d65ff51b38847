"""``bench suite``: every form beside the dense model, on the same questions; what is lossless changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import _hf, randomise
from tiny_tokenizers import TEXT, byte_tokenizer

from benchmarks import suite, table
from benchmarks.__main__ import main, render
from torch_pi2.errors import ConfigError
from torch_pi2.eval.items import TASKS


def folder(path: Path, **config: object) -> Path:
    randomise(_hf("Llama", vocab_size=300, max_position_embeddings=256, **config)).save_pretrained(path)
    byte_tokenizer(TEXT).save_pretrained(path)
    return path


def test_forms_of_a_relu_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "relu", hidden_act="relu")
    result = suite.run(path, cases=["exact", "int4"], limit=3, calibration_tokens=500)
    assert (result["what"], result["folder"], result["questions"]) == ("suite", "relu", 3)
    exact, int4 = result["cases"]["exact"], result["cases"]["int4"]
    for case in (exact, int4):
        assert {task: of["items"] for task, of in case["tasks"].items()} == {**dict.fromkeys(TASKS, 3), "all": 12}
    assert exact["tasks"]["all"]["changed"] == exact["tasks"]["all"]["difference"] == 0
    assert 0.3 < exact["rows_used"] < 1
    assert exact["tasks"]["all"]["accuracy"][0] == int4["tasks"]["all"]["accuracy"][0]
    dense = f"{100 * exact['tasks']['all']['accuracy'][0]:.1f} % of 12"
    assert dense in render(result)
    assert f"| x | dense |  | {100 * exact['tasks']['cloze']['accuracy'][0]:.1f} % of 3 |" in table.page({"x": result})


def test_the_command_has_forms_that_suit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "swiglu")
    assert main(["suite", "--folder", str(path), "--limit", "2", "--calibration-tokens", "500", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["cases"]) == ["gate", "output", "int4", "int4-gptq"]
    for name in ("gate", "output"):
        assert result["cases"][name]["rows_used"] == pytest.approx(0.6, abs=0.1)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"cases: expected exact or lowrank or .* found awq"):
        suite.run(cases=["awq"])
    with pytest.raises(ConfigError, match="calibration_tokens: expected 64 or more, found 3"):
        suite.run(calibration_tokens=3)
