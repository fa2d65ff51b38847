"""Show what is in a folder: an optimised model, a neuron store, statistics, predictors, a plan, or a bundle.

For a checkpoint that is not optimised, show what would be done with each of its feed-forward layers, or why not; no
weights are read.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common, verdict
from torch_pi2.cli.inspect_bundle import describe_bundle, render_bundle
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error
from torch_pi2.types.stats import LossCurve

if TYPE_CHECKING:
    from torch_pi2.predict.file import FittedPredictors
    from torch_pi2.types.plan import Plan
    from torch_pi2.types.stats import ActivationStats

#: A mixture has thousands of experts: a table has one line for those of a block.
_EXPERT = re.compile(r"(.*experts)\.\d+")
#: Fields of which it has the sum.
_SUMMED = ("bytes",)
EXAMPLE = "torch-pi2 inspect my-sparse-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="written by profile, fit, plan, optimize, pack or export; a checkpoint; or a file model.pi2",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read the whole store, or bundle, and compare it with its checksums"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code in the checkpoint folder")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.folders import kind_of

    if kind_of(args.folder) == "shards":
        return {"folder": str(args.folder), **_shards(args.folder, args.verify, not args.quiet)}
    if kind_of(args.folder) == "checkpoint":
        return {"folder": str(args.folder), **describe_checkpoint(args.folder, args.verify, args.trust_remote_code)}
    return {"folder": str(args.folder), **describe(args.folder, args.verify, not args.quiet)}


def describe(folder: Path, verify: bool = False, progress: bool = True) -> dict[str, Any]:
    """What is in ``folder``: ``contains``, file sizes, one dict per layer, what a store's bytes are for, budgets,
    and the verdict.

    A bundle has other facts: see :func:`torch_pi2.cli.inspect_bundle.describe_bundle`.

    Args:
        folder: one of ours, or a neuron store without one. verify: compare all of the store with its checksums.
        progress: show how far that is, in a terminal.

    Raises:
        ArtifactError: nothing of ours is there, or a file is damaged. ConfigError: there is no store to verify.
    """
    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import STORE_FILE

    if (folder / "manifest.json").is_file():
        return describe_bundle(folder, verify, progress)
    if folder.is_file():
        return _describe_file(folder, verify, progress)
    inner = folder / "pi2" if (folder / "pi2").is_dir() else folder
    if verify and not os.path.lexists(inner / STORE_FILE):
        raise _nothing_to_verify(folder)
    has_store = os.path.lexists(inner / STORE_FILE)
    with Parts(inner) as parts:
        present = [name for name in ("stats", "predictors", "plan") if parts.has(name)]
        if not present:
            raise ArtifactError(
                str(folder),
                expected="a folder with stats.safetensors, predictors.safetensors, plan.json or pi2/ in it",
                found="none of them" if folder.is_dir() else "no such folder",
                fix="Pass a folder written by torch-pi2 profile, fit, plan, optimize or pack.",
            )
        store, slots = _store(inner / STORE_FILE, verify, progress) if has_store else (None, {})
        stats, predictors = parts.stats(), parts.predictors()
        plan = parts.plan() if parts.has("plan") else None
        here = plan if plan is None or parts.shard is None else parts.shard.plan(plan)
    judged = verdict.read(folder, None if plan is None else plan.model_hash)
    layers: dict[str, dict[str, Any]] = {}
    for found in (_stats(stats), _predictors(predictors), _plan(here), slots):
        for key, facts in found.items():
            layers.setdefault(key, {"key": key}).update(facts)
    report = predictors.report.to_json() if predictors.report else None
    files = {p.name: p.stat().st_size for p in sorted(inner.iterdir()) if p.is_file()}
    kinds = ["model"] if inner != folder else []
    return {
        "contains": kinds + present + (["store"] if store else []),
        "files": files,
        "bytes": sum(files.values()),
        "layers": list(layers.values()),
        "left": plan.made_by.get("left", {}) if plan else {},
        "store": store,
        "budget": _budget(folder, inner / STORE_FILE, plan, predictors) if has_store and plan else None,
        "matrices": _matrices(inner),
        "thresholds": _budget_of_loss(plan, stats),
        "fit": report and {name: report[name] for name in ("change", "tolerance", "met", "skipped", "tokens")},
        "verdict": None if judged is None else judged.to_json(),
    }


def _describe_file(path: Path, verify: bool, progress: bool) -> dict[str, Any]:
    """As :func:`describe`, of a store alone."""
    store, layers = _store(path, verify, progress)
    facts = {"files": {path.name: store["bytes"]}, "bytes": store["bytes"], "layers": list(layers.values())}
    return {"contains": ["store"], **_NOTHING_ELSE, **facts, "store": store}


#: Of a store without its folder nothing is known but its layers.
_NOTHING_ELSE: dict[str, Any] = {"left": {}, "matrices": {}}
_NOTHING_ELSE |= dict.fromkeys(("budget", "thresholds", "fit", "verdict"))


def _shards(folder: Path, verify: bool, progress: bool) -> dict[str, Any]:
    """The stores of a folder of shards, by the names of theirs. Raises ArtifactError, as :func:`describe`."""
    from torch_pi2.distributed.shard_store import shards_in
    from torch_pi2.store.storefile import STORE_FILE

    found = {path.name: _store(path / "pi2" / STORE_FILE, verify, progress)[0] for path in shards_in(folder).values()}
    return {"contains": ["shards"], "shards": found, "bytes": sum(store["bytes"] for store in found.values())}


def _matrices(inner: Path) -> dict[str, int]:
    """Format -> linear layers and embeddings in it."""
    from torch_pi2.store.storefile import open_weights, weights_path

    if weights_path(inner) is None:
        return {}
    with open_weights(inner) as weights:
        return dict(Counter(weights.format_of(name) for name in (*weights.linears, *weights.embeddings)))


def _budget_of_loss(plan: Plan | None, stats: ActivationStats | None) -> dict[str, Any] | None:
    """What a loss budget made of thresholds, and its curve; None: there was no budget."""
    made = stats.made_by if plan is None and stats else plan.made_by.get("stats") if plan else None
    curve = LossCurve.of(made, "statistics of the plan") if isinstance(made, dict) else None
    return None if curve is None else curve.to_json()


def _stats(stats: ActivationStats | None) -> dict[str, dict[str, Any]]:
    return {
        s.key: {"neurons": s.intermediate, "tokens": s.tokens, "sparsity": s.sparsity, "active_share": s.active_share}
        | ({} if s.experts is None else {"borrowed_tokens": s.borrowed})
        for s in stats or ()
    }


def _predictors(predictors: FittedPredictors) -> dict[str, dict[str, Any]]:
    return {key: p.card.to_json() for key, p in predictors.items() if p.card is not None}


def _plan(plan: Plan | None) -> dict[str, dict[str, Any]]:
    return {
        layer.site.key: {
            "form": layer.site.form,
            "hidden": layer.site.hidden,
            "neurons": layer.site.intermediate,
            "method": layer.method,
            "hot": layer.n_hot,
            "cold": layer.n_cold,
            "threshold": layer.threshold,
            "expected_active": layer.expected_active,
        }
        for layer in (plan.layers if plan else ())
    }


def _budget(folder: Path, store: Path, plan: Plan, predictors: Mapping[str, Any]) -> dict[str, Any]:
    """What ``torch_pi2.load(budget=)`` can be given, with the defaults; ``unknown``: why nothing can be said."""
    import torch

    from torch_pi2.checkpoint.offloaded import own_predictors
    from torch_pi2.checkpoint.sparse import DEFAULT_CONTEXT
    from torch_pi2.decode.budget import divide_budget
    from torch_pi2.rewrite.skeleton import model_config
    from torch_pi2.store.storefile import StoreReader
    from torch_pi2.types.offload import OffloadConfig

    try:
        hf = model_config(folder)
        with StoreReader(store) as reader:
            dtype = hf.dtype or reader.float_dtype or torch.float32
            about: dict[str, Any] = {"config": OffloadConfig(), "context": DEFAULT_CONTEXT, "dtype": dtype}
            if reader.shard is not None:
                plan, of_all = reader.shard.plan(plan), plan
                predictors = own_predictors(reader.shard, of_all, predictors)
            whole = divide_budget(1 << 60, reader, plan, predictors, hf, **about)
    except (Pi2Error, AttributeError, ImportError) as error:  # a model that is not transformers'
        return {"unknown": str(error).splitlines()[0]}
    figures = {name: getattr(whole, name) for name in ("smallest", "cliff", "whole", "token", "neurons")}
    return figures | {"context": DEFAULT_CONTEXT}


def _store(path: Path, verify: bool, progress: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The whole store, and its layers by key."""
    from torch_pi2.store.storefile import StoreReader

    with StoreReader(path) as store:
        layers = {
            key: {
                "key": key,
                "hidden": entry.hidden,
                "neurons": entry.neurons,
                "hot": entry.n_hot,
                "bundle_bytes": entry.neuron_bytes,
                "slot_bytes": entry.slot_bytes,
                "padding_share": 1 - entry.cluster * entry.neuron_bytes / entry.slot_bytes,
            }
            for key, entry in zip(store.keys, store.entries, strict=True)
        }
        facts = {
            "weights": store.neuron_formats,
            "model_hash": store.model_hash,
            "bytes": store.file_bytes,
            "neurons": sum(entry.neurons for entry in store.entries),
            "shard": store.shard and {"rank": store.shard.rank, "ranks": store.shard.ranks, "of": store.shard.whole},
            "regions": store.regions(),
            "format_version": store.metadata["pi2_version"],
            "provenance": store.provenance(),
            "verified_bytes": store.verify(progress=progress) if verify else None,
        }
    return facts, layers


#: field -> (column title, how it is shown), for those that some layer has.
_COLUMNS: dict[str, tuple[str, Any]] = {
    "form": ("form", str),
    "neurons": ("neurons", str),
    "sparsity": ("zeros", common.percent),
    "active_share": ("firing", common.percent),
    "borrowed_tokens": ("tokens of others", str),
    "method": ("method", str),
    "hot": ("hot", str),
    "cold": ("cold", str),
    "expected_active": ("cold computed", common.percent),
    "rank": ("rank", str),
    "recall": ("recall", common.percent),
    "precision": ("precision", common.percent),
    "bytes": ("predictor", common.size),
    "bundle_bytes": ("bundle", common.size),
    "slot_bytes": ("slot", common.size),
    "padding_share": ("padding", common.percent),
}


def render(result: dict[str, Any]) -> str:
    if "bundle" in result["contains"]:
        return render_bundle(result)
    if "checkpoint" in result["contains"]:
        return render_checkpoint(result)
    if "shards" in result["contains"]:
        return "\n".join(f"{name}: {_render_store(store)}" for name, store in result["shards"].items())
    layers = _by_block(result["layers"], _COLUMNS)
    columns = [name for name in _COLUMNS if any(name in layer for layer in layers)]
    rows = [
        [layer["key"], *(_COLUMNS[c][1](layer[c]) if layer.get(c) is not None else "-" for c in columns)]
        for layer in layers
    ]
    files = ", ".join(f"{name} {common.size(count)}" for name, count in result["files"].items())
    shown = common.table(["layer", *(_COLUMNS[c][0] for c in columns)], rows) if rows else "no layers of neurons"
    shown += "".join(f"\n{line}" for line in _stays_dense(result["left"]))
    kinds = ", ".join(f"{count} {kind}" for kind, count in result["matrices"].items())
    shown += f"\nlinear layers and embeddings: {kinds}" if kinds else ""
    fit = result["fit"]
    fitted = (
        f"\nfit: loss {fit['change']:+.2%} (tolerance {fit['tolerance']:.1%}{'' if fit['met'] else ', NOT met'}), "
        f"{common.percent(fit['skipped'])} of cold neurons skipped, on text of the fit that was held back"
        if fit
        else ""
    )
    chosen = result["thresholds"]
    fitted += f"\n{_render_thresholds(chosen)}" if chosen else ""
    stored = f"\n{_render_store(result['store'])}" if result["store"] else ""
    budget = f"\n{_render_budget(result['budget'])}" if result["budget"] else ""
    judged = verdict.shown(result["verdict"])
    return f"{', '.join(result['contains'])}: {files}\n{shown}{fitted}{stored}{budget}{judged}"


def _render_thresholds(chosen: dict[str, Any]) -> str:
    points = ", ".join(f"{p['skipped']:.0%} {p['change']:+.2%}" for p in chosen["loss_curve"])
    return (
        f"thresholds on the score '{chosen['score']}': loss {chosen['loss_change']:+.2%} (max_loss "
        f"{chosen['max_loss']:.1%}) on calibration text that was held back\nneurons skipped, and what that does to the "
        f"loss there: {points}"
    )


def _by_block(layers: Sequence[dict[str, Any]], fields: Iterable[str]) -> list[dict[str, Any]]:
    """``layers`` with one for the experts of each block, ``KEY.0-7``: of ``fields`` the mean, or what all have."""
    shown: list[dict[str, Any]] = []
    for name, group in groupby(layers, key=_block):
        own = list(group)
        if name is None or len(own) == 1:
            shown += own
            continue
        row: dict[str, Any] = {"key": f"{own[0]['key']}-{own[-1]['key'].rpartition('.')[2]}"}
        for field in fields:
            values = [layer[field] for layer in own if layer.get(field) is not None]
            if values:
                row[field] = _of_all(field, values)
        shown.append(row)
    return shown


def _block(layer: dict[str, Any]) -> str | None:
    found = _EXPERT.fullmatch(layer["key"])
    return None if found is None else found.group(1)


def _of_all(field: str, values: list[Any]) -> Any:
    if field not in _SUMMED and len(set(values)) == 1:
        return values[0]
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    total = sum(values)
    if field in _SUMMED:
        return total
    return round(total / len(values)) if isinstance(values[0], int) else total / len(values)


def _render_store(store: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {common.size(count)}" for name, count in store["regions"].items())
    verified = store["verified_bytes"]
    checked = "" if verified is None else f"\nverified: {common.size(verified)} are as they were packed"
    made = "\nprovenance: " + ", ".join(_flat(store["provenance"])) if store["provenance"] else ""
    made += f", FFN weights {store['model_hash'][:12]}" if made else ""
    of = f" of {store['shard']['of']}" if store["shard"] else ""
    head = f"store version {store['format_version']}: {store['neurons']}{of} neurons in {store['weights']}"
    if shard := store["shard"]:
        head = f"shard {shard['rank']} of {shard['ranks']}, {head}"
    return f"{head}, {common.size(store['bytes'])}: {parts}{made}{checked}"


def _flat(facts: dict[str, Any]) -> list[str]:
    """Provenance as words: hashes shortened, what is nested without its name."""
    words = []
    for name, value in facts.items():
        if isinstance(value, dict):
            words += _flat(value)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{name} {text[:12] if name.endswith('sha256') else text}")
    return words


def _render_budget(budget: dict[str, Any]) -> str:
    if "unknown" in budget:
        return f"budget: not known ({budget['unknown']})"
    least, enough, whole = (f"{math.ceil(10 * budget[n] / 2**20) / 10} MiB" for n in ("smallest", "cliff", "whole"))
    share = common.percent(budget["token"] / budget["neurons"])
    return (
        f"budget: {least} at least (all neurons from flash, context {budget['context']}), {enough} for the neurons of "
        f"one token ({common.size(budget['token'])}, {share}), {whole} for everything"
    )


# --- checkpoints that are not optimised


def describe_checkpoint(folder: Path, verify: bool, trust_remote_code: bool) -> dict[str, Any]:
    """``contains`` and the fields of :class:`torch_pi2.planner.supported.Supported`, ``layers`` those that can be
    sparse; ``quantised_by``: whose method has quantised it, empty: none has.

    Raises:
        ArtifactError: transformers cannot build the model. ConfigError: ``verify``, and there are no checksums.
        CalibrationError, UnsupportedModelError: it cannot be captured without its inputs, or at all.
    """
    from torch_pi2.planner.supported import supported
    from torch_pi2.store.folder import quantised_by, read_config

    if verify:
        raise _nothing_to_verify(folder)
    said = supported(folder, trust_remote_code=trust_remote_code).to_json()
    return {"contains": ["checkpoint"], **said, "quantised_by": quantised_by(read_config(folder))}


def _nothing_to_verify(folder: Path) -> ConfigError:
    return ConfigError(
        "--verify",
        expected=f"a neuron store pi2/model.pi2 in {folder}",
        found="none",
        fix="Leave it out: other files have no checksums. torch-pi2 pack makes stores.",
    )


def render_checkpoint(result: dict[str, Any]) -> str:
    rows = []
    for (form, hidden, neurons, method, lossless), group in groupby(result["layers"], key=_alike):
        keys = [layer["key"] for layer in group]
        named = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        how = "zeros: lossless" if lossless else "small values: lossy, needs calibration text"
        rows.append([named, len(keys), form, hidden, neurons, method, how])
    header = ["feed-forward layers", "count", "form", "hidden", "neurons", "method", "what is skipped"]
    lines = [f"checkpoint of {result['model']}, not optimised: no weights were read"]
    if (method := result.get("quantised_by")) and not result["refused"]:
        lines.append(f"its weights are what {method!r} has quantised: torch-pi2 import it first, and take that folder")
    if rows:
        share = common.percent(result["share"])
        lines += [common.table(header, rows), f"{share} of {result['parameters']:,} parameters are in these layers"]
    if result["refused"]:
        lines.append(f"nothing can be made sparse: {result['refused']}")
    return "\n".join(lines + _stays_dense(result["left"]))


def _stays_dense(left: dict[str, str]) -> list[str]:
    """Lines that say which layers stay dense, and why."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        which = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
        lines.append(f"stays dense: {which}: {reason}")
    return lines


def _alike(layer: dict[str, Any]) -> tuple[Any, ...]:
    """What layers that share a line of the table have in common."""
    return tuple(layer[name] for name in ("form", "hidden", "neurons", "method", "lossless"))
