"""Imports and includes run downward: a room uses what stands below it (docs/design.md), no two files use each other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "torch_pi2"
CSRC = REPO / "csrc"

#: Where imports in functions are allowed: starting a program takes no longer than what was asked for.
LAZY = ("cli", "export")


def layers(picture: int = 0) -> list[set[str]]:
    """The rooms of each layer, the lowest first, as docs/design.md has them: of Python, and then of C++."""
    text = (REPO / "docs" / "design.md").read_text()
    drawn = text.partition("## Layers")[2].partition("## ")[0].split("```\n")[1 + 2 * picture]
    rows = [line.partition("  ")[0].split() for line in drawn.splitlines() if not line.startswith(" ")]
    return [{name.strip("/").removesuffix(".py") for name in row} for row in reversed(rows)]


def room_of(module: str) -> str:
    """``torch_pi2.checkpoint.pack`` -> ``checkpoint``; the package itself is ``__init__``."""
    return [*module.split("."), "__init__"][1]


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(REPO).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.ImportFrom | ast.Import, bool]]:
    """Every import that runs, and whether it does in a function; those for type checkers alone do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, inside
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.Lambda))


def uses(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether in a function."""
    for node, inside in imports(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names if alias.name in known)
        elif node.module in known:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in known else node.module), inside


#: Written in the language of a package that is not always there, and takes long to import.
FOREIGN = {"torch_pi2.ops.gpu.kernels"}


def arrows() -> dict[str, dict[str, bool]]:
    known = modules()
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for module, path in known.items():
        for used, inside in uses(path, known):
            if used != module:
                found[module][used] = found[module].get(used, True) and inside
    return found


def test_every_room_has_its_layer() -> None:
    drawn = [room for layer in layers() for room in layer]
    assert len(drawn) == len(set(drawn))
    assert {room_of(module) for module in modules()} - {"__main__"} == set(drawn)


def test_imports_run_downward() -> None:
    height = {room: i for i, layer in enumerate(layers()) for room in layer} | {"__main__": 1000}
    upward = []
    for module, used in arrows().items():
        for other in used:
            here, there = room_of(module), room_of(other)
            if here != there and height[here] <= height[there]:
                upward.append(f"{module} imports {other}")
    assert not upward, "\n".join(sorted(upward))


def circles(graph: dict[str, set[str]]) -> str:
    """Circles and whatever leads into them."""
    while free := [file for file, used in graph.items() if not used & graph.keys()]:
        for file in free:
            del graph[file]
    return "\n".join(f"{file} -> {', '.join(sorted(used & graph.keys()))}" for file, used in graph.items())


def test_no_two_files_use_each_other() -> None:
    found = circles({module: set(used) for module, used in arrows().items()})
    assert not found, found


def includes() -> dict[str, set[str]]:
    """Of each C++ file of a room; without lists (.inc), which include nothing."""
    found = {}
    for room in set.union(*layers(1)):
        for path in [*(CSRC / room).rglob("*.h"), *(CSRC / room).rglob("*.cc")]:
            used = re.findall(r'^#include "(.+\.h)"$', path.read_text(), re.M)
            public = {f"include/{name}" for name in used if name.startswith("pi2/")}
            found[str(path.relative_to(CSRC))] = public | {name for name in used if not name.startswith("pi2/")}
    return found


def test_every_room_of_csrc_has_its_layer() -> None:
    drawn = [room for layer in layers(1) for room in layer]
    assert len(drawn) == len(set(drawn))
    assert {p.name for p in CSRC.iterdir() if p.is_dir()} - {"tests", "bench", "fuzz"} == set(drawn)


def test_includes_run_downward() -> None:
    height = {room: i for i, layer in enumerate(layers(1)) for room in layer}
    upward = []
    for path, used in includes().items():
        for other in used:
            here, there = path.split("/")[0], other.split("/")[0]
            if here != there and height[here] <= height[there]:
                upward.append(f"{path} includes {other}")
    assert not upward, "\n".join(sorted(upward))
    found = circles(includes())
    assert not found, found


def test_our_own_modules_are_imported_at_the_top() -> None:
    """An import in a function hides a circle, or a room that its file does not say it uses."""
    hidden = []
    for module, used in arrows().items():
        if room_of(module) not in LAZY:
            inside = {other for other, within in used.items() if within} - FOREIGN
            hidden += [f"{module} imports {other} in a function" for other in inside]
    assert not hidden, "\n".join(sorted(hidden))


def test_decisions_that_are_cited_can_be_looked_up() -> None:
    text = (REPO / "docs" / "design.md").read_text()
    cited = set()
    for path in [*PACKAGE.rglob("*.py"), *CSRC.rglob("*.h"), *CSRC.rglob("*.cc")]:
        cited |= set(re.findall(r"\bdesign,? (D\d+)|\b(D\d+)\)", path.read_text()))
    names = {name for pair in cited for name in pair if name}
    assert names, "nothing cites a decision"
    assert not {name for name in names if f"**{name} " not in text}
