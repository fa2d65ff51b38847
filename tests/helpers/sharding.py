"""Runs scripts in processes that each have a shard of a model, and compares their answers with one machine's."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared import shared_folder

import torch_pi2
from torch_pi2.decode.decoder import Decoder

FEW, MANY = torch.arange(1, 6)[None], torch.arange(1, 25)[None]

#: Scripts know ``rank``, ``ranks`` and ``out``, the folder of the run; their process group exists.
_BEGIN = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
rank, ranks, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = dist.FileStore(str(out / "group"), ranks)
dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=100), rank=rank, world_size=ranks)
"""

#: Imported once, in the process that scripts are forked from: it takes longer than most scripts.
_IMPORTED = ["torch._inductor.compile_fx", "transformers.models.llama.modeling_llama", "torch_pi2.api", "sharding"]


def _run(script: str, argv: list[str], said: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    try:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # threads of gloo's must not outlive it


def together(out: Path, script: str, ranks: int, *arguments: object, codes: list[int] | None = None) -> list[str]:
    """Run ``script`` in ``ranks`` processes, which have to end with ``codes`` (default: 0); returns what they print."""
    out.mkdir(exist_ok=True)
    copies = multiprocessing.get_context("forkserver")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:  # OpenMP reads it when it is imported
        patch.setenv("OMP_NUM_THREADS", "1")
        copies.set_forkserver_preload(_IMPORTED)
        started = []
        for rank in range(ranks):
            argv = ["script", str(rank), str(ranks), str(out), *map(str, arguments)]
            process = copies.Process(target=_run, args=(_BEGIN + script, argv, str(out / f"said-{rank}"), environment))
            process.start()
            started.append(process)
    for process in started:
        process.join(300)
    ended = [process.exitcode for process in started]  # None: it hangs
    for process in started:
        process.kill()
    said = [[(out / f"said-{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(ranks)]
    assert ended == (codes or [0] * ranks), said
    (out / "group").unlink(missing_ok=True)
    return [printed for printed, _ in said]


#: Arguments: folder, ``GroupConfig.reduction``, whether steps are compiled, and a budget. See :func:`check_answers`.
ANSWERS = """
import torch_pi2
from sharding import answers
reduction, how, budget = sys.argv[5:]
model = torch_pi2.load(sys.argv[4], group=torch_pi2.GroupConfig(reduction), budget=budget or None)
torch.save(answers(model, how == "compiled"), out / f"{rank}.pt")
"""


def saved(folder: Path, model: Any, **settings: Any) -> None:
    """``model``, optimised with ``settings`` (on ``text``), in ``plain``, and its ``store``."""
    optimised = torch_pi2.optimize(model, settings.pop("text", None), **settings)
    torch_pi2.save(optimised, folder / "plain")
    torch_pi2.pack(folder / "plain", folder / "store")


def made_in_parts(
    factory: pytest.TempPathFactory, name: str, made: Mapping[str, Callable[[Path], None]], **how: Any
) -> Path:
    """Folders of models by name, which ``made`` gives a ``store``: with its shards for ``2`` and ``3`` machines."""

    def make(base: Path) -> None:
        for model, write in made.items():
            folder = base / model
            folder.mkdir(parents=True)
            write(folder)
            for ranks in (2, 3):
                torch_pi2.pack(folder / "store", folder / str(ranks), ranks=ranks, **how)

    return shared_folder(factory, name, make)


def answers(model: Any, compiled: bool) -> dict[str, torch.Tensor]:
    """Logits of a few tokens, of many, and of steps after the few."""
    with torch.no_grad():
        found = {"few": model(FEW).logits, "many": model(MANY).logits}
    decoder = Decoder(model, max_tokens=64, compiled=compiled, logits=True)
    steps = [decoder.prompt(FEW)]
    for _ in range(20):
        steps.append(decoder.step(steps[-1].argmax(-1, keepdim=True)))
    return found | {"steps": torch.cat(steps)}


def result_of_one(store: Path, expression: str, before: str = "") -> Any:
    """``expression`` of the ``model`` in ``store``, after the lines ``before``, in one process as :func:`together` has.

    Float products of PyTorch have had other last bits in a process that had run thousands of tests.
    """
    script = f"""
import sharding, torch_pi2
{before}
model = torch_pi2.load(sys.argv[4], budget="1GiB")
torch.save({expression}, out / "found.pt")
"""
    with tempfile.TemporaryDirectory() as folder:
        together(Path(folder), script, 1, store)
        return torch.load(Path(folder) / "found.pt")


def answers_of_one(store: Path, compiled: bool = False) -> dict[str, torch.Tensor]:
    """The answers of a store on one machine."""
    return result_of_one(store, f"sharding.answers(model, {compiled})")


def check_answers(out: Path, ranks: int, wanted: dict[str, torch.Tensor], same: Collection[str]) -> None:
    """All processes have the same answers, near ``wanted``; those named in ``same`` have its bits."""
    found = [torch.load(out / f"{rank}.pt") for rank in range(ranks)]
    for name, tensor in wanted.items():
        first = found[0][name]
        assert all(torch.equal(other[name], first) for other in found[1:]), name
        if name in same:
            assert torch.equal(first, tensor), name
        else:
            torch.testing.assert_close(first, tensor, rtol=1e-3, atol=1e-3)


class Torchrun:
    """``torchrun -m torch_pi2 ...`` on this machine, which restarts all processes when one has ended.

    Its standard error goes to the file ``log``.
    """

    def __init__(self, log: Path, ranks: int, restarts: int, *command: object) -> None:
        self.log = log
        run = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *run, "-m", "torch_pi2", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, rank: int) -> None:
        """Send SIGKILL to process ``rank``."""
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                return
        raise AssertionError(f"no process {rank}: {self.log.read_text()}")

    def lost(self) -> list[int]:
        """Ranks that other processes have named as lost, in order."""
        return [int(rank) for rank in re.findall(r"found none of process (\d+)", self.log.read_text())]

    def end(self) -> int:
        """End it, as by Ctrl-C; returns its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=60)
