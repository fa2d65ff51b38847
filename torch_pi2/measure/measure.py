"""Measuring this machine: what :class:`~torch_pi2.machine.hardware.Hardware` has to know of it, in about a minute.

Nothing else should run meanwhile. Machines whose cores or drives are shared with others are not always as fast as when
they were measured; ``error`` of each line, and ``warm`` of reads, say how steady it was.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.extras import how_to_install
from torch_pi2.base.progress import bar
from torch_pi2.errors import ConfigError, LibraryMissingError
from torch_pi2.machine import process
from torch_pi2.machine.find import cached_path
from torch_pi2.machine.hardware import Hardware
from torch_pi2.measure.compute import CACHED, FULL, QUICK, rates, sparse_cases
from torch_pi2.measure.gpu import Gpu, accelerator, gpu_here
from torch_pi2.measure.machine import bandwidth, cache_bytes, glue
from torch_pi2.measure.reads import drive, interference, reads
from torch_pi2.measure.store import store_costs
from torch_pi2.measure.weights import Weights
from torch_pi2.ops import load

#: Less than this is only a look at everything, with sizes too small for real figures.
_REAL_S = 20.0
_MIB = 1 << 20
#: The buffer of weights: so many times the caches, within these limits; and one that the caches hold.
_TIMES, _BYTES = 32, (256 << 20, 1 << 30)
_CACHED_BYTES = 8 << 20
_FILE_BYTES = 512 * _MIB
#: Parts and their shares of the time.
_SHARES = {
    "file": 0.05,
    "memory": 0.05,
    "kernels": 0.37,
    "kernels in cache": 0.1,
    "layers": 0.2,
    "reads": 0.12,
    "interference": 0.03,
    "store": 0.08,
}


def measure(
    *, folder: Path | None = None, seconds: float = 60.0, progress: bool = False, gpu: Gpu | None = None
) -> Hardware:
    """Measure this machine on torch's current number of threads.

    Args:
        folder: on the drive that is to be read (default: the folder of :func:`~torch_pi2.machine.find.cached_path`). A
            file of up to 512 MiB, and models of up to 0.7 GB, one at a time, are written there and removed.
        seconds: about how long; less than 20 is only a look.
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
    real, about = seconds >= _REAL_S, process.describe()
    folder = cached_path().parent if folder is None else folder
    time = {name: share * seconds for name, share in _SHARES.items()}
    grid, figures = FULL if real else QUICK, dict[str, Any]()
    layout = "{desc:<18}{percentage:3.0f}%|{bar}| {elapsed}"
    with (
        bar(None, "measure", progress, total=1.0, bar_format=layout) as shown,
        drive(folder, _FILE_BYTES if real else 4 * _MIB, time["file"]) as file,
    ):

        def done(part: str, then: str = "") -> None:
            shown.update(_SHARES[part])
            shown.set_description_str(then)

        done("file", "memory")
        weights = Weights(_size() if real else 4 * _MIB)
        memory = bandwidth(weights, time["memory"])
        done("memory", "kernels")
        figures["rates"] = rates(weights, grid, time["kernels"])
        done("kernels", "kernels in cache")
        if real:
            figures["cached"] = rates(Weights(_CACHED_BYTES), CACHED, time["kernels in cache"])
            figures["cache_bytes"] = cache_bytes()
        done("kernels in cache", "layers")
        figures["glue"], figures["cached_glue"] = glue(folder, real=real)
        done("layers", "reads")
        figures["reads"] = reads(file, time["reads"])
        done("reads", "interference")
        busy = sparse_cases(weights, "int4/int8", *grid.layers[-1], batch=1)[0].ready
        figures["interference"] = interference(file, figures["reads"], busy, time["interference"])
        done("interference", "store")
        figures["store"] = store_costs(folder, real=real)
        done("store")
    gpu = gpu or gpu_here()
    notes = {"rates": "float linear layers, matrix products and SDPA by the wall's clock, others by the operators' own"}
    if not real:
        notes |= {"glue": "assumed: compiled as eager", "name": "a look in less than 20 seconds: not for plans"}
    if gpu is not None:
        notes["accelerator"] = "launches: four a layer; shared: the sum, as each has memory of its own"
        figures["accelerator"] = accelerator(gpu, memory.gb_per_s)
    return Hardware(
        name=about["machine"]["cpu"],
        source="measured",
        machine={name: str(value) for name, value in about["machine"].items()},
        versions=about["versions"],
        notes=notes,
        cores=process.cores(),
        threads=torch.get_num_threads(),
        memory_bytes=process.memory_bytes(),
        memory=(memory,),
        **{"cache_bytes": 0} | figures,
    )


def _size() -> int:
    """Bytes of weights; at most an eighth of the machine's memory."""
    least, most = _BYTES
    wanted = min(most, max(least, _TIMES * cache_bytes()))
    return min(wanted, process.memory_bytes() // 8) // _MIB * _MIB
