"""Processes that share work: an error in one is one in all, and none waits for one that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EACH = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import ConfigError, Pi2Error

rank, out = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", f"file://{out / 'group'}", timeout=timedelta(seconds=60), rank=rank, world_size=2)
ranks = Ranks(together=True)


def of(i):
    if i == 1:
        raise ConfigError("a thing", expected="one", found="none", fix="Add it.")
    if i == 3:
        raise MemoryError("too much")
    return i * i


def tell(name, items):
    try:
        said = str(ranks.of_each(lambda: [of(i) for i in items[rank::2]]))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    (out / f"{name}-{rank}").write_text(said)


tell("sound", [0, 2, 4])
tell("ours", [0, 1])
tell("other", [2, 3])
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
tell("killed", [0, 2])
"""


@pytest.mark.slow
def test_an_error_in_one_process_is_one_in_all(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _EACH, str(rank), tmp_path],
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    ended = [(process.communicate(timeout=200)[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0, -9], ended

    def said(name: str) -> list[str]:
        return [(tmp_path / f"{name}-{rank}").read_text() for rank in range(2)]

    assert said("sound") == ["[[0, 16], [4]]"] * 2
    assert said("ours") == ["ConfigError: a thing: expected one, found none. Add it."] * 2
    assert said("other") == [
        "Pi2Error: process 1 of 2 that share work: expected its part of the work, found MemoryError: too much. "
        "See what that process says.",
        "MemoryError: too much",
    ]
    killed = (tmp_path / "killed-0").read_text()
    assert killed.startswith("Pi2Error: 2 processes that share work: expected an answer of each, found none of one of ")
    assert "a process that is killed has often taken more memory than there is" in killed
