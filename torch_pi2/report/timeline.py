"""A trace (docs/TRACES.md) as the report shows it: threads over the whole of it, and every span of its densest part."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_pi2.base.reading import ROOM_BYTES, parse, read_bytes
from torch_pi2.errors import ArtifactError
from torch_pi2.observe.trace import STAGES
from torch_pi2.report.facts import Span, Timeline

#: Most spans that are drawn: more make a page slow on a phone.
MOST_SPANS = 2500
#: A trace may be large, and its events take some ten times their text.
_MOST_BYTES = 1 << 32
#: Pieces of equal length that the whole trace is summed up in.
_BINS = 150
#: What compute threads do, by stage of the trace; of spans inside one another the innermost counts.
ACTIVITIES = {
    "compute": "computing neurons",
    "reduce": "computing neurons",
    "predict": "predicting",
    "predict rows": "predicting",
    "linear": "linear layers",
    "linear rows": "linear layers",
    "attention": "attention",
    "begin": "cache and requests",
    "submit": "cache and requests",
    "wait": "waiting for reads",
    "join": "waiting for threads",
    "ffn": "rest of the layer",
}
_KNOWN = {name for name, _ in STAGES}
_Times = npt.NDArray[np.float64]


def read_trace(path: str | Path) -> Timeline:
    """The trace in ``path``. Raises ArtifactError: missing, damaged, or not one that :class:`torch_pi2.trace` wrote."""
    path = Path(path)
    try:
        text = read_bytes(path, most=_MOST_BYTES)
        data = parse(text, path, room=10 * len(text) + ROOM_BYTES, unique=False)
    except ArtifactError as error:
        raise _refused(path, error.found) from error
    try:
        return _Trace(data).timeline(path.name)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise _refused(path, f"damage ({type(error).__name__}: {error})") from error


def _refused(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        f"trace {path}",
        expected="a trace written by torch_pi2.trace, whole",
        found=found,
        fix="Record it again: torch-pi2 generate DIR --prompt TEXT --trace FILE.",
    )


class _Trace:
    """The events of a file, in milliseconds."""

    def __init__(self, data: Any) -> None:
        self.names: dict[int, str] = {}
        self.lost = int(data["otherData"]["lost_events"])
        spans: list[tuple[int, str, float, float, str]] = []
        open_reads: dict[tuple[int, int], tuple[float, str]] = {}
        self.bytes_read: list[tuple[float, float]] = []
        self.preads: list[tuple[float, float]] = []
        self.events = 0
        for event in data["traceEvents"]:
            kind, name, at = event["ph"], event["name"], float(event["ts"]) / 1e3
            if kind == "M":
                if name == "thread_name":
                    self.names[int(event["tid"])] = str(event["args"]["name"])
                continue
            self.events += kind != "e"
            if kind == "X":
                ms = float(event["dur"]) / 1e3
                spans.append((int(event["tid"]), name, at, ms, _note(event["args"])))
                if name == "pread":
                    self.preads.append((at + ms, float(event["args"].get("bytes", 0))))
            elif kind == "b":
                open_reads[event["tid"], event["id"]] = (at, _note(event["args"]))
            elif kind == "e":
                begin, note = open_reads.pop((event["tid"], event["id"]))
                spans.append((-1 - int(event["id"]), name, begin, at - begin, note))
            elif kind == "C" and name == "bytes read":
                self.bytes_read.append((at, float(event["args"]["bytes"])))
        if not any(name in _KNOWN for _, name, *_ in spans):
            raise ValueError("none of its spans is of a stage that torch_pi2 has")
        self.spans = sorted(spans, key=lambda s: (s[2], -s[3]))
        numbers = [*((s[2], s[3]) for s in self.spans), *self.bytes_read, *self.preads]
        if not np.isfinite(numbers).all() or min(ms for *_, ms, _ in spans) < 0:
            raise ValueError("times that are no times")
        self.begin = self.spans[0][2]
        self.end = max(s[2] + s[3] for s in self.spans)

    def timeline(self, where: str) -> Timeline:
        begin, end = self._window()
        shown = [s for s in self.spans if s[2] < end and s[2] + s[3] > begin]
        lanes = self._lanes([s[0] for s in shown])
        place = {lane: i for i, (lane, _) in enumerate(lanes)}
        edges = np.linspace(self.begin, self.end, _BINS + 1)
        return Timeline(
            where=where,
            total_ms=self.end - self.begin,
            events=self.events,
            lost=self.lost,
            lanes=tuple(name for _, name in lanes),
            begin_ms=begin - self.begin,
            end_ms=end - self.begin,
            spans=tuple(Span(s[1], place[s[0]], s[2] - self.begin, s[3], s[4]) for s in shown),
            bins=tuple((edges[1:] - self.begin).tolist()),
            busy=self._busy(edges),
            read_mb_per_s=self._read_rate(edges),
        )

    def _lanes(self, used: list[int]) -> list[tuple[int, str]]:
        """(lane, name): compute threads, then those of I/O, then the rows of reads."""
        threads = [(lane, self.names.get(lane, f"thread {lane}")) for lane in set(used) if lane >= 0]
        order = sorted(threads, key=lambda t: (not t[1].startswith("compute"), t[1].rstrip("0123456789"), t[0]))
        return [*order, *((lane, f"read {-1 - lane}") for lane in sorted({u for u in used if u < 0}, reverse=True))]

    def _window(self) -> tuple[float, float]:
        """The stretch in which most reads begin (most spans, if nothing is read), as long as its spans can be drawn."""
        begins = np.array([s[2] for s in self.spans])
        ends = np.sort([s[2] + s[3] for s in self.spans])
        reads = np.array([s[2] for s in self.spans if s[1] == "read"])
        dense = reads if len(reads) else begins
        length = self.end - self.begin
        while True:
            at = int(np.argmax(np.searchsorted(dense, dense + length) - np.arange(len(dense))))
            begin = float(dense[at]) if length < self.end - self.begin else self.begin
            begin = max(self.begin, min(begin, self.end - length))
            # Those that begin before its end, but for those that are over before it begins.
            inside = int(np.searchsorted(begins, begin + length) - np.searchsorted(ends, begin))
            if inside <= MOST_SPANS or length < 1e-3:
                return begin, begin + length
            length *= max(0.5, min(0.9, MOST_SPANS / inside))

    def _busy(self, edges: _Times) -> dict[str, tuple[float, ...]]:
        """Compute threads in each activity, on average, between neighbouring edges."""
        pieces: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for lane in {s[0] for s in self.spans if s[0] >= 0}:
            if self.names.get(lane, "").startswith("I/O"):
                continue
            for stage, begin, end in _innermost([s for s in self.spans if s[0] == lane]):
                pieces[ACTIVITIES.get(stage, "rest of the layer")].append((begin, end))
        width = edges[1] - edges[0]
        names = [name for name in dict.fromkeys(ACTIVITIES.values()) if name in pieces]
        return {name: tuple((_covered(pieces[name], edges) / max(width, 1e-9)).tolist()) for name in names}

    def _read_rate(self, edges: _Times) -> tuple[float, ...]:
        """MB/s between neighbouring edges, by the counter of bytes read, or by single reads where there is none."""
        rows = self.preads
        if self.bytes_read:
            counts = sorted(self.bytes_read)
            rows = [(b[0], max(0.0, b[1] - a[1])) for a, b in zip([(0.0, counts[0][1]), *counts], counts, strict=False)]
        sums, _ = np.histogram([at for at, _ in rows], edges, weights=[count for _, count in rows])
        seconds = max(float(edges[1] - edges[0]) / 1e3, 1e-9)
        return tuple((sums / 1e6 / seconds).tolist())


def _note(args: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in args.items())


def _innermost(spans: list[tuple[int, str, float, float, str]]) -> list[tuple[str, float, float]]:
    """(stage, begin, end) of a thread's time, each moment in the span that began last and is not over."""
    found: list[tuple[str, float, float]] = []
    inside: list[tuple[str, float]] = []  # stage, end
    now = 0.0

    def until(time: float) -> None:
        nonlocal now
        while inside and now < time:
            stage, end = inside[-1]
            if (stop := min(end, time)) > now:
                found.append((stage, now, stop))
                now = stop
            if end <= time:
                inside.pop()

    for _, stage, begin, ms, _ in spans:
        until(begin)
        now = max(now, begin)
        inside.append((stage, begin + ms))
    until(float("inf"))
    return found


def _covered(pieces: list[tuple[float, float]], edges: _Times) -> _Times:
    """Of each stretch between neighbouring edges, how much time the pieces have in it."""
    both = np.array(pieces)

    def before(times: _Times) -> _Times:
        """Sum over ``times`` of how long before each edge they are."""
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        return np.asarray(count * edges - sums[count])

    return np.diff(before(both[:, 0]) - before(both[:, 1]))
