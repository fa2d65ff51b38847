"""``bench misses``: what a margin for neurons that are not in memory leaves out, beside higher thresholds for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_experts import with_tokenizer

from benchmarks import misses, table
from torch_pi2.errors import ConfigError


@pytest.mark.long
@pytest.mark.slow
def test_a_margin_reads_less_than_without_and_loses_less_than_a_higher_threshold() -> None:
    result = misses.run(shares=[0.5], margins=[1.0], tokens=512, calibration_tokens=4000)
    assert result["tokens"] == 256
    cases = {(c["raised"], c.get("miss_margin", "look-ahead")): c for c in result["cases"]}
    assert list(cases) == [(-1.0, 0.0), (-1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.0, "look-ahead"), (1.0, 0.0)]
    plain, margin, ahead, higher = (cases[key] for key in ((0, 0), (0, 1), (0, "look-ahead"), (1, 0)))
    assert plain["left_out"] == 0 < margin["left_out"]
    assert margin["read"] < plain["read"]
    assert higher["wanted"] < margin["wanted"] < plain["wanted"]
    assert ahead["loss"] == plain["loss"]  # lossless
    assert ahead["in_time"] > 0 == plain["in_time"]
    assert margin["kl"] < higher["kl"]
    assert "look-ahead" in misses.render(result)
    assert "| run: 256 tokens | 50% | as fitted | 1.0 |" in table.page({"run": result})


@pytest.mark.slow
def test_experts_of_little_weight_are_left_out(tmp_path: Path) -> None:
    with_tokenizer(tmp_path)
    settings: dict[str, Any] = {"shares": [0.5], "drop_experts": [0.2], "tokens": 512, "calibration_tokens": 1000}
    result = misses.run(tmp_path, **settings)
    plain, fewer = result["cases"]
    assert (plain["drop_experts"], fewer["drop_experts"], result["choices"]) == (0, 0.2, 4)
    assert plain["loss"] == pytest.approx(0, abs=1e-5)
    assert plain["experts_left_out"] == 0 < fewer["experts_left_out"] < 2
    assert fewer["bytes_read"] < plain["bytes_read"]
    assert abs(plain["kl"]) < 1e-6 < fewer["kl"]
    assert f"{fewer['experts_left_out']:.2f} of 4" in misses.render(result)
    times = misses.run(tmp_path, **settings, device="ufs-4.0")
    assert times["cases"] == []
    modes = times["times"][0]["modes"]
    assert modes["0.2"]["bytes_read_per_token"] < modes["0"]["bytes_read_per_token"]
    assert "gain" not in modes["0"]
    assert modes["0.2"]["gain"] > 0
    assert "simulated ufs-4.0" in misses.render(times)
    page = table.page({"cases": result, "times": times})
    assert "| cases: 256 tokens | 50% | 0.2 |" in page
    assert "| times | 50% | drop_experts 0.2 |" in page


@pytest.mark.long
@pytest.mark.slow
def test_predictors_that_were_trained_for_it_guess_more_of_what_is_wanted() -> None:
    result = misses.run(shares=[0.5], tokens=512, calibration_tokens=4000, device="ufs-4.0")
    assert result["cases"] == []
    off, ahead, whole, first, surer = result["ahead"][0]["modes"].values()
    assert off["used_per_token"] == off["unused_per_token"] == 0
    assert "gain" not in off
    for mode in (ahead, whole, first, surer):
        assert mode["used_per_token"] > 0
        assert mode["waited_per_token"] < off["waited_per_token"]
        assert mode["gain"] > 0
    assert ahead["used_per_token"] < first["used_per_token"]
    assert surer["unused_per_token"] < first["unused_per_token"]
    assert f"{first['used_per_token']:.1f}" in misses.render(result)
    assert "| run | 50% | early, whole, 1:1 |" in table.page({"run": result})


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="tokens: expected 512 or more, found 300"):
        misses.run(tokens=300)
    with pytest.raises(ConfigError, match="method: expected exact or signbit, found lowrank"):
        misses.run(method="lowrank")
