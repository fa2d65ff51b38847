"""One feed-forward layer over shares of active neurons, against the lower bound that memory gives.

Two lines, measured in the same run by plain reads: the active neurons at gather speed, and all neurons at streaming
speed. What a layer can reach is the smaller of the two. Weights are random: speed only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

import torch_pi2
from benchmarks.arguments import add_activations, add_sizes, list_of
from benchmarks.figures import spread, timed
from benchmarks.tables import Result, Table, at
from torch_pi2.base.dtypes import DTYPES
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.formats import QUANTIZED, row_bytes
from torch_pi2.measure.compute import Weights
from torch_pi2.ops import load
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.linear import IN_BLOCKS, to_blocks
from torch_pi2.ops.linear import ROWS as BLOCK_ROWS

_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Rounds thrown away.
_WARMUP = 2
#: Bytes over which layers, and linears, are spread: caches hold a good part of one layer.
_BYTES = 1 << 30
#: Bytes of one dense linear.
_LINEAR_BYTES = 1 << 27


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument(
        "--active",
        type=list_of(float),
        default=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
        metavar="SHARES",
        help="shares of neurons computed, comma-separated (default: 0.02,0.05,0.1,0.2,0.5,1.0)",
    )
    parser.add_argument("--weights", default="int4", choices=(*QUANTIZED, *_FLOATS))
    add_activations(parser)
    parser.add_argument("--rank", type=common.positive, metavar="R", help="of the predictor (default: H / 8)")
    parser.add_argument(
        "--ungated",
        action="store_true",
        help="a layer without gates (relu2), whose exact gate fires these shares, beside the same as two dense linears",
    )
    parser.set_defaults(memory_size=_BYTES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time one gated layer, a predictor and a linear on torch's current number of threads; of floats torch's layer.

    There are as many such layers, and linears, as fill ``memory_size`` bytes (at least 2), and every call takes the
    next one: what is read is in no cache, as in a model of many layers. Active neurons are drawn uniformly and anew
    each round, the same for all tokens: no locality. The predictor is in int4, and there with quantised weights only.

    Returns:
        ``shares``: for each share ``ms``, ``gather_ms`` (a plain read of as many neurons), ``bound_ms``, ``of_bound``
        (ms / bound_ms) and ``touched_gb_per_s``. ``stream_ms`` (a plain read of all neurons), ``read_gb_per_s``,
        ``linear`` (``gb_per_s`` and ``of_read`` of a dense linear), ``predictor_ms``, ``method_ms`` (the
        same predictor as a ``SparseMethod`` of bfloat16 matrices), of floats ``torch_ms`` (three
        ``F.linear`` over all neurons), and spreads. Milliseconds are medians of alternating rounds. With ``--ungated``
        see :func:`_ungated`.
    """
    hidden, intermediate, weights, tokens, rounds = (
        getattr(args, name) for name in ("hidden", "intermediate", "weights", "tokens", "rounds")
    )
    quantised, int8 = weights not in _FLOATS, args.activations == "int8"
    if int8 and not quantised:
        fix = "Choose another value."
        raise ConfigError("activations", expected=f"float with {weights} weights", found="int8", fix=fix)
    load()
    generator = torch.Generator().manual_seed(args.seed)
    kind = _FLOATS.get(weights, weights)
    if args.ungated:
        return _ungated(args, kind, generator)
    layers = _several(kind, 3 * intermediate, hidden, args.memory_size)
    neuron_rows = cycle([rows.unflatten(0, (intermediate, 3)) for rows in layers])
    layer_bytes = layers[0].nbytes
    x_TH = torch.randn(tokens, hidden, generator=generator)
    x_TH = x_TH if quantised else x_TH.to(DTYPES[kind])
    settings = (weights, int8) if quantised else ("float", False)

    def sets(share: float) -> list[torch.Tensor]:
        count = max(1, round(share * intermediate))
        return [
            torch.randperm(intermediate, generator=generator)[:count].sort().values for _ in range(rounds + _WARMUP)
        ]

    chosen = {share: sets(share) for share in args.active}

    def mask(ids: torch.Tensor) -> torch.Tensor:
        mask_TI = torch.zeros(tokens, intermediate, dtype=torch.bool)
        mask_TI[:, ids] = True
        return mask_TI

    masks = {share: [mask(ids) for ids in lists] for share, lists in chosen.items()}

    def ffn(mask_TI: torch.Tensor) -> object:
        # silu: no neuron that was asked for is skipped for being zero
        return torch.ops.pi2.sparse_ffn(
            x_TH, next(neuron_rows), None, None, None, mask_TI, "silu", False, 0, 0.0, *settings
        )

    cases: dict[str, Callable[[int], object]] = {}
    for share in args.active:
        cases[f"stream {share}"] = lambda _: torch.ops.pi2.plain_read(next(neuron_rows), None)
        cases[f"ffn {share}"] = lambda i, s=share: ffn(masks[s][i])  # type: ignore[misc]
        cases[f"gather {share}"] = lambda i, s=share: torch.ops.pi2.plain_read(  # type: ignore[misc]
            next(neuron_rows), chosen[s][i]
        )
    linear_rows = max(1, min(_LINEAR_BYTES, args.memory_size // 2) // row_bytes("int8", hidden))
    linear_rows -= linear_rows % BLOCK_ROWS
    rank = args.rank or max(1, hidden // 8)
    if quantised:
        linears = _several(kind, linear_rows, hidden, args.memory_size)
        rows = cycle(linears)
        a, b = _random("int4", rank, hidden), _random("int4", intermediate, rank)
        call: Callable[..., object] = partial(torch.ops.pi2.linear, int8_activations=int8)
        if wants_blocks(kind, linear_rows, hidden, int8):  # as in a model
            call = torch.ops.pi2.linear_blocks  # whatever the bytes then mean
        cases["linear"] = lambda _: call(x_TH, next(rows), None, weights)
        # also drives the predictor out of the cache
        cases["linear read"] = lambda _: torch.ops.pi2.plain_read(next(rows), None)
        cases["predictor"] = lambda _: torch.ops.pi2.predict_lowrank_q(x_TH, a, b, None, "int4", int8, 0.0)
        method, floats = _InPython(), torch.bfloat16
        method.a_rH, method.b_Ir = torch.randn(rank, hidden).to(floats), torch.randn(intermediate, rank).to(floats)
        cases["method"] = lambda _: method.selected(x_TH, intermediate)
    else:
        gate, up, down = (layers[0].unflatten(0, (intermediate, 3))[:, row].contiguous() for row in range(3))
        down = down.T.contiguous()
        cases["torch"] = lambda _: F.linear(F.silu(F.linear(x_TH, gate)) * F.linear(x_TH, up), down)
    samples = timed(cases, rounds, _WARMUP)
    median = {name: statistics.median(values) for name, values in samples.items()}
    stream_ms = statistics.median([median[name] for name in median if name.startswith("stream")])

    def of_share(share: float) -> dict[str, Any]:
        count = max(1, round(share * intermediate))
        ms, gather_ms, nbytes = median[f"ffn {share}"], median[f"gather {share}"], count * layer_bytes // intermediate
        bound = min(gather_ms, stream_ms)
        return {
            "active": round(count / intermediate, 4),
            "ms": round(ms, 4),
            "gather_ms": round(gather_ms, 4),
            "bound_ms": round(bound, 4),
            "of_bound": round(ms / bound, 3),
            "touched_gb_per_s": round(nbytes / ms / 1e6, 2),
            "gather_gb_per_s": round(nbytes / gather_ms / 1e6, 2),
            "spread_ms": spread(samples[f"ffn {share}"], 4),
        }

    result: dict[str, Any] = {
        "bytes": layer_bytes,
        "stream_ms": round(stream_ms, 4),
        "read_gb_per_s": round(layer_bytes / stream_ms / 1e6, 2),
        "shares": [of_share(share) for share in args.active],
        "synthetic": "random weights and uniformly random active sets",
    }
    if quantised:
        size = linears[0].nbytes
        linear, plain = size / median["linear"] / 1e6, size / median["linear read"] / 1e6
        result["linear"] = {
            "rows": linear_rows,
            "ms": round(median["linear"], 4),
            "gb_per_s": round(linear, 2),
            "read_gb_per_s": round(plain, 2),
            "of_read": round(linear / plain, 3),
            "spread_ms": spread(samples["linear"], 4),
        }
        result |= {
            "rank": rank,
            "predictor_ms": round(median["predictor"], 4),
            "method_ms": round(median["method"], 4),
            "predictor_gb_per_s": round((a.nbytes + b.nbytes) / median["predictor"] / 1e6, 2),
        }
    else:
        result["torch_ms"] = round(median["torch"], 4)
    return result


class _InPython(torch_pi2.SparseMethod):
    """A low-rank predictor made of PyTorch's operators."""

    a_rH: torch.Tensor
    b_Ir: torch.Tensor

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        return torch.relu(x_TH.bfloat16() @ self.a_rH.T) @ self.b_Ir.T > 0


def _ungated(args: argparse.Namespace, kind: str, generator: torch.Generator) -> dict[str, Any]:
    """``exact``: for each share ``ms`` of a layer that fires it (its biases see to that), ``bound_ms`` (streaming its
    up rows and that share of its down rows), ``linears_ms`` (up and down as two dense linears, of floats torch's) and
    ``all_ms`` (a layer that fires all its neurons).
    """
    hidden, intermediate, tokens = args.hidden, args.intermediate, args.tokens
    quantised, int8 = kind in QUANTIZED, args.activations == "int8"
    in_blocks = quantised and wants_blocks(kind, intermediate, hidden, int8)
    stored = kind if quantised else "float"
    layers = _several(kind, 2 * intermediate, hidden, args.memory_size)
    for layer in layers if in_blocks else ():
        layer[:intermediate] = to_blocks(layer[:intermediate], kind, hidden)
    neuron_rows = cycle([layer.view(2, intermediate, -1).transpose(0, 1) for layer in layers])
    pairs = zip(
        _several(kind, intermediate, hidden, args.memory_size // 2),
        _several(kind, hidden, intermediate, args.memory_size // 2),
        strict=False,
    )
    linears = cycle(list(pairs))
    x_TH = torch.randn(tokens, hidden, generator=generator)
    x_TH = x_TH if quantised else x_TH.to(DTYPES[kind])
    h_TI = torch.randn(tokens, intermediate, generator=generator).to(x_TH.dtype)
    rows = next(neuron_rows)
    weights = stored + IN_BLOCKS * in_blocks
    own = torch.float32 if quantised else x_TH.dtype

    def call(bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.pi2.sparse_ffn(
            x_TH, rows, None, bias, None, None, "relu2", False, 0, 0.0, weights, int8 and quantised
        )

    up_TI = _ups(rows, x_TH, weights, int8)
    biases = {
        share: (-up_TI.float().quantile(1 - share)).to(own).expand(intermediate).contiguous() for share in args.active
    }
    everything = torch.full((intermediate,), float(up_TI.float().abs().amax()) * 2, dtype=own)
    linear: Callable[..., object] = partial(torch.ops.pi2.linear, int8_activations=int8)

    def both(_: int) -> object:
        up, down = next(linears)
        if not quantised:
            return F.linear(F.linear(x_TH, up), down)
        for x, rows in ((x_TH, up), (h_TI, down)):
            if wants_blocks(kind, len(rows), x.shape[-1], int8):
                torch.ops.pi2.linear_blocks(x, rows, None, kind)
            else:
                linear(x, rows, None, kind)
        return None

    cases: dict[str, Callable[[int], object]] = {
        "stream": lambda _: torch.ops.pi2.plain_read(next(neuron_rows).transpose(0, 1), None),
        "linears": both,
        "all": lambda _: call(everything, next(neuron_rows)),
    }
    for share in args.active:
        cases[f"exact {share}"] = lambda _, s=share: call(biases[s], next(neuron_rows))  # type: ignore[misc]
    samples = timed(cases, args.rounds, _WARMUP)
    median = {name: statistics.median(values) for name, values in samples.items()}
    nbytes = rows.nbytes

    def of_share(share: float) -> dict[str, Any]:
        ms, bound = median[f"exact {share}"], median["stream"] * (1 + share) / 2
        return {
            "active": share,
            "ms": round(ms, 4),
            "bound_ms": round(bound, 4),
            "of_bound": round(ms / bound, 3),
            "linears_ms": round(median["linears"], 4),
            "all_ms": round(median["all"], 4),
            "spread_ms": spread(samples[f"exact {share}"], 4),
        }

    return {
        "bytes": nbytes,
        "read_gb_per_s": round(nbytes / median["stream"] / 1e6, 2),
        "exact": [of_share(share) for share in args.active],
        "synthetic": "random weights",
    }


def _ups(rows: torch.Tensor, x_TH: torch.Tensor, weights: str, int8: bool) -> torch.Tensor:
    """Up products of neurons ``rows``."""
    up = rows[:, 0].contiguous()
    if weights == "float":
        return F.linear(x_TH, up)
    if weights.endswith(IN_BLOCKS):
        return torch.ops.pi2.linear_blocks(x_TH, up, None, weights.removesuffix(IN_BLOCKS))
    return torch.ops.pi2.linear(x_TH, up, None, weights, int8)


def _random(kind: str, rows: int, columns: int) -> torch.Tensor:
    """``[rows, columns]`` of a float type, or ``[rows, row_bytes]`` uint8."""
    return Weights(rows * row_bytes(kind, columns)).fill(kind, columns).rows(rows)


def _several(kind: str, rows: int, columns: int, memory_size: int) -> list[torch.Tensor]:
    """Matrices of ``rows`` each, at least 2, that fill ``memory_size`` bytes."""
    one = _random(kind, 1, columns).nbytes * rows
    return list(_random(kind, rows * max(2, memory_size // one), columns).split(rows))


TABLES = (
    Table(
        "One feed-forward layer",
        lambda result: [{**share, "stream_ms": result["stream_ms"]} for share in result.get("shares", ())],
        {
            "active": at("active", common.percent),
            "ms": at("ms", ".3f"),
            "GB/s": at("touched_gb_per_s", ".1f"),
            "gathered ms": at("gather_ms", ".3f"),
            "streamed ms": at("stream_ms", ".3f"),
            "bound ms": at("bound_ms", ".3f"),
            "of bound": at("of_bound", ".2f"),
        },
    ),
    Table(
        "One layer without gates",
        lambda result: result.get("exact", []),
        {
            "fires": at("active", common.percent),
            "ms": at("ms", ".3f"),
            "two linears ms": at("linears_ms", ".3f"),
            "all fire ms": at("all_ms", ".3f"),
            "bound ms": at("bound_ms", ".3f"),
            "of bound": at("of_bound", ".2f"),
        },
    ),
    Table(
        "Dense linears and predictors",
        lambda result: [result] if "linear" in result else [],
        {
            "dense linear ms": at("linear.ms", ".3f"),
            "GB/s": at("linear.gb_per_s", ".1f"),
            "of its streaming read": at("linear.of_read", common.percent),
            "predictor of rank": at("rank"),
            "predictor ms": at("predictor_ms", ".3f"),
            "in Python, ms": at("method_ms", ".3f"),
        },
    ),
)


def about(result: Result) -> str:
    return (
        f"FFN {result['hidden']} x {result['intermediate']} {result['weights']}, {result['activations']} activations, "
        f"{result['tokens']} token(s), {result['threads']} threads, {result['machine']['kernels']} kernels, "
        f"streaming read {result['read_gb_per_s']:.1f} GB/s"
    )


def notes(result: Result) -> list[str]:
    return [f"torch computes all neurons in {result['torch_ms']:.2f} ms"] if "torch_ms" in result else []
