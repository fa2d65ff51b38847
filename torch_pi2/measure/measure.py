"""Measuring this machine: what :class:`~torch_pi2.machine.hardware.Hardware` has to know of it, in about a minute.

Nothing else should run meanwhile. Machines whose cores or drives are shared with others are not always as fast as when
they were measured; ``error`` of each line, and ``warm`` of reads, say how steady it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError, LibraryMissingError
from torch_pi2.machine import process
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Bandwidth, Hardware
from torch_pi2.machine.reads import six_digits
from torch_pi2.measure.compute import FULL, Grid, rates, sparse_cases
from torch_pi2.measure.decoders import glue, store_costs
from torch_pi2.measure.fit import median_us
from torch_pi2.measure.gpu import Gpu, accelerator, gpu_here
from torch_pi2.measure.reads import drive, interference, reads
from torch_pi2.measure.weights import Weights
from torch_pi2.ops import load

_MIB = 1 << 20
#: The buffer of weights: so many times the caches, within these limits, and at most an eighth of the memory.
_TIMES, _LEAST, _MOST = 32, 256 << 20, 1 << 30


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
        folder: on the drive that is to be read (default: the folder of :func:`~torch_pi2.machine.find.cached_path`). A
            file of up to 512 MiB, and models of up to 0.7 GB, one at a time, are written there and removed.
        seconds: about how long. grid: what is measured.
        progress: show a bar on standard error.
        gpu: beside the CPU (default: torch's current one, if it has kernels); it takes seconds more.

    Raises:
        ConfigError: no time. ArtifactError: the folder cannot be written.
        LibraryMissingError: scipy or transformers is not installed.
    """
    if not seconds > 0:
        raise ConfigError("seconds", expected="more than 0", found=str(seconds), fix="A minute gives good figures.")
    for package, extra in (("scipy", "plan"), ("transformers", "hf")):
        if find_spec(package) is None:
            fix, expected = how_to_install(extra), f"an installed {package}"
            raise LibraryMissingError(package, expected=expected, found="none", fix=fix)
    load()
    about, figures = process.describe(), dict[str, Any]()
    folder = cached_path().parent if folder is None else folder
    layout = "{desc:<18}{percentage:3.0f}%|{bar}| {elapsed}"
    with (
        bar(None, "file", progress, total=1.0, bar_format=layout) as shown,
        drive(folder, grid.file_bytes, 0.05 * seconds) as file,
    ):
        weights = Weights(grid.weights_bytes or _weights_bytes())
        #: By part its share of the time, and what measures it in so many seconds.
        parts: dict[str, tuple[float, Callable[[float], Any]]] = {
            "memory": (0.05, lambda s: _bandwidth(weights, s)),
            "rates": (0.47, lambda s: rates(weights, grid, s)),
            "glue": (0.2, lambda _: glue(folder, grid.decoders)),
            "reads": (0.12, lambda s: reads(file, s)),
            "interference": (0.03, lambda s: interference(file, figures["reads"], _busy(weights, grid), s)),
            "store": (0.08, lambda _: store_costs(folder, grid.store)),
        }
        for name, (share, work) in parts.items():
            shown.set_description_str(name)
            figures[name] = work(share * seconds)
            shown.update(share)
    gpu = gpu or gpu_here()
    notes = {"rates": "float linear layers, matrix products and SDPA by the wall's clock, others by the operators' own"}
    if gpu is not None:
        notes["accelerator"] = "launches: four a layer; shared: the sum, as each has memory of its own"
        figures["accelerator"] = accelerator(gpu, figures["memory"].gb_per_s)
    return Hardware(
        name=about["machine"]["cpu"],
        source="measured",
        machine={name: str(value) for name, value in about["machine"].items()},
        versions=about["versions"],
        notes=notes,
        cores=process.cores(),
        threads=torch.get_num_threads(),
        memory_bytes=process.memory_bytes(),
        **figures | {"memory": (figures["memory"],)},
    )


def _bandwidth(weights: Weights, seconds: float) -> Bandwidth:
    """Memory bandwidth of all threads, reading everything in order."""
    rows = weights.raw[: weights.raw.nbytes // 4096 * 4096].view(-1, 4096)
    us = median_us(lambda: lambda: torch.ops.pi2.plain_read(rows, None), least=2, seconds=seconds)
    return Bandwidth(0, torch.get_num_threads(), six_digits(rows.nbytes / us / 1e3))


def _busy(weights: Weights, grid: Grid) -> Callable[[], Callable[[], object]]:
    """Makes calls of a layer, on all threads."""
    return sparse_cases(weights, "int4/int8", *grid.layers[-1], batch=1)[0].ready


def _weights_bytes() -> int:
    """Many times what the caches hold: the second level, and half of the (shared) third."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, cpus = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
        except OSError:
            continue
        amount = re.fullmatch(r"(\d+)K", size)
        if amount and level in ("2", "3"):
            sizes[int(level), cpus] = int(amount.group(1)) << 10
    cached = sum(size // 2 if level == 3 else size for (level, _), size in sizes.items())
    wanted = min(_MOST, max(_LEAST, _TIMES * cached))
    return min(wanted, process.memory_bytes() // 8) // _MIB * _MIB
