"""Streaming safetensors files: what the library itself reads, whole or not at all, and damage that is always named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from tests.helpers.tiny_models import tiny
from torch_pi2.base.tensorfile import DTYPES, Spec, TensorReader, TensorWriter, adding_checks
from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.store.weights import QuantizedWeights, metadata


def some_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn((7, 5), generator=g),
        "b": torch.randint(0, 256, (64, 128), generator=g, dtype=torch.uint8),
        "c": torch.randn((3,), generator=g).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.empty((0, 4)),
        "half": torch.randn((2, 3, 4), generator=g).to(torch.float16),
        "ids": torch.arange(9),
        "flags": torch.tensor([True, False, True]),
    }


def write(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, str] | None = None) -> None:
    specs = {name: Spec.of(t) for name, t in tensors.items()}
    with TensorWriter(path, specs, meta or {}) as out:
        for name in reversed(tensors):
            out.write(name, tensors[name])


def test_the_library_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    tensors = some_tensors()
    write(tmp_path / "ours", tensors, {"key": "ü"})
    save_file(tensors, str(tmp_path / "theirs"), {"key": "ü"})
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        found = load_file(str(path))
        with TensorReader(path) as reader:
            assert reader.metadata == {"key": "ü"}
            assert found.keys() == reader.specs.keys() == tensors.keys()
            for name, wanted in tensors.items():
                assert torch.equal(found[name], wanted)
                got = reader.read(name)
                assert got.dtype == wanted.dtype
                assert torch.equal(got, wanted)
            assert torch.equal(reader.read("b", (5, 9)), tensors["b"][5:9])
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_large_tensors_begin_on_a_page(tmp_path: Path) -> None:
    tensors = {f"odd{i}": torch.ones(3 + i) for i in range(4)} | {"matrix": torch.zeros((64, 64))}
    write(tmp_path / "f", tensors)
    with TensorReader(tmp_path / "f") as reader:
        assert reader._start["matrix"] % 4096 == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2])
def test_dtypes_that_are_not_read_are_no_damage(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"w": torch.zeros(4, 4, dtype=torch.uint8).view(dtype)}, tmp_path / "f")
    with pytest.raises(ArtifactError, match=r"expected dtypes among F64, .*found F\w+ in w\. Take the float"):
        TensorReader(tmp_path / "f")


class _OfPeople(nn.Module):
    """Tied weights, a scalar and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(3, 5)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("none", torch.empty(0, 4, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["llama-relu", "shards", "other module"])
def test_files_of_other_libraries_get_checksums_as_they_are_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = _OfPeople() if kind == "other module" else tiny("llama-relu")

    def write_with_library(folder: Path) -> None:
        if kind == "other module":
            folder.mkdir(exist_ok=True)
            save_model(model, str(folder / "model.safetensors"))
        else:
            model.save_pretrained(folder, max_shard_size="30KB" if kind == "shards" else "1GB")

    write_with_library(tmp_path / "usual")
    (tmp_path / "checked").mkdir()
    with monkeypatch.context() as once, adding_checks(tmp_path / "checked"):
        once.setattr(TensorWriter, "__init__", lambda *_args, **_settings: pytest.fail("written again"))
        write_with_library(tmp_path / "checked")
    files = sorted(path.name for path in (tmp_path / "usual").glob("*.safetensors"))
    assert len(files) == (3 if kind == "shards" else 1)
    for name in files:
        usual, checked = (load_file(tmp_path / folder / name) for folder in ("usual", "checked"))
        assert usual.keys() == checked.keys()
        assert all(usual[key].equal(checked[key]) for key in usual)
        with TensorReader(tmp_path / "checked" / name) as reader, TensorReader(tmp_path / "usual" / name) as plain:
            assert not plain.checks
            assert reader.metadata == plain.metadata
            assert reader.verify() == sum(value.nbytes for value in usual.values())
    save_model(_OfPeople(), str(tmp_path / "later.safetensors"))
    with TensorReader(tmp_path / "later.safetensors") as reader:
        assert not reader.checks  # the library is as it was


def test_rows_in_any_order_and_metadata_known_late(tmp_path: Path) -> None:
    wanted = torch.randn((10, 6))
    with TensorWriter(tmp_path / "f", {"w": Spec.of(wanted)}, {"hash": "0" * 8}) as out:
        out.write("w", wanted[4:], row=4)
        out.write("w", wanted[:4])
        out.set_metadata("hash", "abcdefgh")
        assert not (tmp_path / "f").exists()  # nothing half-written under its name
    assert torch.equal(load_file(str(tmp_path / "f"))["w"], wanted)
    with TensorReader(tmp_path / "f") as reader:
        assert reader.metadata == {"hash": "abcdefgh"}
        assert out.file_bytes == (tmp_path / "f").stat().st_size


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TensorWriter(tmp_path / "f", {"w": Spec((2,), torch.float32)}, {}):
        raise ZeroDivisionError
    with (
        pytest.raises(AssertionError, match="not or not wholly written: v"),
        TensorWriter(tmp_path / "f", {n: Spec((2,), torch.float32) for n in "wv"}, {}) as out,
    ):
        out.write("w", torch.zeros(2))
    with pytest.raises(ArtifactError, match="expected a folder that can be written"):
        write(Path("/proc/none/f"), {"w": torch.zeros(1)})
    assert not os.listdir(tmp_path)


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="found nothing"):
        TensorReader(tmp_path / "missing")
    write(tmp_path / "f", {"w": torch.zeros((4, 2))})
    with TensorReader(tmp_path / "f") as reader:
        with pytest.raises(ArtifactError, match="expected a tensor v, found 1 others"):
            reader.read("v")
        os.truncate(tmp_path / "f", (tmp_path / "f").stat().st_size - 8)  # shrinks while it is open
        with pytest.raises(ArtifactError, match=r"damage \(the file ends at byte 4120, within w\)"):
            reader.read("w")


def header_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "short": b"\1\0\0",
    "length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "not JSON": header_file(b"{not json"),
    "not UTF-8": header_file(b'{"\xff": 1}'),
    "a list": header_file([1, 2]),
    "a name twice": header_file(
        b'{"w":' + json.dumps(GOOD).encode() + b',"w":' + json.dumps(GOOD).encode() + b"}", b"0" * 8
    ),
    "an entry that is text": header_file({"w": "x"}),
    "no shape": header_file({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, b"0" * 8),
    "unknown dtype": header_file({"w": GOOD | {"dtype": "F13"}}, b"0" * 8),
    "negative size": header_file({"w": GOOD | {"shape": [-2]}}, b"0" * 8),
    "a size that is no number": header_file({"w": GOOD | {"shape": [True]}}, b"0" * 8),
    "wrong shape": header_file({"w": GOOD | {"shape": [3]}}, b"0" * 8),
    "sizes that no memory has": header_file({"w": GOOD | {"shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}),
    "three offsets": header_file({"w": GOOD | {"data_offsets": [0, 8, 8]}}, b"0" * 8),
    "a gap": header_file({"w": GOOD | {"data_offsets": [8, 16]}}, b"0" * 16),
    "an overlap": header_file({"w": GOOD, "v": GOOD | {"data_offsets": [4, 12]}}, b"0" * 12),
    "truncated data": header_file({"w": GOOD}, b"0" * 7),
    "data too long": header_file({"w": GOOD}, b"0" * 9),
    "metadata that is no text": header_file({"__metadata__": {"a": 1}, "w": GOOD}, b"0" * 8),
    "metadata that is a list": header_file({"__metadata__": [1], "w": GOOD}, b"0" * 8),
    "deep nesting": header_file(b"[" * 100_000),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").write_bytes(DAMAGE[kind])
    with pytest.raises(ArtifactError, match="expected a whole safetensors file, found damage"):
        TensorReader(tmp_path / "f")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.text(max_size=8), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers()
        ),
        max_size=6,
        unique_by=lambda item: item[0],
    ).filter(lambda items: all(name != "__metadata__" for name, *_ in items)),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_any_names_shapes_and_dtypes_come_back(tmp_path: Path, items: list, meta: dict[str, str]) -> None:
    tensors = {
        name: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed % 1000)).to(DTYPES[dtype])
        for name, dtype, shape, seed in items
    }
    write(tmp_path / "f", tensors, meta)
    with TensorReader(tmp_path / "f") as reader:
        assert reader.metadata == meta
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
        assert reader.specs.keys() == tensors.keys()


def weights_file(path: Path, **changes: str | None) -> Path:
    meta = metadata("int4", "ab" * 32, {"lm_head": 64}, {"layers.0": "owner"})
    write(
        path,
        {"lm_head.weight": torch.zeros((8, 36), dtype=torch.uint8)},
        {key: value for key, value in (meta | changes).items() if value is not None},
    )
    return path


def test_weights_files_say_what_they_are(tmp_path: Path) -> None:
    with QuantizedWeights(weights_file(tmp_path / "f")) as weights:
        assert (weights.kind, weights.linears, weights.strategies) == ("int4", {"lm_head": 64}, {"layers.0": "owner"})
        weights.check_hash("ab" * 32)
        with pytest.raises(
            StaleArtifactError, match=r"expected weights as in plan\.json, cdcdcdcdcdcd, found abababababab"
        ):
            weights.check_hash("cd" * 32)
        assert weights.take("lm_head.weight", Spec((8, 36), torch.uint8)).shape == (8, 36)
        with pytest.raises(ArtifactError, match=r"expected lm_head.weight as uint8 \[9, 36\], found uint8 \[8, 36\]"):
            weights.take("lm_head.weight", Spec((9, 36), torch.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pi2_version": "6"}, r"expected .* version 1 or 2 or 3 or 4 or 5, found torch_pi2.weights version 6"),
        ({"weights": "int3"}, r"expected weights int4 or int8 or float32 or bfloat16 or float16, found 'int3'"),
        ({"weights": "float32"}, r"linears: expected none, in a file of float32, found 1"),
        ({"linears": "{"}, r"linears: expected JSON, found damage \(Expecting property name"),
        ({"linears": '{"a": 0}'}, r"linears, a: expected a whole number, 1 or more, .*found 0"),
        ({"sites": '{"a": "magic"}'}, r"sites, a: expected owner or chain or lazy, found 'magic'"),
        ({"linears": '[["a", 1]]'}, r"linears: expected an object, found \[\['a', 1\]\]"),
    ],
)
def test_other_weights_files_are_refused(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        QuantizedWeights(weights_file(tmp_path / "f", **changes))
