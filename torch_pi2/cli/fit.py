"""Fit low-rank activation predictors to a profiled model, and write predictors.safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.profile import render

__all__ = ["EXAMPLE", "add_arguments", "render", "run"]

EXAMPLE = "torch-pi2 fit my-model --stats my-stats --out my-predictors --target-recall 0.97"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--stats", required=True, type=Path, metavar="DIR", help="folder written by profile")
    common.add_out(parser)
    common.add_text(parser)
    common.add_config(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.inspect import describe
    from torch_pi2.predict.file import save_predictors

    common.check_out(args.out)
    stats = common.load_stats(args.stats)
    config, model, tokenizer, text = common.calibration(args)
    predictors = torch_pi2.fit(model, text, stats=stats, tokenizer=tokenizer, config=config, progress=not args.quiet)
    save_predictors(args.out, predictors, stats.model_hash)
    return {"out": str(args.out), **describe(args.out)}
