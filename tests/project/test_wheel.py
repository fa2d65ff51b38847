"""`make wheel`, in an environment with nothing but what pip gets: installed, looked at, and it generates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TRAINED = REPO / "examples" / "models" / "drelu-stdlib-5m"
HF = "transformers>=5.0,<6"

pytestmark = [pytest.mark.slow, pytest.mark.long]


def called(*command: object, cwd: Path = REPO) -> str:
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=outside, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    if Path(sys.executable).parent != REPO / ".venv" / "bin":
        pytest.skip("make wheel uses .venv; this is another Python")
    called("make", "wheel")
    return max((REPO / "dist").glob("torch_pi2-*.whl"), key=lambda path: path.stat().st_mtime)


def test_its_tag_and_what_is_in_it(wheel: Path) -> None:
    assert re.fullmatch(r"torch_pi2-[\d.]+-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        libraries = {name for name in names if ".so" in name}
        metadata = file.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    assert {f"torch_pi2/_lib/{name}.so" for name in ("libpi2", "libpi2_torch")} <= libraries
    assert all(name.startswith("torch_pi2/_lib/libpi2") for name in libraries)
    page = {path.relative_to(REPO).as_posix() for path in (REPO / "torch_pi2" / "serve" / "page").iterdir()}
    assert page
    assert page <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "csrc"))]
    assert "Project-URL: Homepage, " in metadata
    assert str(REPO) not in metadata


def test_it_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    bin = tmp_path / "venv" / "bin"
    called(bin / "python", "-m", "pip", "install", "--quiet", wheel, HF)
    found = json.loads(called(bin / "torch-pi2", "doctor", "--json", cwd=tmp_path))
    assert found["ok"] is True
    assert Path(found["library"]["path"]).is_relative_to(tmp_path / "venv")
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400)))
    how = ("--text", text, "--tokens", 256, "--method", "exact", "--trust-remote-code", "--dtype", "float32")
    called(bin / "torch-pi2", "optimize", TRAINED, "--out", tmp_path / "m", *how, cwd=tmp_path)
    ask = ("--prompt", "def main(", "--max-new-tokens", 8, "--trust-remote-code", "--dtype", "float32", "--json")
    sparse = json.loads(called(bin / "torch-pi2", "generate", tmp_path / "m", *ask, cwd=tmp_path))
    dense = json.loads(called(bin / "torch-pi2", "generate", tmp_path / "m", "--dense", *ask, cwd=tmp_path))
    assert sparse["text"] == dense["text"] != ""
