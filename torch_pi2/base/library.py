"""Finds and loads the C++ library with the operators ``torch.ops.pi2``."""

import sys
import sysconfig
from pathlib import Path

import torch

from torch_pi2.errors import LibraryMissingError

_LIBRARY = "libpi2_torch.so"


def check_platform(platform: str) -> None:
    """Raises LibraryMissingError on a ``platform`` (as in ``sys``) that is not supported."""
    if platform != "linux":
        found = {"win32": "Windows", "darwin": "macOS"}.get(platform, platform)
        fix = "On Windows use WSL 2 (wsl --install); on macOS a Linux container or machine."
        expected = "Linux (x86_64 or aarch64)"
        raise LibraryMissingError("this platform", expected=expected, found=f"{found}, which is not supported", fix=fix)


def library_path(name: str | None = None) -> Path:
    """A C++ library of this installation, wheel or editable; default: torch's. Raises LibraryMissingError."""
    name = name or _LIBRARY
    check_platform(sys.platform)
    package = Path(__file__).resolve().parent.parent
    places = [package / "_lib", Path(sysconfig.get_paths()["platlib"]) / "torch_pi2" / "_lib"]
    for place in places:
        if (place / name).is_file():
            return place / name
    fix = "Run 'make install' in a checkout, or install torch first and then this package with pip."
    expected = f"it in {' or '.join(map(str, places))}"
    raise LibraryMissingError(f"the C++ library {name}", expected=expected, found="no such file", fix=fix)


def load_library() -> Path:
    """Load the operators, without what ``ops.load`` adds; returns the library's path. Raises LibraryMissingError."""
    path = library_path()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        what, expected = f"loading {path}", "a library built for this machine and torch >= 2.10"
        fix = "Build it again: 'make clean install' in a checkout."
        raise LibraryMissingError(what, expected=expected, found=str(error.__cause__ or error), fix=fix) from error
    return path
