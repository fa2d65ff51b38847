"""From the hot parts of a model to modules that stand for compiled graphs.

Each layer's hot part is compiled on its own, before the model is exported: no other partitioner can take a piece of it
or join it with its neighbours, ExecuTorch's passes for Qualcomm (which rewrite a whole program) see nothing else, and
only one layer at a time is in the compiler's memory.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2 import errors
from torch_pi2.base.progress import bar
from torch_pi2.decode.executorch import EXECUTORCH
from torch_pi2.errors import CompileError, ConfigError, Pi2Error
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn import sdk
from torch_pi2.export.qnn.quantize import PartInputs, check_calibration, graph_program, part_program
from torch_pi2.export.qnn.settings import REPORT_FORMAT, REPORT_VERSION, Graph, Settings, remediation, title
from torch_pi2.machine.process import cores, free_bytes

_MODULE = "torch_pi2.export.qnn.compile"

#: Memory of a process that compiles: in any case, and in sizes of its layer in float32.
_PROCESS, _TIMES = 1 << 30, 6


@dataclass(frozen=True)
class Compiled:
    """One layer: the quantised program, its context binary, the specification that goes with it, and a report."""

    program: torch.export.ExportedProgram
    context: bytes
    spec: bytes
    report: dict[str, Any]


@dataclass
class Job:
    """Layers to be compiled, in a temporary folder (:func:`job`).

    Attributes:
        bytes: of the floats of the largest layer so far.
    """

    folder: Path
    settings: Settings
    libraries: sdk.Libraries
    layers: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0

    def add(
        self,
        name: str,
        hot: HotChunks,
        samples: torch.Tensor | None,
        graphs: Mapping[str, tuple[int, int]],
    ) -> None:
        """A layer with its calibration inputs; ``graphs``: name -> tokens and chunks."""
        torch.save((hot, samples), self.folder / f"{name}.pt")
        self.bytes = max(self.bytes, sum(p.numel() * p.element_size() for p in hot.parameters()))
        described = {graph: {"tokens": tokens, "chunks": chunks} for graph, (tokens, chunks) in graphs.items()}
        self.layers.append({"name": name, "graphs": described})

    def add_part(self, name: str, program: torch.export.ExportedProgram, inputs: PartInputs) -> None:
        """Another part of a decoder."""
        torch.export.save(program, self.folder / f"{name}.float.pt2")
        torch.save(inputs, self.folder / f"{name}.pt")
        self.bytes = max(self.bytes, (self.folder / f"{name}.float.pt2").stat().st_size)
        graphs = {graph: {"shapes": [sizes for sizes, _ in shapes]} for graph, shapes in inputs.graphs.items()}
        self.layers.append({"name": name, "graphs": graphs})

    def run(self, *, progress: bool = False) -> tuple[str, dict[str, Compiled]]:
        """QNN's build, and every layer by name, in the order in which they were added.

        Args:
            progress: show how many layers are done (:mod:`torch_pi2.base.progress`).

        Raises:
            VersionError: libraries and ExecuTorch do not fit together. CompileError: a layer was refused, took more
                than ``settings.timeout_s``, or crashed its process. The other processes are ended then.
        """
        environment = sdk.environment(self.libraries, self.folder / "sdk")
        count = workers(len(self.layers), self.bytes)
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // count))
        shares = [self._share(i, self.layers[i::count]) for i in range(count)]
        try:
            with bar(None, "compiling for the NPU", progress, total=len(self.layers), unit="layer") as shown:
                for share in shares:
                    share.start(environment)
                while sum(share.running() for share in shares):  # of all: any() would stop at the first
                    shown.update(sum(share.finished() for share in shares) - shown.n)
                    time.sleep(0.1)
                shown.update(len(self.layers) - shown.n)
        finally:
            for share in shares:
                share.end()
        compiled = {name: found for share in shares for name, found in share.read().items()}
        return shares[0].build(), {layer["name"]: compiled[layer["name"]] for layer in self.layers}

    def _share(self, index: int, layers: list[dict[str, Any]]) -> _Share:
        folder = self.folder / f"process{index}"
        folder.mkdir()
        for layer in layers:
            for path in [*self.folder.glob(f"{layer['name']}.*")]:
                path.rename(folder / path.name)
        return _Share(folder, self.settings, self.libraries, layers)


@dataclass
class _Share:
    """The layers of one process, one after another."""

    folder: Path
    settings: Settings
    libraries: sdk.Libraries
    layers: list[dict[str, Any]]
    process: subprocess.Popen[bytes] | None = None
    done: int = 0
    since: float = 0.0

    def start(self, environment: dict[str, str]) -> None:
        job = {
            "settings": asdict(self.settings),
            "libraries": str(self.libraries.folder),
            "origin": self.libraries.origin,
            "layers": self.layers,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        self.since = time.monotonic()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the compiler's own children die with it
            )

    def running(self) -> bool:
        """Whether it is still at work. Raises what went wrong."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            finished = self.finished()
            if finished > self.done:
                self.done, self.since = finished, time.monotonic()
            if time.monotonic() - self.since > self.settings.timeout_s:
                raise self._failed(f"nothing after {self.settings.timeout_s:g} s")
            return True
        if (self.folder / "error.json").is_file():
            raise _error(json.loads((self.folder / "error.json").read_text()))
        if code != 0 or not (self.folder / "done.json").is_file():
            raise self._failed(f"the process ended with {_ending(code)}: {self._tail()}")
        return False

    def end(self) -> None:
        """Kill it if it is not done."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finished(self) -> int:
        return sum((self.folder / f"{layer['name']}.json").is_file() for layer in self.layers)

    def build(self) -> str:
        return str(json.loads((self.folder / "done.json").read_text())["build"])

    def read(self) -> dict[str, Compiled]:
        return {layer["name"]: self._read(layer["name"]) for layer in self.layers}

    def _failed(self, how: str) -> CompileError:
        remaining = self.layers[self.finished() :]
        where = f"{title(remaining[0]['name'])}, graphs {', '.join(remaining[0]['graphs'])}" if remaining else "its end"
        instead = remediation(remaining[0]["name"]) if remaining else "Export again."
        return CompileError(
            f"Qualcomm's compiler ({where})",
            expected=f"a context binary for {self.settings.soc} in {self.settings.precision}",
            found=how,
            fix=f"{instead} Where it was killed, memory was short: free some.",
        )

    def _tail(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip()[:200] for line in lines[-3:]) or "it printed nothing"

    def _read(self, name: str) -> Compiled:
        report = json.loads((self.folder / f"{name}.json").read_text())
        context, spec = ((self.folder / f"{name}.{kind}").read_bytes() for kind in ("context", "spec"))
        return Compiled(_load(self.folder / f"{name}.pt2"), context, spec, report)


def workers(layers: int, layer_bytes: int) -> int:
    """Processes that compile at a time: one a core, as many as find :data:`_PROCESS` and :data:`_TIMES` their layer."""
    free = free_bytes()
    fit = layers if free is None else free // (_PROCESS + _TIMES * layer_bytes)
    return max(1, min(layers, cores(), fit))


@contextmanager
def job(settings: Settings) -> Iterator[Job]:
    """An empty job in a temporary folder. Raises what :func:`sdk.find` and the other checks do."""
    sdk.check_soc(settings.soc)
    sdk.check_host()
    sdk.check_executorch()
    libraries = sdk.find()
    with tempfile.TemporaryDirectory(prefix="torch-pi2-qnn-") as folder:
        yield Job(Path(folder), settings, libraries)


def probe(soc: str) -> str:
    """Load the libraries and compile one small layer, in a process of its own. Returns QNN's build.

    Raises:
        LibraryMissingError, VersionError, CompileError: as :meth:`Job.run`.
    """
    with job(Settings(soc, timeout_s=300)) as one:
        return one.run()[0]


def _load(path: Path) -> torch.export.ExportedProgram:
    import torchao.quantization.pt2e  # noqa: F401  the program's quantisation operators

    return torch.export.load(path)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _error(facts: dict[str, str]) -> Pi2Error:
    kind = getattr(errors, facts.pop("kind"))
    made: Pi2Error = kind(facts.pop("what"), **facts)
    return made


def problems(soc: str, *, compile: bool = False) -> list[Pi2Error]:
    """All problems that prevent compiling for ``soc``; each says how to solve it.

    Args:
        soc: a part number, for instance ``SM8650``.
        compile: also load the libraries and compile one small layer, in a process of its own (some 10 seconds).
    """
    found: list[Pi2Error] = []
    for step in (lambda: sdk.check_soc(soc), sdk.check_host, sdk.check_executorch, sdk.find):
        try:
            step()
        except Pi2Error as error:
            found.append(error)
    if compile and not found:
        try:
            probe(soc)
        except Pi2Error as error:
            found.append(error)
    return found


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
