"""The compiler process ``python -m torch_pi2.export.qnn.compile FOLDER``, started by :mod:`.lower`.

Qualcomm's libraries run in it because they print a lot, must be loaded after torch, and may crash.

FOLDER has ``job.json`` (:func:`torch_pi2.export.qnn.lower.compile_parts`). Its parent has each part,
``NAME.float.pt2``, with calibration inputs, ``NAME.pt``, and gets the quantised program ``NAME.pt2``, the context
binary ``NAME.context``, the compile specification ``NAME.spec`` and, last, ``NAME.json``. At the end FOLDER has
``done.json``, or ``error.json`` and exit code 1. Output goes to the file ``log``.
"""

import ctypes
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.fields import Field
from torch_pi2.base.files import atomic_write
from torch_pi2.errors import CompileError, Pi2Error, VersionError
from torch_pi2.export.executorch import EXECUTORCH
from torch_pi2.export.qnn import sdk
from torch_pi2.export.qnn.quantize import PartInputs, part_program, quantize_part
from torch_pi2.export.qnn.settings import Settings, how_to_avoid, title

_TRAFFIC = re.compile(
    rb"spill_bytes=(\d+)\s+fill_bytes=(\d+)\s+write_total_bytes=(\d+)\s+read_total_bytes=(\d+)", re.MULTILINE
)
_ERROR = re.compile(rb"^.*(?:<E>|\[ERROR\]).*$", re.MULTILINE)


class _Log:
    """Output since :meth:`mark`."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, 0

    def mark(self) -> None:
        self.start = self._flushed()

    def read(self) -> bytes:
        self._flushed()
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read()

    def _flushed(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
        return self.path.stat().st_size


def main(folder: Path) -> int:
    try:
        _run(folder)
    except Pi2Error as error:
        facts = {"expected": error.expected, "found": error.found, "fix": error.fix}
        atomic_write(folder / "error.json", json.dumps({"kind": type(error).__name__, "what": error.what, **facts}))
        return 1
    return 0


def _run(folder: Path) -> None:
    job, work = json.loads((folder / "job.json").read_text()), folder.parent
    settings, log = Settings(**job["settings"]), _Log(folder / "log")
    sdk.load(sdk.Libraries(Path(job["libraries"]), job["origin"]))
    from executorch.backends.qualcomm.utils.check_qnn_version import get_sdk_build_id

    build = str(get_sdk_build_id())
    _probe(settings, build, log)
    for name in job["parts"]:
        started = time.monotonic()
        inputs: PartInputs = torch.load(work / f"{name}.pt", weights_only=False)  # our own file
        quantized = quantize_part(torch.export.load(work / f"{name}.float.pt2"), inputs, settings)
        program, outputs = quantized.program, inputs.outputs
        programs = {graph: part_program(program, shapes, outputs.get(graph)) for graph, shapes in inputs.graphs.items()}
        facts = {"block": inputs.block, "errors": quantized.errors, "measured_tokens": quantized.tokens}
        torch.export.save(program, work / f"{name}.pt2")
        context, spec, graphs = _compile(name, programs, settings, log, convolutions=inputs.block > 0)
        for graph, shapes in inputs.graphs.items():
            graphs[graph]["shapes"] = [shape for shape, _ in shapes]
        atomic_write(work / f"{name}.context", context)
        atomic_write(work / f"{name}.spec", spec)
        seconds = round(time.monotonic() - started, 1)
        report = {"context_bytes": len(context), **facts, "graphs": graphs, "seconds": seconds}
        atomic_write(work / f"{name}.json", json.dumps(report))
    atomic_write(folder / "done.json", json.dumps({"build": build}))


def _probe(settings: Settings, build: str, log: _Log) -> None:
    """Compile a tiny layer, to check that ExecuTorch's adaptor and the libraries have the same ABI."""
    log.mark()
    linear = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
    program = torch.export.export(linear, (torch.zeros(1, 64),))
    try:
        _lower({"probe": program}, Settings(settings.soc, "fp16", weight_sharing=False))
    except Exception as error:
        what = "binary interface of Qualcomm's libraries"
        expected = f"one that ExecuTorch {EXECUTORCH} knows: QNN {', '.join(sdk.PACKAGE_VERSIONS.values())}"
        found = f"{build}, which compiles no layer of 64 neurons for {settings.soc}: {_reason(error, log)}"
        fix = f"pip install {sdk.PACKAGE}=={next(iter(sdk.PACKAGE_VERSIONS))} and unset QNN_SDK_ROOT."
        raise VersionError(what, expected=expected, found=found, fix=fix) from error


def _compile(
    name: str, programs: dict[str, torch.export.ExportedProgram], settings: Settings, log: _Log, *, convolutions: bool
) -> tuple[bytes, bytes, dict[str, dict[str, Any]]]:
    """Context binary, compile specification, and facts of each graph."""
    log.mark()
    what, fix = title(name), how_to_avoid(name)
    try:
        delegates, spec = _lower(programs, settings, convolutions=convolutions)
    except Pi2Error as error:
        raise CompileError(f"{what}, {error.what}", expected=error.expected, found=error.found, fix=fix) from error
    except Exception as error:
        expected = f"what Qualcomm's compiler takes for {settings.soc} in {settings.precision}, and memory for it"
        graphs_of = f"{what}, graphs {', '.join(programs)}"
        raise CompileError(graphs_of, expected=expected, found=_reason(error, log), fix=fix) from error
    contexts = {context for context, _ in delegates.values()}
    if len(contexts) != 1:
        fix = "Report it: this is a mistake of torch_pi2."
        Field(contexts, what, fix, CompileError).wrong("one context for all graphs", f"{len(contexts)}")
    traffic = _TRAFFIC.findall(log.read())
    names = ("spill_bytes", "fill_bytes", "write_bytes", "read_bytes")
    graphs = {graph: dict[str, Any](order) for graph, (_, order) in delegates.items()}
    if len(traffic) == len(programs):
        for graph, numbers in zip(graphs.values(), traffic):
            graph |= dict(zip(names, map(int, numbers)))
    return contexts.pop(), spec, graphs


def _lower(
    programs: dict[str, torch.export.ExportedProgram], settings: Settings, *, convolutions: bool = False
) -> tuple[dict[str, tuple[bytes, dict[str, list[int]]]], bytes]:
    """ExecuTorch's lowering to the HTP: :func:`_only_delegate` of each program, and the compile specification.

    ``convolutions``: linear layers become 1 x 1 convolutions, which the compiler requires for group scales.
    """
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils.utils import (
        generate_htp_compiler_spec,
        generate_qnn_executorch_compiler_spec,
        to_edge_transform_and_lower_to_qnn,
    )

    options = generate_htp_compiler_spec(
        use_fp16=settings.precision == "fp16", use_weight_sharing=settings.weight_sharing and len(programs) > 1
    )
    how: Any = {"soc_model": QcomChipset[settings.soc], "backend_options": options}
    specs = {name: generate_qnn_executorch_compiler_spec(**how) for name in programs}
    inputs = {name: tuple(program.example_inputs[0]) for name, program in programs.items()}
    modules = {name: program.module(check_guards=False) for name, program in programs.items()}
    manager = to_edge_transform_and_lower_to_qnn(modules, inputs, specs, convert_linear_to_conv2d=convolutions)
    spec = specs[next(iter(specs))][0].value
    return {name: _only_delegate(name, manager.exported_program(name), settings) for name in programs}, spec


def _only_delegate(name: str, program: torch.export.ExportedProgram, settings: Settings) -> tuple[bytes, dict]:
    """Context binary of a program that is one delegate; of several inputs, their order, too. Raises CompileError."""
    graph = program.graph_module
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    others = {str(n.target) for n in nodes if not str(n.target).endswith(("executorch_call_delegate", "getitem>"))}
    delegates = [child for child in graph.children() if hasattr(child, "processed_bytes")]
    if others or len(delegates) != 1:
        expected = f"operators that the NPU of {settings.soc} computes in {settings.precision}, in one piece"
        found = f"others: {', '.join(sorted(others))}" if others else f"{len(delegates)} pieces"
        raise CompileError(f"graph {name}", expected=expected, found=found, fix="Choose another precision.")
    (call,) = (node for node in nodes if str(node.target).endswith("executorch_call_delegate"))
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    (output,) = graph.graph.find_nodes(op="output")
    arguments, results = [given.index(x) for x in call.args[1:]], [y.args[1] for y in output.args[0]]
    order = {"arguments": arguments, "results": results} if len(arguments) > 1 else {}
    return bytes(delegates[0].processed_bytes), order


def _reason(error: Exception, log: _Log) -> str:
    """The message of ``error``, and the last errors that the libraries printed."""
    lines = [line.decode(errors="replace").strip() for line in _ERROR.findall(log.read())]
    text = str(error).strip().splitlines() or [type(error).__name__]
    return "; ".join([text[0][:400], *(line[:200] for line in lines[-3:])])


if __name__ == "__main__":
    os.environ.setdefault("QNN_SDK_ROOT", "")
    sys.exit(main(Path(sys.argv[1])))
