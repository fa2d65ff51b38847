"""What whole decoders take beside their operators: a layer's glue, and a neuron store beside its drive."""

from __future__ import annotations

import math
import shutil
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.files import scratch
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.machine.hardware import Glue, StoreCosts
from torch_pi2.machine.reads import six_digits
from torch_pi2.observe import timings
from torch_pi2.observe.steps import attention_ms, timed_steps
from torch_pi2.rewrite.state import store_and_budget, store_of
from torch_pi2.store.synthetic import TokenStream
from torch_pi2.types.offload import OffloadConfig

#: Numbers of layers whose difference is measured, and steps.
_LAYERS, _STEPS, _PROMPT = (2, 6), 64, 8
#: Tokens of a step in which reads are long, so that the drive is not what bounds them.
_MANY = 16
_STORE_STEPS, _WARM_UP = 12, 4
#: Of the neurons, what the cache holds when most have to be read.
_CACHED = 1 / 8


def _synthetic(folder: Path, layers: int, size: tuple[int, int], **how: Any) -> None:
    hidden, intermediate = size
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "vocab_size": 1024}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    synthetic(folder, shape, weights="int4", active=0.1, **how)


def glue(folder: Path, sizes: tuple[tuple[int, int], tuple[int, int]]) -> Glue:
    """What a decoder layer takes outside our operators and SDPA, eagerly and compiled: the difference of two depths.

    Args:
        folder: where each model is written (at most 0.7 GB) while it is measured.
        sizes: two (H, I), through which a line is drawn.
    """
    (few, many), us = _LAYERS, dict[tuple[int, int, bool], float]()
    for layers, size in product(_LAYERS, sizes):
        with scratch(folder, "pi2-measured-model") as made:
            _synthetic(made / "m", layers, size, distinct_layers=1)
            for compiled in (False, True):
                us[layers, size[0], compiled] = _outside_us(made / "m", compiled)

    def line(compiled: bool) -> tuple[float, float]:
        narrow, wide = (hidden for hidden, _ in sizes)
        small, large = (max(0.0, us[many, h, compiled] - us[few, h, compiled]) / (many - few) for h in (narrow, wide))
        number = max(0.0, large - small) / (wide - narrow)
        return six_digits(max(0.0, small - number * narrow)), six_digits(number * 1e3)

    return Glue(*line(False), *line(True))


def _outside_us(folder: Path, compiled: bool) -> float:
    """Microseconds of a step of one token outside our operators: the faster quarter, as noise only adds."""
    model: Any = load(folder, activations="int8")
    decoder = Decoder(model, max_tokens=_PROMPT + _STEPS + 8, compiled=compiled)
    next_B1 = decoder.prompt(torch.arange(_PROMPT)[None])
    steps = [timed_steps(decoder, next_B1) for _ in range(_STEPS)]
    found = [step.seconds * 1e6 - sum(row[4] for row in step.timings) / 1e3 for step in steps]
    return statistics.quantiles(found[2:], n=4)[0] - attention_ms(model, decoder, next_B1) * 1e3


def store_costs(folder: Path, size: tuple[int, int]) -> StoreCosts:
    """From a synthetic model of four layers of ``size`` in ``folder``, on the drive that was measured.

    ``lookup_us``: how much longer a step's FFNs take over a store whose cache holds everything than in memory, for each
    neuron that is wanted. ``slot_us``: how much longer where the cache holds little, for each slot that is read, in
    steps of many tokens.
    """
    with scratch(folder, "pi2-measured-store") as made:
        dense, store = made / "m", made / "s"
        _synthetic(dense, 4, size, rank=64)
        pack(dense, store)
        alone_us, _, _ = _step(load(dense, activations="int8"), 1)
        shutil.rmtree(dense)
        whole = load(store, activations="int8", budget=1 << 40)
        found_us, wanted, _ = _step(whole, 1)
        many_us, _, _ = _step(whole, _MANY)
        del whole
        how = OffloadConfig(preload=False, hot_share=0.0)
        some = load(store, activations="int8", budget=1 << 40, offload=how)
        opened, budget = store_and_budget(some)
        opened.resize(math.floor(_CACHED * budget.neurons / budget.slot) * budget.slot)
        read_us, _, missed = _step(some, _MANY)
    return StoreCosts(
        lookup_us=six_digits(max(0.0, found_us - alone_us) / max(1.0, wanted)),
        slot_us=six_digits(max(0.0, read_us - many_us) / max(1.0, missed)),
    )


def _step(model: Any, batch: int) -> tuple[float, float, float]:
    """Of a decoding step's FFNs: microseconds (the median), neurons wanted and neurons missed (0 in memory)."""
    steps, vocabulary = _STORE_STEPS + _WARM_UP, model.get_input_embeddings().num_embeddings
    streams = [TokenStream(vocabulary, topics=True, generator=torch.Generator().manual_seed(i)) for i in range(batch)]
    ids_BT = torch.stack([stream.draw(steps + 1) for stream in streams])
    decoder = Decoder(model, max_tokens=steps + 2, batch=batch, compiled=False)
    decoder.prompt(ids_BT[:, :1])
    store = store_of(model)
    timed_steps(decoder, ids_BT[:, 1 : 1 + _WARM_UP])
    found = [timed_steps(decoder, ids_B1, store) for ids_B1 in ids_BT[:, 1 + _WARM_UP :].split(1, dim=1)]
    wanted = sum(step.stats["wanted"] for step in found if step.stats)
    took = statistics.median(step.ms(timings.FFN) for step in found) * 1e3
    return took, wanted / _STORE_STEPS, sum(step.misses for step in found) / _STORE_STEPS
