"""Several processes that each have a shard of one model: started, and what they said."""

from __future__ import annotations

import os
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
