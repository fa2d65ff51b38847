"""One linear layer that reads the weights of some input channels, beside the dense layer of the same format.

Weights and choices of channels are random: speed only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import add_lengths, list_of
from benchmarks.figures import spread, timed
from benchmarks.layer import _FLOATS, _several
from benchmarks.tables import Result, Table, at
from torch_pi2.base.dtypes import DTYPES
from torch_pi2.cli import common
from torch_pi2.formats import FLOAT, QUANTIZED
from torch_pi2.ops import load
from torch_pi2.ops.constants import wants_blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--channels", type=common.positive, default=4096, metavar="K", help="inputs")
    parser.add_argument("--outputs", type=common.positive, default=4096, metavar="N")
    parser.add_argument("--weights", default="int4", choices=(*QUANTIZED, *_FLOATS))
    parser.add_argument(
        "--active",
        type=list_of(float),
        default=[0.25, 0.5, 1.0],
        metavar="SHARES",
        help="shares of channels used, comma-separated (default: 0.25,0.5,1.0)",
    )
    add_lengths(parser, 0, 1, 25)
    parser.set_defaults(memory_size=1 << 29)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time ``sparse_input_linear`` and the dense layer: of floats torch's, else ours with float and int8 activations.

    As many layers as fill ``memory_size`` bytes are used in turn: what is read is in no cache. Each token has its own
    channels, drawn uniformly and anew each round.

    Returns:
        ``shares``: for each share ``ms`` and ``of_dense`` (ms / ``dense_ms``); ``dense_ms`` and, of quantised weights,
        ``dense_int8_ms``: medians of alternating rounds.
    """
    load()
    generator = torch.Generator().manual_seed(args.seed)
    channels, outputs, tokens, weights = args.channels, args.outputs, args.tokens, args.weights
    quantised, kind = weights not in _FLOATS, _FLOATS.get(weights, weights)
    by_channel = cycle(_several(kind, channels, outputs, args.memory_size))
    by_output = cycle(_several(kind, outputs, channels, args.memory_size))
    x_TK = torch.randn(tokens, channels, generator=generator)
    x_TK = x_TK if quantised else x_TK.to(DTYPES[kind])
    form = weights if quantised else FLOAT
    dense: dict[str, Callable[[int], object]] = {"dense": lambda _: F.linear(x_TK, next(by_output))}
    if quantised:
        dense["dense"] = lambda _: torch.ops.pi2.linear(x_TK, next(by_output), None, weights)
        blocks = wants_blocks(kind, outputs, channels, True)  # whatever the bytes then mean
        dense["int8"] = lambda _: (
            torch.ops.pi2.linear_blocks(x_TK, next(by_output), None, weights)
            if blocks
            else torch.ops.pi2.linear(x_TK, next(by_output), None, weights, True)
        )

    def sparse(share: float) -> Callable[[int], object]:
        masks = [torch.rand(tokens, channels, generator=generator) < share for _ in range(8)]
        return lambda i: torch.ops.pi2.sparse_input_linear(
            x_TK, next(by_channel), outputs, None, masks[i % len(masks)], 0.0, form
        )

    cases = dense | {str(share): sparse(share) for share in args.active}
    samples = timed(cases, args.rounds)
    median = {name: statistics.median(values) for name, values in samples.items()}
    result: dict[str, Any] = {"dense_ms": round(median["dense"], 4), "spread_ms": spread(samples["dense"], 4)}
    if quantised:
        result["dense_int8_ms"] = round(median["int8"], 4)
    result["shares"] = [
        {
            "active": share,
            "ms": round(median[str(share)], 4),
            "of_dense": round(median[str(share)] / median["dense"], 3),
            "spread_ms": spread(samples[str(share)], 4),
        }
        for share in args.active
    ]
    return result | {"synthetic": "random weights and uniformly random channels"}


TABLES = (
    Table(
        "One linear layer by input channels",
        lambda result: [
            {**share, "dense_ms": result["dense_ms"], "int8": result.get("dense_int8_ms")} for share in result["shares"]
        ],
        {
            "channels used": at("active", common.percent),
            "ms": at("ms", ".3f"),
            "dense ms": at("dense_ms", ".3f"),
            "of dense": at("of_dense", ".2f"),
            "dense with int8 activations ms": at("int8", ".3f"),
        },
    ),
)


def about(result: Result) -> str:
    return (
        f"linear {result['channels']} -> {result['outputs']} {result['weights']}, {result['tokens']} token(s), "
        f"{result['threads']} threads, {result['machine']['kernels']} kernels"
    )
