"""Tables: plain text in pipes and files; in a terminal with colours, and no wider than the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: The terminal that results go to; None: a pipe or file.
_terminal: ContextVar[Console | None] = ContextVar("terminal", default=None)
#: Blanks between columns.
_GAP = 2
#: Cells with blanks may be wrapped to this width; numbers and names are not.
_LEAST_WORDS = 24


@contextmanager
def shown_on(file: TextIO | None) -> Iterator[None]:
    """Tables inside the block are for ``file``."""
    console = None
    if getattr(file, "isatty", bool)():  # no terminal if it is closed or has no isatty
        from rich.console import Console

        console = Console(file=file, highlight=False)  # knows NO_COLOR, TERM=dumb and COLUMNS
    token = _terminal.set(console)
    try:
        yield
    finally:
        _terminal.reset(token)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text; numbers are aligned to the right."""
    body = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *body]) for i in range(len(header))]
    numbers = [all(re.match(r"[-+]?\d|-?$", row[i]) for row in body) for i in range(len(header))]
    console = _terminal.get()
    if console is not None:
        return _in_colour(console, header, body, widths, numbers)

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers)).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])


def _in_colour(
    console: Console, header: Sequence[str], body: list[list[str]], widths: list[int], numbers: list[bool]
) -> str:
    """Columns that do not fit go into further tables below, each with the first column."""
    from rich.table import Table
    from rich.text import Text

    words = [any(" " in row[i] for row in body) and not numbers[i] for i in range(len(header))]
    beside = max(_LEAST_WORDS, console.width - min(widths[0], console.width // 2) - _GAP)  # width next to the first
    most = [max(_LEAST_WORDS, len(h)) if long else beside for h, long in zip(header, words)]
    least = [min(pair) for pair in zip(widths, most)]
    shown: list[Any] = []
    for group in _side_by_side(least, console.width):
        part = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold cyan")
        for i in group:
            style = "bold" if i == 0 and len(header) > 2 else None
            justify: Any = "right" if numbers[i] else "left"
            part.add_column(
                Text(header[i]), justify=justify, style=style, overflow="fold", min_width=None if words[i] else least[i]
            )
        for row in body:
            part.add_row(*(Text(row[i]) for i in group))
        shown += [part] if not shown else ["", part]
    with console.capture() as captured:
        for part in shown:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _side_by_side(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table; all contain the first."""
    groups = [[0]]
    taken = widths[0]
    for i in range(1, len(widths)):
        if len(groups[-1]) > 1 and taken + _GAP + widths[i] > width:
            groups.append([0])
            taken = widths[0]
        groups[-1].append(i)
        taken += _GAP + widths[i]
    return groups
