"""From the hot parts of a model to modules that stand for compiled graphs.

Each layer's hot part is compiled on its own, before the model is exported: no other partitioner can take a piece of it
or join it with its neighbours, ExecuTorch's passes for Qualcomm (which rewrite a whole program) see nothing else, and
only one layer at a time is in the compiler's memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.decode.executorch import EXECUTORCH
from torch_pi2.errors import ConfigError
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn.job import Compiled, Job, job, probe
from torch_pi2.export.qnn.quantize import PartInputs, check_calibration, graph_program, part_program
from torch_pi2.export.qnn.settings import REPORT_FORMAT, REPORT_VERSION, Graph, Settings


@dataclass(frozen=True)
class Lowered:
    """Compiled hot parts.

    Attributes:
        modules: graph -> for each layer a module x ``[*shape, H]`` -> the same shape, or None without hot chunks.
            ``torch.export`` keeps it as a call of ExecuTorch's QNN delegate; in PyTorch it computes in the precision
            that was compiled.
        quantized: for each layer what was compiled, in PyTorch: x ``[T, H]`` of any T -> a tuple of the sums of the
            first 1, 2, ... chunks; None: the layer has no hot part.
        report: versions, settings, and per layer: bytes, groups of weights or neurons with 8-bit weights, quantisation
            error, and for each graph its shape, chunks and DDR bytes per call as the compiler states them.
    """

    modules: dict[str, list[nn.Module | None]]
    quantized: Sequence[nn.Module | None]
    report: dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """Other compiled parts: graph -> name -> module; of each part what :class:`Lowered` reports of a layer."""

    modules: dict[str, dict[str, nn.Module]]
    report: dict[str, dict[str, Any]]


class CompiledHot(nn.Module):
    """One graph of one layer's context binary: ``[..., H] -> [..., H]``, as many tokens as it was compiled for."""

    def __init__(self, delegate: nn.Module) -> None:
        super().__init__()
        self.delegate = delegate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.higher_order.executorch_call_delegate(self.delegate, x.reshape(-1, x.shape[-1]))[0]
        return y.reshape(x.shape)


def check(settings: Settings) -> None:
    """Everything that can be known before any work: SoC, host, versions, libraries, and one small layer compiled.

    Raises:
        ConfigError: unsupported SoC. LibraryMissingError: no libraries; the message names their licence.
        VersionError: ExecuTorch or the libraries have a version that does not work.
    """
    _probed(settings.soc)


@functools.cache
def _probed(soc: str) -> str:
    return probe(soc)


def lower_hot(
    hot: Iterable[HotChunks | None],
    samples: Sequence[torch.Tensor | None],
    graphs: Mapping[str, Graph],
    settings: Settings,
    *,
    progress: bool = False,
) -> Lowered:
    """Quantise and compile the hot part of each layer.

    Args:
        hot: of each layer, float32, or None. They are consumed one at a time.
        samples: calibration inputs of each layer ``[..., H]`` (with fp16 they may be None).
        graphs: by the name of the method that they are for; ExecuTorch finds a graph by its method's name.
        progress: show how many layers are compiled.

    Raises:
        ConfigError: ``graphs`` and ``hot`` do not agree; unsupported SoC.
        LibraryMissingError, VersionError: as :func:`check`.
        CalibrationError, ShapeError, NonFiniteError: as :func:`~torch_pi2.export.qnn.quantize.quantize`.
        CompileError: the compiler refused a layer, crashed, or took too long.
    """
    _check_graphs(len(samples), graphs)
    with job(settings) as work:
        for i, (layer, inputs) in enumerate(zip(hot, samples, strict=True)):
            _add(work, i, layer, inputs, graphs)
        build, compiled = work.run(progress=progress)
        origin = work.libraries.origin
    layers = [compiled.get(_name(i)) for i in range(len(samples))]
    report = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        **asdict(settings),
        "qnn": build,
        "libraries": origin,
        "executorch": EXECUTORCH,
        "layers": [None if layer is None else layer.report for layer in layers],
    }
    modules = {
        name: [_module(layer, math.prod(graph.shape), graph.chunks[i]) for i, layer in enumerate(layers)]
        for name, graph in graphs.items()
    }
    quantized = [None if layer is None else layer.program.module(check_guards=False) for layer in layers]
    return Lowered(modules, quantized, report)


class CompiledPart(nn.Module):
    """One graph of a part's context binary, with the inputs and outputs of the part."""

    def __init__(self, delegate: nn.Module, arguments: Sequence[int], results: Sequence[int]) -> None:
        super().__init__()
        self.delegate, self.arguments, self.results = delegate, arguments, results

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [inputs[i] for i in self.arguments]
        found = torch.ops.higher_order.executorch_call_delegate(self.delegate, *given)
        return tuple(found[i] for i in self.results)


def lower_parts(
    parts: Iterable[tuple[str, torch.export.ExportedProgram, PartInputs]],
    settings: Settings,
    *,
    progress: bool = False,
) -> Parts:
    """Quantise and compile other parts of a decoder, consumed one at a time, each with its name and its inputs.

    Raises: as :func:`lower_hot`, but for what is of feed-forward layers.
    """
    graphs = {}
    with job(settings) as work:
        for name, program, inputs in parts:
            work.add_part(name, program, inputs)
            graphs[name] = inputs.graphs
        _, compiled = work.run(progress=progress)
    modules: dict[str, dict[str, nn.Module]] = {}
    for name, of_part in graphs.items():
        one = compiled[name]
        for graph, shapes in of_part.items():
            facts = one.report["graphs"][graph]
            order = facts.get("arguments", [0]), facts.get("results", [0])
            delegate = _delegate(part_program(one.program, shapes, order), one)
            modules.setdefault(graph, {})[name] = CompiledPart(delegate, *order)
    return Parts(modules, {name: one.report for name, one in compiled.items()})


def _add(work: Job, i: int, layer: HotChunks | None, samples: torch.Tensor | None, graphs: Mapping[str, Graph]) -> None:
    most = 0 if layer is None else len(layer.up)
    for name, graph in graphs.items():
        if not 0 <= graph.chunks[i] <= most:
            raise _wrong_graph(name, f"0 to {most} chunks of layer {i}", str(graph.chunks[i]))
    wanted = {name: (math.prod(graph.shape), graph.chunks[i]) for name, graph in graphs.items() if graph.chunks[i]}
    if layer is not None and wanted:
        check_calibration(layer, samples, work.settings)
        work.add(_name(i), layer, samples, wanted)


def _module(layer: Compiled | None, tokens: int, chunks: int) -> nn.Module | None:
    if layer is None or chunks == 0:
        return None
    return CompiledHot(_delegate(graph_program(layer.program, tokens, chunks), layer))


def _delegate(program: torch.export.ExportedProgram, compiled: Compiled) -> nn.Module:
    """ExecuTorch's module of a graph, which is found by the name of the method that calls it."""
    from executorch.backends.qualcomm.utils.constants import QCOM_QNN_COMPILE_SPEC
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    specs = [CompileSpec(QCOM_QNN_COMPILE_SPEC, compiled.spec)]
    delegate: Any = LoweredBackendModule(program, "QnnBackend", compiled.context, specs)
    delegate.meta = {"debug_handle_map": {}}
    return delegate  # type: ignore[no-any-return]


def _name(layer: int) -> str:
    return f"layer{layer}"


def _check_graphs(layers: int, graphs: Mapping[str, Graph]) -> None:
    for name, graph in graphs.items():
        if len(graph.chunks) != layers or not graph.shape or min(graph.shape) < 1:
            found = f"shape {tuple(graph.shape)}, chunks {list(graph.chunks)}"
            raise _wrong_graph(name, f"sizes of at least 1, and chunks for {layers} layers", found)


def _wrong_graph(name: str, expected: str, found: str) -> ConfigError:
    fix = "Give every graph the chunks of every layer."
    return ConfigError(f"graph {name} of the hot parts", expected=expected, found=found, fix=fix)
