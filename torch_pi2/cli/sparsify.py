"""Train a dense model on until most values of its FFN neurons are exactly zero, and write it as a checkpoint. Lossy.

The activation becomes ReLU; a penalty is steered until the share of zeros is the target. Checkpoints are kept in
OUT.training: the same command resumes after a kill. Several GPUs or machines:
`accelerate launch -m torch_pi2 sparsify ...`. The result is an ordinary checkpoint of transformers, which
`torch-pi2 optimize` makes fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.processes import end_of_group
from torch_pi2.training.settings import ACTIVATIONS, SparsifySettings

EXAMPLE = "torch-pi2 sparsify my-model --out my-relu-model --text corpus/*.txt --steps 1000 --distill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_out(parser)
    add, default = parser.add_argument, SparsifySettings()

    def number(option: str, kind: Callable[[str], Any], metavar: str, what: str) -> None:
        usual = getattr(default, option.removeprefix("--").replace("-", "_"))
        add(option, type=kind, default=usual, metavar=metavar, help=f"{what} (default: {usual:g})")

    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE|stdlib",
        help="UTF-8 documents to train on; stdlib: source of Python's standard library",
    )
    add(
        "--heldout",
        nargs="+",
        metavar="FILE|stdlib-heldout",
        help="documents to measure on (default: the last 2 %% of --text, which are not trained on)",
    )
    add("--activation", choices=ACTIVATIONS, default=default.activation, help="drelu: also on up; needs modelling code")
    number("--target-sparsity", common.probability, "S", "share of zeros")
    add(
        "--steps",
        type=common.count,
        default=default.steps,
        metavar="N",
        help="of the optimiser (default: 0, one pass over the text)",
    )
    number("--batch", common.positive, "N", "windows a step")
    number("--window", common.positive, "N", "tokens")
    add("--accumulate", type=common.positive, default=1, metavar="N", help="forward passes a step (default: 1)")
    number("--learning-rate", float, "F", "the highest")
    add("--lora", type=common.count, default=0, metavar="R", help="train adapters of rank R alone (package peft)")
    add(
        "--distill",
        type=float,
        nargs="?",
        const=0.5,
        default=0.0,
        metavar="SHARE",
        help="share of the loss from the dense model's predictions (without SHARE: 0.5)",
    )
    add("--float32", action="store_true", help="compute in float32, not in bfloat16")
    add(
        "--save-every",
        type=common.count,
        default=0,
        metavar="N",
        help="steps between checkpoints (default: 0, ten in all)",
    )
    add("--seed", type=common.seed, default=0, help="of every random choice (default: 0)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2

    common.check_out(args.out)
    names = ("activation", "target_sparsity", "steps", "batch", "window", "accumulate", "learning_rate", "lora")
    report = torch_pi2.sparsify(
        common.load_dense(args),
        args.out,
        _documents(args.text, "--text"),
        heldout=_heldout(args),
        tokenizer=common.load_tokenizer(args),
        progress=not args.quiet,
        **common.given(args, *names, "distill", "save_every", "seed"),
        bf16=not args.float32,
    )
    end_of_group(args)
    return {"out": str(args.out), **report.to_json(), "lines": report.lines()}


def _heldout(args: argparse.Namespace) -> list[str] | None:
    if args.heldout is None:
        return _documents(["stdlib-heldout"], "--heldout") if args.text == ["stdlib"] else None
    return _documents(args.heldout, "--heldout")


def _documents(given: list[str], option: str) -> list[str]:
    from torch_pi2.profiling.text import read_files, stdlib_files

    found: list[str] = []
    for name in given:
        if name in ("stdlib", "stdlib-heldout"):
            found += read_files(stdlib_files("heldout" if name.endswith("heldout") else "train", with_tests=True))
        else:
            found.append(common.text_in(name, option))
    return found


def render(result: dict[str, Any]) -> str:
    lines = (f"{name + ':':10}{value}" for name, value in result["lines"].items())
    return "\n".join([*lines, f"wrote {result['out']}; next: torch-pi2 optimize {result['out']} --out DIR"])
