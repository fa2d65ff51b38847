"""``bench bundle``: bundles in the C++ runner and PyTorch's ``Decoder``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torch_pi2
from benchmarks import bundle
from benchmarks.__main__ import render
from torch_pi2.errors import ConfigError


@pytest.mark.slow
@pytest.mark.long
def test_figures_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Path("build/runner/pi2/pi2_runner").resolve()
    monkeypatch.setattr(bundle, "WORK", tmp_path)
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=2)
    sizes = {"prompts": (5, 40), "max_tokens": 64, "tokens": 6, "rounds": 2}
    result = bundle.run(tmp_path / "m", kv=("int8",), peer="executorch", **sizes, runner=runner)
    other = bundle.PEERS["executorch"]
    assert [*result["ways"]] == [bundle.DECODER, "runner, int8", other]
    for way, found in result["ways"].items():
        for length in found["lengths"].values():
            for name in ("prompt", "decode", "of_decoder", "prompt_times_peer", "decode_times_peer"):
                low, high = length["spread"][name]
                assert 0 < low <= length[name] <= high
        assert (way == "runner, int8") == ("peak_bytes" in found)
    assert result["ways"][bundle.DECODER]["lengths"][5]["of_decoder"] == 1
    assert result["ways"][other]["lengths"][5]["decode_times_peer"] == 1
    assert json.loads(json.dumps(result))["ways"].keys() == result["ways"].keys()
    assert "runner, int8" in render(result)
    assert f"peer: {result['peer']['engine']}, 8da4w in groups of 32" in render(result)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no runner"):
        bundle.run(tmp_path, runner=tmp_path / "none")
    (tmp_path / "runner").touch()
    with pytest.raises(ConfigError, match=r"at most 4096 tokens.*found 5000 \+ 48 tokens"):
        bundle.run(tmp_path, prompts=(5000,), runner=tmp_path / "runner")
    with pytest.raises(ConfigError, match=r"found llama\.cpp"):
        bundle.run(tmp_path, peer="llama.cpp")
    with pytest.raises(ConfigError, match="found int4"):
        bundle.run(tmp_path, kv=("int4",))
