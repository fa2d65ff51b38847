"""``benchmarks early``: predictors of several inputs, each with the recall that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_experts import with_tokenizer

from benchmarks import table
from benchmarks.__main__ import main
from benchmarks.early import INPUTS, render, run
from torch_pi2.errors import ConfigError


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
def test_experts_are_guessed_and_read_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokenizer(tmp_path)
    options = ["--folder", str(tmp_path), "--tokens", "1280", "--device", "ufs-4.0", "--threads", "1"]
    assert main(["early", *options, "--method", "exact", "--ffn-in-memory", "0.7", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    first, second = result["layers"]
    assert (first["experts"], first["chosen"]) == (second["experts"], second["chosen"]) == (4, 2)
    assert "guessed" not in first
    assert 0 < second["guessed"]["2"] < second["guessed"]["3"] < 1
    assert all(0 < layer[name] < 1 for layer in (first, second) for name in ("usual", "last"))
    left_out = result["left_out"]
    assert list(left_out) == ["0.05", "0.1", "0.2", "0.3"]
    assert 0 < left_out["0.1"]["choices"] < left_out["0.3"]["choices"] < 0.5
    assert abs(left_out["0.05"]["kept"]) <= abs(left_out["0.3"]["kept"]) != abs(left_out["0.3"]["scaled"])
    store = result["store"]
    assert "simulated ufs-4.0" in store["reads"]
    assert store["modes"]["off"]["unused_per_token"] == 0  # what a layer asks for itself is used
    assert store["modes"]["on"]["tokens_per_s"] > 0
    shown = render(result)
    assert f"{second['guessed']['2']:.1%} of 2" in shown
    assert "look-ahead on" in shown
    page = table.page({"x": result})
    assert "### Experts\n" in page
    assert "### Experts read early" in page


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="tokens: expected 1280 or more, found 3"):
        run(tokens=3)
