"""Files written whole or not at all: temporary file, fsync, rename. Read back with errors that help."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from torch_pi2.errors import ArtifactError

Tensors = Mapping[str, torch.Tensor]


def _write_synced(path: Path, data: Iterable[bytes]) -> None:
    with path.open("wb") as f:
        f.writelines(data)
        f.flush()
        os.fsync(f.fileno())


def atomic_write(path: str | Path, data: bytes | str | Iterable[bytes]) -> None:
    """Write ``data``, or its pieces, to ``path``: temporary file, fsync, rename. Raises ArtifactError if it cannot."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = data.encode() if isinstance(data, str) else data
        _write_synced(temporary, [whole] if isinstance(whole, bytes) else whole)
        os.replace(temporary, path)
    except BaseException as error:  # of what makes the pieces, too
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
        if isinstance(error, OSError):
            raise not_written(path, error) from error
        raise


def not_written(path: Path, error: OSError) -> ArtifactError:
    """What to raise when ``path`` could not be written and nothing of it is left."""
    return ArtifactError(
        f"writing {path}",
        expected="a folder that can be written",
        found=f"{error.strerror or error}",
        fix="Choose another output folder or free some space; nothing was left half-written.",
    )


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Write a whole folder or nothing: gives an empty one beside it, which takes its place when the block ends.

    All files are on disk before they get their names. If the block raises, or the last step fails, ``folder`` is as it
    was. Whether an existing ``folder`` may be replaced is for the caller to check.

    Raises:
        ArtifactError: for any OSError, in the block too.
    """
    folder = folder.resolve()
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        _sync_files(staging)
        _swap_in(staging, folder)
    except OSError as error:
        raise not_written(folder, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def resumable_folder(folder: Path) -> Iterator[Path]:
    """As :func:`replacing_folder`, but the folder that is given has what a killed block wrote the last time.

    It is ``.NAME.partial`` beside ``folder``, and stays when the process is killed or interrupted. After any other
    error it is gone: a full disk is not kept full. One process at a time has it.

    Raises:
        ArtifactError: another process has it, or for any OSError, in the block too.
    """
    folder = folder.resolve()
    staging = folder.with_name(f".{folder.name}.partial")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with _only_one(staging, folder):
            try:
                yield staging
                _sync_files(staging)
                _swap_in(staging, folder)
            except Exception:
                shutil.rmtree(staging, ignore_errors=True)
                raise
    except OSError as error:
        raise not_written(folder, error) from error


@contextmanager
def _only_one(staging: Path, folder: Path) -> Iterator[None]:
    """Locks ``staging``; the lock ends with the process, however it ends."""
    file = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(file).st_ino == os.stat(staging).st_ino  # not one that was finished in between
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise ArtifactError(
                f"writing {folder}",
                expected="no other process that writes it",
                found=f"one that has {staging.name}",
                fix="Wait for it, or choose another folder.",
            )
        yield
    finally:
        os.close(file)


def _sync_files(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        _sync_names(Path(parent))


def _sync_names(folder: Path) -> None:
    """What ``folder`` calls its files, to disk; some file systems cannot, and lose at most a rename."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _swap_in(staging: Path, folder: Path) -> None:
    """Put ``staging`` in the place of ``folder``; the old content goes last, or comes back."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)  # left by a process of the same number that was killed
            folder.rename(old)
        staging.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    _sync_names(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def atomic_folder_files(folder: str | Path, files: Mapping[str, str | bytes | tuple[Tensors, dict[str, str]]]) -> None:
    """Write several files into ``folder``, each atomically; a tensor entry is ``(tensors, metadata)``."""
    from safetensors.torch import save

    for name, content in files.items():
        if isinstance(content, tuple):
            tensors, metadata = content
            content = save({k: v.contiguous() for k, v in tensors.items()}, metadata=metadata)
        atomic_write(Path(folder) / name, content)


def read_text(path: str | Path) -> str:
    """The text of one of our JSON files. Raises ArtifactError if it is missing or is no text."""
    try:
        return Path(path).read_text()
    except FileNotFoundError as error:
        raise ArtifactError(str(path), expected="a file", found="nothing", fix="Check the folder's name.") from error
    except UnicodeDecodeError as error:
        raise _no_json(path, error) from error


def parse_json(text: str, where: str | Path, format_name: str, *versions: int) -> dict[str, Any]:
    """The content of a JSON file of ours, read from ``where``, with its ``format`` and ``version`` checked.

    ``versions``: those that can be read, the one that is written last.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _no_json(where, error) from error
    if not isinstance(data, dict) or data.get("format") != format_name or data.get("version") not in versions:
        found = f"{data.get('format')} version {data.get('version')}" if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(
            str(where),
            expected=f"{format_name} version {versions[-1]}",
            found=found,
            fix="Use the torch_pi2 that wrote it, or make it again.",
        )
    return data


def _no_json(where: str | Path, error: Exception) -> ArtifactError:
    return ArtifactError(str(where), expected="JSON", found=f"damage ({error})", fix="Make the artefact again.")


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, copied into memory."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ArtifactError(str(path), expected="a safetensors file", found="nothing", fix="Check the folder's name.")
    try:
        with safe_open(path, framework="pt") as f:
            names: list[str] = list(f.keys())
            return {name: f.get_tensor(name) for name in names}, dict(f.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            str(path), expected="a whole safetensors file", found=f"damage ({error})", fix="Make the artefact again."
        ) from error
