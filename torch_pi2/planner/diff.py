"""What differs between two plans: settings, neurons of layers, and buckets by batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_pi2.types.machine_plan import Bucket, HardwarePlan
from torch_pi2.types.plan import LayerPlan, Plan

#: Fields of a layer and of a bucket that are numbers or names of their own.
_LAYER = ("method", "n_hot", "threshold", "expected_active")
_BUCKET = ("hot", "accelerator", "resident")


def diff(a: Plan, b: Plan) -> dict[str, Any]:
    """What differs, as plain data. Whatever is equal is left out.

    Returns:
        ``same``: nothing differs. ``facts``: name -> values in ``a`` and ``b`` (None where one has no such).
        ``layers``: by layer its ``key``, the fields that differ, and ``moved``: neurons of ``a``'s first ``n_hot``
        that are not among ``b``'s, and the reverse. ``buckets``: by batch size ``cache_bytes``, predicted ``ms``, and
        ``layers`` with counts that differ; ``bucket``: which of the two has one of that size, if not both.
    """
    facts = _different(_facts(a), _facts(b))
    mine, theirs = a.by_key(), b.by_key()
    keys = list(dict.fromkeys((*mine, *theirs)))
    layers = [entry for key in keys if len(entry := _layer(key, mine.get(key), theirs.get(key))) > 1]
    buckets = _buckets(a, b)
    return {"same": not (facts or layers or buckets), "facts": facts, "layers": layers, "buckets": buckets}


def moved(before: Plan, after: Plan) -> dict[str, Any]:
    """Of the hot neurons of ``before`` (at the smallest batch), those that ``after`` no longer has, by layer."""
    rows: list[dict[str, Any]] = []
    for index, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        counts = [
            y.n_hot if p.hardware is None else p.hardware.buckets[0].hot[index]
            for p, y in ((before, old), (after, new))
        ]
        first, second = (set(y.order[:n].tolist()) for y, n in zip((old, new), counts, strict=True))
        rows.append({"key": old.site.key, "hot": len(first), "gone": len(first - second), "new": len(second - first)})
    hot = sum(row["hot"] for row in rows)
    return {"share": sum(row["gone"] for row in rows) / hot if hot else 0.0, "layers": rows}


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [a.get(name), b.get(name)] for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}


def _facts(plan: Plan) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_hash": plan.model_hash, "orders_hash": plan.orders_hash}
    facts |= {f"made_by.{name}": value for name, value in plan.made_by.items()}
    hardware = plan.hardware
    facts["hardware"] = hardware is not None
    if hardware is None:
        return facts
    facts |= {f"hardware.made_for.{name}": value for name, value in hardware.made_for.items()}
    for name in ("budget_bytes", "accelerator_bytes", "context", "cluster"):
        facts[f"hardware.{name}"] = getattr(hardware, name)
    facts["hardware.passes"] = {tokens: round(steps, 4) for tokens, steps in hardware.passes.items()}
    facts["hardware.prompt.chunk_tokens"] = hardware.prompt.chunk_tokens
    facts["hardware.prompt.dense_from"] = list(hardware.prompt.dense_from)
    facts |= {f"hardware.offload.{name}": value for name, value in hardware.offload.items()}
    return facts | {f"hardware.threads.{role}": count for role, count in hardware.threads.items()}


def _layer(key: str, a: LayerPlan | None, b: LayerPlan | None) -> dict[str, Any]:
    if a is None or b is None:
        return {"key": key, "layer": [a is not None, b is not None]}
    fields = _different({f: getattr(a, f) for f in _LAYER}, {f: getattr(b, f) for f in _LAYER})
    moved = _moved(a, b)
    return {"key": key, **fields} | ({"moved": moved} if any(moved) else {})


def _moved(a: LayerPlan, b: LayerPlan) -> list[int]:
    """Hot neurons of one that are not hot in the other."""
    first, second = (set(y.order[: y.n_hot].tolist()) for y in (a, b))
    return [len(first - second), len(second - first)]


def _buckets(a: Plan, b: Plan) -> list[dict[str, Any]]:
    sizes = sorted({bucket.batch for plan in (a, b) if plan.hardware for bucket in plan.hardware.buckets})
    found = []
    for batch in sizes:
        first, second = (_sized(plan.hardware, batch) for plan in (a, b))
        entry: dict[str, Any] = {"batch": batch}
        if first is None or second is None:
            found.append(entry | {"bucket": [first is not None, second is not None]})
            continue
        if first.cache_bytes != second.cache_bytes:
            entry["cache_bytes"] = [first.cache_bytes, second.cache_bytes]
        by_part = [{part: round(ms, 4) for part, ms in bucket.ms.items()} for bucket in (first, second)]
        if by_part[0] != by_part[1]:
            entry["ms"] = [round(bucket.total_ms, 4) if bucket.ms else None for bucket in (first, second)]
        layers = _bucket_layers(a, first, b, second)
        if layers:
            entry["layers"] = layers
        if len(entry) > 1:
            found.append(entry)
    return found


def _sized(hardware: HardwarePlan | None, batch: int) -> Bucket | None:
    return next((b for b in hardware.buckets if b.batch == batch), None) if hardware else None


def _bucket_layers(a: Plan, first: Bucket, b: Plan, second: Bucket) -> list[dict[str, Any]]:
    def counts(plan: Plan, bucket: Bucket) -> dict[str, dict[str, int]]:
        rows = zip(*(getattr(bucket, field) for field in _BUCKET), strict=True)
        return {y.site.key: dict(zip(_BUCKET, row, strict=True)) for y, row in zip(plan.layers, rows, strict=True)}

    mine, theirs = counts(a, first), counts(b, second)
    found = [{"key": key, **_different(mine[key], theirs[key])} for key in mine if key in theirs]
    return [entry for entry in found if len(entry) > 1]
