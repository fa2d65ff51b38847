"""``Program``: a bundle's ``model.pte`` in ExecuTorch's Python runtime, with our delegate and errors in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.errors import (
    ArtifactError,
    DtypeError,
    Pi2Error,
    ShapeError,
    VersionError,
)
from torch_pi2.export import executorch as backend
from torch_pi2.export.manifest import PROGRAM_FILE, Manifest

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
        options: for the delegate, see :func:`torch_pi2.export.executorch.set_options`; None: the default.

    Raises:
        ArtifactError: ExecuTorch does not load it. VersionError: it is of another ExecuTorch. LibraryMissingError:
            ExecuTorch or our library is not installed.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: Mapping[str, str | int | bool | None]) -> None:
        self.path, self.options, self.load_seconds = folder / PROGRAM_FILE, options, 0.0
        self._share_weights = manifest.model.linears == "float32"
        self._methods: dict[str, Any] = {}
        backend.load_library()
        made_by = manifest.made_by.get("executorch", "").partition("+")[0]
        if made_by not in ("", backend.EXECUTORCH):
            raise VersionError(
                f"program of {folder}",
                expected=f"one of ExecuTorch {backend.EXECUTORCH}, which is installed",
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
                backend.clear_error()
                try:
                    backend.share_weights(self._share_weights)
                    backend.set_options({key: value for key, value in self.options.items() if value is not None})
                    self._methods[name] = self._program.load_method(name)
                except RuntimeError as error:
                    raise self._failed(name, "a method that ExecuTorch loads", error) from error
                finally:
                    backend.set_options(dict.fromkeys(self.options, ""))
                    backend.share_weights(False)
            self.load_seconds += time.perf_counter() - started
        return self._methods[name]

    def call(self, name: str, *args: torch.Tensor | float) -> Sequence[torch.Tensor]:
        """Outputs of a method. Raises ShapeError, DtypeError: for wrong inputs; ArtifactError: it fails."""
        method = self.load(name)
        _check_inputs(f"{self.path.parent}, {name}", method.metadata, args)
        backend.clear_error()
        try:
            outputs: Sequence[torch.Tensor] = method.execute(args)
        except RuntimeError as error:
            raise self._failed(name, "a call that succeeds", error) from error
        return outputs

    def close(self) -> None:
        """Release it. Raises ConfigError: the trace cannot be written."""
        with _OPENING:
            backend.clear_error()
            self._methods.clear()
            self._program = None
            problem = backend.last_error()
        trace = self.options.get("trace")
        if trace and problem.startswith(f"trace {trace}: "):
            raise backend.delegate_error(problem)

    def _failed(self, name: str, expected: str, error: RuntimeError) -> Pi2Error:
        """What our delegate says of ``error``, or else what ExecuTorch does."""
        problem = backend.last_error()
        return backend.delegate_error(problem) if problem else _refused(f"{self.path}, {name}", expected, error)


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
