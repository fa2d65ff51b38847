"""Benchmarks: ``python -m benchmarks NAME``, from the top folder of a checkout.

Of one layer: `ffn`, `layer`, `gpu`, `attention`. Of whole models: `decode`, `imported`, `bundle`, `bundle-offload`,
`offload`, `together`, `generate`, `speculate`, `gpu-model`. Of servers: `serve`, `prefix`. Of quality, not speed:
`methods`, `sparsify`, `predictors`, `quantization`, `suite`. Of memory: `fit`. Simulated or modelled: `phone`, `reads`.
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

from benchmarks import tables
from torch_pi2 import cli
from torch_pi2.cli import common
from torch_pi2.machine import process

#: name -> one line of help. The module ``benchmarks/NAME.py`` has ``add_arguments(parser)``; ``run(args)``, which
#: returns the figures; ``about(result)``, a line that says what was run; and ``TABLES``.
BENCHMARKS = {
    "ffn": "one gated layer with float weights, dense against sparse",
    "layer": "one gated layer over shares of active neurons, against the memory roofline",
    "gpu": "one gated layer on a GPU: predicted, by the exact gate, and dense by cuBLAS",
    "gpu-model": "a whole model on a GPU: ours beside dense; or divided, beside offloading and the CPU",
    "attention": "new tokens over a static cache: our operator, torch's SDPA and the memory roofline",
    "decode": "a whole model, synthetic or in --folder, optionally against other engines",
    "imported": "GGUF files of several types, imported, beside llama.cpp on the same files",
    "bundle": "bundles in the C++ runner by the format of keys and values, beside PyTorch's Decoder",
    "bundle-offload": "a bundle larger than memory in the C++ runner, by budget",
    "generate": "model.generate over our steps, beside transformers' own and torch_pi2.generate",
    "offload": "a model larger than memory, step by step from mmap to the pipeline",
    "together": "processes with a shard each, beside one alone, by the link between them",
    "speculate": "guessed next tokens, verified together, against plain decoding",
    "fit": "predictors of a model that is larger than memory: how much of it that takes",
    "reads": "which reads neurons need by the order in which they lie, modelled",
    "predictors": "what a token reads with low-rank predictors of one recall, by rank and format",
    "serve": "servers under load, and how long clients wait, optionally against llama-cpp-python's own",
    "prefix": "the first text of an answer whose prompt begins as one before did",
    "phone": "a phone of published figures, simulated: prompts and decoding beside PowerInfer-2's own",
    "methods": "what methods and 4 bits cost a trained model, in memory, over a store and in a bundle",
    "quantization": "what 4 bits cost a trained model, to nearest and calibrated, part by part",
    "sparsify": "a dense model made sparse by training, beside the same trained on as long: zeros and loss",
    "suite": "questions about held-out text: what sparsity and 4 bits change of a trained model's answers",
}

EXAMPLE = "python -m benchmarks decode --shape mistral-7b --weights int4 --threads 2 --prompt 128 --tokens 32 --json"
#: Options that say how to print, not what was measured.
_PRINTING = ("help", "json", "verbose", "quiet", "threads")


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


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The options, the figures of the benchmark, the machine, and the command line."""
    options = {
        action.dest: value.name if isinstance(value, Path) else value
        for action in args.options._actions
        if action.dest not in _PRINTING and (value := getattr(args, action.dest)) is not None
    }
    about = {"what": args.name, **options, "threads": torch.get_num_threads()}
    return {**about, **_module(args.name).run(args), **process.describe(), "command": _command(args)}


def call(name: str, **settings: Any) -> dict[str, Any]:
    """:func:`run` from Python: ``settings`` in the place of the defaults of the options."""
    parser = argparse.ArgumentParser()
    _module(name).add_arguments(parser)
    defaults = {action.dest: action.default for action in parser._actions} | parser._defaults
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
    for action in args.options._actions:
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
