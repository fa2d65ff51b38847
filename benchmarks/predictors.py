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
from benchmarks.arguments import TRAINED, list_of
from benchmarks.beside import floats
from benchmarks.tables import Result, Table, at
from torch_pi2.base.progress import bar
from torch_pi2.cli import common
from torch_pi2.fitting.fit import cold_neurons
from torch_pi2.fitting.search import read_bytes
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.ops import load as load_library
from torch_pi2.ops.rows import values
from torch_pi2.planner.hot_neurons import hot_cut
from torch_pi2.predict.lowrank import LowRankRows, quantised
from torch_pi2.profiling.data import calibration_batches, split
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
    add("--folder", type=Path, default=TRAINED, metavar="DIR", help="of a dense model (default: the trained one)")
    add("--ranks", type=list_of(common.positive), default=_RANKS, metavar="R,...", help="that are tried")
    add("--recall", type=common.probability, default=0.85, metavar="R", help="of all predictors")
    add("--tokens", type=common.positive, default=30_000, metavar="N", help="of the standard library")
    add("--steps", type=common.positive, default=500, metavar="N", help="of the optimiser")
    add("--weight-bits", type=list_of(float), default=[16.0, 4.5], metavar="B,...", help="of neurons, that are counted")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fit predictors of all ``ranks`` to every layer of the model in ``folder``; layers without zeros skip half.

    Returns:
        In ``layers`` of each its key, how many neurons are ``cold``, and ``points``: ``rank``, ``format`` (of both
        matrices, or of a and b), ``bytes`` that a token reads of the predictor, ``recall``, ``active``: the share of
        cold neurons that are predicted. In ``best``, by bits of a neuron's weight and format, the bytes that a token
        reads of all predictors and predicted neurons, with the best rank of each layer, and these ``ranks``.

    Raises:
        Pi2Error: what loading models and profiling raise, of too few tokens too.
    """
    ranks, recall, tokens, steps = args.ranks, args.recall, args.tokens, args.steps
    config = Config(method="lowrank", score="auto", calibration_tokens=tokens)
    load_library()
    make, tokenizer = floats(args)
    model = make()
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
        "synthetic": getattr(model.config, "torch_pi2_synthetic", False),
        "form": sites[0].form,
        "tokens": sum(batch.n_tokens for batch in data),
        "layers": layers,
        "best": {f"{bits:g}": {name: _best(layers, name, bits) for name in FORMATS} for bits in args.weight_bits},
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


def _by_rank(result: Result) -> list[dict[str, Any]]:
    """By rank and format: the predictors' bytes together, mean recall, and by layer the share that is predicted."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for layer in result["layers"]:
        for point in layer["points"]:
            groups.setdefault((point["rank"], point["format"]), []).append(point)
    return [
        {
            "rank": rank,
            "format": name,
            "bytes": sum(point["bytes"] for point in points),
            "recall": sum(point["recall"] for point in points) / len(points),
            "active": ", ".join(f"{point['active']:.1%}" for point in points),
        }
        for (rank, name), points in groups.items()
    ]


def _best_rows(result: Result) -> list[dict[str, Any]]:
    return [
        {"bits": bits, "format": name, **found, "ratio": found["bytes"] / of["int8"]["bytes"]}
        for bits, of in result["best"].items()
        for name, found in of.items()
    ]


TABLES = (
    Table(
        "Predictors by rank and format",
        _by_rank,
        {
            "rank": at("rank"),
            "format": at("format"),
            "predictors": at("bytes", common.size),
            "recall": at("recall", ".1%"),
            "cold neurons wanted, by layer": at("active"),
        },
    ),
    Table(
        "What a token reads, with the best rank of each layer",
        _best_rows,
        {
            "bits of neurons": at("bits"),
            "format": at("format"),
            "read by a token": at("bytes", common.size),
            "of int8": at("ratio", ".3f"),
            "best ranks": lambda row: ", ".join(map(str, row["ranks"])),
        },
    ),
)


def about(result: Result) -> str:
    label = "synthetic, " if result["synthetic"] else ""
    return f"{result['folder']} ({label}{result['form']}), {result['tokens']} tokens, {result['steps']} steps"
