"""``bench scores``: every score at every share, the bytes that are counted, and what has nothing to be scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import _hf, randomise
from tiny_tokenizers import TEXT, byte_tokenizer

from benchmarks import drawings, scores, table
from benchmarks.__main__ import main, render
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.types.config import SCORES


def folder(path: Path, **config: object) -> Path:
    randomise(_hf("Llama", vocab_size=300, **config)).save_pretrained(path)
    byte_tokenizer(TEXT).save_pretrained(path)
    return path


def test_every_score_at_every_share(tmp_path: Path) -> None:
    path = folder(tmp_path / "swiglu")
    result = scores.run(path, shares=(0.3, 0.7), predictors=(0.05,), calibration_tokens=3000, tokens=600)
    assert (result["what"], result["folder"], result["tokens"]) == ("scores", "swiglu", 512)
    (predicted,) = result["cases"].pop("output, low-rank")
    assert predicted["skipped"] >= 0
    assert predicted["read"] > 1 - predicted["skipped"]  # predictors are read, too
    names = [name for score in SCORES for name in (score, f"{score}, by layer")]
    assert sorted(result["cases"]) == sorted([*names, scores.TOP])
    for name, (few, many) in result["cases"].items():
        for point, share in ((few, 0.3), (many, 0.7)):
            assert point["skipped"] == pytest.approx(share, abs=0.08), name
            assert point["read"] == pytest.approx((1 + 2 * (1 - point["skipped"])) / 3)
        assert 0 < few["kl"] < many["kl"]
        assert 1 > few["agreement"] > many["agreement"]
    shown = render(result)
    assert "lossy, beside the dense model" in shown
    assert "output" in shown
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "scores-swiglu-stdlib.json").write_text(json.dumps(result))
    page = table.write(tmp_path / "results").read_text()
    assert "| scores-swiglu-stdlib: 512 tokens, real model | output |" in page
    drawn = drawings.DRAWINGS["scores"](drawings.read(tmp_path / "results"))
    ours = result["cases"]["auto, by layer"]
    assert drawn.data()[drawings.OURS_SCORE] == [[100 * (1 - p["read"]), *[100 * p["loss"]] * 3] for p in ours]


def test_its_command_names_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "swiglu")
    sizes = ["--shares", "0.5", "--tokens", "300", "--calibration-tokens", "2000"]
    assert main(["scores", str(path), *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["command"]
    assert found.startswith("python -m benchmarks scores swiglu")
    assert "--shares 0.5" in found


def test_a_relu_model_has_nothing_to_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "relu", hidden_act="relu")
    with pytest.raises(UnsupportedModelError, match=r"scores of relu: expected layers without exact zeros"):
        scores.run(path, shares=(0.5,), calibration_tokens=3000, tokens=600)
    assert main(["scores", str(path), "--shares", "0.5", "--tokens", "600"]) != 0
    assert "Nothing need be skipped there that is not zero" in capsys.readouterr().err
