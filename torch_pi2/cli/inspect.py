"""Show what is in a folder: an optimised model, a neuron store, statistics, predictors, a plan, or a bundle.

For a checkpoint that is not optimised, show what would become of its feed-forward layers; no weights are read.
"""

import argparse
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common, verdict
from torch_pi2.errors import ArtifactError, ConfigError, LibraryMissingError, Pi2Error

if TYPE_CHECKING:
    from torch_pi2.types.plan import Plan

#: Keys of experts. A mixture has thousands: a table has one line per block.
_EXPERT = re.compile(r"^(.*experts)\.\d+$")
#: Fields in the table of layers.
_COLUMNS = (
    *("key", "form", "neurons", "sparsity", "active_share", "borrowed_tokens", "method", "hot", "cold"),
    *("expected_active", "rank", "recall", "precision", "bytes", "bundle_bytes", "slot_bytes", "padding_share"),
)
EXAMPLE = "torch-pi2 inspect my-sparse-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    folder = "written by profile, fit, plan, optimize, pack or export, or a checkpoint"
    add("folder", type=Path, metavar="DIR", help=folder)
    verify = "read the whole store, folder or bundle, and compare it with its checksums"
    add("--verify", action="store_true", help=verify)
    common.add_trust(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.folders import kind_of

    folder, kind = args.folder, kind_of(args.folder)
    if kind == "checkpoint":
        found = describe_checkpoint(folder, args.verify, args.trust_remote_code)
    elif kind == "shards":
        from torch_pi2.distributed.shard_store import shards_in
        from torch_pi2.store.storefile import STORE_FILE

        about = {path.name: path / "pi2" / STORE_FILE for path in shards_in(folder).values()}
        shards = {name: _store(path, args.verify, not args.quiet)[0] for name, path in about.items()}
        found = {"contains": ["shards"], "shards": shards, "bytes": sum(store["bytes"] for store in shards.values())}
    else:
        found = describe(folder, args.verify, not args.quiet)
    return {"folder": str(folder), **found}


def render(result: dict[str, Any]) -> str:
    if result["contains"] == ["shards"]:
        return "\n".join(f"{name}: {_render_store(store)}" for name, store in result["shards"].items())
    kinds: dict[str, Any] = {"bundle": render_bundle, "checkpoint": render_checkpoint}
    return str(kinds.get(result["contains"][0], _render_folder)(result))


def describe(folder: Path, verify: bool = False, progress: bool = True) -> dict[str, Any]:
    """What ``folder`` contains: kinds, file sizes, a dict per layer, bytes of a store by purpose, budgets, verdict.

    Bundles have the fields of :func:`describe_bundle`. ``verify``: compare the whole store, or all tensors in files,
    with their checksums; ``progress``: with a bar in a terminal. Raises ArtifactError: not a folder of torch_pi2, or a
    damaged file. ConfigError: there is nothing to verify.
    """
    from torch_pi2.base.fields import to_json
    from torch_pi2.predict.method import InputMethod
    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import STORE_FILE, open_weights, weights_path
    from torch_pi2.types.stats import LossCurve

    if (folder / "manifest.json").is_file():
        return describe_bundle(folder, verify, progress)
    inner = folder / "pi2" if (folder / "pi2").is_dir() else folder
    has_store = os.path.lexists(inner / STORE_FILE)
    verified = _verify(folder, inner) if verify and not has_store else None
    with Parts(inner) as parts:
        present = [name for name in ("stats", "predictors", "plan") if parts.has(name)]
        if not present:
            expected = "a folder with stats.safetensors, predictors.safetensors, plan.json or pi2/ in it"
            said = "none of them" if folder.is_dir() else "no such folder"
            fix = "Pass a folder written by torch-pi2 profile, fit, plan, optimize or pack."
            raise ArtifactError(str(folder), expected=expected, found=said, fix=fix)
        store, slots = _store(inner / STORE_FILE, verify, progress) if has_store else ({}, {})
        stats, predictors = parts.stats(), parts.predictors()
        plan = parts.plan() if parts.has("plan") else None
        here = plan if plan is None or parts.shard is None else parts.shard.plan(plan)
    layers: dict[str, dict[str, Any]] = {}
    fired = {
        s.key: {"neurons": s.intermediate, "tokens": s.tokens, "sparsity": s.sparsity, "active_share": s.active_share}
        | ({} if s.experts is None else {"borrowed_tokens": s.borrowed})
        for s in stats or ()
    }
    cards = {key: p.card.to_json() for key, p in predictors.items() if p.card is not None}
    chosen = {}
    for layer in here.layers if here else ():
        form = {"form": layer.site.form, "hidden": layer.site.hidden, "neurons": layer.site.intermediate}
        name = getattr(predictors.get(layer.site.key), "name", "")
        method = f"{layer.method} ({name})" if name else layer.method
        counts = {"method": method, "hot": layer.n_hot, "cold": layer.n_cold}
        shares = {"threshold": layer.threshold, "expected_active": layer.expected_active}
        chosen[layer.site.key] = form | counts | shares
    own = {key: p for key, p in predictors.items() if isinstance(p, InputMethod)}
    chosen |= {key: {"method": f"inputs ({method.name})"} for key, method in own.items()}
    for found in (fired, cards, chosen, slots):
        for key, facts in found.items():
            layers.setdefault(key, {"key": key}).update(facts)
    matrices: dict[str, int] = {}  # format -> number of linear layers and embeddings
    if weights_path(inner) is not None:
        with open_weights(inner) as weights:
            matrices = dict(Counter(weights.format_of(name) for name in (*weights.linears, *weights.embeddings)))
            matrices |= {f"{weights.kind} by channel": len(weights.channels)} if weights.channels else {}
    report = predictors.report.to_json() if predictors.report else None
    files = {p.name: p.stat().st_size for p in sorted(inner.iterdir()) if p.is_file()}
    kinds = ["model"] if inner != folder else []
    made_by = stats.made_by if plan is None and stats else plan.made_by.get("stats") if plan else None
    curve = LossCurve.of(made_by, "statistics of the plan") if isinstance(made_by, dict) else None
    about: dict[str, Any] = {"contains": kinds + present + (["store"] if store else [])}
    about |= {"files": files, "bytes": sum(files.values()), "verified_bytes": verified}
    about |= {"layers": list(layers.values()), "left": plan.made_by.get("left", {}) if plan else {}}
    budget = _budget(folder, inner / STORE_FILE, plan, predictors) if has_store and plan else None
    about |= {"store": store or None, "budget": budget, "matrices": matrices}
    about["thresholds"] = None if curve is None else to_json(curve)  # as --max-loss chose them
    about["fit"] = report and {name: report[name] for name in ("change", "tolerance", "met", "skipped", "tokens")}
    return about | {"verdict": verdict.as_json(folder, None if plan is None else plan.model_hash)}


def _budget(folder: Path, store: Path, plan: "Plan", predictors: Mapping[str, Any]) -> dict[str, Any]:
    """Budgets in bytes that ``torch_pi2.load`` takes, with default settings; ``unknown``: why they are not known."""
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
    """Facts about the store, and about its layers by key."""
    from torch_pi2.store.storefile import StoreReader

    with StoreReader(path) as store:
        layers = {}
        for key, entry in zip(store.keys, store.entries, strict=True):
            padding = 1 - entry.cluster * entry.neuron_bytes / entry.slot_bytes
            sizes = {"bundle_bytes": entry.neuron_bytes, "slot_bytes": entry.slot_bytes, "padding_share": padding}
            counts = {"key": key, "hidden": entry.hidden, "neurons": entry.neurons, "hot": entry.n_hot}
            layers[key] = counts | sizes
        of = store.shard and {"rank": store.shard.rank, "ranks": store.shard.ranks, "of": store.shard.whole}
        facts = {"weights": store.neuron_formats, "model_hash": store.model_hash, "bytes": store.file_bytes}
        facts |= {"neurons": sum(entry.neurons for entry in store.entries), "shard": of, "regions": store.regions()}
        facts |= {"format_version": store.metadata["pi2_version"], "provenance": store.provenance()}
        return facts | {"verified_bytes": store.verify(progress=progress) if verify else None}, layers


def _render_folder(result: dict[str, Any]) -> str:
    files = ", ".join(f"{name} {common.size(count)}" for name, count in result["files"].items())
    none = "no layers of neurons: every matrix is read whole"
    rows = []  # all experts of a block as one row KEY.0-7 of means (bytes: sums)
    for _, group in groupby(result["layers"], key=lambda layer: _EXPERT.sub(r"\1", layer["key"])):
        first, *others = group
        row = dict(first)
        if others:
            row["key"] += f"-{others[-1]['key'].rpartition('.')[2]}"
            for field in _COLUMNS[1:]:
                if values := [layer[field] for layer in (first, *others) if layer.get(field) is not None]:
                    row[field] = _of_all(field, values)
        rows.append(row)
    layers = common.records(rows, _COLUMNS) if rows else none
    lines = [f"{', '.join(result['contains'])}: {files}", layers]
    lines += stays_dense(result["left"])
    if zeros := [layer["sparsity"] for layer in result["layers"] if layer.get("tokens")]:
        ends = " to ".join(common.percent(end) for end in (min(zeros), max(zeros)))
        mean = common.percent(sum(zeros) / len(zeros))
        lines.append(f"zeros: {mean} of neurons, by layer {ends}; see torch-pi2 zeros")
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
    if result["verified_bytes"] is not None:
        lines.append(f"verified: {common.size(result['verified_bytes'])} of tensors are as they were written")
    lines += [_render_store(result["store"])] if result["store"] else []
    lines += [_render_budget(result["budget"])] if result["budget"] else []
    return "\n".join(lines) + (verdict.shown(result["verdict"]) or _without_verdict(result))


def _without_verdict(result: dict[str, Any]) -> str:
    """What a model is that nobody has measured, and what to do with it."""
    if "model" not in result["contains"] or "folder" not in result:  # or optimize --no-verdict has just made it
        return ""
    known = "not measured"
    if {layer.get("method") for layer in result["layers"]} <= {"dense"}:
        known = f"dense: every neuron is computed; speed {known}"
    fix = f"torch-pi2 eval {result['folder']} measures its loss"
    if not result["layers"]:
        fix += "; import it with --neurons all for torch-pi2 pack, whose models need less memory than their weights"
    return f"\nverdict:  {known} ({fix})"


def _of_all(field: str, values: list[Any]) -> Any:
    if field == "bytes":
        return sum(values)
    if len(set(values)) == 1:
        return values[0]
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    mean = sum(values) / len(values)
    return round(mean) if isinstance(values[0], int) else mean


def _render_store(store: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {common.size(count)}" for name, count in store["regions"].items())
    shard, verified = store["shard"], store["verified_bytes"]
    checked = "" if verified is None else f"\nverified: {common.size(verified)} are as they were packed"
    origin = "\nprovenance: " + ", ".join(_flat(store["provenance"])) if store["provenance"] else ""
    origin += f", FFN weights {store['model_hash'][:12]}" if origin else ""
    of_whole, rank = (f" of {shard['of']}", f"shard {shard['rank']} of {shard['ranks']}, ") if shard else ("", "")
    head = f"{rank}store version {store['format_version']}: {store['neurons']}{of_whole} neurons in {store['weights']}"
    return f"{head}, {common.size(store['bytes'])}: {parts}{origin}{checked}"


def _flat(facts: dict[str, Any]) -> list[str]:
    """Provenance as words, with short hashes; names of nested objects are dropped."""
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


def describe_checkpoint(folder: Path, verify: bool, trust_remote_code: bool) -> dict[str, Any]:
    """``contains``, the fields of :class:`torch_pi2.planner.supported.Supported`, and ``quantised_by``: the
    checkpoint's method, or empty. Raises as ``supported``, and ConfigError: there are no checksums to ``verify``.
    """
    from torch_pi2.planner.supported import supported
    from torch_pi2.store.folder import quantised_by, read_config

    if verify:
        _verify(folder)
    said = supported(folder, trust_remote_code=trust_remote_code).to_json()
    return {"contains": ["checkpoint"], **said, "quantised_by": quantised_by(read_config(folder))}


def _verify(*folders: Path) -> int:
    """Bytes of tensors in files with checksums, compared with them. Raises ConfigError: there are none."""
    from torch_pi2.base.tensorfile import TensorReader

    total = 0
    for path in {path for folder in folders for path in folder.glob("*.safetensors")}:
        with TensorReader(path) as file:
            total += file.verify()
    if total:
        return total
    fix = "Leave it out: other tools and earlier versions wrote no checksums. torch-pi2 pack makes stores."
    raise ConfigError("--verify", expected=f"files with checksums in {folders[0]}", found="none", fix=fix)


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
    if rows and not result["refused"]:
        lines.append(f"zeros: torch-pi2 zeros {result.get('folder', 'DIR')} --text FILE measures how many there are")
    if result["refused"]:
        lines.append(f"nothing can be made sparse: {result['refused']}")
    return "\n".join(lines + stays_dense(result["left"]))


def stays_dense(left: dict[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in left.items():
        by_reason[reason].append(name)
    lines = []
    for reason, names in by_reason.items():
        which = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
        lines.append(f"stays dense: {which}: {reason}")
    return lines


def describe_bundle(folder: Path, verify: bool, progress: bool) -> dict[str, Any]:
    """The manifest of a bundle, and facts read from its program (``unknown``: why it was not read), as JSON values.

    Raises ArtifactError: the manifest or a file is missing, damaged, or does not belong to the bundle.
    """
    from torch_pi2.export.describe import describe_program
    from torch_pi2.export.manifest import PROGRAM_FILE, Manifest
    from torch_pi2.export.qnn.settings import REPORT_FILE, read_report

    manifest = Manifest.load(folder)
    read = manifest.verify(folder, "all" if verify else "sizes", progress=progress)
    program: dict[str, Any] = {"methods": {}}
    unknown = None
    try:
        program = describe_program(folder / PROGRAM_FILE)
    except LibraryMissingError as error:
        unknown = str(error)
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    methods = {}
    for name, method in manifest.methods.items():
        methods[name] = {"kind": method.kind, "batch": method.batch, "max_tokens": method.max_tokens}
        methods[name] |= {"hot_chunks": list(method.hot_chunks)}
        methods[name] |= program["methods"].get(name, {"delegates": {}, "operators": {}})
    about = {"contains": ["bundle"], "files": files, "bytes": sum(files.values()), "manifest": manifest.to_json()}
    about |= {"methods": methods, "unknown": unknown}
    npu = read_report(folder / REPORT_FILE) if REPORT_FILE in files else None
    return about | {"verified_bytes": read if verify else None, "npu": npu}


def render_bundle(result: dict[str, Any]) -> str:
    manifest, methods = result["manifest"], result["methods"]
    model, memory, ffn = manifest["model"], manifest["memory"], common.size(manifest["bytes"]["ffn"])
    rows = [m | {"method": name, "operators": sum(m["operators"].values())} for name, m in methods.items()]
    program = common.records(rows, ("method", "batch", "max_tokens", "delegates", "operators", "hot_chunks"))
    hashes = [(name, size, manifest["files"][name]["sha256"]) for name, size in result["files"].items()]
    shown = [
        f"bundle version {manifest['version']}: {manifest['kind']} for {manifest['target']}, "
        f"{common.size(result['bytes'])}\n"
        f"model: {model['class']} ({model['model_type'] or 'no Hugging Face type'}), {model['layers']} FFNs of hidden "
        f"size {model['hidden']} in {model['weights']}, other linear layers in {model['linears']}, FFN weights "
        f"{model['model_hash'][:12]}\n"
        f"made by: {', '.join(f'{name} {version}' for name, version in manifest['made_by'].items())}\n"
        f"holds {manifest['lanes']} sequences of {manifest['max_tokens']} tokens; memory: "
        f"{common.size(memory['fixed_bytes'])} and neurons; a token: {common.size(memory['token_bytes'])} of {ffn}",
        f"delegates and operators: not known ({result['unknown']})" if result["unknown"] else program,
        common.table(("file", "bytes", "SHA-256"), hashes),
        *([_render_npu(result["npu"])] if result["npu"] else []),
        *(f"lossy: {text}" for text in manifest["lossy"]),
    ]
    if result["verified_bytes"] is not None:
        shown.append(f"verified: {common.size(result['verified_bytes'])} are as they were exported")
    return "\n\n".join(shown)


def _render_npu(report: dict[str, Any]) -> str:
    """Loss with and without the NPU; ``--json`` has the error of every layer."""
    head, loss = f"NPU: {report['soc']}, QNN {report['qnn']}", report["loss"]
    if loss is None:
        return f"{head}; loss with the NPU's part: not measured"
    alone = loss["nats_per_token"]
    npu = {name: (m["nats_per_token"], m["change"]) for name, m in loss["npu"].items()}
    with_npu = ", ".join(f"{name} {n:.4f} ({n - alone:+.4f}, {change:+.2%})" for name, (n, change) in npu.items())
    return (
        f"{head}\nnats per token on {loss['tokens']} tokens of {loss['measured_on']}: without the NPU {alone:.4f}, "
        f"with its feed-forward layers (simulated in PyTorch) of {with_npu}"
    )
