"""4-bit weights for the NPU: scales of groups, and GPTQ instead of rounding to nearest.

Group scales are QNN's block-wise expansion: multiples, 1 to 16, of a sixteenth of the row's largest scale, stored as 8
bits per group and a float per row. ExecuTorch's observer takes any float, and its encoder rounds to a multiple after
dividing the weights: NPU and PyTorch then differ (3e-2 of the output). Here scales are multiples before the division.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_pi2.fitting.gptq import DAMPING, Grid, Moments, Solver

#: Symmetric 4-bit weights are -7 to 7, as in the compiler's quantiser.
MOST = 7
STEPS = 16
#: Number of smaller multiples to try, which clip but have finer steps.
_FEWER = 3
#: Divisors to try for the scale of a whole row.
_SHARES = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5)
#: Smallest scale, as ExecuTorch's observers have it.
_LEAST = 2.0**-23


def block_scales(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Scales ``[out, in / size]`` of ``weight`` ``[out, in]``: the multiples with the least squared error."""
    groups = weight.reshape(len(weight), -1, size)
    most = groups.abs().amax(2)
    step = most.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * STEPS * MOST) / (STEPS * MOST)
    whole = (most / MOST / step).ceil().clamp(1, STEPS)
    best, least = whole, torch.full_like(most, torch.inf)
    for fewer in range(_FEWER + 1):
        multiple = (whole - fewer).clamp_min(1)
        scale = (multiple * step)[..., None]
        error = ((groups / scale).round().clamp(-MOST, MOST) * scale - groups).square().sum(2)
        best, least = torch.where(error < least, multiple, best), torch.minimum(error, least)
    # the encoder takes the step from a row's largest scale
    return best.scatter(1, most.argmax(1, keepdim=True), float(STEPS)) * step


class _Common(NamedTuple):
    """A sixteenth of each row's largest scale, and the group with that scale."""

    step_N: torch.Tensor
    largest_N: torch.Tensor


class NpuGrid(Grid):
    """QNN's 4-bit grid: -7 to 7, with scales of groups that are multiples, 1 to 16, of the row's step
    (:func:`block_scales`; the largest group keeps it). Without groups (``size`` 0) a row has one arbitrary scale.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self, w_NK: torch.Tensor) -> _Common | None:
        if not self.size:
            return None
        largest = block_scales(w_NK, self.size).max(1)
        return _Common((largest.values / STEPS).clamp_min(_LEAST), largest.indices)

    def scales(self, w_Nk: torch.Tensor, counts_k: torch.Tensor, common: _Common | None, group: int) -> torch.Tensor:
        if common is None:
            tried_NE = w_Nk.abs().amax(1, keepdim=True) / (MOST * torch.tensor(_SHARES))
        else:
            tried_NE = common.step_N[:, None] * torch.arange(1.0, STEPS + 1)
        best_N1 = torch.full((len(w_Nk), 1), _LEAST)
        least_N = torch.full((len(w_Nk),), torch.inf)
        for scale_N in tried_NE.clamp_min(_LEAST).T:  # one at a time, to save memory
            error_N = (self.integers(w_Nk, scale_N[:, None]) * scale_N[:, None] - w_Nk).square() @ counts_k
            best_N1[:, 0] = torch.where(error_N < least_N, scale_N, best_N1[:, 0])
            least_N = torch.minimum(error_N, least_N)
        return best_N1 if common is None else self.nearest(best_N1[:, 0], common, group)[:, None]

    def nearest(self, scale_N: torch.Tensor, common: _Common | None, group: int) -> torch.Tensor:
        if common is None:
            return scale_N.clamp_min(_LEAST)
        multiple_N = (scale_N / common.step_N).round().clamp(1, STEPS)
        return torch.where(common.largest_N == group, float(STEPS), multiple_N) * common.step_N

    def integers(self, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (w / scale).round().clamp(-MOST, MOST)


#: Scales of a weight ``[N, K / size]``, by its name in a program.
Scales = dict[str, torch.Tensor]


def calibrate(
    module: torch.fx.GraphModule, inputs: Sequence[tuple[torch.Tensor, ...]], block: int
) -> tuple[torch.fx.GraphModule, Scales]:
    """``module`` with 4-bit weights of linear layers, chosen by GPTQ on ``inputs``, and their scales; ``block``:
    weights per scale in a row; 0: all. Layers are solved in order, on the outputs of solved layers. Memory: a copy of
    the module, and :class:`~torch_pi2.fitting.gptq.Solver` for one layer at a time.
    """
    made, scales = copy.deepcopy(module), Scales()
    grid = NpuGrid(block)
    for names in _levels(module):
        # moments of the inputs, shared by layers with the same input
        moments: dict[str, Moments] = {}
        for one in inputs:
            runs = [_Seen(each, names) for each in (made, module)]
            for run in runs:
                run.run(*one)
            added: dict[int, Moments] = {}
            for name in names:
                x, y = (run.inputs[name] for run in runs)
                if x.data_ptr() in added:
                    moments.setdefault(name, added[x.data_ptr()])
                    continue
                own = moments.setdefault(name, Moments(x.shape[-1]))
                own.add(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
                added[x.data_ptr()] = own
        solvers: dict[int, Solver] = {}
        for name in names:
            of_input = moments[name]
            if id(of_input) not in solvers:
                # in proportion to sampling noise: with fewer tokens than columns GPTQ is worse than rounding
                damping = DAMPING + len(of_input.squares_KK) / of_input.tokens
                solvers[id(of_input)] = Solver(name, of_input, grid, damping=damping)
            weight = made.get_parameter(name)
            values_NK, scale_NK = solvers[id(of_input)].solve_values(weight)
            weight.copy_(values_NK)
            scales[name] = scale_NK[:, :: block or scale_NK.shape[1]].clone()
    return made, scales


def _levels(module: torch.fx.GraphModule) -> list[list[str]]:
    """Names of weights by level, within which inputs are independent."""
    depth: dict[torch.fx.Node, int] = {}
    found: dict[int, list[str]] = {}
    for node in module.graph.nodes:
        before = max((depth[used] for used in node.all_input_nodes), default=0)
        depth[node] = before + (node.target is torch.ops.aten.linear.default)
        if depth[node] > before:
            found.setdefault(before, []).append(str(node.args[1].target))
    return [found[level] for level in sorted(found)]


class _Seen(torch.fx.Interpreter):
    """Runs a module and records the inputs of linear layers by weight name."""

    def __init__(self, module: torch.fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__(module)
        self.names, self.inputs = {*names}, dict[str, torch.Tensor]()

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            x, weight = n.all_input_nodes[:2]
            if weight.target in self.names:
                self.inputs[str(weight.target)] = self.env[x]
        return super().run_node(n)
