"""``torch_pi2.load("model.gguf")`` reads an import of the file, which is kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import shutil
from pathlib import Path

from torch_pi2.base.files import cache_folder, locked, not_written
from torch_pi2.base.package import __version__
from torch_pi2.checkpoint.gguf.importing import import_gguf
from torch_pi2.checkpoint.pack import pack
from torch_pi2.errors import Pi2Error
from torch_pi2.store.folder import PI2_FOLDER, read_config
from torch_pi2.store.gguf import GgufModel
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import open_weights

_log = logging.getLogger("torch_pi2")
#: Bytes of a file's beginning, metadata and vocabulary, which tell files of one size apart.
_HEAD_BYTES = 1 << 20
#: Bytes of a file's name in the name of its folder: file systems allow 255, and locks add some.
_NAME_BYTES = 100
#: Version of what imports write: with another one, cached imports are made again.
_REVISION = 2


def cached_import(file: Path, *, packed: bool, progress: bool = False) -> Path:
    """The folder that ``file`` was imported to, now or earlier; ``packed``: with a neuron store of all layers.

    If another process imports it at the moment, this waits for it. A damaged folder is made again.

    Raises: as :func:`import_gguf`, and ``pack``.
    """
    with GgufModel(file) as model:
        name = re.sub(r"[^\w.-]", "_", model.path.stem).encode()[:_NAME_BYTES].decode(errors="ignore")
        folder = cache_folder() / "gguf" / f"{name}-{_key(model, packed)}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}-import"), math.inf, lambda: _log.warning(_WAITS, file)):
            if not _is_whole(folder):
                _import(file, folder, packed, progress)
    except OSError as error:
        raise not_written(folder, error) from error
    return folder


_WAITS = "another process imports %s; this one waits for it"


def _import(file: Path, folder: Path, packed: bool, progress: bool) -> None:
    between = folder.with_name(f"{folder.name}-unpacked")
    for old in (folder, between):  # damaged, or of a killed process
        shutil.rmtree(old, ignore_errors=True)
    _log.info("%s is imported to %s, once", file, folder)
    try:
        into = between if packed else folder
        report = import_gguf(file, into, neurons="all" if packed else "auto", progress=progress)
        if report.tokenizer:
            _log.warning("no tokenizer of %s: %s", file, report.tokenizer)
        if packed:
            pack(between, folder, progress=progress)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _key(model: GgufModel, packed: bool) -> str:
    """Identifies a file without reading it whole: size, time, beginning, and the ends of every tensor."""
    found = hashlib.sha256(f"{__version__} {_REVISION} {packed}".encode())
    for path in model.paths:
        with open(path, "rb") as opened:
            about = path.stat()
            found.update(f" {about.st_size} {about.st_mtime_ns} ".encode() + opened.read(_HEAD_BYTES))
    for name in model.tensors:
        found.update(model.ends_of(name))
    return found.hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    """Whether there is an import in ``folder``, with all of its files, as far as their headers tell."""
    if not folder.is_dir():
        return False
    try:
        read_config(folder)
        with Parts(folder / PI2_FOLDER) as parts, open_weights(folder / PI2_FOLDER):
            parts.plan()
    except Pi2Error as error:
        _log.warning("%s is imported again: %s", folder, error)
        return False
    return True
