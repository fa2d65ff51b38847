"""Plots of the plan: which neurons are hot, the time of a token, and what simpler plans would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_pi2.report.facts import Bucket, Measured, Planned, Rivals, Row
from torch_pi2.report.looks import LABELS, PARTS, PLACES, Plot, axis, bars, layer_axis, plot, trace

#: Of the plan, and of others.
_PLANNERS = ("#e15759", "#4e79a7", "#f28e2b", "#4fa8a0", "#9aa0a6", "#a76fa5")
_GROUPS = axis(type="multicategory", tickangle=0, showdividers=False)
_SYMBOLS = {
    "dense": "square",
    "exact": "circle",
    "threshold": "diamond",
    "lowrank": "triangle-up",
    "signbit": "cross",
}


def _places(row: Row, number: int, stored: bool) -> dict[str, int]:
    """Neurons of a row in one bucket, by place; together all of them."""
    hot, accelerator, resident = row.hot[number], row.accelerator[number], row.resident[number]
    if not stored:
        return {"accelerator": accelerator, "hot": hot - accelerator, "cold": row.neurons - hot}
    kept = min(row.neurons, accelerator + resident)  # resident ones begin after the accelerator's
    return {
        "accelerator": accelerator,
        "hot": min(hot, kept) - accelerator,
        "hot_read": hot - min(hot, kept),
        "resident": max(hot, kept) - hot,
        "cold_read": row.neurons - max(hot, kept),
    }


def plan(planned: Planned) -> Plot:
    """Where each layer's neurons are, for one batch size at a time."""
    rows, buckets = planned.rows, planned.buckets
    keys = [escape(row.key) for row in rows]
    names = [name for name in PLACES if any(_counts(planned, name, n) for n in range(len(buckets)))]
    traces: list[dict[str, Any]] = []
    for number in range(len(buckets)):
        for name in names:
            counts = _counts(planned, name, number) or [0] * len(rows)
            shares = [count / row.neurons for count, row in zip(counts, rows, strict=True)]
            data = [[f"{n:,} of {row.neurons:,}", escape(row.method)] for n, row in zip(counts, rows, strict=True)]
            hover = "%{customdata[0]} (%{y:.1%})<br>method %{customdata[1]}<extra>%{x}<br>%{fullData.name}</extra>"
            traces.append(bars(keys, shares, *PLACES[name], hover, data, visible=number == 0))
    marks = _method_marks(rows)
    methods = ", ".join(dict.fromkeys(method for row in rows for method in row.method.split(", ")))
    read = (
        "Neurons of each layer, the most frequent at the bottom. Hot ones are computed always, in one run; cold ones "
        f"where the layer's method asks for them (marks above: {methods})."
    ) + (" Choose how many sequences are decoded together." if len(buckets) > 1 else "")
    return plot(
        "plan",
        "The plan: hot and cold neurons",
        read,
        traces + marks,
        420,
        wide=len(rows) > LABELS,
        barmode="stack",
        bargap=0.12,
        xaxis=layer_axis(rows, range=[-0.6, len(rows) - 0.4]),
        yaxis=axis("neurons", range=[0, 1.09], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%"),
        updatemenus=_buttons(buckets, len(names), len(marks)),
        margin={"l": 8, "r": 12, "t": 44 if len(buckets) > 1 else 16, "b": 8},
    )


def _counts(planned: Planned, name: str, number: int) -> list[int]:
    """Neurons at a place, by row; nothing if there are none in any row."""
    stored = planned.hardware is not None and planned.hardware.budget_bytes is not None
    found = [_places(row, number, stored).get(name, 0) for row in planned.rows]
    return found if any(found) else []


def _method_marks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A mark above each bar."""
    methods = dict.fromkeys(row.method for row in rows)
    found = []
    for method in methods:
        keys = [escape(row.key) for row in rows if row.method == method]
        marker = {"symbol": _SYMBOLS.get(method, "star"), "color": "@soft", "size": 7}
        name = f"method {method}"
        found.append(
            trace(
                "scatter",
                keys,
                [1.045] * len(keys),
                name,
                f"{name}<extra>%{{x}}</extra>",
                mode="markers",
                marker=marker,
            )
        )
    return found


def _buttons(buckets: Sequence[Bucket], bars: int, marks: int) -> list[dict[str, Any]]:
    """A button for each batch size, that shows its bars; none for one alone."""
    if len(buckets) < 2:
        return []
    made = []
    for number, bucket in enumerate(buckets):
        shown = [n == number for n in range(len(buckets)) for _ in range(bars)] + [True] * marks
        label = str(bucket.batch) if number else f"batch {bucket.batch}"
        made.append({"method": "restyle", "label": label, "args": [{"visible": shown}]})
    where = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "pad": {"t": 0, "b": 2}}
    looks = {"bgcolor": "@card", "bordercolor": "@grid", "font": {"color": "@ink", "size": 11}}
    kind = {"type": "buttons", "direction": "right"} if len(buckets) <= 5 else {"type": "dropdown"}
    return [{"buttons": made, "showactive": True, **kind, **where, **looks}]


def times(planned: Planned | None, measured: Sequence[Measured]) -> Plot:
    """Milliseconds per token by part: predicted for each batch size, and measured."""
    source = planned.hardware.source if planned and planned.hardware else ""
    steps = [("predicted", str(b.batch), b.batch, b.ms) for b in (planned.buckets if planned else ()) if b.ms]
    for run in measured:
        steps.append(("measured", _run(run, measured), run.batch, run.ms))
    for run in measured:
        if run.predicted:
            steps.append(("modelled", _run(run, measured), run.batch, run.predicted))
    labels = [[group for group, *_ in steps], [label for _, label, *_ in steps]]
    traces: list[dict[str, Any]] = []
    for part in [part for part in _parts(steps) if any(bar[-1].get(part) for bar in steps)]:
        name, colour = PARTS.get(part, (part, "#c0c0c0"))
        each = [ms.get(part, 0.0) / batch for *_, batch, ms in steps]
        data = [[ms.get(part, 0.0)] for *_, ms in steps]
        hover = "%{y:.3g} ms a token (%{customdata[0]:.3g} ms a step)"
        traces.append(bars(labels, each, escape(name), colour, hover, data))
    totals = [sum(ms.values()) / batch for *_, batch, ms in steps]
    above = {
        "type": "scatter",
        "mode": "text",
        "x": labels,
        "y": totals,
        "text": [_rate(1e3 / total) if total else "" for total in totals],
        "textposition": "top center",
        "showlegend": False,
        "hoverinfo": "skip",
        "cliponaxis": False,
    }
    again = " Modelled is what the cost model says of the run itself, of its context and its cache."
    again *= any(run.predicted for run in measured)
    about = " Predictions are for published figures of a device, not for a machine that was measured." * (
        source == "published"
    )
    read = (
        "Where the time of a token goes while decoding; above each bar tokens per second of all sequences together. "
        "They share the time of a step." + again + about
    )
    return plot(
        "times",
        "Time per token, by number of sequences",
        read,
        [*traces, above],
        450,
        wide=True,
        barmode="stack",
        bargap=0.3,
        xaxis=_GROUPS,
        yaxis=axis("ms per token", range=[0, 1.12 * max(totals, default=1) or 1]),
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}/s" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}/s"


def rivals(found: Sequence[Rivals]) -> Plot:
    """Tokens per second of simple plans, where those of the plan are 1."""
    names = list(dict.fromkeys(name for case in found for name in case.tokens_per_s))
    labels = [["measured" if case.measured else "predicted" for case in found], [case.case for case in found]]
    traces = []
    for number, name in enumerate(names):
        rates = [case.tokens_per_s.get(name) for case in found]
        first = [next(iter(case.tokens_per_s.values())) for case in found]
        ratios = [None if rate is None else rate / (one or 1) for rate, one in zip(rates, first, strict=True)]
        colour, hover = _PLANNERS[number % len(_PLANNERS)], "%{customdata[0]:.4g} tokens/s (%{y:.3f})"
        traces.append(bars(labels, ratios, escape(name), colour, hover, [[rate] for rate in rates]))
    one = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    read = (
        "The plan beside simple ones under the same budgets. What ends below the dotted line is slower than the plan; "
        "what ends above it is faster, and then the plan is not the best."
    )
    return plot(
        "rivals",
        "What planning gains",
        read,
        traces,
        400,
        wide=True,
        barmode="group",
        bargap=0.25,
        xaxis=_GROUPS,
        yaxis=axis("tokens/s, the plan is 1", rangemode="tozero"),
        shapes=[{**one, "line": {"color": "@soft", "width": 1, "dash": "dot"}}],
    )


def _parts(bars: Sequence[tuple[str, str, int, Mapping[str, float]]]) -> list[str]:
    """In their order, and what is not known after them."""
    found = dict.fromkeys(part for *_, ms in bars for part in ms)
    return [*(part for part in PARTS if part in found), *(part for part in found if part not in PARTS)]


def _run(run: Measured, runs: Sequence[Measured]) -> str:
    name = str(run.batch)
    return name if sum(r.batch == run.batch for r in runs) == 1 else f"{name}<br>{escape(run.where)}"
