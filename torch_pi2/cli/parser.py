"""argparse as this command line wants it: mistakes as errors of ours with the nearest right word, defaults in help."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch_pi2.cli.output import emit
from torch_pi2.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a Pi2Error, so that ``--json`` covers it too."""

    def error(self, message: str) -> NoReturn:
        self._refuse(message)

    def _refuse(self, message: str, meant: str = "") -> NoReturn:
        self.print_usage(sys.stderr)
        fix = f"See `{self.prog} --help`."
        raise ConfigError("command line", expected="valid arguments", found=message, fix=f"{meant} {fix}".lstrip())

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and versions, which argparse lets go unwritten."""
        if file is sys.stderr:
            super()._print_message(message, file)
        else:
            emit(sys.stdout, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of choices, verbs among them."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            self._refuse(str(error), did_you_mean(str(value), map(str, action.choices or ())))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._check_options(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _check_options(self, args: Sequence[str]) -> None:
        """Refuses an option that is none, before argparse finds that the one that was meant is missing."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        top = self._subparsers is not None
        for given in args:
            if given == "--" or (top and not given.startswith("-")):
                return  # what follows is a verb's, or no option
            name = given.partition("=")[0]
            # A shorter form of an option is one, and a word with a space in it is a value: so argparse has it.
            if given.startswith("--") and " " not in given and not any(long.startswith(name) for long in known):
                meant = did_you_mean(name, known)
                if meant or not top:  # else a verb's, perhaps, before the verb
                    self._refuse(f"unrecognized arguments: {given}", meant)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question that names the nearest of ``known``; nothing where none is near."""
    bare = {name.lstrip("-"): name for name in known}  # with dashes in common, all options are near each other
    near = difflib.get_close_matches(given.lstrip("-"), bare, n=1)
    return f"Did you mean {bare[near[0]]}?" if near else ""


class Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of every option that has one, unless its help does already."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Lines that are too long are wrapped; the others, and examples, are as they were written."""
        room = width - len(indent)
        whole = [
            [line] if len(line) <= room or line.startswith(" ") else textwrap.wrap(line, room)
            for line in text.splitlines()
        ]
        return "\n".join(indent + part for parts in whole for part in parts)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or not action.option_strings or has_no_default(default) or re.search(r"\bdefault\b", text):
            return text
        shown = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def has_no_default(default: Any) -> bool:
    """Whether an option that is not given is as if there were none: a flag, no value, an empty list."""
    return default is None or default is False or default is argparse.SUPPRESS or default == []


class Version(argparse.Action):
    """``--version``: one line. Read from what is installed, without importing any of it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="versions of torch-pi2, torch and Python")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import platform
        from importlib import metadata

        from torch_pi2.base.version import __version__

        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "missing"
        emit(sys.stdout, f"torch-pi2 {__version__} (torch {torch}, Python {platform.python_version()})\n")
        parser.exit()
