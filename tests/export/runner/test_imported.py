"""Bundles of what GGUF files become: with neurons of two formats, and without any; the same tokens everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from runner_calls import refused, run
from shared import shared_folder

import torch_pi2
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError
from torch_pi2.export.manifest import Manifest, sealed
from torch_pi2.export.partitioner import Pi2Partitioner
from torch_pi2.export.run import Bundle

GOLDEN = Path(__file__).parents[2] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
IDS = [5, 77, 130, 9, 200, 31, 64, 250, 3, 18]
#: Name -> what is imported, how, the formats of its neurons and of its linear layers.
MADE: dict[str, tuple[str, str, str, str]] = {
    "q4_k_m": ("golden", "auto", "none", "q4_k, q6_k"),
    "q4_k_m-neurons": ("golden", "all", "q4_k+int8", "q4_k, q6_k"),
    "q4_0-experts": ("mixtral", "auto", "int4+int8", "int4"),
}


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name, and the folder of its ``model`` and ``bundle``."""
    source, neurons, _, _ = MADE[request.param]

    def make(root: Path) -> None:
        root.mkdir()
        file = GOLDEN
        if source != "golden":
            ggufs.tiny(source).save_pretrained(root / "floats")
            ggufs.written(root / "floats", root / "floats.gguf")
            ggufs.retyped(root / "floats.gguf", file := root / "typed.gguf", "Q4_0")
        torch_pi2.import_gguf(file, root / "model", neurons=neurons)
        torch_pi2.export(loaded(root / "model"), root / "bundle", max_tokens=48, batches=(1,))

    return request.param, shared_folder(tmp_path_factory, f"imported-{request.param}", make)


def loaded(folder: Path) -> Any:
    model = torch_pi2.load(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.slow
def test_the_same_tokens_in_torch_bundle_and_runner(made: tuple[str, Path]) -> None:
    name, root = made
    model = loaded(root / "model")
    wanted = model.generate(torch.tensor([IDS]), max_new_tokens=24, do_sample=False)[0, len(IDS) :].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, -1]
    with Bundle(root / "bundle") as bundle:
        assert bundle.generate(IDS, 24).sequences[0].ids == wanted
        found = bundle.logits(IDS)[-1].reshape(-1)
        about = bundle.manifest.model
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4 * float(logits.abs().max()))
    answer = run(root / "bundle", "--ids", ",".join(map(str, IDS)), "--max-new-tokens", 24)
    assert answer["sequences"][0]["ids"] == wanted
    assert (about.weights, about.linears) == MADE[name][2:]


@pytest.mark.slow
def test_a_model_without_neurons_has_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As typed by a user; what is for a store is refused."""
    folder, to, small = str(tmp_path / "d"), str(tmp_path / "b"), ("--max-tokens", "48", "--batches", "1")
    assert main(["import", str(GOLDEN), "--out", folder, "-q"]) == 0
    model = torch_pi2.load(folder)
    with pytest.raises(UnsupportedModelError, match=r"layers without experts, found none\. Import the file"):
        torch_pi2.export(model, to, hot={1: 1})
    with pytest.raises(UnsupportedModelError, match="Pi2Partitioner: expected a model with neurons, found a LlamaForC"):
        Pi2Partitioner(model, tmp_path / "model.pi2")
    assert main(["export", folder, "--out", to, *small, "-q"]) == 0
    assert main(["inspect", to]) == 0
    assert "0 FFNs" in capsys.readouterr().out
    manifest = Manifest.load(tmp_path / "b")
    assert not (tmp_path / "b" / "model.pi2").exists()
    assert (manifest.model.layers, manifest.store_bytes, manifest.token_bytes) == (0, 0, 0)
    for setting in ({"store": tmp_path}, {"trace": tmp_path / "trace"}):
        with pytest.raises(ConfigError, match="expected a bundle with neurons, found one without, all of whose"):
            Bundle(tmp_path / "b", **setting)
    with Bundle(tmp_path / "b", budget="1GiB") as bundle:
        assert bundle.stats()["hit_rate"] is None

    many = manifest.to_json()
    many["model"] |= {"weights": "int4", "layers": 2}
    with pytest.raises(ArtifactError, match=r"files: expected an entry of model\.pi2"):
        Manifest.from_json(many)
    (tmp_path / "b" / "manifest.json").write_text(sealed(many))
    assert "model.pi2" in refused(tmp_path / "b", "--ids", "1,2")
