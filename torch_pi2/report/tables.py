"""The table of layers, and what the report lacks."""

from __future__ import annotations

from html import escape

from torch_pi2.report.facts import Report, Row
from torch_pi2.report.looks import percent, size

_TEXT = ("layer", "method")
_NOTE = "In brackets: the number of sequences that are decoded together. Shares are of neurons and per token."


def layers(report: Report) -> str:
    """HTML: a line per layer, or per block of experts."""
    if report.plan is None:
        return ""
    batches = [bucket.batch for bucket in report.plan.buckets]
    hot = [f"hot ({batch})" if batch else "hot" for batch in batches]
    firing = {row.key: row.active_share for row in report.firing}
    columns = ["layer", "method", "neurons", *(["fire"] if firing else []), *hot, "cold computed"]
    columns += ["rank", "recall", "precision", "predictor", "neurons' bytes"]
    head = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in columns)
    body = ""
    for row in report.plan.rows:
        cells = [_key(row), row.method, f"{row.neurons:,}", *([percent(firing.get(row.key))] if firing else [])]
        cells += [*(f"{count:,}" for count in row.hot), percent(row.expected_active), *_predictor(row)]
        cells.append("-" if row.bytes is None else size(row.bytes))
        line = "".join(f"<td{_kind(name)}>{escape(cell)}</td>" for name, cell in zip(columns, cells, strict=True))
        body += f"<tr>{line}</tr>"
    return (
        f'<h2>Layers</h2><section class="card"><p>{_NOTE}</p><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>\n"
    )


def _kind(column: str) -> str:
    return ' class="text"' if column in _TEXT else ""


def _key(row: Row) -> str:
    return row.key if row.experts == 1 else f"{row.key} ({row.experts} experts)"


def _predictor(row: Row) -> list[str]:
    card = row.predictor
    if card is None:
        return ["-"] * 4
    return [str(card.rank or "-"), percent(card.recall), percent(card.precision), size(card.bytes)]


def missing(report: Report) -> str:
    """HTML: which plots are not there, and how to get them."""
    if not report.missing:
        return ""
    rows = "".join(
        f"<dt>{escape(m.plot)}</dt><dd>{escape(m.why)}<code>{escape(m.how)}</code></dd>" for m in report.missing
    )
    return f'<h2>Not in this report</h2><section class="card"><dl style="margin:0">{rows}</dl></section>\n'
