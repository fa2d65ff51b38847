"""The cost model: predicted milliseconds of a decoding step, from a model's shape and a machine's rates.

PowerInfer-2 (arXiv 2406.06282, section 5) lists the planner's inputs but no formula; this one is ours. Each FFN has
terms for the predictor, hot neurons, cold neurons and reads that compute does not hide. Attention's linear layers and
the KV cache are the same in all plans; norms and Python overhead are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from torch_pi2.formats import QUANTIZED
from torch_pi2.machine.hardware import Hardware
from torch_pi2.ops.constants import constants
from torch_pi2.ops.gpu.operators import products_from
from torch_pi2.planner.model_shape import LayerShape, ModelShape, kept, numbers
from torch_pi2.types.method import Method
from torch_pi2.types.offload import OffloadConfig

#: Parts that add up to a step. ``rest``: linear layers outside FFNs, and attention. ``io``: reads that compute does not
#: hide, and their CPU time.
PARTS = ("rest", "predictor", "hot", "cold", "io", "merge")
FFN_PARTS = ("predictor", "hot", "cold", "merge")
#: Bytes of an operand of matrix products on a GPU.
_PRODUCT_BYTES = 2
#: Cost of multiplying two signs, relative to two numbers.
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
    """Milliseconds of a decoding step, by ``PARTS``, for ``batch`` sequences of ``context`` tokens each. By layer,
    ``hot``: neurons that are computed without a predictor; ``accelerator``: how many of them an accelerator computes
    (empty: unused); ``resident``: neurons after these that never leave the cache (empty: none). ``cache_bytes``: size
    of the store's neuron cache; None: all neurons are in memory.
    """
    if not accelerator:
        hardware = without_gpu(hardware)
    none = (0,) * len(shape.layers)
    firsts, stay, missed_L, cached = accelerator or none, resident or none, np.zeros(len(none)), 0.0
    whole_L = [reads_whole(y, hardware, batch, h, first) for y, h, first in zip(shape.layers, hot, firsts)]
    if cache_bytes is not None:
        slots = min(shape.slots, cache_bytes // shape.place_bytes)
        missed_L = expected_misses(shape, batch, slots, stay, hot, firsts)
        cached = slots / shape.slots if all(whole_L) else 0.0  # then layers do not evict each other
    total = dict.fromkeys(PARTS, 0.0)
    total["rest"] = linear_ms(hardware, shape.head_kernel, batch, shape.head_bytes)
    for layer, h, first, stays, missed, whole in zip(shape.layers, hot, firsts, stay, missed_L.tolist(), whole_L):
        # the attention before the layer: its linear layers, and reading the KV cache
        kv_ms = batch * context * layer.kv_bytes / hardware.memory_gb_per_s / 1e6
        rest = linear_ms(hardware, layer.attention_kernel, batch, layer.attention_bytes) + kv_ms
        ms = {"rest": rest} | ffn_ms(layer, hardware, batch, h, first)
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
    """``hardware`` without its GPU, for a model that runs on the CPU alone."""
    theirs = hardware.accelerator
    return replace(hardware, accelerator=None) if theirs is not None and theirs.holds_rest else hardware


def expert_use(layer: LayerShape, batch: float) -> tuple[float, float]:
    """Share of steps that route any of ``batch`` tokens to an expert, and its mean number of tokens in those steps.

    Routing is assumed independent: ``1 - (1 - chosen) ** batch``. For a dense FFN: 1 and ``batch``.
    """
    share = 1 - (1 - layer.chosen) ** batch
    return share, batch * layer.chosen / share


@kept
def predicted_share(layer: LayerShape, tokens: float) -> np.ndarray:
    """Float64 ``[I]``: probability that the predictor selects a neuron for at least one of ``tokens`` tokens.

    For one token it is ``recall f + q (1 - f)``; a common q makes the mean over cold neurons equal to the card's
    ``predicted_active``. A neuron that fires for k of several tokens is never selected with probability
    ``(1 - recall) ** k * (1 - q) ** (tokens - k)``; k is 0, or its mean when it fires. 1 without a predictor.
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
    return 1 - (1 - f_I) * (1 - q) ** tokens - f_I * missed_I


def cold_neurons(layer: LayerShape, batch: float, hot: int) -> float:
    """Cold neurons that a step of ``batch`` tokens reads; with the exact gate all of them, for their gate rows."""
    use, tokens = expert_use(layer, batch)
    return use * float(_sums(layer, tokens)["predicted"][hot])


@kept
def _sums(layer: LayerShape, tokens: float) -> dict[str, np.ndarray]:
    """Sums over the neurons from h on, for each h from 0 to I.

    ``predicted``: neurons selected for any of the tokens. ``computed``: neurons read beyond their gate row. ``pairs``:
    multiplied (token, row) pairs of cold neurons. ``hot_down``: (token, neuron) pairs of hot neurons with down.
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
    shape: ModelShape, batch: int, slots: int, resident: Sequence[int], hot: Sequence[int], accelerator: Sequence[int]
) -> np.ndarray:
    """Float64 ``[layers]``: slots that a step of ``batch`` tokens reads with a cache of ``slots`` slots.

    Neurons are taken as independent, with their measured frequencies (hot: every step; on the accelerator: never), and
    the cache as holding the most frequent ones, the limit of ``lfu``. Real tokens repeat neurons and miss less.
    """
    wanted_L, room = [], min(slots, shape.slots)
    for layer, count, h, first in zip(shape.layers, resident, hot, accelerator, strict=True):
        wanted_S, (begin, end) = _wanted_slots(layer, batch, h, first), resident_slots(layer, count, first)
        wanted_L.append(np.concatenate((wanted_S[:begin], wanted_S[end:])))
        room -= end - begin
    every = np.concatenate(wanted_L)
    if room >= len(every):
        return np.zeros(len(wanted_L))
    # The cache holds slots used more often than `least`, and an equal share of each layer's slots at `least`.
    least = float(np.partition(every, len(every) - room - 1)[len(every) - room - 1])
    above, equal = int((every > least).sum()), int((every == least).sum())
    rest = least * (1 - (room - above) / equal)
    return np.array([float(w[w < least].sum()) + rest * float((w == least).sum()) for w in wanted_L])


def resident_slots(layer: LayerShape, count: int, first: int) -> tuple[int, int]:
    """Half-open range of slots of the ``count`` resident neurons after the accelerator's ``first``."""
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
    return use * share_I


def ffn_ms(layer: LayerShape, hardware: Hardware, batch: float, hot: int, accelerator: int = 0) -> dict[str, float]:
    """Milliseconds of a layer in one step of ``batch`` tokens, by ``FFN_PARTS``.

    With h hot neurons, the first a of them on an accelerator:

    * ``predictor``: rows of the neurons from h on; 0 without a predictor or with h = I.
    * ``hot`` and ``cold``: one CPU call, its time split by bytes. Neurons a to h are read in order. From h on, neurons
      selected for any token are gathered (exact gate: all gate rows, and the rest of neurons that fire). With h = I
      and a = 0 the call is dense.
    * An accelerator runs in parallel: ``max(accelerator, predictor + CPU)``, bounded by the bytes of both at
      ``shared_gb_per_s``. Its excess over the CPU counts as ``hot``; ``merge`` is ``merge_us`` per token.
    * A GPU that holds the rest of the model (``holds_rest``) reads at its own bandwidth; ``merge`` is one ``merge_us``
      if a < I. Large batches convert quantised neurons to 16 bits in each call.

    Times of an expert are scaled by its share of steps (:func:`expert_use`); experts share a call.
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
            sizes = (size - hot, size)
            weights, every = ((layer.rank * (layer.hidden + n) if layer.rank else layer.hidden * n) for n in sizes)
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
        bits += 2 * 8 * _PRODUCT_BYTES  # converted: one more write and read
    batch = max(1, round(tokens))
    return theirs.ffn_us(batch=batch, neurons=neurons, hidden=layer.hidden, rows=layer.rows, weight_bits=bits)


def linear_ms(hardware: Hardware, kernel: str, tokens: float, nbytes: int) -> float:
    """Milliseconds of linear layers of ``nbytes`` bytes in total."""
    if nbytes == 0:
        return 0.0
    return hardware.line("linear", kernel, tokens).us(hot=nbytes, macs=tokens * numbers(kernel, nbytes)) / 1e3


def prompt_ffn_ms(layer: LayerShape, hardware: Hardware, tokens: int, hot: int) -> float:
    """Milliseconds of a layer for a prompt: sparse in passes of 64 tokens, or dense in one if all neurons are hot."""
    whole, rest = divmod(tokens, constants().pass_tokens)
    passes = [constants().pass_tokens] * whole + [rest] if hot < layer.intermediate else [tokens]
    ms = {n: math.fsum(ffn_ms(layer, hardware, n, hot).values()) for n in set(passes) if n}
    return math.fsum(ms.get(n, 0.0) for n in passes)


def switch_point(hardware: Hardware, layer: LayerShape, hot: int) -> int:
    """Number of tokens per call (at most 512) from which computing every neuron is faster; 0: never."""
    at = 0
    for tokens in reversed(_PROMPT_TOKENS):
        every, sparse = (prompt_ffn_ms(layer, hardware, tokens, n) for n in (layer.intermediate, hot))
        if every > sparse:
            break
        at = tokens
    return at


def reads_whole(layer: LayerShape, hardware: Hardware, batch: int, hot: int, first: int = 0) -> bool:
    """Whether a step of ``batch`` tokens streams the layer past the cache, as prompts do."""
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
    """Reads of a layer in a step: their number, and the drive's milliseconds for cold and for hot neurons.

    Misses are cold neurons first; missed hot neurons are adjacent and stream. Nearby slots share a read
    (csrc/engine/read_batch.h: up to ``run_bytes``, gaps up to ``gap_bytes``). With misses spread evenly at density d
    over the slots that are not resident, the next one is near with probability ``1 - (1 - d) ** (1 + gap_bytes /
    slot)``. The store needs at least ``slot_us`` per slot.
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
    # At high density more misses mean fewer, longer reads. Counting the peak keeps the time monotone in misses.
    peak = min(density, 1 / (reach + 1))
    counted = max(peak * others * (1 - peak) ** reach, found)
    # only in_flight of a layer's chunks have reads under way
    depth = min(config.io_threads, max(1.0, counted * min(1.0, config.in_flight / constants().chunks)))
    drive_us = hardware.reads.us(counted, nbytes / counted, shape.store_bytes, depth)
    return found + runs, max(drive_us, cold * hardware.store.slot_us) / 1e3, hot_ms


def _io_ms(hardware: Hardware, found: tuple[float, ...], ms: Mapping[str, float], whole: bool, divided: bool) -> float:
    """Milliseconds that reads, as counted by :func:`reads`, add to a layer.

    A layer that is read whole overlaps with the previous layer and the attention between.

    Otherwise reads start after the predictor and chunks are computed as they arrive, so that reading R and compute C
    overlap but for one chunk: ``max(R + C / chunks, C + R / chunks)`` instead of ``C``. Threads share the CPU time of
    reads. With an accelerator, missed hot neurons are read during the attention before the layer.
    """
    (count, cold, hot), compute = found, ms["hot"] + ms["cold"]
    if whole:
        return max(0.0, cold + hot - ms["rest"] - compute)
    reading = cold + max(0.0, hot - ms["rest"] if divided else hot)
    if reading <= 0:
        return 0.0
    chunks, cpu_ms = constants().chunks, count * hardware.reads.cpu_us_per_read / hardware.threads / 1e3
    return max(reading + compute / chunks, compute + reading / chunks) - compute + cpu_ms
