"""Logging of the command line: ours by -v and -q, and only errors of other libraries.

``import torch_pi2`` changes no logger and no filter.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: Loggers that give advice to developers at start-up; their errors are still shown.
_OTHERS = ("torch", "torch.utils._pytree", "torchao", "transformers", "executorch", "root")
#: Modules whose Python warnings are such advice.
_WARNERS = r"(torch|torchao|transformers|executorch|huggingface_hub)(\.|$)"


@contextmanager
def configured(verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """Set levels and filters inside the block. ``verbose``: show the advice of other libraries too."""
    ours = logging.getLogger("torch_pi2")
    handler = logging.StreamHandler(sys.stderr)
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    loggers = {ours: level}
    if not verbose:
        loggers |= {logging.getLogger(name): logging.ERROR for name in _OTHERS}
    before = {logger: logger.level for logger in loggers}
    for logger, wanted in loggers.items():
        logger.setLevel(wanted)
    ours.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.filterwarnings("ignore", module=_WARNERS)
            if quiet:
                warnings.filterwarnings("ignore")
            yield
    finally:
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)


@contextmanager
def muted(verbose: bool = False) -> Iterator[None]:
    """Discard what C++ code writes to standard error, unless ``verbose``; for the start of a library only."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
