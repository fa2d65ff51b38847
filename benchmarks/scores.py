"""What is skipped of a model without exact zeros, and what that costs, by score and share.

The dense model is run once for each case, with the neurons masked that thresholds would skip, on text that no threshold
was taken from. Bytes are counted as a step of one token reads them: every gate row, and the up and down rows of what is
not skipped (:func:`torch_pi2.planner.greedy.gate_share`); with predictors the gate rows of what they let through, and
the predictors. Nothing is timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.beside import Beside
from benchmarks.figures import at_least
from benchmarks.subject import dense_of
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.cli import common
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.eval.loss import logits_of
from torch_pi2.fitting.fit import cold_neurons
from torch_pi2.fitting.thresholds import Scored
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.find import find_sites
from torch_pi2.ops.activations import ACTIVATIONS, exact_zeros
from torch_pi2.planner.greedy import gate_share, hot_cut
from torch_pi2.profiling.data import Batch, calibration_batches
from torch_pi2.types.config import SCORES, Config
from torch_pi2.types.site import FFNSite

_SHARES = [0.4, 0.5, 0.6, 0.7, 0.8]
#: Neurons side by side of which the same number is taken for every token, of which shapes are static.
_CHUNK = 64
TOP = "output, by layer, top of chunks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    add = parser.add_argument
    add("--shares", type=list_of(float), default=_SHARES, metavar="S,...", help="of neurons that are skipped")
    add(
        "--calibration-tokens",
        type=common.positive,
        default=40_000,
        metavar="N",
        help="of the standard library's source",
    )
    add(
        "--predictors",
        type=list_of(float),
        default=[],
        metavar="BUDGET,...",
        help="low-rank predictors besides, where thresholds may raise the loss by BUDGET and they by as much again",
    )
    add("--tokens", type=common.positive, default=16_384, metavar="N", help="of other files of it, that are scored")


def run(
    model: str | Path,
    *,
    shares: Sequence[float] = _SHARES,
    predictors: Sequence[float] = (),
    calibration_tokens: int = 40_000,
    tokens: int = 16_384,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    allow_download: bool = False,
) -> dict[str, Any]:
    """Every score at every share, the same in all layers and spread over them; see :func:`measure`. CATS is the gate.
    With the score ``output`` also the same number of every 64 neurons.

    ``tokens`` of held-out text are taken in windows of 256.

    Raises:
        UnsupportedModelError: every layer has exact zeros, which thresholds are not for.
    """
    at_least(257, tokens=tokens)
    dense, tokenizer = dense_of(model, dtype, trust_remote_code, allow_download)
    config = Config(calibration_tokens=calibration_tokens)
    data = calibration_batches(dense, common.stdlib_sample("train", tokenizer, calibration_tokens), tokenizer, config)
    ids = torch.tensor(tokenizer(common.stdlib_sample("heldout", tokenizer, tokens), verbose=False)["input_ids"])
    windows = ids[: min(len(ids), tokens) // 256 * 256].view(-1, 256).split(8)
    sites = [site for site in find_sites(dense) if not exact_zeros(site.activation)]
    if not sites:
        raise UnsupportedModelError(
            f"scores of {Path(model).name}",
            expected="layers without exact zeros (SwiGLU, GeGLU)",
            found="none",
            fix="Nothing need be skipped there that is not zero: method='exact' loses nothing.",
        )
    modes: dict[str, list[PredictedMaskMode]] = {}
    for score in SCORES:
        scored = Scored(dense, data, sites, replace(config, score=score), progress=True)
        spread = scored.spread(data, progress=True)
        modes[score] = [scored.thresholds(share).masked(dense) for share in shares]
        modes[f"{score}, by layer"] = [scored.thresholds(spread.shares(share)).masked(dense) for share in shares]
        if score == "output":
            scales = scored.thresholds(0.5).scales
            modes[TOP] = [
                PredictedMaskMode(
                    dense, sites, {y.key: _Top(dense, y, scales[y.key], spread.shares(share)[y.key]) for y in sites}
                )
                for share in shares
            ]
    found = iter(measure(dense, windows, [mode for some in modes.values() for mode in some]))
    cases = {name: [_with_bytes(next(found), sites[0], mode) for mode in some] for name, some in modes.items()}
    if predictors:
        fits = [replace(config, method="lowrank", score="output", max_loss=loss, tolerance=loss) for loss in predictors]
        cases["output, low-rank"] = [_predicted(dense, data, windows, sites, fitting) for fitting in fits]
    sizes = {"layers": len(sites), "hidden": sites[0].hidden, "neurons": sites[0].intermediate}
    return {
        "what": "scores",
        "folder": Path(model).resolve().name,
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "form": sites[0].form,
        "sizes": sizes,
        "tokens": sum(part.numel() for part in windows),
        "calibration_tokens": sum(batch.n_tokens for batch in data),
        "cases": cases,
        **machine.describe(),
    }


@dataclass(frozen=True)
class _Top:
    """A predictor that knows the scores: 1 for the best ``1 - skipped`` of each chunk of a token's, 0 for others."""

    model: nn.Module
    site: FFNSite
    scale_I: torch.Tensor
    skipped: float
    threshold: float = 0.5

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, I]``."""
        weights = self.site.weights(self.model)
        first = (weights.gate, weights.bias_gate) if weights.gate is not None else (weights.up, weights.bias_up)
        gate_TI = F.linear(x_TH, *first)
        chunk = math.gcd(_CHUNK, self.site.intermediate)
        score_TGK = (ACTIVATIONS[self.site.activation](gate_TI).abs() * self.scale_I).unflatten(-1, (-1, chunk))
        best = score_TGK.topk(max(1, round((1 - self.skipped) * chunk)), -1).indices
        return torch.zeros_like(score_TGK).scatter_(-1, best, 1.0).flatten(-2)


@torch.no_grad()
def measure(
    model: nn.Module, windows: Sequence[torch.Tensor], modes: Sequence[PredictedMaskMode]
) -> list[dict[str, float]]:
    """For each of ``modes`` the model inside it, beside the dense one, on ``windows``, ``[B, T]`` ids each."""
    found = [Beside() for _ in modes]
    with evaluating(model):
        for ids_BT in bar(windows, "scores", True, unit="batch"):
            dense_BTV = F.log_softmax(logits_of(model, ids_BT).float(), -1)
            for mode, beside in zip(modes, found, strict=True):
                with mode:
                    logits_BTV = logits_of(model, ids_BT)
                beside.add(dense_BTV, logits_BTV, ids_BT)
    return [beside.to_json() for beside in found]


def _with_bytes(point: dict[str, float], site: FFNSite, mode: PredictedMaskMode) -> dict[str, float]:
    """``point`` with the share of neurons that ``mode`` has skipped, and that of the layers' bytes that are read."""
    return {"skipped": 1 - mode.cold_share, "read": gate_share(site, mode.cold_share)} | point


def _predicted(
    model: nn.Module, data: list[Batch], windows: Sequence[torch.Tensor], sites: Sequence[FFNSite], config: Config
) -> dict[str, float]:
    """As :func:`measure`, with predictors that ``config`` fits: what they let through is computed whole."""
    stats = torch_pi2.profile(model, data, config=config, progress=True)
    fitted = torch_pi2.fit(model, data, stats=stats, config=config, progress=True)
    cold = {site.key: cold_neurons(stats, site.key, hot_cut(site, stats[site.key], config)) for site in sites}
    mode = PredictedMaskMode(model, sites, fitted, cold)
    (found,) = measure(model, windows, [mode])
    neurons = sum(site.intermediate for site in sites)
    skipped = (1 - mode.cold_share) * sum(map(len, cold.values())) / neurons
    own = sum(t.nbytes for predictor in fitted.values() for t in predictor.tensors().values())
    dense = sum(t.nbytes for site in sites for t in site.weights(model)[:3] if t is not None)
    return {"skipped": skipped, "read": 1 - skipped + own / dense} | found


def render(result: dict[str, Any]) -> str:
    header = ["score", "skipped", "bytes read", "loss", "KL, nats", "same token"]
    rows = [
        [
            name,
            common.percent(point["skipped"]),
            common.percent(point["read"]),
            f"{point['loss']:+.2%}",
            f"{point['kl']:.4f}",
            common.percent(point["agreement"]),
        ]
        for name, points in result["cases"].items()
        for point in points
    ]
    about = f"{result['folder']}: {result['form']}, {result['tokens']:,} held-out tokens; lossy, beside the dense model"
    return f"{about}\n{common.table(header, rows)}"
