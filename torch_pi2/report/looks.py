"""Colours and layout that all plots share. The page replaces ``@ink`` and its like: it is light or dark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
#: First to last layer.
DEPTH = ["#f2b134", "#e4743b", "#b8456b", "#6d3f91", "#2d4b9a"]

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


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
