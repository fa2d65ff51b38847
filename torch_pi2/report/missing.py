"""Which plots a report lacks, why, and what to run to get them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from torch_pi2.report.facts import Missing, Report

_ACCESSES = (
    "with torch_pi2.record_accesses(model, 'accesses'): ...   # then: torch-pi2 report {folder} --accesses accesses"
)
_TRACE = "torch-pi2 generate {folder} --prompt TEXT --trace out.json && torch-pi2 report {folder} --trace out.json"
_WATCHED = (
    "with torch_pi2.watch(model) as watched: ...   # counts what fires while the model is used\n"
    "watched.stats().save({pi2})"
)
_MEASURED = (
    "torch-pi2 plan {folder} --hardware measured --explain --measure-run --json > now.json && "
    "torch-pi2 report {folder} --measured now.json"
)


def completed(report: Report, folder: Path) -> Report:
    """``report``, with what it lacks."""
    names = {"folder": shlex.quote(str(folder)), "pi2": repr(str(folder / "pi2"))}  # in a shell, in Python
    found = [*_firing(report), *_planned(report), *_runs(report)]
    return replace(report, missing=tuple(replace(m, how=m.how.format(**names)) for m in found))


def _firing(report: Report) -> list[Missing]:
    if report.firing:
        return []
    plots = "Which neurons fire; sparsity by batch size"
    why = "There are no statistics in the folder."
    if report.model.synthetic:
        why = "A model of random weights has no statistics: nothing was profiled."
    return [Missing(plots, why, _WATCHED)]


def _planned(report: Report) -> list[Missing]:
    if report.plan is None:
        return [Missing("Plan, predictors", "There is no plan in the folder.", "torch-pi2 plan CHECKPOINT --out DIR")]
    found = []
    if not any(row.predictor for row in report.plan.rows):
        why = "No layer has a predictor: cold neurons are chosen by " + _methods(report) + "."
        how = "torch-pi2 optimize CHECKPOINT --method lowrank --out DIR"
        found.append(Missing("Predictors: recall and size", why, how))
    if report.plan.hardware is None:
        why = (
            "The plan is not made for a machine: the same neurons are hot whatever the batch, and no time is predicted."
        )
        how = "torch-pi2 doctor --measure && torch-pi2 plan {folder} --hardware measured --out DIR   # then: --plan DIR"
        found.append(Missing("Plan by batch size; predicted times", why, how))
    elif not any(bucket.ms for bucket in report.plan.buckets):
        why, how = "The plan has no predictions.", "torch-pi2 plan {folder} --hardware measured --out DIR"
        found.append(Missing("Predicted times", why, how))
    return found


def _methods(report: Report) -> str:
    assert report.plan is not None
    return ", ".join(sorted({row.method for row in report.plan.rows}))


def _runs(report: Report) -> list[Missing]:
    found = []
    if not report.measured:
        found.append(Missing("Measured times", "No measurement was given.", _MEASURED))
    if not report.rivals:
        found.append(Missing("What planning gains", "No comparison of planners was given.", _MEASURED))
    if report.cache is None and report.model.stored:
        found.append(Missing("Cache hits over time and by size", "No recording of accesses was given.", _ACCESSES))
    elif report.cache is None:
        why = "The model is in memory as a whole: there is no cache."
        how = "torch-pi2 pack {folder} STORE   # then load it with a budget, and record accesses"
        found.append(Missing("Cache hits over time and by size", why, how))
    if report.timeline is None:
        found.append(Missing("Timeline of threads and reads", "No trace was given.", _TRACE))
    return found
