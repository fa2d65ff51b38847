"""CI cannot hide a step that README leaves out: it runs README's commands first, and with nothing else to be found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
RUN = (ROOT / ".ci" / "run").read_text()


def readme_commands() -> list[str]:
    """Of the section "Install"."""
    section = (ROOT / "README.md").read_text().split("## Install")[1].split("\n## ")[0]
    return re.findall(r"^\$ (make [\w-]+)", section, flags=re.MULTILINE)


def test_readme_first() -> None:
    assert len(readme_commands()) == 2
    before, installs, _ = RUN.partition("apt-get")
    assert installs
    for command in readme_commands():
        assert f"PATH=$PWD/build/bare step {command}" in before
    assert not re.search(r"^\s*(step )?(pip|make (?!demo|test\b))", before, flags=re.MULTILINE)
    assert RUN.rstrip().endswith("tail -n 1")  # pytest's closing line
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ci") / "bare"
    if shutil.which("dpkg-query") is None:
        pytest.skip(".ci/bare asks dpkg, which is not here (Debian)")
    subprocess.run([str(ROOT / ".ci" / "bare"), str(folder)], check=True)
    return str(folder)


def test_nothing_else_is_found(bare: str) -> None:
    named = {path.name for path in Path(bare).iterdir()}
    optional = (
        r"clang|chrom|firefox|qemu|aarch64|cmake|ninja|pip|git$|curl|wget|docker|adb|valgrind|gdb|nvcc|llama|java"
    )
    assert not [name for name in named if re.match(optional, name)]
    assert {"python3", "make", "c++", "g++", "bash", "find", "tar"} <= named


def test_python_make_and_a_compiler_work_there(bare: str, tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("#include <cstdio>\nint main() { std::puts(__VERSION__); }\n")
    (tmp_path / "Makefile").write_text("all:\n\tc++ a.cc -o a && ./a\n\tpython3 -c 'import ssl, venv; print(7)'\n")
    done = subprocess.run(
        [f"{bare}/make"], cwd=tmp_path, env={"PATH": bare, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "7"


COMPILE = """
import torch
from torch import nn
import torch_pi2
layer = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.LayerNorm(16)).eval()
x = torch.randn(1, 16)
with torch.no_grad():
    print(torch.allclose(torch.compile(layer, backend="torch_pi2")(x + 1), layer(x + 1), atol=1e-5))
"""


@pytest.mark.slow
def test_compiled_steps_need_no_more_than_that_either(bare: str, tmp_path: Path) -> None:
    """torch 2.13 calls ``openssl`` to keep headers compiled, and ends with FileNotFoundError where there is none."""
    kept = {k: v for k, v in os.environ.items() if k != NO_HEADERS}
    env = kept | {"PATH": bare, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_builds_look_for_no_library_that_a_machine_may_have() -> None:
    """What is built must not depend on what is installed, beside what is asked for by name."""
    asked = set()
    for path in (ROOT / "CMakeLists.txt", ROOT / "export" / "runner" / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake")):
        asked |= set(re.findall(r"\b(find_(?:package|path|library|program)\(\w+|pkg_\w+\()", path.read_text()))
    # benchmark: with PI2_BUILD_BENCH alone, JNI with PI2_JNI.
    named = ("Threads", "Python", "Python3", "executorch", "benchmark", "JNI")
    assert asked == {f"find_package({name}" for name in named}
