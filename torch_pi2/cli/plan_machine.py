"""``torch-pi2 plan --hardware``: a plan for a machine, and what is predicted of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common
from torch_pi2.errors import ConfigError

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware
    from torch_pi2.planner.model_shape import ModelShape
    from torch_pi2.types.machine_plan import HardwarePlan
    from torch_pi2.types.plan import Plan
    from torch_pi2.types.stats import ActivationStats


def for_machine(args: argparse.Namespace) -> dict[str, Any]:
    """The plan that ``args`` ask for, written to ``--out``; what is predicted, beside what simple plans would take."""
    from torch_pi2.machine.find import find_hardware
    from torch_pi2.planner.baselines import KINDS, fixed_plan
    from torch_pi2.planner.diff import moved
    from torch_pi2.planner.for_machine import check_recall, free, with_hardware

    hardware = find_hardware(args.hardware)
    _check_store(args)
    before, stats, live = statistics(args)
    model, plan, shape = subject(args, stats)
    base, first, first_shape = free(plan), plan, None
    if live is not None and before is not None:
        from torch_pi2.planner.model_shape import ModelShape

        if _is_ours(args):
            first_shape = ModelShape.of(model, before, base, compiled=not args.eager)
        else:
            del model
            model, first, first_shape = subject(args, before)  # its neurons have another order
    del model
    how = _how(args, shape)
    kind = args.planner or "optimum"
    only = {"min_recall": args.min_recall, "one_boundary": bool(args.one_boundary), "clusters": args.clusters}
    check_recall(shape, stats, args.min_recall)
    if kind != "optimum" and (given := [name for name, value in only.items() if value]):
        raise ConfigError(
            f"--{given[0].replace('_', '-')}",
            expected="the optimum",
            found=f"--planner {kind}, which does not look at it",
            fix="Leave one of them out.",
        )
    found = _planned(shape, hardware, kind, how, only, not args.quiet)
    made = with_hardware(base, found, stats if live is not None else None)
    others = {name: fixed_plan(shape, hardware, name, **how) for name in KINDS} if kind == "optimum" else {}
    result: dict[str, Any] = {"out": None, "hardware": _facts(found, hardware), "buckets": _buckets(found, others)}
    if live is not None:
        from torch_pi2.observe.drift import drift

        if first_shape is not None:
            before_it = _planned(first_shape, hardware, kind, how, only, not args.quiet)
            first = with_hardware(free(first), before_it)
        about = {"planned": moved(first, made), "orders_stay": _is_ours(args)}
        result["moved"] = drift(first, live).to_json() | about
    if args.out is not None:
        from torch_pi2.cli.inspect import describe

        _check_beside(args.out)
        made.save(args.out)
        result |= {"out": str(args.out), **describe(args.out)}
    if args.measure_run:
        result["explained"] = _measured(args, made, hardware, stats, how)
    return result


def _planned(
    shape: ModelShape,
    hardware: Hardware,
    kind: str,
    how: Mapping[str, Any],
    only: Mapping[str, Any],
    progress: bool,
) -> HardwarePlan:
    """``only``: for the optimum, which alone looks at it."""
    from torch_pi2.planner.baselines import fixed_plan
    from torch_pi2.planner.solve import solve

    if kind == "optimum":
        return solve(shape, hardware, **how, **only, progress=progress)
    return fixed_plan(shape, hardware, kind, **how)


def _is_ours(args: argparse.Namespace) -> bool:
    return (Path(args.model) / "pi2").is_dir()


def _check_store(args: argparse.Namespace) -> None:
    """Raises ConfigError: a budget, and MODEL has no store."""
    from torch_pi2.base.units import parse_bytes
    from torch_pi2.store.storefile import STORE_FILE

    if args.budget is None:
        return
    parse_bytes(args.budget)  # raises
    if not os.path.lexists(Path(args.model) / "pi2" / STORE_FILE):
        raise ConfigError(
            f"--budget {args.budget}",
            expected="a model over a store",
            found=f"{args.model}, which has none",
            fix="Pack it first: torch-pi2 pack MODEL STORE.",
        )


def _how(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Arguments of :func:`torch_pi2.planner.solve.solve` and ``fixed_plan``."""
    from torch_pi2.base.units import parse_bytes
    from torch_pi2.planner.request import BATCHES

    how: dict[str, Any] = {
        "budget_bytes": None if args.budget is None else parse_bytes(args.budget),
        "accelerator_bytes": 0 if args.accelerator_memory is None else parse_bytes(args.accelerator_memory),
        "batches": args.batches or BATCHES,
        "context": args.context or 1024,
    }
    if args.accesses is not None:
        from torch_pi2.planner.for_machine import replayed

        if args.budget is None:
            raise ConfigError(
                "--accesses", expected="--budget beside it: a cache", found="everything in memory", fix="Pass --budget."
            )
        how["misses"] = replayed(args.accesses, shape)
    return how


def statistics(args: argparse.Namespace) -> tuple[ActivationStats | None, ActivationStats, ActivationStats | None]:
    """Statistics as they were (None: a folder of ours without), with those of use, and these alone, if any."""
    if args.stats is None:
        from torch_pi2.store.parts import Parts

        with Parts(Path(args.model) / "pi2") as parts:
            stats = parts.stats(parts.plan().model_hash)
    else:
        stats = common.load_stats(args.stats)
    after, live = updated(stats, args.update)
    if after is None:
        raise ConfigError(
            f"statistics of {args.model}",
            expected="some: how often neurons fire decides which are hot",
            found="none in the folder",
            fix="Pass --stats DIR (torch-pi2 profile), or count in use (torch_pi2.watch) and pass --update DIR.",
        )
    return stats, after, live


def subject(args: argparse.Namespace, stats: ActivationStats) -> tuple[Any, Plan, ModelShape]:
    """An optimised model, its plan, and its shape with ``stats``, if no neuron need be hot."""
    from torch_pi2.planner.for_machine import free
    from torch_pi2.planner.model_shape import ModelShape

    folder = Path(args.model)
    if _is_ours(args):
        from torch_pi2.store.parts import Parts

        with Parts(folder / "pi2") as parts:
            plan = parts.plan()
        model = _loaded(args, folder)
    else:
        import torch_pi2
        from torch_pi2.rewrite.handle import parts_of

        predictors = common.load_predictors(args.predictors, stats.model_hash)
        config = common.config_of(args)
        model = torch_pi2.optimize(common.load_dense(args), None, config, stats=stats, predictors=predictors)
        plan = parts_of(model).plan
    return model, plan, ModelShape.of(model, stats, free(plan), compiled=not args.eager)


def _loaded(args: argparse.Namespace, folder: Path, **how: Any) -> Any:
    """A folder of ours; one with a store with as little memory as a token wants, unless ``how`` has a budget."""
    import torch_pi2
    from torch_pi2.store.storefile import STORE_FILE
    from torch_pi2.types.offload import OffloadConfig

    if os.path.lexists(folder / "pi2" / STORE_FILE) and not how:
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
    from torch_pi2.observe.drift import update

    live = common.load_stats(folder)
    return (live if stats is None else update(stats, live)), live


def _check_beside(out: Path) -> None:
    """Raises ConfigError if ``out`` has a store with a plan inside: two would contradict each other."""
    from torch_pi2.store.storefile import STORE_FILE

    if os.path.lexists(out / STORE_FILE):
        raise ConfigError(
            f"--out {out}",
            expected="a folder of its own: the store there has its plan inside",
            found=STORE_FILE,
            fix="Write it elsewhere, and pass that folder to torch_pi2.load(..., plan=DIR).",
        )


def _measured(
    args: argparse.Namespace, plan: Plan, hardware: Hardware, stats: ActivationStats, how: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What runs at each batch size take beside what is predicted. ``how``: the plan was made."""
    from torch_pi2.eval.token_source import tokens_of
    from torch_pi2.planner.explain import compare, explained_tokens

    folder = Path(args.model)
    if not _is_ours(args):
        raise ConfigError(
            "--measure-run",
            expected="a folder of ours as MODEL",
            found=str(folder),
            fix="Write one first: torch-pi2 optimize MODEL --out DIR.",
        )
    assert plan.hardware is not None
    loading: dict[str, Any] = {"plan": plan}
    if args.budget is not None:
        loading |= {"budget": args.budget, "context": args.context or 1024}
    steps = {"tokens": 16, "rounds": 3, "warm_up": 8}
    settings: dict[str, Any] = {**steps, "compiled": not args.eager}
    if "misses" in how:
        settings["misses"] = how["misses"][plan.hardware.offload["policy"]]
    found = []
    for batch in how["batches"]:
        model = _loaded(args, folder, **loading)
        drawn = tokens_of(model, folder, "heldout", batch, 0, args.trust_remote_code).draw(explained_tokens(**steps))
        explained = compare(model, plan, hardware, stats, batch=batch, ids_BT=drawn, **settings)
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
        "passes": _passes(plan),
        "dense_from": list(plan.prompt.dense_from),
        "chunk_tokens": plan.prompt.chunk_tokens,
    }


def _passes(plan: HardwarePlan) -> list[dict[str, Any]]:
    """By number of guesses at next tokens: what a pass takes, in steps, and how often they must be right to pay."""
    from torch_pi2.planner.passes import least_right

    return [
        {"guesses": tokens - 1, "steps": steps, "least_right": least_right(plan.passes, tokens - 1)}
        for tokens, steps in plan.passes.items()
    ]


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


def render_machine(result: dict[str, Any]) -> str:
    """Predicted steps by batch size, and what the optimum gains."""
    from torch_pi2.planner import explain

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
    shown = f"{head}:\n{common.table(header, rows)}{gained}{_render_passes(about['passes'])}"
    explained = (f"batch {run['batch']}, as it ran:\n{explain.render(run)}" for run in result.get("explained", ()))
    return "\n".join([shown, *explained])


def _render_passes(passes: list[dict[str, Any]]) -> str:
    """A line; none where nobody predicted."""
    if not passes:
        return ""
    said = (
        f"{row['guesses']} ({row['steps']:.2f} steps): "
        + ("never" if row["least_right"] is None else common.percent(row["least_right"]))
        for row in passes
    )
    return f"\nguesses at next tokens that a pass verifies, and how many must be right to pay: {', '.join(said)}"
