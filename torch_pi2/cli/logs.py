"""What is said on standard error while a verb runs: ours by -v and -q, and of other libraries only what went wrong.

Only the command line is so strict: ``import torch_pi2`` changes no logger and no filter.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: Advice to developers at start-up (extensions that were not loaded, classes registered twice, lengths of texts), under
#: these loggers; what goes wrong in them is an error, and is still said.
_OTHERS = ("torch", "torch.utils._pytree", "torchao", "transformers", "executorch", "root")
#: The same as Python's warnings, by the module that warns.
_WARNERS = r"(torch|torchao|transformers|executorch|huggingface_hub)(\.|$)"


@contextmanager
def said(verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """Ours at the level asked for, and others' advice not at all unless ``verbose``; as it was afterwards."""
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
    """What C++ writes to standard error itself goes nowhere, unless ``verbose``; for starting a library, no longer."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
