"""What is lost where neurons that are not in memory are read only if they are more likely to fire (``miss_margin``).

A trained model over a store, decoding held-out text token by token, beside the dense model. Against it stands a
threshold that is raised as much for all neurons, in memory or not: as few reads are had that way, too. Nothing is
timed. A threshold that is lower by 1 wants more; with a margin more of what is in memory only. And what look-ahead
(lossless) would read, and how much of it in time.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.beside import Beside
from benchmarks.figures import at_least
from benchmarks.methods import MODEL
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.eval.loss import by_token, logits_of
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.rewrite.handle import store_and_budget
from torch_pi2.spec.config import Config

_WINDOW = 256
FIGURES = ("wanted", "left_out", "read", "in_time")
HEADER = ("in memory", "threshold", "margin", *FIGURES, "loss", "KL, nats", "same token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a decoder in floats (default: the trained model)")
    add("--shares", type=list_of(float), default=[0.25, 0.5], metavar="S,...", help="of the neurons in memory")
    add("--margins", type=list_of(float), default=[0.5, 1.0, 2.0], metavar="M,...", help="OffloadConfig.miss_margin")
    add("--tokens", type=common.positive, default=4096, metavar="N", help="held-out tokens that are decoded")
    add("--calibration-tokens", type=common.positive, default=Config.calibration_tokens, metavar="N")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    shares: Sequence[float] = (0.25, 0.5),
    margins: Sequence[float] = (0.5, 1.0, 2.0),
    tokens: int = 4096,
    calibration_tokens: int = Config.calibration_tokens,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """``cases``: by ``share`` in memory, ``raised`` threshold of all neurons and settings of reading, see ``_decoded``.

    Args: the options of the same names; ``tokens`` are taken in windows of 256, the first of which warms the cache.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at_least(2 * _WINDOW, tokens=tokens)
    at_least(64, calibration_tokens=calibration_tokens)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    text = tokenizer(common.stdlib_sample("heldout", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(text[: min(len(text), tokens) // _WINDOW * _WINDOW]).view(-1, _WINDOW)
    given: dict[str, Any] = {"trust_remote_code": trust, "dtype": torch.float32}
    dense = AutoModelForCausalLM.from_pretrained(folder, **given).eval()
    with torch.no_grad():
        wanted = [F.log_softmax(logits_of(dense, ids_NT[i : i + 1]).float(), -1) for i in range(len(ids_NT))]
    config = Config(method="lowrank", calibration_tokens=calibration_tokens)
    stats = torch_pi2.profile(dense, calibration, config=config, tokenizer=tokenizer)
    fitted = torch_pi2.fit(dense, calibration, stats=stats, config=config, tokenizer=tokenizer)
    cases = []
    for raised in (-1.0, 0.0, *margins):
        model = AutoModelForCausalLM.from_pretrained(folder, **given).eval()
        predictors = _raised(fitted, raised)
        torch_pi2.optimize(model, calibration, config, stats=stats, predictors=predictors, tokenizer=tokenizer)
        with tempfile.TemporaryDirectory() as name:
            torch_pi2.save(model, Path(name) / "saved")
            torch_pi2.pack(Path(name) / "saved", Path(name) / "store")
            for share in shares:
                tried: list[dict[str, Any]] = [
                    {"miss_margin": margin} for margin in (0.0, *(margins if raised <= 0 else ()))
                ]
                for how in [*tried, *([{"lookahead": True}] if raised == 0 else [])]:
                    over = _over_store(Path(name) / "store", share, how, trust)
                    cases.append({"share": share, "raised": raised, **how, **_decoded(over, ids_NT, wanted)})
    return {
        "what": "misses",
        "folder": Path(folder).resolve().name,
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "tokens": ids_NT[1:].numel(),
        "cases": cases,
        **machine.describe(),
    }


def _raised(fitted: FittedPredictors, by: float) -> FittedPredictors:
    """Predictors with thresholds that much higher."""
    made = copy.copy(fitted)
    for key, predictor in fitted.items():
        assert isinstance(predictor, LowRank)
        made[key] = higher = copy.copy(predictor)
        higher.threshold += by
    return made


def _over_store(folder: Path, share: float, how: Mapping[str, Any], trust: bool) -> nn.Module:
    """The model over its store, of whose neurons ``share`` fit in memory: the most frequent, to begin with."""
    config = torch_pi2.OffloadConfig(preload=False, **how)
    model = torch_pi2.load(folder, budget="1GiB", offload=config, trust_remote_code=trust)
    store, _ = store_and_budget(model)
    stats = store.stats()
    store.resize(int(share * stats["cache_bytes"]))
    store.preload()
    return model


def _decoded(model: Any, ids_NT: torch.Tensor, wanted: list[torch.Tensor]) -> dict[str, float]:
    """Loss and the rest of ``Beside``; neurons per token, of all layers: ``wanted``, ``left_out``, ``read``, and those
    that were read ``in_time``, before anybody asked (look-ahead)."""
    found, (store, _) = Beside(), store_and_budget(model)
    with torch.no_grad(), evaluating(model):
        for index, (ids_T, dense_BTV) in enumerate(zip(ids_NT, wanted, strict=True)):
            if index == 1:
                store.stats(reset=True)
            logits, _ = by_token(model, ids_T)
            if index > 0:
                found.add(dense_BTV, torch.cat(logits, 1), ids_T[None])
    stats = store.stats()
    figures = {name: stats[name] for name in ("wanted", "left_out")} | {"in_time": stats["used"]}
    figures["read"] = stats["wanted"] - stats["hits"] - stats["used"] + stats["guessed"]
    return found.to_json() | {name: value / found.tokens for name, value in figures.items()}


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For tables with :data:`HEADER`."""
    return [
        (
            f"{case['share']:.0%}",
            f"{case['raised']:+g}" if case["raised"] else "as fitted",
            "look-ahead" if "lookahead" in case else f"{case['miss_margin'] or ''}",
            *(f"{case[name]:.1f}" for name in FIGURES),
            f"{case['loss']:+.2%}",
            f"{case['kl']:.4f}",
            common.percent(case["agreement"]),
        )
        for case in sorted(result["cases"], key=lambda case: case["share"])
    ]


def render(result: Mapping[str, Any]) -> str:
    about = f"{result['folder']}: {result['tokens']:,} held-out tokens, neurons per token, beside the dense model"
    return f"{about}\n{common.table(HEADER, rows_of(result))}"
