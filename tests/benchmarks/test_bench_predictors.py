"""``bench predictors``: every rank in every format, and which reads least."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import predictors
from benchmarks.__main__ import BENCHMARKS
from torch_pi2.errors import ConfigError
from torch_pi2.formats import row_bytes


def test_every_rank_in_every_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(tmp_path)
    byte_tokenizer("def main(): return 0").save_pretrained(tmp_path)
    result = predictors.run(tmp_path, ranks=[8, 32], tokens=1280, steps=20, recall=0.7)
    assert "predictors" in BENCHMARKS
    assert [layer["key"] for layer in result["layers"]] == [f"model.layers.{i}.mlp" for i in range(2)]
    for layer in result["layers"]:
        found = {(p["rank"], p["format"]): p for p in layer["points"]}
        assert found.keys() == {(r, f) for r in (8, 32) for f in predictors.FORMATS}
        cold = layer["cold"]
        for (rank, name), point in found.items():
            of_a, of_b = {"int8": (64 + 4, rank + 4)}.get(name, (0, row_bytes("int4", rank)))
            of_a = of_a or row_bytes(name.split(",")[0], 64)
            assert point["bytes"] == pytest.approx(rank * of_a + cold * (of_b + 4))
            assert 0 <= point["active"] <= 1
    for bits, best in result["best"].items():
        for name, chosen in best.items():
            wanted = 0.0
            for layer, rank in zip(result["layers"], chosen["ranks"], strict=True):
                (point,) = (p for p in layer["points"] if (p["rank"], p["format"]) == (rank, name))
                wanted += point["bytes"] + point["active"] * layer["cold"] * 3 * 64 * float(bits) / 8
            assert chosen["bytes"] == pytest.approx(wanted)
    text = predictors.render(result)
    assert "share of cold neurons wanted by layer" in text
    assert "int8, int4" in text
    with pytest.raises(ConfigError, match=r"tokens"):
        predictors.run(tmp_path, tokens=100)
