"""Questions about held-out text, answered by a trained model in several forms: what sparsity and 4 bits change.

The questions are those of ``torch-pi2 eval --suite``: every form of the model gets the same, and is compared with the
dense floats, pair by pair. Calibration text and questions are of different files of Python's standard library. Quality,
not speed: nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import list_of
from benchmarks.figures import at_least, known, shown
from torch_pi2.api import optimize
from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.eval import answers, differences, make_items, work
from torch_pi2.eval.items import TASKS
from torch_pi2.graph.find import find_sites
from torch_pi2.machine import process as machine
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.types.config import Config, ConfigFields

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
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
HEADER = ("form", "FFN rows used", *TASKS, "all", "other answers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a decoder in floats (default: the trained model)")
    add(
        "--cases",
        type=list_of(str),
        metavar="FORM,...",
        help=f"{', '.join(CASES)} (default: those that suit the model)",
    )
    add("--limit", type=common.positive, default=500, metavar="N", help="questions of each task (default: 500)")
    add("--calibration-tokens", type=common.positive, default=Config.calibration_tokens, metavar="N")
    add("--seed", type=common.seed, default=0, help="of the questions")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    cases: Sequence[str] | None = None,
    limit: int = 500,
    calibration_tokens: int = Config.calibration_tokens,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Every form of the model in ``folder`` beside its dense floats.

    Args: the options of the same names.

    Returns:
        ``cases``: by form ``rows_used``, the share of FFN rows that were used (None: nothing is counted), and by task
        the fields of :class:`torch_pi2.eval.Difference` in ``tasks``.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what loading and optimising models raise.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at_least(64, calibration_tokens=calibration_tokens)
    known("cases", cases or (), CASES)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    items = make_items(stdlib_text("heldout"), limit=limit, seed=seed)

    def make() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32).eval()

    dense = make()
    sparse = all(exact_zeros(site.activation) for site in find_sites(dense))
    phase("dense")
    wanted, found = answers(dense, tokenizer, items, progress=True), {}
    for case in cases or (_SPARSE if sparse else _NOT_SPARSE):
        phase(case)
        config = replace(Config(**CASES[case]), calibration_tokens=calibration_tokens)
        model = optimize(make(), calibration, config, tokenizer=tokenizer)
        with work() as done:
            given = answers(model, tokenizer, items, progress=True)
        tasks = {task: of.to_json() for task, of in differences(items, wanted, given).items()}
        found[case] = {"rows_used": done.rows_used, "tasks": tasks}
    return {
        "what": "suite",
        "folder": Path(folder).resolve().name,
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "questions": limit,
        "seed": seed,
        "calibration_tokens": calibration_tokens,
        "cases": found,
        **machine.describe(),
    }


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For tables with :data:`HEADER`: right answers of the dense model, and by how many of a hundred others differ."""
    first = next(iter(result["cases"].values()))["tasks"]
    about = (f"{100 * of['accuracy'][0]:.1f} % of {of['items']}" for of in first.values())
    rows = [("dense", "", *about, "")]
    for case, of in result["cases"].items():
        tasks = of["tasks"].values()
        rows.append(
            (
                _WORDS[case],
                shown(of["rows_used"], common.percent),
                *("{:+.1f} ({:+.1f} to {:+.1f})".format(*_per_cent(task)) for task in tasks),
                common.percent(of["tasks"]["all"]["changed"]),
            )
        )
    return rows


def _per_cent(task: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(100 * share for share in (task["difference"], *task["interval"]))


def render(result: Mapping[str, Any]) -> str:
    about = f"{result['folder']}: right answers to questions about held-out text, differences with 95 % intervals"
    return f"{about}\n{common.table(HEADER, rows_of(result))}"
