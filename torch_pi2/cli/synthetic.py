"""Write a model with random weights in a real model's sizes, whose neurons fire as often as real ones.

For measuring speed: its output has no meaning, and reports label it as synthetic.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from torch_pi2.base.reading import parse
from torch_pi2.cli import common
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.formats import FLOATS, QUANTIZED
from torch_pi2.types.method import PREDICTED

EXAMPLE = "torch-pi2 synthetic m7b --shape mistral-7b --active 0.1 --weights int4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--shape",
        default="mistral-7b",
        help="mistral-7b, llama-1b, llama-13b, llama-70b, qwen2-7b, mixtral-8x7b, mixtral-8x7b-quarter, "
        "smallthinker-4b, qwen3-30b-a3b, gpt-oss-20b or tiny; or configuration values as JSON, with model_type",
    )
    parser.add_argument(
        "--active", type=float, default=0.1, metavar="SHARE", help="mean share of neurons that fire; 1: SwiGLU"
    )
    parser.add_argument("--weights", choices=[*QUANTIZED, *FLOATS], default="int4", help="how they are stored")
    parser.add_argument(
        "--predictor", choices=[*PREDICTED, "none"], default="lowrank", help="what finds firing neurons"
    )
    parser.add_argument("--rank", type=common.positive, default=512, metavar="R", help="of the low-rank predictor")
    parser.add_argument("--predictor-weights", choices=QUANTIZED, default="int4", help="of the low-rank predictor")
    parser.add_argument(
        "--layers", type=common.positive, metavar="N", help="another number of layers (default: the shape's)"
    )
    parser.add_argument(
        "--locality",
        type=float,
        metavar="C",
        help="part of a token's noise that its topic shares (default: as measured on text; 0: experts evenly used)",
    )
    parser.add_argument(
        "--distinct-layers",
        type=common.positive,
        metavar="N",
        help="make N layers' neurons; the others have copies (default: all)",
    )
    parser.add_argument("--seed", type=common.seed, default=0, help="of the random weights")


def _shape(text: str) -> str | dict[str, Any]:
    """A name, or values in JSON. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        values: dict[str, Any] = parse(text, "--shape")
    except ArtifactError as error:
        raise ConfigError("--shape", expected="a name, or JSON", found=error.found, fix="Correct it.") from error
    return values


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2

    start = time.perf_counter()
    label = torch_pi2.synthetic(
        args.out,
        _shape(args.shape),
        predictor=None if args.predictor == "none" else args.predictor,
        **({} if args.locality is None else {"locality": args.locality}),
        **common.given(args, "active", "weights", "rank", "predictor_weights", "layers", "distinct_layers", "seed"),
        progress=not args.quiet,
    )
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    return {"out": str(args.out), "bytes": size, "seconds": time.perf_counter() - start, **label}


def render(result: dict[str, Any]) -> str:
    return (
        f"{result['out']}: {result['shape']}, {result['weights']}, {common.percent(result['active'])} active, "
        f"{common.size(result['bytes'])} in {result['seconds']:.0f} s\n({result['synthetic']})"
    )
