"""GGUF files, single or split: their metadata, and the stored rows of their tensors.

Implements https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little endian, versions 2 and 3. Files are
untrusted: every count is compared with the remaining bytes, and every tensor with the file's size, before allocating.
"""

import math
import os
import re
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_pi2.base.fields import shown
from torch_pi2.base.reading import OpenFile
from torch_pi2.base.tensorfile import bytes_of
from torch_pi2.base.units import size as shown_size
from torch_pi2.errors import ArtifactError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
#: The magic of PowerInfer's files, which are otherwise GGUF.
_POWERINFER = b"PWRI"


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its suffix or, as downloads may have none, its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open(path, "rb") if path.is_file() else nullcontext() as file:  # opening a FIFO would block
            return file is not None and file.read(len(MAGIC)) in (MAGIC, _POWERINFER)
    except OSError:
        return False


@dataclass(frozen=True)
class TensorType:
    """A storage type with ``block`` numbers in ``block_bytes``."""

    name: str
    block: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.block_bytes


#: Code in the file -> type. (Codes that are missing were withdrawn.)
_TABLE = """0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 10 Q2_K 256 84,
    11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 16 IQ2_XXS 256 66, 17 IQ2_XS 256 74,
    18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136,
    24 I8 1 1, 25 I16 1 2, 26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M 256 56, 30 BF16 1 2, 34 TQ1_0 256 54,
    35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36"""
_FIELDS = (row.split() for row in _TABLE.split(","))
TYPES = {int(code): TensorType(name, int(block), int(size)) for code, name, block, size in _FIELDS}

#: Type code of a metadata value -> struct format (strings and arrays have none).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: More than any model has, to bound loops over a hostile header.
_MOST_HEADER = 1 << 28
_MOST_TENSORS = 1 << 17
_MOST_VALUES = 1 << 21
_MOST_NAME = 1 << 16
_MOST_DIMENSIONS = 4
_LARGEST = 1 << 60
#: Bytes per read of the header.
_PIECE = 1 << 20
_PAGE = 4096


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. ``shape``: rows first, as in torch (files have columns first); ``start``: its offset in ``file``."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int
    file: "GgufFile"

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.columns)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GgufFile(OpenFile):
    """An open GGUF file with its checked header. Close it, or use it as a context manager. ``magic``: its first bytes.
    ``version``: 2 or 3. ``metadata``: name -> number, bool, text, or a list of these; texts in lists are bytes, as
    tokens need not be UTF-8. ``tensors``: name -> :class:`GgufTensor`.
    """

    whole, fix = "a whole GGUF file", "Get it again from where it comes from."

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "a GGUF file", "Check the file's name.")
        with self.opening():
            self.size = os.fstat(self._file).st_size
            self._at, self._piece_at, self._piece = 0, 0, b""
            self.metadata: dict[str, Any] = {}
            self.tensors: dict[str, GgufTensor] = {}
            self._read_header()

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > self.size:
            self._damaged(f"it ends after {self.size} bytes, within its header")
        if end > _MOST_HEADER:
            self._damaged(f"a header of more than {shown_size(_MOST_HEADER)}")
        begin = self._at - self._piece_at
        if begin + size > len(self._piece):
            self._piece_at, begin = self._at, 0
            self._piece = os.pread(self._file, max(size, _PIECE), self._at)
            if len(self._piece) < size:
                self._damaged("it became shorter while it was read")
        self._at = end
        return self._piece[begin : begin + size]

    def _scalar(self, kind: int) -> Any:
        layout = "<" + _SCALARS[kind]
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _u32(self) -> int:
        return int(self._scalar(4))

    def _u64(self) -> int:
        return int(self._scalar(10))

    def _length(self, what: str, each: int) -> int:
        """A count of following items of at least ``each`` bytes."""
        count = self._u64()
        if count * each > self.size - self._at:
            self._damaged(f"{count} {what} in the {self.size - self._at} bytes that are left")
        return count

    def _bytes(self, what: str) -> bytes:
        return self._take(self._length(f"bytes of {what}", 1))

    def _texts(self, count: int, what: str) -> list[bytes]:
        """Parsed in the current piece where possible, since vocabularies are large."""
        texts, size_at = [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            piece, begin = self._piece, self._at - self._piece_at
            if begin + 8 <= len(piece) and (end := begin + 8 + size_at(piece, begin)[0]) <= len(piece):
                texts.append(piece[begin + 8 : end])
                self._at += end - begin
            else:
                texts.append(self._bytes(what))
        return texts

    def _text(self, what: str, most: int = _MOST_HEADER) -> str:
        text = self._bytes(what)
        if len(text) > most:
            self._damaged(f"{what} of {len(text)} bytes")
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._damaged(f"{what} that is not UTF-8")

    def _read_header(self) -> None:
        self.magic = self._take(min(4, self.size))
        if self.magic not in (MAGIC, _POWERINFER):
            pointer = self.magic == b"vers"  # "version https://git-lfs..."
            found = "a pointer of Git LFS in its place" if pointer else f"one that begins with {self.magic!r}"
            fix = "Run git lfs pull there." if pointer else "Check the file's name."
            raise ArtifactError(str(self.path), expected="a GGUF file", found=found, fix=fix)
        self.version = self._u32()
        if self.version not in (2, 3):
            expected, fix = "GGUF version 2 or 3, little endian", "Convert the model again with a current llama.cpp."
            raise ArtifactError(str(self.path), expected=expected, found=f"version {self.version}", fix=fix)
        tensors = self._length("tensors", 24)
        if tensors > _MOST_TENSORS:
            self._damaged(f"{tensors} tensors")
        for _ in range(self._length("metadata values", 13)):
            name = self._text("a metadata name", _MOST_NAME)
            if name in self.metadata:
                self._damaged(f"{shown(name)} occurs twice")
            self.metadata[name] = self._value(name)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            self._damaged(f"general.alignment {shown(alignment)}")
        tensors_found = [self._tensor() for _ in range(tensors)]
        data = -(-self._at // alignment) * alignment
        self._place(tensors_found, data, alignment)
        self._piece = b""

    def _value(self, name: str) -> Any:
        kind = self._u32()
        if kind in _SCALARS:
            return self._scalar(kind)
        if kind == _STRING:
            return self._text(f"the text of {shown(name)}")
        if kind != _ARRAY:
            self._damaged(f"{shown(name)} of an unknown kind {kind}")
        kind = self._u32()
        if kind not in (*_SCALARS, _STRING):
            self._damaged(f"{shown(name)}, an array of kind {kind}")
        layout = _SCALARS.get(kind, "Q")
        count = self._length(f"values of {shown(name)}", struct.calcsize("<" + layout))
        if count > _MOST_VALUES:
            self._damaged(f"{shown(name)} of {count} values")
        if kind == _STRING:
            return self._texts(count, f"a text of {shown(name)}")
        layout = f"<{count}{layout}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._text("a tensor's name", _MOST_NAME)
        dimensions = self._u32()
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            self._damaged(f"tensor {shown(name)} of {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        code, offset = self._u32(), self._u64()
        if code not in TYPES:
            fix = "Quantise the model to one of these types."
            if code == 36:
                fix = "It is I2_S, which BitNet's own engine reads; load the bfloat16 checkpoint beside it."
            expected = f"one of {', '.join(one.name for one in TYPES.values())}"
            found = f"type {code}"
            raise ArtifactError(f"tensor {shown(name)} of {self.path}", expected=expected, found=found, fix=fix)
        of = TYPES[code]
        if not all(shape) or math.prod(shape) >= _LARGEST or shape[-1] % of.block:
            self._damaged(f"tensor {shown(name)} of {list(shape)} {of.name}")
        return name, shape, of, offset

    def _place(self, found: list[tuple[str, tuple[int, ...], TensorType, int]], data: int, alignment: int) -> None:
        """Check that tensors follow each other without overlap."""
        end = 0
        for name, shape, of, offset in sorted(found, key=lambda one: one[3]):
            tensor = GgufTensor(name, shape, of, data + offset, self)
            if name in self.tensors:
                self._damaged(f"tensor {shown(name)} occurs twice")
            if offset % alignment or offset < end or tensor.start + tensor.nbytes > self.size:
                what = f"tensor {shown(name)}, {tensor.nbytes} bytes"
                self._damaged(f"{what}, at {offset} after {end}, in a file of {self.size}")
            end = offset + tensor.nbytes
            self.tensors[name] = tensor

    def tensor(self, name: str) -> GgufTensor:
        """Raises ArtifactError: there is no such tensor."""
        if name not in self.tensors:
            fix = "The file is not whole, or of a model that is not what its metadata says."
            expected = f"a tensor {name}"
            raise ArtifactError(str(self.path), expected=expected, found=f"{len(self.tensors)} others", fix=fix)
        return self.tensors[name]

    def ends_of(self, name: str) -> bytes:
        """The first and last page of a tensor, to tell files apart. Raises ArtifactError."""
        tensor = self.tensor(name)
        size = min(tensor.nbytes, _PAGE)
        found = bytearray(2 * size)
        tensor.file._fill(memoryview(found)[:size], tensor.start, name)
        tensor.file._fill(memoryview(found)[size:], tensor.start + tensor.nbytes - size, name)
        return bytes(found)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)`` of a tensor as stored: uint8 ``[rows, row bytes]``. Raises ArtifactError."""
        tensor = self.tensor(name)
        rows = torch.empty((stop - start, tensor.row_bytes), dtype=torch.uint8)
        tensor.file._fill(bytes_of(rows), tensor.start + start * tensor.row_bytes, name)
        return rows


_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL | re.IGNORECASE)
#: Metadata that llama.cpp's ``gguf-split`` adds.
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
#: File names have five digits for the part number.
_MOST_PARTS = 99_999


def gguf_in(path: str | Path) -> Path | None:
    """``path`` if it is a GGUF file; the (first) one in folder ``path``, without another checkpoint there; or None."""
    path = Path(path)
    if not path.is_dir():
        return path if is_gguf(path) else None
    found: dict[str, Path] = {}
    for file in [] if (path / "config.json").exists() else sorted(path.glob("*")):
        if file.suffix.lower() == SUFFIX and file.is_file():
            part = _NAME.fullmatch(file.name)
            found.setdefault(part["stem"] if part else file.name, file)
    if len(found) > 1:
        names = [file.name for file in found.values()]
        more = f" and {len(names) - 3} others" if len(names) > 3 else ""
        fix = "Name the file that is meant."
        raise ArtifactError(str(path), expected="one GGUF model", found=", ".join(names[:3]) + more, fix=fix)
    return next(iter(found.values()), None)


class GgufModel(GgufFile):
    """The model of a GGUF file, including all parts if it is split (``paths``, in order): the first part's ``path``,
    ``version``, ``size`` and ``metadata``, and the ``tensors`` of all. Raises ArtifactError: as :class:`GgufFile`; or a
    part is missing, misnamed, or of another model (its metadata differ, or it lacks the missing tensors).
    """

    def __init__(self, path: str | Path) -> None:
        self._others: list[GgufFile] = []
        super().__init__(path)
        with self.opening():
            self.paths = [self.path]
            if self.metadata.get(_COUNT, 1) != 1:
                self._join()

    def close(self) -> None:
        for part in self._others:
            part.close()
        super().close()

    def _join(self) -> None:
        self.paths = self._names()
        mine = self.metadata[_NUMBER]
        parts = [self if number == mine else self._open(path, number) for number, path in enumerate(self.paths)]
        first, tensors = parts[0], dict[str, GgufTensor]()
        for path, part in zip(self.paths, parts, strict=True):
            self._check_same(path, part, first)
            if twice := next((name for name in part.tensors if name in tensors), None):
                self._refuse(path, "tensors that no other part has", f"{shown(twice)}, which another has as well")
            tensors |= part.tensors
        wanted = first.metadata.get(_TENSORS)
        if wanted != len(tensors):
            self._refuse(self.paths[0], f"parts of {len(tensors)} tensors, as they are", f"{_TENSORS} {shown(wanted)}")
        self.path, self.version, self.size, self.metadata = self.paths[0], first.version, first.size, first.metadata
        self.tensors = tensors

    def _names(self) -> list[Path]:
        count, found = self.metadata[_COUNT], _NAME.fullmatch(self.path.name)
        if type(count) is not int or not 1 <= count <= _MOST_PARTS:
            self._damaged(f"{_COUNT} {shown(count)}")
        number = self.metadata.get(_NUMBER)
        if type(number) is not int or not 0 <= number < count:
            self._damaged(f"{_NUMBER} {shown(number)} of {count}")
        if found is None or (int(found["number"]), int(found["count"])) != (number + 1, count):
            name = f"NAME-{number + 1:05}-of-{count:05}.gguf"
            expected = f"the name of part {number + 1} of {count}, {name}, by which the others are found"
            self._refuse(self.path, expected, self.path.name)
        stem, suffix = found["stem"], found["suffix"]
        return [self.path.with_name(f"{stem}-{one:05}-of-{count:05}{suffix}") for one in range(1, count + 1)]

    def _open(self, path: Path, number: int) -> GgufFile:
        expected = f"part {number + 1} of {len(self.paths)}"
        if not path.exists():
            self._refuse(path, f"{expected} of a model, beside the others", "nothing")
        part = GgufFile(path)
        self._others.append(part)
        found = part.metadata.get(_NUMBER)
        if type(found) is not int:
            self._refuse(path, expected, "a file that is none")
        if found != number:
            self._refuse(path, expected, f"part {found + 1}")
        return part

    def _check_same(self, path: Path, part: GgufFile, first: GgufFile) -> None:
        """Raises ArtifactError: metadata that both parts have differ."""
        expected = f"a part of the model of {self.paths[0].name}"
        for key in (_COUNT, _TENSORS):
            if key not in part.metadata:
                self._refuse(path, expected, f"a file without {key}")
        for key, value in part.metadata.items():
            wanted = first.metadata.get(key, value)
            if key not in (_NUMBER, "general.alignment") and wanted != value:
                self._refuse(path, expected, f"{shown(key)} {shown(value)} where that has {shown(wanted)}")

    def _refuse(self, path: Path, expected: str, found: str) -> NoReturn:
        fix = "Put all parts of one model into one folder, by their names."
        raise ArtifactError(str(path), expected=expected, found=found, fix=fix)
