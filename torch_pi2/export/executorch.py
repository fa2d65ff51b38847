"""ExecuTorch's Python runtime with our backend (``libpi2_executorch.so``): loading, options, statistics."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Mapping
from typing import Any

from torch_pi2 import errors
from torch_pi2.base.library import library_path
from torch_pi2.base.package import how_to_install

#: The only supported version of ExecuTorch: its C++ interface changes in every version.
EXECUTORCH = "1.5.1"
LIBRARY = "libpi2_executorch.so"
_ABI = 1

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def load_library() -> ctypes.CDLL:
    """Load our backend (``csrc/include/pi2/executorch.h``) into ExecuTorch's Python runtime, once, so that it runs a
    ``.pte`` of torch_pi2. Raises LibraryMissingError: no executorch, or no library for it. VersionError: another.
    """
    global _library
    with _lock:
        if _library is None:
            check_executorch()
            path = library_path(LIBRARY)
            try:
                # loads libraries that ours needs
                importlib.import_module("executorch.extension.pybindings.portable_lib")
                loaded = ctypes.CDLL(str(path))
            except (ImportError, OSError) as error:
                expected = f"executorch {EXECUTORCH} as it was installed, and a library built for it"
                fix = "Install executorch again, then this package: 'make clean install' in a checkout."
                what = f"loading {path}"
                raise errors.LibraryMissingError(what, expected=expected, found=str(error), fix=fix) from error
            loaded.pi2_et_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            loaded.pi2_et_error.restype = ctypes.c_char_p
            loaded.pi2_et_stats.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
            loaded.pi2_et_stats.restype = ctypes.c_int64
            if loaded.pi2_et_abi() != _ABI:
                fix = "Install this package again: its parts are of different versions."
                expected = f"interface {_ABI}"
                raise errors.LibraryMissingError(str(path), expected=expected, found=str(loaded.pi2_et_abi()), fix=fix)
            _library = loaded
        return _library


def check_executorch() -> None:
    """Raises LibraryMissingError or VersionError unless the supported executorch is installed."""
    install = f"Install it: {how_to_install('export')}."
    if importlib.util.find_spec("executorch") is None:
        expected = f"executorch {EXECUTORCH}"
        raise errors.LibraryMissingError("ExecuTorch", expected=expected, found="no such package", fix=install)
    found = importlib.metadata.version("executorch")
    if found.partition("+")[0] != EXECUTORCH:
        raise errors.VersionError("ExecuTorch", expected=f"executorch {EXECUTORCH}", found=found, fix=install)


def set_options(options: Mapping[str, str | int | bool]) -> None:
    """Set the backend's options for programs loaded later; "" restores a default. Raises ConfigError: a wrong one."""
    library = load_library()
    for key, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if library.pi2_et_set(key.encode(), text.encode()) != 0:
            raise delegate_error(last_error())


def share_weights(share: bool) -> None:
    """Let methods loaded later share XNNPACK's packed float weights. Raises LibraryMissingError: no XNNPACK here."""
    if load_library().pi2_et_share_weights(int(share)) != 0:
        raise delegate_error(last_error(), errors.LibraryMissingError)


def last_error() -> str:
    """The backend's last error message, or ""; ExecuTorch itself returns only a number."""
    return bytes(load_library().pi2_et_error()).decode(errors="replace")


def clear_error() -> None:
    load_library().pi2_et_clear_error()


def stats(*, reset: bool = False) -> dict[str, Any]:
    """Statistics of the open stores since the last reset: ``pi2_et_stats`` of ``csrc/include/pi2/executorch.h``."""
    library = load_library()
    size = 1 << 16
    while True:
        text = ctypes.create_string_buffer(size)
        needed = library.pi2_et_stats(text, size, int(reset))
        if needed < 0:
            raise MemoryError(last_error())
        if needed <= size:
            return json.loads(text.value.decode(errors="replace"))
        size = 2 * needed


def delegate_error(text: str, kind: type[errors.Pi2Error] | None = None) -> errors.Pi2Error:
    """The error for a backend message ``what: expected ..., found .... fix``, which also determines its type."""
    what, expected, rest = errors.parse_core_error(text)
    found, _, fix = rest.partition(". ")
    if not (what and expected and found and fix):
        fix = "See its log on standard error."
        return errors.ArtifactError("our delegate", expected="that it works", found=text, fix=fix)
    of_settings, of_weights = what.startswith(("option ", "trace ")), expected.startswith("weights ")
    usual = errors.StaleArtifactError if of_weights else errors.ArtifactError
    kind = kind or (errors.ConfigError if of_settings else usual)
    return kind(what, expected=expected, found=found, fix=fix)
