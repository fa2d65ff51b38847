"""What `inspect` says of a bundle: methods with delegates and operators, bytes by part, hot chunks, hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_pi2.cli import common, verdict
from torch_pi2.errors import Pi2Error


def describe_bundle(folder: Path, verify: bool, progress: bool = True) -> dict[str, Any]:
    """The manifest, and what the program and the store themselves say.

    Args:
        verify: compare all files with their hashes. progress: show how far that is, in a terminal.

    Returns:
        ``contains`` (["bundle"]), ``files``, ``bytes``, ``manifest``, ``methods`` (name -> delegates, operators and
        hot_chunks), ``parts`` (name -> bytes, of all files), ``unknown`` (why the program was not read, or None),
        ``verified_bytes`` (None without ``verify``) and ``npu`` (qnn.json; None without an NPU).

    Raises:
        ArtifactError: the manifest or a file is missing, damaged, or does not belong to the bundle.
    """
    from torch_pi2.errors import LibraryMissingError
    from torch_pi2.export.describe import describe_program
    from torch_pi2.export.manifest import PROGRAM_FILE, STORE_FILE, Manifest
    from torch_pi2.export.qnn.settings import REPORT_FILE, read_report

    manifest = Manifest.load(folder)
    read = manifest.verify(folder, "all" if verify else "sizes", progress=progress)
    unknown = None
    try:
        program = describe_program(folder / PROGRAM_FILE)
    except LibraryMissingError as error:
        program, unknown = {"methods": {}, "bytes": {}}, str(error)
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    others = {name: size for name, size in files.items() if name not in (PROGRAM_FILE, STORE_FILE)}
    parts = _program_parts(program["bytes"], files[PROGRAM_FILE])
    if STORE_FILE in files:
        parts |= _store_parts(folder / STORE_FILE)
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
        "parts": parts | {"configuration and tokenizer": sum(others.values())},
        "unknown": unknown,
        "verified_bytes": read if verify else None,
        "npu": read_report(folder / REPORT_FILE) if REPORT_FILE in files else None,
        "verdict": None if (found := verdict.read(folder)) is None else found.to_json(),
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
            parts |= {"floats": parts["floats"] - predictors, "predictors": parts["predictors"] + predictors}
            names = {"floats": "biases"}  # there is nothing else in the store of a bundle
            return {f"store: {names.get(name, name).replace('_', ' ')}": size for name, size in parts.items() if size}
    except Pi2Error:  # its size is as the manifest says; what is wrong with it is for --verify and for running it
        return {"store: unreadable": path.stat().st_size}


def render_bundle(result: dict[str, Any]) -> str:
    made, methods = result["manifest"], result["methods"]
    model, memory, ffn = made["model"], made["memory"], common.size(made["bytes"]["ffn"])
    head = (
        f"bundle version {made['version']}: {made['kind']} for {made['target']}, {common.size(result['bytes'])}\n"
        f"model: {model['class']} ({model['model_type'] or 'no Hugging Face type'}), {model['layers']} FFNs of hidden "
        f"size {model['hidden']} in {model['weights']}, other linear layers in {model['linears']}, FFN weights "
        f"{model['model_hash'][:12]}\n"
        f"made by: {', '.join(f'{name} {version}' for name, version in made['made_by'].items())}\n"
        f"room: {made['lanes']} sequences of {made['max_tokens']} tokens; memory: {common.size(memory['fixed_bytes'])} "
        f"and neurons, a token wants {common.size(memory['token_bytes'])} of {ffn}"
    )
    rows = [
        (
            name,
            method["batch"],
            method["max_tokens"],
            _counts(method["delegates"]),
            sum(method["operators"].values()),
            _chunks(method["hot_chunks"]),
        )
        for name, method in methods.items()
    ]
    parts = [(name, size, common.percent(size / result["bytes"])) for name, size in result["parts"].items()]
    hashes = [(name, size, made["files"][name]["sha256"]) for name, size in result["files"].items()]
    verified = result["verified_bytes"]
    return "\n\n".join(
        (
            head,
            f"delegates and operators: not known ({result['unknown']})"
            if result["unknown"]
            else common.table(
                ("method", "batch", "tokens", "delegates", "CPU operators", "hot chunks per layer"), rows
            ),
            common.table(("part", "bytes", "share"), parts),
            common.table(("file", "bytes", "SHA-256"), hashes),
            *(() if result["npu"] is None else (_npu(result["npu"]),)),
            *(f"lossy: {text}" for text in made["lossy"]),
            *(() if verified is None else (f"verified: {common.size(verified)} are as they were exported",)),
            *filter(None, (verdict.shown(result["verdict"]).lstrip("\n"),)),
        )
    )


def _npu(report: dict[str, Any]) -> str:
    """Of each layer its weights on the NPU and their error, and what they do to the model's loss."""
    layers = [(i, layer) for i, layer in enumerate(report["layers"]) if layer is not None]
    rows = [
        (
            i,
            _npu_weights(report["precision"], layer),
            common.percent(layer["errors"][-1]) if layer["errors"] else "-",
            common.size(layer["context_bytes"]),
        )
        for i, layer in layers
    ]
    rows += [
        (
            name,
            _part_weights(part),
            common.percent(part["errors"][0]) if part["errors"] else "-",
            common.size(part["context_bytes"]),
        )
        for name, part in report.get("parts", {}).items()
    ]
    head = f"NPU: {report['soc']}, QNN {report['qnn']}"
    if layers and layers[0][1]["errors"]:
        head += f"; errors against float32 on {layers[0][1]['measured_tokens']} tokens of the calibration data"
    shown, loss = common.table(("layer", "weights", "error", "context"), rows), report["loss"]
    if loss is None:
        return f"{head}\n{shown}\nloss with the NPU's part: not measured"
    alone = loss["nats_per_token"]
    of = ", ".join(
        f"{name} {m['nats_per_token']:.4f} ({m['nats_per_token'] - alone:+.4f}, {m['change']:+.2%})"
        for name, m in loss["npu"].items()
    )
    return (
        f"{head}\n{shown}\nnats per token on {loss['tokens']} tokens of {loss['measured_on']}: without the NPU "
        f"{alone:.4f}, with its feed-forward layers (simulated in PyTorch) of {of}"
    )


def _npu_weights(precision: str, layer: dict[str, Any]) -> str:
    return f"{precision}, groups of {layer['block']}" if layer["block"] else precision


def _part_weights(part: dict[str, Any]) -> str:
    if part["block"]:
        return f"w4a16, groups of {part['block']}"
    return "w8a16" if part["errors"] else "fp16"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _chunks(chunks: list[int]) -> str:
    """One number where all layers have the same."""
    return "-" if not chunks else str(chunks[0]) if len(set(chunks)) == 1 else " ".join(map(str, chunks))
