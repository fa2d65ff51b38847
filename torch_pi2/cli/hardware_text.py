"""A hardware profile as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from torch_pi2.base.units import size
from torch_pi2.cli import common
from torch_pi2.formats import row_bytes
from torch_pi2.machine.hardware import Accelerator, Glue, Hardware, Line

#: What a line is shown for: an int4 layer of a 7B model.
_HIDDEN, _INTERMEDIATE = 4096, 14336
#: Errors of lines on a machine with nothing else to do are half of this.
_STEADY = 0.12
_SMALL = (4096, 8192, 65536)
_DEPTHS = (1, 4, 16, 64)


def describe(hardware: Hardware) -> str:
    """Tables of what matters most in ``hardware``, whatever it is from."""
    parts = [
        f"{hardware.name}, {hardware.source}: {hardware.threads} threads of {hardware.cores} cores",
        _memory(hardware),
        _kernels(hardware),
        _lines("predictors, tokens", "us a call and GB/s", list(hardware.rates.predictors.items())),
        _lines("attention, sequences", "us a call and GB/s", list(hardware.rates.attention.items())),
        _glue("a decoder layer", hardware.glue),
        *([] if hardware.cached_glue is None else [_glue("a layer of a model in the caches", hardware.cached_glue)]),
        "fewer threads take "
        + ", ".join(f"{f.factor:.2f} times as long on {f.threads}" for f in hardware.thread_factors),
        _reads(hardware),
        f"together: computing takes {hardware.compute_while_reading:.2f} times as long while neurons are read, and "
        f"reading {hardware.read_while_computing:.2f} times while layers are computed",
        f"a store: {hardware.store.lookup_us:.2f} us to look a neuron up, at least {hardware.store.slot_us:.2f} us for "
        "each that is read",
    ]
    if hardware.accelerator is not None:
        parts.append(_accelerator(hardware.accelerator))
    if hardware.error > _STEADY:
        parts.append(
            f"NOT STEADY: calls differ by {hardware.error:.0%} from their lines; measure again when nothing else runs"
        )
    if hardware.source == "published":
        parts.append("\n".join(f"{name}: {note}" for name, note in hardware.notes.items()))
    return "\n\n".join(parts)


def _accelerator(theirs: Accelerator) -> str:
    rates = f"{theirs.gmacs_per_s:.0f} billion multiplications a second, {theirs.launch_us:g} us a"
    if theirs.holds_rest:
        return (
            f"{theirs.name}, {size(theirs.memory_bytes)} free: {theirs.stream_gb_per_s:g} GB/s, {rates} layer; to the "
            f"CPU and back {theirs.merge_us:g} us"
        )
    return (
        f"{theirs.name}: {theirs.stream_gb_per_s:g} GB/s alone, {theirs.shared_gb_per_s:g} with the CPU, {rates} call"
    )


def _glue(what: str, glue: Glue) -> str:
    eager = f"{glue.eager_us:.0f} us + {glue.eager_ns_per_number:.2f} ns a number"
    compiled = f"{glue.compiled_us:.0f} us + {glue.compiled_ns_per_number:.2f} ns"
    return f"{what} beside that: eager {eager}, compiled {compiled}"


def _memory(hardware: Hardware) -> str:
    rows = [
        ("in order" if b.row_bytes == 0 else f"rows of {b.row_bytes}", b.threads, f"{b.gb_per_s:.1f}")
        for b in hardware.memory
    ]
    return common.table(("memory", "threads", "GB/s"), rows)


def _kernels(hardware: Hardware) -> str:
    """Of each format and number of tokens: a call, GB/s of neurons in order and gathered, and what is multiplied."""
    rows = []
    for name, kernel in hardware.rates.kernels.items():
        for line in kernel.sparse:
            rows.append(
                (
                    name,
                    line.tokens,
                    f"{line.call_us:.0f}",
                    _gb(line.us_per_hot_mb),
                    _gb(line.us_per_cold_mb),
                    _gb(line.us_per_gate_mb),
                    _gmacs(line.us_per_million_macs),
                    f"{line.error:.0%}",
                    f"{_dense_ms(hardware, name, line.tokens):.2f}",
                )
            )
    head = (
        "format",
        "tokens",
        "us a call",
        "hot GB/s",
        "cold GB/s",
        "gate GB/s",
        "GMAC/s",
        "error",
        "dense 7B layer ms",
    )
    note = "parts are added; '-': too little to be measured beside the others"
    return f"{common.table(head, rows)}\n{note}\n\n{_prompt(hardware)}"


def _prompt(hardware: Hardware) -> str:
    rows = []
    for name, kernel in hardware.rates.kernels.items():
        for path in ("dense", "linear"):
            lines: Sequence[Line] = getattr(kernel, path)
            figures = []
            for line in lines:
                macs = 3.0 * line.tokens * _HIDDEN * _INTERMEDIATE
                us = line.us(hot=_layer_bytes(name), macs=macs)
                figures.append(f"{line.tokens}: {macs / us / 1e3:.0f}")
            rows.append((name, path, ", ".join(figures)))
    return common.table(("format", "path", "GMAC/s by tokens, of weights of a 7B layer"), rows)


def _dense_ms(hardware: Hardware, kernel: str, tokens: int) -> float:
    macs = 3.0 * tokens * _HIDDEN * _INTERMEDIATE
    return hardware.dense_us(kernel, tokens=tokens, nbytes=_layer_bytes(kernel), macs=macs) / 1e3


def _layer_bytes(kernel: str) -> float:
    return 3.0 * _INTERMEDIATE * row_bytes(kernel.partition("/")[0], _HIDDEN)


def _lines(what: str, figures: str, named: Sequence[tuple[str, Sequence[Line]]]) -> str:
    rows = [
        (name, ", ".join(f"{line.tokens}: {line.call_us:.0f} + {_gb(line.us_per_hot_mb)}" for line in lines))
        for name, lines in named
    ]
    return common.table((what, figures), rows)


def _reads(hardware: Hardware) -> str:
    reads = hardware.reads
    rows = []
    for block in _SMALL:
        per_s = [
            block / hardware.read_us(1000, block, range_bytes=reads.file_bytes, depth=depth) * 1e3 for depth in _DEPTHS
        ]
        best = hardware.best_depth(block, reads.file_bytes)
        rows.append((f"{block >> 10} KiB", *(f"{value:.0f}" for value in per_s), best))
    head = ("random reads, MB/s", *(f"depth {depth}" for depth in _DEPTHS), "enough")
    how = f"{reads.engine}, {'direct' if reads.direct else 'through the page cache'}"
    warm = "" if reads.warm else "; NOT WARMED UP: passes over the file differed, figures may be too low"
    return (
        f"{common.table(head, rows)}\n{how}, over {reads.file_bytes >> 20} MiB; in order "
        f"{reads.stream_gb_per_s:.2f} GB/s; {reads.cpu_us_per_read:.1f} us of CPU a read{warm}"
    )


def _gb(us_per_mb: float) -> str:
    return f"{1e3 / us_per_mb:.1f}" if us_per_mb else "-"


def _gmacs(us_per_million: float) -> str:
    return f"{1e3 / us_per_million:.0f}" if us_per_million else "-"
