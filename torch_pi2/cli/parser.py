"""argparse for this command line: mistakes become errors of ours, the help shows defaults, old names, completion."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch_pi2.cli.terminal import emit
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


def add_old_name(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Let the option ``new`` also be given as ``old`` for one release: with a warning, and not shown in the help."""
    action = parser._option_string_actions[new]

    class OldName(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _option: Any = None) -> None:
            print(f"torch-pi2: {old} is now called {new}; the old name ends with the next release", file=sys.stderr)
            action(parser, namespace, values, new)

    how: dict[str, Any] = {name: getattr(action, name) for name in ("dest", "nargs", "type", "choices")}
    parser.add_argument(old, action=OldName, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


class Completion:
    """Print a shell's completion script for verbs, options, their values, files and folders.

    bash:  torch-pi2 completion bash > ~/.local/share/bash-completion/completions/torch-pi2
    zsh:   torch-pi2 completion zsh > DIR/_torch-pi2, where DIR is in $fpath
    tcsh:  torch-pi2 completion tcsh > ~/.torch-pi2.tcsh, and source it in ~/.tcshrc
    """

    EXAMPLE = "torch-pi2 completion bash"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which it is for")

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import shtab  # whose scripts are complete: no Python is started at a TAB

        for action in _actions(args.root):
            if action.type is Path or action.dest in ("model", "text"):
                files = str(action.metavar or "").startswith(("FILE", "PATH"))
                action.complete = shtab.FILE if files else shtab.DIRECTORY  # type: ignore[attr-defined]
        return {"shell": args.shell, "script": shtab.complete(args.root, args.shell)}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        return str(result["script"]).rstrip("\n")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of all verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
