"""Safetensors files of any size, written and read tensor by tensor within bounded memory.

Names, shapes and dtypes are known beforehand, so the writer writes the header first and tensors in any order; the file
gets its name when it is complete. The reader copies straight into the tensor's memory, without a mapping, whose pages
would count twice.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch

from torch_pi2.base.crc32c import BLOCK, block_checks, check_bytes, continue_crc32c, crc32c
from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import shown
from torch_pi2.base.files import claimed, writing
from torch_pi2.base.memory import MappedFile, new_tensor
from torch_pi2.base.progress import bar
from torch_pi2.base.reading import PIECE, ROOM_BYTES, OpenFile, parse
from torch_pi2.errors import ArtifactError

#: Names of dtypes in safetensors headers.
_DTYPES = """F64 float64, F32 float32, F16 float16, BF16 bfloat16, I64 int64, I32 int32, I16 int16, I8 int8, U8 uint8,
    BOOL bool, F8_E4M3 float8_e4m3fn, F8_E5M2 float8_e5m2, F8_E8M0 float8_e8m0fnu, U16 uint16, U32 uint32, U64 uint64,
    C64 complex64"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in map(str.split, _DTYPES.split(","))}
#: Dtypes of the library that are not read.
_OTHERS = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Alignment of the data, and of tensors as large as a page (see ``in_file_order``).
ALIGNMENT = 4096
#: Largest header that the safetensors library accepts.
_MAX_HEADER = 100_000_000
#: Bound on the numbers in a tensor, so that sizes in bytes fit into 63 bits.
_LARGEST = 1 << 60
_EDITED = " If you changed it on purpose, save it without the metadata checks and metadata_check."
_one_at_a_time = threading.RLock()
#: Most dimensions of a tensor; torch's limit is higher.
_MOST_AXES = 32


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> "Spec":
        return Spec(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to it writes to the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def in_file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Names, ordered by the largest power of two (a page at most) that divides their sizes, descending: safetensors
    allows no gaps, so matrices, whose sizes are whole pages in all but toy models, begin on a page.
    """
    return sorted(specs, key=lambda name: -math.gcd(specs[name].nbytes, ALIGNMENT) if specs[name].nbytes else 0)


def metadata_check(metadata: Mapping[str, str]) -> str:
    """CRC32C of ``NAME NUL VALUE NUL`` in order of names, 8 hexadecimal digits, without itself and ``checks``."""
    pairs = sorted((name, value) for name, value in metadata.items() if name not in ("checks", "metadata_check"))
    text = "".join(f"{name}\0{value}\0" for name, value in pairs).encode(errors="surrogatepass")
    return f"{continue_crc32c(0, text):08x}"


def tensor_check(name: str, spec: Spec, blocks: list[torch.Tensor]) -> str:
    """Checksum of a tensor, 8 hexadecimal digits: CRC32C of those of name, dtype and shape as text, and of blocks."""
    text = torch.frombuffer(bytearray(f"{name} {spec}".encode(errors="surrogatepass")), dtype=torch.uint8)
    parts = check_bytes(torch.cat([crc32c(text[None]), *blocks]))
    return f"{int(crc32c(parts[None])[0]):08x}"


def _with_checks(metadata: Mapping[str, str], checks: Mapping[str, str]) -> dict[str, str]:
    return {**metadata, "checks": json.dumps(dict(checks)), "metadata_check": metadata_check(metadata)}


def _checks_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Checksums of contiguous tensors by name."""
    blocks = {name: [block_checks(tensor.reshape(-1).view(torch.uint8))] for name, tensor in tensors.items()}
    return {name: tensor_check(name, Spec.of(tensor), blocks[name]) for name, tensor in tensors.items()}


def _header(specs: Mapping[str, Spec], order: Iterable[str], metadata: Mapping, checks: Mapping) -> dict[str, Any]:
    """The header of a file of ``specs`` in ``order``, with ``checks`` of tensors and one of the metadata."""
    header: dict[str, Any] = {"__metadata__": _with_checks(metadata, checks)}
    end = 0
    for name in order:
        start, end = end, end + specs[name].nbytes
        spec = specs[name]
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    return header


def _encoded(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def packed(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[bytes]:
    """The pieces of a safetensors file of tensors in memory, with checksums."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    order = in_file_order(specs)
    header = _encoded(_header(specs, order, metadata, _checks_of(tensors)))
    return [header, *(bytes(bytes_of(tensors[name])) for name in order)]


class TensorWriter:
    """Writes one safetensors file, a context manager; ``path`` appears when the block ends without an error.

    Args:
        specs: all tensors of the file. metadata: strings by name. order: names in file order (default:
            :func:`in_file_order`). checked: tensors with a checksum (default: all).
        progress: a bar on standard error if it is a terminal and writing takes over two seconds.
    """

    def __init__(
        self,
        path: str | Path,
        specs: Mapping[str, Spec],
        metadata: Mapping[str, str],
        *,
        progress: bool = False,
        order: Sequence[str] | None = None,
        checked: Iterable[str] | None = None,
    ) -> None:
        self.path, self.specs, self._metadata = Path(path), dict(specs), dict(metadata)
        self._claim = ExitStack()
        self._order = in_file_order(self.specs) if order is None else order
        self._checks = dict.fromkeys(self._order if checked is None else checked, "0" * 8)
        self._data, self._progress = len(self._encoded()), progress
        self._left = {name: spec.nbytes for name, spec in self.specs.items()}
        *starts, self._total = accumulate((self._left[name] for name in self._order), initial=0)
        self._start = dict(zip(self._order, starts))
        #: Checksums of blocks, of tensors that are written in whole blocks; others are read again at the end.
        self._blocks = {n: torch.zeros(-(-self.specs[n].nbytes // BLOCK), dtype=torch.int64) for n in self._checks}
        self._file = -1

    def _encoded(self) -> bytes:
        return _encoded(_header(self.specs, self._order, self._metadata, self._checks))

    def set_metadata(self, name: str, value: str) -> None:
        """Replace a value by one of the same length that was not known at the beginning."""
        assert len(value) == len(self._metadata[name])
        self._metadata[name] = value

    @property
    def file_bytes(self) -> int:
        return self._data + self._total

    def offset(self, name: str) -> int:
        """Offset of tensor ``name`` in the file."""
        return self._data + self._start[name]

    def __enter__(self) -> Self:
        try:
            with writing(self.path):
                self._temporary = self._claim.enter_context(claimed(self.path))
                self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except BaseException:
            self._discard()
            raise
        self._bar = bar(None, "write", self._progress, total=self._total, unit="B", unit_scale=True, delay=2)
        return self

    def write(self, name: str, tensor: torch.Tensor, *, row: int = 0) -> None:
        """Write ``tensor`` as ``name``, or as its rows from ``row`` on, with the declared dtype and row shape, once."""
        spec = self.specs[name]
        whole = tuple(tensor.shape) == spec.shape and row == 0
        rows = tensor.dim() > 0 and tuple(tensor.shape[1:]) == spec.shape[1:] and row + len(tensor) <= spec.shape[0]
        assert whole or rows, f"{name}, {spec}: {Spec.of(tensor)} at row {row}"
        assert tensor.dtype == spec.dtype
        per_row = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        self._put(name, tensor, row * per_row)

    def write_bytes(self, name: str, data: torch.Tensor, at: int) -> None:
        """Write ``data``, uint8 ``[n]``, as bytes of ``name`` from ``at`` on. Raises ArtifactError as :meth:`write`."""
        assert at + data.nbytes <= self.specs[name].nbytes
        self._put(name, data, at)

    def copy(self, name: str, source: str) -> None:
        """Copy tensor ``source``, which must be complete, to ``name``. Raises as :meth:`write`."""
        for at, data in self._pieces(source):
            self.write_bytes(name, data, at)

    def copy_from(self, file: Any, name: str) -> None:
        """Copy tensor ``name`` of ``file``, which has ``read_bytes`` of a :class:`TensorReader`."""
        size = self.specs[name].nbytes
        for at in range(0, size, PIECE):
            self.write_bytes(name, file.read_bytes(name, at, min(at + PIECE, size)), at)

    def _pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of tensor ``name``, which must be complete, uint8, and where they begin."""
        size = self.specs[name].nbytes
        for at in range(0, size, PIECE):
            data = torch.empty(min(PIECE, size - at), dtype=torch.uint8)
            got = os.preadv(self._file, [bytes_of(data)], self.offset(name) + at)
            assert got == len(data), f"{got} bytes of {name} at {at}"
            yield at, data

    def _put(self, name: str, tensor: torch.Tensor, at: int) -> None:
        data, end = bytes_of(tensor.contiguous()), at + tensor.nbytes
        with writing(self.path):
            self._pwrite(data, self.offset(name) + at)
        if at % BLOCK or (end % BLOCK and end != self.specs[name].nbytes):
            self._blocks.pop(name, None)
        elif name in self._blocks and data:
            self._blocks[name][at // BLOCK : -(-end // BLOCK)] = block_checks(torch.frombuffer(data, dtype=torch.uint8))
        self._left[name] -= tensor.nbytes
        assert self._left[name] >= 0, f"{name} written twice"
        self._bar.update(tensor.nbytes)

    def _pwrite(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done : done + PIECE], offset + done)

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        self._bar.close()
        missing = [name for name, left in self._left.items() if left]
        try:
            assert kind is not None or not missing, f"not or not wholly written: {', '.join(missing[:3])}"
            if kind is None:
                with writing(self.path):
                    self._complete()
        finally:
            self._discard()

    def _complete(self) -> None:
        for name in self._checks:
            known = self._blocks.pop(name, None)
            blocks = [block_checks(data) for _, data in self._pieces(name)] if known is None else [known]
            self._checks[name] = tensor_check(name, self.specs[name], blocks)
        self._pwrite(memoryview(self._encoded()), 0)
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        os.replace(self._temporary, self.path)

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._claim.close()


class TensorReader(OpenFile):
    """A safetensors file: its checked header, and its tensors one at a time, compared with their checksums when they
    are read, or first read in part. Close it, or use it as a context manager.

    Attributes:
        specs: shape and dtype of every tensor. metadata: strings by name, without checksums. checks: checksums by
            tensor; empty: the file was written by another tool or an earlier version.
    """

    whole, fix = "a whole safetensors file", "Copy it again, or make it again."
    #: Whether all tensors have checksums, if any has.
    all_checked = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "a safetensors file")
        with self.opening():
            self.specs, self._start, self.metadata = self._read_header()
            self.checks = self._read_checks()
            self._unverified = set(self.checks)

    def _pread(self, size: int, at: int) -> bytes:
        """``size`` bytes from ``at`` on, fewer only at the end of the file."""
        parts = []
        while size and (part := os.pread(self._file, size, at)):
            parts.append(part)
            size, at = size - len(part), at + len(part)
        return b"".join(parts)

    def _read_header(self) -> tuple[dict[str, Spec], dict[str, int], dict[str, str]]:
        size = os.fstat(self._file).st_size
        begin = self._pread(8, 0)
        if begin == b"version ":
            self._damaged("a pointer of Git LFS in its place", " Run git lfs pull there.")
        length = int.from_bytes(begin, "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            self._damaged(f"a header of {length} bytes in a file of {size}")
        header = parse(self._pread(length, 8), self.path, expected=self.whole, fix=self.fix, room=ROOM_BYTES + 2 * size)
        try:
            if not isinstance(header, dict):
                raise TypeError(f"the header is a {type(header).__name__}")
            metadata = header.pop("__metadata__", {})
            if not all(isinstance(s, str) for s in (*metadata.keys(), *metadata.values())):
                raise TypeError("metadata that is not text")
            for text in (*metadata.keys(), *metadata.values()):
                text.encode()  # raises for lone surrogates
            entries = {name: _entry(name, value) for name, value in header.items()}
        except NotImplementedError as error:
            fix = "Take the float checkpoint that it was made of."
            expected, found = f"dtypes among {', '.join(DTYPES)}", str(error)
            raise ArtifactError(str(self.path), expected=expected, found=found, fix=fix) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._damaged(f"{type(error).__name__}: {shown(str(error))}")
        end = 0
        for name, (spec, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
            if start != end or stop - start != spec.nbytes:
                self._damaged(f"{name}, {spec}, at bytes {start} to {stop} after {end}")
            end = stop
        if 8 + length + end != size:
            self._damaged(f"{size} bytes where the header says {8 + length + end}")
        specs = {name: spec for name, (spec, _, _) in entries.items()}
        return specs, {name: 8 + length + start for name, (_, start, _) in entries.items()}, metadata

    def _read_checks(self) -> dict[str, str]:
        said, check = (self.metadata.pop(name, None) for name in ("checks", "metadata_check"))
        if said is None and check is None:
            return {}
        checks = parse(said or "", f"{self.path}, checks", fix=self.fix)
        if (found := metadata_check(self.metadata)) != check:
            self._damaged(f"metadata has checksum {found}, not {str(check)[:16]}", _EDITED)
        if not isinstance(checks, dict) or (self.all_checked and checks.keys() != self.specs.keys()):
            self._damaged("tensors are not those of checks", _EDITED)
        return checks

    def compare(self, name: str, blocks: list[torch.Tensor]) -> None:
        """Raises ArtifactError: ``blocks``, checksums of tensor ``name`` as read, differ from those in the file."""
        found = tensor_check(name, self.specs[name], blocks)
        if found != self.checks[name]:
            self._damaged(f"{name} has checksum {found}, not {str(self.checks[name])[:16]}", _EDITED)
        self._unverified.discard(name)

    def verify(self, progress: bool = False) -> int:
        """Compare everything that has a checksum with it; returns the number of bytes."""
        total = sum(self.specs[name].nbytes for name in self.checks)
        with bar(None, "verify", progress, total=total, unit="B", unit_scale=True, delay=2) as shown:
            for name in self.checks:
                self.verify_tensor(name, shown.update)
        return total

    def verify_tensor(self, name: str, done: Callable[[int], object] = int) -> None:
        """Compare tensor ``name`` with its checksum, a piece at a time; ``done`` gets numbers of bytes."""
        size, blocks = self.specs[name].nbytes, []
        buffer = torch.empty(min(PIECE, size), dtype=torch.uint8)
        for at in range(0, size, PIECE):
            data = buffer[: min(PIECE, size - at)]
            self._fill(bytes_of(data), self._start[name] + at, name)
            blocks.append(block_checks(data))
            done(len(data))
        self.compare(name, blocks)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A copy of tensor ``name``, or of its rows ``[start, stop)``; large ones in huge pages."""
        spec = self.spec(name)
        shape = spec.shape if rows is None else (rows[1] - rows[0], *spec.shape[1:])
        tensor = new_tensor(shape, spec.dtype)
        self.read_into(name, tensor, row=0 if rows is None else rows[0])
        return tensor

    def mapped(self, name: str, *, whole: bool = False) -> torch.Tensor:
        """Tensor ``name`` in place, in the mapped :attr:`memory`; ``whole``: not only some rows will be used.

        Raises as :meth:`read`.
        """
        spec, at = self.spec(name), self._start[name]
        if not whole:  # where a huge page would be read for a row
            self.memory.use_huge_pages(False, at, spec.nbytes)
        tensor = self.memory.tensor(spec.shape, spec.dtype, at)
        if name in self._unverified and whole:
            self.compare(name, [block_checks(torch.frombuffer(bytes_of(tensor), dtype=torch.uint8))])
        elif name in self._unverified:
            self.verify_tensor(name)
        return tensor

    @cached_property
    def memory(self) -> MappedFile:
        """The mapped file. Raises ArtifactError: it cannot be mapped."""
        try:
            return MappedFile(self._file)
        except OSError as error:
            self._damaged(error)

    def spec(self, name: str) -> Spec:
        """Raises ArtifactError: there is no such tensor."""
        if name not in self.specs:
            expected, fix = f"a tensor {name}", "The file is of another model or another version; make it again."
            raise ArtifactError(str(self.path), expected=expected, found=f"{len(self.specs)} others", fix=fix)
        return self.specs[name]

    def read_into(self, name: str, tensor: torch.Tensor, *, row: int = 0) -> None:
        """Fill a contiguous ``tensor`` of the same dtype with ``name``, from its row ``row`` on."""
        spec = self.spec(name)
        per_row = spec.nbytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
        assert tensor.dtype == spec.dtype
        assert tensor.is_contiguous()
        assert row * per_row + tensor.nbytes <= spec.nbytes, f"{name}, {spec}: {Spec.of(tensor)} from row {row} on"
        self._read(name, bytes_of(tensor), row * per_row)

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes ``[start, stop)`` of tensor ``name`` as stored, uint8."""
        data = torch.empty(stop - start, dtype=torch.uint8)
        self._read(name, bytes_of(data), start)
        return data

    def offset(self, name: str) -> int:
        """Offset of tensor ``name`` in the file."""
        return self._start[name]

    def _read(self, name: str, data: memoryview, at: int) -> None:
        whole = at == 0 and len(data) == self.specs[name].nbytes
        if name in self._unverified and not whole:
            self.verify_tensor(name)
        blocks = []
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            self._fill(piece, self._start[name] + at + start, name)
            if name in self._unverified:
                blocks.append(block_checks(torch.frombuffer(piece, dtype=torch.uint8)))
        if name in self._unverified:
            self.compare(name, blocks)


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Copies of all tensors, and the metadata, of a safetensors file. Raises ArtifactError."""
    with TensorReader(path) as file:
        return {name: file.read(name) for name in file.specs}, file.metadata


@contextmanager
def adding_checks(folder: Path) -> Iterator[None]:
    """Checksums in the safetensors files that other libraries write into ``folder`` within the block.

    They are metadata that ``save_file`` gets in this thread; files that were written otherwise are written again.
    """
    from safetensors import torch as library

    owner = threading.get_ident()
    with _one_at_a_time:
        usual = library.save_file

        def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
            if threading.get_ident() == owner:
                on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                metadata = _with_checks(metadata or {}, _checks_of(on_cpu))
            usual(tensors, filename, metadata)

        callers: Any = [(library, "save_file"), (sys.modules.get("transformers.modeling_utils"), "safe_save_file")]
        callers = [(module, name) for module, name in callers if getattr(module, name, None) is usual]
        for module, name in callers:
            setattr(module, name, save_file)
        try:
            yield
        finally:
            for module, name in callers:
                setattr(module, name, usual)
    for path in folder.glob("*.safetensors"):
        with TensorReader(path) as source:
            if not source.checks:
                order = sorted(source.specs, key=source.offset)
                with TensorWriter(path, source.specs, source.metadata, order=order) as out:
                    for name in order:
                        out.copy_from(source, name)


@contextmanager
def verifying(folder: Path) -> Iterator[None]:
    """Compares ``model*.safetensors`` with checksums while the block reads them otherwise. Raises ArtifactError."""
    with ExitStack() as stack:
        readers = [stack.enter_context(TensorReader(path)) for path in folder.glob("model*.safetensors")]
        pool = stack.enter_context(ThreadPoolExecutor(1))
        jobs = [pool.submit(reader.verify) for reader in readers if reader.checks]
        yield
        for job in jobs:
            job.result()


def _entry(name: str, value: Any) -> tuple[Spec, int, int]:
    """One entry of a header. Raises KeyError, TypeError or ValueError: invalid."""
    shape, offsets = value["shape"], value["data_offsets"]
    numbers = [*shape, *offsets]
    sizes = [n for n in numbers if type(n) is int and n >= 0]
    good = len(offsets) == 2 and len(shape) <= _MOST_AXES and len(sizes) == len(numbers)
    # without zeros: torch cannot make a tensor of (0, 2**60, 2**60) either
    if not good or math.prod(n for n in shape if n) >= _LARGEST:
        raise ValueError(f"shape {shown(shape)} or offsets {shown(offsets)} of {name}")
    if value["dtype"] in _OTHERS:
        raise NotImplementedError(f"{value['dtype']} in {name}")
    if value["dtype"] not in DTYPES:
        raise ValueError(f"dtype {value['dtype']!r} of {name}")
    return Spec(tuple(shape), DTYPES[value["dtype"]]), offsets[0], offsets[1]
