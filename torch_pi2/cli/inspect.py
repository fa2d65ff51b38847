"""Say what is in a folder of ours: an optimised model, a neuron store, statistics, predictors, or a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.errors import ArtifactError, ConfigError

EXAMPLE = "torch-pi2 inspect my-sparse-model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="written by profile, fit, plan, optimize or pack; or a file model.pi2"
    )
    parser.add_argument("--verify", action="store_true", help="read the whole store and compare it with its checksums")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return {"folder": str(args.folder), **describe(args.folder, args.verify)}


def describe(folder: Path, verify: bool = False) -> dict[str, Any]:
    """What is in ``folder``: ``contains``, file sizes, one dict per layer, and what a store's bytes are for.

    Args:
        folder: one of ours, or a neuron store without one. verify: compare all of the store with its checksums.

    Raises:
        ArtifactError: nothing of ours is there, or a file is damaged. ConfigError: there is no store to verify.
    """
    from torch_pi2.store.storefile import STORE_FILE

    readers = {"stats.safetensors": _stats, "predictors.safetensors": _predictors, "plan.json": _plan}
    if folder.is_file():
        return _describe_file(folder, verify)
    inner = folder / "pi2" if (folder / "pi2").is_dir() else folder
    if verify and not (inner / STORE_FILE).is_file():
        raise ConfigError(
            "--verify",
            expected=f"a neuron store pi2/{STORE_FILE} in {folder}",
            found="none",
            fix="Leave it out: other files have no checksums. torch-pi2 pack makes stores.",
        )
    present = [name for name in readers if (inner / name).is_file()]
    if not present:
        raise ArtifactError(
            str(folder),
            expected=f"a folder with {', '.join(readers)} or pi2/ in it",
            found="none of them" if folder.is_dir() else "no such folder",
            fix="Pass a folder written by torch-pi2 profile, fit, plan, optimize or pack.",
        )
    layers: dict[str, dict[str, Any]] = {}
    for name in present:
        for key, facts in readers[name](inner).items():
            layers.setdefault(key, {"key": key}).update(facts)
    store: dict[str, Any] | None = None
    if (inner / STORE_FILE).is_file():
        store, slots = _store(inner / STORE_FILE, verify)
        for key, facts in slots.items():
            layers.setdefault(key, {"key": key}).update(facts)
    predictors = common.load_predictors(inner) if "predictors.safetensors" in present else None
    report = predictors.report.to_json() if predictors and predictors.report else None
    files = {p.name: p.stat().st_size for p in sorted(inner.iterdir()) if p.is_file()}
    kinds = ["model"] if inner != folder else []
    return {
        "contains": kinds + [name.split(".")[0] for name in present] + (["store"] if store else []),
        "files": files,
        "bytes": sum(files.values()),
        "layers": list(layers.values()),
        "store": store,
        "fit": report and {name: report[name] for name in ("change", "tolerance", "met", "skipped", "tokens")},
    }


def _describe_file(path: Path, verify: bool) -> dict[str, Any]:
    """As :func:`describe`, of a store alone."""
    store, layers = _store(path, verify)
    return {
        "contains": ["store"],
        "files": {path.name: store["bytes"]},
        "bytes": store["bytes"],
        "layers": list(layers.values()),
        "store": store,
        "fit": None,
    }


def _stats(folder: Path) -> dict[str, dict[str, Any]]:
    stats = common.load_stats(folder)
    return {
        s.key: {"neurons": s.intermediate, "tokens": s.tokens, "sparsity": s.sparsity, "active_share": s.active_share}
        for s in stats
    }


def _predictors(folder: Path) -> dict[str, dict[str, Any]]:
    predictors = common.load_predictors(folder)
    assert predictors is not None
    return {key: p.card.to_json() for key, p in predictors.items() if p.card is not None}


def _plan(folder: Path) -> dict[str, dict[str, Any]]:
    from torch_pi2.plan.plan import Plan

    return {
        layer.site.key: {
            "form": _form(layer.site),
            "hidden": layer.site.hidden,
            "neurons": layer.site.intermediate,
            "method": layer.method,
            "hot": layer.n_hot,
            "cold": layer.n_cold,
            "threshold": layer.threshold,
            "expected_active": layer.expected_active,
        }
        for layer in Plan.load(folder).layers
    }


def _store(path: Path, verify: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The whole store, and its layers by key."""
    from torch_pi2.store.storefile import StoreReader

    with StoreReader(path) as store:
        layers = {
            key: {
                "key": key,
                "hidden": entry.hidden,
                "neurons": entry.neurons,
                "hot": entry.n_hot,
                "bundle_bytes": entry.bundle_bytes,
                "slot_bytes": entry.slot_bytes,
                "padding_share": 1 - entry.bundle_bytes / entry.slot_bytes,
            }
            for key, entry in zip(store.keys, store.entries, strict=True)
        }
        facts = {
            "weights": store.kind,
            "model_hash": store.model_hash,
            "bytes": store.file_bytes,
            "neurons": sum(entry.neurons for entry in store.entries),
            "regions": store.regions(),
            "verified_bytes": store.verify(progress=True) if verify else None,
        }
    return facts, layers


def _form(site: Any) -> str:
    if not site.gated:
        return f"{site.activation}(up)"
    up = f"{site.activation}(up)" if site.activation_on_up else "up"
    return f"{site.activation}(gate)*{up}"


#: field -> (column title, how it is shown), for those that some layer has.
_COLUMNS: dict[str, tuple[str, Any]] = {
    "form": ("form", str),
    "neurons": ("neurons", str),
    "sparsity": ("zeros", common.percent),
    "active_share": ("firing", common.percent),
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
    layers = result["layers"]
    columns = [name for name in _COLUMNS if any(name in layer for layer in layers)]
    rows = [
        [layer["key"], *(_COLUMNS[c][1](layer[c]) if layer.get(c) is not None else "-" for c in columns)]
        for layer in layers
    ]
    files = ", ".join(f"{name} {common.size(count)}" for name, count in result["files"].items())
    shown = common.table(["layer", *(_COLUMNS[c][0] for c in columns)], rows)
    fit = result["fit"]
    fitted = (
        f"\nfit: loss {fit['change']:+.2%} (tolerance {fit['tolerance']:.1%}{'' if fit['met'] else ', NOT met'}), "
        f"{common.percent(fit['skipped'])} of cold neurons skipped, on text of the fit that was held back"
        if fit
        else ""
    )
    stored = f"\n{_render_store(result['store'])}" if result["store"] else ""
    return f"{', '.join(result['contains'])}: {files}\n{shown}{fitted}{stored}"


def _render_store(store: dict[str, Any]) -> str:
    parts = ", ".join(f"{name.replace('_', ' ')} {common.size(count)}" for name, count in store["regions"].items())
    verified = store["verified_bytes"]
    checked = "" if verified is None else f"\nverified: {common.size(verified)} are as they were packed"
    return f"store: {store['neurons']} neurons in {store['weights']}, {common.size(store['bytes'])}: {parts}{checked}"
