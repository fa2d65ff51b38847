"""Calibration and held-out text that every Python installation already has: its standard library.

Nothing is downloaded (design D10). Files are split by a hash of their *relative path*, so a file that is
held out under one Python version is held out under all of them and never leaks into a training set made
with another version. Held-out files come only from the library proper (test suites are not installed
everywhere).
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

_SKIP_DIRS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"})
_TEST_DIRS = frozenset({"test", "tests", "idle_test"})
_HELDOUT_SHARE = 24  # one file in 24 is held out


def _is_heldout(rel_path: str) -> bool:
    digest = hashlib.sha256(rel_path.encode()).digest()
    return int.from_bytes(digest[:4], "little") % _HELDOUT_SHARE == 0


def stdlib_files(split: str, *, root: str | Path | None = None, with_tests: bool = False) -> list[Path]:
    """Sorted paths of the standard library's ``.py`` files belonging to ``split``.

    Args:
        split: ``"train"`` or ``"heldout"``.
        root: library folder; defaults to the running interpreter's.
        with_tests: add the library's own test suites to the training split where they are installed.

    Raises:
        ValueError: ``split`` is neither of the two names.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', found {split!r}")
    base = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in base.rglob("*.py"):
        rel = path.relative_to(base)
        parts = set(rel.parts[:-1])
        if parts & _SKIP_DIRS:
            continue
        is_test = bool(parts & _TEST_DIRS)
        heldout = _is_heldout(rel.as_posix())
        if split == "heldout" and (is_test or not heldout):
            continue
        if split == "train" and (heldout or (is_test and not with_tests)):
            continue
        chosen.append(path)
    return sorted(chosen, key=lambda p: p.relative_to(base).as_posix())


def read_files(paths: list[Path]) -> list[str]:
    """Texts of ``paths``; files that are not UTF-8 (codec test data) are left out."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
    return texts


def stdlib_text(split: str, *, max_bytes: int | None = None) -> str:
    """Text of one split, files joined by a form feed, cut to ``max_bytes`` UTF-8 bytes at most.

    The cut takes an equal share from the head of every file in turn, so that a small sample still sees
    many modules rather than the first alphabetically.
    """
    texts = read_files(stdlib_files(split))
    if max_bytes is not None and texts:
        share = max(1, max_bytes // len(texts))
        texts = [t.encode()[:share].decode(errors="ignore") for t in texts]
    return "\f\n".join(texts)
