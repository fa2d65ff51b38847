"""Gathers the facts of a report as plain JSON values: from a model folder, and from files that runs of the model wrote.

A *row* is a feed-forward layer, or all experts of a block together: a mixture has thousands.
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.base.units import size
from torch_pi2.checkpoint.save_load import checked_plan
from torch_pi2.errors import ArtifactError
from torch_pi2.machine import process
from torch_pi2.report.runs import read_accesses, read_measured, read_trace
from torch_pi2.store.folder import read_config
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.weights import WEIGHTS_FILE, QuantizedWeights
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.stats import ActivationStats, LayerStats, LossCurve
from torch_pi2.types.verdict import Verdict

if TYPE_CHECKING:
    from torch_pi2.predict import AnyPredictor

#: The facts of a report; JSON values only. Parts that are not known are None or empty, and listed in ``missing``.
Report = dict[str, Any]
#: Points of a curve: as many as a line 300 pixels wide shows.
_POINTS = 60
#: Regions of a store, as the report calls them.
_REGIONS = {
    "bundles": "neurons",
    "linears": "attention, embeddings, head",
    "floats": "attention, embeddings, head",
    "predictors": "predictors",
    "plan": "plan and statistics",
    "stats": "plan and statistics",
}
_REST = "padding and checksums"
#: By plot: why it may be missing, and what to run; ``{0}`` is the folder.
_HOW = {
    "trace": "torch-pi2 generate {0} --prompt TEXT --trace out.json && torch-pi2 report {0} --trace out.json",
    "accesses": "with torch_pi2.record_accesses(model, 'accesses'): ...   # then: torch-pi2 report {0} --accesses FILE",
    "measured": "python -m benchmarks decode --json > now.json && torch-pi2 report {0} --measured now.json",
    "hardware": "torch-pi2 doctor --measure && torch-pi2 plan {0} --hardware measured --out DIR   # then: --plan DIR",
    "pack": "torch-pi2 pack {0} STORE   # then load it with a budget, and record accesses",
    "predictor": "torch-pi2 optimize CHECKPOINT --method lowrank --out DIR",
    "plan": "torch-pi2 plan CHECKPOINT --out DIR",
}


def collect(
    folder: str | Path,
    *,
    trace: str | Path | None = None,
    accesses: str | Path | None = None,
    measured: Sequence[str | Path] = (),
    plan: str | Path | None = None,
    progress: bool = False,
) -> Report:
    """Read what is known of the model in ``folder``. No weights are loaded and nothing is run.

    Args:
        folder: a model that was saved (``torch_pi2.save``, ``torch-pi2 optimize``) or packed.
        trace: a file written by :class:`torch_pi2.trace`. accesses: one written by :class:`torch_pi2.record_accesses`.
        measured: JSON of ``python -m benchmarks decode``.
        plan: folder of another plan for the model than its own, as :func:`torch_pi2.load` takes it.
        progress: show a progress bar on standard error if replaying takes over two seconds.

    Raises:
        ArtifactError: the folder has no files of torch_pi2; a file is missing or damaged.
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
    followed = checked_plan(own, plan, folder) if own else None
    model, neuron_bytes = _model(folder, inner, own, stats)
    verdict = Verdict.find(inner, model["model_hash"] or None)
    report: Report = {
        "model": model,
        "firing": firing_rows(stats) if stats else [],
        "plan": plan_facts(followed, predictors, neuron_bytes) if followed else None,
        "measured": [run for path in measured for run in read_measured(path)],
        "cache": None if accesses is None else read_accesses(accesses, model["model_hash"], progress=progress),
        "timeline": None if trace is None else read_trace(trace),
        "verdict": {} if verdict is None else dict(verdict.lines()),
        "made": _made(folder, {"plan": plan, "trace": trace, "accesses": accesses}, measured),
    }
    return report | {"missing": _missing(report, folder)}


def _made(folder: Path, files: Mapping[str, str | Path | None], measured: Sequence[str | Path]) -> dict[str, str]:
    """When, by which command and on which machine the report was made; of files the names alone."""
    about = process.describe()
    given = [(name, path) for name, path in files.items() if path is not None]
    words = [w for name, p in [*given, *(("measured", m) for m in measured)] for w in (f"--{name}", Path(p).name)]
    machine = f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {size(about['machine']['memory_bytes'])}"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["torch-pi2", "report", folder.resolve().name, *words]),
        "machine": machine,
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }


# --- the model


def _model(
    folder: Path, inner: Path, plan: Plan | None, stats: ActivationStats | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Name, sizes and bytes of the files by purpose; and the bytes of the neurons by site key."""
    stored = os.path.lexists(inner / STORE_FILE)
    weights, by_part, neurons = _store(inner / STORE_FILE) if stored else _saved(folder, inner, plan)
    shape, synthetic = _shape(folder / "config.json")
    return {
        "name": folder.resolve().name,
        "shape": shape,
        "synthetic": synthetic,
        "stored": stored,
        "weights": weights,
        "model_hash": plan.model_hash if plan else stats.model_hash if stats else "",
        "bytes": by_part,
    }, neurons


def _store(path: Path) -> tuple[str, dict[str, int], dict[str, int]]:
    with StoreReader(path) as store:
        by_part = dict.fromkeys((*_REGIONS.values(), _REST), 0)
        for region, count in store.regions().items():
            by_part[_REGIONS.get(region, _REST)] += count
        neurons = {key: y.neurons * y.neuron_bytes for key, y in zip(store.keys, store.entries, strict=True)}
        return store.neuron_formats, by_part, neurons


def _saved(folder: Path, inner: Path, plan: Plan | None) -> tuple[str, dict[str, int], dict[str, int]]:
    """Weights in ``pi2/weights.safetensors``, or as the checkpoint has them."""
    if os.path.lexists(inner / WEIGHTS_FILE):
        with QuantizedWeights(inner / WEIGHTS_FILE) as file:
            weights, specs = file.neuron_formats, file.specs
        neurons = {n.removesuffix(".bundles"): s.nbytes for n, s in specs.items() if n.endswith(".bundles")}
    else:
        specs = {}
        for path in sorted(folder.glob("*.safetensors")) if inner != folder else ():
            with TensorReader(path) as reader:
                specs |= reader.specs
        neurons, weights = _float_neurons(specs, plan)
    found = {
        "neurons": sum(neurons.values()),
        "attention, embeddings, head": sum(spec.nbytes for spec in specs.values()) - sum(neurons.values()),
        "predictors": _file_bytes(inner.glob("predictors.safetensors")),
        "plan and statistics": _file_bytes([*inner.glob("plan.*"), *inner.glob("stats.safetensors")]),
    }
    return weights, {part: count for part, count in found.items() if count}, neurons


def _float_neurons(specs: Mapping[str, Spec], plan: Plan | None) -> tuple[dict[str, int], str]:
    """Bytes of neurons by site, and their dtype; nothing where the weights are not there."""
    neurons: dict[str, int] = {}
    dtypes: set[str] = set()
    for layer in plan.layers if plan else ():
        spec = specs.get(layer.site.up.weight)
        if spec is not None:
            values = layer.site.rows_per_neuron * layer.site.intermediate * layer.site.hidden
            neurons[layer.site.key] = values * spec.dtype.itemsize
            dtypes.add(dtype_name(spec.dtype))
    return neurons, ", ".join(sorted(dtypes))


def _file_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _shape(path: Path) -> tuple[str, str | None]:
    """Class and sizes, and the label of random weights (None: a real model). Raises ArtifactError: damaged."""
    if not os.path.lexists(path):
        return "", None
    config = read_config(path.parent)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    names = config.get("architectures")
    words = [str(names[0] if isinstance(names, list) and names else config.get("model_type", ""))]
    units = {
        "num_hidden_layers": "layers",
        "hidden_size": "wide",
        "intermediate_size": "neurons each",
        "num_attention_heads": "heads",
        "vocab_size": "tokens in the vocabulary",
    }
    words += [f"{config[name]:,} {unit}" for name, unit in units.items() if isinstance(config.get(name), int)]
    label = config.get("torch_pi2_synthetic")
    if not label:
        return ", ".join(words), None
    share, shape = (label.get("active"), label.get("shape")) if isinstance(label, dict) else (None, None)
    said = "random weights" + (f" of the shape {shape}" if isinstance(shape, str) else "")
    said += f", made so that {share:.0%} of neurons fire" if isinstance(share, float) else ""
    return ", ".join(words), said


# --- what fires


def firing_rows(stats: ActivationStats) -> list[dict[str, Any]]:
    """A row per layer, or per block of experts.

    Each has ``cdf``: points (share of neurons, the most frequent first; share of all firings that are theirs), and
    ``by_batch``: tokens taken together -> mean share of neurons that fire for at least one of them.
    """
    groups = groupby(stats, key=lambda layer: layer.experts or layer.key)
    return [_firing(key, list(layers)) for key, layers in groups]


def _firing(key: str, layers: list[LayerStats]) -> dict[str, Any]:
    fired = torch.cat([layer.fired for layer in layers])
    seen = [layer for layer in layers if layer.tokens]  # a router may have chosen an expert for no token
    sizes = [set(_batch_sizes(layer)) for layer in seen] or [set()]
    return {
        "key": key,
        "tokens": max(layer.tokens for layer in layers),
        "neurons": len(fired),
        "never": int((fired == 0).sum()),
        "active_share": float(np.mean([layer.active_share for layer in seen or layers])),
        "cdf": _cdf(fired),
        "by_batch": {
            batch: float(np.mean([float(layer.frequency(batch).mean()) for layer in seen]))
            for batch in sorted(set.intersection(*sizes))
        },
    }


def _batch_sizes(layer: LayerStats) -> list[int]:
    return [batch for batch, seen in zip(layer.batch_sizes, layer.batch_groups.tolist(), strict=True) if seen > 0]


def _cdf(fired_I: torch.Tensor) -> list[tuple[float, float]]:
    """Points of the curve, denser where it is steep; none where no neuron fired."""
    below = np.cumsum(np.sort(fired_I.numpy())[::-1].astype(np.float64))
    n = len(below)
    if n == 0 or below[-1] == 0:
        return []
    at = np.unique(np.concatenate([np.geomspace(1, n, _POINTS), np.linspace(1, n, _POINTS)]).round().astype(int))
    return [(0.0, 0.0), *((float(i / n), float(below[i - 1] / below[-1])) for i in at)]


# --- the plan


def plan_facts(plan: Plan, predictors: Mapping[str, AnyPredictor], neuron_bytes: Mapping[str, int]) -> dict[str, Any]:
    """``rows`` in order of execution, ``buckets`` by batch (0: any), ``hardware`` (None: any machine), ``curve``."""
    hardware, nothing = plan.hardware, (0,) * len(plan.layers)
    counts = [(tuple(layer.n_hot for layer in plan.layers), nothing, nothing)]
    buckets: list[dict[str, Any]] = [{"batch": 0, "cache_bytes": 0, "ms": {}}]
    if hardware is not None:
        counts = [(b.hot, b.accelerator, b.resident) for b in hardware.buckets]
        buckets = [{"batch": b.batch, "cache_bytes": b.cache_bytes, "ms": dict(b.ms)} for b in hardware.buckets]
    groups = groupby(enumerate(plan.layers), key=lambda numbered: numbered[1].site.experts or numbered[1].site.key)
    made_for, stats = hardware.made_for if hardware else {}, plan.made_by.get("stats")
    curve = LossCurve.of(stats, "statistics of the plan") if isinstance(stats, dict) else None
    return {
        "planner": str(made_for.get("planner", plan.made_by.get("planner", "unknown"))),
        "rows": [_row(key, list(group), counts, predictors, neuron_bytes) for key, group in groups],
        "buckets": buckets,
        "hardware": None if hardware is None else _hardware(hardware),
        "curve": None if curve is None else {**vars(curve), "points": [list(point) for point in curve.points]},
    }


def _row(
    key: str,
    group: list[tuple[int, LayerPlan]],
    counts: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    predictors: Mapping[str, AnyPredictor],
    neuron_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """``hot``, ``accelerator`` and ``resident`` neurons by bucket; of predictors bytes in sum, the rest on average."""
    numbers, layers = [i for i, _ in group], [layer for _, layer in group]
    places = {
        name: [sum(bucket[kind][i] for i in numbers) for bucket in counts]
        for kind, name in enumerate(("hot", "accelerator", "resident"))
    }
    sizes = [neuron_bytes.get(layer.site.key) for layer in layers]
    known = [predictors[layer.site.key].card for layer in layers if layer.site.key in predictors]
    cards = [card for card in known if card is not None]
    means = {
        name: float(np.mean([getattr(card, name) for card in cards]))
        for name in (("recall", "precision", "predicted_active") if cards else ())
    }
    return {
        "key": key,
        "experts": len(layers),
        "neurons": sum(layer.site.intermediate for layer in layers),
        "hidden": layers[0].site.hidden,
        "method": ", ".join(sorted({layer.method for layer in layers})),
        "expected_active": float(np.mean([layer.expected_active for layer in layers])),
        **places,
        "bytes": None if None in sizes else sum(count or 0 for count in sizes),
        "predictor": means
        and {"bytes": sum(c.bytes for c in cards), "rank": round(float(np.mean([c.rank for c in cards]))), **means},
    }


def _hardware(plan: Any) -> dict[str, Any]:
    """The machine that the plan is for; ``source``: ``measured`` or ``published``; budget None: all in memory."""
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


# --- what is missing


def _missing(report: Report, folder: Path) -> list[dict[str, str]]:
    """Plots that cannot be drawn: why, and what to run to get them."""
    plan, model = report["plan"], report["model"]
    found: list[tuple[str, str, str]] = []
    if not report["firing"]:
        why = "There are no statistics in the folder."
        why = "A model of random weights has no statistics: nothing was profiled." if model["synthetic"] else why
        save = repr(str(folder / "pi2")).replace("{", "{{").replace("}", "}}")
        how = f"with torch_pi2.watch(model) as watched: ...   # use the model\nwatched.stats().save({save})"
        found.append(("Which neurons fire; sparsity by batch size", why, how))
    if plan is None:
        found.append(("Plan, predictors", "There is no plan in the folder.", _HOW["plan"]))
    else:
        if not any(row["predictor"] for row in plan["rows"]):
            methods = ", ".join(sorted({row["method"] for row in plan["rows"]}))
            why = f"No layer has a predictor: cold neurons are chosen by {methods}."
            found.append(("Predictors: recall and size", why, _HOW["predictor"]))
        if not any(bucket["ms"] for bucket in plan["buckets"]):
            why = "The plan is not made for a machine: no time is predicted."
            found.append(("Plan by batch size; predicted times", why, _HOW["hardware"]))
    if not report["measured"]:
        found.append(("Measured times", "No measurement was given.", _HOW["measured"]))
    if report["cache"] is None:
        why = "No recording of accesses was given." if model["stored"] else "The whole model is in memory: no cache."
        found.append(("Cache hits over time and by size", why, _HOW["accesses" if model["stored"] else "pack"]))
    if report["timeline"] is None:
        found.append(("Timeline of threads and reads", "No trace was given.", _HOW["trace"]))
    name = shlex.quote(str(folder))
    return [{"plot": plot, "why": why, "how": how.format(name)} for plot, why, how in found]
