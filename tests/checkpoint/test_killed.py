"""What is left when a process that writes is killed, has company, or finds no room: nothing that stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

import torch_pi2
from torch_pi2.base.files import atomic_write
from torch_pi2.errors import ArtifactError
from torch_pi2.export.settings import check_bundle_folder
from torch_pi2.fitting.resume import work_folder
from torch_pi2.training.sparsify import _check_out

#: Imports once, and forks for each process that is to be killed.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch_pi2", "transformers.models.llama.modeling_llama"])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``float``: a checkpoint. ``neuron_rows``: a quantised folder. ``store``: a packed one."""
    root = tmp_path_factory.mktemp("sources")
    tiny("llama-relu").save_pretrained(root / "float")
    torch_pi2.quantize(root / "float", root / "bundles")
    torch_pi2.pack(root / "bundles", root / "store")
    return root


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda sources, out: torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), out),
    "save quantised": lambda sources, out: torch_pi2.save(torch_pi2.optimize(tiny("llama-relu"), weights="int4"), out),
    "quantize": lambda sources, out: torch_pi2.quantize(sources / "float", out),
    "pack float": lambda sources, out: torch_pi2.pack(sources / "float", out),
    "pack bundles": lambda sources, out: torch_pi2.pack(sources / "bundles", out),
    "pack quantised": lambda sources, out: torch_pi2.pack(sources / "float", out, weights="int4"),
    "pack in stages": lambda sources, out: torch_pi2.pack(sources / "float", out, ranks=2, by="layers"),
    "synthetic": lambda sources, out: torch_pi2.synthetic(out, "tiny", layers=1, rank=8),
}


def _is_step(event: str, arguments: tuple[Any, ...], out: Path) -> bool:
    """Whether writing ``out`` goes on: something there is opened to be written, made, renamed or removed."""
    opened = event == "open" and arguments[2] & os.O_CREAT
    step = opened or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
    return bool(step) and str(arguments[0]).startswith(str(out.parent))


def _child(writer: str, sources: Path, out: Path, kill_at: int, steps: Any) -> None:
    torch.set_num_threads(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if _is_step(event, arguments, out):
            steps.value += 1
            if steps.value == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    WRITERS[writer](sources, out)


def _run(writer: str, sources: Path, out: Path, kill_at: int) -> tuple[int, int]:
    """Exit code of a process that writes ``out``, and how many steps it took; it is killed at the last."""
    steps = _FORKS.Value("i", 0)
    process = _FORKS.Process(target=_child, args=(writer, sources, out, kill_at, steps))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, steps.value


#: Where the hook of this process counts steps: an audit hook cannot be taken away again.
_counted: list[tuple[Path, list[str]]] = []


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    for out, seen in _counted:
        if _is_step(event, arguments, out):
            seen.append(event)


sys.addaudithook(_count)


def steps_of(writer: str, sources: Path, out: Path) -> int:
    """How many steps it takes to write ``out``, which is done."""
    _counted[:] = [(out, [])]
    try:
        WRITERS[writer](sources, out)
        return len(_counted[0][1])
    finally:
        _counted.clear()


#: Writers in the fast run; the others take seconds each.
FAST = ("pack float",)


@pytest.mark.parametrize(
    "writer", [writer if writer in FAST else pytest.param(writer, marks=pytest.mark.slow) for writer in WRITERS]
)
def test_what_a_killed_process_leaves_the_next_one_removes(sources: Path, tmp_path: Path, writer: str) -> None:
    steps = steps_of(writer, sources, tmp_path / "whole" / "out")
    out = tmp_path / "killed" / "out"
    assert _run(writer, sources, out, steps - 2) == (-signal.SIGKILL, steps - 2)
    assert names(out.parent) != names(tmp_path / "whole")
    WRITERS[writer](sources, out)
    assert names(out.parent) == names(tmp_path / "whole")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
def test_another_writer_of_the_same_folder_removes_it_too(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = steps_of("pack float", sources, tmp_path / "whole")
    assert _run("pack float", sources, out, steps - 2)[0] == -signal.SIGKILL
    left = sum(path.stat().st_size for path in tmp_path.glob(".out.*/**/*") if path.is_file())
    assert left > (sources / "float" / "model.safetensors").stat().st_size / 2, "nothing was left to be removed"
    torch_pi2.pack(sources / "store", out)
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def _racer(sources: Path, out: Path, start: Any, told: Any) -> None:
    torch.set_num_threads(1)
    start.wait()
    try:
        torch_pi2.pack(sources / "float", out)
        told.put("done")
    except ArtifactError as error:
        told.put(str(error))
    except BaseException as error:
        told.put(repr(error))


@pytest.mark.slow
def test_of_three_that_pack_to_one_folder_one_wins(sources: Path, tmp_path: Path) -> None:
    start, told = _FORKS.Barrier(3), _FORKS.Queue()
    racers = [_FORKS.Process(target=_racer, args=(sources, tmp_path / "out", start, told)) for _ in range(3)]
    for racer in racers:
        racer.start()
    said = [told.get() for _ in racers]
    for racer in racers:
        racer.join()
    assert "done" in said
    refused = [text for text in said if text != "done"]
    message = "expected no other process that writes it, found one that has locked .out.lock. Wait for it"
    assert all(text.startswith(f"writing {tmp_path / 'out'}") and message in text for text in refused), refused
    assert os.listdir(tmp_path) == ["out"]
    torch_pi2.pack(sources / "float", tmp_path / "alone")
    store = Path("pi2") / "model.pi2"
    assert (tmp_path / "out" / store).read_bytes() == (tmp_path / "alone" / store).read_bytes()


def _is_killed_while_it_writes(path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        os.kill(os.getpid(), signal.SIGKILL)

    atomic_write(path, pieces())


#: File of a folder -> what its next writer checks first, or does.
INSIDE: dict[str, Callable[[Path], object]] = {
    "begun.json": lambda folder: work_folder(folder, {"text": "a"}).__enter__(),
    "pi2/verdict.json": lambda folder: torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), folder),
    "manifest.json": check_bundle_folder,
    "config.json": _check_out,
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_left_within_a_folder_does_not_stop_its_next_writer(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    if "save" in INSIDE[name].__code__.co_names:
        INSIDE[name](folder)
    process = _FORKS.Process(target=_is_killed_while_it_writes, args=(folder / name,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(folder.rglob(".*.partial")), "nothing was left"
    INSIDE[name](folder)


def _hold(out: Path, held: Any) -> None:
    from torch_pi2.base.files import claimed

    with claimed(out):
        held.set()
        time.sleep(0.3)


def test_a_file_waits_for_another_that_is_being_written(tmp_path: Path) -> None:
    held = _FORKS.Event()
    process = _FORKS.Process(target=_hold, args=(tmp_path / "a.json", held))
    process.start()
    held.wait()
    atomic_write(tmp_path / "a.json", "mine")
    process.join()
    assert (tmp_path / "a.json").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a.json"]
