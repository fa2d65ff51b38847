"""Fit activation predictors to a profiled model, and write predictors.safetensors.

Samples and fitted layers are kept in OUT.fitting meanwhile: the same command resumes after a kill. Several processes
can share the layers: `torchrun --nproc-per-node N -m torch_pi2 fit ...`. The result is the same as that of one process
with as many threads.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.processes import together
from torch_pi2.cli.profile import render

__all__ = ["EXAMPLE", "add_arguments", "render", "run"]

EXAMPLE = "torch-pi2 fit my-model --stats my-stats --out my-predictors --target-recall 0.97"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_mapped(parser)
    parser.add_argument("--stats", required=True, type=Path, metavar="DIR", help="folder written by profile")
    common.add_out(parser)
    common.add_text(parser)
    common.add_config(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.inspect import describe

    common.check_out(args.out)
    with together(args):
        _fit(args)
    return {"out": str(args.out), **describe(args.out)}


def _fit(args: argparse.Namespace) -> None:
    import torch_pi2
    from torch_pi2.distributed.ranks import Ranks
    from torch_pi2.predict.file import save_predictors

    stats = common.load_stats(args.stats)
    config, model, tokenizer, text = common.calibration(args)
    work = args.out.with_name(f"{args.out.name}.fitting")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "config": config, "work": work, "progress": not args.quiet}
    predictors = torch_pi2.fit(model, text, stats=stats, **settings)

    def save() -> None:
        save_predictors(args.out, predictors, stats.model_hash)
        shutil.rmtree(work, ignore_errors=True)

    Ranks(together=True).first(save)
