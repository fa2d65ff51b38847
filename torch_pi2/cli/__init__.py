"""The ``torch-pi2`` command: a module or class per verb, each with ``EXAMPLE``, ``add_arguments``, ``run``, ``render``.

``run`` returns a dict; ``--json`` prints it as the only thing on standard output, otherwise ``render`` turns it into
text. Progress, logs and output of libraries go to standard error.
Exit codes: 0 success, 1 ``doctor`` found a problem, 2 an error (a ``Pi2Error``, or standard output that cannot be
written), 130 interrupted, 141 the reader closed standard output, 143 ended by SIGTERM.
"""

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import platform
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn, TextIO

import shtab

from torch_pi2.base.fields import argument, shown
from torch_pi2.base.package import __version__
from torch_pi2.base.progress import lines
from torch_pi2.cli import common
from torch_pi2.cli.common import Help, Parser
from torch_pi2.cli.imports import import_torch, import_transformers
from torch_pi2.cli.terminal import OutputError, configured, emit, sigterm_as_exit
from torch_pi2.errors import ArtifactError, Pi2Error

__all__ = ["VERBS", "Parser", "build_parser", "command", "main"]

#: Verb -> one line of help, in order of use.
VERBS = {
    "sparsify": "train a dense model on until most of its neurons are zero for most tokens",
    "profile": "record how often each FFN neuron fires on calibration text",
    "fit": "fit low-rank activation predictors",
    "plan": "choose hot and cold neurons per layer",
    "optimize": "profile, fit, plan and write a sparse model folder",
    "import": "write a GGUF file, or a quantised checkpoint, as a folder of ours, at its own precision",
    "quantize": "write a float checkpoint with 4-bit or 8-bit weights",
    "pack": "write a model as a neuron store, to be read from storage",
    "synthetic": "write a model of real sizes with random weights, to measure speed",
    "export": "write a model as a bundle for ExecuTorch, on a phone or here",
    "run": "continue a prompt with a bundle, by ExecuTorch",
    "generate": "continue a prompt with a model that PyTorch runs",
    "chat": "talk with a model in the terminal",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "eval": "dense against sparse: held-out loss, work and time",
    "zeros": "how many neurons are zero, or nearly, on a text",
    "inspect": "what is in a folder of ours",
    "replay": "what other caches would have had of recorded accesses",
    "doctor": "versions, CPU features, kernels, missing extras",
}
#: Module and class of the verbs whose module has another name.
_PLACES = {verb: ("optimize", verb.capitalize()) for verb in ("sparsify", "profile", "fit")}
_PLACES |= {verb: ("checkpoint", verb.capitalize()) for verb in ("import", "quantize", "pack", "synthetic")}
_PLACES["run"] = ("generate", "Run")
#: Verbs that load a model and compute nothing else.
_GENERATING = ("generate", "chat", "serve")
BuildParser = Callable[[], argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Imports the verbs, but no heavy libraries."""
    parser = Parser(prog="torch-pi2", description="Sparse feed-forward layers for PyTorch models.")
    versions = f"torch-pi2 {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=versions, help="versions of torch-pi2, torch and Python")
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for a shell")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, help_line in VERBS.items():
        module, class_name = _PLACES.get(name, (name, None))
        verb: Any = importlib.import_module(f"torch_pi2.cli.{module}")
        verb = getattr(verb, class_name) if class_name else verb
        about = cleandoc(verb.__doc__)
        epilog = f"example:\n  {verb.EXAMPLE}"
        own = verbs.add_parser(name, help=help_line, description=about, epilog=epilog, formatter_class=Help)
        verb.add_arguments(own)
        common.add_every(own)
        for action in own._actions:
            if action.type is Path or action.dest in ("model", "text"):
                files = str(action.metavar or "").startswith(("FILE", "PATH"))
                action.complete = shtab.FILE if files else shtab.DIRECTORY  # type: ignore[attr-defined]
        own.set_defaults(module=verb)
    return parser


def _run(argv: Sequence[str], parser: BuildParser, own_process: bool) -> tuple[dict[str, Any], str, TextIO | None]:
    """The result, its text or JSON, and the file to write it to."""
    for given in argv:
        argument(given, f"argument {shown(given)}", "Use UTF-8, or rename the file.").text(empty=True)
    args = parser().parse_args(argv)
    args.stdout = sys.stdout  # for verbs that stream their result
    # from here on standard output is for the result alone
    phases = lines("torch-pi2", not args.quiet)
    with configured(args.verbose, args.quiet), phases, contextlib.redirect_stdout(sys.stderr):
        alone = own_process and getattr(args, "verb", "") in _GENERATING  # benchmarks have none
        if alone:
            gc.disable()  # modules are kept: looking for garbage among them takes a tenth of the start
            import_torch()
        import torch

        from torch_pi2.cli import folders

        if args.threads is not None:
            torch.set_num_threads(args.threads)
        folders.check(args, alone)
        if alone:
            import_transformers()
        import torch_pi2.api  # noqa: F401 (nearly all verbs use it)

        for file in args.imported:
            runpy.run_path(file)
        if alone:
            gc.freeze()
            gc.enable()
        with sigterm_as_exit():
            result = args.module.run(args)
    return result, json.dumps(result) if args.json else args.module.render(result), args.stdout


def main(argv: Sequence[str] | None = None, parser: BuildParser = build_parser) -> int:
    """Run the command line ``argv`` (default: the process's) of ``parser`` and return its exit code."""
    own_process, argv = argv is None, sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed: print() would use standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    try:
        try:
            result, text, file = _run(argv, parser, own_process)
            emit(file, text + "\n")
            return 0 if result.get("ok", True) else 1
        except Pi2Error as error:
            return _report(error, "--json" in argv)
        except OSError as error:
            if error.filename is None or isinstance(error, BrokenPipeError):
                raise
            # an error of a file that is not handled elsewhere: a name that is too long, no permission
            expected, fix = "a file or folder that can be used", "Check its name and permissions."
            found = str(error.strerror or error)
            known = ArtifactError(shown(error.filename), expected=expected, found=found, fix=fix)
            return _report(known, "--json" in argv)
    except KeyboardInterrupt:
        _say("interrupted; nothing was left half-written")
        return 130
    except MemoryError:
        _say("memory: expected what the command takes, found none left")
        return 2
    except BrokenPipeError:  # the reader (head, less) has gone
        return 141
    except OutputError as error:
        _say(error)
        return 2
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:  # else Python would try again when it closes standard output, and print a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command() -> NoReturn:
    """:func:`main` of a process of its own, which ends without taking models and modules to pieces."""
    code = main()
    if all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _report(error: Pi2Error, as_json: bool) -> int:
    if isinstance(error, OutputError):
        raise error
    _say(error)
    if as_json:
        parts = {name: getattr(error, name) for name in ("what", "expected", "found", "fix")}
        emit(sys.stdout, json.dumps({"error": {"type": type(error).__name__, **parts}}) + "\n")
    return 2


def _say(what: object) -> None:
    with contextlib.suppress(OSError):  # a full disk; the exit code still tells
        print(f"torch-pi2: {what}", file=sys.stderr)
