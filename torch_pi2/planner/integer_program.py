"""PowerInfer's integer program (arXiv 2312.12456, section 6.3): how many neurons of each layer an accelerator holds.
PowerInfer maximises the firing frequency of neurons on the GPU; here predicted time is minimised, under the same
constraints: the accelerator's memory, and one choice per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Relative gap at which the search stops, and its time limit in seconds.
GAP, SECONDS = 1e-4, 20.0


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Choose one option per layer with the least total cost whose sizes fit into ``capacity`` together.

    A multiple-choice knapsack, solved by HiGHS (``scipy.optimize.milp``); deterministic unless the time limit is hit.
    ``costs``, ``sizes``: of the options of each layer; sizes ascend from 0.
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
    fits = LinearConstraint(nbytes[None] / scale, -np.inf, capacity / scale)
    solution = milp(
        cost,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[fits, LinearConstraint(one_each, 1.0, 1.0)],
        options={"time_limit": SECONDS, "mip_rel_gap": GAP},
    )
    if solution.x is None:  # time limit
        return [0] * len(costs)
    picked = [int(np.argmax(options)) for options in np.split(solution.x, ends[:-1])]
    # HiGHS keeps constraints within 1e-6 only; bytes are a hard limit here.
    while sum(line[n] for line, n in zip(sizes, picked, strict=True)) > capacity:
        largest = max(range(len(picked)), key=lambda i: sizes[i][picked[i]])
        picked[largest] -= 1
    return picked
