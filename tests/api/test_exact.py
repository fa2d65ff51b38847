"""What docs/EXACT.md says of every family with exact zeros is what happens; no cell is wrong."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import exact
import pytest
from exact import FAMILIES, QUICK, Row, committed, judge

#: Columns that take more than a second or two.
COSTLY = ("compiled", "int8", "gptq", "quantized", "stored", "bundle")


def cells(line: str) -> dict[str, str]:
    return asdict(Row(*(cell.strip() for cell in line.strip("|").split("|"))))


def check(name: str, *without: str) -> None:
    made, said = asdict(judge(name, without)), cells(committed()[name])
    assert not {column: cell for column, cell in made.items() if cell.startswith("NO")}
    kept = [column for column in made if not (without and column in (*without, "refused"))]
    advice = "python tests/helpers/exact.py writes docs/EXACT.md"
    assert {column: made[column] for column in kept} == {column: said[column] for column in kept}, advice


@pytest.mark.parametrize("name", QUICK)
def test_what_the_page_says(name: str) -> None:
    check(name, *COSTLY)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_all_that_the_page_says(name: str) -> None:
    check(name)


def test_the_page_has_every_family_and_no_cell_is_wrong() -> None:
    rows = [Row(**cells(line)) for line in committed().values()]
    assert [row.family for row in rows] == [*FAMILIES]
    assert not [row for row in rows if any(cell.startswith("NO") for cell in asdict(row).values())]
    assert exact.PAGE.read_text() == exact.page(rows)


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, a layer that nobody found, and an error without a name."""
    tried: Any = exact.Tried
    monkeypatch.setattr(exact, "FAMILIES", {"short": exact.Family(FAMILIES["opt"].make, 3), "opt": FAMILIES["opt"]})
    assert judge("short").found == "NO (2 and 0 left, of 3)"
    quick = [column for column in Row.__dataclass_fields__ if column not in ("equal", "saved")]
    monkeypatch.setattr(tried, "saved", lambda self: float("no"))
    logits = tried.logits
    monkeypatch.setattr(tried, "logits", lambda self, model: logits(self, model) * (1 + (model is self.sparse)))
    row = judge("opt", quick)
    assert (row.equal, row.saved) == ("NO (1.0e+00)", "NO (ValueError)")
