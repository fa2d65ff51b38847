"""Calibration and held-out text that every Python installation has: its standard library.

Files are split by a hash of their *relative path*, so a file that is held out under one Python version never leaks into
a training set made with another. Held-out files do not include test suites, which are not installed everywhere.
"""

import hashlib
import math
import sysconfig
from contextlib import suppress
from pathlib import Path

_SKIP_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"})
_TEST_DIRS = frozenset({"test", "tests", "idle_test"})
_EXCERPT_BYTES = 4096
_HELDOUT_SHARE = 24  # one file in 24 is held out


def stdlib_files(split: str, *, with_tests: bool = False) -> list[Path]:
    """Sorted paths of the standard library's ``.py`` files in ``split``; ``with_tests``: its tests, to train on."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', found {split!r}")
    base = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in base.rglob("*.py"):
        rel = path.relative_to(base)
        left_out = _SKIP_DIRS if with_tests and split == "train" else _SKIP_DIRS | _TEST_DIRS
        digest = hashlib.sha256(rel.as_posix().encode()).digest()
        heldout = int.from_bytes(digest[:4], "little") % _HELDOUT_SHARE == 0
        if left_out.isdisjoint(rel.parts[:-1]) and heldout == (split == "heldout"):
            chosen.append(path)
    return sorted(chosen, key=lambda p: p.relative_to(base).as_posix())


def read_files(paths: list[Path]) -> list[str]:
    """Texts of ``paths``, without files that are not UTF-8 (codec test data)."""
    texts = []
    for path in paths:
        with suppress(UnicodeDecodeError, OSError):
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def stdlib_text(split: str, *, max_bytes: int | None = None) -> str:
    """Text of one split, files joined by a form feed; with ``max_bytes``, excerpts of about that size in all.

    Excerpts come from files spread evenly over the library, and from changing places in them: heads of files are mostly
    licences and imports.
    """
    files = stdlib_files(split)
    if max_bytes is None:
        return "\f\n".join(read_files(files))
    # a quarter more excerpts than needed, since some files are shorter than one
    count = max(1, math.ceil(1.25 * max_bytes / _EXCERPT_BYTES))
    chosen = [files[i * len(files) // count] for i in range(min(count, len(files)))]
    length = max(_EXCERPT_BYTES, math.ceil(1.25 * max_bytes / max(1, len(files))))
    parts = []
    for i, text in enumerate(read_files(chosen)):
        start = int(max(0, len(text) - length) * ((i + 1) * 0.618 % 1))
        start = text.rfind("\n", 0, start) + 1  # the beginning of a line
        parts.append(text[start : start + length])
    return "\f\n".join(parts).encode()[:max_bytes].decode(errors="ignore")
