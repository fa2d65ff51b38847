"""What runs of the model recorded: a trace of threads and reads, and accesses to replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_pi2.base.reading import ROOM_BYTES, parse, read_bytes
from torch_pi2.errors import ArtifactError, check_made_from
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.replay import OPTIMAL, replay_all
from torch_pi2.observe.trace import STAGES

#: A trace may be large, and its events take some ten times their text.
_MOST_BYTES = 1 << 32
#: Equal pieces that the whole trace is summed up in, and moments of each at which threads are looked at.
_BINS, _MOMENTS = 150, 200
#: What compute threads do, by stage of the trace; of nested spans the innermost counts.
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
#: Cache policies that are compared, beside the run's.
_POLICIES = ("lru", "lfu", OPTIMAL)
_SIZES = 10
_Times = npt.NDArray[np.float64]
#: Thread, stage, begin and length in milliseconds.
_Span = tuple[int, str, float, float]


def read_trace(path: str | Path) -> dict[str, Any]:
    """The trace in ``path``, summed up.

    Returns:
        ``bins``: upper ends of equal pieces of the trace, in ms; in each piece ``busy``: activity -> mean number of
        compute threads in it, and ``read_mb_per_s``.

    Raises:
        ArtifactError: missing, damaged, or not written by :class:`torch_pi2.trace`.
    """
    path = Path(path)
    try:
        text = read_bytes(path, most=_MOST_BYTES)
        data = parse(text, path, room=10 * len(text) + ROOM_BYTES, unique=False)
        return _timeline(data)
    except (ArtifactError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ArtifactError(
            f"trace {path}",
            expected="a trace written by torch_pi2.trace, whole",
            found=getattr(error, "found", f"damage ({type(error).__name__}: {error})"),
            fix="Record it again: torch-pi2 generate DIR --prompt TEXT --trace FILE.",
        ) from error


def _timeline(data: Any) -> dict[str, Any]:
    names: dict[int, str] = {}
    spans: list[_Span] = []
    counted: list[tuple[float, float]] = []
    events = 0
    for event in data["traceEvents"]:
        kind, name, at = event["ph"], event["name"], float(event["ts"]) / 1e3
        events += kind not in ("M", "e")
        if kind == "M" and name == "thread_name":
            names[int(event["tid"])] = str(event["args"]["name"])
        elif kind == "X":
            spans.append((int(event["tid"]), name, at, float(event["dur"]) / 1e3))
        elif kind == "C" and name == "bytes read":
            counted.append((at, float(event["args"]["bytes"])))
    known = {name for name, _ in STAGES}
    if not any(name in known for _, name, *_ in spans):
        raise ValueError("none of its spans is of a stage that torch_pi2 has")
    spans.sort(key=lambda s: (s[2], -s[3]))
    if not np.isfinite([*((s[2], s[3]) for s in spans), *counted]).all() or min(s[3] for s in spans) < 0:
        raise ValueError("times that are not finite, or negative")
    begin, end = spans[0][2], max(s[2] + s[3] for s in spans)
    edges = np.linspace(begin, end, _BINS + 1)
    return {
        "total_ms": end - begin,
        "events": events,
        "lost": int(data["otherData"]["lost_events"]),
        "bins": (edges[1:] - begin).tolist(),
        "busy": _busy([s for s in spans if not names.get(s[0], "").startswith("I/O")], edges),
        "read_mb_per_s": _read_rate(counted, edges),
    }


def _busy(spans: Sequence[_Span], edges: _Times) -> dict[str, list[float]]:
    """Mean number of threads in each activity, between neighbouring edges."""
    order = list(dict.fromkeys(ACTIVITIES.values()))
    moments = np.linspace(edges[0], edges[-1], _BINS * _MOMENTS, endpoint=False)
    counts = np.zeros((len(order) + 1, _BINS))
    first = np.searchsorted(moments, [begin for *_, begin, _ in spans])
    last = np.searchsorted(moments, [begin + ms for *_, begin, ms in spans])
    for thread in {s[0] for s in spans}:
        doing = np.full(len(moments), len(order))  # nothing
        for (of, stage, *_), a, b in zip(spans, first, last, strict=True):  # inner spans follow outer ones
            if of == thread:
                doing[a:b] = order.index(ACTIVITIES.get(stage, "rest of the layer"))
        for number in range(len(order)):
            counts[number] += (doing == number).reshape(_BINS, _MOMENTS).mean(1)
    return {name: row.tolist() for name, row in zip(order, counts) if row.any()}


def _read_rate(counted: list[tuple[float, float]], edges: _Times) -> list[float]:
    """MB/s between neighbouring edges, by the counter of bytes read."""
    counts = sorted(counted)
    weights = [max(0.0, b[1] - a[1]) for a, b in pairwise(counts)]
    sums, _ = np.histogram([at for at, _ in counts[1:]], edges, weights=weights)
    rates: list[float] = (sums / 1e6 / max(float(edges[1] - edges[0]) / 1e3, 1e-9)).tolist()
    return rates


def read_accesses(path: str | Path, model_hash: str, *, progress: bool = False) -> dict[str, Any]:
    """Replay the recording in ``path`` with caches of other sizes.

    Returns:
        Facts of the run, and ``sizes``: by share of the store ``hit_rate`` by policy.

    Raises:
        ArtifactError: missing or damaged. StaleArtifactError: recorded with weights other than ``model_hash``.
    """
    accesses = Accesses.load(path)
    fix = "Record them with this model (torch_pi2.record_accesses)."
    check_made_from(str(path), accesses.model_hash, model_hash, "accesses of FFN weights", fix)
    run = accesses.run
    policies = list(dict.fromkeys((run["policy"], *_POLICIES)))
    slots = dict.fromkeys(round(accesses.slots * n / _SIZES) for n in range(1, _SIZES + 1))
    swept = replay_all(accesses, policies, list(slots), progress=progress)
    by_size = [[cache for cache in swept if cache.slots == count] for count in slots]
    return {
        "passes": accesses.passes,
        "policy": run["policy"],
        "share": run["slots"] / accesses.slots,
        "hit_rate": run["hits"] / max(1, run["wanted"]),
        "sizes": [
            {"share": of[0].share, "bytes": of[0].cache_bytes, "hit_rate": {m.policy: m.hit_rate for m in of}}
            for of in by_size
        ],
    }
