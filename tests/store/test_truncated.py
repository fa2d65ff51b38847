"""Every file that a folder is loaded from, cut off at every page: a named error, or the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import SMALL, logits
from tiny_models import tiny

import torch_pi2
from torch_pi2.errors import Pi2Error

PAGE = 4096


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("truncated")
    torch_pi2.synthetic(base / "int4", SMALL, active=0.2, rank=16, seed=0)
    torch_pi2.pack(base / "int4", base / "store")
    model = torch_pi2.optimize(tiny("llama-relu"), None, torch_pi2.Config(method="exact"))
    torch_pi2.save(model, base / "float")
    return base


def cuts(path: Path) -> Iterator[int]:
    """Every page, of small files eight places as well, and all but a byte."""
    size = path.stat().st_size
    yield from sorted({*range(0, size, PAGE), *(size * k // 8 for k in range(8) if size < 8 * PAGE), size - 1})


def refused_or_same(folder: Path, run: Callable[[], Any], same: Callable[[Any], bool]) -> tuple[int, int]:
    """How often cutting off a file of ``folder`` was refused by name, and how often it made no difference."""
    refused = unnoticed = 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 0):
        whole = path.read_bytes()
        for size in cuts(path):
            os.truncate(path, size)
            result, said = None, ""
            try:
                result = run()
            except Pi2Error as error:
                said = str(error)
            if said:
                refused += 1
                assert str(folder) in said, (path.name, size, said)
            else:
                unnoticed += 1
                assert same(result), (path.name, size)
            path.write_bytes(whole)
    assert same(run())
    return refused, unnoticed


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("float", "int4", "store")),
        ("store", {"budget": "1GiB"}),
    ],
)
def test_folders_cut_off_at_every_page(folders: Path, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(folders / name, tmp_path / "cut"))

    def load() -> torch.Tensor:
        return logits(torch_pi2.load(folder, **settings))

    wanted = load()
    refused, unnoticed = refused_or_same(folder, load, lambda found: torch.equal(found, wanted))
    assert refused > 10, (refused, unnoticed)
