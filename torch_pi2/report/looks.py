"""Colours and layout that all plots share. The page replaces ``@ink`` and its like: it is light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

#: Of a step's time, as :data:`torch_pi2.planner.cost.PARTS` has them; ``ffn``: hot, cold, io and merge.
PARTS: Mapping[str, tuple[str, str]] = {
    "attention": ("attention: linear layers", "#4e79a7"),
    "sdpa": ("attention: keys and values", "#9cc3e6"),
    "predictor": ("predictors", "#a76fa5"),
    "hot": ("hot neurons", "#e15759"),
    "cold": ("cold neurons", "#4fa8a0"),
    "ffn": ("all of the FFN, as one", "#b07f63"),
    "io": ("waiting for reads", "#f28e2b"),
    "merge": ("merging with the accelerator", "#e3c23f"),
    "head": ("head", "#63a355"),
    "glue": ("everything else", "#9aa0a6"),
}
#: Where a neuron is computed from.
PLACES: Mapping[str, tuple[str, str]] = {
    "accelerator": ("hot, on the accelerator", "#9c1f3f"),
    "hot": ("hot, in memory", "#e15759"),
    "hot_read": ("hot, read when it is not in the cache", "rgba(225,87,89,0.45)"),
    "resident": ("cold, always in the cache", "#2f847d"),
    "cold": ("cold, in memory", "rgba(79,168,160,0.55)"),
    "cold_read": ("cold, read when it is not in the cache", "rgba(79,168,160,0.3)"),
}
#: What threads do: the colour of the part of a step that it belongs to.
STAGES: Mapping[str, str] = {
    "computing neurons": "#4fa8a0",
    "predicting": "#a76fa5",
    "linear layers": "#4e79a7",
    "attention": "#9cc3e6",
    "cache and requests": "#e3c23f",
    "waiting for reads": "#f28e2b",
    "waiting for threads": "#c9b38c",
    "rest of the layer": "#9aa0a6",
    "reading": "#d4673a",
    "checking what was read": "#7d8fb3",
}
POLICIES: Mapping[str, tuple[str, str]] = {
    "lru": ("#4e79a7", "solid"),
    "lfu": ("#e15759", "solid"),
    "sieve": ("#4fa8a0", "solid"),
    "s3-fifo": ("#a76fa5", "solid"),
    "static": ("#e3c23f", "solid"),
    "none": ("#9aa0a6", "solid"),
    "optimal": ("@ink", "dot"),
}
#: From few to many.
SCALE = [[0, "#fff3d6"], [0.25, "#f9c66b"], [0.5, "#ee8a4a"], [0.75, "#c2445c"], [1, "#5b1a63"]]
#: First to last layer: each, and each between two, at least 3 : 1 against a light card and a dark one.
DEPTH = ["#b98200", "#d9602f", "#c2487a", "#9561c9", "#4a7bd0"]

#: Layers that can have a label of their own.
LABELS = 12


@dataclass(frozen=True)
class Plot:
    """``figure`` is what plotly.js draws; ``title`` and ``read``, how to read it, stand above; ``height`` in pixels.

    ``wide``: it wants a row of its own.
    """

    name: str
    title: str
    read: str
    figure: dict[str, Any]
    height: int = 380
    wide: bool = False


def plot(
    name: str, title: str, read: str, traces: Sequence[Any], height: int = 380, *, wide: bool = False, **more: Any
) -> Plot:
    """Of ``traces``; ``more``: of the layout."""
    return Plot(name, title, read, {"data": list(traces), "layout": layout(**more)}, height, wide)


def trace(kind: str, x: Iterable[Any], y: Iterable[Any], name: str, hover: str, **more: Any) -> dict[str, Any]:
    """A trace of plotly.js. ``hover``: what is shown of a point, beside the trace's name unless it says another."""
    extra = "" if "<extra>" in hover else "<extra>%{fullData.name}</extra>"
    return {"type": kind, "x": list(x), "y": list(y), "name": name, "hovertemplate": hover + extra, **more}


def bars(
    x: Iterable[Any], y: Iterable[Any], name: str, colour: str, hover: str, data: Iterable[Any], **more: Any
) -> dict[str, Any]:
    """Bars without an edge; ``data``: of each what ``hover`` says beside its height."""
    marker = {"color": colour, "line": {"width": 0}}
    return trace("bar", x, y, name, hover, customdata=list(data), marker=marker, **more)


def layer_axis(rows: Sequence[Any], **more: Any) -> dict[str, Any]:
    """An axis of layers, of which some sixteen have a label."""
    every = slice(None, None, max(1, len(rows) // 16))
    keys, ticks = [escape(row.key) for row in rows], [escape(short(row.key)) for row in rows]
    return axis("layer", tickvals=keys[every], ticktext=ticks[every], **more)


def layer_colour(index: int, count: int) -> str:
    """Of one of ``count`` layers: along ``DEPTH``."""
    at = (len(DEPTH) - 1) * index / max(1, count - 1)
    low = min(int(at), len(DEPTH) - 2)
    pair = [[int(DEPTH[low + i][k : k + 2], 16) for k in (1, 3, 5)] for i in (0, 1)]
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*pair, strict=True))


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    plain = {"gridcolor": "@grid", "zeroline": False, "linecolor": "@grid", "automargin": True}
    return {**plain, "title": {"text": title, "standoff": 8}, **more}


def layout(**more: Any) -> dict[str, Any]:
    """Transparent, legend below, little margin."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "@ink"},
        "margin": {"l": 8, "r": 12, "t": 16, "b": 8},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@grid", "font": {"color": "@ink"}, "align": "left"},
        "legend": {
            "orientation": "h",
            "y": -0.2,
            "yanchor": "top",
            "x": 0,
            "font": {"size": 11},
            "traceorder": "normal",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@soft", "activecolor": "@ink"},
        "dragmode": "zoom",
        **more,
    }


def short(key: str) -> str:
    """The number of a layer, if its key has one, else the key: for ticks."""
    return next((part for part in key.split(".") if part.isdigit()), key)
