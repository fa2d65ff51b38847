"""``benchmarks fit``: every layer has a predictor, and memory is measured as each is fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.fit import render, run
from torch_pi2.errors import ConfigError


@pytest.mark.slow
def test_each_layer_is_fitted_and_watched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ["--shape", "tiny", "--layers", "2", "--steps", "4", "--folder", str(tmp_path), "--json"]
    assert main(["fit", *few]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["shape"], result["layers"], result["tokens"]) == ("tiny", 2, 640)
    assert len(result["ranks"]) == len(result["rss_by_layer"]) == 2
    assert list(result["phases"]) == ["load", "profile", "fit"]
    assert all(phase["peak_rss_bytes"] > 50e6 for phase in result["phases"].values())
    assert result["checkpoint_bytes"] > 4e6
    assert result["work_bytes"] > 0
    assert "tiny, random weights, 2 layers" in render(result)
    assert not list(tmp_path.iterdir())


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="tokens: expected 640 or more, found 3"):
        run(tokens=3)
