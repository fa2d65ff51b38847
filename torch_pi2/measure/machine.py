"""Memory bandwidth, caches, and what a decoder layer takes outside our operators."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.files import scratch
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.machine.hardware import Bandwidth, Glue
from torch_pi2.measure.fit import median_us, six_digits
from torch_pi2.measure.weights import Weights
from torch_pi2.observe.attention import calls_of_step, timed_apart
from torch_pi2.observe.steps import timed_steps

#: Decoders whose glue is measured: numbers of layers, and sizes (H, I) with weights that the caches hold or not.
_LAYERS, _SMALL, _LARGE = (2, 6), ((256, 256), (2048, 256)), ((2048, 8192), (4096, 14336))
_STEPS, _PROMPT = 64, 8


def bandwidth(weights: Weights, seconds: float) -> Bandwidth:
    """Memory bandwidth of all threads, reading everything in order."""
    rows = weights.raw[: weights.raw.nbytes // 4096 * 4096].view(-1, 4096)
    us = median_us(lambda: lambda: torch.ops.pi2.plain_read(rows, None), least=2, seconds=seconds)
    return Bandwidth(0, torch.get_num_threads(), six_digits(rows.nbytes / us / 1e3))


def glue(folder: Path, *, real: bool) -> tuple[Glue, Glue | None]:
    """What a decoder layer takes outside our operators and SDPA, in large models and in small ones.

    For small ones it is the difference of two depths. What is not part of a layer is taken to be the same in large
    ones.

    Args:
        folder: where each model is written (at most 0.7 GB) while it is measured.
        real: eagerly and compiled by :class:`~torch_pi2.decode.decoder.Decoder` (some 20 seconds). Otherwise there is
            one figure, of small layers that run eagerly.
    """
    few, many = _LAYERS
    modes = (False, True) if real else (False,)
    models = [(few, _SMALL[0]), *((many, size) for size in ((*_SMALL, *_LARGE) if real else _SMALL[:1]))]
    us = {}
    for layers, size in models:
        with scratch(folder, "pi2-measured-model") as made:
            _synthetic(made / "m", layers, size)
            for compiled in modes:
                us[layers, size, compiled] = _outside_us(made / "m", compiled)

    def layer(size: tuple[int, int], compiled: bool) -> float:
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
    """Microseconds of a step of one token outside our operators: the faster quarter, as noise only adds."""
    model: Any = load(folder, activations="int8")
    decoder = Decoder(model, max_tokens=_PROMPT + _STEPS + 8, compiled=compiled)
    next_B1 = decoder.prompt(torch.arange(_PROMPT)[None])
    steps = [timed_steps(decoder, next_B1) for _ in range(_STEPS)]
    found = [step.seconds * 1e6 - sum(row[4] for row in step.timings) / 1e3 for step in steps]
    sdpa = timed_apart(calls_of_step(model, decoder, next_B1), lambda: None) * 1e3
    return statistics.quantiles(found[2:], n=4)[0] - sdpa


def cache_bytes() -> int:
    """What the caches keep from one token to the next: the second level, and half of the (shared) third."""
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
