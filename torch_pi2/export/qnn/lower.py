"""Compile hot parts of a model into modules that call the compiled graphs.

Each layer's hot part is compiled separately, before the model is exported. Other partitioners cannot split or merge it,
ExecuTorch's passes for Qualcomm, which rewrite whole programs, see nothing else, and the compiler holds one layer at a
time. The compiler is single-threaded; as many processes run as cores and memory allow.
"""

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2 import errors
from torch_pi2.base.progress import bar
from torch_pi2.errors import CompileError, Pi2Error
from torch_pi2.export.executorch import EXECUTORCH, check_executorch
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn import sdk
from torch_pi2.export.qnn.quantize import PartInputs, hot_part, part_program
from torch_pi2.export.qnn.settings import Graph, Settings, how_to_avoid, title
from torch_pi2.machine.process import cores, free_bytes

_MODULE = "torch_pi2.export.qnn.compile"
#: Memory of a compiler process: fixed, and in sizes of its part in float32.
_PROCESS, _TIMES = 1 << 30, 6


@dataclass(frozen=True)
class Lowered:
    """Compiled parts of a decoder. ``modules``: graph -> name -> module: a call of ExecuTorch's QNN delegate for
    ``torch.export``; in PyTorch it computes in the compiled precision. ``quantized``: name -> the compiled part in
    PyTorch. ``report``: name -> bytes, groups of weights, quantisation error, and by graph input shapes and the
    compiler's DDR bytes per call. ``about``: versions.
    """

    modules: dict[str, dict[str, nn.Module]]
    quantized: dict[str, nn.Module]
    report: dict[str, dict[str, Any]]
    about: dict[str, str]


class CompiledHot(nn.Module):
    """One graph of a layer's context binary: ``[..., H] -> [..., H]`` for its fixed number of tokens."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(x.reshape(-1, x.shape[-1]))[0]
        return y.reshape(x.shape)


class CompiledPart(nn.Module):
    """One graph of a part's context binary, with the part's order of inputs and outputs."""

    def __init__(self, delegate: nn.Module, arguments: Sequence[int], results: Sequence[int]) -> None:
        super().__init__()
        self.delegate, self.arguments, self.results = delegate, arguments, results

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [inputs[i] for i in self.arguments]
        found = torch.ops.higher_order.executorch_call_delegate(self.delegate, *given)
        return tuple(found[i] for i in self.results)


def lower_hot(
    hot: Iterable[HotChunks],
    samples: Sequence[torch.Tensor | None],
    graphs: Mapping[str, Graph],
    settings: Settings,
    *,
    progress: bool = False,
) -> Lowered:
    """Quantise and compile the hot part of each layer, ``layer0`` and so on.

    ``modules`` map x ``[*shape, H]`` to the same shape; ``quantized`` map x ``[T, H]`` to a tuple of the sums of the
    first 1, 2, ... chunks. ``hot``: of each layer, float32, consumed one at a time. ``samples``: calibration inputs of
    each layer ``[..., H]``; None with fp16. ``graphs``: by method; ExecuTorch finds a graph by its method's name.

    Raises:
        ConfigError: unsupported SoC. LibraryMissingError, VersionError: see :func:`check`. NonFiniteError: see
            :func:`~torch_pi2.export.qnn.quantize.hot_part`. CompileError: the compiler refused a layer, crashed, or
            timed out.
    """

    def parts() -> Iterator[tuple[str, torch.export.ExportedProgram, PartInputs]]:
        for i, (layer, inputs) in enumerate(zip(hot, samples, strict=True)):
            sizes = {name: (math.prod(graph.shape), graph.chunks[i]) for name, graph in graphs.items()}
            yield f"layer{i}", *hot_part(layer, inputs, settings, sizes)

    lowered = lower_parts(parts(), settings, progress=progress)
    modules: dict[str, dict[str, nn.Module]] = {
        graph: {name: CompiledHot(part) for name, part in of_graph.items()}
        for graph, of_graph in lowered.modules.items()
    }
    return replace(lowered, modules=modules)


def lower_parts(
    parts: Iterable[tuple[str, torch.export.ExportedProgram, PartInputs]], settings: Settings, *, progress: bool = False
) -> Lowered:
    """Quantise and compile (name, program, inputs) of parts, consumed one at a time; raises as :func:`lower_hot`."""
    if found := problems(settings.soc):
        raise found[0]
    libraries, given, most = sdk.find(), dict[str, PartInputs](), 0
    with tempfile.TemporaryDirectory(prefix="torch-pi2-qnn-") as temporary:
        folder = Path(temporary)
        for name, program, given[name] in parts:
            path = folder / f"{name}.float.pt2"
            torch.export.save(program, path)
            torch.save(given[name], folder / f"{name}.pt")
            most = max(most, path.stat().st_size)
        build = compile_parts(folder, given, most, settings, libraries, progress=progress)
        compiled = {name: _read(folder, name) for name in given}
    about = {"qnn": build, "libraries": libraries.origin, "executorch": EXECUTORCH}
    modules: dict[str, dict[str, nn.Module]] = {}
    for name, inputs in given.items():
        one = compiled[name]
        for graph, shapes in inputs.graphs.items():
            facts = one.report["graphs"][graph]
            order = facts.get("arguments", [0]), facts.get("results", [0])
            program = part_program(one.program, shapes, inputs.outputs.get(graph), order)
            modules.setdefault(graph, {})[name] = CompiledPart(_delegate(program, one), *order)
    quantized: dict[str, nn.Module] = {name: c.program.module(check_guards=False) for name, c in compiled.items()}
    return Lowered(modules, quantized, {name: one.report for name, one in compiled.items()}, about)


def _delegate(program: torch.export.ExportedProgram, compiled: "Compiled") -> nn.Module:
    from executorch.backends.qualcomm.utils.constants import QCOM_QNN_COMPILE_SPEC
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    specs = [CompileSpec(QCOM_QNN_COMPILE_SPEC, compiled.spec)]
    delegate: Any = LoweredBackendModule(program, "QnnBackend", compiled.context, specs)
    delegate.meta = {"debug_handle_map": {}}
    return delegate


@dataclass(frozen=True)
class Compiled:
    """A part: the quantised program, its context binary and compile specification, and a report."""

    program: torch.export.ExportedProgram
    context: bytes
    spec: bytes
    report: dict[str, Any]


def _read(folder: Path, name: str) -> Compiled:
    import torchao.quantization.pt2e  # noqa: F401  quantisation operators

    program = torch.export.load(folder / f"{name}.pt2")
    context, spec = ((folder / f"{name}.{kind}").read_bytes() for kind in ("context", "spec"))
    return Compiled(program, context, spec, json.loads((folder / f"{name}.json").read_text()))


def compile_parts(
    folder: Path,
    parts: Mapping[str, PartInputs],
    part_bytes: int,
    settings: Settings,
    libraries: sdk.Libraries,
    *,
    progress: bool = False,
) -> str:
    """Compile the ``parts`` in ``folder``, the largest of ``part_bytes``, in processes. Returns QNN's build. Raises
    VersionError: libraries and ExecuTorch are incompatible. CompileError: a part was refused, took longer than
    ``settings.timeout_s``, or crashed; the other processes are killed.
    """
    count = workers(len(parts), part_bytes)
    environment = sdk.environment(libraries, folder / "sdk")
    environment["OMP_NUM_THREADS"] = str(max(1, cores() // count))
    job = {"settings": asdict(settings), "libraries": str(libraries.folder), "origin": libraries.origin}
    running: list[_Process] = []
    try:
        with bar(None, "compiling for the NPU", progress, total=len(parts), unit="part") as shown:
            for i in range(count):
                own = {name: parts[name] for name in [*parts][i::count]}
                running.append(_Process(folder / f"process{i}", own, settings, job, environment))
            while sum([process.is_running() for process in running]):  # polls every process
                shown.update(sum(process.finished() for process in running) - shown.n)
                time.sleep(0.1)
            shown.update(len(parts) - shown.n)
    finally:
        for process in running:
            process.end()
    return str(json.loads((running[0].folder / "done.json").read_text())["build"])


class _Process:
    """A process that compiles parts in turn; its ``folder`` is inside that of the parts."""

    def __init__(
        self, folder: Path, parts: Mapping[str, PartInputs], settings: Settings, job: Mapping, environment: dict
    ) -> None:
        self.folder, self.parts, self.settings = folder, parts, settings
        self.done, self.since = 0, time.monotonic()
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({**job, "parts": [*parts]}))
        with (folder / "log").open("wb") as log:
            how: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            how["start_new_session"] = True  # the compiler's own children die with it
            self.process = subprocess.Popen([sys.executable, "-m", _MODULE, str(folder)], **how)

    def is_running(self) -> bool:
        """Raises the process's error."""
        code, finished, timeout = self.process.poll(), self.finished(), self.settings.timeout_s
        if code is None:
            if finished > self.done:
                self.done, self.since = finished, time.monotonic()
            if time.monotonic() - self.since > timeout:
                raise self._failed(f"nothing after {timeout:g} s")
            return True
        if (self.folder / "error.json").is_file():
            facts = json.loads((self.folder / "error.json").read_text())
            raise getattr(errors, facts.pop("kind"))(facts.pop("what"), **facts)
        if code != 0 or not (self.folder / "done.json").is_file():
            lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
            tail = " | ".join(line.strip()[:200] for line in lines[-3:]) or "it printed nothing"
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            raise self._failed(f"the process ended with {how}: {tail}")
        return False

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finished(self) -> int:
        return sum((self.folder.parent / f"{name}.json").is_file() for name in self.parts)

    def _failed(self, how: str) -> CompileError:
        name = next(iter([*self.parts][self.finished() :]), "its end")
        graphs = self.parts[name].graphs if name in self.parts else ()
        what = f"Qualcomm's compiler ({title(name)}, graphs {', '.join(graphs)})"
        expected = f"a context binary for {self.settings.soc} in {self.settings.precision}"
        fix = f"{how_to_avoid(name)} Where it was killed, memory was short: free some."
        return CompileError(what, expected=expected, found=how, fix=fix)


def workers(parts: int, part_bytes: int) -> int:
    """Number of processes, limited by cores and memory."""
    free = free_bytes()
    fit = parts if free is None else free // (_PROCESS + _TIMES * part_bytes)
    return max(1, min(parts, cores(), fit))


@functools.cache
def check(soc: str) -> None:
    """Check SoC, host, versions and libraries, and compile a small layer. Raises the first of :func:`problems`."""
    lower_parts((), Settings(soc, timeout_s=300))


def problems(soc: str, *, compile: bool = False) -> list[Pi2Error]:
    """All problems that prevent compiling for ``soc``; ``compile``: also try a small layer (about 10 seconds)."""
    found: list[Pi2Error] = []
    for step in (lambda: sdk.check_soc(soc), sdk.check_host, check_executorch, sdk.find):
        try:
            step()
        except Pi2Error as error:
            found.append(error)
    if compile and not found:
        try:
            check(soc)
        except Pi2Error as error:
            found.append(error)
    return found
