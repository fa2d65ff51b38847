"""The end of ``make demo``: a whole synthetic model, dense beside sparse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import demo


@pytest.mark.slow
def test_a_whole_model_dense_beside_sparse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed = demo.large_model(tmp_path, "tiny", 0.1)
    said = capsys.readouterr().out
    assert "synthetic: random weights" in said
    assert re.search(rf"dense +100 % +{speed.dense:.1f}\nsparse +10 % +{speed.sparse:.1f}\n", said)
    assert f"sparse is {speed.ratio:.2f} times as fast" in said
    assert speed.how.endswith("steps recorded, of both")
