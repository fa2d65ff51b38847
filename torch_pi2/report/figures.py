"""Plots of neurons: how often they fire, and what predictors find."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from torch_pi2.base.units import size
from torch_pi2.report.facts import Firing, Row
from torch_pi2.report.looks import LABELS, SCALE, Plot, axis, layer_axis, layer_colour, plot, short, trace
from torch_pi2.types.loss_curve import LossCurve

_PERCENT = {"tickformat": ".0%"}
#: Cells of a heat map in which a number can be read.
_NUMBERS = 72


def cdf(rows: Sequence[Firing]) -> Plot:
    """Share of firings that the most frequent neurons have."""
    drawn = [row for row in rows if row.cdf]
    traces: list[dict[str, Any]] = []
    hover = "%{y:.1%} of firings by<br>%{x:.1%} of neurons"
    for index, row in enumerate(drawn):
        x, y = zip(*row.cdf, strict=True)
        line = {"color": layer_colour(index, len(drawn)), "width": 1.2}
        shown = {"showlegend": len(drawn) <= LABELS}
        traces.append(trace("scatter", x, y, escape(row.key), hover, mode="lines", line=line, **shown))
    at = np.linspace(0, 1, 101)
    mean = np.mean([np.interp(at, [x for x, _ in row.cdf], [y for _, y in row.cdf]) for row in drawn], axis=0)
    need = float(np.interp(0.8, mean, at))
    thick = {"color": "@ink", "width": 3.5}
    traces.append(
        trace("scatter", at.tolist(), mean.round(5).tolist(), "mean of layers", hover, mode="lines", line=thick)
    )
    guide = {"color": "@soft", "width": 1, "dash": "dot"}
    note = {
        "text": f"80 % of firings:<br>{need:.0%} of neurons",
        "x": need,
        "y": 0.8,
        "align": "left",
        "yanchor": "top",
    }
    note |= {"xanchor": "left", "xshift": 6, "yshift": -4, "showarrow": False, "bgcolor": "@card", "opacity": 0.85}
    colours = "" if len(drawn) <= LABELS else " Amber lines are the first layers, blue ones the last."
    read = (
        "The steeper a line begins, the fewer neurons do most of the work. On a straight diagonal all would fire "
        "alike, and none would be worth calling hot." + colours
    )
    return plot(
        "cdf",
        "Which neurons fire: the most frequent first",
        read,
        traces,
        460,
        xaxis=axis("neurons, the most frequent first", range=[0, 1], **_PERCENT),
        yaxis=axis("firings that are theirs", range=[0, 1.02], **_PERCENT),
        shapes=[
            {"type": "line", "x0": 0, "x1": need, "y0": 0.8, "y1": 0.8, "line": guide},
            {"type": "line", "x0": need, "x1": need, "y0": 0, "y1": 0.8, "line": guide},
        ],
        annotations=[note],
    )


def sparsity(rows: Sequence[Firing]) -> Plot:
    """Share of neurons that fire for at least one of b tokens, by layer and b."""
    sizes = sorted({size for row in rows for size in row.by_batch})
    shares = [[row.by_batch.get(size) for size in sizes] for row in rows]
    written = len(rows) * len(sizes) <= _NUMBERS
    heat = {
        "type": "heatmap",
        "x": [str(size) for size in sizes],
        "y": [escape(row.key) for row in rows],
        "z": shares,
        "colorscale": SCALE,
        "zmin": 0,
        "zmax": max(0.01, *(share or 0 for row in shares for share in row)),
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "texttemplate": "%{z:.0%}" if written else "",
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "%{z:.1%} of neurons fire for at least one<br>of %{x} tokens<extra>%{y}</extra>",
    }
    read = (
        "Share of neurons that fire for at least one of so many tokens of different sequences. The darker, the more "
        "must be computed: what is sparse for one token is nearly dense for many, so more neurons are worth being hot."
    )
    return plot(
        "sparsity",
        "Sparsity fades as the batch grows",
        read,
        [heat],
        min(500, 280 + 20 * len(rows)),
        xaxis=axis("tokens taken together", type="category", showgrid=False),
        yaxis=layer_axis(rows, autorange="reversed", showgrid=False),
    )


def loss_curve(curve: LossCurve) -> Plot:
    """What skipping neurons did to the loss, with the budget and what was chosen."""
    x, y = zip(*curve.points, strict=True)
    line = {"mode": "lines+markers", "line": {"color": "#4fa8a0", "width": 2}, "showlegend": False}
    hover = "%{x:.1%} of neurons skipped:<br>%{y:+.2%} of loss<extra></extra>"
    guide = {"color": "@soft", "width": 1, "dash": "dot"}
    note = {
        "text": f"max_loss {curve.max_loss:.1%}",
        "x": 0,
        "y": curve.max_loss,
        "xanchor": "left",
        "yanchor": "bottom",
    }
    read = (
        f"Neurons are ranked by the score '{curve.score}', and layers that matter less skip more. Chosen was the "
        f"largest share below the dotted line: the loss is {curve.loss_change:+.2%} there, on calibration text that "
        "thresholds were not taken from. Lossy: measure it on your own text."
    )
    return plot(
        "loss-curve",
        "What skipping neurons costs",
        read,
        [trace("scatter", x, y, "loss", hover, **line)],
        380,
        xaxis=axis("neurons skipped", range=[0, 1], **_PERCENT),
        yaxis=axis("increase of the loss", tickformat=".1%", range=[min(0, *y), 4 * curve.max_loss]),
        shapes=[{"type": "line", "x0": 0, "x1": 1, "y0": curve.max_loss, "y1": curve.max_loss, "line": guide}],
        annotations=[note | {"showarrow": False}],
    )


def predictors(rows: Sequence[Row]) -> Plot:
    """Recall against bytes, a bubble for each layer, as large as its rank."""
    with_one = [(index, row) for index, row in enumerate(rows) if row.predictor]
    cards = [row.predictor for _, row in with_one if row.predictor]
    ranks = [card.rank for card in cards]
    most = max(1, *ranks) if ranks else 1
    bubbles = {
        "type": "scatter",
        "mode": "markers+text" if len(cards) <= LABELS else "markers",
        "x": [card.bytes for card in cards],
        "y": [card.recall for card in cards],
        "text": [escape(short(row.key)) for _, row in with_one],
        "textposition": "middle center",
        "textfont": {"color": "#ffffff", "size": 11},
        "customdata": [
            [escape(row.key), card.rank or "none", card.precision, card.predicted_active, size(card.bytes)]
            for (_, row), card in zip(with_one, cards, strict=True)
        ],
        "marker": {
            "size": [14 + 26 * (rank / most) ** 0.5 for rank in ranks],
            "color": [layer_colour(index, len(rows)) for index, _ in with_one],
            "opacity": 0.85,
            "line": {"color": "@card", "width": 1},
        },
        "hovertemplate": "recall %{y:.1%}, precision %{customdata[2]:.1%}<br>%{customdata[4]}, rank %{customdata[1]}"
        "<br>%{customdata[3]:.1%} of neurons predicted<extra>%{customdata[0]}</extra>",
        "showlegend": False,
    }
    # Layers that are alike look alike: no axis is stretched over differences that mean nothing.
    largest = max((card.bytes for card in cards), default=1)
    recalls = [card.recall for card in cards] or [1.0]
    shown = [max(0.0, min(recalls) - 0.03), min(1.02, max(recalls) + 0.03)]
    read = (
        "One bubble a layer, amber for the first and blue for the last; the larger, the higher its rank. Up and left "
        "is better: what a predictor does not find is not computed, and what it weighs is read for every token."
    )
    return plot(
        "predictors",
        "Predictors: what they find, and what they weigh",
        read,
        [bubbles],
        420,
        wide=len(rows) > LABELS,
        xaxis=axis("size of the predictor", tickformat="~s", ticksuffix="B", range=[0, 1.15 * largest]),
        yaxis=axis("recall: firing neurons that it finds", tickformat=".0%", range=shown),
    )
