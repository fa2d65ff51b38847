"""docs/ONE_TOKEN.md names files and functions that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torch_pi2 import ops

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "ONE_TOKEN.md").read_text()
PATH = r"(?:torch_pi2|csrc)/[\w/]+(?:\.\w+)?/?"
ROWS = re.findall(rf"^\|[^|]*\| `({PATH})`[^|]*\| `(\w+)` \|$", TEXT, re.M)


def test_every_file_is_there() -> None:
    named = re.findall(PATH, TEXT.replace("<isa>/<format>", "scalar/q4"))
    assert len(named) > 25
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize(("path", "function"), ROWS)
def test_functions_of_the_tables_are_there(path: str, function: str) -> None:
    assert re.search(rf"^(def|class) {function}\b|\b\w+::{function}\(", (ROOT / path).read_text(), re.M)


def test_the_tables_were_read() -> None:
    assert len(ROWS) >= 14


def test_operators_are_there() -> None:
    ops.load()
    named = re.findall(r"torch\.ops\.pi2\.(\w+)", TEXT)
    assert named
    assert all(hasattr(torch.ops.pi2, name) for name in named)
