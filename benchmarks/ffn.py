"""One feed-forward layer: all neurons, PyTorch's own, only the active ones, and the memory roofline beside them.

Every figure is the median of alternating rounds in one process; sets of active neurons differ from round to round
so that caches do not flatter the sparse case. Weights are random: the figures speak of speed, never of quality.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import add_sizes
from benchmarks.figures import spread, timed
from torch_pi2.base.dtypes import DTYPES
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.ops import load

_SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES = DTYPES | _SHORT


def _positive(name: str, value: float, upper: float = float("inf")) -> None:
    if not 0 < value <= upper:
        raise ConfigError(
            name, expected=f"more than 0 and at most {upper}", found=str(value), fix="Choose another value."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--active", type=float, default=0.1, metavar="SHARE", help="share of neurons computed, 0..1")
    parser.add_argument("--dtype", default="bf16", choices=_SHORT)
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 16)")


def run(
    hidden: int = 4096,
    intermediate: int = 14336,
    active: float = 0.1,
    dtype: str = "bf16",
    *,
    tokens: int = 1,
    rank: int | None = None,
    rounds: int = 15,
    seed: int = 0,
) -> dict[str, Any]:
    """Time one gated (SwiGLU) layer on torch's current number of threads.

    Args: the options of the same names; active neurons are drawn uniformly per token (no locality), and two rounds of
        warm-up come on top.

    Returns:
        A dict with, in milliseconds, ``dense_ms`` (the same core, every neuron computed), ``torch_ms`` (eager
        ``F.linear`` on the same weights), ``sparse_ms`` (given the active set), ``predict_ms`` (int8 low-rank
        predictor), ``exact_gate_ms``; in GB/s ``touched_gb_per_s`` (active weight bytes over sparse_ms),
        ``gather_gb_per_s`` (a plain read of the same neurons), ``read_gb_per_s`` (a plain streaming read); their
        ratios, and each median's spread.
    """
    _positive("hidden", hidden)
    _positive("intermediate", intermediate)
    _positive("active", active, 1)
    _positive("tokens", tokens)
    _positive("rounds", rounds)
    if dtype not in _DTYPES:
        raise ConfigError("dtype", expected=", ".join(sorted(_DTYPES)), found=dtype, fix="Choose one of them.")
    load()
    torch_dtype, rank = _DTYPES[dtype], rank or max(1, hidden // 16)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        out = torch.empty(*shape, dtype=torch_dtype)
        torch.ops.pi2.advise_huge_pages(out)
        for part in out.split(max(1, 2**22 // max(1, out[0].numel()))):
            part.copy_(torch.randn(part.shape, generator=generator) * hidden**-0.5)
        return out

    rows_IRH = random(intermediate, 3, hidden)

    def own_copy(row: int, transpose: bool) -> torch.Tensor:
        part = rows_IRH[:, row].T if transpose else rows_IRH[:, row]
        out = torch.empty(part.shape, dtype=torch_dtype)
        torch.ops.pi2.advise_huge_pages(out)
        return out.copy_(part)

    gate_IH, up_IH, down_HI = own_copy(0, False), own_copy(1, False), own_copy(2, True)
    x_TH = torch.randn(tokens, hidden, generator=generator).to(torch_dtype)
    a_rH = torch.randint(-127, 128, (rank, hidden), dtype=torch.int8, generator=generator)
    b_Ir = torch.randint(-127, 128, (intermediate, rank), dtype=torch.int8, generator=generator)
    a_scale, b_scale = torch.full((rank,), 1e-3), torch.full((intermediate,), 1e-3)
    n_active = max(1, round(intermediate * active))
    masks, ids = [], []
    for _ in range(rounds + 2):
        mask_TI = torch.zeros(tokens, intermediate, dtype=torch.bool)
        for row in mask_TI:
            row[torch.randperm(intermediate, generator=generator)[:n_active]] = True
        masks.append(mask_TI)
        ids.append(mask_TI.any(0).nonzero().flatten())

    def ffn(n_hot: int, mask_TI: torch.Tensor | None, activation: str = "silu") -> torch.Tensor:
        y: torch.Tensor = torch.ops.pi2.sparse_ffn(
            x_TH, rows_IRH, None, None, None, mask_TI, activation, False, n_hot, 0.0
        )
        return y

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
    samples = timed(cases, rounds)
    median = {name: statistics.median(values) for name, values in samples.items()}
    neuron_bytes = rows_IRH[0].numel() * rows_IRH.element_size()
    touched = statistics.median(len(i) for i in ids) * neuron_bytes
    gb_per_s = {
        "touched_gb_per_s": touched / median["sparse_ms"] / 1e6,
        "gather_gb_per_s": touched / median["gather_ms"] / 1e6,
        "read_gb_per_s": rows_IRH.numel() * rows_IRH.element_size() / median["read_ms"] / 1e6,
        "dense_gb_per_s": rows_IRH.numel() * rows_IRH.element_size() / median["dense_ms"] / 1e6,
    }
    return {
        "what": "ffn",
        "hidden": hidden,
        "intermediate": intermediate,
        "active": n_active / intermediate,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "tokens": tokens,
        "rank": rank,
        "threads": torch.get_num_threads(),
        "kernels": torch.ops.pi2.kernel_tables().partition(":")[2],
        "rounds": rounds,
        "synthetic": "random weights and uniformly random active sets",
        **{name: round(value, 4) for name, value in median.items()},
        **{name: round(value, 2) for name, value in gb_per_s.items()},
        "sparse_over_dense": round(median["sparse_ms"] / median["dense_ms"], 4),
        "sparse_over_torch": round(median["sparse_ms"] / median["torch_ms"], 4),
        "touched_over_gather": round(gb_per_s["touched_gb_per_s"] / gb_per_s["gather_gb_per_s"], 4),
        "spread": {name: spread(values, 4) for name, values in samples.items()},
    }


def render(result: dict[str, Any]) -> str:
    rows = [
        ("torch, F.linear on all neurons", "torch_ms", None),
        ("dense, our core on all neurons", "dense_ms", "dense_gb_per_s"),
        ("sparse, given the active set", "sparse_ms", "touched_gb_per_s"),
        ("exact gate, relu", "exact_gate_ms", None),
        (f"low-rank predictor, rank {result['rank']}", "predict_ms", None),
        ("plain read of the active neurons", "gather_ms", "gather_gb_per_s"),
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
