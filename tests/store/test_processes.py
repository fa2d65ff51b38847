"""A store that another process has open is cut off, packed over, deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stores import SMALL, logits, small, store_of

import torch_pi2
from torch_pi2.errors import ArtifactError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("processes")
    for name, seed in (("one", 0), ("two", 1)):
        torch_pi2.synthetic(base / f"{name}-plain", SMALL, active=0.2, rank=16, seed=seed)
        torch_pi2.pack(base / f"{name}-plain", base / name)
    return base


@pytest.fixture
def one(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base / "one", tmp_path / "one"))


_READER = """
import sys, torch, torch_pi2
from torch_pi2.types.offload import OffloadConfig
torch.set_num_threads(1)
folder, *settings = sys.argv[1:]
config = OffloadConfig(preload=False, io_threads=2, engine=settings[0])
budget = torch_pi2.stats(torch_pi2.load(folder, budget="1GiB", offload=config))["budget"].smallest
model = torch_pi2.load(folder, budget=budget if settings[0] != "mmap" else "1GiB", offload=config)
print("ready", flush=True)
for line in sys.stdin:
    try:
        with torch.no_grad():
            y = model(torch.arange(1, 13)[None]).logits
        print("bits", y.double().sum().item().hex(), flush=True)
    except torch_pi2.errors.Pi2Error as error:
        print("error", type(error).__name__, str(error).replace("\\n", " "), flush=True)
"""


class Reader:
    """Another process that has opened the store of ``folder``."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _READER, folder, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()

    def ask(self) -> str:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._line()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "mmap"])
def test_a_store_that_is_cut_off_packed_over_and_deleted_below_another_process(
    base: Path, one: Path, engine: str
) -> None:
    """Of a file cut off in place it is told by name, not by a signal; else it reads what was there, to its end."""
    reader = Reader(one, engine)
    wanted = reader.ask()
    assert wanted.startswith("bits")
    whole = store_of(one).read_bytes()
    os.truncate(store_of(one), len(whole) // 2)
    for _ in range(2):
        assert reader.ask().startswith("error ArtifactError")
    with store_of(one).open("r+b") as file:
        file.write(whole)
    assert reader.ask() == wanted
    torch_pi2.pack(base / "two-plain", one)
    assert reader.ask() == wanted
    assert torch.equal(logits(small(one)), logits(small(base / "two")))
    shutil.rmtree(one)
    assert reader.ask() == wanted
    reader.close()
    with pytest.raises(ArtifactError):
        torch_pi2.load(one, budget="1GiB")
