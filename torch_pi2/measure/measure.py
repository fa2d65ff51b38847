"""Measure the :class:`~torch_pi2.machine.hardware.Hardware` profile of this machine, in about a minute.

The machine should be idle otherwise. ``error`` of each line and ``warm`` of reads show how steady it was.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.package import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.errors import LibraryMissingError
from torch_pi2.machine import process
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Hardware
from torch_pi2.machine.reads import six_digits
from torch_pi2.measure.compute import FULL, Grid, kernels
from torch_pi2.measure.fit import median_us
from torch_pi2.measure.gpu import Gpu, accelerator, gpu_here
from torch_pi2.measure.reads import drive, reads
from torch_pi2.measure.store import store_costs
from torch_pi2.measure.weights import Weights
from torch_pi2.ops import load


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
    load()
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
