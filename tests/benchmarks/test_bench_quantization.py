"""``benchmarks quantization``: parts are told apart, and what they cost belongs to the weights that are said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.quantization import PARTS, render
from torch_pi2.errors import ConfigError

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "drelu-stdlib-5m"


@pytest.mark.slow
def test_parts_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--tokens", "256", "--calibration-tokens", "1024", "--quantizations", "rtn", "--json"]
    assert main(["quantization", *few]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["weights"], result["tokens"]) == (MODEL.name, "int4", 256)
    (case,) = result["cases"]
    changes = case["changes"]
    assert set(changes) == set(PARTS)
    assert len({round(change, 6) for change in changes.values()}) == len(PARTS)  # no part is another one
    assert all(abs(change) < 0.05 for change in changes.values())
    apart = sum(changes[part] for part in ("neurons", "attention", "output layer"))
    assert changes["all"] == pytest.approx(apart, abs=0.01)
    assert f"{changes['all']:+.2%}" in render(result)
    assert f"| rtn | {changes['neurons']:+.2%} |" in table.page({"x": result})


def test_settings_that_make_no_sense() -> None:
    from benchmarks.quantization import run

    with pytest.raises(ConfigError, match="tokens: expected 64 or more, found 3"):
        run(tokens=3)
    with pytest.raises(ConfigError, match="quantizations: expected rtn or weighted or gptq, found awq"):
        run(quantizations=["awq"])
