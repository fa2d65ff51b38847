"""A memory cap over processes: a group of the memory controller of cgroup v1, and files made ready for it.

Page cache belongs to the group that reads a page first, so a file is evicted before capped processes read it; what lies
below the page cache is warmed first by one sequential read past it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path
from types import TracebackType

from torch_pi2.errors import Pi2Error

CONTROLLER = Path("/sys/fs/cgroup/memory")
_BLOCK = 4 << 20
#: Seconds until a group whose processes have ended must be empty.
_EMPTY_S = 5.0


class CapError(Pi2Error):
    """This machine cannot cap the memory of a process."""


def available(controller: Path = CONTROLLER) -> bool:
    """Whether :class:`MemoryCap` can work: a v1 memory controller in which groups may be made."""
    return (controller / "memory.limit_in_bytes").is_file() and os.access(controller, os.W_OK)


class MemoryCap:
    """A group of at most ``limit`` bytes, page cache included, removed at the end of the ``with`` block.

    A process joins with :func:`join`, given ``folder``; the processes that it starts are in the group as well.

    Args:
        name: of one of several groups at a time.

    Attributes:
        folder: of the group.

    Raises:
        CapError: no v1 memory controller, no permission, or a limit that it refuses.
    """

    def __init__(self, limit: int, controller: Path = CONTROLLER, *, name: str = "") -> None:
        self.limit, self._controller = limit, controller
        self.folder = controller / f"pi2-bench-{os.getpid()}{name and '-'}{name}"

    def __enter__(self) -> MemoryCap:
        if not (self._controller / "memory.limit_in_bytes").is_file():
            raise CapError(
                "memory cap",
                expected=f"the memory controller of cgroup v1 in {self._controller}",
                found="none",
                fix="Mount it (mount -t cgroup -o memory cgroup DIR), or measure without a cap.",
            )
        try:
            self.folder.mkdir(exist_ok=True)  # one that a killed process of this number left
            (self.folder / "memory.limit_in_bytes").write_text(str(self.limit))
        except OSError as error:
            self._remove()
            raise CapError(
                "memory cap",
                expected=f"permission to make a group of {self.limit} bytes in {self._controller}",
                found=error.strerror or str(error),
                fix="Run it as root, or measure without a cap.",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def most_bytes(self) -> int:
        """The most that the group has had, page cache included."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    def _remove(self) -> None:
        end = time.monotonic() + _EMPTY_S
        while self.folder.is_dir():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > end:
                    return  # nothing more can be done; an error on the way here matters more
                self._let_go()
                time.sleep(0.05)

    def _let_go(self) -> None:
        """Move whoever is still in the group out of it: a group of processes cannot be removed."""
        with contextlib.suppress(OSError):
            for number in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self._controller / "cgroup.procs").write_text(number)


def join(folder: str | Path) -> None:
    """Put this process into the group in ``folder``. Raises CapError."""
    try:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise CapError(
            "memory cap",
            expected=f"a group in {folder} that may be joined",
            found=error.strerror or str(error),
            fix="Run it as root, or measure without a cap.",
        ) from error


def read_bytes() -> int | None:
    """Bytes that this process has had read from disks, by page faults too; None where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def warm(path: str | Path) -> str:
    """Read a file once from beginning to end, past the page cache if that works, and evict it from there.

    A virtual disk has caches of its own below the page cache: without this the first case pays for all.

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
    """Drop the clean pages of a file from the page cache, so that who reads them next is charged for them."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
