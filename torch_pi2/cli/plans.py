"""What ``torch-pi2 plan`` does for a machine: planning, comparing plans, and showing what is predicted."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common
from torch_pi2.errors import ConfigError

if TYPE_CHECKING:
    from torch_pi2.plan.hardware import Hardware
    from torch_pi2.plan.hardware_plan import HardwarePlan
    from torch_pi2.plan.plan import Plan
    from torch_pi2.plan.shape import ModelShape
    from torch_pi2.profile.stats import ActivationStats

#: Steps that are replayed for each question: enough for hit rates, in seconds even for 7B.
_REPLAYED = 64
_REPLAYED_POLICIES = ("lfu", "lru", "sieve", "s3-fifo")


# --- planning for a machine ---


def for_machine(args: argparse.Namespace) -> dict[str, Any]:
    """The plan that ``args`` ask for, written to ``--out``; what is predicted, beside what simple plans would take."""
    from torch_pi2.plan.baselines import KINDS, fixed_plan
    from torch_pi2.plan.hardware import find_hardware
    from torch_pi2.plan.solve import solve

    hardware = find_hardware(args.hardware)
    model, plan, stats, live = _subject(args)
    from torch_pi2.plan.shape import ModelShape

    base = free(plan)
    shape = ModelShape.of(model, stats, base, compiled=not args.eager)
    del model
    how = _how(args, shape)
    kind = args.planner or "optimum"
    only = {"min_recall": args.min_recall, "one_boundary": bool(args.one_boundary), "clusters": args.clusters}
    if kind == "optimum":
        found = solve(shape, hardware, **how, **only, progress=True)
    else:
        if given := [name for name, value in only.items() if value]:
            raise ConfigError(
                f"--{given[0].replace('_', '-')}",
                expected="the optimum",
                found=f"--planner {kind}, which does not look at it",
                fix="Leave one of them out.",
            )
        found = fixed_plan(shape, hardware, kind, **how)
    made = with_hardware(base, found, stats if live is not None else None)
    others = {name: fixed_plan(shape, hardware, name, **how) for name in KINDS} if kind == "optimum" else {}
    result: dict[str, Any] = {"out": None, "hardware": _facts(found, hardware), "buckets": _buckets(found, others)}
    if live is not None:
        from torch_pi2.plan.drift import drift

        result["moved"] = drift(plan, live).to_json() | {"planned": moved(plan, made)}
    if args.out is not None:
        from torch_pi2.cli.inspect import describe

        _check_beside(args.out)
        made.save(args.out)
        result |= {"out": str(args.out), **describe(args.out)}
    if args.measure_run:
        result["explained"] = _measured(args, made, hardware, stats, how["batches"])
    return result


def _how(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Arguments of :func:`torch_pi2.plan.solve.solve` and ``fixed_plan``."""
    from torch_pi2.plan.task import BATCHES
    from torch_pi2.runtime.budget import parse_bytes

    how: dict[str, Any] = {
        "budget_bytes": None if args.budget is None else parse_bytes(args.budget),
        "accelerator_bytes": 0 if args.accelerator_memory is None else parse_bytes(args.accelerator_memory),
        "batches": args.batches or BATCHES,
        "context": args.context or 1024,
    }
    if args.accesses is not None:
        from torch_pi2.plan.misses import ReplayMisses
        from torch_pi2.runtime.accesses import Accesses

        if args.budget is None:
            raise ConfigError(
                "--accesses", expected="--budget beside it: a cache", found="everything in memory", fix="Pass --budget."
            )
        accesses = Accesses.load(args.accesses)
        how["misses"] = {
            policy: ReplayMisses(accesses, shape, policy, passes=_REPLAYED) for policy in _REPLAYED_POLICIES
        }
    return how


def _subject(args: argparse.Namespace) -> tuple[Any, Plan, ActivationStats, ActivationStats | None]:
    """An optimised model, its plan, and its statistics: with those of use, which are last (None: there are none)."""
    folder = Path(args.model)
    if (folder / "pi2").is_dir():
        from torch_pi2.store.parts import Parts

        with Parts(folder / "pi2") as parts:
            plan = parts.plan()
            stats = common.load_stats(args.stats) if args.stats else parts.stats(plan.model_hash)
        after, live = updated(stats, args.update)
        if after is None:
            raise ConfigError(
                f"statistics of {folder}",
                expected="some: how often neurons fire decides which are hot",
                found="none in the folder",
                fix="Pass --stats DIR (torch-pi2 profile), or count in use (torch_pi2.watch) and pass --update DIR.",
            )
        return _loaded(args, folder), plan, after, live
    import torch_pi2
    from torch_pi2.api import parts_of

    stats = common.load_stats(args.stats)
    predictors = common.load_predictors(args.predictors, stats.model_hash)
    after, live = updated(stats, args.update)
    assert after is not None
    config = common.config_of(args)
    model = torch_pi2.optimize(common.load_dense(args), None, config, stats=after, predictors=predictors)
    return model, parts_of(model).plan, after, live


def _loaded(args: argparse.Namespace, folder: Path, **how: Any) -> Any:
    """A folder of ours; one with a store with as little memory as a token wants, unless ``how`` has a budget."""
    import torch_pi2
    from torch_pi2.runtime.offload import OffloadConfig
    from torch_pi2.store.storefile import STORE_FILE

    if (folder / "pi2" / STORE_FILE).is_file() and not how:
        from torch_pi2.cli.inspect import describe

        budget = describe(folder)["budget"] or {}
        if "cliff" in budget:
            how = {"budget": budget["cliff"], "offload": OffloadConfig(preload=False)}
    dtype = None if args.dtype == "auto" else common.dtype_of(args)
    about: dict[str, Any] = {"activations": args.activations or "float", "dtype": dtype}
    return torch_pi2.load(folder, trust_remote_code=args.trust_remote_code, **about, **how)


def updated(stats: Any, folder: Path | None) -> tuple[Any, ActivationStats | None]:
    """``stats`` with the counts of ``folder`` added, and these alone; just these where ``stats`` is None."""
    if folder is None:
        return stats, None
    from torch_pi2.plan.drift import update

    live = common.load_stats(folder)
    return (live if stats is None else update(stats, live)), live


def free(plan: Plan) -> Plan:
    """``plan`` with no neuron hot in layers where that changes no bit: of methods without a predictor but ``dense``."""
    from torch_pi2.plan.plan import Plan

    layers = [replace(layer, n_hot=0) if layer.method == "exact" else layer for layer in plan.layers]
    return Plan(layers, plan.model_hash, dict(plan.made_by))


def with_hardware(plan: Plan, hardware: HardwarePlan, stats: ActivationStats | None = None) -> Plan:
    """``plan`` for a machine, of ``stats``; ``n_hot``: those of the bucket with the fewest, where it may change."""
    from torch_pi2.plan.plan import Plan

    layers = []
    for index, layer in enumerate(plan.layers):
        fewest = min(bucket.hot[index] for bucket in hardware.buckets)
        layers.append(replace(layer, n_hot=fewest) if layer.method == "exact" else layer)
    made_by = plan.made_by | {"planner": hardware.made_for["planner"]}
    if stats is not None:
        made_by["stats"] = stats.made_by
    return Plan(layers, plan.model_hash, made_by, hardware)


def _check_beside(out: Path) -> None:
    """Raises ConfigError if ``out`` has a store with a plan inside: two would contradict each other."""
    from torch_pi2.store.storefile import STORE_FILE

    if (out / STORE_FILE).is_file():
        raise ConfigError(
            f"--out {out}",
            expected="a folder of its own: the store there has its plan inside",
            found=STORE_FILE,
            fix="Write it elsewhere, and pass that folder to torch_pi2.load(..., plan=DIR).",
        )


def _measured(
    args: argparse.Namespace, plan: Plan, hardware: Hardware, stats: ActivationStats, batches: Any
) -> list[dict[str, Any]]:
    """What runs at each batch size take beside what is predicted."""
    from torch_pi2.plan.explain import compare

    folder = Path(args.model)
    if not (folder / "pi2").is_dir():
        raise ConfigError(
            "--measure-run",
            expected="a folder of ours as MODEL",
            found=str(folder),
            fix="Write one first: torch-pi2 optimize MODEL --out DIR.",
        )
    how: dict[str, Any] = {"plan": plan}
    if args.budget is not None:
        how |= {"budget": args.budget, "context": args.context or 1024}
    found = []
    for batch in batches:
        model = _loaded(args, folder, **how)
        explained = compare(model, plan, hardware, stats, batch=batch, compiled=not args.eager)
        found.append(explained.to_json())
        del model
    return found


def _facts(plan: HardwarePlan, hardware: Hardware) -> dict[str, Any]:
    return {
        **plan.made_for,
        "name": hardware.name,
        "budget_bytes": plan.budget_bytes,
        "accelerator_bytes": plan.accelerator_bytes,
        "context": plan.context,
        "offload": dict(plan.offload),
        "threads": dict(plan.threads),
        "cluster": plan.cluster,
        "dense_from": list(plan.prompt.dense_from),
        "chunk_tokens": plan.prompt.chunk_tokens,
    }


def _buckets(plan: HardwarePlan, others: Mapping[str, HardwarePlan]) -> list[dict[str, Any]]:
    """By batch size: the predicted step, and how many times as long simple plans take."""
    rows = []
    for bucket in plan.buckets:
        rows.append(
            {
                "batch": bucket.batch,
                "tokens_per_s": bucket.batch * 1e3 / bucket.total_ms,
                "ms": dict(bucket.ms),
                "total_ms": bucket.total_ms,
                "hot": sum(bucket.hot),
                "accelerator": sum(bucket.accelerator),
                "resident": sum(bucket.resident),
                "cache_bytes": bucket.cache_bytes,
                "gain": {name: p.bucket(bucket.batch).total_ms / bucket.total_ms for name, p in others.items()},
            }
        )
    return rows


# --- comparing ---


def difference(a: Path, b: Path) -> dict[str, Any]:
    """What differs between the plans of two folders (of a plan, or with ``pi2/`` in it)."""
    from torch_pi2.plan.diff import diff

    return {"a": str(a), "b": str(b), **diff(_plan_of(a), _plan_of(b))}


def _plan_of(folder: Path) -> Plan:
    from torch_pi2.store.parts import Parts

    folder = folder.parent if folder.name == "plan.json" else folder
    with Parts(folder / "pi2" if (folder / "pi2").is_dir() else folder) as parts:
        return parts.plan()


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


# --- text ---


def render_machine(result: dict[str, Any]) -> str:
    """Predicted steps by batch size, and what the optimum gains."""
    about, buckets = result["hardware"], result["buckets"]
    parts = [part for part in buckets[0]["ms"] if any(bucket["ms"].get(part, 0) >= 5e-4 for bucket in buckets)]
    gains = list(buckets[0]["gain"])
    header = ("batch", "tokens/s", "ms", *parts, "hot", "accelerator", "resident", "cache", *gains)
    rows = [
        (
            bucket["batch"],
            f"{bucket['tokens_per_s']:.2f}",
            f"{bucket['total_ms']:.3f}",
            *(f"{bucket['ms'].get(part, 0):.3f}" for part in parts),
            bucket["hot"],
            bucket["accelerator"],
            bucket["resident"],
            common.size(bucket["cache_bytes"]),
            *(f"{bucket['gain'][name]:.3f}x" for name in gains),
        )
        for bucket in buckets
    ]
    budget = "everything in memory" if about["budget_bytes"] is None else f"budget {common.size(about['budget_bytes'])}"
    head = f"{about['planner']} for {about['name']} ({about['source']}), {budget}, {about['context']} tokens each"
    gained = "\npredicted; the last columns: how many times as long a step of simple plans takes" if gains else ""
    shown = f"{head}:\n{common.table(header, rows)}{gained}"
    return "\n".join([shown, *(_render_explained(run) for run in result.get("explained", ()))])


def _render_explained(run: dict[str, Any]) -> str:
    rows = [
        (row["part"], f"{row['predicted_ms']:.3f}", f"{row['measured_ms']:.3f}", _ratio(row["ratio"]))
        for row in run["parts"]
    ]
    rows.append(
        ("step", f"{run['predicted_total_ms']:.3f}", f"{run['measured_total_ms']:.3f}", _ratio(1 / run["ratio"]))
    )
    return f"batch {run['batch']}, as it ran:\n{common.table(('part', 'predicted ms', 'measured ms', 'ratio'), rows)}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def render_moved(found: dict[str, Any]) -> str:
    planned = found.get("planned", found)
    share = f"; {common.percent(found['share'])} have drifted beyond chance" if "planned" in found else ""
    return f"of the hot neurons before, {common.percent(planned['share'])} no longer are{share}"


def render_difference(result: dict[str, Any]) -> str:
    """Tables of what differs; one line if nothing does."""
    names = f"A = {result['a']}, B = {result['b']}"
    if result["same"]:
        return f"no difference: {names}"
    shown = [names]
    if result["facts"]:
        shown.append(
            common.table(("", "A", "B"), [(name, *map(_short, both)) for name, both in result["facts"].items()])
        )
    for where, layers in [("", result["layers"])] + [
        (f"batch {b['batch']}, ", b.get("layers", ())) for b in result["buckets"]
    ]:
        fields = list(dict.fromkeys(name for layer in layers for name in layer if name != "key"))
        if fields:
            cells = [[layer["key"], *(_both(layer.get(name)) for name in fields)] for layer in layers]
            shown.append(common.table((f"{where}layer", *fields), cells))
    rows = [
        (f"batch {b['batch']}", _both(b.get("bucket")), _both(b.get("cache_bytes")), _both(b.get("ms")))
        for b in result["buckets"]
        if b.keys() & {"bucket", "cache_bytes", "ms"}
    ]
    if rows:
        shown.append(common.table(("", "is there", "cache bytes", "predicted ms"), rows))
    return "\n".join(shown)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _both(values: Any) -> str:
    return "" if values is None else " -> ".join(_short(value) for value in values)
