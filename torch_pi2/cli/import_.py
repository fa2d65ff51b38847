"""Import a quantised model, a GGUF file or a folder, for every other command.

Folders may be quantised by GPTQ, AWQ, compressed-tensors or torchao. Matrices keep their precision, bit for bit, if one
of our formats has it (GGUF's Q4_0, Q8_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, IQ4_NL); others are rounded again, and
listed. Tokenizer and chat template are imported, too. Layers that can be sparse (ReLU) and experts become neurons;
--neurons all does this for all layers, for `torch-pi2 pack` and models larger than memory. --predictors imports
PowerInfer's predictors, and measures their recall.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.formats import IMPORT_NEURONS

EXAMPLE = "torch-pi2 import model-q4_k_m.gguf --out my-model"
#: Bytes of the standard library's text: more than the tokens that are read.
_TEXT_BYTES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a .gguf file, or a folder")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write")
    parser.add_argument(
        "--neurons",
        choices=IMPORT_NEURONS,
        default="auto",
        help="which feed-forward layers become neurons, and in what; auto: experts, and those that can be sparse",
    )
    parser.add_argument(
        "--predictors",
        metavar="FILE|stdlib",
        help="import the predictors of a PowerInfer file, too (lossy), measured on this UTF-8 text",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2 import import_gguf, import_quantized
    from torch_pi2.store.gguf import gguf_in

    common.check_out(args.out)
    how = {"neurons": args.neurons, "progress": not args.quiet}
    if not args.source.is_dir() or gguf_in(args.source) is not None:
        report = import_gguf(args.source, args.out, predictors=_text(args.predictors), **how)
    elif args.predictors is None:
        report = import_quantized(args.source, args.out, **how)
    else:
        raise ConfigError("--predictors", expected="a GGUF file", found=f"folder {args.source}", fix="Leave it out.")
    return {"out": str(args.out), **report.to_json()}


def _text(named: str | None) -> str | None:
    from torch_pi2.profiling.text import stdlib_text

    if named == "stdlib":
        return stdlib_text("train", max_bytes=_TEXT_BYTES)
    return None if named is None else common.text_in(named, "--predictors")


def render(result: dict[str, Any]) -> str:
    kept = ", ".join(f"{count} {name}" for name, count in sorted(result["types"].items()))
    lines = [f"kept bit for bit: {kept or 'nothing'}"]
    if rounded := result["rounded"]:
        by_way: dict[str, list[float]] = {}
        errors = result["errors"]
        for name, way in rounded.items():
            linear = name.removesuffix(".weight")
            error = errors.get(linear, errors.get(linear.rpartition(".")[0], 0.0))  # of a layer that became neurons
            by_way.setdefault(way, []).append(error)
        rows = [(way, str(len(errors)), _largest(errors)) for way, errors in sorted(by_way.items())]
        lines.append(common.table(("rounded again", "matrices", "largest relative error"), rows))
    if result["neurons"]:
        worst = max(result["errors"].values(), default=0.0)
        off = f"what was rounded {common.percent(worst, 2)} off at most"
        lines.append(f"{result['neurons']} layers are neurons now ({result['weights']}), {off}")
    if result["predictors"]:
        lines.append(
            f"{result['predictors']} tensors of PowerInfer's predictors left out, as nothing says what they miss: the "
            "exact gate misses nothing; --predictors TEXT imports them, and measures their recall"
        )
    if recall := result["recall"].values():
        lines.append(
            f"predictors of {len(recall)} layers (lossy) find {common.percent(sum(recall) / len(recall), 1)} of the "
            f"neurons that fire, {common.percent(min(recall), 1)} in the worst layer; torch-pi2 inspect lists them"
        )
    if result["tokenizer"]:
        lines.append(f"no tokenizer: {result['tokenizer']}")
    sizes = f"{common.size(result['bytes_in'])} -> {common.size(result['bytes_out'])}"
    return "\n".join([*lines, f"{result['out']}: {sizes} in {result['seconds']:.1f} s"])


def _largest(errors: list[float]) -> str:
    return common.percent(max(errors), 2) if any(errors) else "-"
