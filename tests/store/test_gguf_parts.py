"""Models in several GGUF files, as the package gguf and llama.cpp split them: read as one, or refused by name."""

from __future__ import annotations

import shutil
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


@pytest.mark.parametrize("given", [0, 2])
def test_a_missing_part(parts: list[Path], given: int) -> None:
    parts[1].unlink()
    with pytest.raises(ArtifactError, match=r"m-00002-of-00003.gguf: expected part 2 of 3 .*, found nothing"):
        GgufModel(parts[given])


def test_a_part_by_another_name(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ArtifactError, match=r"expected the name of part 1 of 3, NAME-00001-of-00003.gguf.*model.gguf"):
        GgufModel(other)


def test_a_part_in_the_place_of_another(parts: list[Path]) -> None:
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ArtifactError, match=r"m-00002-of-00003.gguf: expected part 2 of 3, found part 3"):
        GgufModel(parts[0])


def test_a_part_that_is_damaged(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"m-00002-of-00003.gguf: expected a whole GGUF file, found damage"):
        GgufModel(parts[0])


def test_a_file_that_is_no_part(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (whole,) = write(tmp_path / "other" / "m.gguf", {"w2": TENSORS["w2"]})
    shutil.copy(whole, parts[1])
    with pytest.raises(ArtifactError, match=r"m-00002-of-00003.gguf: expected part 2 of 3, found a file that is none"):
        GgufModel(parts[0])


def test_parts_of_other_models(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    more = {**TENSORS, "w5": TENSORS["w0"]}
    others = write(tmp_path / "other" / "m.gguf", more)
    shutil.copy(others[2], parts[2])
    with pytest.raises(ArtifactError, match=r"00003-of-00003.gguf: .*found 'split.tensors.count' 6 where that has 5"):
        GgufModel(parts[0])
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "other").mkdir()
    others = write(tmp_path / "other" / "m.gguf", dict.fromkeys(["a", "b", "c", "w0", "x"], TENSORS["w0"]))
    shutil.copy(others[2], parts[2])
    shutil.copy(others[1], parts[1])
    with pytest.raises(ArtifactError, match=r"00002-of-00003.gguf: .*found 'w0', which another has as well"):
        GgufModel(parts[0])


def test_tensors_that_no_part_has(parts: list[Path]) -> None:
    for path in parts:
        data = path.read_bytes()
        at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
        path.write_bytes(data[:at] + (7).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ArtifactError, match=r"expected parts of 5 tensors, as they are, found split.tensors.count 7"):
        GgufModel(parts[0])


@pytest.mark.parametrize(("key", "value"), [("split.count", 0), ("split.no", 3)])
def test_numbers_without_sense(parts: list[Path], key: str, value: int) -> None:
    data = parts[0].read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    parts[0].write_bytes(data[:at] + value.to_bytes(2, "little") + data[at + 2 :])
    with pytest.raises(ArtifactError, match=rf"damage \({key} {value}"):
        GgufModel(parts[0])
