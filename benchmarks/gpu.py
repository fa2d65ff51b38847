"""One gated layer on a GPU: the neurons that a predictor chooses, the exact gate, and all neurons by cuBLAS.

In int4, from Ampere on, also all neurons by PyTorch's own 4-bit kernel, which torchao calls (tinygemm).

The weights of several layers take turns, so that the GPU's cache does not hold them, in one CUDA graph, so that no
launch is waited for. ``--device cpu`` runs the same calls there, to check that they are right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import add_sizes
from benchmarks.figures import alternate, ratios, summary
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.formats import GROUP
from torch_pi2.layers.gpu import check_gpu
from torch_pi2.ops import load

#: Bytes of the plain read beside which the figures stand, on a GPU; the CPU has benchmarks of its own.
_READ_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
#: The first architecture that PyTorch's 4-bit kernels are for (Ampere).
_INT4_SINCE = (8, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    add = parser.add_argument
    add("--active", type=float, default=0.1, metavar="SHARE", help="of neurons that the predictor chooses")
    add("--weights", default="float", choices=("float", "int4", "int8"), help="of the neurons (default: bfloat16)")
    add("--rank", type=common.positive, default=256, metavar="R", help="of the predictor (default: 256)")
    add("--layers", type=common.positive, default=4, metavar="N", help="whose weights are read in turn (default: 4)")
    add("--device", default="cuda", choices=("cuda", "cpu"))


class _Layer:
    """Random weights of one layer, and a predictor whose cut leaves ``active`` of the neurons for ``x``."""

    def __init__(
        self, hidden: int, intermediate: int, rank: int, active: float, weights: str, x_TH: torch.Tensor, seed: int
    ) -> None:
        generator, device = torch.Generator().manual_seed(seed), x_TH.device

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).mul_(hidden**-0.5)

        rows_IRH = drawn(intermediate, 3, hidden).bfloat16()
        self.gate, self.up = (rows_IRH[:, row].contiguous().to(device) for row in (0, 1))
        self.down = rows_IRH[:, 2].T.contiguous().to(device)
        if weights == "float":
            self.rows = rows_IRH.to(device)
        else:
            made = [torch.ops.pi2.quantize(rows_IRH[:, row].float(), weights) for row in range(3)]
            self.rows = torch.stack(made, 1).contiguous().to(device)
        self.packed = []
        if weights == "int4" and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= _INT4_SINCE):
            self.packed = [_Packed(rows_IRH[:, row], device) for row in (0, 1)] + [_Packed(rows_IRH[:, 2].T, device)]
        self.weights = weights
        a, b = drawn(rank, hidden), drawn(intermediate, rank)
        a, b = ((w / w.abs().max() * 127).round().to(torch.int8).to(device) for w in (a, b))
        self.predictor = [
            a,
            torch.full((rank,), 1e-3, device=device),
            b,
            torch.full((intermediate,), 1e-3, device=device),
        ]
        logits_TI = torch.relu(x_TH.float() @ a.float().T * 1e-3) @ b.float().T * 1e-3
        self.cut = float(logits_TI.flatten().kthvalue(max(1, round(logits_TI.numel() * (1 - active)))).values)

    def predicted(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The neurons that the predictor chooses, ``[T, I]``, on the CPU."""
        tensors = (tensor.cpu() for tensor in self.predictor)
        return torch.ops.pi2.predict_lowrank(x_TH.cpu(), *tensors, None, self.cut)

    def sparse(self, x_TH: torch.Tensor) -> torch.Tensor:
        return torch.ops.pi2.predicted_ffn(
            x_TH, self.rows, None, None, None, self.predictor, "lowrank", self.cut, "", False,
            "relu", False, 0, 0.0, self.weights, False,
        )  # fmt: skip

    def exact(self, x_TH: torch.Tensor) -> torch.Tensor:
        return torch.ops.pi2.sparse_ffn(
            x_TH, self.rows, None, None, None, None, "relu", False, 0, 0.0, self.weights, False
        )

    def dense(self, x_TH: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(F.linear(x_TH, self.gate)) * F.linear(x_TH, self.up), self.down)

    def dense_int4(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate, up, down = self.packed
        return down(torch.relu(gate(x_TH)) * up(x_TH))


class _Packed:
    """A matrix ``[N, K]`` in 4 bits, groups of 32, as PyTorch's kernels have it; N is padded with zeros to 64s, K to
    128s."""

    def __init__(self, w_NK: torch.Tensor, device: torch.device) -> None:
        self.shape = w_NK.shape
        rows, columns = (-(-size // to) * to for size, to in zip(w_NK.shape, (64, 128), strict=True))
        w_NK = F.pad(w_NK.float(), (0, columns - self.shape[1], 0, rows - self.shape[0]))
        w_NGk = w_NK.unflatten(1, (-1, GROUP))
        scale_NG1 = (w_NGk.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-8).bfloat16()
        q_NK = ((w_NGk / scale_NG1.float()).round().clamp(-8, 7) + 8).flatten(1).to(torch.int32)
        # a number is (q - 8) * scale + zero
        scales_NG = scale_NG1.squeeze(-1)
        self.scales_GN2 = (
            torch.stack((scales_NG, torch.zeros_like(scales_NG)), -1).transpose(0, 1).contiguous().to(device)
        )
        if device.type == "cuda":
            halves = (q_NK[:, ::2] << 4 | q_NK[:, 1::2]).to(torch.uint8).to(device)
            self.w = torch.ops.aten._convert_weight_to_int4pack(halves, 8)
            self._times = torch.ops.aten._weight_int4pack_mm
        else:
            self.w = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK, 1)
            self._times = torch.ops.aten._weight_int4pack_mm_for_cpu

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        rows, columns = self.shape
        missing = len(self.scales_GN2) * GROUP - columns
        x_TK = F.pad(x_TK, (0, missing)) if missing else x_TK
        y_TN: torch.Tensor = self._times(x_TK, self.w, GROUP, self.scales_GN2)
        return y_TN[:, :rows]


def _timer(device: str, work: Callable[[], None]) -> Callable[[], float]:
    """A function that times ``work`` in microseconds: on a GPU as a graph, between events."""
    if device == "cpu":

        def timed() -> float:
            started = time.perf_counter()
            work()
            return (time.perf_counter() - started) * 1e6

        return timed
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replayed(times: int = 20) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        first.record()
        for _ in range(times):
            graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / times

    return replayed


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one layer, bfloat16 inputs.

    Returns:
        ``us`` and ``spread``, by case: ``sparse`` (predictor included), ``exact`` (gate of every neuron), ``dense``
        (three products of PyTorch's), of int4 also ``dense_int4`` (of its 4-bit ones), ``read`` (a plain read, of as
        many bytes as ``sparse`` reads of the weights); ``over_dense``, ``exact_over_dense``, ``over_dense_int4``: times
        as fast as dense within each round, with spreads; ``of_read``:
        share of a plain read's speed that ``sparse`` reaches; ``fired``: share of neurons that the predictor said.

    Raises:
        DeviceError: no GPU that has kernels.
    """
    layers, device = args.layers, args.device
    check_gpu(torch.device(device))
    load()
    x_TH = (
        torch.randn(args.tokens, args.hidden, generator=torch.Generator().manual_seed(args.seed)).bfloat16().to(device)
    )
    made = [
        _Layer(args.hidden, args.intermediate, args.rank, args.active, args.weights, x_TH, args.seed + i)
        for i in range(layers)
    ]
    big = torch.empty(_READ_BYTES[device] // 4, dtype=torch.int32, device=device).fill_(1)

    def all_layers(name: str) -> Callable[[], None]:
        def work() -> None:
            for layer in made:
                getattr(layer, name)(x_TH)

        return work

    with torch.inference_mode():
        ways = ("dense", *["dense_int4"] * bool(made[0].packed), "exact", "sparse")
        timers = {name: _timer(device, all_layers(name)) for name in ways}
        timers["read"] = _timer(device, lambda: (big.amax(), None)[1])
        fired = [layer.predicted(x_TH) for layer in made]
        samples = alternate(tuple(timers), args.rounds + 1, lambda name, _: timers[name]())
    us = {name: [value / (1 if name == "read" else layers) for value in values[1:]] for name, values in samples.items()}
    union = statistics.mean(float(mask.any(0).float().mean()) for mask in fired)
    wanted_bytes = union * made[0].rows.nbytes + sum(t.nbytes for t in made[0].predictor)
    read_bytes_per_us = big.nbytes / statistics.median(us["read"])
    over = {"over_dense": ratios(us["dense"], us["sparse"]), "exact_over_dense": ratios(us["dense"], us["exact"])}
    if made[0].packed:
        over["over_dense_int4"] = ratios(us["dense_int4"], us["sparse"])
    times, factors = summary(us, 2), summary(over)
    return {
        "synthetic": "random weights and predictors",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "us": {name: us for name, us in times.items() if name != "spread"},
        **factors,
        "spread": times["spread"] | factors["spread"],
        "of_read": round(wanted_bytes / statistics.median(us["sparse"]) / read_bytes_per_us, 3),
        "read_gb_per_s": round(read_bytes_per_us / 1e3, 1),
        "fired": round(statistics.mean(float(mask.float().mean()) for mask in fired), 4),
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    """Of each case its microseconds, and how many times as fast it is as dense layers."""
    over = {"sparse": result["over_dense"], "exact": result["exact_over_dense"]}
    return [
        {"case": name, "us": us, "spread": {"us": result["spread"][name]}, "over": over.get(name)}
        for name, us in result["us"].items()
        if name != "read"
    ]


TABLES = (
    Table(
        "One layer on a GPU",
        _rows,
        {"": at("case"), "us a layer": ranged("us", ".1f"), "times as fast as dense": at("over", ".2f")},
    ),
)


def about(result: Result) -> str:
    return (
        f"FFN {result['hidden']} x {result['intermediate']} {result['weights']}, {result['tokens']} token(s), "
        f"{common.percent(result['fired'])} predicted, {result['layers']} layers in turn, {result['device']}"
    )


def notes(result: Result) -> list[str]:
    packed = result.get("over_dense_int4")
    return [
        f"sparse reads at {common.percent(result['of_read'])} of {result['read_gb_per_s']:.0f} GB/s"
        + ("" if packed is None else f"; it is {packed:.2f} times as fast as PyTorch's 4-bit kernel")
    ]
