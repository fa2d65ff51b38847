"""Progress of long operations: a bar in a terminal, elsewhere a log line per phase; and one-time warnings. Programs can
show the lines: ``logging.getLogger("torch_pi2.progress")``, level INFO.
"""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: The library's messages; those of progress have a logger of their own.
log = logging.getLogger("torch_pi2")
LOGGER = "torch_pi2.progress"
_log = logging.getLogger(LOGGER)


def bar(items: Iterable[Any] | None, what: str, progress: bool, **settings: Any) -> Any:
    """A tqdm bar over ``items`` (None: advanced manually) if ``progress``; ``settings``: tqdm's."""
    from tqdm import tqdm

    shown = progress and sys.stderr is not None and sys.stderr.isatty()
    if progress and not shown:
        phase(what)
    return tqdm(items, desc=what, disable=not shown, **settings)


def phase(what: str) -> None:
    """Log the beginning of a phase without a bar."""
    _log.info("%s ...", what)


@contextmanager
def lines(prefix: str, wanted: bool = True) -> Iterator[None]:
    """Write phases to standard error during the block, or none of them unless ``wanted``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))
    before = (_log.level, _log.propagate)
    _log.addHandler(handler)
    _log.setLevel(logging.INFO if wanted else logging.ERROR)
    _log.propagate = False
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(before[0])
        _log.propagate = before[1]


_said: set[str] = set()


def log_once(message: str) -> bool:
    """Log ``message`` the first time; returns whether it was logged."""
    if message in _said:
        return False
    _said.add(message)
    log.warning(message)
    return True


def warn_once(message: str) -> None:
    """:func:`log_once` with a UserWarning for the caller's caller."""
    if log_once(message):
        warnings.warn(f"torch_pi2: {message}", stacklevel=3)
