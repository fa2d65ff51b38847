"""The page that is made of the code when the site is built: the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

from torch_pi2.cli import VERBS, build_parser


def command_line() -> str:
    """Every verb with its options, as ``--help`` says them."""
    parser = build_parser()
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    lines = ["# Command line", "", f"`{parser.prog} VERB --help` says the same in the terminal.", ""]
    lines += ["| verb | |", "|---|---|", *(f"| [`{name}`](#{name}) | {_cell(VERBS[name])} |" for name in verbs), ""]
    for name, verb in verbs.items():
        lines += [f"## {name}", "", *_prose(verb.description or ""), "", *_prose(verb.epilog or ""), ""]
        lines += ["| argument | meaning |", "|---|---|", *_rows(verb), ""]
    return "\n".join(lines)


def _rows(verb: argparse.ArgumentParser) -> Iterator[str]:
    said = verb._get_formatter()
    for action in verb._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = said._format_args(action, said._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        names = ", ".join(action.option_strings)
        if not names:
            value = said._format_args(action, said._get_default_metavar_for_positional(action))
        help_text = said._expand_help(action) if action.help else ""
        yield f"| `{' '.join(filter(None, (names, value)))}` | {_cell(help_text)} |".replace("{", "&#123;")


def _prose(text: str) -> Iterator[str]:
    """Paragraphs as they are, and indented ones as commands."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        head = [line for line in paragraph.splitlines() if not line.startswith("  ")]
        shown = [line.strip() for line in paragraph.splitlines() if line.startswith("  ")]
        yield from (_escaped(line) for line in head)
        if shown:
            yield from ("", "```console", *(f"$ {line}" for line in shown), "```")
        yield ""


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    """Without meaning in Markdown, but for spans of code."""
    return re.sub(r"`+[^`]*`+|[\\*_<>|\[\]]", lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)


def on_files(files: Files, *, config: Any) -> Files:
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files
