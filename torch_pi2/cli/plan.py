"""Choose hot and cold neurons for each layer, or place them on a machine for each batch size, and write plan.json.

MODEL is a dense checkpoint (with --stats), or a folder that torch_pi2 saved or packed (with --hardware). In a folder,
neuron orders and methods stay, and the plan gets the placement with the shortest predicted times under the given
budgets. torch-pi2 optimize MODEL --hardware NAME does both for a checkpoint.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, models
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS

EXAMPLE = "torch-pi2 plan my-model --stats my-stats --predictors my-predictors --out my-plan --hot-frequency 0.5"

#: Options that need ``--hardware``.
_OF_MACHINE = ("budget", "accelerator_memory", "context", "batches", "fixed_hot_set", "explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face checkpoint, or a folder of optimize, save or pack")
    add("--stats", type=Path, metavar="DIR", help="folder written by profile (default: MODEL's own statistics)")
    add("--predictors", type=Path, metavar="DIR", help="folder written by fit, for a checkpoint")
    add("--out", type=Path, metavar="DIR", help="folder to write into (torch_pi2.load(MODEL, plan=DIR))")
    add = parser.add_argument_group("machine and budgets (lossless but for what predictors miss)").add_argument
    hardware = "measured (torch-pi2 doctor --measure), a preset, or a file"
    add("--hardware", metavar="NAME", help=hardware)
    add("--budget", metavar="BYTES", help="memory, with a store: 2.5GiB, 700MB (default: everything in memory)")
    add("--accelerator-memory", metavar="BYTES", help="accelerator memory for hot neurons (default: none)")
    add("--context", type=common.positive, help="tokens of each sequence (default: 1024)")
    add("--batches", type=common.sizes, help="batch sizes to plan for (default: 1,2,4,8,16)")
    add("--fixed-hot-set", action="store_true", default=None, help="the same hot neurons at all batch sizes")
    add("--explain", action="store_true", default=None, help="show the prediction only: --out may be left out")
    activations = "activations with which MODEL will be loaded (default: its own, int8 or float)"
    add("--activations", choices=ACTIVATIONS, help=activations)
    common.add_loading(parser)
    common.add_mapped(parser)
    common.add_config(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    if args.out is not None:
        common.check_out(args.out)
    if args.hardware is not None:
        return _for_machine(args)
    import torch_pi2
    from torch_pi2.cli.inspect import describe

    stats = models.load_stats(args.stats)
    predictors = models.load_predictors(args.predictors, stats.model_hash)
    plan = torch_pi2.plan(models.load_dense(args), stats, predictors, config=common.config_of(args))
    plan.save(args.out)
    return {"out": str(args.out), **describe(args.out)}


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other or are missing."""
    ours = (Path(args.model) / "pi2").is_dir()
    given = [common.option_of(name) for name in _OF_MACHINE if getattr(args, name) is not None]
    if args.hardware is None and given:
        raise common.needs(given[0], "--hardware")
    if args.hardware is None and ours:
        expected = "--hardware, because neuron orders and methods of a folder stay"
        fix = "Pass --hardware measured, after torch-pi2 doctor --measure."
        raise ConfigError(f"planning {args.model} anew", expected=expected, found="none", fix=fix)
    if args.hardware is not None and not ours:
        expected, fix = "a folder of optimize, save or pack", "Pass --hardware to torch-pi2 optimize instead."
        raise ConfigError(f"planning {args.model} for a machine", expected=expected, found="another", fix=fix)
    if args.out is None and args.explain is None:
        raise ConfigError("--out", expected="a folder to write into", found="none", fix="Pass --out DIR.")
    if args.stats is None and not ours:
        expected = "a folder written by torch-pi2 profile"
        raise ConfigError("--stats", expected=expected, found="none", fix="Pass --stats DIR.")
    if args.predictors is not None and ours:
        found = str(args.predictors)
        raise ConfigError("--predictors", expected="none: the folder has its own", found=found, fix="Leave it out.")
    if args.out is not None and os.path.lexists(args.out / "model.pi2"):
        expected = "a folder of its own: the store there has its plan inside"
        fix = "Write it elsewhere, and pass that folder to torch_pi2.load(..., plan=DIR)."
        raise ConfigError(f"--out {args.out}", expected=expected, found="model.pi2", fix=fix)


def _for_machine(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.inspect import describe
    from torch_pi2.machine.find import find_hardware
    from torch_pi2.planner.for_machine import plan_for

    hardware = find_hardware(args.hardware)
    stored = os.path.lexists(Path(args.model) / "pi2" / "model.pi2")
    if args.budget is not None and not stored:
        expected, found = "a model over a store", f"{args.model}, which has none"
        fix = "Pack it first: torch-pi2 pack MODEL STORE."
        raise ConfigError(f"--budget {args.budget}", expected=expected, found=found, fix=fix)
    stats = None if args.stats is None else models.load_stats(args.stats)
    settings = ("budget", "accelerator_memory", "context", "batches", "fixed_hot_set")
    how: dict[str, Any] = {name: value for name in settings if (value := getattr(args, name)) is not None}
    plan = plan_for(_loaded(args, stored), hardware, stats=stats, progress=not args.quiet, **how)
    assert plan.hardware is not None
    solved = plan.hardware
    names = ("budget_bytes", "accelerator_bytes", "context", "cluster")
    facts = {**solved.made_for, **{name: getattr(solved, name) for name in names}, "offload": dict(solved.offload)}
    facts |= {"threads": dict(solved.threads), "dense_from": list(solved.prompt.dense_from)}
    buckets = []
    for bucket in solved.buckets:
        times = {"ms": dict(bucket.ms), "total_ms": bucket.total_ms}
        speed = {"batch": bucket.batch, "tokens_per_s": bucket.batch * 1e3 / bucket.total_ms}
        counts = {name: sum(getattr(bucket, name)) for name in ("hot", "accelerator", "resident")}
        buckets.append(speed | times | counts | {"cache_bytes": bucket.cache_bytes})
    result: dict[str, Any] = {"out": None, "hardware": facts, "buckets": buckets}
    if args.out is not None:
        plan.save(args.out)
        result |= {"out": str(args.out), **describe(args.out)}
    return result


def _loaded(args: argparse.Namespace, stored: bool) -> Any:
    """The model of folder MODEL; over a store, with memory for the neurons of one token."""
    import torch_pi2
    from torch_pi2.cli.inspect import describe
    from torch_pi2.types.offload import OffloadConfig

    folder = Path(args.model)
    how: dict[str, Any] = {"dtype": models.dtype_of(args), "activations": args.activations}
    if stored and "cliff" in (budget := describe(folder)["budget"] or {}):
        how |= {"budget": budget["cliff"], "offload": OffloadConfig(preload=False)}
    return torch_pi2.load(folder, trust_remote_code=args.trust_remote_code, **how)


def render(result: dict[str, Any]) -> str:
    shown = []
    if "contains" in result:
        from torch_pi2.cli.inspect import render as render_folder

        shown.append(render_folder(result | {"verdict": None}))
    if "hardware" in result:
        about, buckets = result["hardware"], result["buckets"]
        rows = [bucket | {f"{part}_ms": ms for part, ms in bucket["ms"].items() if ms >= 5e-4} for bucket in buckets]
        parts = [f"{part}_ms" for part in buckets[0]["ms"]]
        names = ("batch", "tokens_per_s", "total_ms", *parts, "hot", "accelerator", "resident", "cache_bytes")
        budget = about["budget_bytes"]
        memory = "everything in memory" if budget is None else f"budget {common.size(budget)}"
        head = f"predicted for {about['hardware']} ({about['source']}), {memory}, {about['context']} tokens each"
        shown.append(f"{head}:\n{common.records(rows, names)}")
    if result.get("out"):
        shown.append(f"wrote {result['out']}")
    return "\n".join(shown)
