"""``bench misses``: what a margin for neurons that are not in memory leaves out, beside higher thresholds for all."""

from __future__ import annotations

import pytest

from benchmarks import misses, table
from torch_pi2.errors import ConfigError


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


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="tokens: expected 512 or more, found 300"):
        misses.run(tokens=300)
