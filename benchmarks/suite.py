"""Questions about held-out text, answered by a trained model in several forms: what sparsity and 4 bits change.

Every form of the model gets the questions of :mod:`benchmarks.questions`, and is compared with the dense floats, pair
by pair. Calibration text and questions are of different files of Python's standard library. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.arguments import add_seed, add_trained, names_of
from benchmarks.beside import floats
from benchmarks.questions import TASKS, answers, differences, make_items
from benchmarks.tables import Result, Table, at
from torch_pi2.api import optimize
from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.eval import work
from torch_pi2.graph.find import find_sites
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.types.config import Config, ConfigFields

#: Forms of a model. Every gate is read: 60 % of neurons skipped are 40 % of the bytes of gated layers.
CASES: dict[str, ConfigFields] = {
    "exact": {"method": "exact"},
    "lowrank": {"method": "lowrank"},
    "gate": {"method": "threshold", "score": "gate", "sparsity": 0.6},
    "output": {"method": "threshold", "score": "output", "sparsity": 0.6},
    "int4": {"method": "dense", "weights": "int4"},
    "int4-gptq": {"method": "dense", "weights": "int4", "quantization": "gptq"},
}
_WORDS = {
    "exact": "exact gate (lossless)",
    "lowrank": "low-rank predictor",
    "gate": "60 % skipped by the gate (CATS)",
    "output": "60 % skipped by what neurons add",
    "int4": "int4, to nearest",
    "int4-gptq": "int4, GPTQ",
}
#: Of models with exact zeros, and of others.
_SPARSE, _NOT_SPARSE = ("exact", "lowrank", "int4", "int4-gptq"), ("gate", "output", "int4", "int4-gptq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trained(parser)
    add(
        "--cases",
        type=names_of(CASES),
        metavar="FORM,...",
        help=f"{', '.join(CASES)} (default: those that suit the model)",
    )
    add("--limit", type=common.positive, default=500, metavar="N", help="questions of each task (default: 500)")
    add_seed(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every form of the model in ``folder`` beside its dense floats.

    Returns:
        ``cases``: by form ``rows_used``, the share of FFN rows that were used (None: nothing is counted), and by task
        the fields of :class:`benchmarks.questions.Difference` in ``tasks``.

    Raises:
        Pi2Error: what loading and optimising models raise.
    """
    calibration_tokens = args.calibration_tokens
    make, tokenizer = floats(args)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    items = make_items(stdlib_text("heldout"), limit=args.limit, seed=args.seed)

    dense = make()
    sparse = all(exact_zeros(site.activation) for site in find_sites(dense))
    phase("dense")
    wanted, found = answers(dense, tokenizer, items, progress=True), {}
    for case in args.cases or (_SPARSE if sparse else _NOT_SPARSE):
        phase(case)
        config = replace(Config(**CASES[case]), calibration_tokens=calibration_tokens)
        model = optimize(make(), calibration, config, tokenizer=tokenizer)
        with work() as done:
            given = answers(model, tokenizer, items, progress=True)
        tasks = {task: asdict(of) for task, of in differences(items, wanted, given).items()}
        found[case] = {"rows_used": done.rows_used, "tasks": tasks}
    return {
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "questions": args.limit,
        "cases": found,
    }


def _rows(result: Result) -> list[dict[str, Any]]:
    """Right answers of the dense model, and by how many of a hundred those of its other forms differ."""
    first = next(iter(result["cases"].values()))["tasks"]
    rows: list[dict[str, Any]] = [
        {"form": "dense"} | {task: f"{100 * of['accuracy'][0]:.1f} % of {of['items']}" for task, of in first.items()}
    ]
    for case, of in result["cases"].items():
        tasks = {task: "{:+.1f} ({:+.1f} to {:+.1f})".format(*_per_cent(found)) for task, found in of["tasks"].items()}
        changed = of["tasks"]["all"]["changed"]
        rows.append({"form": _WORDS[case], "rows_used": of["rows_used"], **tasks, "changed": changed})
    return rows


def _per_cent(task: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(100 * share for share in (task["difference"], *task["interval"]))


TABLES = (
    Table(
        "Questions",
        _rows,
        {
            "form": at("form"),
            "FFN rows used": at("rows_used", common.percent),
            **{task: at(task) for task in (*TASKS, "all")},
            "other answers": at("changed", common.percent),
        },
        "Right answers of a dense model to questions about held-out text (`benchmarks/questions.py`), and by how many "
        "of a hundred those of its other forms differ, with 95 % intervals (Bonett and Price 2012, paired).",
    ),
)


def about(result: Result) -> str:
    return f"{result['folder']}: right answers to questions about held-out text, differences with 95 % intervals"
