"""What takes long to make is made once for all workers of a test run, and read only: change a copy."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_pi2


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """What ``make`` writes into a folder that is not there yet, made once for all workers of a test run."""
    base = factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base  # of pytest-xdist's workers
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, new = base / name, base / f"{name}.new"
        if not done.exists():
            shutil.rmtree(new, ignore_errors=True)
            make(new)
            new.rename(done)
    return done


def small_store(factory: pytest.TempPathFactory) -> Path:
    """``plain``, a small synthetic model with predictors, quantised; and ``store``, packed from it."""

    def make(base: Path) -> None:
        base.mkdir()
        torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4")
        torch_pi2.pack(base / "plain", base / "store")

    return shared_folder(factory, "small-store", make)
