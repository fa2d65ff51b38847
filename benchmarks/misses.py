"""What is lost where neurons that are not in memory are read only if they are more likely to fire (``miss_margin``),
and where experts of little weight that are mostly not in memory are left out of a mixture (``drop_experts``).

A trained model over a store, decoding held-out text token by token, beside the dense model. Against it stands a
threshold that is raised as much for all neurons, in memory or not: as few reads are had that way, too. Nothing is
timed. A threshold that is lower by 1 wants more; with a margin more of what is in memory only. And what look-ahead
(lossless) would read, and how much of it in time.

A mixture of experts has no margin: its cases are shares of a token's weight. With a simulated device steps are timed
instead, in alternation: of a mixture with each of these shares, of other models without look-ahead, with it, and with
predictors trained for it (:mod:`benchmarks.early_predictors`) in the place of the layers' own, where what they guess is
wanted with such odds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from benchmarks import early
from benchmarks.arguments import list_of
from benchmarks.beside import Beside
from benchmarks.early_predictors import announce, at_odds, train_early
from benchmarks.figures import at_least, known, over, spread
from benchmarks.methods import MODEL
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.eval.loss import by_token, logits_of
from torch_pi2.graph.find import find_sites
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.rewrite.handle import store_and_budget
from torch_pi2.types.config import Config

_WINDOW = 256
FIGURES = ("wanted", "left_out", "read", "in_time")
_LOSSES = ("loss", "KL, nats", "same token")
#: Settings of reading, predictors that are asked early and the odds of what they guess, by name.
_AHEAD: dict[str, tuple[dict[str, Any], str, float]] = {
    "no look-ahead": ({}, "", 0.0),
    "look-ahead": ({"lookahead": True}, "", 0.0),
    "early, whole, 1:1": ({"lookahead": True}, "whole", 1.0),
    "early, first matrix, 1:1": ({"lookahead": True}, "first matrix", 1.0),
    "early, first matrix, 2:1": ({"lookahead": True}, "first matrix", 2.0),
}
HEADER = ("in memory", "threshold", "margin", *FIGURES, *_LOSSES)
EXPERTS = ("in memory", "drop_experts", "experts left out", "wanted", "bytes read", *_LOSSES)
TIMES = ("in memory", *early.OVER_STORE, "gain")
AHEAD = ("in memory", "", "ms a step", "read a token", "reads", "waited for", "guessed rightly", "in vain", "gain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a decoder in floats (default: the trained model)")
    add("--shares", type=list_of(float), default=[0.25, 0.5], metavar="S,...", help="of the neurons in memory")
    add("--margins", type=list_of(float), default=[0.5, 1.0, 2.0], metavar="M,...", help="OffloadConfig.miss_margin")
    drops, methods = "of mixtures: OffloadConfig.drop_experts", "of mixtures: neurons of experts that are read"
    add("--drop-experts", type=list_of(float), default=[0.1, 0.2, 0.3], metavar="S,...", help=drops)
    add("--method", choices=early.METHODS, default="exact", help=methods)
    add("--device", metavar="NAME", help="time steps over a store on it instead (docs/DEVICES.md)")
    add("--tokens", type=common.positive, default=4096, metavar="N", help="held-out tokens that are decoded")
    add("--calibration-tokens", type=common.positive, default=Config.calibration_tokens, metavar="N")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    shares: Sequence[float] = (0.25, 0.5),
    margins: Sequence[float] = (0.5, 1.0, 2.0),
    drop_experts: Sequence[float] = (0.1, 0.2, 0.3),
    method: str = "exact",
    device: str | None = None,
    tokens: int = 4096,
    calibration_tokens: int = Config.calibration_tokens,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """``cases``: by ``share`` in memory, ``raised`` threshold of all neurons and settings of reading, see ``_decoded``.
    Of a mixture by ``share`` and ``drop_experts``, and ``choices``, how many experts a token has. With a device, no
    cases but ``times``, by share in memory, and where no mixture is ``ahead``, what look-ahead does, by share as well.

    Args: the options of the same names; ``tokens`` are taken in windows of 256, the first of which warms the cache.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known("method", [method], early.METHODS)
    at_least(2 * _WINDOW, tokens=tokens)
    at_least(64, calibration_tokens=calibration_tokens)
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    text = tokenizer(common.stdlib_sample("heldout", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(text[: min(len(text), tokens) // _WINDOW * _WINDOW]).view(-1, _WINDOW)
    given: dict[str, Any] = {"trust_remote_code": trust, "dtype": torch.float32}
    dense = AutoModelForCausalLM.from_pretrained(folder, **given).eval()
    mixtures, drops = {site.experts for site in find_sites(dense)} - {None}, (0.0, *drop_experts)
    about = {
        "what": "misses",
        "folder": Path(folder).resolve().name,
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "tokens": ids_NT[1:].numel(),
        **machine.describe(),
    }
    if mixtures:
        experts = Config(method=method, calibration_tokens=calibration_tokens)
        about |= {"method": method, "choices": len(mixtures) * dense.config.num_experts_per_tok}
        if device is not None:
            return {**about, "cases": [], "times": _timed(dense, tokenizer, device, experts, shares, drops)}
    config = Config(method="lowrank", calibration_tokens=calibration_tokens)
    if device is not None:
        return {**about, "cases": [], "ahead": _look_ahead(dense, tokenizer, device, config, shares, trust)}
    with torch.no_grad():
        wanted = [F.log_softmax(logits_of(dense, ids_NT[i : i + 1]).float(), -1) for i in range(len(ids_NT))]
    if mixtures:
        cases = _mixture(dense, experts, calibration, tokenizer, shares, drops, ids_NT, wanted, trust)
        return {**about, "cases": cases}
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
                    stored = _over_store(Path(name) / "store", share, how, trust)
                    cases.append({"share": share, "raised": raised, **how, **_decoded(stored, ids_NT, wanted)})
    return {**about, "cases": cases}


def _mixture(
    model: Any,
    config: Config,
    calibration: str,
    tokenizer: Any,
    shares: Sequence[float],
    drops: Sequence[float],
    ids_NT: torch.Tensor,
    wanted: list[torch.Tensor],
    trust: bool,
) -> list[dict[str, Any]]:
    """Cases of a mixture of experts, which is changed."""
    with tempfile.TemporaryDirectory() as name:
        made, folder = Path(name) / "saved", Path(name) / "store"
        torch_pi2.save(torch_pi2.optimize(model, calibration, config, tokenizer=tokenizer), made)
        torch_pi2.pack(made, folder, trust_remote_code=trust)
        return [
            {"share": share, "drop_experts": drop}
            | _decoded(_over_store(folder, share, {"drop_experts": drop}, trust), ids_NT, wanted)
            for share in shares
            for drop in drops
        ]


def _timed(
    model: Any, tokenizer: Any, device: str, config: Config, shares: Sequence[float], drops: Sequence[float]
) -> list[dict[str, Any]]:
    """By share in memory steps with each share of a token's weight. ``model`` is changed."""
    ways = {f"{drop:g}": {"drop_experts": drop} for drop in drops}
    with tempfile.TemporaryDirectory() as work:
        folder = early.packed(model, tokenizer, Path(work), config)
        found = [early.over_store(folder, tokenizer, device, share, ways) for share in shares]
    return [{"method": config.method, **_with_gains(of_share, gains)} for of_share, gains in found]


def _look_ahead(
    model: Any, tokenizer: Any, device: str, config: Config, shares: Sequence[float], trust: bool
) -> list[dict[str, Any]]:
    """By share in memory steps in each way of reading ahead. ``model`` is changed."""
    text = common.stdlib_sample("train", tokenizer, config.calibration_tokens)
    stats = torch_pi2.profile(model, text, config=config, tokenizer=tokenizer)
    fitted = torch_pi2.fit(model, text, stats=stats, config=config, tokenizer=tokenizer)
    trained = train_early(model, find_sites(model), text, fitted, stats, config, tokenizer)

    def begin(name: str, stored: Any) -> None:
        _, kind, odds = _AHEAD[name]
        if kind:
            announce(stored, at_odds(trained[kind], odds))

    ways = {name: how for name, (how, _, _) in _AHEAD.items()}
    with tempfile.TemporaryDirectory() as work:
        folder = early.packed(model, tokenizer, Path(work), config, stats=stats, predictors=fitted)
        found = [early.over_store(folder, tokenizer, device, share, ways, begin, trust)[0] for share in shares]
    return [_with_gains(each, over(_steps(each), next(iter(ways)))) for each in found]


def _steps(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each way, by round."""
    return {name: mode["step_ms"] for name, mode in found["modes"].items()}


def _with_gains(found: dict[str, Any], gains: Mapping[str, list[float]]) -> dict[str, Any]:
    """``found``, with ``gain`` and ``gain_spread`` of each way beside the first."""
    for name, gain in gains.items():
        found["modes"][name] |= {"gain": round(statistics.median(gain), 3), "gain_spread": spread(gain)}
    return found


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
    that were read ``in_time``, before anybody asked (look-ahead); ``experts_left_out`` and ``bytes_read``."""
    found, (store, _) = Beside(), store_and_budget(model)
    with torch.no_grad(), evaluating(model):
        for index, (ids_T, dense_BTV) in enumerate(zip(ids_NT, wanted, strict=True)):
            if index == 1:
                store.stats(reset=True)
            logits, _ = by_token(model, ids_T)
            if index > 0:
                found.add(dense_BTV, torch.cat(logits, 1), ids_T[None])
    stats = store.stats()
    names = ("wanted", "left_out", "experts_left_out", "bytes_read")
    figures = {name: stats[name] for name in names} | {"in_time": stats["used"]}
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
            *_losses(case),
        )
        for case in sorted(result["cases"], key=lambda case: case["share"])
        if "drop_experts" not in case
    ]


def expert_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of mixtures, for tables with :data:`EXPERTS`."""
    return [
        (
            f"{case['share']:.0%}",
            f"{case['drop_experts'] or ''}",
            f"{case['experts_left_out']:.2f} of {result['choices']}",
            f"{case['wanted']:.1f}",
            common.size(case["bytes_read"]),
            *_losses(case),
        )
        for case in sorted(result["cases"], key=lambda case: case["share"])
        if "drop_experts" in case
    ]


def time_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of mixtures over a simulated device, for tables with :data:`TIMES`."""
    return [
        (f"{found['ffn_in_memory']:.0%}", *cells, _gain(mode))
        for found in result.get("times", ())
        for cells, mode in zip(early.store_rows(found, "drop_experts"), found["modes"].values(), strict=True)
    ]


def ahead_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of look-ahead over a simulated device, for tables with :data:`AHEAD`."""
    figures = ("waited_per_token", "used_per_token", "unused_per_token")
    return [
        (
            f"{found['ffn_in_memory']:.0%}",
            name,
            f"{statistics.median(mode['step_ms']):.2f}",
            f"{mode['bytes_read_per_token'] / 1e6:.2f} MB",
            f"{mode['reads_per_token']:.1f}",
            *(f"{mode[figure]:.1f}" for figure in figures),
            _gain(mode),
        )
        for found in result.get("ahead", ())
        for name, mode in found["modes"].items()
    ]


def _gain(mode: Mapping[str, Any]) -> str:
    if "gain" not in mode:
        return ""
    low, high = mode["gain_spread"]
    return f"{mode['gain']:.2f} ({low:.2f} to {high:.2f})"


def _losses(case: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{case['loss']:+.2%}", f"{case['kl']:.4f}", common.percent(case["agreement"])


def render(result: Mapping[str, Any]) -> str:
    about = f"{result['folder']}: {result['tokens']:,} held-out tokens, figures per token, beside the dense model"
    if "ahead" in result:
        return f"{result['folder']}: {result['ahead'][0]['reads']}\n{common.table(AHEAD, ahead_rows(result))}"
    if "choices" not in result:
        return f"{about}\n{common.table(HEADER, rows_of(result))}"
    if "times" not in result:
        return f"{about}\n{common.table(EXPERTS, expert_rows(result))}"
    about = f"{result['folder']}: {result['times'][0]['reads']}, {result['method']}"
    return f"{about}\n{common.table(TIMES, time_rows(result))}"
