"""``benchmarks early``: predictors of several inputs, each with the recall that was asked for."""

from __future__ import annotations

import json

import pytest

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.early import INPUTS, render, run
from torch_pi2.errors import ConfigError


@pytest.mark.slow
def test_each_input_has_its_predictor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["early", "--tokens", "2560", "--steps", "40", "--rank", "32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 2560
    first, *others = result["layers"]
    assert "before" not in first
    assert "lookahead" not in first
    for layer in others:
        assert all(layer[name]["recall"] == pytest.approx(0.85, abs=0.1) for name in INPUTS)
        # of an input that it was not made for, a predictor finds less
        assert layer["lookahead"]["recall"] < layer["own"]["recall"]
    shown = render(result)
    assert f"{others[0]['before']['recall']:.1%} by {others[0]['before']['active']:.1%}" in shown
    assert "| x: drelu-stdlib-5m, 2,560 tokens, rank 32 |" in table.page({"x": result})


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="tokens: expected 1280 or more, found 3"):
        run(tokens=3)
