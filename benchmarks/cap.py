"""Memory and CPU caps on processes by groups of cgroup v1, and the state of files before they are read.

Page cache counts for the group that reads a page first, so a file is evicted before capped processes read it. Caches
below the page cache, such as those of a virtual disk, are warmed by one sequential read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch_pi2.errors import Pi2Error

CONTROLLER, CPU = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cpu")
_LIMIT = "memory.limit_in_bytes"
#: Microseconds, the least that Linux gives a group.
_LEAST_QUOTA_US = 1000
_BLOCK = 4 << 20
#: Seconds until a group whose processes have ended must be empty.
_EMPTY_S = 5.0


class CapError(Pi2Error):
    """This machine cannot cap a process."""


def available(controller: Path = CONTROLLER) -> bool:
    """Whether :class:`MemoryCap` can work: a v1 memory controller in which groups may be made."""
    return (controller / _LIMIT).is_file() and os.access(controller, os.W_OK)


class _Cap:
    """A group of one controller, removed at the end of the ``with`` block.

    A process joins with :func:`join`, given ``folder``; the processes that it starts are in the group as well.

    Args:
        of: what is capped, in words. controller: its folder. values: of files of the group, in this order.
        name: distinguishes several groups at a time.

    Attributes:
        folder: of the group.

    Raises:
        CapError: no such controller of cgroup v1, no permission, or a value that it refuses.
    """

    def __init__(self, of: str, controller: Path, values: Mapping[str, int], name: str) -> None:
        self._of, self._values, self._controller = of, values, controller
        self.folder = controller / f"pi2-bench-{os.getpid()}{name and '-'}{name}"

    def __enter__(self) -> Self:
        if not all((self._controller / file).is_file() for file in self._values):
            raise CapError(
                f"{self._of} cap",
                expected=f"the {self._of} controller of cgroup v1 in {self._controller}",
                found="none",
                fix=f"Mount it (mount -t cgroup -o {self._of} cgroup DIR), or measure without a cap.",
            )
        try:
            self.folder.mkdir(exist_ok=True)  # may be left over from a killed process of this number
            for file, value in self._values.items():
                (self.folder / file).write_text(str(value))
        except OSError as error:
            self._remove()
            raise CapError(
                f"{self._of} cap",
                expected=f"permission to make a group in {self._controller} with {self._values}",
                found=error.strerror or str(error),
                fix="Run it as root, or measure without a cap.",
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        end = time.monotonic() + _EMPTY_S
        while self.folder.is_dir() and time.monotonic() < end:  # a process of it may be ending
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.05)


class MemoryCap(_Cap):
    """A group of at most ``limit`` bytes, page cache included."""

    def __init__(self, limit: int, controller: Path = CONTROLLER, *, name: str = "") -> None:
        super().__init__("memory", controller, {_LIMIT: limit}, name)

    def most_bytes(self) -> int:
        """Peak memory of the group, page cache included."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())


class CpuCap(_Cap):
    """A group with at most ``share`` of a core, in slices as short as the system allows."""

    def __init__(self, share: float, controller: Path = CPU, *, name: str = "") -> None:
        values = {"cpu.cfs_period_us": round(_LEAST_QUOTA_US / share), "cpu.cfs_quota_us": _LEAST_QUOTA_US}
        super().__init__("cpu", controller, values, name)


def join(folder: str | Path) -> None:
    """Put this process into the group in ``folder``. Raises CapError."""
    try:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        fix = "Run it as root, or measure without a cap."
        expected = f"a group in {folder} that may be joined"
        raise CapError("cap", expected=expected, found=error.strerror or str(error), fix=fix) from error


def read_bytes() -> int | None:
    """Bytes read from disks for this process, page faults included; None where the system does not report them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def warm(path: str | Path) -> str:
    """Read a file once, past the page cache if that works, and evict it: otherwise the first case would be slower.

    Returns:
        ``direct``, or ``buffered`` where the file system refuses direct reads.
    """
    how, flags = "direct", os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        _read_through(path, flags)
    except OSError:
        how = "buffered"
        _read_through(path, os.O_RDONLY)
    evict(path)
    return how


def _read_through(path: str | Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        with mmap.mmap(-1, _BLOCK) as block:  # aligned as direct reads want it
            at = 0
            while count := os.preadv(file, [block], at):
                at += count
                if count % mmap.PAGESIZE:
                    break  # the end of the file
    finally:
        os.close(file)


def evict(path: str | Path) -> None:
    """Drop the clean pages of a file from the page cache, so that the next reader is charged for them."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def reset_peak() -> None:
    """Reset :func:`peak_rss_bytes` (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since :func:`reset_peak`."""
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "", re.MULTILINE)
    if peak:
        return int(peak.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
