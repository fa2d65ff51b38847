"""The cost model: milliseconds of a decoding step, from a model's shape and a machine's rates.

PowerInfer-2 (arXiv 2406.06282, section 5) names what its planner weighs, not how. This is the form that we worked out,
with terms for what our engine does besides: for each FFN the predictor, hot neurons, cold neurons, and the reads that
computing does not hide. The rest of a model, the same for all plans, is its linear layers, keys and values; norms and
Python are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torch_pi2.formats import QUANTIZED
from torch_pi2.ops.constants import constants
from torch_pi2.ops.gpu.operators import products_from
from torch_pi2.planner.model_shape import LayerShape, ModelShape, kept, numbers
from torch_pi2.types.method import Method
from torch_pi2.types.offload import OffloadConfig

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware

#: Parts of a step, which add up to it. ``rest``: linear layers outside FFNs, and attention. ``io``: reads that are not
#: hidden by computing, and the CPU time that they take from it.
PARTS = ("rest", "predictor", "hot", "cold", "io", "merge")
#: The parts that :func:`ffn_ms` predicts.
FFN_PARTS = ("predictor", "hot", "cold", "merge")
#: Bytes of a number in matrix products on a GPU.
_PRODUCT_BYTES = 2
#: What multiplying two signs takes, against two numbers.
_SIGN = 0.25
#: Prompt lengths at which a layer may switch to computing every neuron.
_PROMPT_TOKENS = (*range(2, 17), *range(20, 33, 4), *range(40, 65, 8), 80, 96, 112, 128, 160, 192, 256, 320, 384, 512)
_DEFAULT = OffloadConfig()


def step_ms(
    shape: ModelShape,
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    hot: Sequence[int],
    accelerator: Sequence[int] = (),
    resident: Sequence[int] = (),
    cache_bytes: int | None = None,
    offload: OffloadConfig = _DEFAULT,
) -> dict[str, float]:
    """Milliseconds, by ``PARTS``, of a decoding step of ``batch`` sequences that have ``context`` tokens each.

    Args:
        hot: by layer, neurons that are computed without a predictor. accelerator: how many of them an accelerator
            computes; empty: it has no part of the model.
        resident: by layer, neurons (after the accelerator's) that never leave the cache; empty: none.
        cache_bytes: size of a store's neuron cache; None: all neurons are in memory.
    """
    if not accelerator:
        hardware = without_gpu(hardware)
    none = (0,) * len(shape.layers)
    firsts, stay, missed_L, cached = accelerator or none, resident or none, np.zeros(len(none)), 0.0
    whole_L = [reads_whole(y, hardware, batch, h, first) for y, h, first in zip(shape.layers, hot, firsts)]
    if cache_bytes is not None:
        slots = min(shape.slots, cache_bytes // shape.place_bytes)
        missed_L = expected_misses(shape, batch, slots, stay, hot, firsts)
        cached = slots / shape.slots if all(whole_L) else 0.0  # then no layer takes another's place in the cache
    total = dict.fromkeys(PARTS, 0.0)
    total["rest"] = linear_ms(hardware, shape.head_kernel, batch, shape.head_bytes)
    for layer, h, first, stays, missed, whole in zip(shape.layers, hot, firsts, stay, missed_L.tolist(), whole_L):
        ms = {"rest": rest_ms(layer, hardware, batch, context)} | ffn_ms(layer, hardware, batch, h, first)
        if cache_bytes is not None:
            if whole:
                missed = layer.slots - max(stays // layer.cluster, cached * layer.slots)
            wanted = cold_neurons(layer, batch, h)
            found = reads(shape, layer, hardware, missed, wanted, stays, offload)
            ms["io"] = _io_ms(hardware, found, ms, whole, bool(first))
            ms["io"] += (wanted + h - first) * hardware.store.lookup_us / 1e3
        for part, took in ms.items():
            total[part] += took
    return total


def without_gpu(hardware: Hardware) -> Hardware:
    """``hardware`` for a model that leaves a GPU, which would have all but cold neurons, unused."""
    theirs = hardware.accelerator
    return replace(hardware, accelerator=None) if theirs is not None and theirs.holds_rest else hardware


# --- which neurons a step wants ---


def expert_use(layer: LayerShape, batch: float) -> tuple[float, float]:
    """Share of steps in which an expert has any of ``batch`` tokens, and how many it has then (1 and all: no expert).

    Tokens are taken to be routed independently: ``1 - (1 - chosen) ** batch``.
    """
    share = 1 - (1 - layer.chosen) ** batch
    return share, batch * layer.chosen / share


@kept
def predicted_share(layer: LayerShape, tokens: float) -> np.ndarray:
    """Float64 ``[I]``: how often the predictor lets a neuron through for at least one of ``tokens`` tokens.

    For one token ``recall f + q (1 - f)``, with one q for all neurons such that the mean over those from ``base_hot``
    on is ``predicted_active`` of its card. For several, with k tokens for which the neuron fires, the share that is let
    through for none is ``(1 - recall) ** k * (1 - q) ** (tokens - k)``; k is 0 or, where it fires for any, its mean
    then. 1 without a predictor.
    """
    if layer.predictor is None:
        return np.ones(layer.intermediate)
    one_I, f_I, recall = layer.frequency(1), layer.frequency(tokens), layer.recall
    cold_I = one_I[layer.base_hot :]
    quiet = float((1 - cold_I).sum())
    wrong = (layer.predicted_active * len(cold_I) - recall * float(cold_I.sum())) / quiet if quiet > 0 else 0.0
    q = min(1.0, max(0.0, wrong))
    fires_I = np.clip(tokens * one_I / np.maximum(f_I, 1e-300), 1, tokens)
    with np.errstate(divide="ignore"):
        missed_I = np.power(1 - recall, fires_I) * np.power(1 - q, tokens - fires_I)
    share: np.ndarray = 1 - (1 - f_I) * (1 - q) ** tokens - f_I * missed_I
    return share


def cold_neurons(layer: LayerShape, batch: float, hot: int) -> float:
    """Neurons beyond the hot ones that a step of ``batch`` tokens reads (under the exact gate: all, for their gate)."""
    use, tokens = expert_use(layer, batch)
    return use * float(_sums(layer, tokens)["predicted"][hot])


@kept
def _sums(layer: LayerShape, tokens: float) -> dict[str, np.ndarray]:
    """Sums over the neurons from h on, for each h from 0 to I.

    ``predicted``: neurons that the predictor lets through for any of the tokens. ``computed``: neurons of which more
    than the gate is read. ``pairs``: (token, row) pairs that are multiplied where neurons are cold. ``hot_down``:
    (token, neuron) pairs whose down row is used where neurons are hot.
    """
    every_I, one_I, first_rows = np.ones(layer.intermediate), layer.frequency(1), layer.rows - 1
    if layer.predictor is not None:
        computed_I, one_predicted_I = predicted_share(layer, tokens), predicted_share(layer, 1)
        # the down rows of neurons that fire; all of them where nothing is exactly zero
        down_I = layer.recall * one_I if layer.exact_zeros else one_predicted_I
        pairs_I = first_rows * one_predicted_I + down_I
    else:
        # without exact zeros every gate counts, but for those below a threshold
        skips = layer.exact_zeros or layer.method == Method.THRESHOLD
        computed_I = layer.frequency(tokens) if skips else every_I
        pairs_I = 1 + first_rows * (one_I if skips else every_I)
    columns = {
        "predicted": predicted_share(layer, tokens),
        "computed": computed_I,
        "pairs": tokens * pairs_I,
        "hot_down": tokens * (one_I if layer.exact_zeros else every_I),
    }
    return {name: np.append(np.cumsum(column_I[::-1])[::-1], 0.0) for name, column_I in columns.items()}


def expected_misses(
    shape: ModelShape,
    batch: int,
    slots: int,
    resident: Sequence[int],
    hot: Sequence[int],
    accelerator: Sequence[int],
) -> np.ndarray:
    """Float64 ``[layers]``: slots that a step of ``batch`` tokens reads with a cache of ``slots`` slots.

    Every neuron is wanted independently, as often as its statistics say (hot ones in every step, the accelerator's in
    none), and the cache has the most wanted ones, which is what ``lfu`` comes to. Real tokens repeat what the last
    ones wanted, and miss less.
    """
    wanted_L, room = [], min(slots, shape.slots)
    for layer, count, h, first in zip(shape.layers, resident, hot, accelerator, strict=True):
        wanted_S, (begin, end) = _wanted_slots(layer, batch, h, first), resident_slots(layer, count, first)
        wanted_L.append(np.concatenate((wanted_S[:begin], wanted_S[end:])))
        room -= end - begin
    every = np.concatenate(wanted_L)
    if room >= len(every):
        return np.zeros(len(wanted_L))
    # The cache has what is wanted more often than `least`, and the same share of each layer's slots that are wanted so.
    least = float(np.partition(every, len(every) - room - 1)[len(every) - room - 1])
    above, equal = int((every > least).sum()), int((every == least).sum())
    rest = least * (1 - (room - above) / equal)
    return np.array([float(w[w < least].sum()) + rest * float((w == least).sum()) for w in wanted_L])


def resident_slots(layer: LayerShape, count: int, first: int) -> tuple[int, int]:
    """The slots, from and to, of the ``count`` resident neurons after the accelerator's ``first``."""
    begin = first // layer.cluster
    return begin, max(begin, min(layer.slots, -(-(first + count) // layer.cluster))) if count else begin


def _wanted_slots(layer: LayerShape, batch: int, hot: int, first: int) -> np.ndarray:
    """Float64 ``[slots]``: share of steps in which any neuron of the slot is read."""
    use, tokens = expert_use(layer, batch)
    share_I = predicted_share(layer, tokens).copy()
    share_I[:hot] = 1
    share_I[:first] = 0
    if layer.cluster > 1:
        padded = np.zeros(layer.slots * layer.cluster)
        padded[: len(share_I)] = share_I
        share_I = 1 - np.prod(1 - padded.reshape(layer.slots, layer.cluster), axis=1)
    wanted_S: np.ndarray = use * share_I
    return wanted_S


# --- what computing takes ---


def ffn_ms(layer: LayerShape, hardware: Hardware, batch: float, hot: int, accelerator: int = 0) -> dict[str, float]:
    """Milliseconds of a layer in one step of ``batch`` tokens, by ``FFN_PARTS``.

    With h hot neurons, of which an accelerator has the first a:

    * ``predictor``: the rows of neurons from h on. 0 without one, and with h = I.
    * ``hot`` and ``cold``: one call on the CPU, whose time is divided by bytes. The neurons of a to h are read in one
      run; from h on the ones that the predictor lets through for any token are gathered (without a predictor the gate
      rows of all and the rest of those that fire). With h = I and a = 0 it is a dense call.
    * With an accelerator both sides work at once: ``max(accelerator, predictor + CPU)``, and not before the bytes of
      both have come at ``shared_gb_per_s``. What the CPU's part does not hide is in ``hot``; ``merge`` is
      ``merge_us`` a token.
    * A GPU that holds the rest of the model (``holds_rest``) reads at its own speed, and ``merge`` is one ``merge_us``
      wherever a < I. From so many tokens on it converts quantised neurons to 16 bits in each call.

    All is multiplied by the share of steps in which an expert has tokens (:func:`expert_use`); experts share a call.
    """
    use, tokens = expert_use(layer, batch)
    calls = 1 / (layer.experts * use) if layer.chosen < 1 else 1.0
    sums, size, ours = _sums(layer, tokens), layer.intermediate, hot - accelerator
    computed, cold_pairs, hot_down = (float(sums[name][hot]) for name in ("computed", "pairs", "hot_down"))
    predictor_us, predictor_bytes = 0.0, 0.0
    hot_bytes, cold_bytes, gate_bytes = float(ours * layer.neuron_bytes), 0.0, 0.0
    if layer.predictor is None:
        cold_bytes = computed * (layer.neuron_bytes - layer.first_row_bytes)
        gate_bytes = float((size - hot) * layer.first_row_bytes)
    else:
        cold_bytes = computed * layer.neuron_bytes
        if hot < size:
            weights, every = (
                (layer.rank * (layer.hidden + n) if layer.rank else layer.hidden * n) for n in (size - hot, size)
            )
            predictor_bytes = layer.predictor_bytes * weights / every
            line = hardware.line("linear", layer.predictor, tokens)
            macs = tokens * weights * (1.0 if layer.rank else _SIGN)
            predictor_us = line.us(hot=predictor_bytes, macs=macs, calls=calls)
    pairs = tokens * ours * (layer.rows - 1) + float(sums["hot_down"][accelerator]) - hot_down + cold_pairs
    cpu_bytes, cpu_us = hot_bytes + cold_bytes + gate_bytes, 0.0
    if ours == size:
        line = hardware.line("dense", layer.kernel, tokens)
        cpu_us = line.us(hot=hot_bytes, macs=pairs * layer.hidden, calls=calls)
    elif accelerator < size:
        line = hardware.line("sparse", layer.kernel, tokens)
        cpu_us = line.us(hot=hot_bytes, cold=cold_bytes, gate=gate_bytes, macs=pairs * layer.hidden, calls=calls)
    hot_us = cpu_us * hot_bytes / max(cpu_bytes, 1.0)
    cold_us, merge_us, theirs = cpu_us - hot_us, 0.0, hardware.accelerator
    if theirs is not None and (accelerator or theirs.holds_rest):
        theirs_us = _accelerator_us(layer, hardware, tokens, accelerator)
        if theirs.holds_rest:
            merge_us = theirs.merge_us if accelerator < size else 0.0
        else:
            both = cpu_bytes + predictor_bytes + accelerator * layer.neuron_bytes
            theirs_us, merge_us = max(theirs_us, both / theirs.shared_gb_per_s / 1e3), theirs.merge_us * tokens
        hot_us += max(0.0, theirs_us - predictor_us - cpu_us) if accelerator else 0.0
    us = dict(zip(FFN_PARTS, (predictor_us, hot_us, cold_us, merge_us), strict=True))
    return {part: use * value / 1e3 for part, value in us.items()}


def _accelerator_us(layer: LayerShape, hardware: Hardware, tokens: float, neurons: int) -> float:
    theirs, bits = hardware.accelerator, 8 * layer.neuron_bytes / (layer.rows * layer.hidden)
    assert theirs is not None
    quantised = theirs.holds_rest and layer.weights in QUANTIZED
    if quantised and tokens >= products_from(layer.weights, layer.hidden, _PRODUCT_BYTES):
        bits += 2 * 8 * _PRODUCT_BYTES  # converted: written and read once more
    batch = max(1, round(tokens))
    return theirs.ffn_us(batch=batch, neurons=neurons, hidden=layer.hidden, rows=layer.rows, weight_bits=bits)


def linear_ms(hardware: Hardware, kernel: str, tokens: float, nbytes: int) -> float:
    """Milliseconds of linear layers of ``nbytes`` bytes in total."""
    if nbytes == 0:
        return 0.0
    return hardware.line("linear", kernel, tokens).us(hot=nbytes, macs=tokens * numbers(kernel, nbytes)) / 1e3


def rest_ms(layer: LayerShape, hardware: Hardware, batch: int, context: int) -> float:
    """Milliseconds of the block before a layer: its linear layers, and reading keys and values from memory."""
    kv_ms = batch * context * layer.kv_bytes / hardware.memory_gb_per_s / 1e6
    return linear_ms(hardware, layer.attention_kernel, batch, layer.attention_bytes) + kv_ms


def prompt_ffn_ms(layer: LayerShape, hardware: Hardware, tokens: int, hot: int) -> float:
    """Milliseconds of a layer for a prompt, computed sparsely in passes of 64 tokens (dense if all are hot: one)."""
    whole, rest = divmod(tokens, constants().pass_tokens)
    passes = [constants().pass_tokens] * whole + [rest] if hot < layer.intermediate else [tokens]
    ms = {n: math.fsum(ffn_ms(layer, hardware, n, hot).values()) for n in set(passes) if n}
    return math.fsum(ms.get(n, 0.0) for n in passes)


def switch_point(hardware: Hardware, layer: LayerShape, hot: int) -> int:
    """From how many tokens in one call (at most 512) it is faster to compute every neuron of a layer; 0: never."""
    at = 0
    for tokens in reversed(_PROMPT_TOKENS):
        every, sparse = (prompt_ffn_ms(layer, hardware, tokens, n) for n in (layer.intermediate, hot))
        if every > sparse:
            break
        at = tokens
    return at


# --- what reading takes ---


def reads_whole(layer: LayerShape, hardware: Hardware, batch: int, hot: int, first: int = 0) -> bool:
    """Whether a step of so many tokens reads the layer as a prompt does: in order, and past the cache."""
    if hot < layer.intermediate or first or layer.experts > 1:
        return False
    tiles = layer.kernel.endswith("/int8") and hardware.machine.get("kernels", "").endswith("vnni")
    return batch >= (constants().gemm_tokens if tiles else constants().stream_from)


def reads(
    shape: ModelShape,
    layer: LayerShape,
    hardware: Hardware,
    missed: float,
    cold_wanted: float,
    resident: int,
    config: OffloadConfig,
) -> tuple[float, float, float]:
    """Number of reads of a layer in a step; milliseconds of the drive for cold neurons, and for hot ones.

    Cold neurons are missed before hot ones, which every step wants; the hot ones that are missed lie together and come
    in one stream. Slots that are near each other come with one read (csrc/engine/read_batch.h: up to ``run_bytes``,
    with at most ``gap_bytes`` between two): if missed slots are spread evenly, d of those that are not resident, the
    next one is near with the share ``1 - (1 - d) ** (1 + gap_bytes / slot)``. The store itself needs ``slot_us`` for
    each slot, which counts where the drive is faster.
    """
    if missed <= 0:
        return 0.0, 0.0, 0.0
    slot, cold = layer.file_slot_bytes, min(missed, cold_wanted)
    hot_ms, runs = hardware.reads.stream_us((missed - cold) * slot) / 1e3, (missed - cold) * slot / config.run_bytes
    if cold <= 0:
        return runs, 0.0, hot_ms
    others = max(cold, layer.slots - resident / layer.cluster)
    density, reach = cold / others, 1 + config.gap_bytes // slot
    near = 1 - (1 - density) ** reach
    step = sum(k * density * (1 - density) ** (k - 1) for k in range(1, reach + 1)) / near  # slots to the next one
    nbytes = cold * (layer.slot_bytes + near * (step - 1) * slot)
    found = max(cold * (1 - density) ** reach, nbytes / max(config.run_bytes, layer.slot_bytes))
    # Where most is missed, more misses are fewer and longer reads. The most reads there can be are counted then, so
    # that fewer misses never take longer.
    peak = min(density, 1 / (reach + 1))
    counted = max(peak * others * (1 - peak) ** reach, found)
    # only in_flight of a layer's chunks have reads under way
    depth = min(config.io_threads, max(1.0, counted * min(1.0, config.in_flight / constants().chunks)))
    drive_us = hardware.reads.us(counted, nbytes / counted, shape.store_bytes, depth)
    return found + runs, max(drive_us, cold * hardware.store.slot_us) / 1e3, hot_ms


def _io_ms(
    hardware: Hardware, found: tuple[float, float, float], ms: Mapping[str, float], whole: bool, on_accelerator: bool
) -> float:
    """Milliseconds by which reads, as :func:`reads` counts them, make a layer longer.

    A layer that is read whole is read while the one before, and what is between them, is computed.

    Otherwise reads of cold neurons begin when the predictor has spoken. A layer is computed in chunks in the order in
    which they arrive, so that all but one of them hide behind the other side, whichever takes longer:
    ``max(R + C / chunks, C + R / chunks)`` instead of ``C``. Each read also takes CPU time, which threads share. With
    neurons on an accelerator the hot neurons that are missing are read while what comes before the layer is computed.
    """
    (count, cold, hot), compute = found, ms["hot"] + ms["cold"]
    if whole:
        return max(0.0, cold + hot - ms["rest"] - compute)
    reading = cold + max(0.0, hot - ms["rest"] if on_accelerator else hot)
    if reading <= 0:
        return 0.0
    chunks, cpu_ms = constants().chunks, count * hardware.reads.cpu_us_per_read / hardware.threads / 1e3
    return max(reading + compute / chunks, compute + reading / chunks) - compute + cpu_ms
