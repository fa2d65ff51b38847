"""CPU cost of a neuron store, without its drive."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.files import scratch
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.machine.hardware import StoreCosts
from torch_pi2.machine.reads import six_digits
from torch_pi2.observe import timings
from torch_pi2.observe.steps import timed_steps
from torch_pi2.rewrite.state import store_and_budget, store_of
from torch_pi2.store.synthetic import TokenStream
from torch_pi2.types.offload import OffloadConfig

#: Tokens of a step whose reads are long, so that the drive is not the bottleneck.
_MANY = 16
_STORE_STEPS, _WARM_UP = 12, 4
#: Share of the neurons in the small cache.
_CACHED = 1 / 8


def store_costs(folder: Path, size: tuple[int, int]) -> StoreCosts:
    """Measured with a synthetic model of four layers of ``size`` in ``folder``.

    ``lookup_us``: additional time of a step's FFNs over a store with everything cached, per needed neuron.
    ``slot_us``: additional time with a small cache, per slot read, in steps of many tokens.
    """
    with scratch(folder, "pi2-measured-store") as made:
        dense, store = made / "m", made / "s"
        shape = {"hidden_size": size[0], "intermediate_size": size[1], "num_hidden_layers": 4, "vocab_size": 1024}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        synthetic(dense, shape, weights="int4", active=0.1, rank=64)
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
    """FFNs of a decoding step: median microseconds, mean needed neurons and mean misses (0 in memory)."""
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
