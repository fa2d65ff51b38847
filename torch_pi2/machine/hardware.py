"""``Hardware``: what computing and reading cost on one machine, in numbers that were measured there or published.

PowerInfer-2's planner takes "NPU speed for different matrix sizes, CPU sparse speed, memory bandwidth under access
patterns, storage speed for access sizes" (arXiv 2406.06282v3, section 5). The profile has these, as a line per format
and number of tokens:

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
from torch_pi2.formats import FLOATS, FORMATS, GGML, formats_of
from torch_pi2.machine.reads import FIX, Reads, check_reads, wrong

FORMAT = "torch_pi2.hardware"
VERSION = 1
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
#: Predictors: kind and weights; ``/int8`` at the end: with int8 activations.
PREDICTORS = (
    "lowrank/float",
    "lowrank/int4",
    "lowrank/int4/int8",
    "lowrank/int8",
    "lowrank/int8/int8",
    "signbit",
)
#: Of keys and values.
ATTENTION = tuple(sorted(FLOATS))

_MB = 1e-6
_MILLION = 1e-6


@dataclass(frozen=True)
class Line:
    """What calls for so many ``tokens`` take; 0 where a part costs nothing that could be measured.

    Attributes:
        tokens: of a call.
        call_us: of each call, whatever its size.
        us_per_hot_mb: bytes read one after another. us_per_cold_mb: all rows of neurons, gathered one by one.
        us_per_gate_mb: gate rows of all neurons under the exact gate, one of each neuron.
        us_per_million_macs: multiplications, a (token, row) pair having as many as the row is long.
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
        """Microseconds of ``calls`` calls over so many bytes and multiplications, all of them together."""
        return (
            calls * self.call_us
            + _MB * (hot * self.us_per_hot_mb + cold * self.us_per_cold_mb + gate * self.us_per_gate_mb)
            + _MILLION * macs * self.us_per_million_macs
        )


@dataclass(frozen=True)
class Kernel:
    """Lines of one format: ``sparse`` by tokens of a decoding step, ``dense`` and ``linear`` by tokens of a call."""

    sparse: tuple[Line, ...]
    dense: tuple[Line, ...]
    linear: tuple[Line, ...]


@dataclass(frozen=True)
class Rates:
    """Lines of everything that is computed: ``kernels`` by name, ``predictors`` by name, ``attention`` by dtype."""

    kernels: Mapping[str, Kernel]
    predictors: Mapping[str, tuple[Line, ...]]
    attention: Mapping[str, tuple[Line, ...]]


@dataclass(frozen=True)
class Bandwidth:
    """Of memory: plain reads of rows of ``row_bytes`` gathered one by one, 0: of everything in order."""

    row_bytes: int
    threads: int = limited(1)
    gb_per_s: float = limited(above=True)


@dataclass(frozen=True)
class ThreadFactor:
    """How many times as long as on all threads a layer takes on so many."""

    threads: int = limited(1)
    factor: float = limited(1)


@dataclass(frozen=True)
class Glue:
    """What a layer takes outside our operators, linear layers and SDPA: norms, rotary embedding, residuals, Python.

    Weights that stream through the caches push its code and numbers out of them, so that it takes longer beside them.
    ``..._us`` of each layer, ``..._ns_per_number`` of each number of its hidden states.
    """

    eager_us: float = limited()
    eager_ns_per_number: float = limited()
    compiled_us: float = limited()
    compiled_ns_per_number: float = limited()


@dataclass(frozen=True)
class Interference:
    """Measured together: how many times as long computing takes while a drive is read, and reading while computing."""

    compute_while_reading: float = limited(1)
    read_while_computing: float = limited(1)


@dataclass(frozen=True)
class StoreCosts:
    """What a neuron store costs beside its drive.

    Attributes:
        lookup_us: of each neuron that a step wants, in the cache or not.
        slot_us: of each slot that is read, at least: to check it, to make room for it and to put it there.
    """

    lookup_us: float = limited()
    slot_us: float = limited()


@dataclass(frozen=True)
class Accelerator:
    """What computes hot neurons beside the CPU, densely.

    Attributes:
        memory_bytes: for weights there. launch_us: to begin a call and to wait for its end.
        stream_gb_per_s: of weights, alone. shared_gb_per_s: it and the CPU together, both reading.
        gmacs_per_s: 10^9 multiplications a second. merge_us: to add what it computed to what the CPU did, each token.
        holds_rest: it has memory of its own, with all that is no feed-forward layer in it, as a GPU: both read at their
            own speed, and a layer of which the CPU computes any neurons, and only such a one, takes ``merge_us`` more,
            however many tokens: its input goes to the CPU and a result comes back.
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
    """One machine. Immutable; its JSON is the same for the same numbers.

    Attributes:
        name: of the machine or preset. source: ``measured`` or ``published``.
        machine, versions: of what was measured, in words. notes: by field, where a figure is from, or what is assumed.
        cores, threads: of the machine, and those that computed in what follows.
        memory_bytes: of the machine. cache_bytes: what its caches hold from one token to the next.
        memory: plain reads. rates, glue: with weights in memory. cached, cached_glue: with weights in the caches, of a
            small model.
        thread_factors: by threads, ascending.
    """

    name: str
    source: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    notes: Mapping[str, str]
    cores: int = limited(1)
    threads: int = limited(1)
    memory_bytes: int = limited(1)
    cache_bytes: int = limited()
    memory: tuple[Bandwidth, ...] = ()
    rates: Rates = field(default_factory=lambda: Rates({}, {}, {}))
    cached: Rates | None = None
    thread_factors: tuple[ThreadFactor, ...] = ()
    glue: Glue = field(default_factory=lambda: Glue(0.0, 0.0, 0.0, 0.0))
    cached_glue: Glue | None = optional(None)
    reads: Reads = field(default_factory=Reads)
    interference: Interference = field(default_factory=lambda: Interference(1.0, 1.0))
    store: StoreCosts = field(default_factory=lambda: StoreCosts(0.0, 0.0))
    accelerator: Accelerator | None = None
    _memo: dict[tuple[str, str, str, float, bool], Line] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # --- what is computed ---

    def layer_us(
        self,
        kernel: str,
        *,
        batch: float,
        hot_bytes: float,
        cold_bytes: float,
        macs: float,
        calls: float = 1,
        gate_bytes: float = 0,
        model_bytes: float | None = None,
    ) -> float:
        """Microseconds of ``calls`` sparse FFN calls for ``batch`` tokens each, over so many bytes in all.

        Args:
            kernel: one of ``KERNELS``; of other formats, those of GGUF files and neurons of two, see :func:`timed_as`.
            hot_bytes: of neurons that are neighbours. cold_bytes: of predicted ones, once
                each however many tokens want it (exact gate: the rows after the gate of those that fire).
            macs: H for each row and token that wants it: gate and up of every token for which a neuron is hot or
                predicted (exact gate: up where the gate fires), down where it fires.
            gate_bytes: under the exact gate, gate rows of all cold neurons.
            model_bytes: what is read between two uses of a weight; the rates of the caches hold where they keep that.
        """
        line = self._line("kernels", kernel, "sparse", batch, model_bytes)
        return line.us(hot=hot_bytes, cold=cold_bytes, gate=gate_bytes, macs=macs, calls=calls)

    def dense_us(
        self,
        kernel: str,
        *,
        tokens: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        """Microseconds of ``calls`` FFN calls that compute every neuron for ``tokens`` tokens, as in :meth:`layer_us`.

        On the path that so many tokens take: the operator, its tiles (int8 activations), matrix products (floats).
        """
        return self._line("kernels", kernel, "dense", tokens, model_bytes).us(hot=nbytes, macs=macs, calls=calls)

    def linear_us(
        self,
        kernel: str,
        *,
        tokens: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        """Microseconds of ``calls`` linear layers with ``nbytes`` of weights in all (floats: ``F.linear``)."""
        return self._line("kernels", kernel, "linear", tokens, model_bytes).us(hot=nbytes, macs=macs, calls=calls)

    def predict_us(
        self,
        predictor: str,
        *,
        batch: float,
        nbytes: float,
        macs: float,
        calls: float = 1,
        model_bytes: float | None = None,
    ) -> float:
        """Microseconds of ``calls`` predictors with ``nbytes`` of weights in all; ``predictor``: of ``PREDICTORS``.

        macs: batch * rank * (H + cold neurons); of ``signbit`` batch * H * cold neurons, bits and not numbers.
        """
        return self._line("predictors", predictor, "", batch, model_bytes).us(hot=nbytes, macs=macs, calls=calls)

    def attention_us(
        self,
        *,
        batch: float,
        kv_bytes: float,
        calls: float = 1,
        dtype: str = "bfloat16",
        model_bytes: float | None = None,
    ) -> float:
        """Microseconds of ``calls`` attentions of a new token of each of ``batch`` sequences, 4 query heads a key head.

        kv_bytes: keys and values of all sequences, in all calls, of the positions that are used.
        """
        return self._line("attention", dtype, "", batch, model_bytes).us(hot=kv_bytes, calls=calls)

    def glue_us(self, *, batch: float, hidden: int, compiled: bool, model_bytes: float | None = None) -> float:
        """Microseconds of a decoder layer beside the above: see :class:`Glue`."""
        glue = self.cached_glue if self.cached_glue is not None and self._in_cache(model_bytes) else self.glue
        each, number = (
            (glue.compiled_us, glue.compiled_ns_per_number) if compiled else (glue.eager_us, glue.eager_ns_per_number)
        )
        return each + batch * hidden * number * 1e-3

    # --- what is read from storage: see :class:`~torch_pi2.machine.reads.Reads` ---

    def read_us(self, reads: float, block_bytes: float, *, range_bytes: float, depth: float) -> float:
        return self.reads.us(reads, block_bytes, range_bytes, depth)

    def stream_us(self, nbytes: float) -> float:
        return self.reads.stream_us(nbytes)

    def best_depth(self, block_bytes: float, range_bytes: float) -> int:
        return self.reads.best_depth(block_bytes, range_bytes)

    @property
    def compute_while_reading(self) -> float:
        """How many times as long computing takes while the drive is read as fast as it can."""
        return self.interference.compute_while_reading

    @property
    def read_while_computing(self) -> float:
        """How many times as long reads take while all threads compute."""
        return self.interference.read_while_computing

    @property
    def error(self) -> float:
        """Mean of the lines' errors with weights in memory, sparse and dense: how well, and how steadily, they fit."""
        kernels = self.rates.kernels.values()
        errors = [line.error for kernel in kernels for line in (*kernel.sparse, *kernel.dense)]
        return math.fsum(errors) / len(errors)

    # --- files ---

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
        """Inverse of :meth:`to_json`.

        Raises:
            ArtifactError: not such a file, or a number in it makes no sense; names ``where`` and the field.
        """
        data = parse_json(text, where, FORMAT, VERSION)
        made = from_json(Hardware, {k: v for k, v in data.items() if k not in ("format", "version")}, where, FIX)
        _check(made, where)
        return made

    def save(self, path: str | Path) -> None:
        """Write ``path``, whole or not at all. Raises ArtifactError: it cannot be written."""
        atomic_write(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Hardware:
        """Read :meth:`save`'s file. Raises ArtifactError: there is none, or as :meth:`from_json`."""
        return Hardware.from_json(read_text(path), str(path))

    # --- inside ---

    def _line(self, part: str, name: str, path: str, tokens: float, model_bytes: float | None) -> Line:
        in_cache = self.cached is not None and self._in_cache(model_bytes)
        key = (part, name, path, tokens, in_cache)
        if key not in self._memo:
            self._memo[key] = _at(self._lines(part, name, path, in_cache), tokens)
        return self._memo[key]

    def _in_cache(self, model_bytes: float | None) -> bool:
        return model_bytes is not None and model_bytes <= self.cache_bytes

    def _lines(self, part: str, name: str, path: str, in_cache: bool) -> tuple[Line, ...]:
        name = timed_as(name) if part == "kernels" else name
        for rates in (self.cached if in_cache else None, self.rates):
            found = getattr(rates, part).get(name) if rates is not None else None
            if found is not None:
                lines: tuple[Line, ...] = getattr(found, path) if path else found
                return lines
        known = ", ".join(getattr(self.rates, part)) or "none"
        raise ConfigError(
            f"{part} of hardware {self.name}",
            expected=known,
            found=repr(name),
            fix="Choose one of these, or measure again with this version: torch-pi2 doctor --measure.",
        )


def timed_as(kernel: str) -> str:
    """The kernel of :data:`KERNELS` whose time for a byte and a multiply-add is taken for that of ``kernel``.

    Blocks of GGUF files are read at int4's speed for each byte (docs/RESULTS.md); those of more than five bits are
    taken as int8. Of neurons of two formats gate and up decide.
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
    """What types and limits of single fields do not say."""
    if hardware.source not in SOURCES:
        wrong(f"{where}, source", " or ".join(SOURCES), hardware.source)
    for name, rates in (("rates", hardware.rates), ("cached", hardware.cached)):
        if rates is not None:
            _check_rates(rates, f"{where}, {name}", complete=name == "rates")
    for i, (a, b) in enumerate(pairwise(hardware.thread_factors)):
        if a.threads >= b.threads:
            wrong(f"{where}, thread_factors, {i + 1}", f"more threads than {a.threads}", b.threads)
    points = [(b.row_bytes, b.threads) for b in hardware.memory]
    if not points or len(set(points)) < len(points) or not all((0, n) in points for _, n in points):
        wrong(
            f"{where}, memory", "for each number of threads one figure of row_bytes 0, and of others one each", points
        )
    check_reads(hardware.reads, f"{where}, reads")


def _check_rates(rates: Rates, where: str, *, complete: bool) -> None:
    named: dict[str, tuple[Line, ...]] = {}
    for part, allowed in (("kernels", KERNELS), ("predictors", PREDICTORS), ("attention", ATTENTION)):
        found: Mapping[str, Any] = getattr(rates, part)
        if unknown := [name for name in found if name not in allowed]:
            wrong(f"{where}, {part}", f"names of {', '.join(allowed)}", unknown[0])
        if complete and not found:
            wrong(f"{where}, {part}", "one or more", None)
        for name, item in found.items():
            if isinstance(item, Kernel):
                named |= {f"{part}, {name}, {path}": getattr(item, path) for path in ("sparse", "dense", "linear")}
            else:
                named[f"{part}, {name}"] = item
    for name, lines in named.items():
        tokens = [line.tokens for line in lines]
        if not tokens or any(a >= b for a, b in pairwise(tokens)):
            wrong(f"{where}, {name}", "one line or more, each for more tokens than the one before", tokens)
