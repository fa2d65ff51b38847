"""Quantise a float checkpoint to 4 or 8 bits a weight, one matrix in memory at a time. Lossy.

IN is a Hugging Face folder with safetensors, or one written by `torch-pi2 optimize`, whose plan and predictors are
kept. The printed error is |w' - w| / |w| over all weights of a layer. Weights are rounded to nearest, or, with
--quantization gptq, so that a layer's outputs on --text change least, which runs the model layer by layer for minutes.
For errors weighted by inputs: `torch-pi2 optimize MODEL --weights int4 --quantization weighted`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, verdict
from torch_pi2.formats import QUANTIZED
from torch_pi2.types.config import QUANTIZATIONS, Config

EXAMPLE = "torch-pi2 quantize my-sparse-model my-int4-model --weights int4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="folder with float safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--weights", choices=QUANTIZED, default="int4", help="groups of 32 with a 16-bit scale")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="rtn",
        help="rtn: to nearest; gptq: calibrated on --text; weighted is refused here, `torch-pi2 optimize` has it",
    )
    common.add_text(parser)
    parser.add_argument(
        "--tokens",
        type=common.positive,
        default=Config.calibration_tokens,
        dest="calibration_tokens",
        metavar="N",
        help=f"of --text, for gptq (default: {Config.calibration_tokens})",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="DIR", help="--out of plan, fit and profile, for a dense IN (default: IN's own)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code in the checkpoint folder")
    verdict.add_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2

    common.check_out(args.out)
    how = common.given(args, "weights", "quantization", "plan", "trust_remote_code")
    if args.quantization == "gptq":
        tokenizer = common.load_tokenizer(verdict.loading(args))
        how |= {"tokenizer": tokenizer, **common.given(args, "calibration_tokens")}
        how["calibration"] = common.text_of(args, tokenizer, args.calibration_tokens)
    report = torch_pi2.quantize(args.source, args.out, **how, progress=not args.quiet)
    if not args.no_verdict:
        verdict.of_folder(args, "quantize")
    judged = verdict.read(args.out)
    return {"out": str(args.out), **report.to_json(), "verdict": None if judged is None else judged.to_json()}


def render(result: dict[str, Any]) -> str:
    errors = result["errors"]
    rows = [(name, common.percent(error, 2)) for name, error in errors.items()]
    if len(rows) > 40:
        rows = sorted(rows, key=lambda row: -errors[row[0]])[:40]
    left = f"\n(the {len(rows)} largest of {len(errors)})" if len(rows) < len(errors) else ""
    return (
        f"{common.table(('layer', 'relative error'), rows)}{left}\n"
        f"{result['out']}: {common.size(result['bytes_in'])} -> {common.size(result['bytes_out'])} {result['weights']} "
        f"in {result['seconds']:.1f} s{verdict.shown(result['verdict'])}"
    )
