"""argparse for this command line: mistakes become errors of ours, the help shows defaults, and old names of options."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from typing import Any, NoReturn

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
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one, unless its help text does already."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap long lines; keep the others, and indented examples, as they were written."""
        lines: list[str] = []
        for line in text.splitlines():
            lines += [line] if len(line) <= width or line.startswith(" ") else textwrap.wrap(line, width)
        return "\n".join(lines)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Numbers are N, whatever they are of."""
        return str(getattr(action.type, "metavar", "N" if action.type in (int, float) else action.dest.upper()))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or not action.option_strings or has_no_default(default) or re.search(r"\bdefault\b", text):
            return text
        words = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{text} (default: {words.replace('%', '%%')})"


def has_no_default(default: Any) -> bool:
    """Whether leaving an option out means nothing in particular: a flag, no value, an empty list."""
    return default is None or default is False or default is argparse.SUPPRESS or default == []


def add_old_name(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Let the option ``new`` also be given as ``old`` for one release: with a warning, and not shown in the help."""
    action = parser._option_string_actions[new]

    class OldName(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _option: Any = None) -> None:
            print(f"torch-pi2: {old} is now called {new}; the old name ends with the next release", file=sys.stderr)
            action(parser, namespace, values, new)

    how: dict[str, Any] = {name: getattr(action, name) for name in ("dest", "nargs", "type", "choices")}
    parser.add_argument(old, action=OldName, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)
