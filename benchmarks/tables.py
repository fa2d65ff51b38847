"""Results as tables: printed in the terminal, and as a page (``python -m benchmarks.tables benchmarks/results``).

A benchmark module describes its tables once, in ``TABLES``. The page has a section for each table, with the rows of
every JSON file in the folder; each file is what ``python -m benchmarks NAME --json`` printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS
from torch_pi2.base.files import atomic_write
from torch_pi2.cli import common
from torch_pi2.errors import ArtifactError

Result = Mapping[str, Any]
#: Text of a row in one column.
Cell = Callable[[Any], str]

_HEAD = """# Measured results

Written by `python -m benchmarks.tables` from the JSON files beside it; the `command` field of each (older files have
none) says what produced it. Cases of a run alternate; figures are medians, and ranges go from the slowest to the
fastest round. Models are synthetic unless the list of runs says that one is real: random weights that fire as often as
real ones. They say something about speed only. [ARCHIVE](ARCHIVE.md) has the tables of benchmarks that were removed.
"""


@dataclass(frozen=True)
class Table:
    """``rows`` of a result, and the text of each of them by column; ``title`` and ``note`` are for the page."""

    title: str
    rows: Callable[[Any], Iterable[Any]]
    columns: Mapping[str, Cell]
    note: str = ""

    def cells(self, result: Result) -> list[list[str]]:
        return [[cell(row) for cell in self.columns.values()] for row in self.rows(result)]


def find(row: Any, path: str) -> Any:
    """The value at a path such as ``spread.ms``; None where a part of it is missing."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def at(path: str, text: str | Callable[[Any], str] = "", scale: float = 1) -> Cell:
    """The value at ``path``, in a format; nothing where there is none."""

    def cell(row: Any) -> str:
        value = find(row, path)
        if value is None:
            return ""
        return text(value) if callable(text) else format(value * scale if scale != 1 else value, text)

    return cell


def ranged(path: str, text: str, spread: str = "spread") -> Cell:
    """The value at ``path`` with its range, which is at ``spread`` and the same name."""
    before, _, name = path.rpartition(".")

    def cell(row: Any) -> str:
        value = find(row, path)
        ends = find(row, ".".join(filter(None, (before, spread, name))))
        if value is None:
            return ""
        return format(value, text) + ("" if ends is None else f" ({ends[0]:{text}} to {ends[1]:{text}})")

    return cell


def named(mapping: Mapping[str, Any], name: str = "name") -> list[dict[str, Any]]:
    """Rows of a mapping from names to figures."""
    return [{name: key, **value} for key, value in mapping.items()]


def render(module: Any, result: Result) -> str:
    """What the terminal shows: what was run, the tables, and whether the model is synthetic."""
    lines = [module.about(result)]
    for table in module.TABLES:
        if rows := table.cells(result):
            lines.append(common.table(list(table.columns), rows))
    lines += module.notes(result) if hasattr(module, "notes") else []
    return "\n".join([*lines, *label(result)])


def label(result: Result) -> list[str]:
    """The last line: whether figures are of random weights; nothing where a result does not say."""
    synthetic = result.get("synthetic")
    if synthetic is None:
        return []
    return [f"(synthetic: {synthetic})" if synthetic else "(a real model)"]


def page(results: Mapping[str, Result], modules: Mapping[str, Any]) -> str:
    """Markdown of results by name (file name without ``.json``); ``modules`` by ``what`` of a result."""
    parts = [_HEAD, *_machines(results)]
    for what, module in modules.items():
        own = {name: result for name, result in results.items() if result["what"] == what}
        runs = "\n".join(f"* {name}: {module.about(result).splitlines()[0]}" for name, result in own.items())
        for table in module.TABLES:
            rows = [[name, *cells] for name, result in own.items() for cells in table.cells(result)]
            if rows:
                note = f"\n{table.note.strip()}\n" if table.note else ""
                parts.append(f"## {table.title}\n{note}\n{runs}\n\n{markdown_table(['run', *table.columns], rows)}\n")
                runs = "Runs as above."
    return "\n".join(parts)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machines(results: Mapping[str, Result]) -> list[str]:
    """Each machine once, with the names of its results."""
    by_machine: dict[str, list[str]] = {}
    for name, result in results.items():
        machine = result["machine"]
        about = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        by_machine.setdefault(about + f"{machine['kernels']} kernels", []).append(name)
    most = max(by_machine.values(), key=len, default=[])
    return [
        (f"{about}.\n" if names is most else f"{', '.join(names)}: {about}.\n") for about, names in by_machine.items()
    ]


def read(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Results by name. Raises ArtifactError: a file is not a result of a benchmark that has tables."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        if path.stem.startswith("qnn-"):  # of benchmarks.qnn and its like, which have no tables
            continue
        try:
            result = json.loads(path.read_text())
            known = result["what"] in BENCHMARKS
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _not_a_result(path, f"{type(error).__name__}: {error}") from error
        if not known:
            raise _not_a_result(path, f"a result of {result['what']}")
        found[path.stem] = result
    return found


def _not_a_result(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        str(path),
        expected="what `python -m benchmarks NAME --json` printed",
        found=found,
        fix="Remove the file, or measure again.",
    )


def write(folder: str | Path) -> Path:
    """Read ``folder/*.json`` and write ``folder/README.md``; returns its path. Raises: see :func:`read`."""
    modules = {name: importlib.import_module(f"benchmarks.{name.replace('-', '_')}") for name in BENCHMARKS}
    target = Path(folder) / "README.md"
    atomic_write(target, page(read(folder), modules))
    return target


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
