"""Measure the :class:`~torch_pi2.machine.hardware.Hardware` profile of this machine, in about a minute.

The machine should be idle otherwise. ``error`` of each line and ``warm`` of reads show how steady it was.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_pi2 import ops
from torch_pi2.base.files import scratch
from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import LibraryMissingError
from torch_pi2.machine import process
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Hardware, StoreCosts
from torch_pi2.machine.reads import six_digits
from torch_pi2.measure.compute import FULL, Grid, Weights, kernels, median_us
from torch_pi2.measure.gpu import Gpu, accelerator, gpu_here
from torch_pi2.measure.reads import drive, reads
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


def measure(
    *,
    folder: Path | None = None,
    seconds: float = 60.0,
    grid: Grid = FULL,
    progress: bool = False,
    gpu: Gpu | None = None,
) -> Hardware:
    """Measure this machine on torch's current number of threads.

    Args:
        folder: on the drive to measure (default: that of :func:`~torch_pi2.machine.find.cached_path`). A file of up to
            512 MiB and a model of 0.2 GB are written there and removed.
        seconds: approximate duration. grid: the sizes to measure.
        progress: show a bar on standard error.
        gpu: default: torch's current one, if supported; it takes a few seconds more.

    Raises:
        ArtifactError: the folder cannot be written.
        LibraryMissingError: scipy or transformers is not installed.
    """
    for package, extra in (("scipy", "plan"), ("transformers", "hf")):
        if find_spec(package) is None:
            fix, expected = how_to_install(extra), f"an installed {package}"
            raise LibraryMissingError(package, expected=expected, found="none", fix=fix)
    ops.load()
    about, figures = process.describe(), dict[str, Any]()
    folder = cached_path().parent if folder is None else folder
    layout = "{desc:<18}{percentage:3.0f}%|{bar}| {elapsed}"
    with (
        bar(None, "file", progress, total=1.0, bar_format=layout) as shown,
        drive(folder, grid.file_bytes, 0.05 * seconds) as file,
    ):
        weights = Weights(min(grid.weights_bytes, process.memory_bytes() // 8))
        #: By part: its share of the time, and the function that measures it in given seconds.
        parts: dict[str, tuple[float, Callable[[float], Any]]] = {
            "memory_gb_per_s": (0.1, lambda s: _bandwidth(weights, s)),
            "kernels": (0.6, lambda s: kernels(weights, grid, s)),
            "reads": (0.15, lambda s: reads(file, s)),
            "store": (0.1, lambda _: store_costs(folder, grid.store)),
        }
        for name, (share, work) in parts.items():
            shown.set_description_str(name)
            figures[name] = work(share * seconds)
            shown.update(share)
    gpu = gpu or gpu_here()
    notes = {"kernels": "float linear layers and matrix products by the wall's clock, others by the operators' own"}
    if gpu is not None:
        notes["accelerator"] = "launches: four a layer; shared: the sum, as each has memory of its own"
        figures["accelerator"] = accelerator(gpu, figures["memory_gb_per_s"])
    return Hardware(
        name=about["machine"]["cpu"],
        source="measured",
        machine={name: str(value) for name, value in about["machine"].items()},
        versions=about["versions"],
        notes=notes,
        cores=process.cores(),
        threads=torch.get_num_threads(),
        memory_bytes=process.memory_bytes(),
        **figures,
    )


def _bandwidth(weights: Weights, seconds: float) -> float:
    """GB/s of sequential reads by all threads."""
    rows = weights.raw[: weights.raw.nbytes // 4096 * 4096].view(-1, 4096)
    us = median_us(lambda: lambda: torch.ops.pi2.plain_read(rows, None), least=2, seconds=seconds)
    return six_digits(rows.nbytes / us / 1e3)
