"""What ``torch_pi2.load("model.gguf")`` reads: the file's import, kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

from torch_pi2.base.files import cache_folder
from torch_pi2.base.reading import open_file
from torch_pi2.base.version import __version__
from torch_pi2.checkpoint.gguf.importing import import_gguf
from torch_pi2.checkpoint.pack import pack
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import weights_path

_log = logging.getLogger("torch_pi2")
#: Of the file's beginning: metadata and vocabulary, which tell files of one size apart.
_HEAD_BYTES = 1 << 20


def kept_import(file: Path, *, packed: bool, progress: bool = False) -> Path:
    """The folder that ``file`` was imported to, now or earlier; ``packed``: with a neuron store of all layers.

    Raises: as :func:`import_gguf`, and ``pack``.
    """
    with open(open_file(file, "a GGUF file", "Check the file's name."), "rb") as opened:
        about = file.stat()
        told = f"{__version__} {about.st_size} {about.st_mtime_ns} {packed}".encode()
        key = hashlib.sha256(told + opened.read(_HEAD_BYTES)).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{file.stem}-{key}"
    if weights_path(folder / PI2_FOLDER) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _log.info("%s is imported to %s, once", file, folder)
        if not packed:
            import_gguf(file, folder, progress=progress)
            return folder
        between = folder.with_name(f"{folder.name}-unpacked")
        try:
            import_gguf(file, between, neurons="all", progress=progress)
            pack(between, folder, progress=progress)
        finally:
            shutil.rmtree(between, ignore_errors=True)
    return folder
