"""One feed-forward layer in floats: all neurons, PyTorch's own layer, the active neurons only, and plain reads.

Every figure is the median of alternating rounds in one process. Sets of active neurons differ from round to round, so
that caches do not flatter the sparse case. Weights are random: the figures say something about speed only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import add_sizes
from benchmarks.figures import summary, timed
from benchmarks.tables import Result, Table, at
from torch_pi2.cli import common
from torch_pi2.ops import load

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS = (
    ("torch, F.linear on all neurons", "torch_ms", ""),
    ("dense, our core on all neurons", "dense_ms", "dense_gb_per_s"),
    ("sparse, given the active set", "sparse_ms", "touched_gb_per_s"),
    ("exact gate, relu", "exact_gate_ms", ""),
    ("low-rank predictor", "predict_ms", ""),
    ("plain read of the active neurons", "gather_ms", "gather_gb_per_s"),
    ("plain read of all weights", "read_ms", "read_gb_per_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--active", type=common.probability, default=0.1, metavar="SHARE", help="of neurons computed")
    parser.add_argument("--dtype", default="bf16", choices=_DTYPES)
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 16)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time one gated (SwiGLU) layer on torch's current number of threads; active neurons are uniform per token.

    Returns:
        In milliseconds ``dense_ms`` (our core, every neuron), ``torch_ms`` (``F.linear`` on the same weights),
        ``sparse_ms`` (given the active set), ``predict_ms`` (int8 low-rank predictor), ``exact_gate_ms``; in GB/s
        ``touched_gb_per_s`` (active weight bytes over sparse_ms), ``gather_gb_per_s`` (a plain read of the same
        neurons), ``read_gb_per_s`` (a plain streaming read); their ratios and spreads.
    """
    load()
    hidden, intermediate, tokens, dtype = args.hidden, args.intermediate, args.tokens, _DTYPES[args.dtype]
    rank = args.rank or max(1, hidden // 16)
    generator = torch.Generator().manual_seed(args.seed)

    def random(*shape: int) -> torch.Tensor:
        out = torch.empty(*shape, dtype=dtype)
        torch.ops.pi2.advise_huge_pages(out)
        for part in out.split(max(1, 2**22 // max(1, out[0].numel()))):
            part.copy_(torch.randn(part.shape, generator=generator) * hidden**-0.5)
        return out

    rows_IRH = random(intermediate, 3, hidden)

    def own_copy(part: torch.Tensor) -> torch.Tensor:
        out = torch.empty(part.shape, dtype=dtype)
        torch.ops.pi2.advise_huge_pages(out)
        return out.copy_(part)

    gate_IH, up_IH, down_HI = own_copy(rows_IRH[:, 0]), own_copy(rows_IRH[:, 1]), own_copy(rows_IRH[:, 2].T)
    x_TH = torch.randn(tokens, hidden, generator=generator).to(dtype)
    a_rH = torch.randint(-127, 128, (rank, hidden), dtype=torch.int8, generator=generator)
    b_Ir = torch.randint(-127, 128, (intermediate, rank), dtype=torch.int8, generator=generator)
    a_scale, b_scale = torch.full((rank,), 1e-3), torch.full((intermediate,), 1e-3)
    n_active = max(1, round(intermediate * args.active))
    masks, ids = [], []
    for _ in range(args.rounds + 2):
        mask_TI = torch.zeros(tokens, intermediate, dtype=torch.bool)
        for row in mask_TI:
            row[torch.randperm(intermediate, generator=generator)[:n_active]] = True
        masks.append(mask_TI)
        ids.append(mask_TI.any(0).nonzero().flatten())

    def ffn(n_hot: int, mask_TI: torch.Tensor | None, activation: str = "silu") -> object:
        return torch.ops.pi2.sparse_ffn(x_TH, rows_IRH, None, None, None, mask_TI, activation, False, n_hot, 0.0)

    # Order matters: sparse_ms and gather_ms each follow a pass over all neurons, so that both start from the same
    # last-level cache, and they use different active sets, so that neither warms it for the other.
    cases: dict[str, Callable[[int], object]] = {
        "torch_ms": lambda i: F.linear(F.silu(F.linear(x_TH, gate_IH)) * F.linear(x_TH, up_IH), down_HI),
        "dense_ms": lambda i: ffn(intermediate, None),
        "sparse_ms": lambda i: ffn(0, masks[i]),
        "read_ms": lambda i: torch.ops.pi2.plain_read(rows_IRH, None),
        "gather_ms": lambda i: torch.ops.pi2.plain_read(rows_IRH, ids[(i + 1) % len(ids)]),
        "exact_gate_ms": lambda i: ffn(0, None, "relu"),
        "predict_ms": lambda i: torch.ops.pi2.predict_lowrank(x_TH, a_rH, a_scale, b_Ir, b_scale, None, 0.0),
    }
    found = summary(timed(cases, args.rounds), 4)
    touched = statistics.median(len(i) for i in ids) * rows_IRH[0].nbytes
    pairs = {"touched": (touched, "sparse"), "gather": (touched, "gather")}
    pairs |= {"read": (rows_IRH.nbytes, "read"), "dense": (rows_IRH.nbytes, "dense")}
    return {
        **found,
        **{f"{name}_gb_per_s": round(nbytes / found[f"{case}_ms"] / 1e6, 2) for name, (nbytes, case) in pairs.items()},
        "active": n_active / intermediate,
        "rank": rank,
        "synthetic": "random weights and uniformly random active sets",
        "sparse_over_dense": round(found["sparse_ms"] / found["dense_ms"], 4),
        "sparse_over_torch": round(found["sparse_ms"] / found["torch_ms"], 4),
        "touched_over_gather": round(found["gather_ms"] / found["sparse_ms"], 4),
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    return [{"case": name, "ms": result[ms], "gb_per_s": result.get(gb)} for name, ms, gb in _ROWS]


TABLES = (Table("One layer in floats", _rows, {"": at("case"), "ms": at("ms", ".3f"), "GB/s": at("gb_per_s", ".1f")}),)


def about(result: Result) -> str:
    return (
        f"FFN {result['hidden']} x {result['intermediate']} {result['dtype']}, {result['tokens']} token(s), "
        f"{common.percent(result['active'])} active, {result['threads']} threads"
    )


def notes(result: Result) -> list[str]:
    return [
        f"sparse takes {result['sparse_over_dense']:.3f} of dense, {result['sparse_over_torch']:.3f} of torch; "
        f"touched / gathered bandwidth {result['touched_over_gather']:.2f}"
    ]
