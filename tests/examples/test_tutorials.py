"""Tutorials do what they say: every block is run as pasted, and prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pasted import blocks, run, same

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md") if blocks(path))
QUICK = {"by_hand", "own_method"}


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=LONG) for n in PAGES])
def test_tutorial(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = 0
    for block, printed in run(ROOT / "docs" / "tutorials" / f"{name}.md", tmp_path):
        if block.shown is None:
            assert not printed.strip(), f"{name}.md:{block.line} prints what the page does not show:\n{printed}"
        else:
            assert same(block.shown, printed), f"{name}.md:{block.line} prints\n{printed}\ninstead of\n{block.shown}"
            shown += 1
    assert shown


def test_all_are_listed() -> None:
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert sorted(set(re.findall(r"\]\((\w+)\.md\)", index))) == PAGES


def test_output_is_compared_but_for_numbers() -> None:
    assert same("3 of 8 neurons\n12.5 ms\n", "5 of 8   neurons\n1,024.25 ms")
    assert not same("3 of 8 neurons", "3 of 8 clusters")
    assert same("a\n...\nb 1\n", "a\nany\nlines\nb 2\n")
    assert not same("a\n...\nb\n", "a\nany\nc\n")


def test_a_block_that_fails_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\ntext\n\n```python\nprint(x)\nraise KeyError('here')\n```\n")
    with pytest.raises(AssertionError, match=r'page.md", line 9(?s:.*)KeyError: \'here\''):
        list(run(page, tmp_path))
    page.write_text("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match="CalledProcessError"):
        list(run(page, tmp_path))
