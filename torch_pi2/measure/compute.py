"""Compute rates: operator calls over grids of sizes, with weights from memory, and lines fitted to them."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.memory import new_tensor
from torch_pi2.formats import FLOATS, FORMATS, GROUP, row_bytes
from torch_pi2.layers.prompt import PROMPT_TOKENS, has_tiles, prompt_ffn
from torch_pi2.machine.hardware import KERNELS, Kernel, Line
from torch_pi2.machine.reads import six_digits
from torch_pi2.observe import counters
from torch_pi2.ops import load
from torch_pi2.ops.constants import constants, wants_blocks

#: Bytes of distinct random rows, which the buffer repeats.
_BLOCK_BYTES = 4 << 20
#: Standard deviations of uniform 4-bit and 8-bit integers.
_DEVIATION = {"int4": 4.6, "int8": 74.0}


class Weights:
    """A buffer of ``nbytes`` bytes. Parts start at random rows, so that caches rarely hold them."""

    def __init__(self, nbytes: int) -> None:
        load()
        self.raw = new_tensor([nbytes], torch.uint8)
        self.raw.fill_(1)  # untouched pages map to one cached page of zeros
        self._generator = torch.Generator().manual_seed(0)
        self._rows = self.raw.view(1, -1)

    def fill(self, kind: str, columns: int) -> "Weights":
        """Fill with random rows of ``columns`` numbers in format ``kind``; products keep unit variance."""
        rows = self._some(kind, columns)
        whole, width = self.raw.view(rows.dtype), rows.shape[1]
        self._rows = whole[: whole.numel() // width * width].view(-1, width)
        for part in self._rows.split(len(rows)):
            part.copy_(rows[: len(part)])
        return self

    def _some(self, kind: str, columns: int) -> torch.Tensor:
        if kind in FLOATS:
            count = max(1, _BLOCK_BYTES // (4 * columns))
            numbers = torch.randn((count, columns), generator=self._generator).mul_(columns**-0.5)
            return numbers.to(DTYPES[kind])
        size = row_bytes(kind, columns)
        count, groups = max(1, _BLOCK_BYTES // size), -(-columns // GROUP)
        rows = torch.randint(256, (count, size), generator=self._generator, dtype=torch.uint8)
        scale = torch.tensor(columns**-0.5 / _DEVIATION[kind], dtype=torch.float16)
        rows[:, groups * FORMATS[kind].group_bytes :] = scale.repeat(groups).view(torch.uint8)
        return rows

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def row_bytes(self) -> int:
        return self._rows[:1].nbytes

    def rows(self, count: int) -> torch.Tensor:
        """``count`` adjacent rows from a random start."""
        start = int(torch.randint(self.count - count + 1, (), generator=self._generator))
        return self._rows[start : start + count]

    def neuron_rows(self, neurons: int) -> torch.Tensor:
        """``neurons`` adjacent neurons of three rows from a random start."""
        return self.rows(3 * neurons).unflatten(0, (-1, 3))


#: Least passes over all cases; the median of three excludes the first, which warms up.
_LEAST_PASSES = 3

#: Prepares a call on new data.
Ready = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Size:
    """Work of one call: bytes and multiply-adds, as in :class:`~torch_pi2.machine.hardware.Line`."""

    hot: float = 0.0
    cold: float = 0.0
    gate: float = 0.0
    macs: float = 0.0


@dataclass(frozen=True)
class Case:
    """A call to time for the line ``key`` at ``tokens`` tokens; ``ready`` prepares it, untimed."""

    key: str
    tokens: int
    size: Size
    ready: Ready


class Samples:
    """Sizes and microseconds by line and tokens."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[tuple[Size, float]]] = defaultdict(list)

    def add(self, case: Case, us: float) -> None:
        self._found[case.key, case.tokens].append((case.size, us))

    def lines(self, key: str) -> tuple[Line, ...]:
        """Lines of ``key``, ascending by tokens."""
        found = sorted(tokens for name, tokens in self._found if name == key)
        lines = [fit(tokens, self._found[key, tokens]) for tokens in found]
        for i, tokens in enumerate(found[1:], 1):  # no exact gate in large batches
            if not any(size.gate for size, _ in self._found[key, tokens]):
                lines[i] = replace(lines[i], us_per_gate_mb=lines[i - 1].us_per_gate_mb)
        return tuple(lines)


def fit(tokens: int, samples: Sequence[tuple[Size, float]]) -> Line:
    """Non-negative least squares of the relative errors, so that small calls count like large ones."""
    import numpy as np
    from scipy.optimize import nnls

    sizes = [(1.0, s.hot * 1e-6, s.cold * 1e-6, s.gate * 1e-6, s.macs * 1e-6) for s, _ in samples]
    relative = np.array(sizes) / np.array([us for _, us in samples])[:, None]
    # normalised columns: the active set does not depend on units
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    found, _ = nnls(relative / scale, np.ones(len(samples)))
    error = float(np.abs(relative @ (found / scale) - 1).mean())
    call, hot, cold, gate, macs = (six_digits(float(c)) for c in found / scale)
    return Line(tokens, call, hot, cold, gate, macs, six_digits(error))


@torch.inference_mode()
def time_into(samples: Samples, cases: Iterable[Case], seconds: float) -> None:
    """Time all cases in turn for ``seconds``, at least three times; add medians to ``samples``."""
    cases = list(cases)
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    while not times or len(times[-1]) < _LEAST_PASSES or time.perf_counter() < end:
        for case, found in zip(cases, times, strict=True):
            found.append(_us(case.ready()))
    for case, found in zip(cases, times, strict=True):
        samples.add(case, statistics.median(found))


@torch.inference_mode()
def median_us(ready: Ready, *, least: int = 3, seconds: float = 0.0) -> float:
    """Median microseconds of at least ``least`` calls over ``seconds``, after one to warm up."""
    ready()()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        found.append(_us(ready()))
    return statistics.median(found)


def _us(call: Callable[[], object]) -> float:
    """By the operators' own clock, without call overhead; else by the wall clock."""
    torch.ops.pi2.timings(True)
    started = time.perf_counter()
    call()
    wall = (time.perf_counter() - started) * 1e6
    inside = float(torch.ops.pi2.timings(True)[:, 4].sum()) / 1e3
    return inside or wall


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
    paths = ("sparse", "dense", "linear")
    return {name: Kernel(*(samples.lines(f"{name} {path}") for path in paths)) for name in grid.kernels}


def _kernel_cases(weights: Weights, grid: Grid) -> Iterator[list[Case]]:
    """Cases by kernel and layer; ``weights`` are filled for the latest ones."""
    for kind in dict.fromkeys(kernel.partition("/")[0] for kernel in grid.kernels):
        for hidden, intermediate in grid.float_layers if kind in FLOATS else grid.layers:
            weights.fill(kind, hidden)
            for name in grid.kernels:
                if name.partition("/")[0] == kind:
                    kernel = KernelCases(name, weights, hidden, intermediate)
                    # and those around the switch to the path for prompts
                    of_int8 = constants().gemm_tokens if has_tiles() else max(grid.tokens) + 1
                    switch = of_int8 if kernel.int8 else PROMPT_TOKENS
                    more = (switch - 1, switch) if switch <= max(grid.tokens) else ()
                    tokens = sorted({*grid.tokens, *more})
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
        nothing = {"bias_gate": None, "bias_up": None, "bias_out": lambda skips: None, "threshold": 0.0, "n_hot": 0}
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
