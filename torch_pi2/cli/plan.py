"""Choose hot and cold neurons per layer, and what a machine does with them by batch size, and write plan.json.

MODEL is a dense checkpoint (with --stats), or a folder that torch_pi2 saved or packed, which keeps its neuron orders
and methods. With --hardware the plan gets a part for that machine: the fastest by predicted times under the budgets
given, for each number of sequences. --diff compares two plans and needs nothing else. A plan of a dense checkpoint is
for looking at: torch-pi2 optimize MODEL --out DIR --hardware NAME writes a model that follows one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common, verdict
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS

if TYPE_CHECKING:
    from torch_pi2.types.plan import Plan

EXAMPLE = "torch-pi2 plan my-model --stats my-stats --predictors my-predictors --out my-plan --hot-frequency 0.5"

_PLANNERS = ("optimum", "greedy", "all-hot", "all-cold", "random")
#: Options that say something about a machine, and mean nothing without one.
_OF_MACHINE = (
    *("budget", "accelerator_memory", "context", "batches", "min_recall", "one_boundary", "clusters"),
    *("accesses", "planner", "explain", "measure_run"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="Hugging Face checkpoint, or a folder of optimize, save or pack")
    add("--stats", type=Path, metavar="DIR", help="folder written by profile (default: MODEL's own, if it has some)")
    add("--predictors", type=Path, metavar="DIR", help="folder written by fit")
    add("--update", type=Path, metavar="DIR", help="statistics of use (torch_pi2.watch): plan with them added")
    add("--out", type=Path, metavar="DIR", help="folder to write into (torch_pi2.load(MODEL, plan=DIR))")
    add("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two folders with plans: what differs")
    _add_machine(parser)
    common.add_loading(parser)
    common.add_mapped(parser)
    common.add_config(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine and budgets (lossless but for what predictors miss)")
    add = group.add_argument
    add(
        "--hardware",
        metavar="NAME",
        help="measured (torch-pi2 doctor --measure), a preset, or a file (checkpoints: torch-pi2 optimize --hardware)",
    )
    add(
        "--machines",
        type=Path,
        metavar="FILE",
        help="several, and the link between them (docs/DISTRIBUTED.md): which has what, predicted; writes nothing",
    )
    add("--budget", metavar="BYTES", help="of memory, with a store: 2.5GiB, 700MB (default: everything in memory)")
    add("--accelerator-memory", metavar="BYTES", help="for hot neurons (default: none are there)")
    add("--context", type=common.positive, metavar="N", help="tokens of each sequence (default: 1024)")
    add("--batches", type=_numbers, metavar="N,N", help="numbers of sequences to plan for (default: 1,2,4,8,16)")
    add("--min-recall", type=float, metavar="R", help="share of firing neurons that must be computed (default: any)")
    add("--one-boundary", action="store_true", default=None, help="the same hot neurons at all batch sizes")
    add(
        "--clusters",
        type=_numbers,
        metavar="N,N",
        help="neurons in a slot of a store, to choose from for packing (default: as MODEL is)",
    )
    add("--accesses", type=Path, metavar="FILE", help="of torch_pi2.record_accesses: choose the cache's policy by them")
    add("--planner", choices=_PLANNERS, help="optimum (default), or a simple plan to compare with")
    add(
        "--explain",
        action="store_true",
        default=None,
        help="show predicted milliseconds by part; --measure-run beside it runs the model",
    )
    add(
        "--measure-run",
        action="store_true",
        default=None,
        help="with --explain: run the model at each batch size, and show what its parts took beside what is predicted",
    )
    add("--eager", action="store_true", help="decoding steps are not compiled")
    add("--activations", choices=ACTIVATIONS, help="with which MODEL is going to be loaded (default: float)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(common.positive(part) for part in text.split(","))


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.diff is not None:
        return difference(*args.diff)
    if args.model is None:
        raise ConfigError(
            "MODEL", expected="a checkpoint or a folder", found="none", fix="Name one, or use --diff A B."
        )
    if args.machines is not None:
        from torch_pi2.cli.plan_group import for_group

        _check_group(args)
        return for_group(args)
    _check(args)
    if args.out is not None:
        common.check_out(args.out)
    if args.hardware is not None:
        from torch_pi2.cli.plan_machine import for_machine

        result = for_machine(args)
    else:
        result = _for_any_machine(args)
    found = verdict.read(Path(args.model)) if Path(args.model).is_dir() else None
    return result | {"verdict": None if found is None else found.to_json()}


def _check_group(args: argparse.Namespace) -> None:
    """Raises ConfigError: --machines beside what is said of one machine, or of a plan that is written."""
    others = ("hardware", "out", *(name for name in _OF_MACHINE if name != "context"))
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    if given:
        raise ConfigError(
            f"{given[0]} with --machines",
            expected="memory and hardware of each machine in that file, and no plan written",
            found=given[0],
            fix="Leave it out.",
        )
    _check_stats(args)


def _check_stats(args: argparse.Namespace) -> None:
    """Raises ConfigError: there can be no statistics."""
    if args.stats is None and not (Path(args.model) / "pi2").is_dir():
        raise ConfigError(
            "--stats",
            expected="a folder written by torch-pi2 profile",
            found="none, and no folder of ours",
            fix="Pass --stats DIR.",
        )


def _check(args: argparse.Namespace) -> None:
    ours = (Path(args.model) / "pi2").is_dir()
    given = [f"--{name.replace('_', '-')}" for name in _OF_MACHINE if getattr(args, name) is not None]
    if args.hardware is None and (given or ours):
        raise ConfigError(
            given[0] if given else f"planning {args.model} anew",
            expected="--hardware beside it" if given else "--hardware: the neuron orders and methods of a folder stay",
            found="none",
            fix="Pass --hardware measured, after torch-pi2 doctor --measure.",
        )
    if args.out is None and args.explain is None:
        raise ConfigError("--out", expected="a folder to write into", found="none", fix="Pass --out DIR.")
    _check_stats(args)
    if args.predictors is not None and ours:
        raise ConfigError(
            "--predictors", expected="none: the folder has its own", found=str(args.predictors), fix="Leave it out."
        )
    if args.clusters and args.accesses is not None:
        raise ConfigError(
            "--clusters with --accesses",
            expected="one of them: accesses are of slots as they are",
            found="both",
            fix="Choose the cluster and pack with it, then record accesses of that store.",
        )
    if args.measure_run and not args.explain:
        raise ConfigError("--measure-run", expected="--explain beside it", found="none", fix="Pass both.")


def _for_any_machine(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.inspect import describe
    from torch_pi2.cli.plan_machine import updated
    from torch_pi2.planner.diff import moved

    stats = common.load_stats(args.stats)
    predictors = common.load_predictors(args.predictors, stats.model_hash)
    model, config = common.load_dense(args), common.config_of(args)
    after, live = updated(stats, args.update)
    made = torch_pi2.plan(model, after, predictors, config=config)
    result = {} if live is None else {"moved": moved(torch_pi2.plan(model, stats, predictors, config=config), made)}
    made.save(args.out)
    return {"out": str(args.out), **describe(args.out), **result}


def render(result: dict[str, Any]) -> str:
    if "same" in result:
        return _render_difference(result)
    if "ways" in result:
        from torch_pi2.cli.plan_group import render_group

        return render_group(result)
    shown = []
    if "contains" in result:
        from torch_pi2.cli.inspect import render as render_folder

        shown.append(render_folder(result | {"verdict": None}))
    if "hardware" in result:
        from torch_pi2.cli.plan_machine import render_machine

        shown.append(render_machine(result))
    if "moved" in result:
        shown.append(_render_moved(result["moved"]))
    if result.get("out"):
        shown.append(f"wrote {result['out']}")
    if result["verdict"] is not None:
        shown.append(f"what was measured of the model:{verdict.shown(result['verdict'])}")
    return "\n".join(shown)


# --- comparing ---


def difference(a: Path, b: Path) -> dict[str, Any]:
    """What differs between the plans of two folders (of a plan, or with ``pi2/`` in it)."""
    from torch_pi2.planner.diff import diff

    return {"a": str(a), "b": str(b), **diff(_plan_of(a), _plan_of(b))}


def _plan_of(folder: Path) -> Plan:
    from torch_pi2.store.parts import Parts

    folder = folder.parent if folder.name == "plan.json" else folder
    with Parts(folder / "pi2" if (folder / "pi2").is_dir() else folder) as parts:
        return parts.plan()


def _render_moved(found: dict[str, Any]) -> str:
    planned = found.get("planned", found)
    share = f"; {common.percent(found['share'])} have drifted beyond chance" if "planned" in found else ""
    stay = "; the order of neurons stays (only torch-pi2 optimize changes it)" if found.get("orders_stay") else ""
    return f"of the hot neurons before, {common.percent(planned['share'])} no longer are{share}{stay}"


def _render_difference(result: dict[str, Any]) -> str:
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
