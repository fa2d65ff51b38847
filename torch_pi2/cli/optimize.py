"""Profile, fit, plan and rewrite a model, and write it as a Hugging Face folder with a pi2/ folder in it.

The folder still loads as the ordinary dense model with transformers; `torch-pi2 generate` and
torch_pi2.load() use its sparse form. Several processes of one machine share profiling and fitting: `torchrun
--nproc-per-node N -m torch_pi2 optimize ...`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, verdict
from torch_pi2.cli.processes import together
from torch_pi2.cli.profile import render as render_profile
from torch_pi2.errors import ConfigError
from torch_pi2.types.config import Config

__all__ = ["EXAMPLE", "add_arguments", "render", "run"]

EXAMPLE = "torch-pi2 optimize my-model --out my-sparse-model --method lowrank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_out(parser)
    parser.add_argument("--stats", type=Path, metavar="DIR", help="folder written by profile (default: profile now)")
    parser.add_argument(
        "--predictors", type=Path, metavar="DIR", help="folder written by fit (needs --stats; default: fit now)"
    )
    common.add_text(parser)
    parser.add_argument(
        "--hardware", metavar="NAME", help="plan for it, too: measured, a preset, or a file (default: for none)"
    )
    common.add_config(parser)
    common.add_storage(parser)
    verdict.add_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.inspect import describe
    from torch_pi2.distributed.ranks import Ranks
    from torch_pi2.eval.verdict import bytes_of
    from torch_pi2.rewrite.state import get_state
    from torch_pi2.store.folder import check_replaceable, check_separate

    common.check_out(args.out)
    check_replaceable(args.out)
    check_separate("optimize", args.model, args.out)
    stats = common.load_stats(args.stats) if args.stats else None
    if args.predictors and stats is None:
        raise ConfigError(
            "--predictors",
            expected="--stats beside it",
            found="no --stats",
            fix="Pass the statistics they were fitted with.",
        )
    predictors = common.load_predictors(args.predictors, stats.model_hash if stats else None)
    with together(args):
        config, model, tokenizer, text = common.calibration(args)
        dense_bytes = bytes_of(model)
        model = torch_pi2.optimize(
            model,
            text,
            config,
            tokenizer=tokenizer,
            stats=stats,
            predictors=predictors,
            hardware=args.hardware,
            shared=True,
            progress=not args.quiet,
        )

        def save() -> None:
            torch_pi2.save(model, args.out, tokenizer=tokenizer)
            if not args.no_verdict:
                with verdict.judging(args.out):
                    _judge(args, model, tokenizer, config, dense_bytes)

        Ranks(together=True).first(save)
    errors = {name: asdict(error) for name, error in get_state(model).quantization.items()}
    return {"out": str(args.out), **describe(args.out), "weights": config.weights, "quantization": errors}


def _judge(args: argparse.Namespace, model: Any, tokenizer: Any, config: Config, dense_bytes: int) -> None:
    from torch_pi2.eval.verdict import judge

    dense, why = verdict.dense_of(args, dense_bytes)
    given = {name: value for name, value in asdict(config).items() if value != getattr(Config(), name)}
    result = judge(
        model,
        dense,
        args.out,
        tokenizer=tokenizer,
        made=[verdict.step("optimize", args.model, given)],
        dense_bytes=dense_bytes,
        not_measured=why,
        lossy=["int8 activations"] if config.activations == "int8" else [],
        trust_remote_code=args.trust_remote_code,
    )
    verdict.keep(args.out, result, args.model)


def render(result: dict[str, Any]) -> str:
    errors = result["quantization"]
    if not errors:
        return render_profile(result)
    rows = [
        [name, f"{e['weight']:.4f}", "-" if e["output"] is None else f"{e['output']:.4f}"] for name, e in errors.items()
    ]
    shown = common.table([f"in {result['weights']}", "error of weights", "error of outputs"], rows)
    return f"{shown}\n{render_profile(result)}"
