"""Time the operators on this machine: `bench ffn` is one feed-forward layer, dense against sparse."""

from __future__ import annotations

import argparse
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 bench ffn --hidden 4096 --intermediate 14336 --active 0.1 --dtype bf16 --threads 2 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["ffn"], help="ffn: one gated layer with random weights")
    parser.add_argument("--hidden", type=common.positive, default=4096, metavar="H")
    parser.add_argument("--intermediate", type=common.positive, default=14336, metavar="I", help="neurons")
    parser.add_argument("--active", type=float, default=0.1, metavar="SHARE", help="share of neurons computed, 0..1")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--tokens", type=common.positive, default=1, metavar="T")
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 16)")
    parser.add_argument("--rounds", type=common.positive, default=15, metavar="N")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.bench import ffn

    return ffn.run(
        args.hidden,
        args.intermediate,
        args.active,
        args.dtype,
        tokens=args.tokens,
        rank=args.rank,
        rounds=args.rounds,
        seed=args.seed,
    )


def render(result: dict[str, Any]) -> str:
    rows = [
        ("torch, F.linear on all neurons", "torch_ms", None),
        ("dense, our core on all neurons", "dense_ms", "dense_gb_per_s"),
        ("sparse, given the active set", "sparse_ms", "touched_gb_per_s"),
        ("exact gate, relu", "exact_gate_ms", None),
        (f"low-rank predictor, rank {result['rank']}", "predict_ms", None),
        ("plain read of the active bundles", "gather_ms", "gather_gb_per_s"),
        ("plain read of all weights", "read_ms", "read_gb_per_s"),
    ]
    shown = [(name, f"{result[ms]:.3f}", f"{result[gb]:.1f}" if gb else "") for name, ms, gb in rows]
    return (
        f"FFN {result['hidden']} x {result['intermediate']} {result['dtype']}, {result['tokens']} token(s), "
        f"{common.percent(result['active'])} active, {result['threads']} threads, {result['kernels']} kernels\n"
        f"{common.table(('', 'ms', 'GB/s'), shown)}\n"
        f"sparse takes {result['sparse_over_dense']:.3f} of dense, {result['sparse_over_torch']:.3f} of torch; "
        f"touched / gathered bandwidth {result['touched_over_gather']:.2f}\n({result['synthetic']})"
    )
