"""Gathers the numbers of a report from a folder that was saved or packed, and from files of runs of its model."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from torch_pi2.base import process
from torch_pi2.base.units import size
from torch_pi2.checkpoint.save_load import planned_anew
from torch_pi2.errors import ArtifactError
from torch_pi2.report import missing
from torch_pi2.report.caches import read_accesses
from torch_pi2.report.facts import Firing, Report
from torch_pi2.report.measured import read_measured
from torch_pi2.report.model import describe
from torch_pi2.report.planned import planned
from torch_pi2.report.timeline import read_trace
from torch_pi2.store.parts import Parts
from torch_pi2.types.stats import ActivationStats, LayerStats
from torch_pi2.types.verdict import Verdict

#: Points of a curve: as many as a line 300 pixels wide shows.
_POINTS = 60


def collect(
    folder: str | Path,
    *,
    trace: str | Path | None = None,
    accesses: str | Path | None = None,
    measured: Sequence[str | Path] = (),
    plan: str | Path | None = None,
    progress: bool = False,
) -> Report:
    """Read what is known of the model in ``folder``. Needs none of its weights in memory, and runs nothing of it.

    Args:
        folder: a model that was saved (``torch_pi2.save``, ``torch-pi2 optimize``) or packed.
        trace: what :class:`torch_pi2.trace` wrote. accesses: what :class:`torch_pi2.record_accesses` did.
        measured: JSON of ``torch-pi2 plan``, ``bench plan`` or ``bench decode``.
        plan: folder of another plan for the model than its own, as :func:`torch_pi2.load` takes it.
        progress: a progress bar on standard error, if replaying takes over two seconds.

    Raises:
        ArtifactError: nothing of ours is in the folder; a file is missing or damaged.
        StaleArtifactError: statistics, predictors or accesses are of other weights; ``plan`` is for another folder.
    """
    folder = Path(folder)
    inner = folder / "pi2" if (folder / "pi2").is_dir() else folder
    with Parts(inner) as parts:
        if not parts.has("plan") and not parts.has("stats"):
            raise ArtifactError(
                str(folder),
                expected="a model folder, with pi2/plan.json, pi2/stats.safetensors or pi2/model.pi2 in it",
                found="none of them" if folder.is_dir() else "no such folder",
                fix="Pass a folder written by torch-pi2 optimize, quantize, synthetic or pack.",
            )
        own = parts.plan() if parts.has("plan") else None
        model_hash = own.model_hash if own else None
        stats, predictors = parts.stats(model_hash), parts.predictors(model_hash)
    followed = planned_anew(own, plan, folder) if own else None
    model, neuron_bytes = describe(folder, inner, own, stats)
    verdict = Verdict.find(inner, model.model_hash or None)
    runs = [read_measured(path) for path in measured]
    found = Report(
        model=model,
        firing=firing(stats) if stats else (),
        plan=planned(followed, predictors, neuron_bytes) if followed else None,
        measured=tuple(run for found, _ in runs for run in found),
        rivals=tuple(case for _, found in runs for case in found),
        cache=None if accesses is None else read_accesses(accesses, model.model_hash, progress=progress),
        timeline=None if trace is None else read_trace(trace),
        missing=(),
        verdict={} if verdict is None else verdict.lines(),
        made=_made(folder, {"plan": plan, "trace": trace, "accesses": accesses}, measured),
    )
    return missing.completed(found, folder)


def _made(folder: Path, files: Mapping[str, str | Path | None], measured: Sequence[str | Path]) -> dict[str, str]:
    """When, by what command and on what machine; of files the names alone."""
    about = process.describe()
    given = [(name, path) for name, path in files.items() if path is not None]
    given += [("measured", path) for path in measured]
    words = [word for name, path in given for word in (f"--{name}", Path(path).name)]
    machine = f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {size(about['machine']['memory_bytes'])}"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["torch-pi2", "report", folder.resolve().name, *words]),
        "machine": machine,
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }


def firing(stats: ActivationStats) -> tuple[Firing, ...]:
    """By layer, and by block of experts."""
    groups = groupby(stats, key=lambda layer: layer.experts or layer.key)
    return tuple(_firing(key, list(layers)) for key, layers in groups)


def _firing(key: str, layers: list[LayerStats]) -> Firing:
    fired = torch.cat([layer.fired for layer in layers])
    seen = [layer for layer in layers if layer.tokens]  # no router may have chosen an expert
    sizes = [set(_sizes(layer)) for layer in seen] or [set()]
    return Firing(
        key=key,
        tokens=max(layer.tokens for layer in layers),
        neurons=len(fired),
        never=int((fired == 0).sum()),
        active_share=float(np.mean([layer.active_share for layer in seen or layers])),
        cdf=_cdf(fired),
        by_batch={
            batch: float(np.mean([float(layer.frequency(batch).mean()) for layer in seen]))
            for batch in sorted(set.intersection(*sizes))
        },
    )


def _sizes(layer: LayerStats) -> list[int]:
    """Of the batches that were seen."""
    return [batch for batch, seen in zip(layer.batch_sizes, layer.batch_groups.tolist(), strict=True) if seen > 0]


def _cdf(fired_I: torch.Tensor) -> tuple[tuple[float, float], ...]:
    """Some points of (share of neurons, share of firings): denser where the curve is steep. None where none fired."""
    below = np.cumsum(np.sort(fired_I.numpy())[::-1].astype(np.float64))
    n = len(below)
    if n == 0 or below[-1] == 0:
        return ()
    at = np.unique(np.concatenate([np.geomspace(1, n, _POINTS), np.linspace(1, n, _POINTS)]).round().astype(int))
    return ((0.0, 0.0), *((float(i / n), float(below[i - 1] / below[-1])) for i in at))
