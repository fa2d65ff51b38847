"""What the page says beside its plots: which model, for which machine, its bytes and layers, and what is missing."""

from __future__ import annotations

from html import escape

from torch_pi2.base.units import percent, size
from torch_pi2.report.facts import Report, Row
from torch_pi2.report.glossary import marked

_COLOURS = ("#4fa8a0", "#4e79a7", "#a76fa5", "#e3c23f", "#9aa0a6")
_TEXT = ("layer", "method")
_NOTE = "In brackets: the number of sequences that are decoded together. Shares are of neurons and per token."


def header(report: Report) -> str:
    """HTML. What is random or published, and not measured, is said first."""
    model, plan = report.model, report.plan
    badges = [("a neuron store" if model.stored else "in memory", "")]
    if model.synthetic:
        badges.insert(0, (f"SYNTHETIC: {model.synthetic}", " warn"))
    if plan and plan.hardware and plan.hardware.source == "published":
        badges.insert(0, (f"plan for PUBLISHED figures of {plan.hardware.name}, not measured", " warn"))
    shown = "".join(f'<span class="badge{kind}">{marked(text)}</span>' for text, kind in badges)
    shape = f'<p class="soft">{escape(model.shape)}</p>' if model.shape else ""
    facts = "".join(f'<div class="fact"><span>{marked(n)}</span><b>{escape(v)}</b></div>' for n, v in _facts(report))
    title = f"<h1>{escape(model.name)}</h1>{shape}{shown}"
    return f'{title}{_verdict(report)}<div class="facts">{facts}</div>{_settings(report)}{_bytes(report)}\n'


def _verdict(report: Report) -> str:
    """What became of the model; in words."""
    if not report.verdict:
        how = "Nobody measured it: torch-pi2 optimize, quantize and pack do, unless with --no-verdict."
        return f'<section class="card verdict"><h2>Verdict</h2><p>{how}</p></section>'
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{marked(text)}</dd>" for name, text in report.verdict.items())
    return f'<section class="card verdict"><h2>Verdict</h2><dl>{rows}</dl></section>'


def made(report: Report) -> str:
    """HTML: when and how the page itself was made."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.made.items())
    return f'<h2>This report</h2><section class="card verdict"><dl>{rows}</dl></section>\n' if rows else ""


def _facts(report: Report) -> list[tuple[str, str]]:
    model, plan = report.model, report.plan
    found = []
    if model.weights:
        found.append(("neurons' weights", model.weights))
    if report.firing:
        mean = sum(row.active_share for row in report.firing) / len(report.firing)
        found.append(("neurons that fire per token", f"{mean:.1%} of {sum(r.neurons for r in report.firing):,}"))
    if plan:
        found.append(("planner", plan.planner))
        found += _machine(report)
    return [*found, ("FFN weights, SHA-256", model.model_hash[:12])] if model.model_hash else found


def _machine(report: Report) -> list[tuple[str, str]]:
    assert report.plan is not None
    hardware = report.plan.hardware
    if hardware is None:
        return [("planned for", "any machine, any batch")]
    budget = "everything in memory" if hardware.budget_bytes is None else size(hardware.budget_bytes)
    found = [("planned for", f"{hardware.name} ({hardware.source})"), ("memory budget", budget)]
    if hardware.accelerator_bytes:
        found.append(("accelerator's memory", size(hardware.accelerator_bytes)))
    found.append(("context", f"{hardware.context:,} tokens"))
    return found


def _settings(report: Report) -> str:
    if report.plan is None or report.plan.hardware is None:
        return ""
    settings = ", ".join(f"{name} {value}" for name, value in report.plan.hardware.settings.items())
    return f'<p class="soft" style="margin-top:10px">The plan\'s settings: {escape(settings)}.</p>'


def _bytes(report: Report) -> str:
    parts = {name: count for name, count in report.model.bytes.items() if count}
    total = sum(parts.values())
    if not total:
        return ""
    coloured = list(zip(parts.items(), (*_COLOURS, *_COLOURS), strict=False))
    bar = "".join(f'<div style="flex:{count};background:{colour}"></div>' for (_, count), colour in coloured)
    key = "".join(
        f'<span><i style="background:{colour}"></i>{marked(name)} {size(count)} ({count / total:.1%})</span>'
        for (name, count), colour in coloured
    )
    return (
        f'<section class="card" style="margin-top:16px"><h3>{size(total)} of files</h3><div class="bar">{bar}</div>'
        f'<div class="key">{key}</div></section>'
    )


def layers(report: Report) -> str:
    """HTML: a line per layer, or per block of experts."""
    if report.plan is None:
        return ""
    batches = [bucket.batch for bucket in report.plan.buckets]
    hot = [f"hot ({batch})" if batch else "hot" for batch in batches]
    firing = {row.key: row.active_share for row in report.firing}
    columns = ["layer", "method", "neurons", *(["fire"] if firing else []), *hot, "cold computed"]
    columns += ["rank", "recall", "precision", "predictor", "neurons' bytes"]
    head = "".join(f"<th{_kind(name)}>{marked(name)}</th>" for name in columns)
    body = ""
    for row in report.plan.rows:
        cells = [_key(row), row.method, f"{row.neurons:,}", *([percent(firing.get(row.key))] if firing else [])]
        cells += [*(f"{count:,}" for count in row.hot), percent(row.expected_active), *_predictor(row)]
        cells.append("-" if row.bytes is None else size(row.bytes))
        line = "".join(f"<td{_kind(name)}>{escape(cell)}</td>" for name, cell in zip(columns, cells, strict=True))
        body += f"<tr>{line}</tr>"
    return (
        f'<h2>Layers</h2><section class="card"><p>{marked(_NOTE)}</p><div class="scroll"><table>'
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
