"""How many neurons of each layer an accelerator's memory holds: what is worth trying, within its bytes.

:func:`choose`, an integer program over predicted times, is exact in memory. Over a store it does not see what the cache
holds; the most frequent neurons of all layers, which is PowerInfer's placement (arXiv 2312.12456, section 6.3) but for
what a start costs, are tried beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_pi2.errors import ConfigError
from torch_pi2.planner.choices import Price, Space
from torch_pi2.planner.request import Task

#: Relative distance to the optimum at which the search ends, and seconds after which it ends in any case.
GAP, SECONDS = 1e-4, 20.0
#: By layer, the most neurons on an accelerator.
Counts = tuple[int, ...]


def caps(task: Task, space: Space, prices: Sequence[Price]) -> list[Counts | None]:
    """Counts that fit together, each once; the first is none at all. ``[None]``: there is no accelerator to plan for.

    The same neurons are there at all batch sizes: the sum over them counts. In memory the second is the optimum. What
    has room there need not be used, but on one with memory of its own is.
    """
    if not task.accelerator_bytes:
        return [None]
    sizes = [[int(a) * layer.neuron_bytes for a in f] for layer, f in zip(task.shape.layers, space.firsts, strict=True)]
    picks = [[0] * len(sizes)]
    for price in dict.fromkeys((prices[0], prices[-1])):
        costs = []
        for index, firsts in enumerate(space.firsts):
            line = [0.0] * len(firsts)
            for batch in task.batches:
                best = space.cost(batch, price)[index, :, : len(firsts)].min(axis=0)
                least = best if space.fixed else np.minimum.accumulate(best)
                line = [sum_ + task.weight(batch) * ms for sum_, ms in zip(line, least.tolist(), strict=True)]
            costs.append(line)
        picks.append(choose(costs, sizes, task.accelerator_bytes))
    picks.append(_most_frequent(task, space, sizes))
    return list(dict.fromkeys(tuple(int(f[n]) for f, n in zip(space.firsts, p, strict=True)) for p in picks))


def _most_frequent(task: Task, space: Space, sizes: Sequence[Sequence[int]]) -> list[int]:
    """Of each layer's counts one, such that those that fire most often at the smallest batch are there, in chunks."""
    chunks = []
    for index, (layer, firsts) in enumerate(zip(task.shape.layers, space.firsts, strict=True)):
        fires = np.append(0.0, np.cumsum(layer.frequency(task.batches[0])))[firsts]
        often = np.diff(fires) / np.diff(firsts)
        chunks += [(-float(share), n, index) for n, share in enumerate(often, 1)]
    left, picked = task.accelerator_bytes, [0] * len(sizes)
    for _, n, index in sorted(chunks):
        more = sizes[index][n] - sizes[index][n - 1]
        if n == picked[index] + 1 and more <= left:
            picked[index], left = n, left - more
    return picked


def choose(
    costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], capacity: int, *, seconds: float = SECONDS
) -> list[int]:
    """Of each layer's options one, such that their sizes have room together and their costs are least.

    The multiple-choice knapsack, exactly, by HiGHS (``scipy.optimize.milp``). Each layer's first option must have size
    0, and its sizes ascend.

    Args:
        costs, sizes: of the options of each layer.
        seconds: for the search. Only if it runs out can results of two runs differ.

    Raises:
        ConfigError: no solution in the time given.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if all(len(line) == 1 for line in costs):
        return [0] * len(costs)
    cost = np.concatenate([np.asarray(line, dtype=np.float64) for line in costs])
    nbytes = np.concatenate([np.asarray(line, dtype=np.float64) for line in sizes])
    ends = np.cumsum([len(line) for line in costs])
    layer = np.repeat(np.arange(len(costs)), [len(line) for line in costs])
    one_each = csr_array((np.ones(len(cost)), (layer, np.arange(len(cost)))))
    scale = max(1.0, float(capacity))
    found = milp(
        cost,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(nbytes[None] / scale, -np.inf, capacity / scale),
            LinearConstraint(one_each, 1.0, 1.0),
        ],
        options={"time_limit": seconds, "mip_rel_gap": GAP},
    )
    if found.x is None:
        raise ConfigError(
            f"choice among {len(cost)} options of {len(costs)} layers",
            expected=f"a solution in {seconds:g} seconds",
            found=str(found.message),
            fix="Give it more time.",
        )
    picked = [int(np.argmax(options)) for options in np.split(found.x, ends[:-1])]
    # HiGHS meets constraints but for 1e-6: bytes are hard here.
    while sum(line[n] for line, n in zip(sizes, picked, strict=True)) > capacity:
        index = max(range(len(picked)), key=lambda i: sizes[i][picked[i]])
        picked[index] -= 1
    return picked
