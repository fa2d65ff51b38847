"""Qualcomm's libraries: location, compatibility with ExecuTorch, and loading.

They come from the extra ``qnn`` (package onnxruntime-qnn) or from the user's SDK in ``QNN_SDK_ROOT``. ExecuTorch
downloads an SDK if ``QNN_SDK_ROOT`` is unset, so it is always set before ExecuTorch's Qualcomm code runs.
"""

import ctypes
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from torch_pi2.base.fields import argument
from torch_pi2.base.package import how_to_install
from torch_pi2.errors import LibraryMissingError, VersionError
from torch_pi2.export.executorch import EXECUTORCH
from torch_pi2.export.qnn.settings import SOCS

#: Versions of onnxruntime-qnn that work with ExecuTorch's adaptor. In 2.3, 2.4, 2.6 and 2.7 the field ``socModel`` of
#: QNN's device configuration is 4 bytes further (all five tested).
PACKAGE = "onnxruntime-qnn"
PACKAGE_VERSIONS = {"2.5.0": "2.49.40"}

LICENCE = "Qualcomm AI Stack License"
_HOST = Path("lib/x86_64-linux-clang")
#: In loading order.
_NAMES = ("libQnnSystem.so", "libQnnHtp.so")


@dataclass(frozen=True)
class Libraries:
    """``folder`` of the libraries, and ``origin`` for messages: the package with its version, or the variable."""

    folder: Path
    origin: str


def find() -> Libraries:
    """The SDK in ``QNN_SDK_ROOT``, else the extra's libraries, not loaded. Raises LibraryMissingError, VersionError."""

    def how() -> str:
        return f"{how_to_install('qnn')} gets them; they are proprietary, and installing them accepts the {LICENCE}"

    if root := os.environ.get("QNN_SDK_ROOT"):
        found, where = Libraries(Path(root) / _HOST, "QNN_SDK_ROOT"), "as QNN_SDK_ROOT says"
        fix = f"Correct QNN_SDK_ROOT, or unset it: {how()} (docs/QNN.md)."
    else:
        try:
            distribution = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            expected = f"{PACKAGE} {' or '.join(PACKAGE_VERSIONS)}, or an SDK named by QNN_SDK_ROOT"
            fix, what = f"{how()} (docs/QNN.md).", "Qualcomm's libraries (QNN)"
            raise LibraryMissingError(what, expected=expected, found="neither", fix=fix) from error
        version = distribution.version
        if version not in PACKAGE_VERSIONS:
            expected = f"{' or '.join(PACKAGE_VERSIONS)} (QNN {', '.join(PACKAGE_VERSIONS.values())})"
            unknown = f"{version}, whose device structure ExecuTorch {EXECUTORCH} does not know"
            fix = f"pip install {PACKAGE}=={next(iter(PACKAGE_VERSIONS))}; a newer one is not better here."
            raise VersionError(f"version of {PACKAGE}", expected=expected, found=unknown, fix=fix)
        folder = Path(str(distribution.locate_file("onnxruntime_qnn")))
        found, where = Libraries(folder, f"{PACKAGE} {version}"), "as the package has them"
        fix = f"pip install --force-reinstall {PACKAGE}=={version}."
    if not all((found.folder / name).is_file() for name in _NAMES):
        expected = f"{' and '.join(_NAMES)} in {found.folder}, {where}"
        raise LibraryMissingError("Qualcomm's libraries (QNN)", expected=expected, found="no such files", fix=fix)
    return found


def check_soc(soc: str) -> None:
    if soc not in SOCS:
        fix = "Choose the part number of the phone's chip, for instance target='qnn:SM8650'."
        expected = f"one of {', '.join(f'{name} ({what})' for name, what in SOCS.items())}"
        argument(soc, "Qualcomm SoC of the target", fix).wrong(expected)


def check_host() -> None:
    host = f"{platform.system()} {platform.machine()}"
    if host.lower() not in ("linux x86_64", "linux amd64"):
        fix = "Export there and copy the bundle; target='xnnpack' works here."
        raise LibraryMissingError("host of Qualcomm's compiler", expected="Linux on x86-64", found=host, fix=fix)


def environment(libraries: Libraries, root: Path) -> dict[str, str]:
    """Environment of a compiler process; ``root``, an empty folder, becomes an SDK with links to ``libraries``."""
    place = root / _HOST
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(libraries.folder.resolve(), target_is_directory=True)
    return {**os.environ, "QNN_SDK_ROOT": str(root)}


def load(libraries: Libraries) -> None:
    """Load the libraries after torch and ExecuTorch (before them they crash), for compiling, and for Qualcomm's
    emulator on x86-64. Sets ``QNN_SDK_ROOT`` to "" if it is unset. Raises LibraryMissingError: they cannot be loaded.
    """
    import executorch.exir  # noqa: F401
    import torch  # noqa: F401

    os.environ.setdefault("QNN_SDK_ROOT", "")  # ExecuTorch downloads an SDK when it is unset
    for name in _NAMES:
        path = libraries.folder.resolve() / name
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            expected = "a library that this system can load (glibc 2.35 or later, libatomic)"
            fix = "Debian 12 or Ubuntu 22.04 and later have what it needs; apt-get install libatomic1."
            raise LibraryMissingError(f"Qualcomm's {name}", expected=expected, found=str(error), fix=fix) from error
