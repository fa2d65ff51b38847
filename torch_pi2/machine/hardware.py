"""``Hardware``: what computing and reading cost on one machine, in numbers that were measured there or published.

PowerInfer-2's planner takes "NPU speed for different matrix sizes, CPU sparse speed, memory bandwidth under access
patterns, storage speed for access sizes" (arXiv 2406.06282v3, section 5). The profile has these; for computing it has a
line per format and number of tokens:

    us = calls * call_us + hot_mb * us_per_hot_mb + cold_mb * us_per_cold_mb + gate_mb * us_per_gate_mb
         + million_macs * us_per_million_macs

fitted to real calls of the operators (:mod:`torch_pi2.measure.measure`). Times are in microseconds, sizes in bytes;
``mb`` is 10^6 bytes. The format of the file is in docs/HARDWARE.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import from_json, limited, optional, to_json
from torch_pi2.base.files import atomic_write, parse_json, read_text
from torch_pi2.errors import ConfigError
from torch_pi2.formats import FORMATS, GGML, formats_of
from torch_pi2.machine.reads import FIX, Reads, check_reads, wrong

FORMAT = "torch_pi2.hardware"
VERSION = 2
SOURCES = ("measured", "published")

#: ``weights/activations``.
KERNELS = (
    "int4/int8",
    "int4/float",
    "int8/int8",
    "int8/float",
    "bfloat16/float",
    "float16/float",
    "float32/float",
)
#: Fields of version 1 that nothing reads any more.
_OBSOLETE = ("thread_factors", "cache_bytes", "cached", "cached_glue", "glue", "interference")


@dataclass(frozen=True)
class Line:
    """What calls for so many ``tokens`` take; 0 where a part costs nothing that could be measured.

    Attributes:
        tokens: tokens of one call.
        call_us: microseconds of each call, whatever its size.
        us_per_hot_mb: bytes read one after another. us_per_cold_mb: rows of neurons that are gathered one by one.
        us_per_gate_mb: the gate rows of all neurons under the exact gate.
        us_per_million_macs: multiplications; a (token, row) pair has as many as the row is long.
        error: mean relative distance of the measured calls from the line; 0 where nothing was measured.
    """

    tokens: int = limited(1)
    call_us: float = limited()
    us_per_hot_mb: float = limited()
    us_per_cold_mb: float = limited()
    us_per_gate_mb: float = limited()
    us_per_million_macs: float = limited()
    error: float = limited()

    def us(self, *, hot: float = 0, cold: float = 0, gate: float = 0, macs: float = 0, calls: float = 1) -> float:
        """Microseconds of ``calls`` calls that read so many bytes and multiply so often in total."""
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
    """What a neuron store costs beside its drive.

    Attributes:
        lookup_us: for each neuron that a step needs, whether the cache has it or not.
        slot_us: the least for each slot that is read: checking it, making room for it, copying it there.
    """

    lookup_us: float = limited()
    slot_us: float = limited()


@dataclass(frozen=True)
class Accelerator:
    """An NPU or GPU that computes hot neurons beside the CPU, densely.

    Attributes:
        memory_bytes: for weights there. launch_us: to begin a call and to wait for its end.
        stream_gb_per_s: bandwidth of weights, alone. shared_gb_per_s: of it and the CPU together, both reading.
        gmacs_per_s: 10^9 multiplications a second. merge_us: to add its result to the CPU's, for each token.
        holds_rest: it has memory of its own with the rest of the model in it (a GPU). Both then read at their own
            speed, and each layer with neurons on the CPU, and only such a layer, takes ``merge_us`` more per call: its
            input goes to the CPU and a result comes back.
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
        """Microseconds of ``rows`` rows of ``neurons`` neurons, dense: the longer of reading and multiplying them."""
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
        machine, versions: what was measured, in words. notes: by field, where a figure is from, or what is assumed.
        cores, threads: the machine's cores, and the threads that computed while it was measured.
        memory_bytes: of the machine. memory_gb_per_s: of plain reads in order.
        kernels: by format (:data:`KERNELS`), with weights in memory, not in caches.
        reads, store: the drive, and what a neuron store costs beside it.
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
        """What calls for so many tokens cost.

        Args:
            part: ``sparse`` (decoding steps of an FFN), ``dense`` (FFN calls with all neurons) or ``linear``.
            name: the kernel (``int4/int8``; for formats of GGUF files and neurons of two formats see
                :func:`timed_as`).

        Raises:
            ConfigError: the profile has no such kernel, or ``tokens`` is not above 0.
        """
        key = (part, name, tokens)
        if key not in self._memo:
            kernel = self.kernels.get(timed_as(name))
            if kernel is None:
                raise ConfigError(
                    f"kernels of hardware {self.name}",
                    expected=", ".join(self.kernels) or "none",
                    found=repr(name),
                    fix="Choose one of these, or measure again with this version: torch-pi2 doctor --measure.",
                )
            self._memo[key] = _at(getattr(kernel, part), tokens)
        return self._memo[key]

    @property
    def error(self) -> float:
        """Mean error of the lines, sparse and dense: how well, and how steadily, they fit."""
        errors = [line.error for kernel in self.kernels.values() for line in (*kernel.sparse, *kernel.dense)]
        return math.fsum(errors) / len(errors)

    @property
    def hash(self) -> str:
        """SHA-256 of the numbers: the same for machines that are the same to a planner, whatever they are called."""
        numbers = {k: v for k, v in to_json(self).items() if k not in ("name", "machine", "versions", "notes")}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Text of a file; the same numbers give the same text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **to_json(self)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "hardware profile") -> Hardware:
        """Inverse of :meth:`to_json`; reads version 1, too.

        Raises:
            ArtifactError: not such a file, or a number in it makes no sense; names ``where`` and the field.
        """
        data = parse_json(text, where, FORMAT, 1, VERSION)
        known = {k: v for k, v in data.items() if k not in ("format", "version")}
        if data["version"] == 1:
            known = _from_version_1(known, where)
        hardware = from_json(Hardware, known, where, FIX)
        _check(hardware, where)
        return hardware

    def save(self, path: str | Path) -> None:
        """Write ``path``, whole or not at all. Raises ArtifactError: it cannot be written."""
        atomic_write(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Hardware:
        """Read the file of :meth:`save`. Raises ArtifactError: there is none, or as :meth:`from_json`."""
        return Hardware.from_json(read_text(path), str(path))


def _from_version_1(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of version 1 as they are now. Raises ArtifactError: one that has moved is missing or damaged."""
    known = {name: value for name, value in data.items() if name not in _OBSOLETE}
    try:
        memory, rates, reads = known.pop("memory"), known.pop("rates"), dict(known["reads"])
        known["memory_gb_per_s"] = max(figure["gb_per_s"] for figure in memory if figure["row_bytes"] == 0)
        known["kernels"] = rates["kernels"]
        reads["rates"] = reads.pop("engines")[reads["engine"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        wrong(where, "memory, rates and reads of version 1", "damage")
    return known | {"reads": reads}


def timed_as(kernel: str) -> str:
    """The kernel of :data:`KERNELS` whose time for a byte and a multiply-add is taken for that of ``kernel``.

    Blocks of GGUF files are read at int4's speed for each byte (docs/RESULTS.md); blocks of more than five bits count
    as int8. For neurons of two formats gate and up decide.
    """
    weights, slash, activations = kernel.partition("/")
    first = formats_of(weights)[0]
    if first in GGML:
        first = "int4" if FORMATS[first].bits <= 5 else "int8"
    return first + slash + activations


def _at(lines: Sequence[Line], tokens: float) -> Line:
    """The line for so many tokens: between those measured, linear in tokens; outside, the nearest."""
    if not tokens > 0:
        raise ConfigError("tokens", expected="a number above 0", found=str(tokens), fix="Correct it.")
    i = bisect_left([line.tokens for line in lines], tokens)
    below, above = lines[max(i - 1, 0)], lines[min(i, len(lines) - 1)]
    at = 1.0 if below.tokens == above.tokens else (tokens - below.tokens) / (above.tokens - below.tokens)
    at = min(1.0, max(0.0, at))
    a, b = asdict(below), asdict(above)
    return Line(below.tokens, **{name: a[name] + at * (b[name] - a[name]) for name in a if name != "tokens"})


def _check(hardware: Hardware, where: str) -> None:
    """Raises ArtifactError for what the types and limits of single fields do not say."""
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
