"""What runs of the model recorded: a trace of threads and reads, accesses to replay, and measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_pi2.base.progress import bar
from torch_pi2.base.reading import ROOM_BYTES, parse, read_bytes
from torch_pi2.errors import ArtifactError, check_made_from
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.replay import OPTIMAL, replay, replay_all
from torch_pi2.observe.trace import STAGES

#: A trace may be large, and its events take some ten times their text.
_MOST_BYTES = 1 << 32
#: Equal pieces that the whole trace is summed up in.
_BINS = 150
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
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
#: Parts of ``benchmarks decode`` by those of a plan; ``ffn``: hot, cold, io and merge together.
_DECODE = {
    "linears": "attention",
    "sdpa": "sdpa",
    "predictor": "predictor",
    "ffn": "ffn",
    "head": "head",
    "python": "glue",
}
#: Cache policies that are compared, beside the run's.
_POLICIES = ("lru", "lfu")
_WINDOWS, _SIZES = 24, 10
#: Neurons wanted from which on fewer replays are made: each takes a second or two.
_MANY = 50_000_000
_Times = npt.NDArray[np.float64]
#: Lane (of reads under way: negative), stage, begin and length in milliseconds.
_Span = tuple[int, str, float, float]


# --- traces


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
        return _timeline(data, path.name)
    except (ArtifactError, *_DAMAGE) as error:
        raise ArtifactError(
            f"trace {path}",
            expected="a trace written by torch_pi2.trace, whole",
            found=_found(error),
            fix="Record it again: torch-pi2 generate DIR --prompt TEXT --trace FILE.",
        ) from error


def _found(error: Exception) -> str:
    return error.found if isinstance(error, ArtifactError) else f"damage ({type(error).__name__}: {error})"


def _timeline(data: Any, where: str) -> dict[str, Any]:
    names: dict[int, str] = {}
    spans: list[_Span] = []
    open_reads: dict[tuple[int, int], float] = {}
    counted: list[tuple[float, float]] = []
    events = 0
    for event in data["traceEvents"]:
        kind, name, at = event["ph"], event["name"], float(event["ts"]) / 1e3
        events += kind not in ("M", "e")
        if kind == "M" and name == "thread_name":
            names[int(event["tid"])] = str(event["args"]["name"])
        elif kind == "X":
            spans.append((int(event["tid"]), name, at, float(event["dur"]) / 1e3))
        elif kind == "b":
            open_reads[event["tid"], event["id"]] = at
        elif kind == "e":
            begin = open_reads.pop((event["tid"], event["id"]))
            spans.append((-1 - int(event["id"]), name, begin, at - begin))
        elif kind == "C" and name == "bytes read":
            counted.append((at, float(event["args"]["bytes"])))
    known = {name for name, _ in STAGES}
    if not any(name in known for _, name, *_ in spans):
        raise ValueError("none of its spans is of a stage that torch_pi2 has")
    spans.sort(key=lambda s: (s[2], -s[3]))
    if not np.isfinite([*((s[2], s[3]) for s in spans), *counted]).all() or min(s[3] for s in spans) < 0:
        raise ValueError("times that are no times")
    begin, end = spans[0][2], max(s[2] + s[3] for s in spans)
    edges = np.linspace(begin, end, _BINS + 1)
    return {
        "where": where,
        "total_ms": end - begin,
        "events": events,
        "lost": int(data["otherData"]["lost_events"]),
        "bins": (edges[1:] - begin).tolist(),
        "busy": _busy(spans, names, edges),
        "read_mb_per_s": _read_rate(counted, edges),
    }


def _busy(spans: Sequence[_Span], names: dict[int, str], edges: _Times) -> dict[str, list[float]]:
    """Mean number of compute threads in each activity, between neighbouring edges."""
    pieces: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for lane in {s[0] for s in spans if s[0] >= 0 and not names.get(s[0], "").startswith("I/O")}:
        for stage, begin, end in _innermost([s for s in spans if s[0] == lane]):
            pieces[ACTIVITIES.get(stage, "rest of the layer")].append((begin, end))
    width = max(float(edges[1] - edges[0]), 1e-9)
    order = [name for name in dict.fromkeys(ACTIVITIES.values()) if name in pieces]
    return {name: (_covered(pieces[name], edges) / width).tolist() for name in order}


def _innermost(spans: Sequence[_Span]) -> list[tuple[str, float, float]]:
    """(stage, begin, end) of a thread's time: each moment belongs to the span that began last and is not over."""
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

    for _, stage, begin, ms in spans:
        until(begin)
        now = max(now, begin)
        inside.append((stage, begin + ms))
    until(float("inf"))
    return found


def _covered(pieces: list[tuple[float, float]], edges: _Times) -> _Times:
    """How much time the pieces have between neighbouring edges."""
    both = np.array(pieces)

    def before(times: _Times) -> _Times:
        """Sum over ``times`` of how long before each edge they are."""
        ordered = np.sort(times)
        count = np.searchsorted(ordered, edges)
        return np.asarray(count * edges - np.concatenate([[0.0], np.cumsum(ordered)])[count])

    return np.diff(before(both[:, 0]) - before(both[:, 1]))


def _read_rate(counted: list[tuple[float, float]], edges: _Times) -> list[float]:
    """MB/s between neighbouring edges, by the counter of bytes read."""
    counts = sorted(counted)
    weights = [max(0.0, b[1] - a[1]) for a, b in pairwise(counts)]
    sums, _ = np.histogram([at for at, _ in counts[1:]], edges, weights=weights)
    rates: list[float] = (sums / 1e6 / max(float(edges[1] - edges[0]) / 1e3, 1e-9)).tolist()
    return rates


# --- accesses


def read_accesses(path: str | Path, model_hash: str, *, progress: bool = False) -> dict[str, Any]:
    """Replay the recording in ``path``: hits over time with the run's cache, and with caches of other sizes.

    Returns:
        ``windows``: the last pass of each stretch of the recording, and in each ``over_time``: hit rate by policy.
        ``sizes``: by share of the store ``hit_rate`` by policy. ``whole``: a replay has exactly the run's hits.

    Raises:
        ArtifactError: missing or damaged. StaleArtifactError: recorded with weights other than ``model_hash``.
    """
    accesses = Accesses.load(path)
    fix = "Record them with this model (torch_pi2.record_accesses)."
    check_made_from(str(path), accesses.model_hash, model_hash, "accesses of FFN weights", fix)
    run = accesses.run
    many = run["wanted"] > _MANY
    policies = list(dict.fromkeys((run["policy"], *_POLICIES)))
    ends = _ends(accesses, _WINDOWS // 4 if many else _WINDOWS)
    slots = [round(accesses.slots * n / _SIZES) for n in range(1, _SIZES + 1)][:: 2 if many else 1]
    swept = replay_all(accesses, [*policies, OPTIMAL], slots, progress=progress)
    by_size = {count: [made for made in swept if made.slots == count] for count in dict.fromkeys(slots)}
    return {
        "where": Path(path).name,
        "calls": len(accesses.layers),
        "passes": accesses.passes,
        "policy": run["policy"],
        "share": run["slots"] / accesses.slots,
        "hit_rate": run["hits"] / max(1, run["wanted"]),
        "whole": run["whole"],
        "windows": [passes for passes, _ in ends],
        "over_time": _over_time(accesses, policies, [calls for _, calls in ends], progress),
        "sizes": [
            {"share": of[0].share, "bytes": of[0].cache_bytes, "hit_rate": {m.policy: m.hit_rate for m in of}}
            for of in by_size.values()
        ],
    }


def _ends(accesses: Accesses, windows: int) -> list[tuple[int, int]]:
    """Ends of stretches of nearly as many passes each: (passes, calls) until there."""
    layers = accesses.layers
    one = len(accesses.stored) == 1
    anew = torch.ones(max(0, len(layers) - 1), dtype=torch.bool) if one else layers[1:] < layers[:-1]
    begins = [*(torch.nonzero(anew).flatten() + 1).tolist(), len(layers)]  # of the second pass, ..., and the end
    count = min(windows, accesses.passes)
    return [(last, begins[last - 1]) for n in range(1, count + 1) if (last := n * accesses.passes // count)]


def _over_time(accesses: Accesses, policies: list[str], ends: list[int], progress: bool) -> dict[str, list[float]]:
    """Hit rate by policy in each stretch: the beginning is replayed up to each end, and the hits are subtracted."""
    parts = [_beginning(accesses, calls) for calls in ends]
    every = [(policy, part) for policy in policies for part in parts]
    slots = accesses.run["slots"]
    made = [replay(part, policy, slots) for policy, part in bar(every, "replay in windows", progress, delay=2)]
    found = {}
    for number, policy in enumerate(policies):
        sums = [(0, 0), *((m.hits, m.wanted) for m in made[number * len(parts) : (number + 1) * len(parts)])]
        found[policy] = [(b[0] - a[0]) / max(1, b[1] - a[1]) for a, b in pairwise(sums)]
    return found


def _beginning(accesses: Accesses, calls: int) -> Accesses:
    """The first ``calls`` calls."""
    bits = accesses.wanted[: int(accesses.ends[calls - 1])] if calls else accesses.wanted[:0]
    return replace(accesses, layers=accesses.layers[:calls], streamed=accesses.streamed[:calls], wanted=bits)


# --- measured times


def read_measured(path: str | Path) -> list[dict[str, Any]]:
    """Runs in ``path``: milliseconds of a step by part for ``batch`` sequences, and what the cost model says of them.

    Raises:
        ArtifactError: missing, damaged, or not JSON of ``python -m benchmarks decode``.
    """
    path = Path(path)
    try:
        data = parse(read_bytes(path), path)
        found = _runs(data, path.name)
    except (ArtifactError, *_DAMAGE) as error:
        raise _unmeasured(path, _found(error)) from error
    if not found:
        raise _unmeasured(path, "none of them")
    return found


def _unmeasured(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        f"measured times {path}",
        expected="JSON of `python -m benchmarks decode --json` with batch 1",
        found=found,
        fix="Measure again: python -m benchmarks decode --shape NAME --json > FILE.",
    )


def _runs(data: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(data, dict):
        return []
    found: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    if "ms_per_token" in data:
        parts = {part: data["ms_per_token"][name] for name, part in _DECODE.items()}
        found.append((data["batch"], {part: ms for part, ms in parts.items() if ms is not None}, {}))
    for run in data.get("explained", ()):
        found.append((run["batch"], {str(y["part"]): y["measured_ms"] for y in run["parts"]}, run["predicted_ms"]))
    return [
        {"where": where, "batch": _batch(batch), "ms": _ms(measured), "predicted": _ms(predicted)}
        for batch, measured, predicted in found
    ]


def _batch(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no number of sequences")
    return value


def _ms(parts: dict[str, Any]) -> dict[str, float]:
    for value in parts.values():
        if type(value) not in (int, float) or not np.isfinite(value):
            raise ValueError(f"{value!r} is no number")
    return {name: max(0.0, float(ms)) for name, ms in parts.items()}  # a difference of medians may be negative
