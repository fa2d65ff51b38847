"""``replacing_folder``: a whole folder or none, whatever happens on the way; JSON within bounds of memory."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_pi2.base import files, reading
from torch_pi2.base.files import replacing_folder
from torch_pi2.errors import ArtifactError, ConfigError

MESSAGE = r"writing .*/m: expected a folder that can be written, found .*; nothing was left half-written\."


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder that is there already."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").write_text("old")
    return tmp_path / "m"


def test_new_and_replaced_folders(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with replacing_folder(tmp_path / "a" / "m") as staging:
            (staging / "pi2").mkdir()
            (staging / "pi2" / text).write_text(text)
            assert staging.parent == tmp_path / "a"  # one file system, or it could not be renamed
        assert content(tmp_path / "a") == {f"m/pi2/{text}": text}
    assert os.listdir(tmp_path / "a") == ["m"]


def test_everything_is_on_disk_before_it_has_its_name(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def sync(file: int) -> None:
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")), "old" in os.listdir(earlier)))
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    with replacing_folder(earlier) as staging:
        (staging / "pi2").mkdir()
        (staging / "pi2" / "weights").write_text("x")
        (staging / "config").write_text("x")
    before = [name for name, old in synced if old]
    assert {"weights", "config", "pi2"} <= set(before)
    assert synced[-1] == (earlier.parent.name, False)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ConfigError])
def test_a_block_that_fails_leaves_the_old_folder(earlier: Path, error: BaseException | type) -> None:
    if error is ConfigError:
        error = ConfigError("x", expected="y", found="z", fix="w")
    wanted = (ArtifactError, MESSAGE) if isinstance(error, OSError) else (type(error), None)

    def fail() -> None:
        with replacing_folder(earlier) as staging:
            (staging / "new").write_text("new")
            raise error

    with pytest.raises(wanted[0], match=wanted[1]):
        fail()
    assert content(earlier.parent) == {"m/old": "old"}
    assert os.listdir(earlier.parent) == ["m"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("n", [1, 2])
def test_a_swap_that_fails_puts_the_old_folder_back(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, n: int, error: BaseException
) -> None:
    real, calls = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == n:
            raise error
        return real(path, target)

    def write() -> None:
        with replacing_folder(earlier) as staging:
            (staging / "new").write_text("new")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ArtifactError if isinstance(error, OSError) else KeyboardInterrupt):
        write()
    assert content(earlier.parent) == {"m/old": "old"}
    assert os.listdir(earlier.parent) == ["m"]


def test_files_that_cannot_be_synced_are_not_put_in_place(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    def write() -> None:
        with replacing_folder(earlier) as staging:
            (staging / "new").write_text("new")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"found No space left on device\."):
        write()
    assert content(earlier.parent) == {"m/old": "old"}


def test_what_a_killed_process_left_is_removed(earlier: Path) -> None:
    for end in ("partial", "old"):
        left = earlier.parent / f".m.{end}"
        left.mkdir()
        (left / "part").write_text("x")
    (earlier.parent / ".m.lock").touch()
    with replacing_folder(earlier) as staging:
        assert os.listdir(staging) == []
        (staging / "new").write_text("new")
    assert content(earlier.parent) == {"m/new": "new"}
    assert os.listdir(earlier.parent) == ["m"]


def test_scratch_folders_are_of_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".x.partial"
    left.mkdir()
    (left / "part").write_text("x")
    monkeypatch.setattr(files, "_PATIENCE_S", 0.0)
    with files.scratch(tmp_path, "x") as made:
        assert list(made.iterdir()) == []
        (made / "more").touch()
        with (
            pytest.raises(ArtifactError, match="expected no other process that writes it"),
            files.scratch(tmp_path, "x"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_killed_between_the_two_renames_the_earlier_folder_comes_back(earlier: Path) -> None:
    earlier.rename(earlier.parent / ".m.old")
    (earlier.parent / ".m.partial").mkdir()
    with pytest.raises(ConfigError), replacing_folder(earlier):
        raise ConfigError("x", expected="y", found="z", fix="w")
    assert content(earlier.parent) == {"m/old": "old"}
    assert os.listdir(earlier.parent) == ["m"]


def test_files_of_a_memory_file_system_are_replaced() -> None:
    """``/dev/shm`` is no device: what is there is not written to at its end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for text in ("{}", "[]"):
            files.atomic_write(Path(folder) / "a.json", text)
        assert (Path(folder) / "a.json").read_text() == "[]"


def test_others_may_read_what_safetensors_makes_for_its_owner(tmp_path: Path) -> None:
    with replacing_folder(tmp_path / "m") as staging:
        save_file({"a": torch.zeros(3)}, staging / "model.safetensors")
        (staging / "private").touch(0o600)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert modes == {"model.safetensors": (tmp_path / "m").stat().st_mode & 0o666, "private": 0o600}


def test_a_vocabulary_with_merges_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short words take many times their text; a bomb takes more than that."""
    monkeypatch.setattr(reading, "ROOM_BYTES", 0)
    words = [f"w{index:x}" for index in range(3000)]
    pairs = [[left, right] for left, right in zip(words, words[1:] + words, strict=False)] * 2
    text = json.dumps({"model": {"vocab": {word: index for index, word in enumerate(words)}, "merges": pairs}})
    assert len(reading.parse(text, "tokenizer.json")["model"]["vocab"]) == 3000
    with pytest.raises(ArtifactError, match=r"values that take \d+ bytes in a text of"):
        reading.parse("[" + "[]," * 3000 + "[]]", "config.json")
