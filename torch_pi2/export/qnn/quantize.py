"""What the NPU computes, in its precision, as programs that also run in PyTorch: hot neurons, and other parts.

All chunks of a layer are quantised once, in one graph whose outputs are the sums of the first 1, 2, ... chunks. The
graph for k chunks is that graph cut off after its k-th output. So every number of chunks and every batch size has the
same weights and scales, and the compiler keeps one copy of them.

Another part (attention, the last linear layer) comes as a program with open sizes (:func:`open_program`), is quantised
once, and becomes static for each graph, with the same weights and scales in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import CalibrationError, ConfigError, NonFiniteError, ShapeError
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn.settings import BLOCK, Settings
from torch_pi2.export.qnn.weights import MOST, Scales, block_scales, calibrate

#: Inputs that are computed at once: their intermediate values are kept.
_ROWS = 256
#: One in so many calibration inputs is not used by GPTQ; errors are measured on it.
_HELD = 4

Inputs = tuple[torch.Tensor, ...]
#: Sizes and dtype of each input.
Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Quantized:
    """A layer's hot part.

    Attributes:
        program: x ``[T, H]`` float32 (any T) -> a tuple of the sums of the first 1, 2, ... chunks.
        errors: of each sum relative to float32 (L2), on the last quarter of the calibration inputs, which set ranges
            but not GPTQ's weights; empty with fp16.
        block: weights of a group that has a scale of its own; 0: a scale for each output channel.
        tokens: on which errors were measured.
    """

    program: torch.export.ExportedProgram
    errors: list[float]
    block: int = 0
    tokens: int = 0


class _Sums(nn.Module):
    """The sums of the first 1, 2, ... chunks of ``hot``."""

    def __init__(self, hot: HotChunks) -> None:
        super().__init__()
        self.hot = hot

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = [self.hot.chunk(0, x)]
        for i in range(1, len(self.hot.up)):
            sums.append(sums[-1] + self.hot.chunk(i, x))
        return tuple(sums)


def quantize(hot: HotChunks, samples: torch.Tensor | None, settings: Settings) -> Quantized:
    """Bring ``hot`` into ``settings.precision`` (post-training quantisation by ExecuTorch's quantiser for the HTP).

    Args:
        hot: float32.
        samples: calibration inputs of the layer ``[..., H]`` float32; with fp16 they may be None.

    Raises:
        CalibrationError: no samples where they are needed. ShapeError: samples of another width.
        ConfigError: groups of weights that do not divide the layer.
        NonFiniteError: NaN or infinity in samples or weights.
    """
    check_calibration(hot, samples, settings)
    sums, hidden = _Sums(hot).eval(), hot.hidden
    with torch.no_grad():
        if settings.precision == "fp16" or samples is None:
            return Quantized(_export(sums, hidden), [])
        x_TH, block = samples.reshape(-1, hidden).float(), block_of(hot, settings)
        first, last = held_back(x_TH)
        chosen_on = [(x,) for x in first.split(_ROWS)] if settings.quantization == "gptq" else []
        module: Any = _export(sums, hidden).module()
        quantized = pt2e(module, [(x,) for x in x_TH.split(_ROWS)], settings, block, chosen_on)
        errors = errors_of(sums, quantized, [(x,) for x in last.split(_ROWS)])
        return Quantized(_export(quantized, hidden), errors, block, len(last))


def graph_program(program: torch.export.ExportedProgram, tokens: int, chunks: int) -> torch.export.ExportedProgram:
    """The static program for x ``[tokens, H]`` and the first ``chunks`` chunks of :attr:`Quantized.program`.

    It returns a tuple of one. Weights are shared with ``program``; those of further chunks are not in it.

    x has two dimensions: with 4-bit weights and x ``[2, 1, H]`` the HTP (Qualcomm's emulator, QNN 2.49) computes
    something else; ``[2, H]`` and ``[1, 2, H]`` are right.
    """
    whole = program.module(check_guards=False)
    graph, values = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    outputs: Any = graph.graph_copy(whole.graph, values)
    graph.output((outputs[chunks - 1],))  # a tuple: what a delegate returns
    with_all = torch.fx.GraphModule(whole, graph)
    with_all.graph.eliminate_dead_code()
    module = torch.fx.GraphModule(with_all, with_all.graph)  # copies only what is still used
    (x,) = (node for node in whole.graph.nodes if node.op == "placeholder")
    return torch.export.export(module, (torch.zeros(tokens, x.meta["val"].shape[-1]),), strict=False)


def check_calibration(hot: HotChunks, samples: torch.Tensor | None, settings: Settings) -> None:
    """Raises what :func:`quantize` raises, before anything is computed."""
    block_of(hot, settings)
    if samples is None or samples.numel() == 0:
        if settings.precision == "fp16" and samples is None:
            return
        raise CalibrationError(
            "calibration inputs of the hot part",
            expected=f"some [..., {hot.hidden}] to find the ranges of 16-bit activations",
            found="none",
            fix="Give samples, or choose precision='fp16'.",
        )
    if samples.shape[-1] != hot.hidden:
        raise ShapeError(
            "calibration inputs of the hot part",
            expected=f"[..., {hot.hidden}]",
            found=str(tuple(samples.shape)),
            fix="Record what enters this layer's FFN.",
        )
    for what, tensors in (("calibration inputs", [samples]), ("weights", list(hot.parameters()))):
        if not all(t.isfinite().all() for t in tensors):
            raise NonFiniteError(
                f"{what} of the hot part", expected="finite values", found="NaN or infinity", fix="Check the model."
            )


def block_of(hot: HotChunks, settings: Settings) -> int:
    """Weights of ``hot`` that share a scale; 0: those of an output channel.

    Raises:
        ConfigError: a size was asked for that does not divide the layer.
    """
    if settings.precision != "w4a16":
        return 0
    size = BLOCK if settings.blocks == "auto" else int(settings.blocks)
    if not size or not any(n % size for n in (hot.hidden, *hot.widths)):
        return size
    if settings.blocks == "auto":
        return 0
    raise ConfigError(
        "groups of weights of the hot part",
        expected=f"a hidden size and chunks that are multiples of blocks={size}",
        found=f"a hidden size of {hot.hidden}, chunks of {hot.widths} neurons",
        fix="Choose blocks=0 (a scale per output channel), or blocks='auto'.",
    )


def pt2e(
    module: torch.fx.GraphModule,
    inputs: Sequence[Inputs],
    settings: Settings,
    block: int,
    chosen_on: Sequence[Inputs] = (),
) -> torch.fx.GraphModule:
    """``module`` with weights and activations quantised for the HTP, the latter to what they are on ``inputs``.

    ``block``: with w4a16, so many weights of a row have a scale; 0: all of it. ``chosen_on``: further inputs, on which
    4-bit weights are chosen (:func:`~torch_pi2.export.qnn.weights.calibrate`); none: they are rounded to nearest.
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
    converted: torch.fx.GraphModule = convert_pt2e(prepared)
    return converted


def _use_scales(prepared: torch.fx.GraphModule, scales: Mapping[str, torch.Tensor]) -> None:
    """Give the observers of weights in ``prepared`` (calibrated) these scales, or groups those of block_scales."""
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
    """Those by which weights are chosen, and those on which errors are measured; all twice where there are too few."""
    some = len(samples) - len(samples) // _HELD
    return (samples[:some], samples[some:]) if len(samples) >= _HELD else (samples, samples)


def errors_of(right: nn.Module, quantized: nn.Module, inputs: Iterable[tuple[torch.Tensor, ...]]) -> list[float]:
    """Of each output the difference of two modules on ``inputs``, relative to the first (L2)."""
    squares = []
    for one in inputs:
        pairs = zip(right(*one), quantized(*one), strict=True)
        squares.append([[(got - y).double().square().sum(), y.double().square().sum()] for y, got in pairs])
    off, whole = torch.tensor(squares, dtype=torch.float64).sum(0).unbind(1)
    return [float(e) for e in (off / whole.clamp_min(1e-300)).sqrt()]


def _export(module: nn.Module, hidden: int) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    return torch.export.export(module, (torch.zeros(3, hidden),), dynamic_shapes=({0: tokens},))


# --- other parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartInputs:
    """Inputs of a part.

    Attributes:
        samples: calibration inputs; empty: it is not quantised (fp16). graphs: shapes in each graph. open: the
            dimensions of each input that differ between calls. block: 0: 8-bit weights; else 4 bits, and a scale for
            so many weights of a row. gptq: choose 4-bit weights on the samples, instead of rounding to nearest.
    """

    samples: Sequence[Inputs]
    graphs: Mapping[str, Shapes]
    open: Sequence[Sequence[int]]
    block: int = 0
    gptq: bool = False


def zeros(shapes: Shapes) -> Inputs:
    return tuple(torch.zeros(sizes, dtype=dtype) for sizes, dtype in shapes)


def open_program(module: nn.Module, example: Inputs, open: Sequence[Sequence[int]]) -> torch.export.ExportedProgram:
    """``module`` as a program. Open sizes of ``example`` have to be 2 or more, and different where they may differ."""
    auto = torch.export.Dim.AUTO(min=1, max=1 << 16)
    shapes = tuple(dict.fromkeys(dims, auto) for dims in open)
    with torch.no_grad():
        return torch.export.export(_Open(module), example, dynamic_shapes={"inputs": shapes}, strict=False)


class _Open(nn.Module):
    """A module with its inputs under one name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(*inputs))


def quantize_part(
    program: torch.export.ExportedProgram, inputs: PartInputs, settings: Settings
) -> tuple[torch.export.ExportedProgram, list[float]]:
    """``program`` with its weights quantised, unless they are float16; of each output the error on the last quarter of
    the samples, on which no weights were chosen, relative to float32 (L2)."""
    if not inputs.samples:
        return program, []
    with torch.no_grad():
        right: Any = program.module(check_guards=False)
        precision = replace(settings, precision="w4a16" if inputs.block else "w8a16")
        first, last = held_back(inputs.samples)
        chosen_on = first if inputs.gptq else ()
        quantized = pt2e(program.module(check_guards=False), inputs.samples, precision, inputs.block, chosen_on)
        example: Any = program.example_inputs[0]
        return open_program(quantized, example, inputs.open), errors_of(right, quantized, last)


def part_program(
    program: torch.export.ExportedProgram, shapes: Shapes, order: tuple[Sequence[int], Sequence[int]] | None = None
) -> torch.export.ExportedProgram:
    """The static program for inputs of ``shapes``; ``order``: with these of them as arguments, and so that output i is
    result ``order[1][i]``."""
    module: nn.Module = program.module(check_guards=False)
    inputs = zeros(shapes)
    if order is not None:
        module, inputs = _Ordered(module, *order), tuple(inputs[i] for i in order[0])
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)


class _Ordered(nn.Module):
    """A part as its compiled graph is called."""

    def __init__(self, module: nn.Module, arguments: Sequence[int], results: Sequence[int]) -> None:
        super().__init__()
        self.module, self.arguments, self.results = module, arguments, results

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [given[self.arguments.index(i)] for i in range(len(given))]
        outputs = self.module(*inputs)
        return tuple(outputs[self.results.index(i)] for i in range(len(outputs)))
