"""How a drive is read: what one more read takes, and the settings of a store that follow from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pi2.planner.model_shape import ModelShape
from torch_pi2.types.offload import OffloadConfig

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Reads of a figure, enough for any depth.
_READS = 4096
_SECTOR = 4096
_MOST_RUN, _MOST_GAP = 1 << 20, 1 << 18
#: Of the best bytes a second, what is enough for the longest read.
_ENOUGH = 0.9


def read_ms(shape: ModelShape, hardware: Hardware) -> float:
    """Milliseconds that one more slot takes while others are read, with computing beside it."""
    return _per_read_us(shape, hardware, shape.place_bytes) * hardware.read_while_computing / 1e3


def stream_ms(shape: ModelShape, hardware: Hardware) -> float:
    """The same of a slot that is one of many in a row."""
    run = _MOST_RUN // shape.place_bytes * shape.place_bytes
    return hardware.stream_us(run) * shape.place_bytes / run * hardware.read_while_computing / 1e3


def offload_settings(shape: ModelShape, hardware: Hardware, policy: str = "") -> dict[str, Any]:
    """Settings of :class:`torch_pi2.OffloadConfig` for a store of ``shape`` on the drive of ``hardware``.

    * ``io_threads``: reads under way together, ``hardware.best_depth`` of a slot over the whole store.
    * ``in_flight``: chunks of a layer with reads under way; no more than reads.
    * ``run_bytes``: the shortest power of two from 64 KiB on with 90 % of the bytes a second of 1 MiB.
    * ``gap_bytes``: what the drive transfers in the time that one more read costs: a shorter gap between two neurons is
      read with them.

    Args:
        policy: of the cache ("": the default).
    """
    default, slot, whole = OffloadConfig(), shape.place_bytes, _range(shape)
    depth = hardware.best_depth(slot, whole)
    us = {size: _per_read_us(shape, hardware, size) for size in (slot, *(1 << n for n in range(16, 21)))}
    per_byte = (us[_MOST_RUN] - us[slot]) / max(1, _MOST_RUN - slot)
    fixed_us = max(0.0, us[slot] - per_byte * slot)
    gap = int(fixed_us / per_byte) if per_byte > 0 else _MOST_GAP
    speed = {size: size / us[size] for size in us if size >= 1 << 16}
    run = next(size for size in sorted(speed) if speed[size] >= _ENOUGH * max(speed.values()))
    return {
        "policy": policy or default.policy,
        "io_threads": depth,
        "in_flight": max(2, min(default.in_flight, depth)),
        "run_bytes": max(run, slot),
        "gap_bytes": min(_MOST_GAP, gap // _SECTOR * _SECTOR),
        "lookahead": default.lookahead,
    }


def _range(shape: ModelShape) -> int:
    """Bytes over which reads are spread."""
    return sum(layer.slots * layer.file_slot_bytes for layer in shape.layers)


def _per_read_us(shape: ModelShape, hardware: Hardware, size: int) -> float:
    whole = _range(shape)
    depth = hardware.best_depth(shape.place_bytes, whole)
    return hardware.read_us(_READS, size, range_bytes=whole, depth=depth) / _READS
