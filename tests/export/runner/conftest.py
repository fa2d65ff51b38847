"""What the runner's tests run: a bundle with keys and values, and one whose sequences want different neurons."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runner_calls import FOLDER, make_predicted
from shared import shared_folder
from tiny_bundle import shared_bundle


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    assert (FOLDER / "pi2_runner").exists(), "the runner was not built: make runner"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_bundle(tmp_path_factory)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four lanes, and a layer whose predictor wants other neurons for other tokens."""
    return shared_folder(tmp_path_factory, "predicted", make_predicted)
