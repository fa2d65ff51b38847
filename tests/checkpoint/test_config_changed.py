"""Folders of neurons whose config.json was changed afterwards: what neurons were made for is not changed by it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny

import torch_pi2
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import StaleArtifactError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changed")
    tiny("llama").save_pretrained(root / "float")
    torch_pi2.quantize(root / "float", root / "int8", weights="int8")
    torch_pi2.pack(root / "int8", root / "packed")
    return root


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("kind", ["int8", "packed"])
def test_other_sizes_are_refused_by_name(folder: Path, tmp_path: Path, kind: str) -> None:
    other = changed(shutil.copytree(folder / kind, tmp_path / "other"), intermediate_size=32)
    message = r"config.json, model.layers.0.mlp: expected up of \[.*\], which its neurons .*, found \[32, .* Undo"
    for read in (torch_pi2.load, load_dense):
        with pytest.raises(StaleArtifactError, match=message):
            read(other)


def test_what_is_no_size_may_change(folder: Path, tmp_path: Path) -> None:
    """Epsilons, and other words for what it was."""
    other = changed(shutil.copytree(folder / "int8", tmp_path / "other"), hidden_act="swish", rms_norm_eps=1e-5)
    assert torch_pi2.load(other).config.rms_norm_eps == 1e-5


def test_another_dtype_is_refused_with_what_to_undo(tmp_path: Path) -> None:
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), tmp_path / "model")
    with pytest.raises(StaleArtifactError, match=r"in bfloat16\. .*leave dtype out, and config\.json as it was"):
        torch_pi2.load(changed(tmp_path / "model", dtype="bfloat16"))
