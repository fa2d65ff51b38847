"""The report as one HTML file: plotly.js inside, compressed; nothing from elsewhere (the page itself forbids it)."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from torch_pi2.base.extras import missing_package
from torch_pi2.base.files import atomic_write
from torch_pi2.report import figures, figures_plan, figures_run
from torch_pi2.report.facts import Report
from torch_pi2.report.glossary import marked
from torch_pi2.report.looks import Plot
from torch_pi2.report.sections import header, layers, made, missing
from torch_pi2.report.style import CSS, JS, THEMES

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def write(report: Report, path: str | Path) -> Path:
    """Write ``report`` to ``path``, by atomic rename; returns it.

    Raises:
        LibraryMissingError: plotly is not installed. ArtifactError: ``path`` cannot be written.
    """
    script = _plotly_js()
    atomic_write(path, (piece.encode() for piece in _page(report, script)))
    return Path(path)


def plots(report: Report) -> dict[str, list[Plot]]:
    """Those that the report has numbers for, by section."""
    found: dict[str, list[Plot]] = {"Neurons": [], "Plan": [], "Time": [], "Cache": [], "Threads and reads": []}
    if any(row.cdf for row in report.firing):
        found["Neurons"].append(figures.cdf(report.firing))
    if any(row.by_batch for row in report.firing):
        found["Neurons"].append(figures.sparsity(report.firing))
    if report.plan is not None:
        found["Plan"].append(figures_plan.plan(report.plan))
        if report.plan.curve is not None:
            found["Plan"].append(figures.loss_curve(report.plan.curve))
        if any(row.predictor for row in report.plan.rows):
            found["Plan"].append(figures.predictors(report.plan.rows))
    predicted = report.plan is not None and any(bucket.ms for bucket in report.plan.buckets)
    if predicted or report.measured:
        found["Time"].append(figures_plan.times(report.plan, report.measured))
    if report.rivals:
        found["Time"].append(figures_plan.rivals(report.rivals))
    if report.cache is not None:
        buckets = report.plan.buckets if report.plan else ()
        found["Cache"] += [figures_run.hits_over_time(report.cache), figures_run.hits_by_size(report.cache, buckets)]
    if report.timeline is not None:
        found["Threads and reads"] += [figures_run.busy(report.timeline), figures_run.spans(report.timeline)]
    return found


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_package("plotly", "report", error) from error
    return str(get_plotlyjs())


def _page(report: Report, plotly_js: str) -> Iterator[str]:
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.model.name)}: torch_pi2 report</title><style>{CSS}</style></head><body><main>\n"
    )
    yield header(report)
    for section, found in plots(report).items():
        if found:
            yield (
                f'<h2>{section}</h2><div class="grid">'
                + "".join(_card(plot, len(found)) for plot in found)
                + "</div>\n"
            )
    yield layers(report)
    yield missing(report)
    yield made(report)
    yield '</main>\n<script type="text/plain" id="plotly">'
    yield base64.b64encode(gzip.compress(plotly_js.encode(), mtime=0)).decode()
    licence = plotly_js.partition("*/")[0].replace("--", "- -")
    yield f"</script>\n<!-- {licence} -->\n"
    yield f"<script>{JS.replace('THEMES', json.dumps(THEMES))}</script>\n</body></html>\n"


def _card(plot: Plot, together: int) -> str:
    """A plot with its title and its sentence; alone in its row if it is alone, or wants the width."""
    wide = " wide" if together == 1 or plot.wide else ""
    # "<" would end the script element early, in a key of a damaged or hostile file.
    figure = json.dumps(plot.figure).replace("<", "\\u003c")
    return (
        f'<section class="card{wide}"><h3>{escape(plot.title)}</h3><p>{marked(plot.read)}</p>'
        f'<div class="plot" id="{plot.name}" style="height:{plot.height}px"></div>'
        f'<script type="application/json" id="{plot.name}-figure">{figure}</script></section>\n'
    )
