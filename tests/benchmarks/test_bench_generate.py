"""``bench generate``: the same answer in every way, and what each takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torch_pi2
from benchmarks import generate, table
from benchmarks.__main__ import render
from torch_pi2.errors import ConfigError


def test_figures_and_table(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=2)
    result = generate.run(tmp_path / "m", prompt=5, tokens=14, rounds=2)
    assert tuple(result["ways"]) == generate.WAYS
    for found in result["ways"].values():
        for name in ("ms", "times_as_fast"):
            low, high = found["spread"][name]
            assert 0 < low <= found[name] <= high
    assert result["ways"]["transformers"]["times_as_fast"] == 1
    assert [found["same"] for found in result["ways"].values()] == [3] * 4  # float32: nothing ties
    assert json.loads(json.dumps(result)) == result
    lines = render(result).splitlines()
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in generate.WAYS] == [*generate.WAYS]
    compiled = generate.run(tmp_path / "m", prompt=5, tokens=14, rounds=1, compiled=True)
    assert set(compiled["ways"]) - set(result["ways"]) == {generate.COMPILED}
    assert compiled["compiling"]["ms"] > 10  # an earlier run may have left code
    for _ in range(2):  # where nothing was on disk, the key of the first compilation of a process is its own
        again = generate.run(tmp_path / "m", prompt=5, tokens=14, rounds=1, compiled=True)
    assert again["compiling"]["found"]
    assert "code found on disk" in render(again)
    page = table.page({"generate-new": compiled, "generate-known": again})
    assert "torch_pi2.generate, compiled | 5 + 14 |" in page
    assert page.count(" (found) |") == 1 + compiled["compiling"]["found"]
    with pytest.raises(ConfigError, match="rounds"):
        generate.run(tmp_path / "m", rounds=0)
