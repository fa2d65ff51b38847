"""What a message tells people to install can be installed: this package is in no index."""

from __future__ import annotations

import re
from pathlib import Path

from torch_pi2.base.package import how_to_install
from torch_pi2.cli import doctor

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".cc", ".h", ".kt", ".sh", ".txt", ".cmake", ".pro", ""}
#: Where extras of this package are declared, and where this is tested.
ALLOWED = {"pyproject.toml", "tests/project/test_extras.py", "torch_pi2/base/package.py"}


def test_nothing_asks_an_index_for_this_package() -> None:
    asked = re.compile(r"torch[-_]pi2\[|(pip|uv|pipx) (install|add|download) ([^\n`'\"]* )?['\"]?torch[-_]pi2\b")
    folders = (".ci", "benchmarks", "cmake", "csrc", "docs", "examples", "export", "tests", "torch_pi2")
    paths = [*ROOT.iterdir(), *(p for folder in folders for p in (ROOT / folder).rglob("*"))]
    files = [p for p in paths if p.suffix in TEXT and p.is_file() and str(p.relative_to(ROOT)) not in ALLOWED]
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in files
        for found in asked.finditer(path.read_text(errors="replace"))
    ]
    assert len(files) > 300
    assert not wrong


def test_every_extra_is_named_by_its_packages() -> None:
    found = doctor._extras()
    assert set(found) >= {"hf", "export", "qnn", "plan", "bench", "dev"}
    for extra in found:
        command = how_to_install(extra)
        assert command.startswith("pip install ")
        assert len(command.split()) > 2, f"{extra} names nothing"
        assert "pi2" not in command
    assert how_to_install("export", "plan") == "pip install executorch==1.5.1 'torchao<0.19,>=0.18' 'scipy>=1.11'"
    assert "transformers<6" in how_to_install("dev")  # through torch-pi2[hf], of which no index knows
