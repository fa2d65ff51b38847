"""Choose hot and cold neurons per layer from statistics (and predictors), and write plan.json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.profile import render

__all__ = ["EXAMPLE", "add_arguments", "render", "run"]

EXAMPLE = "torch-pi2 plan my-model --stats my-stats --predictors my-predictors --out my-plan --hot-frequency 0.5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--stats", required=True, type=Path, metavar="DIR", help="folder written by profile")
    parser.add_argument("--predictors", type=Path, metavar="DIR", help="folder written by fit")
    common.add_out(parser)
    common.add_config(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.inspect import describe

    common.check_out(args.out)
    stats = common.load_stats(args.stats)
    predictors = common.load_predictors(args.predictors, stats.model_hash)
    torch_pi2.plan(common.load_dense(args), stats, predictors, config=common.config_of(args)).save(args.out)
    return {"out": str(args.out), **describe(args.out)}
