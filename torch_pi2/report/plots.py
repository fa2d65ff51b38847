"""The plots of a report, as figures of plotly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

#: Parts of a step's time, as the planner's cost model has them.
PARTS = {
    "rest": ("outside feed-forward layers", "#4e79a7"),
    "attention": ("attention: linear layers", "#4e79a7"),
    "sdpa": ("attention: keys and values", "#9cc3e6"),
    "predictor": ("predictors", "#a76fa5"),
    "hot": ("hot neurons", "#e15759"),
    "cold": ("cold neurons", "#4fa8a0"),
    "io": ("waiting for reads", "#f28e2b"),
    "merge": ("merging with the accelerator", "#e3c23f"),
    "head": ("head", "#63a355"),
    "glue": ("everything else", "#9aa0a6"),
}
#: Places of neurons, their names and colors.
_PLACES = {
    "accelerator": ("hot, on the accelerator", "#9c1f3f"),
    "hot": ("hot, in memory", "#e15759"),
    "hot_read": ("hot, read when it is not in the cache", "#f1a9aa"),
    "resident": ("cold, always in the cache", "#2f847d"),
    "cold": ("cold, in memory", "#9ccfca"),
    "cold_read": ("cold, read when it is not in the cache", "#cbe6e3"),
}
_PERCENT = {"tickformat": ".0%"}
#: Most layers that are labeled one by one.
_LABELS = 12


@dataclass(frozen=True)
class Plot:
    """``figure`` is for plotly.js; ``title`` and ``read`` (how to read it) are shown above it."""

    name: str
    title: str
    read: str
    figure: dict[str, Any]


def plots(report: Mapping[str, Any]) -> dict[str, list[Plot]]:
    """By section, the plots for which the report has facts."""
    firing, plan = report["firing"], report["plan"]
    found: dict[str, list[Plot]] = {"Neurons": [], "Plan": [], "Time": []}
    if any(row["cdf"] for row in firing):
        found["Neurons"].append(_cdf([row for row in firing if row["cdf"]]))
    if any(row["by_batch"] for row in firing):
        found["Neurons"].append(_sparsity(firing))
    if plan is not None:
        found["Plan"].append(_plan(plan))
        found["Time"] += [_times(plan)] if any(bucket["ms"] for bucket in plan["buckets"]) else []
    return found


def _plot(name: str, title: str, read: str, traces: Iterable[Any], height: int = 400, **layout: Any) -> Plot:
    own = {"height": height, "margin": {"l": 8, "r": 12, "t": 24, "b": 8}}
    legend = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "traceorder": "normal"}
    return Plot(name, title, read, {"data": list(traces), "layout": {**own, "legend": legend, **layout}})


def _axis(title: str = "", **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "zeroline": False, "automargin": True, **more}


def _lines(x: Sequence[Any], y: Sequence[Any], name: str, hover: str, **more: Any) -> dict[str, Any]:
    own = {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "name": escape(name)}
    return {**own, "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>", **more}


def _bars(x: Any, y: Sequence[Any], name: str, color: str, hover: str, **more: Any) -> dict[str, Any]:
    own = {"type": "bar", "x": x, "y": list(y), "name": escape(name), "marker": {"color": color}}
    return {**own, "hovertemplate": f"{hover}<extra>%{{fullData.name}}</extra>", **more}


def _keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [escape(row["key"]) for row in rows]


def _layer_axis(rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """An axis of layers with about sixteen labels, the numbers of layers."""
    every = slice(None, None, max(1, len(rows) // 16))
    short = [next((part for part in row["key"].split(".") if part.isdigit()), row["key"]) for row in rows]
    return _axis("layer", tickvals=_keys(rows)[every], ticktext=[escape(s) for s in short][every], **more)


def _depth_color(index: int, count: int) -> str:
    """From amber for the first layer to blue for the last."""
    at = index / max(1, count - 1)
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in ((0xB9, 0x4A), (0x82, 0x7B), (0x00, 0xD0)))


def _cdf(rows: Sequence[Mapping[str, Any]]) -> Plot:
    traces = []
    hover = "%{y:.1%} of firings by<br>%{x:.1%} of neurons"
    for index, row in enumerate(rows):
        x, y = zip(*row["cdf"], strict=True)
        line = {"color": _depth_color(index, len(rows)), "width": 1.2}
        traces.append(_lines(x, y, row["key"], hover, line=line, showlegend=len(rows) <= _LABELS))
    at = np.linspace(0, 1, 101)
    mean = np.mean([np.interp(at, [x for x, _ in row["cdf"]], [y for _, y in row["cdf"]]) for row in rows], axis=0)
    need = float(np.interp(0.8, mean, at))
    thick = {"color": "#20242b", "width": 3.5}
    traces.append(_lines(at.tolist(), mean.round(5).tolist(), "mean of layers", hover, line=thick))
    note = {"text": f"80 % of firings:<br>{need:.0%} of neurons", "x": need, "y": 0.8, "ax": 60, "ay": 40}
    read = (
        "The steeper a line begins, the fewer neurons do most of the work. On a straight diagonal all would fire "
        "alike, and none would be worth calling hot. Amber lines are the first layers, blue ones the last."
    )
    axes: dict[str, Any] = {"xaxis": _axis("neurons, the most frequent first", range=[0, 1], **_PERCENT)}
    axes["yaxis"] = _axis("firings that are theirs", range=[0, 1.02], **_PERCENT)
    return _plot("cdf", "Which neurons fire", read, traces, 460, annotations=[note], **axes)


def _sparsity(rows: Sequence[Mapping[str, Any]]) -> Plot:
    sizes = sorted({batch for row in rows for batch in row["by_batch"]})
    shares = [[row["by_batch"].get(batch) for batch in sizes] for row in rows]
    heat = {
        "type": "heatmap",
        "x": [str(batch) for batch in sizes],
        "y": _keys(rows),
        "z": shares,
        "colorscale": "YlOrRd",
        "zmin": 0,
        "colorbar": {"tickformat": ".0%", "thickness": 10},
        "texttemplate": "%{z:.0%}" if len(rows) * len(sizes) <= 72 else "",
        "hovertemplate": "%{z:.1%} of neurons fire for at least one<br>of %{x} tokens<extra>%{y}</extra>",
    }
    read = (
        "Share of neurons that fire for at least one of a number of tokens, each of another sequence. Darker: more to "
        "compute. What is sparse for one token is nearly dense for many, so more neurons are worth being hot."
    )
    axes: dict[str, Any] = {"xaxis": _axis("tokens taken together", type="category")}
    axes["yaxis"] = _layer_axis(rows, autorange="reversed")
    return _plot("sparsity", "Sparsity fades as the batch grows", read, [heat], min(500, 280 + 20 * len(rows)), **axes)


def places(row: Mapping[str, Any], number: int, stored: bool) -> dict[str, int]:
    """Numbers of a row's neurons by place, in one bucket."""
    hot, accelerator, resident = (row[name][number] for name in ("hot", "accelerator", "resident"))
    if not stored:
        return {"accelerator": accelerator, "hot": hot - accelerator, "cold": row["neurons"] - hot}
    kept = min(row["neurons"], accelerator + resident)  # resident neurons follow those of the accelerator
    return {
        "accelerator": accelerator,
        "hot": min(hot, kept) - accelerator,
        "hot_read": hot - min(hot, kept),
        "resident": max(hot, kept) - hot,
        "cold_read": row["neurons"] - max(hot, kept),
    }


def _plan(plan: Mapping[str, Any]) -> Plot:
    rows, buckets = plan["rows"], plan["buckets"]
    stored = plan["hardware"] is not None and plan["hardware"]["budget_bytes"] is not None
    names = [n for n in _PLACES if any(places(r, b, stored).get(n) for r in rows for b in range(len(buckets)))]
    traces = []
    for number in range(len(buckets)):
        for name in names:
            counts = [places(row, number, stored).get(name, 0) for row in rows]
            data = [[f"{n:,} of {row['neurons']:,}", escape(row["method"])] for n, row in zip(counts, rows)]
            shares = [n / row["neurons"] for n, row in zip(counts, rows)]
            hover = "%{x}: %{customdata[0]} (%{y:.1%})<br>method %{customdata[1]}"
            traces.append(_bars(_keys(rows), shares, *_PLACES[name], hover, customdata=data, visible=number == 0))
    buttons = []
    for number, bucket in enumerate(buckets):
        shown = [n == number for n in range(len(buckets)) for _ in names]
        buttons.append({"method": "restyle", "label": f"batch {bucket['batch']}", "args": [{"visible": shown}]})
    menu = {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.15}
    methods = ", ".join(dict.fromkeys(method for row in rows for method in row["method"].split(", ")))
    read = (
        "Neurons of each layer, the most frequent at the bottom. Hot ones are computed always; cold ones where the "
        f"layer's method ({methods}) chooses them."
    ) + (" Choose how many sequences are decoded together." if len(buckets) > 1 else "")
    layout: dict[str, Any] = {"barmode": "stack", "xaxis": _layer_axis(rows)}
    layout |= {"yaxis": _axis("neurons", range=[0, 1], **_PERCENT)}
    layout |= {"updatemenus": [menu], "margin": {"t": 60}} if len(buckets) > 1 else {}
    return _plot("plan", "The plan: hot and cold neurons", read, traces, 440, **layout)


def _times(plan: Mapping[str, Any]) -> Plot:
    buckets = [bucket for bucket in plan["buckets"] if bucket["ms"]]
    labels = [str(bucket["batch"]) for bucket in buckets]
    traces = []
    for part, (name, color) in PARTS.items():
        each = [bucket["ms"].get(part, 0.0) / bucket["batch"] for bucket in buckets]
        if any(each):
            traces.append(_bars(labels, each, name, color, "%{y:.3g} ms a token"))
    totals = [sum(bucket["ms"].values()) / bucket["batch"] for bucket in buckets]
    rates = [f"{1e3 / total:,.3g}/s" if total else "" for total in totals]
    above = {"type": "scatter", "mode": "text", "x": labels, "y": totals, "text": rates, "textposition": "top center"}
    read = (
        "Where the time of a token goes while decoding, as predicted; above each bar tokens a second, of all sequences."
    )
    if plan["hardware"]["source"] == "published":
        read += " Predictions are for published figures of a device, not for a machine that was measured."
    layout = {"barmode": "stack", "xaxis": _axis("sequences", type="category"), "yaxis": _axis("ms per token")}
    text = {**above, "showlegend": False, "hoverinfo": "skip"}
    return _plot("times", "Time per token", read, [*traces, text], 450, **layout)
