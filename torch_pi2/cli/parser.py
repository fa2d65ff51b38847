"""argparse for this command line: mistakes become errors of ours, and the help shows defaults."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from torch_pi2.cli.output import emit
from torch_pi2.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a Pi2Error, so that ``--json`` covers it too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        fix = f"See `{self.prog} --help`."
        raise ConfigError("command line", expected="valid arguments", found=message, fix=fix)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A verb names its own options when one is unknown; argparse would leave that to the parser above it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and versions, which argparse lets go unwritten."""
        if file is sys.stderr:
            super()._print_message(message, file)
        else:
            emit(sys.stdout, message)


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one, unless its help text does already."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap long lines; keep the others, and indented examples, as they were written."""
        width -= len(indent)
        lines: list[str] = []
        for line in text.splitlines():
            lines += [line] if len(line) <= width or line.startswith(" ") else textwrap.wrap(line, width)
        return "\n".join(indent + line for line in lines)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or not action.option_strings or has_no_default(default) or re.search(r"\bdefault\b", text):
            return text
        shown = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def has_no_default(default: Any) -> bool:
    """Whether leaving an option out means nothing in particular: a flag, no value, an empty list."""
    return default is None or default is False or default is argparse.SUPPRESS or default == []


class Version(argparse.Action):
    """``--version``: one line, read from package metadata without importing the packages."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="versions of torch-pi2, torch and Python")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import platform
        from importlib import metadata

        from torch_pi2.base.package import __version__

        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "missing"
        emit(sys.stdout, f"torch-pi2 {__version__} (torch {torch}, Python {platform.python_version()})\n")
        parser.exit()
