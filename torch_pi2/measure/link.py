"""``measure_link``: what an exchange between the processes of a group takes, for :mod:`torch_pi2.planner.group`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_pi2.errors import ConfigError
from torch_pi2.machine.link import Link
from torch_pi2.measure.weights import Weights

#: Bytes of an exchange of next to none, and of one that the link's speed decides.
_SMALL, _LARGE = 1 << 12, 1 << 22
_WARM_UP, _TIMES = 5, 25
#: Of int8 weights that are computed with before an exchange, 35 MB, as a part of a layer of a 7B model: inputs and
#: outputs; in a buffer of so many times as much, so that they come from memory.
_INPUTS, _OUTPUTS, _BUFFER = 4096, 8192, 4


def measure_link() -> Link:
    """Between the processes of ``torch.distributed``'s default group, which all call this, by exchanges as layers make.

    How fast bytes go is measured by exchanges that follow each other. One of next to none is measured after a stretch
    of computing, as a layer's is: threads are busy, caches are emptied and nobody is there at the same moment, so that
    it takes longer. What processes wait for each other, as none computes as long every time, is in it. With more than
    two processes both are of a hop of a ring on average. The same in all processes; some seconds.

    Raises:
        ConfigError: there is no group, or this process is alone in it.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size < 2:
        raise ConfigError(
            "a link to measure",
            expected="at least two processes",
            found="one",
            fix="Start the same command on each machine with torchrun --nnodes N --nproc-per-node 1.",
        )
    weights = Weights(_BUFFER * _OUTPUTS * _INPUTS).fill("int8", _INPUTS)
    x_1K = torch.ones((1, _INPUTS))

    def compute() -> None:
        torch.ops.pi2.linear(x_1K, weights.rows(_OUTPUTS), None, "int8", True)

    found = torch.tensor(
        [
            _exchange_us(_SMALL, dist.barrier),
            _exchange_us(_LARGE, dist.barrier),
            _exchange_us(_SMALL, compute),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(found)
    small_us, large_us, after_us = (found / (size * (size - 1))).tolist()
    per_byte_us = max((large_us - small_us) / (_LARGE - _SMALL), 1e-9)
    return Link(8 / per_byte_us, max(0.0, after_us - _SMALL * per_byte_us))


def _exchange_us(nbytes: int, before: Callable[[], object]) -> float:
    """Microseconds in which all have what each has, ``nbytes``, by the operator that layers use: the median.

    ``before`` each of them something else is done, which does not count.
    """
    own, world = torch.zeros(nbytes, dtype=torch.uint8), dist.group.WORLD
    assert world is not None
    ops, took = torch.ops._c10d_functional, list[float]()
    dist.barrier()
    for _ in range(_WARM_UP + _TIMES):
        before()
        start = time.perf_counter()
        ops.wait_tensor(ops.all_gather_into_tensor(own, dist.get_world_size(), world.group_name))
        took.append((time.perf_counter() - start) * 1e6)
    return statistics.median(took[_WARM_UP:])
