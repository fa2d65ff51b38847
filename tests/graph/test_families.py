"""What docs/ARCHITECTURES.md says of every family of transformers is what happens; none computes something else."""

from __future__ import annotations

import families
import pytest
from families import QUICK, committed, judge, page


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def check(family: str) -> None:
    row = judge(family)
    assert "NO" not in row.equal, row.line()
    assert row.line() == committed()[family], "python tests/helpers/families.py writes docs/ARCHITECTURES.md"


@pytest.mark.slow
@pytest.mark.parametrize("family", QUICK)
def test_what_the_page_says(family: str) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", [name for name in families.families() if name not in QUICK])
def test_what_the_page_says_of_the_others(family: str) -> None:
    check(family)


def test_the_page_has_every_family_and_none_is_wrong() -> None:
    lines = committed()
    assert list(lines) == list(families.families())
    assert not [line for line in lines.values() if "| NO" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.values()]
    assert families.PAGE.read_text() == page([families.Row(*row) for row in cells])


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse layer that computes something else shows in the row."""
    import torch

    from torch_pi2.layers.ffn import SparseFFN

    whole = SparseFFN.whole
    monkeypatch.setattr(SparseFFN, "whole", lambda self, x: whole(self, x) * (1 + 0.01 * torch.ones(())))
    assert judge("llama").equal.startswith("NO")
