"""Warnings that are given once per process."""

from __future__ import annotations

import logging
import warnings

_log = logging.getLogger("torch_pi2")
_said: set[str] = set()


def log_once(message: str) -> bool:
    """Log ``message``, the first time; whether it was."""
    if message in _said:
        return False
    _said.add(message)
    _log.warning(message)
    return True


def warn_once(message: str) -> None:
    """The same, and a UserWarning of the caller's caller."""
    if log_once(message):
        warnings.warn(f"torch_pi2: {message}", stacklevel=3)
