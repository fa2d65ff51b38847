"""What a decoding step takes: milliseconds and bytes by part, from a model's shape and a machine's rates.

PowerInfer-2 (arXiv 2406.06282, section 5) names what its planner weighs, not how; this is the form that papers.md 11.1
works out of it, with terms for what our engine does besides. Each term has its unit and its source where it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_pi2.errors import ConfigError
from torch_pi2.ops.constants import constants
from torch_pi2.planner.layer_cost import TIMES, block_ms, layer_curve, linear_ms, without_rest
from torch_pi2.planner.misses import FrequencyMisses, MissCurve, resident_slots
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.types.offload import OffloadConfig

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Parts of a step, which add up to it. ``attention``: linear layers. ``sdpa``: attention itself. ``glue``: norms,
#: rotary embedding, residuals, Python. ``io``: what computing does not hide of reads, and what they slow it down by.
PARTS = ("attention", "sdpa", "predictor", "hot", "cold", "io", "merge", "head", "glue")


@dataclass(frozen=True)
class Cost:
    """A step, predicted.

    Attributes:
        batch: tokens of it.
        ms: milliseconds by ``PARTS``. layers: the same by layer, with ``key``, ``hot_neurons``,
            ``accelerator_neurons``, ``resident_neurons``, ``misses`` (slots), ``reads`` and ``read_ms`` (of the drive,
            hidden or not).
        misses: neurons that are read from storage.
        memory: bytes by part: ``fixed``, ``predictors``, ``kv``, ``resident`` and ``cold`` (of the cache; in memory:
            all neurons are resident), ``staging``, ``tables``, and ``accelerator``, which is memory of its own.
    """

    batch: int
    ms: dict[str, float]
    misses: float
    layers: list[dict[str, Any]]
    memory: dict[str, int]

    @property
    def total_ms(self) -> float:
        return math.fsum(self.ms.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences."""
        return self.batch * 1e3 / self.total_ms

    @property
    def memory_bytes(self) -> int:
        """All but the accelerator's."""
        return sum(size for part, size in self.memory.items() if part != "accelerator")


def step_cost(
    shape: ModelShape,
    hardware: Hardware,
    *,
    batch: int,
    hot: Sequence[int],
    accelerator: Sequence[int] | None = None,
    resident: Sequence[int] | None = None,
    cache_bytes: int | None = None,
    misses: MissCurve | None = None,
    context: int,
    offload: Mapping[str, Any] | None = None,
    sequences: int | None = None,
) -> Cost:
    """One decoding step of ``batch`` sequences, each of ``context`` tokens.

    With ``sequences=1``, the ``batch`` tokens are of one, and verified together (:meth:`torch_pi2.Decoder.verify`).

    For each layer, in milliseconds:

    * ``attention``: ``hardware.linear_us`` of its linear layers. ``sdpa``: ``hardware.attention_us`` of the keys and
      values of all sequences. ``glue``: ``hardware.glue_us``.
    * ``predictor``, ``hot``, ``cold``, ``merge``: see :func:`~torch_pi2.planner.layer_cost.layer_curve`.
    * ``io``, over a store: see :func:`_io_ms`.

    and once ``head``, the linear layer that makes logits.

    Args:
        hot: by layer, neurons that are computed without a predictor. accelerator: of them, those that it computes;
            None: it has nothing of the model.
        resident: by layer, neurons (after the accelerator's) that never leave the cache.
        cache_bytes: of a store's neuron cache; None: all neurons are in memory.
        misses: what such a cache does not have (default: :class:`~torch_pi2.planner.misses.FrequencyMisses`).
        offload: settings of :class:`torch_pi2.OffloadConfig` that differ from its defaults.
        sequences: whose keys and values there are (default: ``batch``).

    Raises:
        ConfigError: counts that layers cannot have, resident neurons for which there is no room, or a kernel that the
            hardware profile does not know.
    """
    if accelerator is None:
        hardware = without_rest(hardware)
    none, sequences = [0] * len(shape.layers), batch if sequences is None else sequences
    config, firsts, kept = OffloadConfig(**(offload or {})), accelerator or none, resident or none
    for name, counts in (("hot", hot), ("accelerator", firsts), ("resident", kept)):
        if len(counts) != len(shape.layers):
            raise ConfigError(
                f"step_cost(..., {name})",
                expected=f"a count for each of {len(shape.layers)} layers",
                found=str(len(counts)),
                fix="Pass one number a layer.",
            )
    read_L = np.zeros(len(shape.layers))
    slots = shape.slots
    if cache_bytes is not None:
        slots = min(slots, cache_bytes // shape.place_bytes)
        read_L = (misses or FrequencyMisses(shape)).misses(batch, slots, kept, hot, firsts)
        streams_L = [streamed(layer, hardware, batch, h, first) for layer, h, first in zip(shape.layers, hot, firsts)]
        share = slots / shape.slots if all(streams_L) else 0.0  # nothing that is streamed takes another's place
    else:
        streams_L, share = [False] * len(shape.layers), 0.0

    @cache
    def of_layer(layer: LayerShape, h: int, first: int, stays: int, missed: float, streams: bool) -> dict[str, Any]:
        """Of layers that are the same object the same is worked out once."""
        if streams:
            missed = layer.slots - max(stays // layer.cluster, share * layer.slots)
        curve = layer_curve(layer, hardware, batch, h, accelerator=first, model_bytes=shape.weight_bytes)
        ms = dict.fromkeys(PARTS, 0.0) | {part: float(curve[part][0]) for part in TIMES}
        kv_bytes = sequences * context * layer.kv_bytes
        ms |= block_ms(
            shape,
            layer,
            hardware,
            tokens=batch,
            sequences=sequences,
            kv_bytes=kv_bytes,
            compiled=shape.compiled,
        )
        row: dict[str, Any] = {"key": layer.key, "hot_neurons": h, "accelerator_neurons": first}
        row |= {"resident_neurons": stays, "misses": missed}
        if cache_bytes is None:
            return row | {"reads": 0.0, "read_ms": 0.0} | ms
        if config.lookahead:
            ms["predictor"] *= 2  # asked early, and again
        cold = float(curve["cold_wanted"][0])
        reads, read_ms = _reads(shape, layer, hardware, missed, cold, stays, config)
        ahead = ms["attention"] + ms["sdpa"] + ms["glue"]
        before = ahead if first or config.lookahead or streams else 0.0
        ms["io"] = _io_ms(hardware, read_ms, ms["hot"] + ms["cold"], before, config, streams)
        ms["io"] += (cold + h - first) * hardware.store.lookup_us / 1e3
        return row | {"reads": reads, "read_ms": sum(read_ms)} | ms

    rows = [of_layer(*about) for about in zip(shape.layers, hot, firsts, kept, read_L.tolist(), streams_L, strict=True)]
    total = {part: sum(row[part] for row in rows) for part in PARTS}
    read = sum(row["misses"] * layer.cluster for row, layer in zip(rows, shape.layers, strict=True))
    total["head"] = linear_ms(hardware, shape.head_kernel, batch, shape.head_bytes, model_bytes=shape.weight_bytes)
    memory = _memory(shape, sequences, context, cache_bytes, kept, firsts, config)
    if hardware.accelerator is not None and hardware.accelerator.holds_rest and cache_bytes is None:
        memory["resident"] += memory["accelerator"]  # what a GPU has the CPU keeps, too
    return Cost(batch, total, read, rows, memory)


def _reads(
    shape: ModelShape,
    layer: LayerShape,
    hardware: Hardware,
    missed: float,
    cold_wanted: float,
    resident: int,
    config: OffloadConfig,
) -> tuple[float, tuple[float, float]]:
    """Reads of a layer in a step; milliseconds of the drive for cold neurons, and for hot ones.

    Cold neurons are missed before hot ones, which every step wants. Slots of a store that are not far from each other
    come with one read (csrc/engine/read_batch.h: up to ``run_bytes``, with at most ``gap_bytes`` between two). With
    missed slots spread evenly, d of those behind the resident ones (what else is in the cache lies between them), the
    next one is within reach with the share ``1 - (1 - d) ** (1 + gap_bytes / slot)``. What hot neurons miss lies
    together: one stream. The store itself needs ``hardware.store.slot_us`` for each slot, which counts where the drive
    is faster.
    """
    if missed <= 0:
        return 0.0, (0.0, 0.0)
    slot, read = layer.file_slot_bytes, layer.slot_bytes
    cold = min(missed, cold_wanted)
    hot_ms = hardware.stream_us((missed - cold) * slot) / 1e3
    runs = (missed - cold) * slot / max(slot, config.run_bytes)
    if cold <= 0:
        return runs, (0.0, hot_ms)
    elsewhere = max(cold, layer.slots - resident / layer.cluster)
    density, reach = cold / elsewhere, 1 + config.gap_bytes // slot
    near = 1 - (1 - density) ** reach
    step = sum(k * density * (1 - density) ** (k - 1) for k in range(1, reach + 1)) / near  # slots to the next one
    nbytes = cold * (read + near * (step - 1) * slot)
    # Where most is missed, more misses are fewer reads, each of more. As many as there are at most are counted then:
    # their bytes are what takes time, and less is missed in no more time.
    peak, longest = min(density, 1 / (reach + 1)), max(config.run_bytes, read)
    reads = max(cold * (1 - density) ** reach, nbytes / longest)
    counted = max(peak * elsewhere * (1 - peak) ** reach, reads)
    whole = sum(y.slots * y.file_slot_bytes for y in shape.layers)
    # Of a layer's chunks only in_flight have reads under way.
    depth = min(config.io_threads, max(1.0, counted * min(1.0, config.in_flight / constants().chunks)))
    drive_us = hardware.read_us(counted, nbytes / counted, range_bytes=whole, depth=depth)
    return reads + runs, (max(drive_us, cold * hardware.store.slot_us) / 1e3, hot_ms)


def streamed(layer: LayerShape, hardware: Hardware, batch: int, hot: int, first: int = 0) -> bool:
    """Whether a step of so many tokens reads the layer as a prompt does: in order, and past the cache."""
    if hot < layer.intermediate or first or layer.experts > 1:
        return False
    tiles = layer.kernel.endswith("/int8") and hardware.machine.get("kernels", "").endswith("vnni")
    return batch >= (constants().gemm_tokens if tiles else constants().stream_from)


def _io_ms(
    hardware: Hardware,
    read_ms: tuple[float, float],
    compute_ms: float,
    before_ms: float,
    config: OffloadConfig,
    streams: bool,
) -> float:
    """Milliseconds by which reads make a layer longer.

    A layer that is streamed is read while the one before, and what is between them, is computed: what takes longer
    counts.

    Reads of cold neurons begin when the predictor has spoken. A layer is computed in chunks in the order in
    which they come, so that all but one of them hide behind the other side, whichever takes longer:
    ``max(R + C / 16, C + R / 16)`` instead of ``C``, with R, the drive's time, ``read_while_computing`` times as long
    as alone. Meanwhile computing is ``compute_while_reading`` times as slow. Without ``pipeline``: one after the other.
    Looking neurons up (``hardware.store.lookup_us`` each) comes on top.
    Hot neurons that are missing are read while what comes before the layer is computed (``before_ms``), if anything
    asks for them then: constraint of papers.md 11.1, ``(1 - hit) h B / BW <= T_attention``, of which what is too long
    counts.
    With ``lookahead`` cold neurons are read from the layer before on, beside all that is computed until they are
    needed (predictors are asked twice). All guesses are taken as right, as they are where layers see nearly the same
    input: real layers gain less.
    """
    cold, hot = read_ms
    if streams:
        return max(0.0, cold + hot - before_ms - compute_ms)
    exposed = max(0.0, hot - before_ms)
    if cold + exposed <= 0:
        return 0.0
    if not config.pipeline:
        return cold + exposed
    chunks, beside = constants().chunks, compute_ms
    reading = (cold + exposed) * hardware.read_while_computing
    late = max(reading + compute_ms / chunks, compute_ms + reading / chunks) - compute_ms
    if config.lookahead:
        reading, beside = (cold + hot) * hardware.read_while_computing, before_ms + compute_ms
        late = max(0.0, reading - beside)
    return late + (hardware.compute_while_reading - 1) * min(beside, reading)


def _memory(
    shape: ModelShape,
    batch: int,
    context: int,
    cache_bytes: int | None,
    resident: Sequence[int],
    accelerator: Sequence[int],
    config: OffloadConfig,
) -> dict[str, int]:
    """See :class:`Cost`."""
    theirs = sum(n * layer.neuron_bytes for n, layer in zip(accelerator, shape.layers, strict=True))
    budget = shape.budget(cache_bytes or 0, batch=batch, context=context, config=config)
    parts = {"fixed": budget.fixed, "predictors": budget.predictors, "kv": budget.kv}
    if cache_bytes is None:
        every = sum(layer.intermediate * layer.neuron_bytes for layer in shape.layers)
        return parts | {"resident": every - theirs, "cold": 0, "staging": 0, "tables": 0, "accelerator": theirs}
    stays = min(budget.cache, resident_slots(shape, resident, accelerator) * budget.slot)
    return parts | {
        "resident": stays,
        "cold": budget.cache - stays,
        "staging": budget.staging,
        "activations": budget.activations,
        "tables": budget.total - budget.smallest - budget.cache + budget.neuron_tables,
        "accelerator": theirs,
    }
