"""``PrefixFolder``: blocks of keys and values in a folder, for servers that are started later, or beside this one.

Servers share a folder without knowing of each other: a file appears whole, by renaming, under a name that says what it
is of, and whoever wants room deletes those that nobody has used for longest (by their time of modification, which a
use sets anew). A file that is gone, cut or damaged is a block that is computed again.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch_pi2.base.files import claimed
from torch_pi2.base.tensorfile import ALIGNMENT, Spec
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.serve.prefix_file import Block, read_block, write_block

_log = logging.getLogger("torch_pi2")

_SUFFIX = ".prefix"
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(_SUFFIX)}")
#: Beside a file while it is written; what a killed process leaves (:mod:`torch_pi2.base.files`).
_LEFT = re.compile(rf"\.({_NAME.pattern})\.(?:partial|lock)")
#: So large a part of the budget may come from this server before it looks what others have written.
_LOOK_AFTER = 16


@dataclass
class FolderCounts:
    """Since the start, of blocks: ``read``; ``damaged``: deleted, and computed again; ``written``; ``skipped``: that
    were not written as too much waited, or could not be. ``bytes``: on disk, as last seen.
    """

    read: int = 0
    damaged: int = 0
    written: int = 0
    skipped: int = 0
    bytes: int = 0


class PrefixFolder:
    """Blocks in the folder ``path``, read at once and written by a thread of its own.

    Args:
        path: made for this user alone if it is not there.
        budget_bytes: on disk, at most (as far as other servers keep to it, too).
        identity: of what computes keys and values (:func:`torch_pi2.serve.identity.identity`).
        specs: of a block's tensors.
        waiting_bytes: of blocks that wait to be written, at most; what comes when there are more is not written.

    Attributes:
        identity, counts: see there.

    Raises:
        ConfigError: no folder that this user can write to and others cannot, or no room for a block.
    """

    def __init__(
        self, path: str | Path, budget_bytes: int, identity: str, specs: Sequence[Spec], *, waiting_bytes: int
    ) -> None:
        self.path, self.identity, self.counts = Path(path), identity, FolderCounts()
        self._budget_bytes, self._specs, self._waiting_bytes = budget_bytes, list(specs), waiting_bytes
        #: Of a file: its header is a page, and so may be what the end of its data is rounded up by.
        self._file_bytes = sum(spec.nbytes for spec in specs) + 2 * ALIGNMENT
        self._check()
        self._known = set[bytes]()  # names of files that there are, as far as is known
        self._doubted = False  # since one was damaged: whether another is sound is seen before it stays
        self._spoiled = set[bytes]()  # of which no use is made, as they cannot be read
        self._queue: deque[tuple[bytes, Block]] = deque()
        self._queued = dict[bytes, int]()
        self._since_look = 0
        self._changed, self._closing, self._warned = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run, name="pi2-prefixes", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self._budget_bytes < self._file_bytes:
            raise ConfigError(
                f"bytes of {self.path}",
                expected=f"{self._file_bytes} or more: those of a block of this model",
                found=str(self._budget_bytes),
                fix="Give it more.",
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            open_to_others = bool(self.path.stat().st_mode & 0o022)
            found = "one that others can write to" if open_to_others else None
            if self.path.stat().st_uid != os.geteuid():
                found = "one that another user owns"
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                found = "one that this user cannot write to"
        except OSError as error:
            found = str(error.strerror or error)
        if found is not None:
            raise ConfigError(
                f"folder {self.path}",
                expected="one that this user alone can write to: what is in it decides what answers say",
                found=found,
                fix="Name another, or chmod 700.",
            )

    def read(self, name: bytes) -> Block | None:
        """The block, as it was computed; None: it is not there, or is no more."""
        if name in self._spoiled:
            return None
        path = self._path(name)
        try:
            block = read_block(path, self._specs, self.identity, name.hex())
        except ArtifactError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self._spoil(name, error)
            return None
        self.counts.read += 1
        self.use(name)
        return block

    def _spoil(self, name: bytes, error: ArtifactError) -> None:
        """Say it, once, and delete the file, unless it is the system that cannot read it now."""
        self._spoiled.add(name)
        self._doubted = True
        self._count_damaged(name, error)
        with self._changed:
            self._known.clear()  # those after it were not looked at: who computes them writes them again
        _log.warning("a block of a prefix is computed again: %s", error)

    def _count_damaged(self, name: bytes, error: ArtifactError) -> None:
        """And delete it, unless it is the system that cannot read it now. Two threads may find the same one."""
        try:
            if not isinstance(error.__cause__, OSError):
                self._path(name).unlink()
        except FileNotFoundError:
            return
        except OSError:
            pass
        with self._changed:
            self.counts.damaged += 1

    def use(self, name: bytes) -> None:
        """It is used now, here or in memory: others go before it."""
        now_ns = time.time_ns()  # the file system's own times are coarser than one use after another
        with suppress(OSError):
            os.utime(self._path(name), ns=(now_ns, now_ns))

    def write(self, name: bytes, block: Block) -> None:
        """Have it written, if it is not there and not too much waits."""
        size = sum(tensor.nbytes for tensor in block)
        with self._changed:
            if self._closing or name in self._known or name in self._queued:
                return
            if sum(self._queued.values()) + size > self._waiting_bytes:
                self.counts.skipped += 1
                return
            self._queued[name] = size
            self._queue.append((name, block))
            self._changed.notify()

    def close(self, seconds: float = 30) -> None:
        """What waits is written, for as long as that takes, ``seconds`` at most; nothing more is."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            self._queue.clear()

    def _path(self, name: bytes) -> Path:
        return self.path / f"{name.hex()}{_SUFFIX}"

    # --- in the thread that writes ---

    def _run(self) -> None:
        self._in_order(self._clean)
        while True:
            with self._changed:
                while not (self._queue or self._closing):
                    self._changed.wait()
                if not self._queue:
                    return
                name, block = self._queue.popleft()
            self._in_order(self._write, name, block)
            with self._changed:
                self._queued.pop(name)

    def _in_order(self, do: Callable[..., None], *what: object) -> None:
        """Whatever goes wrong costs blocks, never the thread; said once."""
        try:
            do(*what)
        except Exception as error:
            self.counts.skipped += 1
            if not self._warned:
                _log.warning("blocks of prefixes are not kept in %s: %s", self.path, error)
            self._warned = True

    def _clean(self) -> None:
        """Remove what killed processes were writing, and have room."""
        for entry in os.listdir(self.path):
            left = _LEFT.fullmatch(entry)
            if left:
                with suppress(ArtifactError), claimed(self.path / left[1]):  # an error: somebody is writing it
                    pass
        self._look(0)

    def _write(self, name: bytes, block: Block) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)  # somebody may have deleted it
        self._since_look += self._file_bytes
        if (
            self.counts.bytes + self._file_bytes > self._budget_bytes
            or self._since_look * _LOOK_AFTER > self._budget_bytes
        ):
            self._look(self._file_bytes)
        path = self._path(name)
        if not path.is_file() or (self._doubted and not self._is_sound(name)):
            try:
                write_block(path, block, self.identity, name.hex())
            except ArtifactError as error:
                if error.__cause__ is None:  # another server is writing it
                    return
                raise
            self.counts.written += 1
            self.counts.bytes += _bytes_on_disk(path.stat())
        with self._changed:
            self._known.add(name)
        self._spoiled.discard(name)

    def _is_sound(self, name: bytes) -> bool:
        """Whether the file can be read; it is deleted if what is in it is damaged."""
        try:
            read_block(self._path(name), self._specs, self.identity, name.hex())
        except ArtifactError as error:
            if not isinstance(error.__cause__, OSError):
                self._count_damaged(name, error)
            return False
        return True

    def _look(self, wanted_bytes: int) -> None:
        """See what there is, and delete what has not been used for longest until so much has room."""
        found: list[tuple[int, int, str]] = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, _bytes_on_disk(status), entry.name))
        total = sum(size for _, size, _ in found)
        known = {name for _, _, name in found}
        for _, size, name in sorted(found):
            if total + wanted_bytes <= self._budget_bytes:
                break
            with suppress(OSError):  # no file, or one that cannot be deleted: the next
                (self.path / name).unlink(missing_ok=True)
                total -= size
                known.discard(name)
        with self._changed:
            self._known = {bytes.fromhex(name.removesuffix(_SUFFIX)) for name in known}
        self.counts.bytes, self._since_look = total, 0


def _bytes_on_disk(status: os.stat_result) -> int:
    return status.st_blocks * 512
