"""The verdict: measured by verbs that write a model, kept in its folder, and shown."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import shared_folder
from tiny_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from torch_pi2 import cli
from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.machine import process
from torch_pi2.types.verdict import Loss, Speed, Verdict

TEXT = "".join(f"def f{i}(x, y={i}):\n    return x * {i % 7} + y\n\n" for i in range(200))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, a dense one of somebody's; ``exact``, optimised."""

    def make(root: Path) -> None:
        model = root / "model"
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=300, hidden_act="relu", max_position_embeddings=512, **sizes)
        LlamaForCausalLM(config).save_pretrained(model)
        byte_tokenizer(TEXT).save_pretrained(model)
        (root / "text.py").write_text(TEXT)
        argv = ["optimize", model, "--out", root / "exact", "--method", "exact", "--tokens", 2048]
        assert cli.main([*map(str, argv), "--text", str(root / "text.py"), "--json"]) == 0

    return shared_folder(tmp_path_factory, "verdicts", make)


def test_optimize_measures(root: Path) -> None:
    found = Verdict.load(root / "exact" / "pi2")
    assert found.speed is not None
    assert found.speed.dense
    assert found.speed.ratio_low
    assert found.speed.ratio_high
    assert found.speed.ratio_low <= (found.speed.ratio or 0) <= found.speed.ratio_high
    assert found.loss is not None
    assert abs(found.loss.change) < 1e-5
    assert found.loss.tokens > 100
    assert found.lossy == ()
    assert found.not_measured == {}
    assert found.made == ("torch-pi2 optimize model --method exact --tokens 2048",)
    files = [*(root / "exact").glob("*.safetensors"), root / "exact" / "pi2" / "predictors.safetensors"]
    assert found.sparse_bytes == sum(path.stat().st_size for path in files if path.exists())
    assert found.versions["torch"] == torch.__version__.partition("+")[0] or "torch" in found.versions
    assert str(root) not in json.dumps(found.to_json()), "paths are nobody's business"


def test_phases_are_lines_and_json_is_alone(root: Path, command: Any, tmp_path: Path) -> None:
    argv = ("optimize", root / "model", "--method", "exact", "--tokens", 512, "--text", root / "text.py")
    ran = command(*argv, "--out", tmp_path / "out", "--json")
    for phase in ("load", "profil", "rewrite", "dense against sparse"):
        assert f"torch-pi2: {phase}" in ran.err
    assert ran.json["verdict"]["speed"]["sparse"] > 0
    ran = command(*argv, "--out", tmp_path / "out", "--no-verdict", "-q")
    assert "torch-pi2:" not in ran.err
    assert "speed:" not in ran.out
    assert not (tmp_path / "out" / "pi2" / "verdict.json").exists()
    assert command("inspect", tmp_path / "out", "--json").json["verdict"] is None


def test_inspect_shows_it(root: Path, command: Any) -> None:
    out = command("inspect", root / "exact").out
    assert "times as fast" in out
    assert re.search(r"lossless; loss [+-]0.00%", out)
    assert "made by:" in out
    assert "measured:" in out


def some(**other: Any) -> Verdict:
    about: dict[str, Any] = {"machine": {"cpu": "x|y"}, "versions": {"torch": "2"}, "not_measured": {}}
    first = ("ab" * 32, (), ("torch-pi2 optimize <a>",), 5, None, None, None)
    return Verdict(*first, date="2026-01-01T00:00:00+00:00", **(about | other))


def test_it_reads_what_it_wrote(tmp_path: Path) -> None:
    whole = Verdict("cd" * 32, ("a",), ("b", "c"), 7, 9, Speed(3.0), Loss(-0.5, 3, "t"), {"dense": "gone"}, "d", {}, {})
    whole.save(tmp_path)
    assert Verdict.load(tmp_path) == whole
    assert "3.0 tokens/s, dense not measured (gone)" in whole.lines()["speed"]
    with pytest.raises(StaleArtifactError, match="verdict on FFN weights"):
        Verdict.load(tmp_path, "ef" * 32)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSON"),
        ('{"format": "torch_pi2.verdict", "version": 2}', "version 1"),
        ('{"format": "torch_pi2.verdict", "version": 1}', "model_hash"),
        (json.dumps(some().to_json() | {"sparse_bytes": -1}), r"sparse_bytes.*Remove it"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "verdict.json").write_text(text)
    with pytest.raises(ArtifactError, match=found):
        Verdict.load(tmp_path)


def test_packing_changes_no_number_and_keeps_the_verdict(root: Path, command: Any, tmp_path: Path) -> None:
    before = Verdict.load(root / "exact" / "pi2")
    ran = command("pack", root / "exact", tmp_path / "store", "--json")
    speed = before.to_json()["speed"]
    assert ran.json["verdict"]["speed"] == speed | {"how": f"{speed['how']}; in memory, of exact, before pack"}
    assert ran.json["verdict"]["made"] == [*before.made, "torch-pi2 pack exact"]
    assert ran.json["verdict"]["sparse_bytes"] == (tmp_path / "store" / "pi2" / "model.pi2").stat().st_size
    assert command("inspect", tmp_path / "store", "--json").json["verdict"] == ran.json["verdict"]


@pytest.mark.slow
def test_quantising_is_measured_beside_what_was_dense(root: Path, command: Any, tmp_path: Path) -> None:
    found = command("quantize", root / "exact", tmp_path / "int4", "--json").json["verdict"]
    assert found["lossy"] == ["int4 weights"]
    assert found["speed"]["dense"] > 0
    assert found["loss"]["change"] != 0
    (tmp_path / "int4" / "pi2" / "verdict.json").unlink()
    packed = command("pack", tmp_path / "int4", tmp_path / "store", "--json").json["verdict"]
    assert packed["speed"]["dense"] is None
    assert packed["loss"] is None
    assert "quantised weights alone" in packed["not_measured"]["dense"]
    assert "dense not measured" in command("inspect", tmp_path / "store").out


@pytest.mark.slow
def test_a_tokenizer_that_does_not_load(root: Path, command: Any, tmp_path: Path) -> None:
    """The folder is written and judged, without its loss."""
    path = Path(shutil.copytree(root / "model", tmp_path / "model")) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": [None]}))
    command("quantize", path.parent, tmp_path / "out")
    found = Verdict.load(tmp_path / "out" / "pi2")
    assert (found.speed is None, found.loss) == (False, None)
    assert found.not_measured["loss"] == "no tokenizer is there that loads"


@pytest.mark.slow
def test_no_room_for_a_model_beside_another(
    root: Path, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "free_bytes", lambda: 1000)
    found = command("quantize", root / "exact", tmp_path / "int4", "--json").json["verdict"]
    assert found["speed"] is None
    assert "1.0 KB are free" in found["not_measured"]["speed"]
    argv = ("optimize", root / "model", "--method", "exact", "--tokens", 512, "--text", root / "text.py")
    found = command(*argv, "--out", tmp_path / "out", "--json").json["verdict"]
    assert found["speed"]["dense"] is None
    assert found["speed"]["sparse"] > 0
    assert found["loss"] is None
