"""The plots of README and docs/RESULTS.md: ``python -m benchmarks.drawings docs/images`` (``make figures``).

Every figure in them is in a file of ``benchmarks/results`` (other folders: ``--results``); what a file lacks is not
drawn. The data of a plot is in the description of its SVG, as JSON.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import read
from torch_pi2.base.files import atomic_write
from torch_pi2.base.package import needed
from torch_pi2.errors import ArtifactError

RESULTS = Path(__file__).parent / "results"
OURS, PEER = "torch_pi2", "llama.cpp"
#: Of a light page and of a dark one; lines can be told apart by most eyes.
_COLOURS = {
    "ink": ("#20242b", "#e6e8eb"),
    "soft": ("#68707c", "#9aa3af"),
    "grid": ("#e3e6ea", "#353b45"),
    "card": ("#ffffff", "#1d2127"),
    OURS: ("#0072b2", "#56b4e9"),
    PEER: ("#b34700", "#ff9e4a"),
    "other": ("#00785a", "#3fc79a"),
}
#: Of further lines, readable on both pages.
_MORE = ("#d55e00", "#cc79a7", "#8a6fd1", "#b8860b", "#5b8c2a", "#c0392b", "#2a9d8f", "#7f7f7f", "#e07b39", "#3f6fb5")
_LIGHT = {name: light for name, (light, _) in _COLOURS.items()}

Results = Mapping[str, Mapping[str, Any]]


class Point(NamedTuple):
    """``x``: a number, or the name of a bar. Median, slowest and fastest of the rounds (one round: the same)."""

    x: float | str
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Drawing:
    """``lines``: points by name. ``level``: a height worth a line of its own. ``source``: a file without ``.json``."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Point]]
    source: str
    level: float | None = None
    log_x: bool = False
    log_y: bool = False
    about: str = "synthetic weights"

    def data(self) -> dict[str, list[list[float | str]]]:
        return {name: [list(point) for point in points] for name, points in self.lines.items()}


def memory(results: Results) -> Drawing:
    """Decoding a 7B model against the share of its neurons that memory holds."""
    sweep = _named(results, "offload-mistral-7b-int4-int8", lambda r: "pipeline" in r["modes"] and not r.get("prompt"))
    ours, peer = [], []
    for result in sweep.values():
        at = 100 * result["ffn_in_memory"]
        ours.append(_point(at, result["modes"]["pipeline"]))
        peer += [Point(at, *[p["tokens_per_s"]] * 3) for name, p in result["peers"].items() if name == PEER]
    both = results["decode-mistral-7b-int4-int8"]["peers"][PEER]
    return Drawing(
        "Mistral-7B shape, 4-bit weights, 10 % of neurons active, two CPU threads",
        "share of feed-forward neurons in memory, % (the rest is read from a drive)",
        "tokens/s",
        {OURS: sorted([*ours, _point(100, both, "our_")]), PEER: sorted([*peer, _point(100, both)])},
        next(iter(sweep)),
    )


def active(results: Results) -> Drawing:
    """How many times as fast as llama.cpp, against the share of neurons that are active."""
    runs = _named(results, "decode-llama-1b-int4-int8", lambda r: PEER in r["peers"])
    of = [(100 * r["synthetic"]["active"], r["peers"][PEER]) for r in runs.values()]
    return Drawing(
        "Llama-1B shape, 4-bit weights, two CPU threads: llama.cpp = 1",
        "active neurons, %",
        "times as fast as llama.cpp",
        {
            "decoding": sorted(Point(at, p["ratio"], *p["spread"]["ratio"]) for at, p in of),
            "prompt of 128 tokens": sorted(Point(at, p["prompt_ratio"], *p["spread"]["prompt_ratio"]) for at, p in of),
        },
        next(iter(runs)),
        level=1,
        log_x=True,
    )


def batches(results: Results) -> Drawing:
    """Tokens/s of all sequences together."""
    name = "decode-mistral-7b-int4-int8-batches"
    pairs = results[name]["peers"][PEER]["batches"]
    return Drawing(
        "Mistral-7B shape, 4-bit weights, two CPU threads",
        "sequences decoded together",
        "tokens/s of all",
        {
            OURS: [_point(str(pair["batch"]), pair, "our_") for pair in pairs],
            PEER: [_point(str(pair["batch"]), pair) for pair in pairs],
        },
        name,
    )


def methods(source: str, x: str, label: str, results: Results) -> Drawing:
    """Loss of methods on the first of a result's texts, with its confidence interval, against ``x`` of their rows."""
    lines, least = dict[str, list[Point]](), 0.01
    rows = [row for row in results[source]["rows"] if "loss" in row and row["method"] != "dense"]
    for row in rows:
        if row["text"] == rows[0]["text"] and x in row:
            loss, error = 100 * row["loss"], 100 * (row["loss_error"] or 0)
            ends = (max(least, y) for y in (loss, loss - error, loss + error))
            name = row["method"].rpartition(" ")[0] if "asked" in row else row["method"]
            lines.setdefault(name, []).append(Point(row[x] * (100 if x == "ffn_bytes" else 1), *ends))
    return Drawing(
        f"{results[source]['model']}, {results[source]['weights']}, {rows[0]['text']}",
        label,
        f"loss, % above dense ({least:g} and less: {least:g})",
        {name: sorted(points) for name, points in lines.items()},
        source,
        log_y=True,
        about="95 % confidence intervals",
    )


DRAWINGS: dict[str, Callable[[Results], Drawing]] = {"memory": memory, "active": active, "batches": batches}
for _path in sorted(RESULTS.glob("methods-*.json")):
    for _what, _words in (("ffn_bytes", "bytes read for a token, % of the weights"), ("speed", "decoding, dense = 1")):
        if f'"{_what}"' not in _path.read_text():  # losses alone
            continue
        DRAWINGS[f"{_path.stem}-{_what.removeprefix('ffn_')}"] = partial(methods, _path.stem, _what, _words)


def _named(results: Results, start: str, wanted: Callable[[Mapping[str, Any]], bool]) -> dict[str, Mapping[str, Any]]:
    """Results whose name is ``start``, alone or with a number behind it."""
    found = {}
    for name, result in results.items():
        rest = name.removeprefix(start).removeprefix("-").replace(".", "", 1)
        if name.startswith(start) and (not rest or rest.isdigit()) and wanted(result):
            found[name] = result
    return found


def _point(x: float | str, of: Mapping[str, Any], whose: str = "") -> Point:
    return Point(x, of[f"{whose}tokens_per_s"], *of["spread"][f"{whose}tokens_per_s"])


def draw(target: str | Path, results: str | Path = RESULTS) -> list[Path]:
    """Write ``NAME.svg`` of every drawing into the folder ``target``; returns their paths. Raises LibraryMissingError:
    no matplotlib. ArtifactError: a result that a drawing needs is missing or damaged.
    """
    found, written = read(results), []
    for name, make in DRAWINGS.items():
        try:
            drawing = make(found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                str(results),
                expected=f"the results that {name}.svg is drawn of",
                found=f"one missing or damaged ({type(error).__name__}: {error})",
                fix="docs/RESULTS.md has the command of each.",
            ) from error
        written.append(Path(target) / f"{name}.svg")
        atomic_write(written[-1], _svg(drawing, found[drawing.source]["machine"]))
    return written


def _svg(drawing: Drawing, machine: Mapping[str, Any]) -> str:
    with needed("matplotlib", "bench"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    ink, soft, text = _LIGHT["ink"], _LIGHT["soft"], io.StringIO()
    # text stays text, and the same results make the same file
    looks: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "pi2", "font.size": 11, "text.color": ink}
    looks |= {"axes.labelcolor": ink, "xtick.color": soft, "ytick.color": soft, "axes.edgecolor": soft}
    with mpl.rc_context({**looks, "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 4), layout="constrained", facecolor=_LIGHT["card"])
        axes = figure.add_subplot(facecolor=_LIGHT["card"])
        bars = any(isinstance(point.x, str) for points in drawing.lines.values() for point in points)
        (_bars if bars else _lines)(axes, drawing)
        if drawing.level is not None:
            axes.axhline(drawing.level, color=soft, linewidth=1, linestyle="--")
        axes.set(xlabel=drawing.x_label, ylabel=drawing.y_label)
        if drawing.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.grid(axis="y", color=_LIGHT["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if len(drawing.lines) > 1:
            beside: Any = (
                {"loc": "best"} if len(drawing.lines) < 4 else {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            )
            axes.legend(frameon=False, **beside)
        axes.set_title(drawing.title, loc="left", fontsize=12)
        rounds = "" if drawing.log_y else "; medians, slowest to fastest round"
        about = f"{drawing.about}; {machine['cpu']}, {machine['kernels']}{rounds}"
        figure.supxlabel(about, fontsize=8, color=soft)
        data = json.dumps(drawing.data())
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Description": data})
    return _with_dark(text.getvalue())


def _colour(index: int, name: str) -> str:
    return _LIGHT.get(name) or (_LIGHT[OURS], _LIGHT["other"], *_MORE)[index % (2 + len(_MORE))]


def _ranges(points: Sequence[Point]) -> list[list[float]]:
    return [[p.median - p.low for p in points], [p.high - p.median for p in points]]


def _label(axes: Any, x: float | str, point: Point, colour: str) -> None:
    text = f"{point.median:.2f}" if point.median < 3 else f"{point.median:.1f}"
    axes.annotate(text, (x, point.high), (0, 6), textcoords="offset points", ha="center", color=colour, fontsize=9)


def _lines(axes: Any, drawing: Drawing) -> None:
    for index, (name, points) in enumerate(drawing.lines.items()):
        colour, marker = _colour(index, name), "os^vDP*X<>hp"[index % 12]
        looks = {"color": colour, "marker": marker, "linewidth": 2 if len(points) > 2 else 0, "elinewidth": 1}
        axes.errorbar(
            [p.x for p in points], [p.median for p in points], _ranges(points), label=name, capsize=3, **looks
        )
        for p in points if drawing.level is None and len(drawing.lines) < 3 else ():
            _label(axes, p.x, p, colour)
    if drawing.log_x:
        ticks = sorted({float(p.x) for points in drawing.lines.values() for p in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()


def _bars(axes: Any, drawing: Drawing) -> None:
    width, ink = 0.8 / len(drawing.lines), _LIGHT["ink"]
    for index, (name, points) in enumerate(drawing.lines.items()):
        at = [i + (index - (len(drawing.lines) - 1) / 2) * width for i in range(len(points))]
        colours = [_colour(index, str(p.x) if p.x == PEER else name) for p in points]
        bars = {"color": colours, "yerr": _ranges(points), "error_kw": {"elinewidth": 1, "capsize": 3, "ecolor": ink}}
        axes.bar(at, [p.median for p in points], width * 0.92, label=name, **bars)
        for x, p in zip(at, points, strict=True):
            _label(axes, x, p, ink)
    names = [str(p.x) for p in next(iter(drawing.lines.values()))]
    axes.set_xticks(range(len(names)), names)


def _with_dark(svg: str) -> str:
    """``svg`` with a style sheet for dark pages."""
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _COLOURS.values()
        for what in ("fill", "stroke")
    )
    head, end, body = svg.partition("</metadata>")
    return f"{head}{end}\n <style>@media (prefers-color-scheme:dark){{{rules}}}</style>{body}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    draw(args.target, args.results)


if __name__ == "__main__":
    main()
