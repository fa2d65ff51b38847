"""The report as one self-contained HTML file, with plotly.js in it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from torch_pi2.base.files import atomic_write
from torch_pi2.base.package import missing_package
from torch_pi2.base.units import percent, size
from torch_pi2.report.plots import Plot, plots

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_CSS = """
*{box-sizing:border-box}
body{margin:0;background:#f4f5f7;color:#20242b;font:15px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:28px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:20px;margin:36px 0 12px}h3{margin:0 0 4px}
p{margin:0 0 8px;color:#68707c}
.badge{display:inline-block;border-radius:999px;padding:1px 10px;margin:6px 6px 0 0;background:#fff}
.badge.warn{background:#f28e2b}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:#fff;border:1px solid #e3e6ea;border-radius:12px;padding:16px;min-width:0;margin-top:16px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid #e3e6ea}
th:first-child,td:first-child,.text{text-align:left}
code{display:block;overflow-x:auto;white-space:pre;background:#f4f5f7;padding:6px 10px;margin:4px 0 12px}
"""
#: Unpacks plotly.js, which gzip makes three times smaller, and draws every plot.
_JS = """
async function draw() {
  const bytes = Uint8Array.from(atob(document.getElementById('plotly').textContent), (c) => c.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const script = document.createElement('script');
  script.textContent = await new Response(plain).text();
  document.head.append(script);
  for (const plot of document.querySelectorAll('.plot')) {
    const figure = JSON.parse(document.getElementById(plot.id + '-figure').textContent);
    Plotly.newPlot(plot, figure.data, figure.layout, {responsive: true, displaylogo: false});
  }
}
draw().catch((error) => {
  console.error(error);
  for (const plot of document.querySelectorAll('.plot')) plot.textContent = 'The plots need a newer browser: ' + error;
});
"""
_NOTE = "In brackets: the number of sequences that are decoded together. Shares are of neurons and per token."


def write(report: Mapping[str, Any], path: str | Path) -> Path:
    """Write ``report`` to ``path`` by atomic rename, and return the path.

    Raises:
        LibraryMissingError: plotly is not installed. ArtifactError: ``path`` cannot be written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_package("plotly", "report", error) from error
    atomic_write(path, (piece.encode() for piece in _page(report, str(get_plotlyjs()))))
    return Path(path)


def _page(report: Mapping[str, Any], plotly_js: str) -> Iterator[str]:
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report['model']['name'])}: torch_pi2 report</title><style>{_CSS}</style></head><body><main>\n"
    )
    yield from _header(report)
    for section, found in plots(report).items():
        if found:
            yield f'<h2>{section}</h2><div class="grid">{"".join(map(_card, found))}</div>\n'
    if report["plan"] is not None:
        yield from _layers(report["plan"], {row["key"]: row["active_share"] for row in report["firing"]})
    if report["missing"]:
        rows = [(m["plot"], f"{escape(m['why'])}<code>{escape(m['how'])}</code>") for m in report["missing"]]
        yield f"<h2>Not in this report</h2>{_list(rows)}"
    yield f"<h2>This report</h2>{_list([(name, escape(text)) for name, text in report['made'].items()])}"
    yield '</main>\n<script type="text/plain" id="plotly">'
    yield base64.b64encode(gzip.compress(plotly_js.encode(), mtime=0)).decode()
    licence = plotly_js.partition("*/")[0].replace("--", "- -")
    yield f"</script>\n<!-- {licence} -->\n<script>{_JS}</script>\n</body></html>\n"


def _list(rows: list[tuple[str, str]]) -> str:
    """A card with a list of names and HTML values."""
    return f'<section class="card"><dl>{"".join(f"<dt>{escape(n)}</dt><dd>{v}</dd>" for n, v in rows)}</dl></section>\n'


def _card(plot: Plot) -> str:
    figure = json.dumps(plot.figure).replace("<", "\\u003c")  # "<" could end the script element early
    return (
        f'<section class="card"><h3>{escape(plot.title)}</h3><p>{escape(plot.read)}</p>'
        f'<div class="plot" id="{plot.name}"></div>'
        f'<script type="application/json" id="{plot.name}-figure">{figure}</script></section>\n'
    )


def _header(report: Mapping[str, Any]) -> Iterator[str]:
    """Name, verdict and facts; warnings about random weights and published figures come first."""
    model, plan = report["model"], report["plan"]
    hardware = plan and plan["hardware"]
    yield f"<h1>{escape(model['name'])}</h1><p>{escape(model['shape'])}</p>"
    if hardware and hardware["source"] == "published":
        text = f"plan for PUBLISHED figures of {hardware['name']}, not measured"
        yield f'<span class="badge warn">{escape(text)}</span>'
    if model["synthetic"]:
        yield f'<span class="badge warn">{escape("SYNTHETIC: " + model["synthetic"])}</span>'
    yield f'<span class="badge">{escape("a neuron store" if model["stored"] else "in memory")}</span>'
    verdict = [(name, escape(text)) for name, text in report["verdict"].items()]
    how = "Nobody measured it: torch-pi2 optimize, quantize and pack do, unless with --no-verdict."
    yield f"<h2>Verdict</h2>{_list(verdict or [('none', how)])}"
    facts = [("neurons' weights", model["weights"])]
    if report["firing"]:
        mean = sum(row["active_share"] for row in report["firing"]) / len(report["firing"])
        facts.append(("neurons that fire per token", f"{mean:.1%} of {sum(r['neurons'] for r in report['firing']):,}"))
    facts.append(("planner", plan["planner"] if plan else ""))
    if hardware:
        budget = hardware["budget_bytes"]
        facts += [
            ("planned for", f"{hardware['name']} ({hardware['source']})"),
            ("memory budget", "everything in memory" if budget is None else size(budget)),
            ("accelerator's memory", size(hardware["accelerator_bytes"]) if hardware["accelerator_bytes"] else ""),
            ("context", f"{hardware['context']:,} tokens"),
            ("settings of the plan", ", ".join(f"{name} {value}" for name, value in hardware["settings"].items())),
        ]
    total = sum(model["bytes"].values())
    facts += [(name, f"{size(n)} ({n / total:.1%} of the files)") for name, n in model["bytes"].items() if n]
    facts.append(("FFN weights, SHA-256", model["model_hash"][:12]))
    yield f"<h2>Model</h2>{_list([(name, escape(text)) for name, text in facts if text])}"


def _layers(plan: Mapping[str, Any], firing: Mapping[str, float]) -> Iterator[str]:
    hot = [f"hot ({bucket['batch']})" if bucket["batch"] else "hot" for bucket in plan["buckets"]]
    columns = ["layer", "method", "neurons", *(["fire"] if firing else []), *hot, "cold computed", "rank", "recall"]
    columns += ["precision", "predictor"]
    yield f'<h2>Layers</h2><section class="card"><p>{escape(_NOTE)}</p><div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{escape(name)}</th>" for name in columns) + "</tr></thead><tbody>"
    for row in plan["rows"]:
        key = row["key"] if row["experts"] == 1 else f"{row['key']} ({row['experts']} experts)"
        cells = [key, row["method"], f"{row['neurons']:,}", *([percent(firing.get(row["key"]))] if firing else [])]
        cells += [*(f"{count:,}" for count in row["hot"]), percent(row["expected_active"])]
        card = row["predictor"]
        cells += (
            [f"{card['rank']:.0f}", percent(card["recall"]), percent(card["precision"]), size(card["bytes"])]
            if card
            else ["-"] * 4
        )
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div></section>\n"
