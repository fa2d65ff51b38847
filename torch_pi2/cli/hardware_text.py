"""A hardware profile as text: what matters most to a plan."""

from __future__ import annotations

from torch_pi2.base.units import size
from torch_pi2.cli import common
from torch_pi2.machine.hardware import Accelerator, Hardware

#: Lines of a machine with nothing else to do have less than half of this error.
_STEADY = 0.12
_BLOCKS, _DEPTHS = (4096, 8192, 65536), (1, 4, 16, 64)


def describe(hardware: Hardware) -> str:
    """Tables of ``hardware``, whatever its source."""
    glue, together, store = hardware.glue, hardware.interference, hardware.store
    memory = ", ".join(f"{b.gb_per_s:.1f} GB/s on {b.threads} threads" for b in hardware.memory if not b.row_bytes)
    parts = [
        f"{hardware.name}, {hardware.source}: {hardware.threads} threads of {hardware.cores} cores; memory {memory}",
        _kernels(hardware),
        _reads(hardware),
        f"a decoder layer beside that: eager {glue.eager_us:.0f} us, compiled {glue.compiled_us:.0f} us\n"
        f"together: computing takes {together.compute_while_reading:.2f} times as long while neurons are read, and "
        f"reading {together.read_while_computing:.2f} times while layers are computed\n"
        f"a store: {store.lookup_us:.2f} us to look up a neuron, at least {store.slot_us:.2f} us for each that is read",
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
        memory = f"{theirs.name}, {size(theirs.memory_bytes)} free: {theirs.stream_gb_per_s:g} GB/s"
        return f"{memory}, {rates} layer; to the CPU and back {theirs.merge_us:g} us"
    memory = f"{theirs.name}: {theirs.stream_gb_per_s:g} GB/s alone, {theirs.shared_gb_per_s:g} with the CPU"
    return f"{memory}, {rates} call"


def _kernels(hardware: Hardware) -> str:
    """For each format and number of tokens: a call, and the rates of reading and multiplying."""
    columns = ("us_per_hot_mb", "us_per_cold_mb", "us_per_gate_mb", "us_per_million_macs")
    rows = []
    for name, kernel in hardware.rates.kernels.items():
        for line in kernel.sparse:
            rates = [getattr(line, column) for column in columns]
            cells = [f"{1e3 / us:.1f}" if us else "-" for us in rates]
            rows.append((name, line.tokens, f"{line.call_us:.0f}", *cells, f"{line.error:.0%}"))
    head = ("format", "tokens", "us a call", "hot GB/s", "cold GB/s", "gate GB/s", "GMAC/s", "error")
    return f"{common.table(head, rows)}\nparts are added; '-': too little to be measured beside the others"


def _reads(hardware: Hardware) -> str:
    reads, rows = hardware.reads, []
    for block in _BLOCKS:
        mb_per_s = [block / reads.us(1000, block, reads.file_bytes, depth) * 1e3 for depth in _DEPTHS]
        best = reads.best_depth(block, reads.file_bytes)
        rows.append((f"{block >> 10} KiB", *(f"{value:.0f}" for value in mb_per_s), best))
    head = ("random reads, MB/s", *(f"depth {depth}" for depth in _DEPTHS), "enough")
    how = f"{reads.engine}, {'direct' if reads.direct else 'through the page cache'}"
    warm = "" if reads.warm else "; NOT WARMED UP: passes over the file differed, figures may be too low"
    return (
        f"{common.table(head, rows)}\n{how}, over {reads.file_bytes >> 20} MiB; in order "
        f"{reads.stream_gb_per_s:.2f} GB/s; {reads.cpu_us_per_read:.1f} us of CPU a read{warm}"
    )
