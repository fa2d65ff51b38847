"""Measure the :class:`~torch_pi2.machine.hardware.Hardware` profile of this machine, in about a minute.

The machine should be idle otherwise. ``error`` of each line and ``warm`` of reads show how steady it was.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from torch_pi2 import ops
from torch_pi2.base.files import scratch
from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.checkpoint.pack import pack
from torch_pi2.checkpoint.save_load import load
from torch_pi2.checkpoint.synthetic import synthetic
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import DeviceError, LibraryMissingError
from torch_pi2.layers.gpu import TransferBuffer, check_gpu
from torch_pi2.machine import process
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Accelerator, Hardware, StoreCosts
from torch_pi2.machine.reads import six_digits
from torch_pi2.measure.compute import FULL, Grid, Weights, kernels, median_us
from torch_pi2.measure.reads import drive, reads
from torch_pi2.observe import timings
from torch_pi2.observe.steps import timed_steps
from torch_pi2.rewrite.state import store_and_budget, store_of
from torch_pi2.store.synthetic import TokenStream
from torch_pi2.types.offload import OffloadConfig

#: Columns and rows of a weight (64 MiB of bfloat16), and tokens of a prompt.
_HIDDEN, _ROWS, _TOKENS = 4096, 8192, 2048
#: Weights: this many times the L2 cache, within these bounds and half of the free memory.
_TIMES, _PARTS = 8, (4, 64)
#: Launches per layer (docs/GPU.md), and launches timed together.
_LAUNCHES, _TOGETHER = 4, 64
#: Warm-up calls, and calls whose median counts.
_WARM, _CALLS = 3, 21


@dataclass
class Gpu:
    """torch's current GPU: free memory, L2 cache, clocks and the transfer buffer."""

    device: torch.device

    def __post_init__(self) -> None:
        about = torch.cuda.get_device_properties(self.device)
        self.name, self.cache_bytes = about.name, about.L2_cache_size
        self.free_bytes = torch.cuda.mem_get_info(self.device)[0]
        self.link = TransferBuffer(self.device)

    def device_us(self, work: Callable[[], object]) -> float:
        """Microseconds of ``work`` by CUDA events."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def wall_us(self, work: Callable[[], object]) -> float:
        """Microseconds of ``work`` by the wall clock, until the GPU is idle."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e6


def gpu_here() -> Gpu | None:
    """torch's current GPU if our kernels support it."""
    try:
        check_gpu(torch.device("cuda"))
    except DeviceError:
        return None
    return Gpu(torch.device("cuda", torch.cuda.current_device()))


@torch.inference_mode()
def accelerator(gpu: Gpu, cpu_gb_per_s: float) -> Accelerator:
    """Median rates of ``gpu``: reading bfloat16 weights for one token, matrix products, the launches of a layer, and
    the round trip of a layer's input to the CPU, whose own memory bandwidth is ``cpu_gb_per_s``.
    """
    nbytes, (least, most) = 2 * _ROWS * _HIDDEN, _PARTS
    wanted = min(most, max(least, -(-_TIMES * gpu.cache_bytes // nbytes)))
    parts = [_drawn(gpu, _ROWS) for _ in range(max(1, min(wanted, gpu.free_bytes // 2 // nbytes)))]
    one_1H, many_TH = _drawn(gpu, 1), _drawn(gpu, _TOKENS)
    read_us = _median(gpu.device_us, lambda: [F.linear(one_1H, part) for part in parts])
    multiply_us = _median(gpu.device_us, lambda: F.linear(many_TH, parts[0]))
    launch_us = _median(gpu.wall_us, lambda: [one_1H.add(1.0) for _ in range(_TOGETHER)])
    gb_per_s = six_digits(sum(part.nbytes for part in parts) / read_us / 1e3)
    launch_us, both = six_digits(launch_us / _TOGETHER * _LAUNCHES), six_digits(gb_per_s + cpu_gb_per_s)
    gmacs = six_digits(_TOKENS * _ROWS * _HIDDEN / multiply_us / 1e3)
    merge_us = six_digits(_median(gpu.wall_us, lambda: gpu.link.enter(gpu.link.leave(one_1H)())))
    return Accelerator(gpu.name, gpu.free_bytes, launch_us, gb_per_s, both, gmacs, merge_us, holds_rest=True)


def _drawn(gpu: Gpu, rows: int) -> torch.Tensor:
    """Random numbers: a GPU multiplies zeros faster."""
    return torch.randn(rows, _HIDDEN, dtype=torch.bfloat16, device=gpu.device)


def _median(clock: Callable[[Callable[[], object]], float], work: Callable[[], object]) -> float:
    return statistics.median([clock(work) for _ in range(_WARM + _CALLS)][_WARM:])


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
    progress_bar = bar(None, "file", progress, total=1.0, bar_format=layout)
    with progress_bar as shown, drive(folder, grid.file_bytes, 0.05 * seconds) as file:
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
    figures |= {"cores": process.cores(), "threads": torch.get_num_threads(), "memory_bytes": process.memory_bytes()}
    machine, versions = {name: str(value) for name, value in about["machine"].items()}, about["versions"]
    return Hardware(about["machine"]["cpu"], "measured", machine, versions, notes, **figures)


def _bandwidth(weights: Weights, seconds: float) -> float:
    """GB/s of sequential reads by all threads."""
    rows = weights.raw[: weights.raw.nbytes // 4096 * 4096].view(-1, 4096)
    us = median_us(lambda: lambda: torch.ops.pi2.plain_read(rows, None), least=2, seconds=seconds)
    return six_digits(rows.nbytes / us / 1e3)
