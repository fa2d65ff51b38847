"""Qualcomm's libraries: where they are, whether they and ExecuTorch fit together, how they are loaded.

They come from the extra ``qnn`` (the package onnxruntime-qnn carries them) or from the user's own SDK in
``QNN_SDK_ROOT``. Nothing here uses the network: ExecuTorch downloads an SDK when ``QNN_SDK_ROOT`` is unset, so it is
always set before any of its code for Qualcomm runs.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from torch_pi2.base.package import how_to_install
from torch_pi2.errors import ConfigError, LibraryMissingError, VersionError
from torch_pi2.export.executorch import EXECUTORCH
from torch_pi2.export.qnn.settings import SOCS

#: Versions of onnxruntime-qnn that ExecuTorch's adaptor works with. 2.3, 2.4, 2.6 and 2.7 do not: the field
#: ``socModel`` of QNN's device configuration lies 4 bytes further there (tried, all five).
PACKAGE = "onnxruntime-qnn"
PACKAGE_VERSIONS = {"2.5.0": "2.49.40"}

LICENCE = "Qualcomm AI Stack License"


_HOST = Path("lib/x86_64-linux-clang")
#: In the order in which they are loaded.
_NAMES = ("libQnnSystem.so", "libQnnHtp.so")


@dataclass(frozen=True)
class Libraries:
    """Where the libraries are: ``folder``, and ``origin`` for messages: a package with its version, or the variable."""

    folder: Path
    origin: str


def find() -> Libraries:
    """The user's own SDK if ``QNN_SDK_ROOT`` names one, else those of the extra. Loads nothing.

    Raises:
        LibraryMissingError: there are none; the message names the licence and how to get them.
        VersionError: the package has a version that ExecuTorch's adaptor does not fit.
    """

    def how() -> str:
        return f"{how_to_install('qnn')} gets them; they are proprietary, and installing them accepts the {LICENCE}"

    if root := os.environ.get("QNN_SDK_ROOT"):
        found, where = Libraries(Path(root) / _HOST, "QNN_SDK_ROOT"), "as QNN_SDK_ROOT says"
        fix = f"Correct QNN_SDK_ROOT, or unset it: {how()} (docs/QNN.md)."
    else:
        try:
            distribution = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise LibraryMissingError(
                "Qualcomm's libraries (QNN)",
                expected=f"{PACKAGE} {' or '.join(PACKAGE_VERSIONS)}, or an SDK named by QNN_SDK_ROOT",
                found="neither",
                fix=f"{how()} (docs/QNN.md).",
            ) from error
        version = distribution.version
        if version not in PACKAGE_VERSIONS:
            raise VersionError(
                f"version of {PACKAGE}",
                expected=f"{' or '.join(PACKAGE_VERSIONS)} (QNN {', '.join(PACKAGE_VERSIONS.values())})",
                found=f"{version}, whose device structure ExecuTorch {EXECUTORCH} does not know",
                fix=f"pip install {PACKAGE}=={next(iter(PACKAGE_VERSIONS))}; a newer one is not better here.",
            )
        folder = Path(str(distribution.locate_file("onnxruntime_qnn")))
        found, where = Libraries(folder, f"{PACKAGE} {version}"), "as the package has them"
        fix = f"pip install --force-reinstall {PACKAGE}=={version}."
    if not all((found.folder / name).is_file() for name in _NAMES):
        expected = f"{' and '.join(_NAMES)} in {found.folder}, {where}"
        raise LibraryMissingError("Qualcomm's libraries (QNN)", expected=expected, found="no such files", fix=fix)
    return found


def check_soc(soc: str) -> None:
    """Raises ConfigError if nothing is compiled for ``soc``."""
    if soc not in SOCS:
        raise ConfigError(
            "Qualcomm SoC of the target",
            expected=f"one of {', '.join(f'{name} ({what})' for name, what in SOCS.items())}",
            found=repr(soc),
            fix="Choose the part number of the phone's chip, for instance target='qnn:SM8650'.",
        )


def check_host() -> None:
    """Raises LibraryMissingError where Qualcomm's compiler does not run."""
    host = f"{platform.system()} {platform.machine()}"
    if host.lower() not in ("linux x86_64", "linux amd64"):
        raise LibraryMissingError(
            "host of Qualcomm's compiler",
            expected="Linux on x86-64",
            found=host,
            fix="Export there and copy the bundle; target='xnnpack' works here.",
        )


def environment(libraries: Libraries, root: Path) -> dict[str, str]:
    """Variables for a process that compiles: ``root``, an empty folder, becomes an SDK that links to ``libraries``.

    With ``QNN_SDK_ROOT`` set, ExecuTorch asks the SDK's version and never downloads one.
    """
    place = root / _HOST
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(libraries.folder.resolve(), target_is_directory=True)
    return {**os.environ, "QNN_SDK_ROOT": str(root)}


def load(libraries: Libraries) -> None:
    """Load the libraries into this process, after torch and ExecuTorch: before them they crash it.

    ExecuTorch finds them by their names afterwards. For programs that are executed on x86-64 (Qualcomm's emulator of
    the NPU), and for the process that compiles. Sets ``QNN_SDK_ROOT``, to nothing, if it is unset.

    Raises:
        LibraryMissingError: they cannot be loaded; the message has the loader's reason.
    """
    import executorch.exir  # noqa: F401
    import torch  # noqa: F401

    os.environ.setdefault("QNN_SDK_ROOT", "")  # ExecuTorch downloads an SDK when it is unset
    for name in _NAMES:
        path = libraries.folder.resolve() / name
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryMissingError(
                f"Qualcomm's {name}",
                expected="a library that this system can load (glibc 2.35 or later, libatomic)",
                found=str(error),
                fix="Debian 12 or Ubuntu 22.04 and later have what it needs; apt-get install libatomic1.",
            ) from error
