"""Run an operation once for every k, with the k-th call of a kind failing (``shim.cc``, which is preloaded).

``python sweep.py FEW|ALL FOLDER OPERATION:KIND ...`` prints an object of JSON for each. Each time it must give what it
does without faults, or raise a named error and leave what was there as it was, and nothing else; and the next time,
without faults, it must give that. FEW: the first and last k and some between.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stores import SMALL

import torch_pi2
from torch_pi2.errors import Pi2Error
from torch_pi2.types.offload import OffloadConfig

#: What a call of a kind fails with: once, and from the k-th on.
ERRORS = {
    "open": (errno.EACCES, errno.EMFILE),
    "read": (errno.EIO, errno.EIO),
    "write": (errno.EIO, errno.ENOSPC),
    "fsync": (errno.EIO, errno.EIO),
    "name": (errno.EACCES, errno.EACCES),
    "size": (errno.ENOSPC, errno.ENOSPC),
    "map": (errno.ENOMEM, errno.ENOMEM),
    "memory": (errno.ENOMEM, errno.ENOMEM),
    "thread": (errno.EAGAIN, errno.EAGAIN),
    "kill": (0, 0),
}
ALL = 1 << 40
#: Kinds that removing files takes, too.
REMOVAL = ("open", "name")
#: Of FEW: so many first and last ones, and about so many between.
ENDS, BETWEEN = 2, 3
IDS = torch.arange(1, 13)[None]
PROMPT = torch.arange(1, 61)[None]

shim = ctypes.CDLL(None)


def contents(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` by what is in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(_content(path)).hexdigest() for path in files}


def _content(path: Path) -> bytes:
    """The library of safetensors writes a header in another order every time."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    parts = [header.pop("__metadata__", {})]
    for name in sorted(header):
        first, last = header[name].pop("data_offsets")
        parts.append([name, header[name], hashlib.sha256(data[begin + first : begin + last]).hexdigest()])
    return json.dumps(parts, sort_keys=True).encode()


class Operation:
    """``folder``: of files that count; nothing but this process uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self) -> None:
        """Before each time: as it was."""

    def run(self) -> Any:
        raise NotImplementedError

    def result(self, of_run: Any) -> Any:
        """What is compared, now that no fault is armed."""
        return of_run

    def same(self, one: Any, other: Any) -> bool:
        return bool(torch.equal(one, other))


class Reading(Operation):
    """One of ``READS``, over a store; with ``config`` there is no cache, so that everything is read every time."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self.read, self.store = READS[name], folder / "store"
        self.config = OffloadConfig(preload=False, io_threads=2, engine="pread")
        whole = torch_pi2.load(self.store, budget="1GiB", offload=self.config)
        self.budget = torch_pi2.stats(whole)["budget"].smallest
        self.model: Any = self.load() if name in ("generate", "prompt") else None

    def load(self) -> Any:
        return torch_pi2.load(self.store, budget=self.budget, offload=self.config)

    def run(self) -> torch.Tensor:
        return self.read(self)


READS: dict[str, Callable[[Reading], torch.Tensor]] = {
    "load": lambda op: logits(op.load(), IDS),
    "load-preloaded": lambda op: logits(torch_pi2.load(op.store, budget="1GiB"), IDS),
    "load-in-memory": lambda op: logits(torch_pi2.load(op.store), IDS),
    "generate": lambda op: op.model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0),
    "prompt": lambda op: logits(op.model, PROMPT),
}


class Writing(Operation):
    """Writes ``folder/out``, where something older is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.out, self.older = folder / "out", folder / "older"
        self.make_older()
        self.older_files = contents(self.older)

    def make_older(self) -> None:
        raise NotImplementedError

    def write(self) -> None:
        raise NotImplementedError

    def before(self) -> None:
        if self.out.exists() and contents(self.out) == self.older_files:
            return
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.older, self.out)

    def is_older(self, no_names: bool) -> bool:
        """``no_names``: nothing could be renamed any more, not even back: then the next call does that."""
        aside = self.folder / ".out.old"
        return contents(aside if no_names and not self.out.exists() else self.out) == self.older_files

    def run(self) -> None:
        self.write()

    def result(self, of_run: None) -> dict[str, str]:
        return contents(self.out)

    def same(self, one: Any, other: Any) -> bool:
        return bool(one == other)


class Pack(Writing):
    def make_older(self) -> None:
        torch_pi2.pack(self.folder / "plain", self.older, cluster=2)

    def write(self) -> None:
        torch_pi2.pack(self.folder / "plain", self.out)


class Save(Writing):
    def make_older(self) -> None:
        from tiny_models import tiny

        self.model, other = (torch_pi2.optimize(tiny("llama-relu", seed=seed), method="exact") for seed in (0, 1))
        torch_pi2.save(other, self.older)

    def write(self) -> None:
        torch_pi2.save(self.model, self.out)


OPERATIONS: dict[str, Callable[[Path], Operation]] = {
    **{name: partial(Reading, name=name) for name in READS},
    "pack": Pack,
    "save": Save,
}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def is_named(error: BaseException, kind: str) -> bool:
    return isinstance(error, Pi2Error) or (kind == "memory" and isinstance(error, MemoryError))


def moments(n: int, few: bool) -> Iterator[int]:
    if not few:
        yield from range(1, n + 1)
        return
    stride = max(1, n // BETWEEN)
    yield from sorted({k for k in range(1, n + 1) if k <= ENDS or k > n - ENDS or k % stride == 0})


def sweep(operation: Operation, kind: str, few: bool) -> dict[str, Any]:
    def attempt(k: int, count: int) -> tuple[Any, BaseException | None, int, int]:
        operation.before()
        error = result = None
        number = ERRORS[kind][count > 1]
        shim.pi2_fault_arm(
            kind.encode(), ctypes.c_long(k), ctypes.c_long(count), number, str(operation.folder).encode()
        )
        try:
            result = operation.run()
        except BaseException as found:
            error = found
        finally:
            shim.pi2_fault_disarm()
        result = operation.result(result) if error is None else None
        return result, error, shim.pi2_fault_seen(), shim.pi2_fault_hit()

    wanted, error, n, _ = attempt(ALL, 1)
    assert error is None, error
    before = {path.name for path in operation.folder.iterdir()}
    counts = {"calls": n, "tried": 0, "refused": 0, "made_good": 0}
    findings: list[str] = []
    for count in (1, ALL):
        for k in list(moments(n, few))[:: 3 if few and count > 1 else 1]:
            print(f"{kind} {k} of {n}, {count}", file=sys.stderr, flush=True)
            result, error, _, hit = attempt(k, count)
            if not hit:  # not as many this time
                continue
            what = f"{kind} {k} of {n}{'' if count == 1 else ' and all after it'}: "
            counts["tried"] += 1
            if error is None:
                counts["made_good"] += 1
                if not operation.same(result, wanted):
                    findings.append(what + "a wrong result")
            else:
                counts["refused"] += 1
                if not is_named(error, kind):
                    findings.append(what + f"{type(error).__name__}: {error}"[:300])
                if isinstance(operation, Writing) and not operation.is_older(count > 1 and kind == "name"):
                    findings.append(what + f"what was there is not as it was, after {error}"[:300])
            error = None
            gc.collect()
            # What failed may be the removal itself: the next call removes it then.
            left = {path.name for path in operation.folder.iterdir()} - before
            if left and kind not in REMOVAL:
                findings.append(what + f"left {sorted(left)}")
            operation.before()
            try:
                if not operation.same(operation.result(operation.run()), wanted):
                    findings.append(what + "the next time a wrong result")
            except Exception as found:
                findings.append(what + f"the next time {type(found).__name__}: {found}"[:300])
            left = {path.name for path in operation.folder.iterdir()} - before
            if left:
                findings.append(what + f"the next time left {sorted(left)}")
                for name in left:
                    shutil.rmtree(operation.folder / name, ignore_errors=True)
    return counts | {"findings": findings}


def stores(folder: Path) -> None:
    """``folder/plain``, a quantised model, and ``folder/store``, packed."""
    torch_pi2.synthetic(folder / "plain", SMALL | {"num_hidden_layers": 2}, active=0.2, rank=16, seed=0)
    torch_pi2.pack(folder / "plain", folder / "store")


def killed(operation: Writing, few: bool) -> dict[str, Any]:
    """The process is killed at the k-th write, fsync, name or size.

    Then there is what was there, nothing, or all of it; and the next process writes it, and removes what was left.
    """

    def child(k: int) -> int:
        """Exit status of a process of its own that runs it."""
        pid = os.fork()
        if pid == 0:
            shim.pi2_fault_arm(b"change", ctypes.c_long(k), ctypes.c_long(1), 0, str(operation.folder).encode())
            operation.run()
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    operation.before()
    before = {path.name for path in operation.folder.iterdir()}
    shim.pi2_fault_arm(b"change", ctypes.c_long(ALL), ctypes.c_long(1), 0, str(operation.folder).encode())
    operation.run()
    shim.pi2_fault_disarm()
    n, wanted = shim.pi2_fault_seen(), operation.result(None)
    counts = {"calls": n, "tried": 0, "refused": 0, "made_good": 0}
    findings = []
    for k in moments(n, few):
        print(f"kill {k} of {n}", file=sys.stderr, flush=True)
        what = f"killed at {k} of {n}: "
        operation.before()
        if child(k) != signal.SIGKILL:
            continue
        counts["tried"] += 1
        found = contents(operation.out) if operation.out.exists() else None
        counts["refused" if found != wanted else "made_good"] += 1
        if found not in (None, wanted, operation.older_files):
            findings.append(what + "what was there is damaged")
        status = child(ALL)
        if status != 0 or operation.result(None) != wanted:
            findings.append(what + f"the next time status {status}, or a wrong result")
        left = {path.name for path in operation.folder.iterdir()} - before
        if left:
            findings.append(what + f"the next time left {sorted(left)}")
    return counts | {"findings": findings}


def main() -> None:
    for counter in (shim.pi2_fault_seen, shim.pi2_fault_hit):
        counter.restype = ctypes.c_long
    how_many, root, *pairs = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable()
    # a child of the process has none of its other threads
    torch.set_num_threads(1 if any(pair.endswith(":kill") for pair in pairs) else 2)
    stores(Path(root, "base"))
    made: dict[str, Operation] = {}
    for pair in pairs:
        name, kind = pair.split(":")
        if name not in made:
            made[name] = OPERATIONS[name](Path(shutil.copytree(Path(root, "base"), Path(root, name))))
        few, operation = how_many == "FEW", made[name]
        if kind == "kill":
            assert isinstance(operation, Writing)
            found = killed(operation, few)
        else:
            found = sweep(operation, kind, few)
        print(json.dumps({"operation": name, "kind": kind} | found), flush=True)
    os._exit(0)  # nothing of what takes down the interpreter is tested here


if __name__ == "__main__":
    main()
