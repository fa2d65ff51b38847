"""Benchmarks: ``python -m benchmarks NAME``, from the top folder of a checkout.

Of one layer: `layer`, `inputs`, `gpu`. Of whole models: `decode`, `imported`, `real`, `bundle`, `offload`, `together`,
`generate`, `speculate`, `drafts`, `gpu-model`. Of servers: `serve`, `prefix`. Of quality: `humaneval`; and speed:
`methods`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import BENCHMARKS, tables
from torch_pi2 import cli
from torch_pi2.cli import common
from torch_pi2.machine import process

EXAMPLE = "python -m benchmarks decode --shape mistral-7b --weights int4 --threads 2 --prompt 128 --tokens 32 --json"
#: Options that say how to print, not what was measured.
_PRINTING = ("json", "verbose", "quiet", "threads")


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, help_line in BENCHMARKS.items():
        benchmark = names.add_parser(name, help=help_line, description=help_line)
        _module(name).add_arguments(benchmark)
        common.add_every(benchmark)
        benchmark.set_defaults(module=sys.modules[__name__], options=benchmark)
    return parser


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Its options, without old names of some and the one for help."""
    return [action for action in parser._actions if action.default is not argparse.SUPPRESS]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The options, the figures of the benchmark, the machine, and the command line."""
    options = {
        action.dest: value.name if isinstance(value, Path) else value
        for action in _shown(args.options)
        if action.dest not in _PRINTING and (value := getattr(args, action.dest)) is not None
    }
    about = {"what": args.name, **options, "threads": torch.get_num_threads()}
    return {**about, **_module(args.name).run(args), **process.describe(), "command": _command(args)}


def call(name: str, **settings: Any) -> dict[str, Any]:
    """:func:`run` from Python: ``settings`` in the place of the defaults of the options."""
    parser = argparse.ArgumentParser()
    _module(name).add_arguments(parser)
    defaults = {action.dest: action.default for action in _shown(parser)} | parser._defaults
    return run(argparse.Namespace(**{**defaults, **settings, "name": name, "options": parser}))


def render(result: Mapping[str, Any]) -> str:
    return tables.render(_module(result["what"]), result)


def _command(args: argparse.Namespace) -> str:
    """The command line with every value; of absolute paths only the last part."""

    def text(value: Any) -> str:
        if isinstance(value, Path):
            return value.name if value.is_absolute() else str(value)
        return ",".join(map(str, value)) if isinstance(value, list) else re.sub(r"(^|\s)/\S*/", r"\1", str(value))

    words = ["python", "-m", "benchmarks", args.name]
    for action in _shown(args.options):
        value = getattr(args, action.dest, None)
        if value is None or (action.nargs == 0 and value is not action.const):
            continue
        flag = action.option_strings[-1:]
        if action.nargs == 0:
            words += flag
        else:
            repeated = value if isinstance(action, argparse._AppendAction) else [value]
            words += [word for each in repeated for word in (*flag, text(each))]
    return shlex.join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; exit codes as of ``torch-pi2``."""
    return cli.main(argv, build_parser)


if __name__ == "__main__":
    sys.exit(main())
