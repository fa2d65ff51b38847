"""What reading a drive takes: a file made for it, warmed up, read by every engine that there is."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from torch_pi2.base.files import not_written, scratch
from torch_pi2.errors import ArtifactError
from torch_pi2.machine.hardware import Interference
from torch_pi2.machine.reads import ReadRate, Reads, monotone, six_digits
from torch_pi2.measure.fit import Ready, median_us
from torch_pi2.ops.constants import lists

_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = (4 * _KIB, 8 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB)
_DEPTHS = (1, 4, 16, 64)
_STREAM_BLOCK, _STREAM_DEPTH = _MIB, 4
_LARGEST = 1 << 30
#: Passes over the file that agree so well have warmed up what lies below the page cache.
_AGREE = 0.15
_PASSES = 6
_TYPICAL = 8 * _KIB
#: Of each point, and how often it is measured.
_LEAST_S, _TAKES = 0.01, 3


class Drive:
    """A file in a folder on it; what lies below the page cache is warm if two passes over it took the same time."""

    def __init__(self, path: Path, nbytes: int, seconds: float) -> None:
        self.path, self.nbytes = path, nbytes
        self.direct = self._reads_directly()
        self.warm = False
        self.stream_gb_per_s = self._warm_up(seconds)

    def rate(self, engine: str, block: int, range_bytes: int, depth: int, seconds: float) -> tuple[float, float]:
        """Random reads a second, and CPU seconds of each; zeros: no such engine here."""
        found = torch.ops.pi2.read_rates(str(self.path), engine, self.direct, block, depth, range_bytes, False, seconds)
        reads, wall, cpu = found.tolist()
        return (reads / wall, cpu / reads) if reads and wall else (0.0, 0.0)

    def _reads_directly(self) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        try:
            os.close(os.open(self.path, os.O_RDONLY | flag))
            torch.ops.pi2.read_rates(str(self.path), "pread", True, 4 * _KIB, 1, 4 * _KIB, False, 1e-3)
        except (OSError, RuntimeError):  # RuntimeError: the operator's, of a file system that refuses at the first read
            return False
        return bool(flag)

    def _warm_up(self, seconds: float) -> float:
        """GB/s of passes over the whole file, until two agree or the time is over."""
        end, last = time.perf_counter() + seconds, 0.0
        for _ in range(_PASSES):
            started = time.perf_counter()
            reader = os.open(self.path, os.O_RDONLY)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(reader)
            per_s = self._pass()
            if last and abs(per_s / last - 1) < _AGREE:
                self.warm = True
                return six_digits(per_s)
            last = per_s
            if time.perf_counter() + (time.perf_counter() - started) > end:
                break
        return six_digits(last)

    def _pass(self) -> float:
        """The file once from beginning to end, on four threads' reads of a MiB; GB/s."""
        file = os.open(self.path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if self.direct else 0))

        def read(at: int) -> None:
            with mmap.mmap(-1, _STREAM_BLOCK) as into:  # aligned as direct reads want it
                os.preadv(file, [into], at)

        started = time.perf_counter()
        try:
            with ThreadPoolExecutor(_STREAM_DEPTH) as pool:
                list(pool.map(read, range(0, self.nbytes, _STREAM_BLOCK)))
        finally:
            os.close(file)
        return self.nbytes / (time.perf_counter() - started) / 1e9


@contextmanager
def drive(folder: Path, nbytes: int, seconds: float) -> Iterator[Drive]:
    """A file of ``nbytes`` random bytes in ``folder``, gone afterwards; of a quarter of the room where that is less.

    Raises:
        ArtifactError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        nbytes = min(nbytes, _LARGEST, free // 4) // _MIB * _MIB
        if nbytes < _MIB:
            raise ArtifactError(
                f"a file to be read in {folder}",
                expected=f"{4 * _MIB} free bytes or more",
                found=str(free),
                fix="Free some space, or name another folder: --measure-folder.",
            )
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
    """Tables of the engine that makes most small reads, over the whole file and over an eighth of it.

    Each figure is the median of ``_TAKES`` sweeps over all of them: a drive that others share has moments.
    """
    points, typical = list(product(_BLOCKS, _DEPTHS)), (_TYPICAL, _DEPTHS[-1])
    each = max(_LEAST_S, seconds / (2 * len(points) + len(lists().engines))) / _TAKES
    small = {name: _medians(drive, name, [typical], drive.nbytes, each) for name in lists().engines}
    small = {name: found for name, found in small.items() if found}  # others are not in this build, or forbidden
    best = max(small, key=lambda name: small[name][typical])
    rows = [
        ReadRate(block, reach, depth, per_s)
        for reach in (drive.nbytes, drive.nbytes // 8)
        for (block, depth), (per_s, _) in _medians(drive, best, points, reach, each).items()
    ]
    return Reads(
        engine=best,
        direct=drive.direct,
        warm=drive.warm,
        file_bytes=drive.nbytes,
        stream_gb_per_s=drive.stream_gb_per_s,
        cpu_us_per_read=six_digits(small[best][typical][1] * 1e6),
        engines={best: monotone(rows)},
    )


def _medians(
    drive: Drive, engine: str, points: Sequence[tuple[int, int]], range_bytes: int, seconds: float
) -> dict[tuple[int, int], tuple[float, float]]:
    """By block and depth, random reads a second and CPU seconds of each; nothing if there is no such engine here."""
    takes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for _ in range(_TAKES):
        for block, depth in points:
            found = drive.rate(engine, block, range_bytes, depth, seconds)
            if not found[0]:
                return {}
            takes.setdefault((block, depth), []).append(found)
    return {point: sorted(found)[len(found) // 2] for point, found in takes.items()}


def interference(drive: Drive, found: Reads, ready: Ready, seconds: float) -> Interference:
    """Neurons read as fast as the drive gives them, and ``ready``'s calls on all threads: alone, and both at once."""
    third = seconds / 3
    depth = found.best_depth(_TYPICAL, drive.nbytes)
    alone_us = median_us(ready, seconds=third)
    alone_per_s, _ = drive.rate(found.engine, _TYPICAL, drive.nbytes, depth, third)
    together: list[float] = []

    def read() -> None:
        together.append(drive.rate(found.engine, _TYPICAL, drive.nbytes, depth, third)[0])

    reader = threading.Thread(target=read)
    reader.start()
    both_us = median_us(ready, seconds=0.9 * third)
    reader.join()
    slower = alone_per_s / together[0] if together and together[0] else 1.0
    return Interference(six_digits(max(1.0, both_us / alone_us)), six_digits(max(1.0, slower)))
