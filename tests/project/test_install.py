"""Installing: what pyproject.toml promises, where it is refused, and that the recipes for wheels agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torch_pi2.base import library
from torch_pi2.errors import LibraryMissingError

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())


def test_torch_is_the_same_wherever_it_is_named() -> None:
    """Or a build in isolation would have the headers of another than it runs with."""
    (needed,) = (r for r in PROJECT["project"]["dependencies"] if r.startswith("torch"))
    assert needed in PROJECT["build-system"]["requires"]
    assert f"'{needed}'" in PROJECT["tool"]["cibuildwheel"]["before-build"]
    assert re.fullmatch(r"torch>=(\d+\.\d+),<\d+\.\d+", needed)
    assert f"`{needed}`" in (REPO / "docs" / "INSTALL.md").read_text()


def test_both_recipes_leave_the_same_libraries_outside() -> None:
    def excluded(text: str) -> list[str]:
        return re.findall(r"--exclude '([^']+)'", text)

    made_here = excluded((REPO / "Makefile").read_text())
    assert made_here == excluded(PROJECT["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"])
    assert made_here == ["libtorch*", "libc10*", "libexecutorch*"]


@pytest.mark.parametrize(
    ("system", "said"), [("WIN32", "found Windows, which is not supported"), ("APPLE", "found macOS, which is not")]
)
def test_the_build_is_refused_elsewhere(system: str, said: str) -> None:
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    script = ["-P", str(REPO / "cmake" / "platform.cmake")]
    done = subprocess.run([cmake, f"-DCMAKE_HOST_{system}=ON", *script], capture_output=True, text=True)
    assert done.returncode != 0
    words = " ".join(done.stderr.split())
    assert "torch_pi2: expected Linux (x86_64 or aarch64)" in words
    assert said in words
    here = subprocess.run([cmake, *script], capture_output=True, text=True)
    assert (here.returncode, here.stderr) == (0, "")
    first = [line for line in (REPO / "CMakeLists.txt").read_text().splitlines() if line.startswith(("inc", "project"))]
    assert first[:2] == ["include(cmake/platform.cmake)", "project(torch_pi2 VERSION 0.1.0 LANGUAGES CXX)"]


@pytest.mark.parametrize(("platform", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("aix", "aix")])
def test_the_library_is_refused_elsewhere(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryMissingError, match=rf"expected Linux .* found {name}, which is not supported. .*WSL 2"):
        library.check_platform(platform)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LibraryMissingError, match="this platform"):
        library.library_path()
