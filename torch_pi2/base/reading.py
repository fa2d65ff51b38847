"""Reading untrusted files: only regular files are opened, and JSON is parsed within bounds of depth and memory."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

from torch_pi2.errors import ArtifactError

#: Largest nesting depth. Our files have some 6; Python's recursion limit is about 1000.
MOST_DEPTH = 64
#: Largest text.
MOST_BYTES = 1 << 28
#: Memory that parsing may take, in addition to a multiple of the text's size: that of a vocabulary with merges is 8.
ROOM_BYTES = 64 << 20
_TIMES, _MOST_MORE = 12, 1 << 30


#: Bytes read or written at a time, a multiple of checksummed blocks: enough for full bandwidth, and a smooth bar.
PIECE = 8 << 20


class Closing:
    """A context manager that closes itself."""

    def close(self) -> None:
        raise NotImplementedError

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Close it if the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(path: str | Path, expected: str = "a file", fix: str = "Check the folder's name.") -> int:
    """A descriptor of the regular file ``path``, for reading. Raises ArtifactError at once for anything else."""
    try:
        # opening a pipe would block
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = "nothing" if isinstance(error, FileNotFoundError) else str(getattr(error, "strerror", None) or error)
        found = "a link to nothing" if found == "nothing" and os.path.islink(path) else found
        raise ArtifactError(str(path), expected=expected, found=found, fix=fix) from error
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise ArtifactError(str(path), expected=expected, found=found, fix=fix)
    return file


def read_bytes(path: str | Path, expected: str = "a file", fix: str = "Check the folder's name.") -> bytes:
    """The content of a regular file of at most ``MOST_BYTES``. Raises ArtifactError."""
    with open(open_file(path, expected, fix), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            expected = f"{expected} of at most {MOST_BYTES} bytes"
            raise ArtifactError(str(path), expected=expected, found=f"{size}", fix=fix)
        try:
            return file.read()
        except OSError as error:
            found = str(error.strerror or error)
            raise ArtifactError(str(path), expected=expected, found=found, fix=fix) from error


class OpenFile(Closing):
    """A regular file, open for reading. An ArtifactError expects what it is as a ``whole``, and advises the ``fix``."""

    whole: str
    fix: str

    def __init__(self, path: str | Path, expected: str, fix: str = "Check the folder's name.") -> None:
        self.path, self._file = Path(path), open_file(path, expected, fix)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _damaged(self, reason: str | OSError, more: str = "") -> NoReturn:
        reason = str(reason.strerror or reason) if isinstance(reason, OSError) else reason
        raise ArtifactError(str(self.path), expected=self.whole, found=f"damage ({reason})", fix=self.fix + more)

    @contextmanager
    def opening(self) -> Iterator[None]:
        with super().opening():
            try:
                yield
            except OSError as error:
                self._damaged(error)

    def _fill(self, into: memoryview, at: int, name: str) -> None:
        """Fill ``into`` with bytes of the file from ``at`` on, which belong to ``name``."""
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._file, [into[done : done + PIECE]], at + done)
            except OSError as error:
                self._damaged(f"{name}: {error.strerror or error}")
            if not got:
                self._damaged(f"the file ends at byte {at + done}, within {name}")
            done += got


def parse(
    text: str | bytes,
    where: str | Path,
    *,
    expected: str = "JSON",
    fix: str = "Make the artefact again.",
    room: int | None = None,
    unique: bool = True,
) -> Any:
    """The value of a JSON text read from ``where``: the only JSON parser of the package.

    Args:
        room: memory in bytes for text and value together (default: 64 MiB and 12 times the text, at most 1 GiB).
        unique: repeated names in an object are damage; otherwise the last counts, as usual in Python.

    Raises:
        ArtifactError: not UTF-8, not JSON, nested too deeply, numbers with thousands of digits, or many small values
            that would take many times the text's size.
    """
    try:
        needed = _bytes_of(text)
        if needed > (ROOM_BYTES + min(_TIMES * len(text), _MOST_MORE) if room is None else room):
            raise ValueError(f"values that take {needed} bytes in a text of {len(text)}")
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_without_repeats if unique else None)
        if not _is_flat(value):
            raise RecursionError
    except (RecursionError, ValueError, MemoryError) as error:  # JSONDecodeError, UnicodeDecodeError are ValueErrors
        deep = f"lists or objects more than {MOST_DEPTH} deep"
        reason = deep if isinstance(error, RecursionError) else str(error) or "more values than fit in memory"
        if reason.startswith("Exceeds the limit"):
            reason = "a whole number of thousands of digits"
        raise ArtifactError(str(where), expected=expected, found=f"damage ({reason})", fix=fix) from error
    return value


def _bytes_of(text: str | bytes) -> int:
    """Estimated memory of a text and its parsed value, rather too high unless all names are different."""

    def count(character: str) -> int:
        return text.count(character) if isinstance(text, str) else text.count(character.encode())

    objects, lists, named = count("{"), count("["), count(":")
    listed = max(0, count(",") - named + objects)
    values = named + listed
    single = max(0, values - objects - lists)
    wide = max(0, named - 32 * objects)  # names of large objects occur once
    of_values = 16 * values + 72 * lists + 64 * objects + 120 * min(objects, named) + 48 * single + 96 * wide
    return (1 if text.isascii() else 4) * len(text) + of_values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _is_flat(value: Any) -> bool:
    """Whether lists and objects are at most ``MOST_DEPTH`` deep."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [v for items in inside for v in items if isinstance(v, dict | list)]
        if not level:
            return True
    return False
