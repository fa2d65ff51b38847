"""How many neurons of each layer an accelerator's memory holds: what is worth trying, within its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_pi2.planner.placement import Tier, choose, place
from torch_pi2.planner.search import Price, Space
from torch_pi2.planner.settings import read_ms
from torch_pi2.planner.task import Task
from torch_pi2.spec.machine_plan import ACCELERATOR_CHUNK

#: By layer, the most neurons on an accelerator.
Counts = tuple[int, ...]
#: Of all neurons, what memory holds in placements beside an accelerator: whatever the budget is.
_MEMORY_SHARES = (0.25, 0.5, 1.0)


def caps(task: Task, space: Space, prices: Sequence[Price]) -> list[Counts | None]:
    """Counts that fit together, each once; the first is none at all. ``[None]``: there is no accelerator to plan for.

    The same neurons are there at all batch sizes: the sum over them counts. In memory the second is the optimum.
    """
    if not task.accelerator_bytes:
        return [None]
    sizes = [[int(a) * layer.bundle_bytes for a in f] for layer, f in zip(task.shape.layers, space.firsts, strict=True)]
    found: list[Counts | None] = [(0,) * len(sizes)]
    for price in dict.fromkeys((prices[0], prices[-1])):
        costs = []
        for index, firsts in enumerate(space.firsts):
            line = [0.0] * len(firsts)
            for batch in task.batches:
                best = space.cost(batch, price)[index, :, : len(firsts)].min(axis=0)
                # What has room there need not be used.
                line = [sum_ + task.weight(batch) * min(best[: n + 1]) for n, sum_ in enumerate(line)]
            costs.append(line)
        picked = choose(costs, sizes, task.accelerator_bytes)
        found.append(tuple(int(f[n]) for f, n in zip(space.firsts, picked, strict=True)))
    return list(dict.fromkeys([*found, *_placed(task, space)]))


def _placed(task: Task, space: Space) -> list[Counts]:
    """PowerInfer's placement, by the frequencies of the smallest batch; over a store for some sizes of memory."""
    theirs, layers = task.hardware.accelerator, task.shape.layers
    assert theirs is not None
    nbytes = [layer.bundle_bytes for layer in layers]
    every = sum(layer.intermediate * layer.bundle_bytes for layer in layers)
    mean = every / len(layers)
    how: dict[str, Any] = {"batch": 1, "hot_bytes": 0, "macs": 0}
    once, twice = (task.hardware.layer_us(layers[0].kernel, cold_bytes=n * mean, **how) for n in (1, 2))
    memory = Tier("memory", mean / max(1e-9, twice - once) / 1e3)
    flash = Tier("flash", task.shape.place_bytes / (read_ms(task.shape, task.hardware) * 1e6))
    speed = max(theirs.stream_gb_per_s, memory.gb_per_s)
    first = Tier(theirs.name, speed, task.accelerator_bytes, theirs.launch_us + theirs.merge_us)
    found = []
    for share in _MEMORY_SHARES if task.stored and flash.gb_per_s < memory.gb_per_s else (None,):
        rest = [memory] if share is None else [replace(memory, capacity_bytes=int(share * every)), flash]
        frequencies = [layer.frequency(task.batches[0]) for layer in layers]
        placed = place(frequencies, nbytes, [first, *rest], group=ACCELERATOR_CHUNK, whole=True).counts[0]
        found.append(tuple(max(int(a) for a in f if a <= n) for f, n in zip(space.firsts, placed, strict=True)))
    return found
