"""Gathers the facts of a report from a model folder, as plain JSON values.

A *row* is a feed-forward layer, or all experts of a block together: a mixture has thousands.
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_pi2.base.units import size
from torch_pi2.checkpoint.save_load import checked_plan
from torch_pi2.errors import ArtifactError
from torch_pi2.machine import process
from torch_pi2.store.folder import read_config
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.weights import WEIGHTS_FILE, QuantizedWeights
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.stats import LayerStats
from torch_pi2.types.verdict import Verdict

if TYPE_CHECKING:
    from torch_pi2.predict import AnyPredictor

#: The facts of a report, as JSON values. Unknown parts are None or empty, and listed in ``missing``.
Report = dict[str, Any]
#: Points of a curve, enough for a line 300 pixels wide.
_POINTS = 60


def collect(folder: str | Path, *, plan: str | Path | None = None) -> Report:
    """Read the facts about the model in ``folder``, without loading weights or running it.

    Args:
        folder: a model that was saved (``torch_pi2.save``, ``torch-pi2 optimize``) or packed.
        plan: folder of another plan than the model's own, as :func:`torch_pi2.load` takes it.

    Raises:
        ArtifactError: the folder has no files of torch_pi2, or one is missing or damaged.
        StaleArtifactError: statistics or predictors are of other weights, or ``plan`` is for another folder.
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
    followed = checked_plan(own, plan, folder) if own else None
    model = _model(folder, inner, model_hash or (stats.model_hash if stats else ""))
    verdict = Verdict.find(inner, model["model_hash"] or None)
    about, words = process.describe(), [] if plan is None else ["--plan", Path(plan).name]
    machine = about["machine"]
    report: Report = {
        "model": model,
        "firing": [_firing(key, list(group)) for key, group in groupby(stats or (), key=lambda y: y.experts or y.key)],
        "plan": plan_facts(followed, predictors) if followed else None,
        "verdict": {} if verdict is None else dict(verdict.lines()),
        "made": {  # without paths of the machine
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": shlex.join(["torch-pi2", "report", folder.resolve().name, *words]),
            "machine": f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])}",
            "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        },
    }
    return report | {"missing": _missing(report, folder)}


def _model(folder: Path, inner: Path, model_hash: str) -> dict[str, Any]:
    """Name, sizes, and bytes: by purpose for a store, else by file."""
    if stored := os.path.lexists(inner / STORE_FILE):
        with StoreReader(inner / STORE_FILE) as store:
            weights, by_part = store.neuron_formats, store.regions()
    else:
        files = [*folder.glob("*.safetensors"), *inner.glob("*.safetensors"), *inner.glob("plan.*")]
        by_part = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
        weights = ""
        if os.path.lexists(inner / WEIGHTS_FILE):
            with QuantizedWeights(inner / WEIGHTS_FILE) as file:
                weights = file.neuron_formats
    config = read_config(folder) if os.path.lexists(folder / "config.json") else {}
    label = config.get("torch_pi2_synthetic")
    return {
        "name": folder.resolve().name,
        "shape": _shape(config),
        "synthetic": label and str(label["synthetic"] if isinstance(label, dict) and "synthetic" in label else label),
        "stored": stored,
        "weights": weights or str(config.get("dtype") or ""),
        "model_hash": model_hash,
        "bytes": by_part,
    }


def _shape(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    sizes = {**config, **text} if isinstance(text, dict) else config
    units = {
        "num_hidden_layers": "layers",
        "hidden_size": "wide",
        "intermediate_size": "neurons each",
        "num_attention_heads": "heads",
        "vocab_size": "tokens in the vocabulary",
    }
    known = [f"{sizes[name]:,} {unit}" for name, unit in units.items() if isinstance(sizes.get(name), int)]
    return ", ".join([str(config.get("model_type", "")), *known])


def _firing(key: str, layers: list[LayerStats]) -> dict[str, Any]:
    """The row of a layer, or of a block of experts.

    ``cdf``: points (share of neurons, the most frequent first; their share of all firings). ``by_batch``: number of
    tokens -> mean share of neurons that fire for at least one of them.
    """
    fired = torch.cat([layer.fired for layer in layers])
    seen = [layer for layer in layers if layer.tokens]  # some experts may have been routed no token
    sizes = [{b for b, n in zip(y.batch_sizes, y.batch_groups.tolist(), strict=True) if n > 0} for y in seen]
    return {
        "key": key,
        "neurons": len(fired),
        "active_share": float(np.mean([layer.active_share for layer in seen or layers])),
        "cdf": _cdf(fired),
        "by_batch": {
            batch: float(np.mean([float(layer.frequency(batch).mean()) for layer in seen]))
            for batch in sorted(set.intersection(*sizes or [set()]))
        },
    }


def _cdf(fired_I: torch.Tensor) -> list[tuple[float, float]]:
    """Points of the curve, denser where it is steep; empty if no neuron fired."""
    below = np.cumsum(np.sort(fired_I.numpy())[::-1].astype(np.float64))
    n = len(below)
    if n == 0 or below[-1] == 0:
        return []
    at = np.unique(np.concatenate([np.geomspace(1, n, _POINTS), np.linspace(1, n, _POINTS)]).round().astype(int))
    return [(0.0, 0.0), *((float(i / n), float(below[i - 1] / below[-1])) for i in at)]


def plan_facts(plan: Plan, predictors: Mapping[str, AnyPredictor]) -> dict[str, Any]:
    """``rows`` in order of execution, ``buckets`` by batch size (0: any), ``hardware`` (None: any machine)."""
    hardware, nothing = plan.hardware, (0,) * len(plan.layers)
    counts = [(tuple(layer.n_hot for layer in plan.layers), nothing, nothing)]
    buckets: list[dict[str, Any]] = [{"batch": 0, "cache_bytes": 0, "ms": {}}]
    if hardware is not None:
        counts = [(b.hot, b.accelerator, b.resident) for b in hardware.buckets]
        buckets = [{"batch": b.batch, "cache_bytes": b.cache_bytes, "ms": dict(b.ms)} for b in hardware.buckets]
    groups = groupby(enumerate(plan.layers), key=lambda numbered: numbered[1].site.experts or numbered[1].site.key)
    made_for = hardware.made_for if hardware else {}
    return {
        "planner": str(made_for.get("planner", plan.made_by.get("planner", "unknown"))),
        "rows": [_row(key, list(group), counts, predictors) for key, group in groups],
        "buckets": buckets,
        "hardware": None if hardware is None else _hardware(hardware),
    }


def _row(
    key: str,
    group: list[tuple[int, LayerPlan]],
    counts: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    predictors: Mapping[str, AnyPredictor],
) -> dict[str, Any]:
    """``hot``, ``accelerator`` and ``resident`` neurons by bucket; of predictors bytes in sum, else means."""
    numbers, layers = [i for i, _ in group], [layer for _, layer in group]
    places = {
        name: [sum(bucket[kind][i] for i in numbers) for bucket in counts]
        for kind, name in enumerate(("hot", "accelerator", "resident"))
    }
    known = [predictors[layer.site.key].card for layer in layers if layer.site.key in predictors]
    cards = [card for card in known if card is not None]
    means = {
        name: float(np.mean([getattr(card, name) for card in cards]))
        for name in (("recall", "precision", "rank") if cards else ())
    }
    return {
        "key": key,
        "experts": len(layers),
        "neurons": sum(layer.site.intermediate for layer in layers),
        "method": ", ".join(sorted({layer.method for layer in layers})),
        "expected_active": float(np.mean([layer.expected_active for layer in layers])),
        **places,
        "predictor": means and {"bytes": sum(card.bytes for card in cards), **means},
    }


def _hardware(plan: Any) -> dict[str, Any]:
    """The plan's machine; ``source``: ``measured`` or ``published``; ``budget_bytes`` None: all in memory."""
    settings = {f"{role} threads": str(count) for role, count in plan.threads.items()}
    settings |= {name.replace("_", " "): str(value) for name, value in plan.offload.items()}
    return {
        "name": str(plan.made_for.get("hardware", "unknown")),
        "source": str(plan.made_for.get("source", "unknown")),
        "budget_bytes": plan.budget_bytes,
        "accelerator_bytes": plan.accelerator_bytes,
        "context": plan.context,
        "settings": settings,
    }


def _missing(report: Report, folder: Path) -> list[dict[str, str]]:
    """Plots that cannot be drawn, why, and the commands that make them possible."""
    plan, model, name = report["plan"], report["model"], shlex.quote(str(folder))
    found: list[tuple[str, str, str]] = []
    if not report["firing"]:
        why = "there are no statistics in the folder" + (": its weights are random" if model["synthetic"] else "")
        how = f"with torch_pi2.watch(model) as watched: ...   # then: watched.stats().save({str(folder / 'pi2')!r})"
        found.append(("Which neurons fire; sparsity by batch size", why, how))
    if plan is None:
        how = "torch-pi2 plan CHECKPOINT --out DIR"
        found.append(("Plan, predictors, predicted times", "there is no plan in the folder", how))
    elif not any(bucket["ms"] for bucket in plan["buckets"]):
        how = f"torch-pi2 plan {name} --hardware measured --out DIR   # then: --plan DIR"
        found.append(("Plan by batch size; predicted times", "the plan is not made for a machine", how))
    return [{"plot": plot, "why": why, "how": how} for plot, why, how in found]
