"""Plots of what runs recorded: hits of the cache, and what threads and reads did when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from torch_pi2.report.facts import Bucket, Cache, Span, Timeline
from torch_pi2.report.looks import POLICIES, STAGES, Plot, axis, plot, trace
from torch_pi2.report.timeline import ACTIVITIES

_READS = {"read": "reading", "pread": "reading", "verify": "checking what was read"}
#: Spans that hold others.
_OUTER = ("ffn", "predict", "linear")


def hits_over_time(cache: Cache) -> Plot:
    """Hit rate in windows of the recording."""
    traces = []
    for policy, rates in cache.over_time.items():
        run = policy == cache.policy
        name, hover = f"{policy}, as it ran" if run else policy, "%{y:.1%} hits up to pass %{x}"
        how = {"line": _line(policy, run, shape="linear"), "marker": {"size": 6 if run else 4}}
        traces.append(trace("scatter", cache.windows, rates, name, hover, mode="lines+markers", **how))
    same = (
        "It has exactly the hits of the run." if cache.whole else "It is close to the run, which also did other things."
    )
    read = (
        f"{cache.passes:,} tokens and prompts, replayed with a cache of the run's size ({cache.share:.0%} of all "
        f"neurons): of the neurons wanted, those that were there. {same} A line that keeps rising is a cache that is "
        "still learning; a dip is a prompt or another topic."
    )
    time = axis("tokens and prompts so far")
    return plot("hits", "Cache hits over time", read, traces, xaxis=time, yaxis=_hit_rate())


def _hit_rate() -> dict[str, Any]:
    """To 100 %, so that what is missing is seen."""
    return axis("hit rate", tickformat=".0%", range=[0, 1.02])


def _line(policy: str, run: bool, **more: Any) -> dict[str, Any]:
    """Of a policy; thick that of the ``run``."""
    colour, dash = POLICIES.get(policy, ("#9aa0a6", "solid"))
    return {"color": colour, "dash": dash, "width": 3 if run else 1.5, **more}


def hits_by_size(cache: Cache, buckets: Sequence[Bucket]) -> Plot:
    """Hit rate against the cache's size, with the run's and the plan's."""
    traces: list[dict[str, Any]] = []
    for policy in cache.sizes[0].hit_rate if cache.sizes else ():
        traces.append(
            trace(
                "scatter",
                [size.share for size in cache.sizes],
                [size.hit_rate[policy] for size in cache.sizes],
                "optimal: none has more" if policy == "optimal" else policy,
                "%{y:.1%} hits with %{customdata[0]} (%{x:.0%})",
                mode="lines+markers",
                customdata=[[f"{size.bytes / 1e6:,.0f} MB"] for size in cache.sizes],
                line=_line(policy, policy == cache.policy),
                marker={"size": 5},
            )
        )
    whole = cache.sizes[-1].bytes / cache.sizes[-1].share if cache.sizes else 0
    planned = [min(1.0, bucket.cache_bytes / whole) for bucket in buckets if bucket.cache_bytes and whole]
    shapes = [_mark(cache.share, cache.share)] + ([_mark(min(planned), max(planned))] if planned else [])
    notes = [_label(cache.share, 0.02, "this run")]
    if planned:
        sizes = (
            f"{min(planned):.0%} to {max(planned):.0%}" if max(planned) - min(planned) > 0.01 else f"{planned[0]:.0%}"
        )
        notes.append(_label(max(planned), 0.1, f"the plan: {sizes}"))
    read = (
        "What caches of other sizes would have had of the same accesses, filled at first as the run's was. Where a "
        "line is steep, memory buys hits; where it is flat, more memory buys little. The dotted line knows the future."
    )
    return plot(
        "sizes",
        "Cache hits by size",
        read,
        traces,
        xaxis=axis("cache, of all neurons of the store", range=[0, 1.02], tickformat=".0%"),
        yaxis=_hit_rate(),
        shapes=shapes,
        annotations=notes,
    )


#: Behind what is written into a plot.
_PAPER = {"bgcolor": "@card", "opacity": 0.85}


def _mark(low: float, high: float) -> dict[str, Any]:
    """A line at one size of the cache, or a band from one to another."""
    both = {"yref": "paper", "y0": 0, "y1": 1, "x0": low, "x1": high}
    if low == high:
        return {"type": "line", **both, "line": {"color": "@soft", "width": 1.5, "dash": "dash"}}
    return {"type": "rect", **both, "fillcolor": "@soft", "opacity": 0.2, "line": {"width": 0}}


def _label(at: float, height: float, text: str) -> dict[str, Any]:
    """Beside a mark, where there is more room."""
    right = at < 0.6
    side = {"xanchor": "left" if right else "right", "xshift": 5 if right else -5}
    return {
        "x": at,
        "yref": "paper",
        "y": height,
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
        **_PAPER,
        **side,
    }


def busy(timeline: Timeline) -> Plot:
    """Compute threads by what they do, and the rate of reads, over the whole trace."""
    traces: list[dict[str, Any]] = []
    step = timeline.bins[0] if timeline.bins else 0
    at = [end - step / 2 for end in timeline.bins]
    for name, threads in timeline.busy.items():
        line = {"width": 0, "color": STAGES[name], "shape": "hvh"}
        how = {"mode": "lines", "stackgroup": "threads", "line": line, "fillcolor": STAGES[name]}
        traces.append(trace("scatter", at, [round(n, 4) for n in threads], name, "%{y:.2f} threads", **how))
    rate, hover = [round(value, 3) for value in timeline.read_mb_per_s], "%{y:,.1f} MB/s<extra>read</extra>"
    line = {"color": STAGES["reading"], "width": 1.5, "shape": "hvh"}
    traces.append(trace("scatter", at, rate, "MB/s read", hover, mode="lines", yaxis="y2", line=line))
    lost = (
        f" {timeline.lost:,} events were lost while recording, the oldest ones: raise capacity."
        if timeline.lost
        else ""
    )
    read = (
        f"The whole trace, {timeline.total_ms:,.0f} ms and {timeline.events:,} events, as means over {step:.3g} ms. "
        f"Gaps are what PyTorch computes itself. Orange is time in which reading was not hidden.{lost}"
    )
    return plot(
        "busy",
        "What threads do",
        read,
        traces,
        440,
        wide=True,
        xaxis=axis("ms since the first event", range=[0, timeline.total_ms], anchor="y2"),
        yaxis=axis("threads", domain=[0.42, 1], rangemode="tozero"),
        yaxis2=axis("MB/s", domain=[0, 0.32], rangemode="tozero"),
        hovermode="x",
    )


def spans(timeline: Timeline) -> Plot:
    """Every span of a window: threads above, reads under way below."""
    threads = [lane for lane in timeline.lanes if not lane.startswith("read ")]
    groups: dict[tuple[str, bool], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        groups[_READS.get(span.stage) or ACTIVITIES.get(span.stage, "rest of the layer"), _outer(span)].append(span)
    order = [*STAGES]
    traces = []
    # Those that hold others first: what is drawn later is in front.
    for (name, outer), own in sorted(groups.items(), key=lambda g: (not g[0][1], order.index(g[0][0]))):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": [round(span.begin, 4) for span in own],
                "x": [round(span.ms, 4) for span in own],
                "y": [_height(span, timeline.lanes, len(threads)) for span in own],
                "width": [_width(span, timeline.lanes, len(threads)) for span in own],
                "customdata": [[span.stage, escape(span.note)] for span in own],
                "name": name if not outer else f"{name}: whole call",
                "legendgroup": name,
                "showlegend": not outer,
                "marker": {"color": STAGES[name], "opacity": 0.35 if outer else 1, "line": {"width": 0}},
                "hovertemplate": "%{customdata[0]} %{x:.4f} ms<br>%{customdata[1]}<extra></extra>",
            }
        )
    depth = len(timeline.lanes) - len(threads)
    ticks = [-(i + 0.5) for i in range(len(threads))]
    top = _below(len(threads))
    length = timeline.end_ms - timeline.begin_ms
    part = (
        f"The {length:.3g} ms of the trace in which most is read, from {timeline.begin_ms:,.1f} ms on"
        if length < 0.999 * timeline.total_ms
        else "The whole trace"
    )
    read = (
        f"{part}: all {len(timeline.spans):,} spans of it, none left out. Drag to zoom, double-click to go back. "
        "Below, each bar is a read from being asked for to being there; their height is the depth of the queue. The "
        "file itself opens in Perfetto."
    )
    height = 240 + 34 * len(threads) + (150 if depth else 0)
    return plot(
        "spans",
        "Threads and reads, one by one",
        read,
        traces,
        height,
        wide=True,
        barmode="overlay",
        hovermode="closest",
        xaxis=axis("ms since the first event", range=[timeline.begin_ms, timeline.end_ms]),
        yaxis=axis(
            tickvals=ticks + ([top - _READ_ROWS / 2] if depth else []),
            ticktext=[escape(name) for name in threads] + ([f"reads<br>under way<br>(up to {depth})"] if depth else []),
            range=[top - (_READ_ROWS if depth else 0), 0.1],
            showgrid=False,
            fixedrange=True,
        ),
        dragmode="zoom",
    )


#: Height of all rows of reads together, in heights of a thread's lane.
_READ_ROWS = 4.0


def _outer(span: Span) -> bool:
    return span.stage in _OUTER


def _below(threads: int) -> float:
    """Where rows of reads begin."""
    return -(threads + 0.3)


def _height(span: Span, lanes: Sequence[str], threads: int) -> float:
    """Middle of a span's row."""
    if span.lane < threads:
        return -(span.lane + 0.5)
    row = _READ_ROWS / (len(lanes) - threads)
    return round(_below(threads) - (span.lane - threads + 0.5) * row, 4)


def _width(span: Span, lanes: Sequence[str], threads: int) -> float:
    """Height of a span's bar: of one that holds others the most of its lane."""
    if span.lane >= threads:
        return round(0.85 * _READ_ROWS / (len(lanes) - threads), 4)
    return 0.86 if _outer(span) else 0.6
