"""The version of this package, and how to install its extras: it is in no package index."""

import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata

from torch_pi2.errors import LibraryMissingError


def how_to_install(*extras: str) -> str:
    """The ``pip install`` command, for messages, of the extras' packages, however this package was installed."""
    try:
        lines = metadata.requires("torch-pi2") or []
    except metadata.PackageNotFoundError:
        return f"pip install --no-build-isolation -e '.[{','.join(extras)}]' in the checkout"
    wanted: dict[str, None] = {}
    left = list(extras)
    while left:
        extra = left.pop(0)
        for line in lines:
            requirement, _, marker = line.partition(";")
            if re.search(rf"""extra == ["']{extra}["']""", marker):
                ours = re.match(r"torch[-_]pi2\[(.*)\]", requirement.strip())
                if ours:
                    left += ours[1].split(",")
                else:
                    wanted[requirement.strip()] = None
    return f"pip install {shlex.join(wanted)}"


@contextmanager
def needed(name: str, extra: str, purpose: str = "") -> Iterator[None]:
    """Raises LibraryMissingError: the block cannot import ``name``, a package of ``extra``; ``purpose``: what for."""
    try:
        yield
    except ImportError as error:
        expected, fix = purpose or f"an installed {name}", how_to_install(extra)
        raise LibraryMissingError(name, expected=expected, found=str(error), fix=fix) from error


__version__ = "0.1.0"


@contextmanager
def quiet_loggers(*names: str, chosen: bool = True) -> Iterator[None]:
    """Hide warnings of these loggers; ``chosen``: also of those whose level was chosen."""
    loggers = [logger for logger in map(logging.getLogger, names) if chosen or logger.level == logging.NOTSET]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


#: Hides what libraries that transformers imports log for their own developers.
quiet_imports = partial(quiet_loggers, "torchao", "torch.utils._pytree", chosen=False)
