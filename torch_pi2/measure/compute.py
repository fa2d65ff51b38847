"""Compute rates: operator calls over grids of sizes, with weights from memory and not from caches, and lines fitted to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.formats import FLOATS, FORMATS
from torch_pi2.layers.prompt import PROMPT_TOKENS, has_tiles, prompt_ffn
from torch_pi2.machine.hardware import KERNELS, Kernel
from torch_pi2.measure.fit import Case, Ready, Samples, Size, time_into
from torch_pi2.measure.weights import Weights
from torch_pi2.observe import counters
from torch_pi2.ops.constants import constants, wants_blocks

#: A token's share of the cold neurons (None: exact gate), the share of hot ones, the activation, and the gate's bias in
#: negative standard deviations. Of the selected neurons silu computes all, relu a half, or with 1.28 a tenth.
_MIXES: tuple[tuple[float | None, float, str, float], ...] = (
    (0.0, 0.8, "silu", 0.0),
    (0.0, 0.8, "relu", 1.28),
    (0.0, 0.1, "silu", 0.0),
    (0.02, 0.0, "silu", 0.0),
    (0.1, 0.0, "silu", 0.0),
    (0.1, 0.0, "relu", 0.0),
    (0.3, 0.0, "relu", 0.0),
    (0.1, 0.3, "relu", 0.0),
    (None, 0.0, "relu", 1.28),
    (None, 0.2, "relu", 1.28),
    (None, 0.0, "relu", 0.0),
)
#: From this many tokens on calls are bound by compute, and part of a layer is enough; and its multiply-adds.
_MANY, _MANY_MACS = 9, 3e9


@dataclass(frozen=True)
class Grid:
    """The sizes to measure. ``layers``: (H, I) for quantised formats; ``float_layers``: for others; ``store``: of a
    model over a store. ``batches``: tokens of a decoding step; ``tokens``: of a call of dense layers. ``file_bytes``:
    of the test file; ``weights_bytes``: of the weight buffer, far larger than caches.
    """

    layers: tuple[tuple[int, int], ...] = ((2048, 8192), (4096, 14336))
    float_layers: tuple[tuple[int, int], ...] = ((2048, 8192), (4096, 4096))
    kernels: tuple[str, ...] = KERNELS
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 128, 512)
    store: tuple[int, int] = (2048, 8192)
    file_bytes: int = 512 << 20
    weights_bytes: int = 1 << 30


FULL = Grid()


def kernels(weights: Weights, grid: Grid, seconds: float) -> dict[str, Kernel]:
    """Measure the lines of ``grid`` in about ``seconds``."""
    samples = Samples()
    for cases in _kernel_cases(weights, grid):
        time_into(samples, cases, seconds / (len(grid.kernels) * len(grid.layers)))
    return {
        kernel: Kernel(*(samples.lines(f"{kernel} {path}") for path in ("sparse", "dense", "linear")))
        for kernel in grid.kernels
    }


def _kernel_cases(weights: Weights, grid: Grid) -> Iterator[list[Case]]:
    """Cases by kernel and layer; ``weights`` are filled for the latest ones."""
    for kind in dict.fromkeys(kernel.partition("/")[0] for kernel in grid.kernels):
        for hidden, intermediate in grid.float_layers if kind in FLOATS else grid.layers:
            weights.fill(kind, hidden)
            for name in grid.kernels:
                if name.partition("/")[0] == kind:
                    kernel = KernelCases(name, weights, hidden, intermediate)
                    tokens = kernel.with_switches(grid.tokens)
                    yield [*kernel.sparse(grid.batches), *kernel.dense(tokens), *kernel.linear(tokens)]


class KernelCases:
    """Cases of one format and layer size; at least two such layers fit into ``weights``."""

    def __init__(self, name: str, weights: Weights, hidden: int, intermediate: int) -> None:
        self.name, self.weights, self.hidden = name, weights, hidden
        self.neurons = min(intermediate, weights.count // 6)
        kind, _, activations = name.partition("/")
        self.x_dtype = DTYPES.get(kind, torch.bfloat16)
        self.bias_dtype = DTYPES.get(kind, torch.float32)
        self.kind, self.int8 = FORMATS[kind].operand, activations == "int8"

    def with_switches(self, tokens: Sequence[int]) -> list[int]:
        """``tokens``, and the two around the switch to the path for prompts."""
        switch = PROMPT_TOKENS if not self.int8 else constants().gemm_tokens if has_tiles() else max(tokens) + 1
        return sorted({*tokens, switch - 1, switch} if switch <= max(tokens) else {*tokens})

    def input(self, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens)
        return torch.randn((tokens, self.hidden), generator=generator).to(self.x_dtype)

    def ffn(
        self, x_TH: torch.Tensor, neurons: int, n_hot: int, mask_TC: torch.Tensor | None, act: str, deviations: float
    ) -> Ready:
        bias = torch.full((neurons,), -deviations, dtype=self.bias_dtype) if deviations else None
        weights, kind, int8 = self.weights, self.kind, self.int8
        op, last = torch.ops.pi2.sparse_ffn, (bias, None, None, mask_TC, act, False, n_hot, 0.0, kind, int8)
        return lambda: partial(op, x_TH, weights.neuron_rows(neurons), *last)

    def sparse(self, batches: Sequence[int]) -> Iterator[Case]:
        """Hot neurons, predicted ones drawn per token, and the exact gate."""
        row = self.weights.row_bytes
        for batch in batches:
            x_TH, generator = self.input(batch), torch.Generator().manual_seed(batch)
            for share, hot_share, act, deviations in _MIXES:
                if share is None and self.int8 and has_tiles() and batch >= constants().gemm_tokens:
                    continue  # computed by tiles: dense
                n_hot = int(hot_share * self.neurons)
                n_cold = self.neurons - n_hot
                mask_TC = None if share is None else torch.rand((batch, n_cold), generator=generator) < share
                call = self.ffn(x_TH, self.neurons, n_hot, mask_TC, act, deviations)
                done = _counted(call)
                if mask_TC is not None:
                    cold, gate = 3 * row * int(mask_TC.any(0).sum()), 0
                    rows = 2 * done["gate_rows"] + done["down_rows"]
                else:
                    firing = done["down_rows"] / (batch * self.neurons)
                    cold, gate = int(2 * row * n_cold * (1 - (1 - firing) ** batch)), row * n_cold
                    # up rows of hot neurons are always multiplied
                    rows = done["gate_rows"] + done["up_rows"] + done["down_rows"] + int(batch * n_hot * (1 - firing))
                size = Size(hot=3 * row * n_hot, cold=cold, gate=gate, macs=rows * self.hidden)
                yield Case(f"{self.name} sparse", batch, size, call)

    def dense(self, tokens: Sequence[int]) -> Iterator[Case]:
        """All neurons, on the path for that many tokens."""
        for n in tokens:
            x_TH, most = self.input(n), self.neurons
            if n >= _MANY:
                most = min(most, max(768, int(_MANY_MACS / (3 * self.hidden * n))))
            for neurons in (most, most // 3):
                for act, deviations in (("silu", 0.0), ("relu", 1.28))[n >= _MANY :]:
                    if n >= PROMPT_TOKENS and not self.int8:
                        call, rows = self._products(x_TH, neurons, act), 3 * n * neurons
                    else:
                        call = self.ffn(x_TH, neurons, neurons, None, act, deviations)
                        rows = 2 * n * neurons + _counted(call)["down_rows"]
                    nbytes = 3 * self.weights.row_bytes * neurons
                    size = Size(hot=nbytes if n < _MANY else 0, macs=rows * self.hidden)
                    yield Case(f"{self.name} dense", n, size, call)

    def _products(self, x_TH: torch.Tensor, neurons: int, act: str) -> Ready:
        sizes = {"hidden": self.hidden, "intermediate": neurons, "rows_per_neuron": 3}
        site = SimpleNamespace(**sizes, activation=act, gated=True, activation_on_up=False)
        nothing = {"bias_gate": None, "bias_up": None, "bias_down": None, "threshold": 0.0, "n_hot": 0}
        layer: Any = SimpleNamespace(site=site, weights=self.kind, neuron_rows=None, **nothing)

        def ready() -> Callable[[], object]:
            layer.neuron_rows = self.weights.neuron_rows(neurons)
            return lambda: prompt_ffn(layer, x_TH)

        return ready

    def linear(self, tokens: Sequence[int]) -> Iterator[Case]:
        """Linear layers from the size of key projections to that of heads."""
        for n in tokens:
            x_TK = self.input(n)
            for rows in (512, 2048) if n >= _MANY else (512, 2048, 16384):
                count = min(rows, self.weights.count // 2)
                # bytes and multiply-adds are proportional: fit one of them
                size = Size(hot=self.weights.row_bytes * count) if n < _MANY else Size(macs=n * count * self.hidden)
                yield Case(f"{self.name} linear", n, size, self._linear(x_TK, count))

    def _linear(self, x_TK: torch.Tensor, count: int) -> Ready:
        weights, kind, int8 = self.weights, self.kind, self.int8
        if kind == "float":
            return lambda: partial(F.linear, x_TK, weights.rows(count))
        if wants_blocks(kind, count, self.hidden, int8):  # the values do not matter
            return lambda: partial(torch.ops.pi2.linear_blocks, x_TK, weights.rows(count), None, kind)
        return lambda: partial(torch.ops.pi2.linear, x_TK, weights.rows(count), None, kind, int8)


@torch.inference_mode()
def _counted(ready: Ready) -> dict[str, int]:
    counters.reset()
    ready()()
    return counters.read(reset=True)
