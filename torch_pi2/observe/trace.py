"""Traces of all threads, for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

:class:`trace` records in the C++ core. A span costs some 0.2 microseconds while a trace runs, and one atomic load
otherwise. docs/TRACES.md describes lanes, stages and counters.
"""

import heapq
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.files import atomic_write, check_writable
from torch_pi2.base.progress import log
from torch_pi2.errors import Pi2Error
from torch_pi2.machine import process as machine
from torch_pi2.ops import load
from torch_pi2.ops.constants import constants

#: Name of each stage and of its two arguments, in the order of ``Stage`` in csrc/include/pi2/trace.h.
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ffn", ("layer", "tokens")),
    ("predict", ("neurons", "tokens")),
    ("linear", ("rows", "columns")),
    ("attention", ("keys", "tokens")),
    ("predict rows", ("block",)),
    ("linear rows", ("block",)),
    ("compute", ("layer", "chunk")),
    ("reduce", ("layer", "block")),
    ("begin", ("layer", "chunks")),
    ("submit", ("layer", "reads")),
    ("wait", ("layer",)),
    ("join", ("layer",)),
    ("verify", ("layer", "chunk")),
    ("pread", ("bytes", "offset")),
    ("read", ("layer", "chunk")),
)
#: Name and unit of each counter, in the order of ``TraceCounter`` there.
COUNTERS: tuple[tuple[str, str], ...] = (("reads under way", "reads"), ("bytes read", "bytes"))
COUNTERS += (("cache: hot", "bundles"), ("cache: cold", "bundles"))
_SPAN, _ASYNC, _COUNTER = range(3)

#: Default number of events kept per thread: some 10 MB when full.
CAPACITY = 1 << 18
_ROWS = 4096  #: Events converted to text at a time.


class Recording(ABC):
    """A recording from ``start`` to ``stop``, which writes a file; or of a ``with`` block."""

    @abstractmethod
    def start(self) -> Self:
        """Start recording."""

    @abstractmethod
    def stop(self) -> Path:
        """Stop recording, write the file and return its path."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.stop()
        except Pi2Error as unwritten:
            if error is None:
                raise
            error.add_note(str(unwritten))  # the block's own error is raised


class trace(Recording):
    """Record the work of compute and I/O threads, and write it as Chrome trace events when the block ends.

    ::

        with torch_pi2.trace("out.json"):
            model.generate(...)

    or ``t = torch_pi2.trace("out.json")``, ``t.start()``, ``t.stop()``. The whole process is recorded: all models and
    threads. The file is written even if the block raises, by atomic rename.

    Args:
        path: of the JSON file; an existing one is replaced.
        capacity: events kept per thread, 1 to 16777216; the oldest are dropped beyond that, and counted.

    Attributes:
        events, lost: numbers of events written and lost, after the end.

    Raises:
        ConfigError: another trace is running, ``capacity`` is out of range, or ``stop`` without ``start``.
        ArtifactError: ``path`` cannot be written; raised at once where possible.
    """

    @checked
    def __init__(self, path: str | Path, *, capacity: int = CAPACITY) -> None:
        most = constants().most_traced
        if not 1 <= capacity <= most:
            argument(capacity, "capacity", f"Leave it at {CAPACITY}.").wrong(f"1 to {most} events per thread")
        self.path, self.capacity = Path(path), capacity
        check_writable(self.path)
        self.events = self.lost = 0
        self._on = False

    def start(self) -> Self:
        load()
        if not torch.ops.pi2.trace_start(self.capacity):
            fix = "Stop that one first; it records the whole process."
            argument(self.path, f"trace {self.path}", fix).wrong("one trace at a time", "another one running")
        self._on = True
        return self

    def stop(self) -> Path:
        if not self._on:
            argument(self.path, f"trace {self.path}", "Call start().").wrong("one that was started", "one that was not")
        self._on = False
        events_N7: torch.Tensor = torch.ops.pi2.trace_stop()
        threads = [_Thread(*row) for row in torch.ops.pi2.trace_threads().tolist()]
        self.events, self.lost = len(events_N7), sum(thread.lost for thread in threads)
        if self.lost:
            log.warning(
                "%s: %d events were lost: more than %d on a thread; trace less, or pass a larger capacity",
                self.path, self.lost, self.capacity,
            )  # fmt: skip
        atomic_write(self.path, (text.encode() for text in _document(events_N7, threads)))
        return self.path

    def summary(self) -> dict[str, Any]:
        """JSON values: ``path``, ``events`` and ``lost_events``."""
        return {"path": str(self.path), "events": self.events, "lost_events": self.lost}


class _Thread(NamedTuple):
    """A lane: ``number`` (-1: threads without one), ``io`` (1: of a read engine), ``system_id``, ``lost`` events."""

    number: int
    io: int
    system_id: int
    lost: int


def _document(events_N7: torch.Tensor, threads: list[_Thread]) -> Iterator[str]:
    """The JSON text, in pieces."""
    about = {**machine.describe(), "events": len(events_N7), "lost_events": sum(thread.lost for thread in threads)}
    about["times"] = "microseconds since the first event"
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    yield ",\n".join(map(json.dumps, _names(threads)))
    for events in _pieces(events_N7):
        yield ",\n" + ",\n".join(map(json.dumps, events))
    yield "\n]}\n"


def _names(threads: list[_Thread]) -> Iterator[dict[str, Any]]:
    """Names of threads: compute threads first, then I/O threads, in the order of their first events."""

    def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": 1, "tid": tid, "args": args}

    yield named("process_name", 0, name="torch_pi2")
    lanes = sorted((thread for thread in threads if thread.number >= 0), key=lambda t: (t.io, t.number))
    counts = [0, 0]
    for place, lane in enumerate(lanes):
        name = f"{'I/O' if lane.io else 'compute'} {counts[lane.io]}"
        counts[lane.io] += 1
        tid = lane.number + 1  # 0 is the process's
        yield named("thread_name", tid, name=name, system_id=lane.system_id, lost_events=lane.lost)
        yield named("thread_sort_index", tid, sort_index=place)


def _pieces(events_N7: torch.Tensor) -> Iterator[list[dict[str, Any]]]:
    """Events in order of begin, the longer first, in lists of some thousands."""
    if len(events_N7) == 0:
        return
    begin_N, length_N = events_N7[:, 3], events_N7[:, 4]
    order_N = torch.argsort(length_N, descending=True, stable=True)
    order_N = order_N[torch.argsort(begin_N[order_N], stable=True)]
    zero = int(begin_N.min())
    depths = _Depths()
    for start in range(0, len(order_N), _ROWS):
        piece: list[dict[str, Any]] = []
        for thread, kind, stage, begin, length, *args in events_N7[order_N[start : start + _ROWS]].tolist():
            at = (begin - zero) / 1e3
            common = {"ts": at, "pid": 1, "tid": thread + 1}
            if kind == _COUNTER:
                name, unit = COUNTERS[stage]
                piece.append({"name": name, "ph": "C", **common, "args": {unit: args[0]}})
                continue
            name, keys = STAGES[stage]
            given = {key: value for key, value in zip(keys, args, strict=False) if value >= 0}
            if kind == _SPAN:
                piece.append({"name": name, "cat": "pi2", "ph": "X", **common, "dur": length / 1e3, "args": given})
                continue
            # reads share one track, each in the lowest free place: the height is the queue depth
            both = {"name": name, "cat": "io", "id": depths.place(begin, begin + length), "pid": 1, "tid": thread + 1}
            piece.append({**both, "ph": "b", "ts": at, "args": given})
            piece.append({**both, "ph": "e", "ts": at + length / 1e3})
        yield piece


class _Depths:
    """Assigns each span the lowest place that no overlapping span has; spans come in order of begin."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # end, place
        self._free: list[int] = []
        self._places = 0

    def place(self, begin: int, end: int) -> int:
        while self._taken and self._taken[0][0] < begin:
            heapq.heappush(self._free, heapq.heappop(self._taken)[1])
        if not self._free:
            heapq.heappush(self._free, self._places)
            self._places += 1
        place = heapq.heappop(self._free)
        heapq.heappush(self._taken, (end, place))
        return place
