"""``benchmarks imported``: files of llama.cpp's own quantiser, imported, beside it on the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import imported
from torch_pi2.errors import ConfigError
from torch_pi2.store import shapes

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="package llama-cpp-python is not installed (extra bench)"
)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


@needs_llama
def test_of_a_tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(imported, "WORK", tmp_path)
    result = imported.run("tiny", ["q4_0", "q4_k_m"], prompt=8, tokens=4, rounds=1)
    row = result["types"]["q4_k_m"]
    assert row["import"]["types"].keys() == {"Q4_K", "Q6_K"}
    assert row["import"]["rounded"] == {}
    assert row["import"]["peak_bytes"] >= row["import"]["before_bytes"]
    peer = row["peers"]["llama.cpp"]
    # three decimals: on a busy machine llama.cpp is so far ahead of a tiny model that rounding is more than 2 %
    assert peer["ratio"] == pytest.approx(peer["our_tokens_per_s"] / peer["tokens_per_s"], rel=0.02, abs=5e-4)
    text = imported.render(result)
    assert "q4_k_m" in text
    assert "random weights" in text


def test_an_unknown_type() -> None:
    with pytest.raises(ConfigError, match=r"--types: expected q4_0, .*found q9"):
        imported.run("tiny", ["q9"])
