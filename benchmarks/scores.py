"""What is skipped of a model without exact zeros, and what that costs: scores, and shares spread over layers or not.

The dense model is run once for each case, with the neurons masked that thresholds would skip, on text that no threshold
was taken from. Bytes are counted as a step of one token reads them: every gate row, and the up and down rows of what is
not skipped (:func:`torch_pi2.planner.greedy.gate_share`). Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.arguments import list_of
from benchmarks.figures import at_least
from torch_pi2.base import process as machine
from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.cli import common
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.eval.loss import logits_of
from torch_pi2.fitting.thresholds import Walk
from torch_pi2.graph.find import find_sites
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.planner.greedy import gate_share
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.spec.config import SCORES, Config
from torch_pi2.spec.site import FFNSite

#: Of a score: the same share of every layer, or spread by what the loss bears. CATS is the gate, the same share.
HOW = ("same", "spread")
_SHARES = [0.4, 0.5, 0.6, 0.7, 0.8]


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
    add("--tokens", type=common.positive, default=16_384, metavar="N", help="of other files of it, that are scored")


def run(
    model: str | Path,
    *,
    shares: Sequence[float] = _SHARES,
    calibration_tokens: int = 40_000,
    tokens: int = 16_384,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    allow_download: bool = False,
) -> dict[str, Any]:
    """Score every case; see :func:`measure`. ``tokens`` of held-out text are taken in windows of 256.

    Raises:
        UnsupportedModelError: every layer has exact zeros, which thresholds are not for.
    """
    at_least(257, tokens=tokens)
    given = argparse.Namespace(
        model=str(model), dtype=dtype, trust_remote_code=trust_remote_code, allow_download=allow_download
    )
    dense, tokenizer = common.load_dense(given), common.load_tokenizer(given)
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
    cases: dict[str, list[dict[str, float]]] = {}
    with bar(None, "scores", True, total=len(SCORES) * len(HOW) * len(shares), unit="case") as shown:
        for score in SCORES:
            walk = Walk(dense, data, sites, Config(calibration_tokens=calibration_tokens, score=score))
            for how in HOW:
                points = cases[f"{score}, {how}"] = []
                for share in shares:
                    same = {site.key: walk.stats.threshold_for(site.key, share) for site in sites}
                    points.append(measure(dense, windows, sites, walk, walk.cuts(share) if how == "spread" else same))
                    shown.update()
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


@torch.no_grad()
def measure(
    model: nn.Module,
    windows: Sequence[torch.Tensor],
    sites: Sequence[FFNSite],
    walk: Walk,
    cuts: Mapping[str, float],
) -> dict[str, float]:
    """The model with what ``cuts`` skip, beside the dense one, on ``windows``, ``[B, T]`` ids each.

    Returns:
        ``skipped``: share of (token, neuron) pairs; ``read``: share of the bytes of these layers; ``loss``: relative
        increase of the loss; ``kl``: mean divergence of the next token's distribution from the dense model's, in nats;
        ``agreement``: share of tokens with the same most likely next token.
    """
    sums = dict.fromkeys(("dense", "sparse", "kl", "agree", "tokens"), 0.0)
    mode = walk.masked(cuts)
    with evaluating(model):
        for ids_BT in windows:
            wanted = F.log_softmax(logits_of(model, ids_BT).float(), -1)
            with mode:
                found = F.log_softmax(logits_of(model, ids_BT).float(), -1)
            next_BT = ids_BT[:, 1:, None]
            sums["dense"] -= float(wanted[:, :-1].gather(-1, next_BT).sum())
            sums["sparse"] -= float(found[:, :-1].gather(-1, next_BT).sum())
            sums["kl"] += float((wanted.exp() * (wanted - found)).sum())
            sums["agree"] += float((wanted.argmax(-1) == found.argmax(-1)).sum())
            sums["tokens"] += ids_BT.numel()
    active = mode.cold_share if cuts else 1.0
    return {
        "skipped": 1 - active,
        "read": gate_share(sites[0], active),
        "loss": sums["sparse"] / sums["dense"] - 1,
        "kl": sums["kl"] / sums["tokens"],
        "agreement": sums["agree"] / sums["tokens"],
    }


def render(result: dict[str, Any]) -> str:
    header = ["score, shares of layers", "skipped", "bytes read", "loss", "KL, nats", "same token"]
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
