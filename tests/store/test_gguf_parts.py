"""Models in several GGUF files, as the package gguf and llama.cpp split them: read as one, or refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from torch_pi2.errors import ArtifactError
from torch_pi2.store.gguf import GgufModel, gguf_in

TENSORS = {f"w{i}": np.arange(i, i + 64, dtype=np.float32).reshape(2, 32) for i in range(5)}


def write(path: Path, tensors: dict[str, np.ndarray[Any, Any]] = TENSORS, name: str = "a", **how: Any) -> list[Path]:
    """The parts of a file of two tensors each."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=2, **how)
    writer.add_name(name)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, step)()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    found = write(tmp_path / "m.gguf")
    assert [path.name for path in found] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


@pytest.mark.parametrize("given", range(3))
def test_any_part_is_the_model(parts: list[Path], given: int) -> None:
    with GgufModel(parts[given]) as model:
        assert (model.path, model.paths) == (parts[0], parts)
        assert model.metadata["general.name"] == "a"
        assert list(model.tensors) == list(TENSORS)
        for name, values in TENSORS.items():
            rows = model.read_rows(name, 1, 2).view(torch.float32)[0]
            assert rows.tolist() == values[1].tolist()
            assert model.ends_of(name) == 2 * values.tobytes()
    assert {file._file for file in (model, *model._others)} == {-1}


def test_parts_in_capitals(parts: list[Path]) -> None:
    capitals = [path.rename(path.with_suffix(".GGUF")) for path in parts]
    with GgufModel(capitals[1]) as model:
        assert (model.paths, list(model.tensors)) == (capitals, list(TENSORS))


def test_the_file_that_is_meant(tmp_path: Path, parts: list[Path]) -> None:
    """By its suffix, in any case; or the only model of a folder, of which parts are one. What is not there, too."""
    assert gguf_in(tmp_path / "none.GGUF") == tmp_path / "none.GGUF"
    assert gguf_in(str(parts[2])) == parts[2]
    assert gguf_in(tmp_path / "none") is None
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_in(tmp_path) == parts[0]
    assert gguf_in(tmp_path / "folder.gguf") is None
    other = parts[0].with_name("other.Gguf")
    shutil.copyfile(parts[0], other)
    with pytest.raises(ArtifactError, match=r"expected one GGUF model, found m-00001-of-00003.gguf, other.Gguf\. Name"):
        gguf_in(tmp_path)
    for i in range(3):
        shutil.copyfile(parts[0], tmp_path / f"z{i}.gguf")
    with pytest.raises(ArtifactError, match=r"other.Gguf, z0.gguf and 2 others\. Name the file that is meant"):
        gguf_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # a checkpoint, beside which files may lie
    assert gguf_in(tmp_path) is None


def test_a_first_part_of_no_tensors(tmp_path: Path) -> None:
    parts = write(tmp_path / "m.gguf", small_first_shard=True)
    with GgufModel(parts[-1]) as model:
        assert len(parts) == 4
        assert set(model.tensors) == set(TENSORS)


def test_one_file_is_a_model_of_one_part(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "m.gguf", {"w0": TENSORS["w0"]})
    with GgufModel(path) as model:
        assert (model.paths, list(model.tensors)) == ([path], ["w0"])


def _other(parts: list[Path], tensors: dict[str, np.ndarray[Any, Any]]) -> list[Path]:
    """The parts of another model."""
    folder = parts[0].parent / "other"
    folder.mkdir()
    return write(folder / "m.gguf", tensors)


def _number(path: Path, key: str, value: int, size: int = 2) -> None:
    """Another number in the metadata."""
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + value.to_bytes(size, "little") + data[at + size :])


def _tensor_of_another(parts: list[Path]) -> None:
    others = _other(parts, dict.fromkeys(["a", "b", "c", "w0", "x"], TENSORS["w0"]))
    for i in (1, 2):
        shutil.copy(others[i], parts[i])


#: What is wrong -> the change, which may give another file to open than the first part, and the message.
WRONG: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "missing": (lambda p: p[1].unlink(), r"m-00002-of-00003.gguf: expected part 2 of 3 .*, found nothing"),
    "missing, from the last": (
        lambda p: (p[1].unlink(), p[2])[1],
        r"m-00002-of-00003.gguf: expected part 2 of 3 .*, found nothing",
    ),
    "another name": (
        lambda p: p[0].rename(p[0].with_name("model.gguf")),
        r"expected the name of part 1 of 3, NAME-00001-of-00003.gguf.*model.gguf",
    ),
    "in the place of another": (
        lambda p: shutil.copy(p[2], p[1]) and p[0],
        r"m-00002-of-00003.gguf: expected part 2 of 3, found part 3",
    ),
    "damaged": (
        lambda p: p[1].write_bytes(p[1].read_bytes()[:-100]),
        r"m-00002-of-00003.gguf: expected a whole GGUF file, found damage",
    ),
    "no part": (
        lambda p: shutil.copy(_other(p, {"w2": TENSORS["w2"]})[0], p[1]) and p[0],
        r"m-00002-of-00003.gguf: expected part 2 of 3, found a file that is none",
    ),
    "of another model": (
        lambda p: shutil.copy(_other(p, {**TENSORS, "w5": TENSORS["w0"]})[2], p[2]) and p[0],
        r"00003-of-00003.gguf: .*found 'split.tensors.count' 6 where that has 5",
    ),
    "a tensor of another": (_tensor_of_another, r"00002-of-00003.gguf: .*found 'w0', which another has as well"),
    "a tensor that no part has": (
        lambda p: [_number(path, "split.tensors.count", 7, 4) for path in p] and p[0],
        r"expected parts of 5 tensors, as they are, found split.tensors.count 7",
    ),
    "no count": (lambda p: _number(p[0], "split.count", 0), r"damage \(split.count 0"),
    "a number beyond the count": (lambda p: _number(p[0], "split.no", 3), r"damage \(split.no 3"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refused(parts: list[Path], kind: str) -> None:
    change, message = WRONG[kind]
    opened = change(parts)
    with pytest.raises(ArtifactError, match=message):
        GgufModel(opened if isinstance(opened, Path) else parts[0])
