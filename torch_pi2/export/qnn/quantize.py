"""Parts for the NPU, quantised, as programs that also run in PyTorch: hot neurons and attention.

A part is a program with dynamic sizes (:func:`open_program`). It is quantised once and specialised for each graph, with
the same weights and scales, of which the compiler keeps one copy. The hot neurons of a layer are one part whose outputs
are the sums of the first 1, 2, ... chunks; the graph for k chunks has only the k-th output.

Group scales of 4-bit weights are QNN's block-wise expansion: multiples, 1 to 16, of a sixteenth of the row's largest
scale, stored as 8 bits per group and a float per row. ExecuTorch's observer takes any float, and its encoder rounds to
a multiple after dividing the weights: NPU and PyTorch then differ (3e-2 of the output). Here scales are multiples
before the division.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_pi2.errors import ConfigError, NonFiniteError
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn.settings import BLOCK, Settings
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


#: Rows computed at once, to limit memory.
_ROWS = 256
#: One in this many calibration inputs is held out from GPTQ, to measure errors.
_HELD = 4

Inputs = tuple[torch.Tensor, ...]
#: Sizes and dtype of each input.
Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class PartInputs:
    """Inputs of a part, and its quantisation.

    Attributes:
        samples: calibration inputs; empty: not quantised (fp16). graphs: input shapes by graph. open: dynamic
            dimensions of each input. precision: as in :class:`Settings`. block: with w4a16, weights per scale; 0: a
            whole row. gptq: instead of rounding to nearest. outputs: graph -> its only output; default: all.
    """

    samples: Sequence[Inputs]
    graphs: Mapping[str, Shapes]
    open: Sequence[Sequence[int]]
    precision: str = "w8a16"
    block: int = 0
    gptq: bool = False
    outputs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantized:
    """A quantised part. ``errors``: L2 error of each output relative to float32, on ``tokens`` in the last quarter of
    the samples, held out from GPTQ; empty with fp16.
    """

    program: torch.export.ExportedProgram
    errors: list[float]
    tokens: int = 0


class _Sums(nn.Module):
    """The sums of the first 1, 2, ... chunks of ``hot``."""

    def __init__(self, hot: HotChunks) -> None:
        super().__init__()
        self.hot = hot

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(accumulate(self.hot.chunk(i, x) for i in range(len(self.hot.up))))


def hot_part(
    hot: HotChunks, samples: torch.Tensor | None, settings: Settings, graphs: Mapping[str, tuple[int, int]]
) -> tuple[torch.export.ExportedProgram, PartInputs]:
    """A layer's hot neurons, float32, as a part: x ``[T, H]`` -> the sums of the first 1, 2, ... chunks. x has two
    dimensions: with 4-bit weights the HTP (Qualcomm's emulator, QNN 2.49) is wrong for ``[2, 1, H]``. ``samples``:
    calibration inputs ``[..., H]`` float32; None with fp16. ``graphs``: name -> tokens and chunks. Raises ConfigError:
    groups of weights do not divide the layer. NonFiniteError: NaN or infinity in samples or weights.
    """
    block = block_of(hot, settings)
    for what, tensors in (("inputs", [] if samples is None else [samples]), ("weights", hot.parameters())):
        if not all(t.isfinite().all() for t in tensors):
            fix = "Check the model."
            raise NonFiniteError(f"{what} of the hot part", expected="finite values", found="NaN or infinity", fix=fix)
    pieces: list[Inputs] = []
    if samples is not None and settings.precision != "fp16":
        x_TH = samples.reshape(-1, hot.hidden).float()
        pieces = [(x,) for x in x_TH.split(max(1, min(_ROWS, len(x_TH) // _HELD)))]
    shapes = {name: [((tokens, hot.hidden), torch.float32)] for name, (tokens, _) in graphs.items()}
    chunks, gptq = {name: count - 1 for name, (_, count) in graphs.items()}, settings.quantization == "gptq"
    inputs = PartInputs(pieces, shapes, [(0,)], settings.precision, block, gptq, chunks)
    return open_program(_Sums(hot).eval(), (torch.zeros(3, hot.hidden),), inputs.open), inputs


def block_of(hot: HotChunks, settings: Settings) -> int:
    """Weights of ``hot`` per scale; 0: per output channel. Raises ConfigError: the size does not divide the layer."""
    if settings.precision != "w4a16":
        return 0
    size = BLOCK if settings.blocks == "auto" else int(settings.blocks)
    if not size or not any(n % size for n in (hot.hidden, *hot.widths)):
        return size
    if settings.blocks == "auto":
        return 0
    expected = f"a hidden size and chunks that are multiples of blocks={size}"
    found = f"a hidden size of {hot.hidden}, chunks of {hot.widths} neurons"
    fix = "Choose blocks=0 (a scale per output channel), or blocks='auto'."
    raise ConfigError("groups of weights of the hot part", expected=expected, found=found, fix=fix)


def pt2e(
    module: torch.fx.GraphModule, inputs: Sequence[Inputs], settings: Settings, block: int, chosen_on: Sequence = ()
) -> torch.fx.GraphModule:
    """``module`` with weights and activations quantised for the HTP, with the activations' ranges on ``inputs``.
    ``chosen_on``: inputs of GPTQ (:func:`~torch_pi2.export.qnn.quantize.calibrate`); empty: round to nearest.
    """
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from torchao.quantization.pt2e import MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    scales = Scales()
    if chosen_on and settings.precision == "w4a16":
        module, scales = calibrate(module, chosen_on, block)
    four = QuantDtype.use_16a4w_block if block else QuantDtype.use_16a4w
    kind = four if settings.precision == "w4a16" else QuantDtype.use_16a8w
    quantizer = QnnQuantizer(soc_model=QcomChipset[settings.soc])
    quantizer.set_default_quant_config(kind, is_linear_per_channel=True, act_observer=MinMaxObserver)
    if block:
        linears = [node.name for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
        quantizer.set_block_size_map(dict.fromkeys(linears, (1, block)))
    prepared = prepare_pt2e(module, quantizer)
    for one in inputs:
        prepared(*one)
    _use_scales(prepared, scales)
    return convert_pt2e(prepared)


def _use_scales(prepared: torch.fx.GraphModule, scales: Mapping[str, torch.Tensor]) -> None:
    """Set the weight observers of a calibrated module to ``scales``, or for groups to :func:`block_scales`."""
    from executorch.backends.qualcomm.quantizer.observers.per_block_param_observer import PerBlockParamObserver

    for node in prepared.graph.nodes:
        observer: Any = prepared.get_submodule(node.target) if node.op == "call_module" else None
        if observer is None or not node.args or node.args[0].op != "get_attr":
            continue
        name = str(node.args[0].target)
        scale = scales.get(name)
        if scale is None and isinstance(observer, PerBlockParamObserver):
            scale = block_scales(prepared.get_parameter(name), observer.block_size[1])
        if scale is not None:
            observer.max_val.copy_((scale * MOST).reshape(observer.max_val.shape))
            observer.min_val.copy_(-observer.max_val)


def held_back(samples: Any) -> tuple[Any, Any]:
    """Samples for GPTQ, and samples held out; all twice if there are too few."""
    some = len(samples) - len(samples) // _HELD
    return (samples[:some], samples[some:]) if len(samples) >= _HELD else (samples, samples)


def zeros(shapes: Shapes) -> Inputs:
    return tuple(torch.zeros(sizes, dtype=dtype) for sizes, dtype in shapes)


def open_program(module: nn.Module, example: Inputs, open: Sequence[Sequence[int]]) -> torch.export.ExportedProgram:
    """``module`` as a program; dynamic sizes of ``example`` have to be at least 2, and distinct if independent."""
    auto = torch.export.Dim.AUTO(min=1, max=1 << 16)
    shapes = tuple(dict.fromkeys(dims, auto) for dims in open)
    with torch.no_grad():
        return torch.export.export(_Open(module), example, dynamic_shapes={"inputs": shapes}, strict=False)


class _Open(nn.Module):
    """A module with variadic inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(*inputs))


def quantize_part(program: torch.export.ExportedProgram, inputs: PartInputs, settings: Settings) -> Quantized:
    """``program`` quantised by ExecuTorch's quantiser for the HTP; unchanged without samples (fp16)."""
    if not inputs.samples:
        return Quantized(program, [])
    with torch.no_grad():
        right: Any = program.module(check_guards=False)
        first, last = held_back(inputs.samples)
        chosen_on = first if inputs.gptq else ()
        settings = replace(settings, precision=inputs.precision, quantization="rtn")
        made = pt2e(program.module(check_guards=False), inputs.samples, settings, inputs.block, chosen_on)
        example: Any = program.example_inputs[0]
        tokens = sum(x[0].numel() // x[0].shape[-1] for x in last)
        squares = []
        for one in last:
            pairs = zip(right(*one), made(*one), strict=True)
            squares.append([[(got - y).double().square().sum(), y.double().square().sum()] for y, got in pairs])
        off, whole = torch.tensor(squares, dtype=torch.float64).sum(0).unbind(1)
        off_by = [float(e) for e in (off / whole.clamp_min(1e-300)).sqrt()]
        return Quantized(open_program(made, example, inputs.open), off_by, tokens)


def part_program(
    program: torch.export.ExportedProgram,
    shapes: Shapes,
    output: int | None = None,
    order: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.export.ExportedProgram:
    """The static program for inputs of ``shapes``, sharing weights with ``program``. ``output``: the only one to keep.
    ``order``: inputs that are arguments, and the result index of each output.
    """
    module, inputs = program.module(check_guards=False), zeros(shapes)
    if output is not None:
        graph, values = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
        outputs: Any = graph.graph_copy(module.graph, values)
        graph.output((outputs[output],))  # a tuple, as delegates return
        with_all = torch.fx.GraphModule(module, graph)
        with_all.graph.eliminate_dead_code()
        module = torch.fx.GraphModule(with_all, with_all.graph)  # drops unused weights
    called: nn.Module = module
    if order is not None:
        called, inputs = _Ordered(module, *order), tuple(inputs[i] for i in order[0])
    with torch.no_grad():
        return torch.export.export(called, inputs, strict=False)


class _Ordered(nn.Module):
    """A part with its compiled graph's order of arguments and results."""

    def __init__(self, module: nn.Module, arguments: Sequence[int], results: Sequence[int]) -> None:
        super().__init__()
        self.module, self.arguments, self.results = module, arguments, results

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [given[self.arguments.index(i)] for i in range(len(given))]
        outputs = self.module(*inputs)
        return tuple(outputs[self.results.index(i)] for i in range(len(outputs)))
