"""``bench methods``: the same figures in memory, over a store and in a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import _hf, randomise
from tiny_tokenizers import TEXT, byte_tokenizer

from benchmarks import methods, table
from benchmarks.__main__ import main


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_method_costs_the_same_everywhere(
    activation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    randomise(
        _hf("Llama", vocab_size=300, hidden_act=activation, max_position_embeddings=256, num_hidden_layers=1)
    ).save_pretrained(path)
    byte_tokenizer(TEXT).save_pretrained(path)
    of = methods.SPARSE if activation == "relu" else methods.NOT_SPARSE
    for name in [name for name in of if name not in ("exact gate", "ours, at most 1 %")]:
        monkeypatch.delitem(of, name)
    sizes = ["--tokens", "256", "--calibration-tokens", "3000"]
    assert main(["methods", "--folder", str(path), *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"].startswith("python -m benchmarks methods")
    (name,) = of
    assert [(case["method"], case["weights"]) for case in result["cases"]] == [
        ("dense", "int4"),
        (name, "float"),
        (name, "int4"),
    ]
    for case in result["cases"]:
        memory = case["memory"]
        for place in ("store", "bundle"):
            assert case[place]["loss"] == pytest.approx(memory["loss"], abs=1e-3), (case["method"], place)
            assert case[place]["kl"] == pytest.approx(memory["kl"], rel=0.05, abs=1e-5)
    exact = result["cases"][1]
    assert exact["rows_used"] < 1
    assert (abs(exact["memory"]["kl"]) < 1e-6) == (activation == "relu")
    assert "beside the dense model in floats" in methods.render(result)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "methods-tiny.json").write_text(json.dumps(result))
    assert f"| methods-tiny: 256 tokens | {name} | int4 |" in table.write(tmp_path / "results").read_text()
