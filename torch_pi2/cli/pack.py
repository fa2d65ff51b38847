"""Write a model as a neuron store: every neuron in a slot that storage reads whole, with a checksum.

IN is a float checkpoint (optimised or not), a folder with quantised weights (from `torch-pi2 quantize`, `synthetic`
or `optimize --weights int4`), or a store. Only --weights changes numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, verdict
from torch_pi2.formats import FLOAT, FLOATS, OF_NEURONS

EXAMPLE = "torch-pi2 pack my-int4-model my-store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="float safetensors, or a folder with quantised weights")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--weights",
        choices=[FLOAT, *OF_NEURONS],
        help="format of a float checkpoint's neurons (default: float, unchanged); int4, int8: all linear layers, lossy",
    )
    parser.add_argument(
        "--slot-align",
        type=int,
        metavar="BYTES",
        help="slots are multiples of this (default: 4096, 512 for small ones)",
    )
    parser.add_argument(
        "--cluster",
        type=common.positive,
        metavar="N",
        help="neurons in a slot, read together (default: 1 with predictors, else some 200 KB)",
    )
    parser.add_argument(
        "--ranks",
        type=common.positive,
        default=1,
        metavar="N",
        help="shards for so many machines (docs/DISTRIBUTED.md)",
    )
    parser.add_argument(
        "--shares",
        type=common.shares,
        metavar="A,B,...",
        help="with --ranks: shares of the neurons, by machine (default: equal)",
    )
    parser.add_argument(
        "--by",
        choices=("neurons", "layers"),
        default="neurons",
        help="with --ranks: a shard has some neurons of every layer (default), or all of some layers (a pipeline)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code in the checkpoint folder")
    verdict.add_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2

    common.check_out(args.out)
    how = common.given(args, "weights", "slot_align", "cluster", "ranks", "shares", "by", "trust_remote_code")
    report = torch_pi2.pack(args.source, args.out, **how, progress=not args.quiet)
    whole = args.ranks == 1  # shards have no speed or loss of their own
    if whole and not args.no_verdict:
        rounded = [f"{args.weights} neurons"] if args.weights in FLOATS else []
        verdict.of_folder(args, "pack", rounded)
    judged = verdict.read(args.out) if whole else None
    return {"out": str(args.out), **report.to_json(), "verdict": None if judged is None else judged.to_json()}


def render(result: dict[str, Any]) -> str:
    parts = [(name.replace("_", " "), common.size(count)) for name, count in result["regions"].items()]
    return (
        f"{common.table(('part', 'bytes'), parts)}\n"
        f"{result['out']}: {result['neurons']} neurons of {result['layers']} layers; "
        f"{common.size(result['file_bytes'])} in {result['seconds']:.1f} s{verdict.shown(result['verdict'])}"
    )
