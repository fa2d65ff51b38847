"""4-bit weights for the NPU: scales of groups, and GPTQ instead of rounding to nearest.

Group scales are QNN's block-wise expansion: a group's scale is a whole multiple, 1 to 16, of a sixteenth of the largest
in its row, so 8 bits are stored for each group and a float for each row. ExecuTorch's observer takes any float, and its
encoder rounds that to a multiple after the weights were divided by it, so that the NPU computed with other weights than
PyTorch (3e-2 of the output). Here scales are multiples before any weight is divided.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_pi2.fitting.gptq import DAMPING, Grid, Moments, Solver

#: Largest value of a symmetric 4-bit weight, as the compiler's quantiser uses it: -7 to 7.
MOST = 7
STEPS = 16
#: Smaller multiples that are tried besides the one that clips nothing: coarser clipping, finer steps.
_FEWER = 3
#: Where a row has one scale: sizes tried for its largest weight, relative to the largest integer.
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
    # the encoder finds the step from the largest scale of a row
    return best.scatter(1, most.argmax(1, keepdim=True), float(STEPS)) * step


# --- GPTQ -------------------------------------------------------------------------------------------------------------


class _Common(NamedTuple):
    """A sixteenth of each row's largest scale, and the group that has that scale."""

    step_N: torch.Tensor
    largest_N: torch.Tensor


class NpuGrid(Grid):
    """4 bits as QNN has them: -7 to 7, and of each group a multiple, 1 to 16, of its row's step.

    A row's step is that of :func:`block_scales`, which its largest group keeps. Without
    groups (``size`` 0) a row has one scale, which may be any.
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
        for scale_N in tried_NE.clamp_min(_LEAST).T:  # one at a time: w may have thousands of columns
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
    """``module`` with weights of linear layers in 4 bits, chosen by GPTQ, and their scales.

    Layers are solved one after another, on the inputs that the solved layers before them give. Memory: a copy of the
    module, and for one layer at a time what :class:`~torch_pi2.fitting.gptq.Solver` takes.

    Args:
        inputs: of ``module``. block: weights of a row that share a scale; 0: all.
    """
    made, scales = copy.deepcopy(module), Scales()
    grid = NpuGrid(block)
    for names in _levels(module):
        moments = _moments(module, made, names, inputs)
        solvers: dict[int, Solver] = {}
        for name in names:
            of_input = moments[name]
            if id(of_input) not in solvers:
                # as much as chance has of it: with fewer tokens than columns GPTQ alone is worse than rounding
                damping = DAMPING + len(of_input.squares_KK) / of_input.tokens
                solvers[id(of_input)] = Solver(name, of_input, grid, damping=damping)
            weight = made.get_parameter(name)
            values_NK, scale_NK = solvers[id(of_input)].solve_values(weight)
            weight.copy_(values_NK)
            scales[name] = scale_NK[:, :: block or scale_NK.shape[1]].clone()
    return made, scales


def _levels(module: torch.fx.GraphModule) -> list[list[str]]:
    """Names of weights by level: the inputs of those in a level do not depend on each other."""
    depth: dict[torch.fx.Node, int] = {}
    found: dict[int, list[str]] = {}
    for node in module.graph.nodes:
        before = max((depth[used] for used in node.all_input_nodes), default=0)
        depth[node] = before + (node.target is torch.ops.aten.linear.default)
        if depth[node] > before:
            found.setdefault(before, []).append(str(node.args[1].target))
    return [found[level] for level in sorted(found)]


class _Seen(torch.fx.Interpreter):
    """Runs a module and keeps the inputs of linear layers, by the names of their weights."""

    def __init__(self, module: torch.fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__(module)
        self.names, self.inputs = {*names}, dict[str, torch.Tensor]()

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            x, weight = n.all_input_nodes[:2]
            if weight.target in self.names:
                self.inputs[str(weight.target)] = self.env[x]
        return super().run_node(n)


def _moments(
    floats: torch.fx.GraphModule,
    made: torch.fx.GraphModule,
    names: Sequence[str],
    inputs: Sequence[tuple[torch.Tensor, ...]],
) -> Mapping[str, Moments]:
    """Moments of the inputs of the named layers; layers with the same input share them."""
    moments: dict[str, Moments] = {}
    for one in inputs:
        runs = [_Seen(module, names) for module in (made, floats)]
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
    return moments
