"""Notebooks run from top to bottom in a kernel of their own, and are kept without what they printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def test_no_outputs_are_kept() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert code
        assert not [cell for cell in code if cell.outputs or cell.execution_count], path.name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder beside the models, as in a checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").symlink_to(EXAMPLES / "models")
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if "image/png" in output.get("data", {})], "no plot"
    assert not list((tmp_path / "notebooks").iterdir()), "left behind"


@pytest.mark.slow
def test_a_method_of_your_own_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Jupyter: each cell as Python runs it."""
    (tmp_path / "models").symlink_to(EXAMPLES / "models")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "notebooks" / "own_method.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    said = capsys.readouterr().out
    assert said.count("% of the output") == 5
    assert "True" in said
    assert names["here"] == names["there"]
    loss = {row["method"]: row["loss"] for row in names["rows"]}
    assert abs(loss["dense"]) < 1e-4
    assert loss["rough gate 0.1"] > loss["rough gate 0.3"]
    assert all("refused" not in row for row in names["rows"])
