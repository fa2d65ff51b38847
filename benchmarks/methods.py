"""Methods of sparsity, with float and 4-bit weights: in memory, over a store and in a bundle, beside the dense floats.

The same held-out tokens each time: in windows at once, as decoding would compute them (all that is skipped there is
skipped), in memory and over a store of which every call reads what it wants; token by token in the bundle. Lossy
methods are to lose the same everywhere. Nothing is timed.

``--ranks`` measures low-rank predictors of these ranks instead, of one recall in all layers, in memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from benchmarks.arguments import TRAINED, list_of, names_of
from benchmarks.tables import Result, Table, at
from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.eval.loss import logits_of
from torch_pi2.eval.work import work
from torch_pi2.fitting.fit import cold_neurons
from torch_pi2.fitting.search import FitSettings
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.planner.hot_neurons import hot_cut
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.data import Batch, calibration_batches, split
from torch_pi2.profiling.samples import collect_samples
from torch_pi2.types.config import Config
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.stats import ActivationStats

_WINDOW, _TOKENS, _FIT_TOKENS = 256, 8192, 20_000
_RECALLS = [0.9, 0.95, 0.99]
#: Of models with exact zeros, and of others.
SPARSE: dict[str, dict[str, Any]] = {
    "exact gate": {"method": "exact"},
    "low-rank": {"method": "lowrank"},
    "sign bit": {"method": "signbit"},
}
NOT_SPARSE: dict[str, dict[str, Any]] = {
    "CATS": {"method": "threshold", "sparsity": 0.6},
    "ours, at most 1 %": {"method": "threshold", "score": "auto", "max_loss": 0.01},
    "low-rank": {"method": "lowrank", "score": "output", "max_loss": 0.005, "tolerance": 0.005},
}
WEIGHTS: dict[str, dict[str, Any]] = {"float": {}, "int4": {"weights": "int4", "quantization": "gptq"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=TRAINED, metavar="DIR", help="a decoder in floats (default: the trained model)")
    add("--calibration-tokens", type=common.positive, default=Config.calibration_tokens, metavar="N")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add(
        "--weights",
        type=names_of(WEIGHTS),
        default=list(WEIGHTS),
        metavar="W,...",
        help=f"default: {', '.join(WEIGHTS)}",
    )
    add("--tokens", type=common.positive, default=_TOKENS, metavar="N", help="held-out tokens that are scored")
    add("--ranks", type=list_of(common.positive), default=[], metavar="R,...", help="predictors of these ranks")
    said = ",".join(f"{recall:g}" for recall in _RECALLS)
    add("--recalls", type=list_of(float), default=_RECALLS, metavar="S,...", help=f"theirs (default: {said})")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``cases``: of each method and weights ``rows_used``, and ``memory``, ``store`` and ``bundle``, see ``Beside``; of
    each rank and recall what :func:`_of_ranks` says. ``zeros``: share of exact zeros.

    Tokens are taken in windows of 256.
    """
    tokens, calibration_tokens = args.tokens, args.calibration_tokens
    make, tokenizer = floats(args)
    calibration = common.stdlib_sample("train", tokenizer, calibration_tokens)
    heldout = tokenizer(common.stdlib_sample("heldout", tokenizer, tokens), verbose=False)["input_ids"]
    ids_NT = torch.tensor(heldout[: min(len(heldout), tokens) // _WINDOW * _WINDOW]).view(-1, _WINDOW)

    dense, cases, ranks = make(), [], []
    with torch.no_grad():
        wanted = [F.log_softmax(logits_of(dense, ids_NT[i : i + 1]).float(), -1) for i in range(len(ids_NT))]
    methods = SPARSE if all(exact_zeros(site.activation) for site in find_sites(dense)) else NOT_SPARSE
    given: Any = {"tokenizer": tokenizer, "progress": True}
    if args.ranks:
        methods = {name: methods[name] for name in ("exact gate",) if name in methods}
    for name, fields in ({"dense": {"method": "dense"}} | methods).items():
        config = Config(**fields, calibration_tokens=calibration_tokens)
        stats = torch_pi2.profile(dense, calibration, config=config, **given)
        fitted = None
        if config.method in PREDICTED:
            fitted = torch_pi2.fit(dense, calibration, stats=stats, config=config, **given)
        for form in args.weights:
            if (form, name) != ("float", "dense"):
                phase(f"{name}, {form}")
                chosen = replace(config, **WEIGHTS[form])
                model = torch_pi2.optimize(make(), calibration, chosen, stats=stats, predictors=fitted, **given)
                found = _in_memory(model, ids_NT, wanted)
                found |= {} if args.ranks else _elsewhere(model, tokenizer, ids_NT, wanted)
                cases.append({"method": name, "weights": form} | found)
    if args.ranks:
        config = Config(method="lowrank", calibration_tokens=calibration_tokens)
        data = calibration_batches(dense, calibration, tokenizer, config)
        stats = torch_pi2.profile(dense, calibration, config=config, **given)
        for about, fitted in _of_ranks(args, dense, data, stats, config):
            for form in args.weights:
                phase(f"rank {about['rank']}, recall {about['asked']:g}, {form}")
                chosen = replace(config, **WEIGHTS[form])
                model = torch_pi2.optimize(make(), calibration, chosen, stats=stats, predictors=fitted, **given)
                ranks.append({**about, "weights": form} | _in_memory(model, ids_NT, wanted))
    return {
        "synthetic": getattr(dense.config, "torch_pi2_synthetic", False),
        "tokens": ids_NT.numel(),
        "cases": cases,
        "ranks": ranks,
    }


def _of_ranks(
    args: argparse.Namespace, model: nn.Module, data: list[Batch], stats: ActivationStats, config: Config
) -> Iterator[tuple[dict[str, Any], FittedPredictors]]:
    """Predictors of each rank, trained once, and calibrated to each recall; means over layers of their cards. Recall
    and shares are of the cold neurons, on tokens that nothing was fitted to; a predictor that knows nothing has the
    recall ``predicted``. ``bytes``: of the predictor in int4, beside those of the layer's weights in int4.
    """
    sites, sets = find_sites(model), split(data, config.batch_size)
    cold = {site.key: cold_neurons(stats, site.key, hot_cut(site, stats[site.key], config)) for site in sites}
    samples = {part: collect_samples(model, sets[part], sites, _FIT_TOKENS, progress=False) for part in sets}
    for rank in args.ranks:
        trained = {}
        for site in sites:
            phase(f"rank {rank}, {site.key}")
            how: dict[str, Any] = {"neurons": cold[site.key], "steps": FitSettings.steps, "seed": site.layer}
            matrices = train_matrices(samples["fit"][site.key], rank=rank, **how)
            trained[site.key] = LowRankRows.fitted(*matrices)
        for recall in args.recalls:
            fitted = FittedPredictors()
            fitted.model_hash = stats.model_hash
            for site in sites:
                key, neurons = site.key, cold[site.key]
                held = (samples[part][key] for part in ("calibrate", "evaluate"))
                made = calibrate(trained[key], next(held), site, target_recall=recall, neurons=neurons)
                made.card = measure(made, next(held), site, weights=site.weights(model), neurons=neurons)
                fitted[key] = made
            cards = [made.card for made in fitted.values() if made.card is not None]
            bytes_ = [made.cost_share for made in cards]  # both in int4: as multiplications
            about = {"rank": rank, "asked": recall, "bytes": fmean(bytes_)}
            about |= {"recall": fmean(made.recall for made in cards), "least": min(made.recall for made in cards)}
            about["mass"] = fmean(made.mass_recall or 0.0 for made in cards)
            yield about | {"predicted": fmean(made.predicted_active for made in cards)}, fitted


def _in_memory(model: nn.Module, ids_NT: torch.Tensor, wanted: list[torch.Tensor]) -> dict[str, Any]:
    with torch.no_grad(), evaluating(model), work() as done:
        memory = _beside(lambda ids_T: logits_of(model, ids_T[None]), ids_NT, wanted)
    return {"rows_used": done.rows_used, "zeros": 1 - (done.neurons_used or 0.0), "memory": memory}


def _beside(
    logits: Callable[[torch.Tensor], torch.Tensor], ids_NT: torch.Tensor, wanted: list[torch.Tensor]
) -> dict[str, float]:
    found = Beside()
    for ids_T, dense_BTV in zip(ids_NT, wanted, strict=True):
        found.add(dense_BTV, logits(ids_T), ids_T[None])
    return found.to_json()


def _elsewhere(model: nn.Module, tokenizer: Any, ids_NT: torch.Tensor, wanted: list[torch.Tensor]) -> dict[str, Any]:
    """Over a store that was packed from the model, and in a bundle that was exported from it."""
    points = {}
    with tempfile.TemporaryDirectory() as name, torch.no_grad(), evaluating(model):
        folder = Path(name)
        torch_pi2.save(model, folder / "saved")
        torch_pi2.pack(folder / "saved", folder / "store")
        reads = torch_pi2.OffloadConfig(policy="none", preload=False)
        over = torch_pi2.load(folder / "store", budget="1GiB", offload=reads)
        with evaluating(over), sparse_only():
            points["store"] = _beside(lambda ids_T: logits_of(over, ids_T[None]), ids_NT, wanted)
        torch_pi2.export(model, folder / "bundle", tokenizer=tokenizer, max_tokens=_WINDOW, batches=(1,))
        with torch_pi2.Bundle(folder / "bundle") as bundle:
            points["bundle"] = _beside(lambda ids_T: bundle.logits(ids_T.tolist())[None], ids_NT, wanted)
    return points


def floats(args: argparse.Namespace) -> tuple[Callable[[], Any], Any]:
    """A function that loads the model of ``--folder`` in float32, anew each time; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trust = args.trust_remote_code or args.folder == TRAINED  # our own model brings its code

    def make() -> Any:
        return AutoModelForCausalLM.from_pretrained(args.folder, trust_remote_code=trust, dtype=torch.float32).eval()

    return make, AutoTokenizer.from_pretrained(args.folder, trust_remote_code=trust)


@dataclass
class Beside:
    """Sums over tokens.

    Attributes:
        dense_nats, nats: losses. divergence: of the next token's distribution from the dense model's. same: tokens of
            which the most likely next one is the same.
    """

    dense_nats: float = 0.0
    nats: float = 0.0
    divergence: float = 0.0
    same: float = 0.0
    tokens: int = 0

    def add(self, dense_BTV: torch.Tensor, logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> None:
        """``dense_BTV``: logarithms of the dense model's probabilities, float32; ``logits_BTV`` for the same tokens."""
        found_BTV = F.log_softmax(logits_BTV.float(), -1)
        self.dense_nats += _nats(dense_BTV, ids_BT)
        self.nats += _nats(found_BTV, ids_BT)
        self.divergence += float((dense_BTV.exp() * (dense_BTV - found_BTV)).sum())
        self.same += float((dense_BTV.argmax(-1) == found_BTV.argmax(-1)).sum())
        self.tokens += ids_BT.numel()

    def to_json(self) -> dict[str, float]:
        """``loss``: relative increase; ``kl``: in nats per token; ``agreement``: share of tokens."""
        return {
            "loss": self.nats / self.dense_nats - 1,
            "kl": self.divergence / self.tokens,
            "agreement": self.same / self.tokens,
        }


def _nats(logs_BTV: torch.Tensor, ids_BT: torch.Tensor) -> float:
    """Negative log likelihood of every token but the first of each row."""
    return -float(logs_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None]).sum())


TABLES = (
    Table(
        "Methods and 4 bits",
        lambda result: result["cases"],
        {
            "method": at("method"),
            "weights": at("weights"),
            "FFN rows used": at("rows_used", common.percent),
            "loss": at("memory.loss", "+.2%"),
            "KL, nats": at("memory.kl", ".4f"),
            "same token": at("memory.agreement", common.percent),
            "over a store": at("store.loss", "+.2%"),
            "in a bundle": at("bundle.loss", "+.2%"),
        },
        "Methods of sparsity with float and 4-bit weights (GPTQ), beside the dense model in floats, on held-out text: "
        "in memory, then the loss over a store of which every call reads all that it wants, and in a bundle.",
    ),
    Table(
        "Ranks of predictors",
        lambda result: result.get("ranks", []),
        {
            "rank": at("rank"),
            "recall asked for": at("asked", common.percent),
            "recall": at("recall", common.percent),
            "lowest": at("least", common.percent),
            "of the output": at("mass", common.percent),
            "predicted": at("predicted", common.percent),
            "weights": at("weights"),
            "FFN rows used": at("rows_used", common.percent),
            "predictor": at("bytes", common.percent),
            "loss": at("memory.loss", "+.2%"),
            "KL, nats": at("memory.kl", ".4f"),
            "same token": at("memory.agreement", common.percent),
        },
        "Low-rank predictors of one rank and recall in all layers: recall of firing cold neurons on held-out "
        "calibration text (mean and lowest of the layers, and weighted by what neurons add to the output), the share "
        "predicted, which is the recall of a predictor that knows nothing; then, beside the dense model in floats on "
        "held-out text, the rows used, the predictor's bytes as a share of the layer's (both in int4), and the loss.",
    ),
)


def about(result: Result) -> str:
    return f"{result['folder']}: {result['tokens']:,} held-out tokens, beside the dense model in floats"
