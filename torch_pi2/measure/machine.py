"""Plain reads of memory, threads, and what a decoder layer takes outside our operators."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.files import scratch
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.machine.hardware import Bandwidth, Glue, ThreadFactor
from torch_pi2.measure.compute import Grid, sparse_cases
from torch_pi2.measure.fit import median_us, six_digits
from torch_pi2.measure.weights import Weights
from torch_pi2.observe.attention import calls_of_step, timed_apart
from torch_pi2.observe.steps import timed_steps

#: Rows that are gathered: a row of int4 for H = 2048 and 4096, a neuron's rows of it, and of bfloat16.
_ROWS = (1152, 2304, 6912, 24576)
_SHARE = 0.1
#: Of the decoders whose glue is measured: sizes (H, I) whose weights stay in the caches, and ones whose weights do not.
_LAYERS, _SMALL, _LARGE = (2, 6), ((256, 256), (2048, 256)), ((2048, 8192), (4096, 14336))
_STEPS, _PROMPT = 64, 8

SetThreads = Callable[[int], None]


def _on(threads: Sequence[int], set_threads: SetThreads) -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        for count in threads:
            set_threads(count)
            yield count
    finally:
        set_threads(before)


def bandwidths(weights: Weights, set_threads: SetThreads | None, seconds: float) -> tuple[Bandwidth, ...]:
    """Everything in order, and a tenth of its rows gathered in rising order; with one thread and with all."""
    threads = torch.get_num_threads()
    counts = sorted({1, threads}) if set_threads else [threads]
    found: list[Bandwidth] = []
    for count in _on(counts, set_threads) if set_threads else counts:
        for row in (0, *_ROWS):
            found.append(Bandwidth(row, count, six_digits(_gb_per_s(weights, row, seconds / len(counts) / 5))))
    return tuple(found)


def _gb_per_s(weights: Weights, row: int, seconds: float) -> float:
    width = row or 4096
    rows = weights.raw[: weights.raw.nbytes // width * width].view(-1, width)
    count = max(1, int(len(rows) * _SHARE)) if row else len(rows)

    def ready() -> Callable[[], object]:
        ids = torch.randperm(len(rows))[:count].sort().values if row else None
        return lambda: torch.ops.pi2.plain_read(rows, ids)

    return count * width / median_us(ready, least=2, seconds=seconds) / 1e3


def thread_factors(
    weights: Weights, grid: Grid, set_threads: SetThreads | None, seconds: float
) -> tuple[ThreadFactor, ...]:
    """How much longer a dense and a sparse int4 call take on fewer threads, on average."""
    threads = torch.get_num_threads()
    if set_threads is None:
        return (ThreadFactor(threads, 1.0),)
    cases = [c for c in sparse_cases(weights, "int4/int8", *grid.layers[0], batch=1) if c.size.gate == 0]
    dense, sparse = cases[0], max(cases, key=lambda c: c.size.cold)
    counts = sorted({1, max(1, threads // 2), max(1, threads - 1), threads})
    us = {
        count: [median_us(case.ready, seconds=seconds / len(counts) / 2) for case in (dense, sparse)]
        for count in _on(counts, set_threads)
    }
    ratio = {n: max(1.0, statistics.mean(a / b for a, b in zip(us[n], us[threads], strict=True))) for n in counts}
    # More threads are never taken to be slower: that is noise.
    return tuple(ThreadFactor(n, six_digits(max(ratio[m] for m in counts if m >= n))) for n in counts)


def glue(folder: Path, *, real: bool, tick: Callable[[float], None]) -> tuple[Glue, Glue | None]:
    """What steps of decoders take outside our operators and SDPA, by layer: of large models, and of small ones.

    Of small ones it is the difference of two depths; what is not of a layer is taken to be the same of large ones.

    folder: each model is there (at most 0.7 GB) while it is measured.
    real: eagerly and compiled by :class:`~torch_pi2.decode.decoder.Decoder` (some 20 seconds); else all layers are
    taken to be as small ones are eagerly, and there is one figure.
    """
    few, many = _LAYERS
    ways = (False, True) if real else (False,)
    models = [(few, _SMALL[0]), *((many, size) for size in ((*_SMALL, *_LARGE) if real else _SMALL[:1]))]
    us = {}
    for layers, size in models:
        with scratch(folder, "pi2-measured-model") as made:
            _synthetic(made / "m", layers, size)
            for compiled in ways:
                us[layers, size, compiled] = _outside_us(made / "m", compiled)
                tick(1 / len(models) / len(ways))

    def layer(size: tuple[int, int], compiled: bool) -> float:
        """Of the smallest, the difference; of others, all but what is not of its layers."""
        smallest = max(0.0, us[many, _SMALL[0], compiled] - us[few, _SMALL[0], compiled]) / (many - few)
        rest = us[few, _SMALL[0], compiled] - few * smallest
        return max(0.0, us[many, size, compiled] - rest) / many

    def line(sizes: tuple[tuple[int, int], ...], compiled: bool) -> tuple[float, float]:
        (narrow, _), (wide, _) = sizes
        small, large = (layer(size, compiled) for size in sizes)
        number = max(0.0, large - small) / (wide - narrow)
        return six_digits(max(0.0, small - number * narrow)), six_digits(number * 1e3)

    if not real:
        each = six_digits(layer(_SMALL[0], False))
        return Glue(each, 0.0, each, 0.0), None
    large, small = (Glue(*line(sizes, False), *line(sizes, True)) for sizes in (_LARGE, _SMALL))
    return large, small


def _synthetic(folder: Path, layers: int, size: tuple[int, int]) -> None:
    hidden, intermediate = size
    shape = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
    }
    synthetic(folder, shape, weights="int4", active=0.1, distinct_layers=1)


def _outside_us(folder: Path, compiled: bool) -> float:
    """Microseconds of a step of one token: of the faster quarter, as what disturbs only makes it longer."""
    model: Any = load(folder, activations="int8")
    decoder = Decoder(model, max_tokens=_PROMPT + _STEPS + 8, compiled=compiled)
    next_B1 = decoder.prompt(torch.arange(_PROMPT)[None])
    steps = [timed_steps(decoder, next_B1) for _ in range(_STEPS)]
    found = [step.seconds * 1e6 - sum(row[4] for row in step.timings) / 1e3 for step in steps]
    sdpa = timed_apart(calls_of_step(model, decoder, next_B1), lambda: None) * 1e3
    return statistics.quantiles(found[2:], n=4)[0] - sdpa


def cache_bytes() -> int:
    """What caches hold from one token to the next: the second level, and half of the third, which others use too."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, cpus = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
        except OSError:
            continue
        amount = re.fullmatch(r"(\d+)K", size)
        if amount and level in ("2", "3"):
            sizes[int(level), cpus] = int(amount.group(1)) << 10
    return sum(size // 2 if level == 3 else size for (level, _), size in sizes.items())
