"""Measuring this machine: what :class:`~torch_pi2.machine.hardware.Hardware` has to know of it, in about a minute.

Nothing else should run meanwhile. Machines whose cores or drives are shared with others are not always as fast as when
they were measured; ``error`` of each line, and ``warm`` of reads, say how steady it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torch_pi2.base.extras import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError, LibraryMissingError
from torch_pi2.machine import process as machine
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Hardware
from torch_pi2.machine.process import cores
from torch_pi2.measure.compute import CACHED, FULL, QUICK, rates, sparse_cases
from torch_pi2.measure.gpu import Gpu, accelerator, gpu_here
from torch_pi2.measure.machine import bandwidths, cache_bytes, glue, thread_factors
from torch_pi2.measure.reads import drive, interference, reads
from torch_pi2.measure.store import store_costs
from torch_pi2.measure.weights import Weights
from torch_pi2.ops import load

#: Shorter than this there is a look at everything, over sizes too small for real figures.
_REAL_S = 20.0
_MIB = 1 << 20
#: Weights: so many times the caches, within these; and those that a cache holds.
_TIMES, _BYTES = 32, (256 << 20, 1 << 30)
_CACHED_BYTES = 8 << 20
_FILE_BYTES = 512 * _MIB
#: Parts and their shares of the time.
_SHARES = {
    "memory": 0.05,
    "kernels": 0.34,
    "kernels in cache": 0.1,
    "threads": 0.03,
    "layers": 0.2,
    "file": 0.05,
    "reads": 0.12,
    "interference": 0.03,
    "store": 0.08,
}


def measure(
    *,
    folder: Path | None = None,
    seconds: float = 60.0,
    progress: bool = False,
    set_threads: Callable[[int], None] | None = None,
    gpu: Gpu | None = None,
) -> Hardware:
    """Measure this machine on torch's current number of threads.

    Args:
        folder: on the drive that is to be read; a file of up to 512 MiB, and models of up to 0.7 GB, one at a time, are
            made there and removed (default: where
            :func:`~torch_pi2.machine.find.cached_path` is).
        seconds: about how long; less than 20 is only a look.
        progress: show a bar on standard error.
        set_threads: what sets the number of compute threads, ``torch.set_num_threads``; without it only the current
            number is measured. It is as before afterwards.
        gpu: beside the CPU (default: torch's current one, if it has kernels); it takes seconds more.

    Raises:
        ConfigError: no time. ArtifactError: the folder cannot be written.
        LibraryMissingError: scipy or transformers is not installed.
    """
    if not seconds > 0:
        raise ConfigError("seconds", expected="more than 0", found=str(seconds), fix="A minute gives good figures.")
    _check_packages()
    load()

    real = seconds >= _REAL_S
    about = machine.describe()
    folder = cached_path().parent if folder is None else folder
    threads = torch.get_num_threads()
    file_bytes, warm_s = _FILE_BYTES if real else 4 * _MIB, _SHARES["file"] * seconds
    with _bar(progress) as bar, drive(folder, file_bytes, warm_s) as file:

        def part(name: str) -> tuple[float, Callable[[float], None]]:
            bar(name, 0)
            return seconds * _SHARES[name], lambda share: bar(name, share * _SHARES[name])

        weights = Weights(_size() if real else 4 * _MIB)
        memory = bandwidths(weights, set_threads, part("memory")[0])
        bar("memory", _SHARES["memory"])
        grid = FULL if real else QUICK
        from_memory = rates(weights, grid, *part("kernels"))
        cached = rates(Weights(_CACHED_BYTES), CACHED, *part("kernels in cache")) if real else None
        factors = thread_factors(weights, grid, set_threads, part("threads")[0])
        bar("threads", _SHARES["threads"])
        of_layers, of_small_layers = glue(folder, real=real, tick=part("layers")[1])
        bar("file", _SHARES["file"])
        of_drive = reads(file, *part("reads"))
        busy = sparse_cases(weights, "int4/int8", *grid.layers[-1], batch=1)[0].ready
        together = interference(file, of_drive, busy, part("interference")[0])
        bar("interference", _SHARES["interference"])
        of_store = store_costs(folder, real=real, tick=part("store")[1])
    gpu = gpu or gpu_here()
    in_order = max(found.gb_per_s for found in memory if not found.row_bytes)
    notes = {"rates": "float linear layers, matrix products and SDPA by the wall's clock, others by the operators' own"}
    if not real:
        notes |= {"glue": "assumed: compiled as eager", "name": "a look in less than 20 seconds: not for plans"}
    if gpu is not None:
        notes["accelerator"] = "launches: four a layer; shared: the sum, as each has memory of its own"
    if set_threads is None:
        notes["thread_factors"] = "not measured: a part of the threads is taken to be as many times slower"
    return Hardware(
        name=about["machine"]["cpu"],
        source="measured",
        machine={name: str(value) for name, value in about["machine"].items()},
        versions=about["versions"],
        notes=notes,
        cores=cores(),
        threads=threads,
        memory_bytes=machine.memory_bytes(),
        cache_bytes=cache_bytes() if cached is not None else 0,
        memory=memory,
        rates=from_memory,
        cached=cached,
        thread_factors=factors,
        glue=of_layers,
        cached_glue=of_small_layers,
        reads=of_drive,
        interference=together,
        store=of_store,
        accelerator=None if gpu is None else accelerator(gpu, in_order),
    )


def _size() -> int:
    """Bytes of weights; an eighth of the machine's memory, if that is less."""
    least, most = _BYTES
    wanted = min(most, max(least, _TIMES * cache_bytes()))
    return min(wanted, machine.memory_bytes() // 8) // _MIB * _MIB


def _check_packages() -> None:
    from importlib.util import find_spec

    for package, extra in (("scipy", "plan"), ("transformers", "hf")):
        if find_spec(package) is None:
            raise LibraryMissingError(
                package,
                expected=f"an installed {package}",
                found="none",
                fix=how_to_install(extra),
            )


@contextmanager
def _bar(progress: bool) -> Iterator[Callable[[str, float], None]]:
    """``show(part, share)``: so much more of the whole is done, and ``part`` is next or under way."""
    layout = "{desc:<18}{percentage:3.0f}%|{bar}| {elapsed}"
    with bar(None, "measure", progress, total=1.0, bar_format=layout) as shown:

        def show(name: str, share: float) -> None:
            shown.set_description_str(name)
            shown.update(share)

        yield show
