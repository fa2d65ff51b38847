"""``measure_link``: what an exchange between the processes of a group takes, for :mod:`torch_pi2.planner.group`."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from torch_pi2.errors import ConfigError
from torch_pi2.machine.link import Link

#: Bytes of an exchange of next to none, and of one that the link's speed decides.
_SMALL, _LARGE = 1 << 12, 1 << 22
_WARM_UP, _TIMES = 5, 25


def measure_link() -> Link:
    """Between the processes of ``torch.distributed``'s default group, which all call this, by exchanges as layers make.

    With more than two of them it is what a hop of a ring takes on average. The same in all processes.

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
    small_us, large_us = (_exchange_us(nbytes) / (size - 1) for nbytes in (_SMALL, _LARGE))
    per_byte_us = max((large_us - small_us) / (_LARGE - _SMALL), 1e-9)
    found = torch.tensor([8 / per_byte_us, max(0.0, small_us - _SMALL * per_byte_us)], dtype=torch.float64)
    dist.broadcast(found, 0)
    return Link(*found.tolist())


def _exchange_us(nbytes: int) -> float:
    """Microseconds in which all have what each has, ``nbytes``, by the operator that layers use: the median."""
    own, world = torch.zeros(nbytes, dtype=torch.uint8), dist.group.WORLD
    assert world is not None
    ops, took = torch.ops._c10d_functional, list[float]()
    for _ in range(_WARM_UP + _TIMES):
        dist.barrier()
        start = time.perf_counter()
        ops.wait_tensor(ops.all_gather_into_tensor(own, dist.get_world_size(), world.group_name))
        took.append((time.perf_counter() - start) * 1e6)
    return statistics.median(took[_WARM_UP:])
