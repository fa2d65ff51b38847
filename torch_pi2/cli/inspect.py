"""Show what is in a folder: an optimised model, a neuron store, statistics, predictors, a plan, or a bundle.

For a checkpoint that is not optimised, show what would be done with each of its feed-forward layers, or why not; no
weights are read.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common, verdict
from torch_pi2.cli.inspect_bundle import describe_bundle, render_bundle
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error

if TYPE_CHECKING:
    from torch_pi2.predict.file import FittedPredictors
    from torch_pi2.types.plan import Plan
    from torch_pi2.types.stats import ActivationStats

#: A mixture has thousands of experts: a table has one line for those of a block.
_EXPERT = re.compile(r"(.*experts)\.\d+")
#: Fields of which it has the sum.
_SUMMED = ("bytes",)
#: What is shown of a layer.
_COLUMNS = (
    *("key", "form", "neurons", "sparsity", "active_share", "borrowed_tokens", "method", "hot", "cold"),
    *("expected_active", "rank", "recall", "precision", "bytes", "bundle_bytes", "slot_bytes", "padding_share"),
)
EXAMPLE = "torch-pi2 inspect my-sparse-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    folder = "written by profile, fit, plan, optimize, pack or export, or a checkpoint"
    add("folder", type=Path, metavar="DIR", help=folder)
    verify = "read the whole store, or bundle, and compare it with its checksums"
    add("--verify", action="store_true", help=verify)
    common.add_trust(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.folders import kind_of

    folder, kind = args.folder, kind_of(args.folder)
    if kind == "checkpoint":
        found = describe_checkpoint(folder, args.verify, args.trust_remote_code)
    elif kind == "shards":
        found = _shards(folder, args.verify, not args.quiet)
    else:
        found = describe(folder, args.verify, not args.quiet)
    return {"folder": str(folder), **found}


def render(result: dict[str, Any]) -> str:
    kinds: dict[str, Any] = {"bundle": render_bundle, "checkpoint": render_checkpoint, "shards": _render_shards}
    return str(kinds.get(result["contains"][0], _render_folder)(result))


# --- folders of ours


def describe(folder: Path, verify: bool = False, progress: bool = True) -> dict[str, Any]:
    """What is in ``folder``: ``contains``, file sizes, one dict per layer, what a store's bytes are for, budgets,
    and the verdict. A bundle has other facts.

    Args:
        folder: one of ours. verify: compare all of the store with its checksums.
        progress: show how far that is, in a terminal.

    Raises:
        ArtifactError: nothing of ours is there, or a file is damaged. ConfigError: there is no store to verify.
    """
    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import STORE_FILE

    if (folder / "manifest.json").is_file():
        return describe_bundle(folder, verify, progress)
    inner = folder / "pi2" if (folder / "pi2").is_dir() else folder
    has_store = os.path.lexists(inner / STORE_FILE)
    if verify and not has_store:
        raise _nothing_to_verify(folder)
    with Parts(inner) as parts:
        present = [name for name in ("stats", "predictors", "plan") if parts.has(name)]
        if not present:
            raise ArtifactError(
                str(folder),
                expected="a folder with stats.safetensors, predictors.safetensors, plan.json or pi2/ in it",
                found="none of them" if folder.is_dir() else "no such folder",
                fix="Pass a folder written by torch-pi2 profile, fit, plan, optimize or pack.",
            )
        store, slots = _store(inner / STORE_FILE, verify, progress) if has_store else ({}, {})
        stats, predictors = parts.stats(), parts.predictors()
        plan = parts.plan() if parts.has("plan") else None
        here = plan if plan is None or parts.shard is None else parts.shard.plan(plan)
    layers: dict[str, dict[str, Any]] = {}
    for found in (*_of_layers(stats, predictors, here), slots):
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
        "store": store or None,
        "budget": _budget(folder, inner / STORE_FILE, plan, predictors) if has_store and plan else None,
        "matrices": _matrices(inner),
        "thresholds": _budget_of_loss(plan, stats),
        "fit": report and {name: report[name] for name in ("change", "tolerance", "met", "skipped", "tokens")},
        "verdict": verdict.as_json(folder, None if plan is None else plan.model_hash),
    }


def _of_layers(
    stats: ActivationStats | None, predictors: FittedPredictors, plan: Plan | None
) -> tuple[dict[str, dict[str, Any]], ...]:
    """Facts by layer of each."""
    fired = {
        s.key: {"neurons": s.intermediate, "tokens": s.tokens, "sparsity": s.sparsity, "active_share": s.active_share}
        | ({} if s.experts is None else {"borrowed_tokens": s.borrowed})
        for s in stats or ()
    }
    cards = {key: p.card.to_json() for key, p in predictors.items() if p.card is not None}
    chosen = {
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
    return fired, cards, chosen


def _shards(folder: Path, verify: bool, progress: bool) -> dict[str, Any]:
    """The stores of a folder of shards, by name. Raises ArtifactError, as :func:`describe`."""
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
    from torch_pi2.base.fields import to_json
    from torch_pi2.types.stats import LossCurve

    made = stats.made_by if plan is None and stats else plan.made_by.get("stats") if plan else None
    curve = LossCurve.of(made, "statistics of the plan") if isinstance(made, dict) else None
    return None if curve is None else to_json(curve)


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


def _render_folder(result: dict[str, Any]) -> str:
    files = ", ".join(f"{name} {common.size(count)}" for name, count in result["files"].items())
    layers = common.records(_by_block(result["layers"]), _COLUMNS) if result["layers"] else "no layers of neurons"
    lines = [f"{', '.join(result['contains'])}: {files}", layers]
    lines += _stays_dense(result["left"])
    if result["matrices"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in result["matrices"].items())
        lines.append(f"linear layers and embeddings: {kinds}")
    if fit := result["fit"]:
        lines.append(
            f"fit: loss {fit['change']:+.2%} (tolerance {fit['tolerance']:.1%}{'' if fit['met'] else ', NOT met'}), "
            f"{common.percent(fit['skipped'])} of cold neurons skipped, on text of the fit that was held back"
        )
    if chosen := result["thresholds"]:
        points = ", ".join(f"{p['skipped']:.0%} {p['change']:+.2%}" for p in chosen["loss_curve"])
        lines.append(
            f"thresholds on the score '{chosen['score']}': loss {chosen['loss_change']:+.2%} (max_loss "
            f"{chosen['max_loss']:.1%}) on calibration text that was held back\n"
            f"neurons skipped, and what that does to the loss there: {points}"
        )
    lines += [_render_store(result["store"])] if result["store"] else []
    lines += [_render_budget(result["budget"])] if result["budget"] else []
    return "\n".join(lines) + verdict.shown(result["verdict"])


def _by_block(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``layers`` with one for the experts of each block, ``KEY.0-7``, of which a column has the mean, or the sum."""
    shown: list[dict[str, Any]] = []
    for name, group in groupby(layers, key=lambda layer: (found := _EXPERT.fullmatch(layer["key"])) and found.group(1)):
        own = list(group)
        if name is None or len(own) == 1:
            shown += own
            continue
        row: dict[str, Any] = {"key": f"{own[0]['key']}-{own[-1]['key'].rpartition('.')[2]}"}
        for field in _COLUMNS[1:]:
            if values := [layer[field] for layer in own if layer.get(field) is not None]:
                row[field] = _of_all(field, values)
        shown.append(row)
    return shown


def _of_all(field: str, values: list[Any]) -> Any:
    if field in _SUMMED:
        return sum(values)
    if len(set(values)) == 1:
        return values[0]
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    mean = sum(values) / len(values)
    return round(mean) if isinstance(values[0], int) else mean


def _render_shards(result: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {_render_store(store)}" for name, store in result["shards"].items())


def _render_store(store: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {common.size(count)}" for name, count in store["regions"].items())
    shard, verified = store["shard"], store["verified_bytes"]
    checked = "" if verified is None else f"\nverified: {common.size(verified)} are as they were packed"
    made = "\nprovenance: " + ", ".join(_flat(store["provenance"])) if store["provenance"] else ""
    made += f", FFN weights {store['model_hash'][:12]}" if made else ""
    of_whole, rank = (f" of {shard['of']}", f"shard {shard['rank']} of {shard['ranks']}, ") if shard else ("", "")
    head = f"{rank}store version {store['format_version']}: {store['neurons']}{of_whole} neurons in {store['weights']}"
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
    rows, alike = [], ("form", "hidden", "neurons", "method", "lossless")
    for values, group in groupby(result["layers"], key=lambda layer: [layer[name] for name in alike]):
        keys = [layer["key"] for layer in group]
        named = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
        how = "zeros: lossless" if values[-1] else "small values: lossy, needs calibration text"
        rows.append([named, len(keys), *values[:-1], how])
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
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in left.items():
        by_reason[reason].append(name)
    lines = []
    for reason, names in by_reason.items():
        which = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
        lines.append(f"stays dense: {which}: {reason}")
    return lines
