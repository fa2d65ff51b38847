"""Starting the process that compiles, and what comes back from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_pi2 import errors
from torch_pi2.errors import CompileError, Pi2Error
from torch_pi2.export.hot import HotChunks
from torch_pi2.export.qnn import sdk
from torch_pi2.export.qnn.parts import PartInputs
from torch_pi2.export.qnn.settings import Settings

_MODULE = "torch_pi2.export.qnn.compile"


@dataclass(frozen=True)
class Compiled:
    """One layer: the quantised program, its context binary, the specification that goes with it, and a report."""

    program: torch.export.ExportedProgram
    context: bytes
    spec: bytes
    report: dict[str, Any]


@dataclass
class Job:
    """Layers to be compiled together, in a folder that :func:`folder` made."""

    folder: Path
    settings: Settings
    libraries: sdk.Libraries
    layers: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        name: str,
        hot: HotChunks,
        samples: torch.Tensor | None,
        graphs: Mapping[str, tuple[int, int]],
    ) -> None:
        """A layer with its calibration inputs; ``graphs``: name -> tokens and chunks."""
        torch.save((hot, samples), self.folder / f"{name}.pt")
        described = {graph: {"tokens": tokens, "chunks": chunks} for graph, (tokens, chunks) in graphs.items()}
        self.layers.append({"name": name, "graphs": described})

    def add_part(self, name: str, program: torch.export.ExportedProgram, inputs: PartInputs) -> None:
        """Another part of a decoder."""
        torch.export.save(program, self.folder / f"{name}.float.pt2")
        torch.save(inputs, self.folder / f"{name}.pt")
        graphs = {graph: {"shapes": [sizes for sizes, _ in shapes]} for graph, shapes in inputs.graphs.items()}
        self.layers.append({"name": name, "graphs": graphs})

    def run(self) -> tuple[str, dict[str, Compiled]]:
        """QNN's build, and every layer by name.

        Raises:
            VersionError: libraries and ExecuTorch do not fit together. CompileError: a layer was refused, took more
                than ``settings.timeout_s``, or crashed the process.
        """
        job = {
            "settings": asdict(self.settings),
            "libraries": str(self.libraries.folder),
            "origin": self.libraries.origin,
            "layers": self.layers,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        code = self._wait(sdk.environment(self.libraries, self.folder / "sdk"))
        if (self.folder / "error.json").is_file():
            raise _error(json.loads((self.folder / "error.json").read_text()))
        if code != 0 or not (self.folder / "done.json").is_file():
            raise self._failed(f"the process ended with {_ending(code)}: {self._tail()}")
        build = json.loads((self.folder / "done.json").read_text())["build"]
        return build, {layer["name"]: self._read(layer["name"]) for layer in self.layers}

    def _wait(self, environment: dict[str, str]) -> int:
        """The exit code of the process, which is killed when a layer (or the start) takes too long."""
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the compiler's own children die with it
            )
        done, since = 0, time.monotonic()
        try:
            while True:
                try:
                    return process.wait(0.2)
                except subprocess.TimeoutExpired:
                    finished = self._finished()
                    if finished > done:
                        done, since = finished, time.monotonic()
                    if time.monotonic() - since > self.settings.timeout_s:
                        raise self._failed(f"nothing after {self.settings.timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _finished(self) -> int:
        return sum((self.folder / f"{layer['name']}.json").is_file() for layer in self.layers)

    def _failed(self, how: str) -> CompileError:
        finished = self._finished()
        where = f"hot part of layer {self.layers[finished]['name']}" if finished < len(self.layers) else "its start"
        return CompileError(
            f"Qualcomm's compiler ({where})",
            expected=f"a context binary for {self.settings.soc}",
            found=how,
            fix="Compile fewer chunks, give it more memory or a longer timeout_s, or export with target='xnnpack'.",
        )

    def _tail(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip()[:200] for line in lines[-3:]) or "it printed nothing"

    def _read(self, name: str) -> Compiled:
        report = json.loads((self.folder / f"{name}.json").read_text())
        context, spec = ((self.folder / f"{name}.{kind}").read_bytes() for kind in ("context", "spec"))
        return Compiled(_load(self.folder / f"{name}.pt2"), context, spec, report)


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
    """Everything that stands in the way of compiling for ``soc``; empty: nothing. Each says how to mend it.

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
