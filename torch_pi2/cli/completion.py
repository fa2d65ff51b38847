"""Print a shell's completion script for verbs, options, their values, files and folders.

bash:  torch-pi2 completion bash > ~/.local/share/bash-completion/completions/torch-pi2
zsh:   torch-pi2 completion zsh > DIR/_torch-pi2, where DIR is in $fpath
tcsh:  torch-pi2 completion tcsh > ~/.torch-pi2.tcsh, and source it in ~/.tcshrc
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLE = "torch-pi2 completion bash"
#: The shells that shtab supports. Its scripts are complete: no Python is started at a TAB.
_SHELLS = ("bash", "zsh", "tcsh")
#: Metavars of arguments that are files, not folders.
_FILES = ("FILE", "PATH")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="which it is for")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import shtab

    parser = args.root
    for action in _actions(parser):
        metavar = str(action.metavar or "")
        if action.type is Path or action.dest in ("model", "text"):
            files = metavar.startswith(_FILES)
            action.complete = shtab.FILE if files else shtab.DIRECTORY  # type: ignore[attr-defined]
    return {"shell": args.shell, "script": shtab.complete(parser, args.shell)}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of all verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)


def render(result: dict[str, Any]) -> str:
    script: str = result["script"]
    return script.rstrip("\n")
