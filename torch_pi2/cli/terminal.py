"""Standard output, tables, messages of libraries, and signals."""

import logging
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from torch_pi2.base.units import percent, size
from torch_pi2.errors import ArtifactError

#: Names of fields that are shares.
_SHARE = re.compile(r"share|rate|recall|precision|sparsity|active|used|computed|error$|in_memory|_change$")
#: Loggers whose warnings are advice to developers; their errors are still shown.
_OTHERS = ("torch", "torch.utils._pytree", "torchao", "transformers", "executorch", "root")
#: Modules whose Python warnings are, too.
_WARNERS = r"(torch|torchao|transformers|executorch|huggingface_hub)(\.|$)"


class OutputError(ArtifactError):
    """Standard output cannot be written."""


def emit(file: TextIO | None, text: str) -> None:
    """Write ``text`` and flush. Raises OutputError, or BrokenPipeError if the reader has closed the pipe."""
    try:
        if file is None:
            raise OSError("it is closed")
        file.write(text)
        file.flush()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        found = getattr(error, "strerror", None) or str(error)
        fix = "Write it elsewhere."
        if isinstance(error, UnicodeEncodeError):
            found = f"{error.encoding} without {error.object[error.start]!a}"
            fix = "Set PYTHONIOENCODING=utf-8, or use --json."
        expected = "a file or terminal that takes the result"
        raise OutputError("standard output", expected=expected, found=found, fix=fix) from error


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns, numbers to the right. In a terminal, columns that do not fit go into further tables."""
    body = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in body) for i in range(len(header))]
    numbers = [all(re.match(r"[-+]?\d|-?$", row[i]) for row in body[1:]) for i in range(len(header))]
    columns = shutil.get_terminal_size().columns if getattr(sys.stdout, "isatty", bool)() else sys.maxsize
    groups: list[list[int]] = [[0]]
    for i in range(1, len(header)):
        if len(groups[-1]) > 1 and sum(2 + widths[j] for j in (*groups[-1], i)) - 2 > columns:
            groups.append([0])
        groups[-1].append(i)

    def line(cells: Sequence[str], group: Sequence[int]) -> str:
        return "  ".join(cells[i].rjust(widths[i]) if numbers[i] else cells[i].ljust(widths[i]) for i in group).rstrip()

    rule = ["-" * width for width in widths]
    return "\n\n".join("\n".join(line(row, group) for row in (body[0], rule, *body[1:])) for group in groups)


def records(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """A table of the fields ``names`` of ``rows``, formatted by :func:`shown`, without fields that no row has."""
    found = [name for name in names if any(row.get(name) is not None for row in rows)]
    return table([name.replace("_", " ") for name in found], [[shown(n, row.get(n)) for n in found] for row in rows])


def shown(name: str, value: Any) -> str:
    """The text of a field: by its name, bytes become a size and shares per cent."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{count} {what}" for what, count in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(shown(name, one) for one in value)
    if name.endswith("bytes"):
        return size(value)
    if isinstance(value, float):
        return percent(value) if _SHARE.search(name) else f"{value:.4g}"
    return str(value)


@contextmanager
def configured(verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """Inside the block, ``-v`` and ``-q`` set our log level; other libraries show only errors without ``verbose``."""
    ours = logging.getLogger("torch_pi2")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("torch-pi2: %(message)s"))
    levels = {ours: logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING}
    if not verbose:
        levels |= {logging.getLogger(name): logging.ERROR for name in _OTHERS}
    before = {logger: logger.level for logger in levels}
    for logger, wanted in levels.items():
        logger.setLevel(wanted)
    ours.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.filterwarnings("ignore")
            elif not verbose:
                warnings.filterwarnings("ignore", module=_WARNERS)
            yield
    finally:
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)


@contextmanager
def muted(verbose: bool = False) -> Iterator[None]:
    """Discard standard error of C++ code, unless ``verbose``; for the start of a library only."""
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


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM (from kill, timeout or a container runtime) raises SystemExit, so that verbs clean up as after Ctrl-C."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:  # else end() of cli.processes ignores it until the process exits
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
