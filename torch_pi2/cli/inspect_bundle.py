"""What ``inspect`` says of a bundle: methods with delegates and operators, bytes by part, hot chunks, hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_pi2.cli import common, verdict
from torch_pi2.errors import LibraryMissingError, Pi2Error


def describe_bundle(folder: Path, verify: bool, progress: bool) -> dict[str, Any]:
    """The manifest, and what the program and the store themselves say.

    Returns:
        ``contains`` (["bundle"]), ``files``, ``bytes``, ``manifest``, ``methods`` (name -> delegates, operators and
        hot_chunks), ``parts`` (name -> bytes, of all files), ``unknown`` (why the program was not read, or None),
        ``verified_bytes`` (None without ``verify``) and ``npu`` (qnn.json; None without an NPU).

    Raises:
        ArtifactError: the manifest or a file is missing, damaged, or does not belong to the bundle.
    """
    from torch_pi2.export.describe import describe_program
    from torch_pi2.export.manifest import PROGRAM_FILE, STORE_FILE, Manifest
    from torch_pi2.export.qnn.settings import REPORT_FILE, read_report

    manifest = Manifest.load(folder)
    read = manifest.verify(folder, "all" if verify else "sizes", progress=progress)
    program: dict[str, Any] = {"methods": {}, "bytes": {}}
    unknown = None
    try:
        program = describe_program(folder / PROGRAM_FILE)
    except LibraryMissingError as error:
        unknown = str(error)
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    parts = _program_parts(program["bytes"], files[PROGRAM_FILE])
    if STORE_FILE in files:
        parts |= _store_parts(folder / STORE_FILE)
    others = (size for name, size in files.items() if name not in (PROGRAM_FILE, STORE_FILE))
    return {
        "contains": ["bundle"],
        "files": files,
        "bytes": sum(files.values()),
        "manifest": manifest.to_json(),
        "methods": {
            name: {
                "kind": method.kind,
                "batch": method.batch,
                "max_tokens": method.max_tokens,
                "hot_chunks": list(method.hot_chunks),
                **program["methods"].get(name, {"delegates": {}, "operators": {}}),
            }
            for name, method in manifest.methods.items()
        },
        "parts": parts | {"configuration and tokenizer": sum(others)},
        "unknown": unknown,
        "verified_bytes": read if verify else None,
        "npu": read_report(folder / REPORT_FILE) if REPORT_FILE in files else None,
        "verdict": verdict.as_json(folder),
    }


def _program_parts(sizes: dict[str, Any], whole: int) -> dict[str, int]:
    """Of model.pte: names for people."""
    if not sizes:
        return {"program": whole}
    return {
        "program: graphs": sizes["program"],
        "program: constants": sizes["constants"] + sizes["mutable"],
        "program: weights of delegates": sizes["named"],
        **{f"program: {backend}": size for backend, size in sizes["delegates"].items()},
        "program: padding": sizes["padding"],
    }


def _store_parts(path: Path) -> dict[str, int]:
    """Of model.pi2."""
    from torch_pi2.store.storefile import StoreReader

    try:
        with StoreReader(path) as store:
            parts = store.regions()
            predictors = sum(spec.nbytes for name, spec in store.specs.items() if ".predictor." in name)
    except Pi2Error:  # its size is as the manifest says; what is wrong with it is for --verify and for running it
        return {"store: unreadable": path.stat().st_size}
    parts |= {"predictors": parts["predictors"] + predictors, "biases": parts.pop("floats") - predictors}
    return {f"store: {name.replace('_', ' ')}": size for name, size in parts.items() if size}


def render_bundle(result: dict[str, Any]) -> str:
    made, methods = result["manifest"], result["methods"]
    model, memory, ffn = made["model"], made["memory"], common.size(made["bytes"]["ffn"])
    rows = [
        method | {"method": name, "operators": sum(method["operators"].values())} for name, method in methods.items()
    ]
    program = common.records(rows, ("method", "batch", "max_tokens", "delegates", "operators", "hot_chunks"))
    parts = [(name, size, common.percent(size / result["bytes"])) for name, size in result["parts"].items()]
    hashes = [(name, size, made["files"][name]["sha256"]) for name, size in result["files"].items()]
    shown = [
        f"bundle version {made['version']}: {made['kind']} for {made['target']}, {common.size(result['bytes'])}\n"
        f"model: {model['class']} ({model['model_type'] or 'no Hugging Face type'}), {model['layers']} FFNs of hidden "
        f"size {model['hidden']} in {model['weights']}, other linear layers in {model['linears']}, FFN weights "
        f"{model['model_hash'][:12]}\n"
        f"made by: {', '.join(f'{name} {version}' for name, version in made['made_by'].items())}\n"
        f"room: {made['lanes']} sequences of {made['max_tokens']} tokens; memory: {common.size(memory['fixed_bytes'])} "
        f"and neurons, a token wants {common.size(memory['token_bytes'])} of {ffn}",
        f"delegates and operators: not known ({result['unknown']})" if result["unknown"] else program,
        common.table(("part", "bytes", "share"), parts),
        common.table(("file", "bytes", "SHA-256"), hashes),
        *([_render_npu(result["npu"])] if result["npu"] else []),
        *(f"lossy: {text}" for text in made["lossy"]),
    ]
    if result["verified_bytes"] is not None:
        shown.append(f"verified: {common.size(result['verified_bytes'])} are as they were exported")
    return "\n\n".join(filter(None, (*shown, verdict.shown(result["verdict"]).lstrip("\n"))))


def _render_npu(report: dict[str, Any]) -> str:
    """What the NPU's part does to the model's loss; ``--json`` has the error of every layer."""
    head, loss = f"NPU: {report['soc']}, QNN {report['qnn']}", report["loss"]
    if loss is None:
        return f"{head}; loss with the NPU's part: not measured"
    alone = loss["nats_per_token"]
    with_npu = ", ".join(
        f"{name} {m['nats_per_token']:.4f} ({m['nats_per_token'] - alone:+.4f}, {m['change']:+.2%})"
        for name, m in loss["npu"].items()
    )
    return (
        f"{head}\nnats per token on {loss['tokens']} tokens of {loss['measured_on']}: without the NPU {alone:.4f}, "
        f"with its feed-forward layers (simulated in PyTorch) of {with_npu}"
    )
