"""Read rates of a drive: a test file is written, warmed up, and read by every available engine."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from torch_pi2.base.fields import Field
from torch_pi2.base.files import not_written, scratch
from torch_pi2.machine.reads import ReadRate, Reads, monotone, six_digits
from torch_pi2.ops.constants import lists

_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = (4 * _KIB, 8 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB)
_DEPTHS = (1, 4, 16, 64)
_STREAM_BLOCK, _STREAM_DEPTH = _MIB, 4
_LARGEST = 1 << 30
#: Relative difference of two passes that counts as warm, and most passes.
_AGREE = 0.15
_PASSES = 6
_TYPICAL = 8 * _KIB
#: Least seconds of a point, and sweeps over all points.
_LEAST_S, _TAKES = 0.01, 3


class Drive:
    """A test file on the drive; warm (caches below the page cache) if two passes were equally fast."""

    def __init__(self, path: Path, nbytes: int, seconds: float) -> None:
        self.path, self.nbytes = path, nbytes
        self.direct = self._reads_directly()
        self.warm, self.stream_gb_per_s = False, 0.0
        for _ in range(_PASSES):
            found = self.rate("pread", _STREAM_BLOCK, nbytes, _STREAM_DEPTH, seconds / _PASSES, sequential=True)
            before, self.stream_gb_per_s = self.stream_gb_per_s, six_digits(found[0] * _STREAM_BLOCK / 1e9)
            self.warm = before > 0 and abs(self.stream_gb_per_s / before - 1) < _AGREE
            if self.warm:
                break

    def rate(
        self, engine: str, block: int, range_bytes: int, depth: int, seconds: float, *, sequential: bool = False
    ) -> tuple[float, float]:
        """Reads a second, random unless ``sequential``, and CPU seconds of each; zeros if the engine is unavailable."""
        where = (str(self.path), engine, self.direct, block, depth, range_bytes, sequential, seconds)
        reads, wall, cpu = torch.ops.pi2.read_rates(*where).tolist()
        return (reads / wall, cpu / reads) if reads and wall else (0.0, 0.0)

    def _reads_directly(self) -> bool:
        try:
            torch.ops.pi2.read_rates(str(self.path), "pread", True, 4 * _KIB, 1, 4 * _KIB, False, 1e-3)
        except RuntimeError:  # file systems refuse at open or at the first read
            return False
        return hasattr(os, "O_DIRECT")


@contextmanager
def drive(folder: Path, nbytes: int, seconds: float) -> Iterator[Drive]:
    """A temporary file of ``nbytes`` random bytes in ``folder``, or a quarter of its space. Raises ArtifactError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        nbytes = min(nbytes, _LARGEST, free // 4) // _MIB * _MIB
        if nbytes < _MIB:
            fix = "Free some space, or name another folder: --measure-folder."
            Field(free, f"a file to be read in {folder}", fix).wrong(f"{4 * _MIB} free bytes or more", str(free))
        with scratch(folder, "pi2-measured-reads") as made, (made / "random").open("xb") as file:
            piece = os.urandom(min(16 * _MIB, nbytes))
            for start in range(0, nbytes, len(piece)):
                file.write(piece[: nbytes - start])
            file.flush()
            os.fsync(file.fileno())
            yield Drive(Path(file.name), nbytes, seconds)
    except OSError as error:
        raise not_written(folder, error) from error


def reads(drive: Drive, seconds: float) -> Reads:
    """Rates of the engine with the most small reads a second, in all and an eighth of the file; medians of sweeps."""
    points, typical = list(product(_BLOCKS, _DEPTHS)), (_TYPICAL, _DEPTHS[-1])
    each = max(_LEAST_S, seconds / (2 * len(points) + len(lists().engines))) / _TAKES
    small = {name: _medians(drive, name, [typical], drive.nbytes, each) for name in lists().engines}
    small = {name: found for name, found in small.items() if found}  # engines in this build and permitted
    best = max(small, key=lambda name: small[name][typical])
    rows = []
    for reach in (drive.nbytes, drive.nbytes // 8):
        found = _medians(drive, best, points, reach, each)
        rows += [ReadRate(block, reach, depth, per_s) for (block, depth), (per_s, _) in found.items()]
    own = {name: getattr(drive, name) for name in ("direct", "warm", "stream_gb_per_s")}
    cpu_us = six_digits(small[best][typical][1] * 1e6)
    return Reads(engine=best, file_bytes=drive.nbytes, cpu_us_per_read=cpu_us, rates=monotone(rows), **own)


def _medians(
    drive: Drive, engine: str, points: Sequence[tuple[int, int]], range_bytes: int, seconds: float
) -> dict[tuple[int, int], tuple[float, float]]:
    """(block, depth) -> random reads a second and CPU seconds of each; empty if the engine is unavailable."""
    takes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in range(_TAKES):
        for block, depth in points:
            found = drive.rate(engine, block, range_bytes, depth, seconds)
            if not found[0]:
                return {}
            takes.setdefault((block, depth), []).append(found)
    return {point: sorted(found)[len(found) // 2] for point, found in takes.items()}
