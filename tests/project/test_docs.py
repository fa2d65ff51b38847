"""The site of docs/ is built of what is there, and leaves out nothing that the code has."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import torch_pi2

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENVIRONMENT = (DOCS / "ENVIRONMENT.md").read_text()
#: What is run where the library is, or makes it; tests set what they like.
CODE = ("torch_pi2", "csrc", "export", "cmake", "benchmarks", "examples")


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


links = hook("links")


def files(*suffixes: str) -> Iterator[Path]:
    for folder in CODE:
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in suffixes and p.is_file())


def read_by_python(path: Path) -> set[str]:
    """Variables that a file names where it uses ``os.environ``; one whose name cannot be told is ``FILE:LINE``."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called == "os.getenv" or called.startswith("os.environ."):
                used.append(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            used.append(node.slice)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            used.append(node.left)
    return {
        str(name.value) if isinstance(name, ast.Constant) else constants.get(ast.unparse(name), f"{path}:{name.lineno}")
        for name in used
    }


def read_by_cpp(path: Path) -> set[str]:
    """Likewise of ``getenv``: its own arguments and, where a table has them, all of the file that look like ours."""
    text = path.read_text()
    if "getenv(" not in text:
        return set()
    return set(re.findall(r'"(PI2_[A-Z0-9_]+)"', text)) | set(re.findall(r'getenv\("(\w+)"', text))


def variables() -> set[str]:
    found: set[str] = set()
    return found.union(*map(read_by_python, files(".py")), *map(read_by_cpp, files(".cc", ".h", ".cpp")))


@pytest.mark.slow
def test_every_variable_that_the_code_reads_is_described() -> None:
    found = variables()
    assert len(found) >= 8
    assert not [name for name in found if f"`{name}`" not in ENVIRONMENT]


@pytest.mark.slow
def test_every_variable_that_is_said_to_be_read_is() -> None:
    section = ENVIRONMENT.split("## Variables that it reads")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) <= variables()


def test_every_file_of_the_cache_is_described() -> None:
    kept = {name for path in files(".py") for name in re.findall(r'cache_folder\(\) / f?"([^"{]+)', path.read_text())}
    assert len(kept) >= 2
    assert not [name for name in kept if f"~/.cache/torch_pi2/{name}" not in ENVIRONMENT]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: torch_pi2\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted([*named, "Pi2Error", "__version__"]) == sorted([*torch_pi2.__all__, "errors"])


def test_links_to_the_repository(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "guide" / "a.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "b.h").touch()
    text = "[1](../../csrc/b.h#L3) [2](../../csrc) [3](../b.md) [4](https://a/b) [5](../../gone.md) `[6](../../csrc)`"
    at = f"{links.repository()}/%s/main/csrc"
    expected = text.replace("](../../csrc/b.h#L3)", f"]({at % 'blob'}/b.h#L3)")
    expected = expected.replace("[2](../../csrc)", f"[2]({at % 'tree'})")
    assert links.to_repository(text, page, tmp_path / "docs") == expected
    block = "```\n[1](../../csrc)\n```\n"
    assert links.to_repository(block, page, tmp_path / "docs") == block


def test_docstrings_become_markdown() -> None:
    found = hook("docstrings").as_markdown("See :func:`~torch_pi2.load`.\n\nRaises:\n    ConfigError, ShapeError.\n")
    assert found == "See `torch_pi2.load`.\n\nRaises `ConfigError`, `ShapeError`.\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` makes it: any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_what_is_made_of_the_code(site: Path) -> None:
    from torch_pi2.cli import VERBS

    commands = links._Page((site / "reference" / "cli.html").read_text()).names
    assert set(VERBS) <= commands
    python = links._Page((site / "reference" / "api.html").read_text()).names
    assert {f"torch_pi2.{name}" for name in torch_pi2.__all__ if name not in ("Pi2Error", "__version__")} <= python
    assert "torch_pi2.errors.Pi2Error" in python


@pytest.mark.slow
def test_the_site_is_whole_and_comes_from_nowhere_else(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 20
    assert not list(links.broken(site))
