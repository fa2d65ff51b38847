"""Several processes that each have a shard of one model: started, and what they said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

#: ``rank``, ``ranks`` and ``out`` (where the others of the run write, too) are known in a script, and ``group`` begun.
_BEGIN = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
sys.path.insert(0, {helpers!r})
rank, ranks, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = dist.FileStore(str(out / "group"), ranks)
dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=100), rank=rank, world_size=ranks)
"""


def together(out: Path, script: str, ranks: int, *arguments: object, codes: list[int] | None = None) -> list[str]:
    """Run ``script`` in so many processes, each of which is to end with its code (default: 0 all); what they print."""
    out.mkdir(exist_ok=True)
    begin = _BEGIN.format(helpers=str(Path(__file__).parent))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", begin + script, str(rank), str(ranks), out, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert [code for *_, code in ended] == (codes or [0] * ranks), ended
    (out / "group").unlink(missing_ok=True)
    return [said for said, *_ in ended]


class Torchrun:
    """``torchrun -m torch_pi2 ...`` on this machine, which starts all processes again when one has ended.

    Its standard error goes to the file ``log``.
    """

    def __init__(
        self, log: Path, ranks: int, restarts: int, *command: object, stdout: int = subprocess.DEVNULL
    ) -> None:
        self.log = log
        run = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *run, "-m", "torch_pi2", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=file,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self, rank: int) -> None:
        """Process ``rank`` of those that run now, by SIGKILL."""
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                return
        raise AssertionError(f"no process {rank}: {self.log.read_text()}")

    def lost(self) -> list[int]:
        """Of the processes that others have named as lost, in their order, the numbers."""
        return [int(rank) for rank in re.findall(r"found none of process (\d+)", self.log.read_text())]

    def end(self) -> int:
        """Told to, as by Ctrl-C; the code that it ends with."""
        self.process.terminate()
        return self.process.wait(timeout=60)
