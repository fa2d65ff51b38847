"""Methods of sparsity, with float and 4-bit weights: in memory, over a store and in a bundle, beside the dense floats.

The same held-out tokens each time: in windows at once, as decoding would compute them (all that is skipped there is
skipped), in memory and over a store of which every call reads what it wants; token by token in the bundle. Lossy
methods are to lose the same everywhere. Nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.beside import Beside
from benchmarks.figures import at_least, known, shown
from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.eval.loss import logits_of
from torch_pi2.eval.work import work
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.machine import process as machine
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.types.config import Config, ConfigFields
from torch_pi2.types.method import PREDICTED

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"
_WINDOW, _TOKENS = 256, 8192
#: Of models with exact zeros, and of others.
SPARSE: dict[str, ConfigFields] = {
    "exact gate": {"method": "exact"},
    "low-rank": {"method": "lowrank"},
    "sign bit": {"method": "signbit"},
}
NOT_SPARSE: dict[str, ConfigFields] = {
    "CATS": {"method": "threshold", "sparsity": 0.6},
    "ours, at most 1 %": {"method": "threshold", "score": "auto", "max_loss": 0.01},
    "low-rank": {"method": "lowrank", "score": "output", "max_loss": 0.005, "tolerance": 0.005},
}
WEIGHTS: dict[str, ConfigFields] = {"float": {}, "int4": {"weights": "int4", "quantization": "gptq"}}
HEADER = ("method", "weights", "FFN rows used", "loss", "KL, nats", "same token", "over a store", "in a bundle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a decoder in floats (default: the trained model)")
    add("--weights", type=list_of(str), default=list(WEIGHTS), metavar="W,...", help=f"default: {', '.join(WEIGHTS)}")
    add("--tokens", type=common.positive, default=_TOKENS, metavar="N", help="held-out tokens that are scored")
    add("--calibration-tokens", type=common.positive, default=Config.calibration_tokens, metavar="N")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    weights: Sequence[str] = tuple(WEIGHTS),
    tokens: int = _TOKENS,
    calibration_tokens: int = Config.calibration_tokens,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """``cases``: of each method and weights ``rows_used``, and ``memory``, ``store`` and ``bundle``, see ``Beside``.

    Args: the options of the same names; ``tokens`` are taken in windows of 256.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at_least(_WINDOW, tokens=tokens)
    at_least(64, calibration_tokens=calibration_tokens)
    known("weights", weights, WEIGHTS)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    heldout = tokenizer(common.stdlib_sample("heldout", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(heldout[: min(len(heldout), tokens) // _WINDOW * _WINDOW]).view(-1, _WINDOW)

    def make() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32).eval()

    dense, cases = make(), []
    with torch.no_grad():
        wanted = [F.log_softmax(logits_of(dense, ids_NT[i : i + 1]).float(), -1) for i in range(len(ids_NT))]
    methods = SPARSE if all(exact_zeros(site.activation) for site in find_sites(dense)) else NOT_SPARSE
    given: Any = {"tokenizer": tokenizer, "progress": True}
    for name, fields in ({"dense": {"method": "dense"}} | methods).items():
        config = Config(**fields, calibration_tokens=calibration_tokens)
        stats = torch_pi2.profile(dense, calibration, config=config, **given)
        fitted = None
        if config.method in PREDICTED:
            fitted = torch_pi2.fit(dense, calibration, stats=stats, config=config, **given)
        for form in weights:
            if (form, name) != ("float", "dense"):
                phase(f"{name}, {form}")
                chosen = replace(config, **WEIGHTS[form])
                model = torch_pi2.optimize(make(), calibration, chosen, stats=stats, predictors=fitted, **given)
                cases.append({"method": name, "weights": form} | _everywhere(model, tokenizer, ids_NT, wanted))
    return {
        "what": "methods",
        "folder": Path(folder).resolve().name,
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "tokens": ids_NT.numel(),
        "calibration_tokens": calibration_tokens,
        "cases": cases,
        **machine.describe(),
    }


def _everywhere(model: nn.Module, tokenizer: Any, ids_NT: torch.Tensor, wanted: list[torch.Tensor]) -> dict[str, Any]:
    """The model itself, over a store that was packed from it, and in a bundle that was exported from it."""

    def beside(logits: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        found = Beside()
        for ids_T, dense_BTV in zip(ids_NT, wanted, strict=True):
            found.add(dense_BTV, logits(ids_T), ids_T[None])
        return found.to_json()

    def of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids_T: logits_of(model, ids_T[None])

    with tempfile.TemporaryDirectory() as name, torch.no_grad(), evaluating(model):
        folder = Path(name)
        with work() as done:
            points = {"memory": beside(of(model))}
        torch_pi2.save(model, folder / "saved")
        torch_pi2.pack(folder / "saved", folder / "store")
        reads = torch_pi2.OffloadConfig(policy="none", preload=False)
        over = torch_pi2.load(folder / "store", budget="1GiB", offload=reads)
        with evaluating(over), sparse_only():
            points["store"] = beside(of(over))
        torch_pi2.export(model, folder / "bundle", tokenizer=tokenizer, max_tokens=_WINDOW, batches=(1,))
        with torch_pi2.Bundle(folder / "bundle") as bundle:
            points["bundle"] = beside(lambda ids_T: bundle.logits(ids_T.tolist())[None])
    return {"rows_used": done.rows_used, **points}


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For tables with :data:`HEADER`."""
    return [
        (
            case["method"],
            case["weights"],
            shown(case["rows_used"], common.percent),
            f"{case['memory']['loss']:+.2%}",
            f"{case['memory']['kl']:.4f}",
            common.percent(case["memory"]["agreement"]),
            *(f"{case[place]['loss']:+.2%}" for place in ("store", "bundle")),
        )
        for case in result["cases"]
    ]


def render(result: Mapping[str, Any]) -> str:
    about = f"{result['folder']}: {result['tokens']:,} held-out tokens, beside the dense model in floats"
    return f"{about}\n{common.table(HEADER, rows_of(result))}"
