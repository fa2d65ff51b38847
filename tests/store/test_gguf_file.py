"""What is refused of a GGUF file, and in how much memory."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from torch_pi2.errors import ArtifactError
from torch_pi2.store.gguf import TYPES, GgufFile

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_the_other_beginning(tmp_path: Path) -> None:
    """PowerInfer's files."""
    data = header(count=1, tensors=tensor())
    with GgufFile(written(tmp_path / "a.gguf", b"PWRI" + data[4:])) as file:
        assert list(file.tensors) == ["w"]


def header(*, kv: bytes = b"", kvs: int = 0, tensors: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, kvs) + kv + tensors


def tensor(name: str = "w", shape: tuple[int, ...] = (32,), code: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", code, offset)


def written(path: Path, data: bytes, room: int = 4096) -> Path:
    path.write_bytes(data + bytes(room))
    return path


def test_what_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e6)
    writer.add_bool("yes", True)
    writer.add_token_list(["a", "bc"])
    data = np.arange(6 * 32, dtype=np.float32).reshape(2, 3, 32)
    writer.add_tensor("w", data)
    rows = gguf.quants.quantize(data[0], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, step)()
    writer.close()
    with GgufFile(path) as file:
        assert {"general.architecture": "llama", "llama.block_count": 3, "yes": True}.items() <= file.metadata.items()
        assert file.metadata["tokenizer.ggml.tokens"] == [b"a", b"bc"]
        assert {name: one.shape for name, one in file.tensors.items()} == {"w": (2, 3, 32), "q": (3, 32)}
        assert file.read_rows("w", 4, 6).view(torch.float32).tolist() == data[1, 1:].tolist()
        assert (file.read_rows("q", 1, 3).numpy() == rows[1:]).all()


def test_types_are_those_of_the_package() -> None:
    known = {one.value: (one.name, *gguf.GGML_QUANT_SIZES[one]) for one in gguf.GGMLQuantizationType}
    assert {code: (one.name, one.block, one.block_bytes) for code, one in TYPES.items()}.items() <= known.items()


def kv(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ALIGNED = "general.alignment"
#: What is wrong -> the file, and a part of the message.
WRONG = {
    "empty": (b"", "begins with"),
    "another magic": (b"GGML" + bytes(100), "begins with b'GGML'"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a pointer of Git LFS in its place. Run git lfs pull",
    ),
    "big endian": (b"GGUF\0\0\0\3" + bytes(100), "version 50331648"),
    "version 1": (header(version=1), "version 1"),
    "more tensors than bytes": (header(count=1 << 40), "tensors in the"),
    "many tensors": (header(count=1 << 18) + bytes(24 << 18), "262144 tensors"),
    "more values than bytes": (header(kvs=1 << 60), "metadata values in the"),
    "a long name": (header(kvs=1, kv=struct.pack("<Q", 1 << 62)), "bytes of a metadata name in the"),
    "a name of no UTF-8": (header(kvs=1, kv=struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "a name twice": (header(kvs=2, kv=2 * kv("a", 0, b"\1")), "'a' occurs twice"),
    "a kind of value": (header(kvs=1, kv=kv("a", 13, b"")), "'a' of an unknown kind 13"),
    "a kind of array": (header(kvs=1, kv=kv("a", 9, struct.pack("<IQ", 9, 3))), "an array of kind 9"),
    "a long array": (header(kvs=1, kv=kv("a", 9, struct.pack("<IQ", 10, 1 << 61))), "values of 'a' in the"),
    "many texts": (header(kvs=1, kv=kv("a", 9, struct.pack("<IQ", 8, 1 << 50))), "values of 'a' in the"),
    "a long text in an array": (
        header(kvs=1, kv=kv("a", 9, struct.pack("<IQQ", 8, 1, 1 << 63))),
        "9223372036854775808 bytes of a text of 'a' in the",
    ),
    "alignment of another kind": (header(kvs=1, kv=kv(ALIGNED, 8, text("32"))), "general.alignment '32'"),
    "alignment 0": (header(kvs=1, kv=kv(ALIGNED, 4, bytes(4))), "general.alignment 0"),
    "alignment 24": (header(kvs=1, kv=kv(ALIGNED, 4, struct.pack("<I", 24))), "general.alignment 24"),
    "alignment 2^31": (header(kvs=1, kv=kv(ALIGNED, 4, struct.pack("<I", 1 << 31))), "general.alignment 2147483648"),
    "alignment true": (header(kvs=1, kv=kv(ALIGNED, 7, b"\1")), "general.alignment True"),
    "no dimensions": (header(count=1, tensors=tensor(shape=())), "of 0 dimensions"),
    "five dimensions": (header(count=1, tensors=tensor(shape=(1, 1, 1, 1, 1))), "of 5 dimensions"),
    "a dimension of 0": (header(count=1, tensors=tensor(shape=(0,))), "[0] F32"),
    "a product that wraps": (header(count=1, tensors=tensor(shape=(1 << 33, 1 << 33))), "F32"),
    "a part of a block": (header(count=1, tensors=tensor(shape=(40,), code=2)), "[40] Q4_0"),
    "an unknown type": (header(count=1, tensors=tensor(code=4)), "type 4"),
    "BitNet's own type": (header(count=1, tensors=tensor(code=36)), "found type 36. It is I2_S"),
    "a tensor beyond the end": (header(count=1, tensors=tensor(shape=(1 << 20,))), "in a file of"),
    "an offset beyond the end": (header(count=1, tensors=tensor(offset=1 << 62)), "in a file of"),
    "an offset between": (header(count=1, tensors=tensor(offset=4)), "at 4 after 0"),
    "a tensor in another": (
        header(count=2, tensors=tensor("a", (64,)) + tensor("b", (64,), offset=32)),
        "'b', 256 bytes, at 32 after 256",
    ),
    "a tensor twice": (header(count=2, tensors=2 * tensor()), "'w' occurs twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(tmp_path: Path, case: str) -> None:
    data, message = WRONG[case]
    path = written(tmp_path / "a.gguf", data, room=0 if case == "empty" else 4096)
    with pytest.raises(ArtifactError) as error:
        GgufFile(path)
    assert message in str(error.value)


def test_every_length_is_refused(tmp_path: Path) -> None:
    """A file that ends anywhere within its header or its data."""
    whole = header(
        kvs=2,
        kv=kv("general.architecture", 8, text("llama")) + kv("t", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("")),
        count=1,
        tensors=tensor(),
    )
    data = -(-len(whole) // 32) * 32
    whole = whole + bytes(data - len(whole) + 128)
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    with GgufFile(path) as file:
        assert file.tensors["w"].nbytes == 128
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ArtifactError):
            GgufFile(path)


def test_a_hostile_header_takes_little_memory(tmp_path: Path) -> None:
    """Four million texts of nothing, and a count that nothing follows."""
    count = 1 << 22
    path = written(tmp_path / "a.gguf", header(kvs=1, kv=kv("a", 9, struct.pack("<IQ", 8, count)), count=1))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 8 * count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtifactError):
        GgufFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, found in (
        (tmp_path, "a folder"),
        (tmp_path / "none.gguf", "nothing"),
        (Path("/dev/null"), "a pipe or a device"),
    ):
        with pytest.raises(ArtifactError, match=f"expected a GGUF file, found {found}"):
            GgufFile(path)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", header(count=1, tensors=tensor(shape=(32, 8))))
    with GgufFile(path) as file:
        path.open("r+b").truncate(300)
        with pytest.raises(ArtifactError, match="the file ends at byte 300, within w"):
            file.read_rows("w", 0, 8)
