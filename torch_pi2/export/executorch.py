"""ExecuTorch's Python runtime with our backend (``libpi2_executorch.so``): loading, options, statistics, programs."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.package import how_to_install
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    DtypeError,
    LibraryMissingError,
    Pi2Error,
    ShapeError,
    StaleArtifactError,
    VersionError,
    parse_core_error,
)
from torch_pi2.export.manifest import PROGRAM_FILE, Manifest
from torch_pi2.ops.library import library_path

#: The only version of ExecuTorch that the library works with: its C++ interface differs in every version.
EXECUTORCH = "1.5.1"
LIBRARY = "libpi2_executorch.so"
_ABI = 1

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def load_library() -> ctypes.CDLL:
    """Load the library, so that ExecuTorch's Python runtime in this process can run a ``.pte`` of torch_pi2.

    A second call does nothing. ExecuTorch is imported first, as the library needs the libraries that it loads.

    Returns:
        The library, with the functions of ``csrc/include/pi2/executorch.h``.

    Raises:
        LibraryMissingError: executorch is missing, or the library was not built (for it).
        VersionError: executorch is of another version.
    """
    global _library
    with _lock:
        if _library is None:
            check_executorch()
            path = library_path(LIBRARY)
            try:
                # this loads the libraries that ours needs
                importlib.import_module("executorch.extension.pybindings.portable_lib")
                loaded = ctypes.CDLL(str(path))
            except (ImportError, OSError) as error:
                raise LibraryMissingError(
                    f"loading {path}",
                    expected=f"executorch {EXECUTORCH} as it was installed, and a library built for it",
                    found=str(error),
                    fix="Install executorch again, then this package: 'make clean install' in a checkout.",
                ) from error
            loaded.pi2_et_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
            loaded.pi2_et_error.restype = ctypes.c_char_p
            loaded.pi2_et_stats.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
            loaded.pi2_et_stats.restype = ctypes.c_int64
            if loaded.pi2_et_abi() != _ABI:
                raise LibraryMissingError(
                    str(path),
                    expected=f"interface {_ABI}",
                    found=str(loaded.pi2_et_abi()),
                    fix="Install this package again: its parts are of different versions.",
                )
            _library = loaded
        return _library


def check_executorch() -> None:
    """Raises LibraryMissingError or VersionError unless executorch is installed in the version that we need."""
    install = f"Install it: {how_to_install('export')}."
    if importlib.util.find_spec("executorch") is None:
        raise LibraryMissingError(
            "ExecuTorch", expected=f"executorch {EXECUTORCH}", found="no such package", fix=install
        )
    found = importlib.metadata.version("executorch")
    if found.partition("+")[0] != EXECUTORCH:
        raise VersionError("ExecuTorch", expected=f"executorch {EXECUTORCH}", found=found, fix=install)


def set_options(options: Mapping[str, str | int | bool]) -> None:
    """Set options of the backend for programs loaded from now on; an empty text restores the default.

    Args:
        options: see ``csrc/include/pi2/executorch.h``.

    Raises:
        ConfigError: an unknown option, or an invalid value. LibraryMissingError: see :func:`load_library`.
    """
    library = load_library()
    for key, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if library.pi2_et_set(key.encode(), text.encode()) != 0:
            raise delegate_error(last_error())


def share_weights(share: bool) -> None:
    """Let methods loaded from now on share weights that XNNPACK has packed, or not; for float weights only.

    Raises:
        LibraryMissingError: see :func:`load_library`; or this executorch has no XNNPACK.
    """
    if load_library().pi2_et_share_weights(int(share)) != 0:
        raise delegate_error(last_error(), LibraryMissingError)


def last_error() -> str:
    """The backend's last error message, as ExecuTorch itself only returns a number; "" if there was none."""
    return bytes(load_library().pi2_et_error()).decode(errors="replace")


def clear_error() -> None:
    """Forget :func:`last_error`."""
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
            found: dict[str, Any] = json.loads(text.value.decode(errors="replace"))
            return found
        size = 2 * needed


def delegate_error(text: str, kind: type[Pi2Error] | None = None) -> Pi2Error:
    """The error for a message of the backend, ``what: expected ..., found .... fix``; its kind follows from it."""
    what, expected, rest = parse_core_error(text)
    found, _, fix = rest.partition(". ")
    if not (what and expected and found and fix):
        return ArtifactError("our delegate", expected="that it works", found=text, fix="See its log on standard error.")
    of_settings, of_weights = what.startswith(("option ", "trace ")), expected.startswith("weights ")
    kind = kind or (ConfigError if of_settings else StaleArtifactError if of_weights else ArtifactError)
    return kind(what, expected=expected, found=found, fix=fix)


# --- programs of bundles ----------------------------------------------------------------------------------------------


#: Options are global to the library until a store is opened with them: one program at a time sets them and opens.
_OPENING = threading.Lock()
#: ExecuTorch's numbers of the dtypes that inputs have.
_DTYPES: Mapping[int, torch.dtype] = dict(
    enumerate(
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    )
) | {11: torch.bool, 15: torch.bfloat16}


class Program:
    """The program of the bundle in ``folder``. Methods are loaded when they are first called, the store with them.

    Args:
        options: for the delegate, see :func:`set_options`; None: the default.

    Raises:
        ArtifactError: ExecuTorch does not load it. VersionError: it is of another ExecuTorch. LibraryMissingError:
            ExecuTorch or our library is not installed.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: Mapping[str, str | int | bool | None]) -> None:
        self.path, self.options, self.load_seconds = folder / PROGRAM_FILE, options, 0.0
        self._share_weights = manifest.model.linears == "float32"
        self._methods: dict[str, Any] = {}
        load_library()
        made_by = manifest.made_by.get("executorch", "").partition("+")[0]
        if made_by not in ("", EXECUTORCH):
            raise VersionError(
                f"program of {folder}",
                expected=f"one of ExecuTorch {EXECUTORCH}, which is installed",
                found=made_by,
                fix="Export again.",
            )
        if manifest.target.startswith("qnn:"):
            from torch_pi2.export.qnn import sdk

            sdk.load(sdk.find())
        from executorch.runtime import Runtime, Verification

        try:
            self._program: Any = Runtime.get().load_program(self.path, verification=Verification.InternalConsistency)
        except RuntimeError as error:
            raise _refused(str(self.path), "a program of ExecuTorch", error) from error

    def load(self, name: str) -> Any:
        """The method ``name``."""
        if name not in self._methods:
            started = time.perf_counter()
            with _OPENING:
                clear_error()
                try:
                    share_weights(self._share_weights)
                    set_options({key: value for key, value in self.options.items() if value is not None})
                    self._methods[name] = self._program.load_method(name)
                except RuntimeError as error:
                    raise self._failed(name, "a method that ExecuTorch loads", error) from error
                finally:
                    set_options(dict.fromkeys(self.options, ""))
                    share_weights(False)
            self.load_seconds += time.perf_counter() - started
        return self._methods[name]

    def call(self, name: str, *args: torch.Tensor | float) -> Sequence[torch.Tensor]:
        """Outputs of a method. Raises ShapeError, DtypeError: for wrong inputs; ArtifactError: it fails."""
        method = self.load(name)
        _check_inputs(f"{self.path.parent}, {name}", method.metadata, args)
        clear_error()
        try:
            outputs: Sequence[torch.Tensor] = method.execute(args)
        except RuntimeError as error:
            raise self._failed(name, "a call that succeeds", error) from error
        return outputs

    def close(self) -> None:
        """Release it. Raises ConfigError: the trace cannot be written."""
        with _OPENING:
            clear_error()
            self._methods.clear()
            self._program = None
            problem = last_error()
        trace = self.options.get("trace")
        if trace and problem.startswith(f"trace {trace}: "):
            raise delegate_error(problem)

    def _failed(self, name: str, expected: str, error: RuntimeError) -> Pi2Error:
        """What our delegate says of ``error``, or else what ExecuTorch does."""
        problem = last_error()
        return delegate_error(problem) if problem else _refused(f"{self.path}, {name}", expected, error)


def _refused(what: str, expected: str, error: RuntimeError) -> ArtifactError:
    return ArtifactError(
        what,
        expected=expected,
        found=" ".join(str(error).split()) or type(error).__name__,
        fix="Its log on standard error says more; torch-pi2 inspect --verify BUNDLE finds damage.",
    )


def _check_inputs(where: str, metadata: Any, args: Sequence[torch.Tensor | float]) -> None:
    """ExecuTorch's own message for wrong inputs is a number."""
    if len(args) != metadata.num_inputs():
        raise ShapeError(
            where, expected=f"{metadata.num_inputs()} inputs", found=str(len(args)), fix="Pass what was exported."
        )
    for i, given in enumerate(args):
        try:
            about = metadata.input_tensor_meta(i)
        except IndexError:  # a number of the example, which ExecuTorch compares
            continue
        name = f"{where}, input {i}"
        if not isinstance(given, torch.Tensor):
            raise DtypeError(name, expected="a tensor", found=type(given).__name__, fix="Convert it.")
        most, dtype = tuple(about.sizes()), _DTYPES.get(about.dtype())
        if dtype is not None and given.dtype != dtype:
            raise DtypeError(name, expected=str(dtype), found=str(given.dtype), fix="Convert it.")
        if given.dim() != len(most) or any(n > limit for n, limit in zip(given.shape, most)):
            raise ShapeError(
                name, expected=f"at most {list(most)}", found=str(list(given.shape)), fix="Pass what was exported."
            )
