"""Files written completely or not at all, by one process at a time, and read back with helpful errors.

While ``NAME`` is written, its new content is ``.NAME.partial`` beside it, and ``.NAME.lock`` is locked. While a folder
is replaced, the earlier one is ``.NAME.old``. A killed process leaves these; the next one that writes ``NAME`` takes
the lock and removes the rest.
"""

import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.crc32c import continue_crc32c
from torch_pi2.base.fields import shown
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, check_made_from

Tensors = Mapping[str, torch.Tensor]

#: Seconds to wait for another process that writes the same file; folders do not wait.
_PATIENCE_S = 10.0
#: Names of what a process that was killed leaves in a folder whose files it writes.
_LEFT = re.compile(r"\..+\.(partial|lock)")
_STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


_FIX_CACHE = "Set XDG_CACHE_HOME to a folder that you may write to."


def cache_folder() -> Path:
    """The folder for files kept between runs: in ``$XDG_CACHE_HOME`` or ``~/.cache``. Raises ArtifactError: no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError as error:
        expected, found = "a home directory, or XDG_CACHE_HOME", "no HOME, and a user without an entry in /etc/passwd"
        raise ArtifactError("folder for caches", expected=expected, found=found, fix=_FIX_CACHE) from error
    return Path(base) / "torch_pi2"


def atomic_write(path: str | Path, data: bytes | str | Iterable[bytes]) -> None:
    """Write ``data``, or its pieces, to ``path``. Raises ArtifactError if that fails.

    A regular file, or the target of a link, is replaced atomically: temporary file, fsync, rename. Devices and pipes
    are written directly; ``-`` is standard output.
    """
    whole = data.encode() if isinstance(data, str) else data
    pieces = [whole] if isinstance(whole, bytes) else whole
    with writing(Path(path)):
        target = to_replace(path)
        if target is None:
            _write_to(path, pieces)
            return
        with claimed(target, patience_s=_PATIENCE_S) as temporary:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)


def to_replace(path: str | Path) -> Path | None:
    """The regular file that ``path`` is or will be, with links resolved; None: a device or pipe."""
    if is_standard_output(path):
        return None
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "the name of a folder")
    open_file = re.match(r"/dev/(fd/|std)|/proc/[^/]+/fd/", os.path.abspath(path)) is not None
    return Path(os.path.realpath(path)) if stat.S_ISREG(mode) and not open_file else None


def is_standard_output(path: str | Path) -> bool:
    """Whether ``path`` is standard output, where nothing else may be printed then."""
    return str(path) in _STANDARD_OUTPUT


def _write_to(path: str | Path, pieces: Iterable[bytes]) -> None:
    try:
        if to_standard_output := is_standard_output(path):
            if sys.__stdout__ is None:  # closed; its descriptor may be another file's by now
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if sys.stdout is not None:
                sys.stdout.flush()
        # append: /dev/fd/3 may be a file
        with open(os.dup(1) if to_standard_output else path, "wb" if to_standard_output else "ab") as file:
            file.writelines(pieces)
    except OSError as error:
        what = f"writing {'standard output' if str(path) == '-' else path}"
        expected, fix = "a device or pipe that takes all of it", "Part of it may have been written; choose a file."
        raise ArtifactError(what, expected=expected, found=f"{error.strerror or error}", fix=fix) from error


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Check that a file, or a folder, can be written, before long work. Raises ArtifactError."""
    with writing(path):
        target = path if folder else to_replace(path)
        if target is None:
            return  # a device or a pipe
        parent = target if folder else target.parent
        while not parent.exists():
            parent = parent.parent
        tempfile.TemporaryFile(dir=parent).close()


def not_written(path: Path, error: OSError) -> ArtifactError:
    """The error for a ``path`` that could not be written, with nothing half-written left."""
    try:
        cached = cache_folder() in path.parents
    except ArtifactError:
        cached = False
    other = _FIX_CACHE[:-1] if cached else "Choose another output folder"
    fix = f"{other} or free some space; nothing was left half-written."
    expected, found = "a folder that can be written", f"{error.strerror or error}"
    return ArtifactError(f"writing {path}", expected=expected, found=found, fix=fix)


@contextmanager
def claimed(target: Path, *, patience_s: float = 0.0) -> Iterator[Path]:
    """A free path beside ``target`` for new content, to be renamed at the end, else removed; for one process at a
    time. Raises ArtifactError: another process writes for longer than ``patience_s``. OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (target.with_name(f".{target.name}.{end}") for end in ("partial", "old"))
    with locked(target, patience_s):
        if old.is_dir() and not os.path.lexists(target):  # killed between the renames of _swap_in
            old.rename(target)
        _remove(old)
        _remove(partial)
        try:
            yield partial
        finally:
            _remove(partial)


@contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """An empty folder in ``folder`` during the block, for one process at a time; a killed one's is emptied."""
    with claimed(folder / name, patience_s=_PATIENCE_S) as made:
        made.mkdir()
        yield made


@contextmanager
def locked(target: Path, patience_s: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The lock of ``target``, released with the process at the latest; ``on_wait`` is called once if another process
    has it. Raises ArtifactError: another process has had it for longer than ``patience_s``. OSError: its file cannot be
    written.
    """
    path, begun = target.with_name(f".{target.name}.lock"), time.monotonic()
    waiting = False
    while (file := _lock(path)) is None:
        if not waiting:
            waiting = True
            on_wait()
        if time.monotonic() >= begun + patience_s:
            found, fix = f"one that has locked {path.name}", "Wait for it, or choose another name."
            raise ArtifactError(f"writing {target}", expected="no other process that writes it", found=found, fix=fix)
        time.sleep(0.02)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(file)


def _lock(path: Path) -> int | None:
    """A locked descriptor of ``path``; None: another process has the lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):  # not a lock file that was removed in between
                mine, file = file, -1
                return mine
        except BlockingIOError:
            return None
        except FileNotFoundError:
            pass
        finally:
            if file >= 0:
                os.close(file)


def entries(folder: Path) -> list[Path]:
    """What is in ``folder``, by name, without what a killed writer of its files left: their next writer removes it."""
    return sorted(path for path in folder.iterdir() if not _LEFT.fullmatch(path.name))


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_not_current(folder: Path) -> None:
    """Raises ArtifactError: ``folder``, to be replaced, is the current one, where a shell would be stranded."""
    if folder.is_dir() and os.path.samestat(os.stat(folder), os.stat(".")):
        expected, fix = "a folder that can be replaced", "Name another, or this one from outside of it."
        raise ArtifactError(f"writing {folder}", expected=expected, found="the current folder", fix=fix)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Write a folder completely or not at all: yields an empty one beside it, which replaces it when the block ends.

    All files are synced before they get their names. On an error ``folder`` stays as it was. The caller checks whether
    an existing ``folder`` may be replaced. Raises ArtifactError: another process writes it, a file is in its place, or
    for any OSError, in the block too.
    """
    folder = Path(os.path.realpath(folder))
    check_not_current(folder)
    with writing(folder):
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with claimed(folder) as staging:
            staging.mkdir()
            yield staging
            _sync_files(staging)
            _swap_in(staging, folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns any OSError of the block, which writes ``path``, into an ArtifactError."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error
    except Exception as error:  # in words, of a Rust library (safetensors, tokenizers) or torch.save
        if "PytorchStreamWriter failed" in str(error):  # without the reason
            raise not_written(path, OSError(errno.EIO, "a write that failed")) from error
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise not_written(path, OSError(int(number[1]), os.strerror(int(number[1])))) from error
        raise


def _sync_files(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                if name.endswith(".safetensors"):  # the safetensors library makes them private
                    os.fchmod(file, folder.stat().st_mode & 0o666)
                os.fsync(file)
            finally:
                os.close(file)
        _sync_names(Path(parent))


def _sync_names(folder: Path) -> None:
    """Sync the directory entries of ``folder``; without support, at most a rename can be lost."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _swap_in(staging: Path, folder: Path) -> None:
    """Replace ``folder`` by ``staging``; the old content is removed last, or restored."""
    old = folder.with_name(f".{folder.name}.old")
    try:
        if folder.exists():
            folder.rename(old)
        staging.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    _sync_names(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def json_text(format_name: str, version: int, fields: Mapping[str, Any], *, indent: int | None = 1) -> str:
    """The text of a JSON file of ours, with the checksum of its content in ``crc32c``."""
    head = {"format": format_name, "version": version}
    read = json.loads(json.dumps(head | dict(fields)))  # names that are numbers become text
    return json.dumps(head | {"crc32c": _crc_of(read)} | dict(fields), indent=indent)


def _crc_of(data: Mapping[str, Any]) -> str:
    """CRC32C of the content, however it is laid out: of its JSON without spaces, with sorted names."""
    return f"{continue_crc32c(0, json.dumps(data, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_json(path: str | Path, format_name: str, *versions: int, checked: bool = True) -> dict[str, Any]:
    """As :func:`parse_json`, of a file."""
    return parse_json(read_bytes(path), path, format_name, *versions, checked=checked)


def parse_json(text: str | bytes, where: str | Path, fmt: str, *versions: int, checked: bool = True) -> dict[str, Any]:
    """The content of our JSON file ``where``, with ``format``, ``version`` and checksum checked; ``versions``:
    supported ones, the current one last. Files of earlier versions have no checksum, nor those edited by hand.
    ``checked=False``: the caller compares it.
    """
    data = parse(text, where)
    if not isinstance(data, dict):
        data, found = {}, type(data).__name__
    else:
        found = " version ".join(shown(data.get(name)).strip("'") for name in ("format", "version"))
    if data.get("format") != fmt or type(data.get("version")) is not int or data["version"] not in versions:
        raise _of_another_version(where, fmt, versions[-1], found)
    said = difflib.get_close_matches("crc32c", data, 1)  # its name may be damaged, too
    if checked and said and data.pop(said[0]) != (crc := _crc_of(data)):
        expected = "content that has the checksum in its field crc32c"
        fix = "Make it again. If you edited it on purpose, remove the field crc32c: it is then used as it is."
        raise ArtifactError(str(where), expected=expected, found=f"{crc}: it was edited or damaged", fix=fix)
    return data


def check_artifact(path: Path | str, meta: Mapping[str, str], fmt: str, version: int, model_hash: str | None) -> None:
    """Raises if a tensor file has another format or version, or was made from other weights."""
    if meta.get("format") != fmt or meta.get("version") != str(version):
        raise _of_another_version(path, fmt, version, f"{meta.get('format')} version {meta.get('version')}")
    if "model_hash" not in meta:
        fix = "The file is damaged; make it again."
        raise ArtifactError(str(path), expected="the hash of a model's weights", found="none", fix=fix)
    if model_hash is not None:
        fix = "It belongs to another model or to an older checkpoint; make it again for this one."
        check_made_from(str(path), meta["model_hash"], model_hash, "made from FFN weights", fix)


def _of_another_version(where: str | Path, wanted: str, version: int, found: str) -> ArtifactError:
    fix = "Use the torch_pi2 that wrote it, or make it again."
    return ArtifactError(str(where), expected=f"{wanted} version {version}", found=found, fix=fix)
