"""What is lost where neurons that are not in memory are read only if they are more likely to fire (``miss_margin``),
and where experts of little weight that are mostly not in memory are left out of a mixture (``drop_experts``).

A trained model over a store, decoding held-out text token by token, beside the dense model. Against it stands a
threshold that is raised as much for all neurons, in memory or not: as few reads are had that way, too. Nothing is
timed. A threshold that is lower by 1 wants more; with a margin more of what is in memory only. And what look-ahead
(lossless) would read, and how much of it in time.

A mixture of experts has no margin: its cases are shares of a token's weight. With a simulated device its steps are
timed instead, with each of them in alternation.
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
from benchmarks.figures import at_least, known, spread
from benchmarks.methods import MODEL
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.eval.loss import by_token, logits_of
from torch_pi2.graph.find import find_sites
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.rewrite.handle import store_and_budget
from torch_pi2.spec.config import Config

_WINDOW = 256
FIGURES = ("wanted", "left_out", "read", "in_time")
_LOSSES = ("loss", "KL, nats", "same token")
HEADER = ("in memory", "threshold", "margin", *FIGURES, *_LOSSES)
EXPERTS = ("in memory", "drop_experts", "experts left out", "wanted", "bytes read", *_LOSSES)
TIMES = ("in memory", *early.OVER_STORE, "gain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a decoder in floats (default: the trained model)")
    add("--shares", type=list_of(float), default=[0.25, 0.5], metavar="S,...", help="of the neurons in memory")
    add("--margins", type=list_of(float), default=[0.5, 1.0, 2.0], metavar="M,...", help="OffloadConfig.miss_margin")
    drops, methods = "of mixtures: OffloadConfig.drop_experts", "of mixtures: neurons of experts that are read"
    add("--drop-experts", type=list_of(float), default=[0.1, 0.2, 0.3], metavar="S,...", help=drops)
    add("--method", choices=early.METHODS, default="exact", help=methods)
    add("--device", metavar="NAME", help="of mixtures: time steps over a store on it instead (docs/DEVICES.md)")
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
    Of a mixture by ``share`` and ``drop_experts``, and ``choices``, how many experts a token has; or, with a device,
    no cases but ``times``, by share in memory.

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
    if device is not None and not mixtures:
        raise ConfigError(
            f"device {device}",
            expected="a mixture of experts",
            found=f"{about['folder']}, a model without any",
            fix="Leave it out: nothing is timed.",
        )
    if mixtures:
        experts = Config(method=method, calibration_tokens=calibration_tokens)
        about |= {"method": method, "choices": len(mixtures) * dense.config.num_experts_per_tok}
        if device is not None:
            times = [_timed(copy.deepcopy(dense), tokenizer, device, experts, share, drops) for share in shares]
            return {**about, "cases": [], "times": times}
    with torch.no_grad():
        wanted = [F.log_softmax(logits_of(dense, ids_NT[i : i + 1]).float(), -1) for i in range(len(ids_NT))]
    if mixtures:
        cases = _mixture(dense, experts, calibration, tokenizer, shares, drops, ids_NT, wanted, trust)
        return {**about, "cases": cases}
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
    model: Any, tokenizer: Any, device: str, config: Config, share: float, drops: Sequence[float]
) -> dict[str, Any]:
    """Steps with each share of a token's weight; ``gain`` and ``gain_spread`` beside the first of them."""
    ways = {f"{drop:g}": {"drop_experts": drop} for drop in drops}
    tokens = config.calibration_tokens
    found, gains = early.over_store(model, tokenizer, device, config.method, share, ways, tokens)
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


def _gain(mode: Mapping[str, Any]) -> str:
    if "gain" not in mode:
        return ""
    low, high = mode["gain_spread"]
    return f"{mode['gain']:.2f} ({low:.2f} to {high:.2f})"


def _losses(case: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{case['loss']:+.2%}", f"{case['kl']:.4f}", common.percent(case["agreement"])


def render(result: Mapping[str, Any]) -> str:
    about = f"{result['folder']}: {result['tokens']:,} held-out tokens, figures per token, beside the dense model"
    if "choices" not in result:
        return f"{about}\n{common.table(HEADER, rows_of(result))}"
    if "times" not in result:
        return f"{about}\n{common.table(EXPERTS, expert_rows(result))}"
    about = f"{result['folder']}: {result['times'][0]['reads']}, {result['method']}"
    return f"{about}\n{common.table(TIMES, time_rows(result))}"
