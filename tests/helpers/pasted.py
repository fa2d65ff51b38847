"""Blocks of a page of Markdown, run from top to bottom as a reader would paste them, and what they show as output.

A ``python`` block is run, and what it prints is what the ``text`` block below it shows, if there is one. In a
``console`` block lines that begin with ``$`` are commands, and the others what they print. Python keeps its names from
block to block; commands are bash's. Numbers are shown of one run: other numbers are the same output, and a line of
``...`` is any lines.

``python pasted.py PAGE`` runs a page in the current folder, and prints a line of JSON: what each block printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """``shown``: its output as the page has it, or None; ``line``: where it begins."""

    language: str
    code: str
    shown: str | None
    line: int


def blocks(page: Path) -> list[Block]:
    """Those of ``page`` that can be run, in order."""
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    found = []
    for at, fence in enumerate(fences):
        line = text.count("\n", 0, fence.start()) + 2
        language, code, shown = fence[1], fence[2], None
        if language == "console":
            rows = code.splitlines()
            code = "".join(f"{row[2:]}\n" for row in rows if row.startswith("$ "))
            shown = "\n".join(row for row in rows if not row.startswith("$ ")) or None
        elif language == "python":
            below = fences[at + 1] if at + 1 < len(fences) else None
            if below and below[1] == "text" and not text[fence.end() : below.start()].strip():
                shown = below[2]
        else:
            continue
        found.append(Block(language, code, shown, line))
    return found


def same(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows, but for numbers and the space between words."""
    pattern = r".*".join(re.escape(_plain(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE))
    return re.fullmatch(pattern, _plain(printed), re.DOTALL) is not None


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?", "0", text).split())


def run(page: Path, folder: Path, *, seconds: float = 600) -> Iterator[tuple[Block, str]]:
    """Every block of ``page`` with what it prints, run in ``folder`` by a process of its own.

    Raises AssertionError, with what the process said, if a block fails.
    """
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / ".cache"), "HF_HUB_OFFLINE": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    process = subprocess.Popen(
        [sys.executable, __file__, str(page)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a block that failed has left running
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return zip(blocks(page), json.loads(out.splitlines()[-1]), strict=True)


def _printed(page: Path) -> list[str]:
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for block in blocks(page):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                # As many lines before it as in the page: messages then name the page's line.
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
            printed.append(said.getvalue())
        else:
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            printed.append(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return printed


if __name__ == "__main__":
    print(json.dumps(_printed(Path(sys.argv[1]))))
