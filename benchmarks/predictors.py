"""What a token reads of a model's cold neurons, their low-rank predictors included, by rank and format, at one recall.

One training for each layer and rank; its matrices in several formats. Thresholds are set on other sequences than those
that were fitted to, and figures taken on others again. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_pi2
from benchmarks.arguments import list_of
from benchmarks.figures import at_least
from benchmarks.methods import MODEL
from benchmarks.subject import dense_of
from torch_pi2.base.progress import bar
from torch_pi2.cli import common
from torch_pi2.fitting.fit import cold_neurons
from torch_pi2.fitting.search import read_bytes
from torch_pi2.fitting.sets import MIN_SEQUENCES, split
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.machine import process as machine
from torch_pi2.ops import load as load_library
from torch_pi2.ops.rows import values
from torch_pi2.planner.hot_neurons import hot_cut
from torch_pi2.predict.lowrank_rows import LowRankRows, quantised
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.config import Config
from torch_pi2.types.site import FFNSite

FORMATS = ("int8", "int8, int4", "int4")
_RANKS = [16, 32, 64, 96, 128, 192]
_SAMPLES = 20_000


class _Mixed(LowRankRows):
    """``a`` in int8, ``b`` in int4, which no operator computes."""

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        z_Tr = torch.relu(x_TH.float() @ values(self.a, "int8", self.hidden).T)
        return z_Tr @ values(self.b, "int4", self.rank).T + self.bias


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=MODEL, metavar="DIR", help="of a dense model (default: the trained one)")
    add("--ranks", type=list_of(int), default=_RANKS, metavar="R,...", help="that are tried")
    add("--recall", type=common.probability, default=0.85, metavar="R", help="of all predictors")
    add("--tokens", type=common.positive, default=30_000, metavar="N", help="of the standard library")
    add("--steps", type=common.positive, default=500, metavar="N", help="of the optimiser")
    add("--weight-bits", type=list_of(float), default=[16.0, 4.5], metavar="B,...", help="of neurons, that are counted")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(
    folder: str | Path = MODEL,
    *,
    ranks: Sequence[int] = _RANKS,
    recall: float = 0.85,
    tokens: int = 30_000,
    steps: int = 500,
    weight_bits: Sequence[float] = (16.0, 4.5),
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Fit predictors of all ``ranks`` to every layer of the model in ``folder``; layers without zeros skip half.

    Args: the options of the same names.

    Returns:
        In ``layers`` of each its key, how many neurons are ``cold``, and ``points``: ``rank``, ``format`` (of both
        matrices, or of a and b), ``bytes`` that a token reads of the predictor, ``recall``, ``active``: the share of
        cold neurons that are predicted. In ``best``, by bits of a neuron's weight and format, the bytes that a token
        reads of all predictors and predicted neurons, with the best rank of each layer, and these ``ranks``.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what loading models and profiling raise.
    """
    config = Config(method="lowrank", score="auto", calibration_tokens=tokens)
    at_least(MIN_SEQUENCES * config.seq_len, tokens=tokens)
    load_library()
    trust = trust_remote_code or Path(folder) == MODEL  # our own model brings its code
    model, tokenizer = dense_of(folder, "float32", trust, False)
    data = calibration_batches(model, common.stdlib_sample("train", tokenizer, tokens), tokenizer, config)
    stats = torch_pi2.profile(model, data, config=config)
    sites = find_sites(model)
    cuts = {site.key: stats[site.key].cut for site in sites}
    samples = {
        part: collect_samples(model, some, sites, _SAMPLES, thresholds=cuts)
        for part, some in split(data, config.batch_size).items()
    }
    layers = []
    with bar(None, "predictors", True, total=len(sites) * len(ranks), unit="training") as shown:
        for site in sites:
            cold = cold_neurons(stats, site.key, hot_cut(site, stats[site.key], config))
            points = []
            for rank in ranks:
                own = {part: found[site.key] for part, found in samples.items()}
                points += _points(model, site, own, cold, rank, recall, steps)
                shown.update()
            sizes = {"rows": site.rows_per_neuron, "hidden": site.hidden, "neurons": site.intermediate}
            layers.append({"key": site.key, "cold": len(cold), **sizes, "points": points})
    return {
        "what": "predictors",
        **machine.describe(),
        "folder": Path(folder).resolve().name,
        "synthetic": getattr(model.config, "torch_pi2_synthetic", False),
        "form": sites[0].form,
        "recall": recall,
        "tokens": sum(batch.n_tokens for batch in data),
        "steps": steps,
        "layers": layers,
        "best": {f"{bits:g}": {name: _best(layers, name, bits) for name in FORMATS} for bits in weight_bits},
    }


def _points(
    model: nn.Module,
    site: FFNSite,
    samples: dict[str, Samples],
    cold: torch.Tensor,
    rank: int,
    recall: float,
    steps: int,
) -> list[dict[str, Any]]:
    a, b, bias = train_matrices(samples["fit"], rank=rank, neurons=cold, steps=steps, seed=site.layer)
    a_rows, b_rows = torch.ops.pi2.quantize(a, "int8"), torch.ops.pi2.quantize(b, "int4")
    made = {
        "int8": quantised(a, b, bias, "int8"),
        "int8, int4": _Mixed(a_rows, b_rows, bias, "int8", site.hidden),
        "int4": quantised(a, b, bias, "int4"),
    }
    points = []
    for name, predictor in made.items():
        known = calibrate(predictor, samples["calibrate"], site, target_recall=recall, neurons=cold)
        card = measure(known, samples["evaluate"], site, neurons=cold)
        found = {"bytes": read_bytes(known, len(cold)), "recall": card.recall, "active": card.predicted_active}
        points.append({"rank": rank, "format": name, **found})
    return points


def _best(layers: Sequence[dict[str, Any]], name: str, bits: float) -> dict[str, Any]:
    """Of all layers together, each with its best rank."""
    total, ranks = 0.0, []
    for layer in layers:
        neuron = layer["rows"] * layer["hidden"] * bits / 8
        read, rank = min(
            (point["bytes"] + point["active"] * layer["cold"] * neuron, point["rank"])
            for point in layer["points"]
            if point["format"] == name
        )
        total += read
        ranks.append(rank)
    return {"bytes": total, "ranks": ranks}


def render(result: dict[str, Any]) -> str:
    rows = []
    for rank in dict.fromkeys(point["rank"] for point in result["layers"][0]["points"]):
        for name in FORMATS:
            found = [
                point
                for layer in result["layers"]
                for point in layer["points"]
                if (point["rank"], point["format"]) == (rank, name)
            ]
            recall = sum(point["recall"] for point in found) / len(found)
            active = [f"{point['active']:.1%}" for point in found]
            rows.append(
                [str(rank), name, common.size(sum(point["bytes"] for point in found)), f"{recall:.1%}", *active]
            )
    header = ["rank", "format", "predictors", "recall", *(layer["key"] for layer in result["layers"])]
    label = "synthetic, " if result["synthetic"] else ""
    about = (
        f"{result['folder']} ({label}{result['form']}), {result['tokens']} tokens, {result['steps']} steps: "
        "share of cold neurons wanted by layer"
    )
    best = []
    for bits, of in result["best"].items():
        for name, found in of.items():
            ratio = f"{found['bytes'] / of['int8']['bytes']:.3f}"
            best.append([bits, name, common.size(found["bytes"]), ratio, ", ".join(map(str, found["ranks"]))])
    titles = ["bits of neurons", "format", "read by a token", "of int8", "best ranks"]
    return f"{about}\n{common.table(header, rows)}\n{common.table(titles, best)}"
