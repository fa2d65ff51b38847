"""Write an HTML page about a model folder: how neurons fire, the plan, its times, cache hits and reads.

The page needs no network and no other files. It ends with a list of what is missing and the commands to get it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 report my-sparse-model -o report.html --trace out.json --accesses accesses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="MODEL_DIR", help="written by optimize, quantize, synthetic or pack")
    add("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page")
    add(
        "--plan",
        type=Path,
        metavar="DIR",
        help="another plan than the folder's own (torch-pi2 plan MODEL_DIR --out DIR)",
    )
    add("--trace", type=Path, metavar="FILE", help="a trace, from torch_pi2.trace or --trace of another verb")
    add("--accesses", type=Path, metavar="FILE", help="a recording of torch_pi2.record_accesses, to be replayed")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2 import report
    from torch_pi2.base.files import is_standard_output, to_replace
    from torch_pi2.observe.trace import check_path

    check_path(args.out)
    if is_standard_output(args.out):
        args.stdout = sys.stderr
    found = report.collect(
        args.folder,
        trace=args.trace,
        accesses=args.accesses,
        plan=args.plan,
        progress=not args.quiet,
    )
    path = report.write(found, args.out)
    size = None if to_replace(path) is None else path.stat().st_size
    return {"file": str(path), "bytes": size, "report": found}


def render(result: dict[str, Any]) -> str:
    lines = [result["file"] if result["bytes"] is None else f"{result['file']}: {common.size(result['bytes'])}"]
    for lacking in result["report"]["missing"]:
        lines.append(f"missing: {lacking['plot']}. {lacking['why']}")
        lines += [f"    {line}" for line in lacking["how"].splitlines()]
    return "\n".join(lines)
