"""``Hardware``: the measured or published cost of compute and reads on one machine.

It has the inputs of PowerInfer-2's planner: "NPU speed for different matrix sizes, CPU sparse speed, memory bandwidth
under access patterns, storage speed for access sizes" (arXiv 2406.06282v3, section 5). Compute is a line per format and
number of tokens,

    us = calls * call_us + hot_mb * us_per_hot_mb + cold_mb * us_per_cold_mb + gate_mb * us_per_gate_mb
         + million_macs * us_per_million_macs

fitted to calls of the operators (:mod:`torch_pi2.measure.measure`). Times are microseconds, sizes bytes, ``mb`` 10^6
bytes. File format: docs/HARDWARE.md.
"""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import argument, from_json, limited, optional, to_json
from torch_pi2.base.files import atomic_write, json_text, parse_json
from torch_pi2.base.reading import read_bytes
from torch_pi2.errors import ConfigError
from torch_pi2.formats import FORMATS, GGML, formats_of
from torch_pi2.machine.reads import FIX, Reads, check_reads, wrong

FORMAT = "torch_pi2.hardware"
VERSION = 2
SOURCES = ("measured", "published")

#: ``weights/activations``.
KERNELS = ("int4/int8", "int4/float", "int8/int8", "int8/float", "bfloat16/float", "float16/float", "float32/float")


@dataclass(frozen=True)
class Line:
    """Cost of calls with ``tokens`` tokens; 0 for parts without a measurable cost.

    Attributes:
        call_us: microseconds per call.
        us_per_hot_mb: bytes read in order. us_per_cold_mb: gathered neuron rows.
        us_per_gate_mb: gate rows of all neurons under the exact gate.
        us_per_million_macs: multiply-adds: the length of a row for each (token, row) pair.
        error: mean relative residual of the fit; 0 where nothing was measured.
    """

    tokens: int = limited(1)
    call_us: float = limited()
    us_per_hot_mb: float = limited()
    us_per_cold_mb: float = limited()
    us_per_gate_mb: float = limited()
    us_per_million_macs: float = limited()
    error: float = limited()

    def us(self, *, hot: float = 0, cold: float = 0, gate: float = 0, macs: float = 0, calls: float = 1) -> float:
        """Microseconds of ``calls`` calls with these bytes and multiply-adds in total."""
        nbytes = hot * self.us_per_hot_mb + cold * self.us_per_cold_mb + gate * self.us_per_gate_mb
        return calls * self.call_us + (nbytes + macs * self.us_per_million_macs) * 1e-6


@dataclass(frozen=True)
class Kernel:
    """Lines of one format: ``sparse`` by tokens of a decoding step, ``dense`` and ``linear`` by tokens of a call."""

    sparse: tuple[Line, ...]
    dense: tuple[Line, ...]
    linear: tuple[Line, ...]


@dataclass(frozen=True)
class StoreCosts:
    """CPU cost of a store: ``lookup_us`` a needed neuron, ``slot_us`` a slot read (checksum, eviction, copy)."""

    lookup_us: float = limited()
    slot_us: float = limited()


@dataclass(frozen=True)
class Accelerator:
    """An NPU or GPU that computes hot neurons densely, in parallel with the CPU.

    Attributes:
        memory_bytes: for weights. launch_us: launch and synchronisation of a call.
        stream_gb_per_s: bandwidth for weights, alone. shared_gb_per_s: of accelerator and CPU together.
        gmacs_per_s: 10^9 multiply-adds a second. merge_us: adding its result to the CPU's, per token.
        holds_rest: a GPU whose own memory holds the rest of the model. Both sides then read at their own speed, and
            ``merge_us`` is per call of a layer with neurons on the CPU: its input's way there and the result's back.
    """

    name: str
    memory_bytes: int
    launch_us: float = limited()
    stream_gb_per_s: float = limited(above=True)
    shared_gb_per_s: float = limited(above=True)
    gmacs_per_s: float = limited(above=True)
    merge_us: float = limited()
    holds_rest: bool = optional(False)

    def ffn_us(self, *, batch: int, neurons: int, hidden: int, rows: int, weight_bits: float) -> float:
        """Microseconds of a dense call: the longer of reading and multiplying ``rows`` rows of each neuron."""
        if neurons <= 0:
            return 0.0
        numbers = neurons * rows * hidden
        read_us = numbers * weight_bits / 8 / self.stream_gb_per_s * 1e-3
        return self.launch_us + max(read_us, batch * numbers / self.gmacs_per_s * 1e-3)


@dataclass(frozen=True)
class Hardware:
    """One machine. Immutable; the same numbers give the same JSON.

    Attributes:
        name: of the machine or preset. source: ``measured`` or ``published``.
        machine, versions: description for people. notes: by field, sources of figures and assumptions.
        cores, threads: the machine's cores, and the compute threads of the measurement.
        memory_bytes: of the machine. memory_gb_per_s: of sequential reads.
        kernels: by format (:data:`KERNELS`), with weights in memory, not in caches.
        reads, store: the drive, and the CPU cost of a neuron store.
    """

    name: str
    source: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    notes: Mapping[str, str]
    cores: int = limited(1)
    threads: int = limited(1)
    memory_bytes: int = limited(1)
    memory_gb_per_s: float = limited(above=True)
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)
    store: StoreCosts = field(default_factory=lambda: StoreCosts(0.0, 0.0))
    accelerator: Accelerator | None = None
    _memo: dict[Any, Line] = field(default_factory=dict, init=False, repr=False, compare=False)

    def line(self, part: str, name: str, tokens: float) -> Line:
        """Cost of calls with ``tokens`` tokens. ``part``: ``sparse`` (decoding steps of an FFN), ``dense`` (FFN calls
        with all neurons) or ``linear``. ``name``: the kernel, such as ``int4/int8``; others are mapped by
        :func:`timed_as`. Raises ConfigError: the profile has no such kernel, or ``tokens`` is not above 0.
        """
        key = (part, name, tokens)
        if key not in self._memo:
            kernel = self.kernels.get(timed_as(name))
            if kernel is None:
                fix = "Choose one of these, or measure again with this version: torch-pi2 doctor --measure."
                expected = ", ".join(self.kernels) or "none"
                argument(name, f"kernels of hardware {self.name}", fix).wrong(expected, repr(name))
            self._memo[key] = _at(getattr(kernel, part), tokens)
        return self._memo[key]

    @property
    def error(self) -> float:
        """Mean relative error of the sparse and dense lines."""
        errors = [line.error for kernel in self.kernels.values() for line in (*kernel.sparse, *kernel.dense)]
        return math.fsum(errors) / len(errors)

    @property
    def hash(self) -> str:
        """SHA-256 of the numbers, without names and notes."""
        numbers = {k: v for k, v in to_json(self).items() if k not in ("name", "machine", "versions", "notes")}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Text of a file, deterministic."""
        return json_text(FORMAT, VERSION, dict(sorted(to_json(self).items()))) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "hardware profile") -> "Hardware":
        """Inverse of :meth:`to_json`. Raises ArtifactError: names ``where`` and the field."""
        data = parse_json(text, where, FORMAT, VERSION)
        known = {k: v for k, v in data.items() if k not in ("format", "version")}
        hardware = from_json(Hardware, known, where, FIX)
        _check(hardware, where)
        return hardware

    def save(self, path: str | Path) -> None:
        """Write ``path`` atomically. Raises ArtifactError."""
        atomic_write(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Hardware":
        """Read the file of :meth:`save`. Raises ArtifactError."""
        return Hardware.from_json(read_bytes(path), str(path))


def timed_as(kernel: str) -> str:
    """The kernel of :data:`KERNELS` whose times per byte and multiply-add stand for those of ``kernel``.

    GGUF blocks are read at int4's speed per byte (docs/RESULTS.md), blocks of more than five bits at int8's. With two
    formats, that of gate and up decides.
    """
    weights, slash, activations = kernel.partition("/")
    first = formats_of(weights)[0]
    if first in GGML:
        first = "int4" if FORMATS[first].bits <= 5 else "int8"
    return first + slash + activations


def _at(lines: Sequence[Line], tokens: float) -> Line:
    """The line for ``tokens``: interpolated between measured ones, or the nearest."""
    if not tokens > 0:
        raise ConfigError("tokens", expected="a number above 0", found=str(tokens), fix="Correct it.")
    i = bisect_left([line.tokens for line in lines], tokens)
    below, above = lines[max(i - 1, 0)], lines[min(i, len(lines) - 1)]
    at = 1.0 if below.tokens == above.tokens else (tokens - below.tokens) / (above.tokens - below.tokens)
    at = min(1.0, max(0.0, at))
    a, b = asdict(below), asdict(above)
    return Line(below.tokens, **{name: a[name] + at * (b[name] - a[name]) for name in a if name != "tokens"})


def _check(hardware: Hardware, where: str) -> None:
    """Checks beyond types and limits of single fields. Raises ArtifactError."""
    if hardware.source not in SOURCES:
        wrong(f"{where}, source", " or ".join(SOURCES), hardware.source)
    check_reads(hardware.reads, f"{where}, reads")
    if not hardware.kernels or not hardware.kernels.keys() <= set(KERNELS):
        found = next((name for name in hardware.kernels if name not in KERNELS), None)
        wrong(f"{where}, kernels", f"names of {', '.join(KERNELS)}", found)
    for name, kernel in hardware.kernels.items():
        for part, lines in vars(kernel).items():
            tokens = [line.tokens for line in lines]
            if not tokens or any(a >= b for a, b in pairwise(tokens)):
                expected = "one line or more, each for more tokens than the one before"
                wrong(f"{where}, kernels, {name}, {part}", expected, tokens)
