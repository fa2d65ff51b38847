"""A dense model made sparse by `sparsify`, beside the same model trained on as long without any of it.

Both see the same windows of the standard library's source, in the same order, with the same optimiser; losses are on
held-out files of it. Nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.tables import Result, Table, at
from torch_pi2.cli import common
from torch_pi2.graph.find import find_sites
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.training.settings import ACTIVATIONS, SparsifySettings
from torch_pi2.training.sparsify import windows_of
from torch_pi2.training.trainer import alone, train, training_arguments
from torch_pi2.training.zeros import Measured, Zeros, measure

_TARGETS = [0.9, 0.95]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    add = parser.add_argument
    add("--targets", type=list_of(common.probability), default=_TARGETS, metavar="S,...", help="shares of zeros")
    add("--activation", choices=ACTIVATIONS, default="relu-gate", help="of the sparse ones; default: %(default)s")
    add("--steps", type=common.positive, default=1200, metavar="N", help="of each training; default: %(default)s")
    add("--batch", type=common.positive, default=8, metavar="N", help="windows of a step; default: %(default)s")
    add("--window", type=common.positive, default=256, metavar="N", help="tokens of a window; default: %(default)s")
    add("--learning-rate", type=float, default=5e-4, metavar="R", help="default: %(default)s")
    add("--distill", type=float, default=0.0, metavar="S", help="as of sparsify; default: %(default)s")
    add("--tokens", type=common.positive, default=32_768, metavar="N", help="held out; default: %(default)s")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Zeros and held-out nats per token of the dense model ``before``, ``dense`` (trained on), and by target."""
    dense, tokenizer = common.load_dense(args), common.load_tokenizer(args)
    dense.float()
    names = ("activation", "steps", "batch", "window", "learning_rate", "distill")
    settings = SparsifySettings(**{name: getattr(args, name) for name in names})
    text, heldout = [stdlib_text("train")], [common.stdlib_sample("heldout", tokenizer, args.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        before, after = _trained_on(dense, text, heldout, tokenizer, settings, Path(folder) / "dense")
        cases = {"before": _case(before), "dense": _case(after)}
        for target in args.targets:
            fields: Any = vars(replace(settings, target_sparsity=target))
            out = Path(folder) / "sparse"
            done = torch_pi2.sparsify(dense, out, text, heldout=heldout, tokenizer=tokenizer, progress=True, **fields)
            cases[f"{target:.1%}"] = _case(done.after)
    return {
        "folder": Path(args.model).resolve().name,
        "form": find_sites(dense)[0].form,
        "settings": {name: value for name, value in vars(settings).items() if name != "target_sparsity"},
        "heldout_tokens": args.tokens,
        "cases": cases,
    }


@alone()
def _trained_on(
    dense: Any, text: list[str], heldout: list[str], tokenizer: Any, settings: SparsifySettings, folder: Path
) -> tuple[Measured, Measured]:
    """A copy of ``dense``, trained as `sparsify` trains, without a penalty: before and after."""
    train_NT, heldout_NT = (windows_of(part, tokenizer, settings.window) for part in (text, heldout))
    model = copy.deepcopy(dense)
    zeros = Zeros(model, find_sites(model))
    before = measure(model, zeros, heldout_NT)
    free = replace(before, penalty=math.inf)  # of which the first weight is a part: 0
    arguments = training_arguments(settings, folder, settings.steps)
    train(model, zeros, train_NT, heldout_NT, settings, arguments, teacher=None, begins=free, progress=True)
    return before, measure(model.to("cpu", torch.float32), zeros, heldout_NT)


def _case(found: Measured) -> dict[str, float]:
    return {"zeros": found.mean_zeros, "nats_per_token": found.nats_per_token}


def _rows(result: Result) -> list[dict[str, Any]]:
    """Losses beside that of the dense model which was trained on as long."""
    nats = result["cases"]["dense"]["nats_per_token"]
    return [
        {"target": name, **case, "loss": case["nats_per_token"] / nats - 1} for name, case in result["cases"].items()
    ]


TABLES = (
    Table(
        "Made sparse by training",
        _rows,
        {
            "target": at("target"),
            "zeros": at("zeros", common.percent),
            "nats per token": at("nats_per_token", ".4f"),
            "loss": at("loss", "+.2%"),
        },
        "A trained model, trained on with ReLU and a penalty that is steered to a share of zeros: these and the loss "
        "on held-out text, beside the same model trained on as long without (*dense*; *before*: as it was).",
    ),
)


def about(result: Result) -> str:
    settings = result["settings"]
    return (
        f"{result['folder']}: {result['form']}, then {settings['activation']}; {settings['steps']:,} steps of "
        f"{settings['batch']} windows of {settings['window']} tokens"
    )
