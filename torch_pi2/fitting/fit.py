"""``fit`` trains one low-rank predictor per FFN and sizes it until the *model's* loss hardly changes.

This follows PowerInfer (arXiv 2312.12456, section 5.1), which guesses a size from sparsity and skew, and adjusts it
until perplexity stays put. The search has two stages:

1. *rank*, layer by layer: up or down from the guess while the layer's cost falls at the same recall. The cost is the
   bytes of the predictor, in int4 as it will run, and of the neurons that it predicts active;
2. *recall*: raised in the layers that hurt the loss most until the whole model is within tolerance, then lowered where
   there is slack.

Three disjoint sets of sequences are used: to fit, to set thresholds, and to measure losses and cards.

``fit_layers`` makes each predictor from its layer's samples alone: those of signs, and a ``SparseMethod``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.memory import let_go
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import CalibrationError, check_made_from
from torch_pi2.fitting.custom import allocated, fit_method, layer_samples
from torch_pi2.fitting.loss import LossFn, causal_lm_loss, mean_loss
from torch_pi2.fitting.resume import Losses, PredictorCache, PredictorFiles, work_folder
from torch_pi2.fitting.search import FitSettings, Layer, Search, initial_rank
from torch_pi2.fitting.train import MIN_SAMPLES, calibrate, measure
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.routed import modules_of
from torch_pi2.ops import load as load_library
from torch_pi2.predict.file import FitReport, FittedPredictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.predict.method import SparseMethod
from torch_pi2.predict.samples import LayerSamples
from torch_pi2.predict.signbit import SignBit
from torch_pi2.profiling.data import Batch, at_most, batches, digest, split
from torch_pi2.profiling.recorder import check_sites
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.config import described, method_for
from torch_pi2.types.method import Method
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats


def cold_neurons(stats: ActivationStats, key: str, hot_frequency: float) -> torch.Tensor:
    """Neurons that fire for less than ``hot_frequency`` of single tokens, int64 ascending."""
    return torch.nonzero(stats[key].frequency() < hot_frequency).flatten()


def _check_profiled(model: nn.Module, sites: Sequence[FFNSite], stats: ActivationStats) -> str:
    """The hash of the weights. Raises StaleArtifactError: ``stats`` belong to other weights."""
    model_hash = weights_hash(model, list(sites))
    fix = "Profile this model again."
    check_made_from("activation statistics", stats.model_hash, model_hash, "a profile of FFN weights", fix)
    return model_hash


@fresh_settings()
def fit(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    settings: FitSettings | None = None,
    *,
    tokenizer: Callable[..., Any] | None = None,
    loss_fn: LossFn = causal_lm_loss,
    cold: Mapping[str, torch.Tensor] | None = None,
    work: Path | None = None,
    progress: bool = True,
) -> FittedPredictors:
    """Fit low-rank predictors for the cold neurons of every site; all experts of a module get the same rank.

    Args:
        model, data, tokenizer: as for ``profile``; at least 10 sequences.
        stats: of this model; its thresholds decide which neurons count as firing.
        loss_fn: the loss that must hardly change (default: causal language modelling).
        cold: site key -> cold neurons; None: those that fire for less than ``settings.hot_frequency`` of tokens.
        work: folder for samples and intermediate predictors; None: memory. The same call resumes after a kill.

    Returns:
        Predictors with cards, and ``report``. The evaluation sequences also steer the search, so quote a loss on other
        text (``torch-pi2 eval``).

    Raises:
        StaleArtifactError: ``stats`` belong to other weights, or ``work`` to another fit.
        CalibrationError: too few sequences.
        ArtifactError: ``work`` cannot be written, or another process uses it.
    """
    load_library()
    settings = settings or FitSettings()
    check_sites(model, sites)
    model_hash = _check_profiled(model, sites, stats)
    shape: dict[str, Any] = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
    sets = split(list(batches(data, tokenizer=tokenizer, **shape)), settings.batch_size)
    sets["evaluate"] = at_most(sets["evaluate"], settings.eval_tokens)
    if cold is None:
        cold = {s.key: cold_neurons(stats, s.key, settings.hot_frequency) for s in sites}
    sites = [s for s in sites if len(cold[s.key])]
    cuts = {s.key: stats[s.key].cut for s in sites}
    made_from = {"model": model_hash, "text": digest(sets), "statistics": digest([cold, cuts]), **vars(settings)}
    with work_folder(work, made_from):
        held_back = max(1, min(settings.n_tokens // 4, 4096))
        wanted = {"fit": settings.n_tokens, "calibrate": held_back, "evaluate": held_back}
        how = {"seed": settings.seed, "progress": progress}
        samples = _samples(model, sets, wanted, sites, cuts, work, how)
        least = {"fit": MIN_SAMPLES, "calibrate": 1, "evaluate": 1}
        few = [s.key for s in sites if any(len(samples[name][s.key]) < some for name, some in least.items())]
        if few:
            log.warning("no predictors, as too few of the tokens reach them (%d): %s", MIN_SAMPLES, ", ".join(few))
            sites = [s for s in sites if s.key not in few]
        layers, recall = [], settings.target_recall
        for i, s in enumerate(sites):
            rank = initial_rank(s, stats[s.key].active_share, stats[s.key].skew())
            cache = PredictorCache() if work is None else PredictorFiles(work / f"layer-{i}", s.hidden)
            layers.append(Layer(s, cold[s.key], samples["fit"], samples["calibrate"], rank, recall, cache=cache))
        masked = {s.key: cold[s.key] for s in sites}
        losses = Losses(work)

        def loss_in(make: Callable[[], Any]) -> tuple[float, float]:
            return losses.next(lambda: mean_loss(model, sets["evaluate"], loss_fn, make()))

        dense_loss, _ = loss_in(lambda: None)

        def change(predictors: Mapping[str, LowRankRows]) -> tuple[float, float]:
            # A predicted neuron is computed whatever its gate: thresholds only decided which neurons to predict.
            loss, skipped = loss_in(lambda: PredictedMaskMode(model, sites, predictors, masked))
            return loss / dense_loss - 1, skipped

        with bar(None, "fit", progress, total=len(layers) + settings.max_rounds, unit="step") as shown:
            search = Search(layers, settings, change, shown.update)
            search.run()
        # all experts of a module have the rank of the largest
        predictors = search.predictors()
        result = FittedPredictors(predictors)
        for own in modules_of(sites).values():
            rank = max(predictors[site.key].rank for site in own)
            result.update({site.key: predictors[site.key].padded(rank) for site in own})
        result.model_hash = model_hash

        for layer in layers:
            key, weights = layer.site.key, layer.site.weights(model)
            held_out = samples["evaluate"][key]
            made: Any = result[key]
            made.card = measure(made, held_out, layer.site, neurons=layer.cold, weights=weights)
            let_go(model, weights)
        tokens = {name: sum(b.n_tokens for b in part) for name, part in sets.items()}
        result.report = _report(search, settings, result, dense_loss, tokens)
    return result


def _samples(
    model: nn.Module,
    sets: Mapping[str, list[Batch]],
    wanted: Mapping[str, int],
    sites: Sequence[FFNSite],
    cuts: Mapping[str, float | torch.Tensor],
    work: Path | None,
    how: Mapping[str, Any],
) -> dict[str, Mapping[str, Samples]]:
    """Set of sequences -> site key -> ``wanted`` number of samples."""
    found: dict[str, Mapping[str, Samples]] = {name: {} for name in sets}
    for name, data in sets.items() if sites else ():
        folder = None if work is None else work / f"samples-{name}"
        found[name] = collect_samples(model, data, sites, wanted[name], thresholds=cuts, folder=folder, **how)
    return found


def _report(
    search: Search, settings: FitSettings, result: FittedPredictors, dense_loss: float, tokens: dict[str, int]
) -> FitReport:
    change, rows = search.loss_change, []
    for layer in search.layers:
        card = result[layer.site.key].card
        assert card is not None
        sizes: dict[str, Any] = {"cold": len(layer.cold), "rank": layer.rank, "target_recall": layer.recall}
        sizes["weights"] = "int4"
        rows.append({"key": layer.site.key} | sizes | card.to_json())
    accepted = [r for r in search.rounds if r["change"] == change]
    losses: Any = {"dense_loss": dense_loss, "loss": dense_loss * (1 + change), "change": change}
    bounds: Any = {"tolerance": settings.tolerance, "met": change <= settings.tolerance}
    skipped, rounds = accepted[-1]["skipped"] if accepted else 0.0, tuple(search.rounds)
    report = FitReport(**losses, **bounds, skipped=skipped, rounds=rounds, layers=tuple(rows), tokens=tokens)
    if not report.met:
        log.warning(
            "predictors change the loss by %.2f %%, more than the tolerance of %.2f %%, after %d rounds: "
            "calibrate on more text or raise max_rounds",
            *(100 * change, 100 * settings.tolerance, len(search.rounds)),
        )
    return report


@fresh_settings()
def fit_layers(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    settings: FitSettings,
    *,
    cold: Mapping[str, torch.Tensor],
    work: Path | None = None,
    progress: bool = True,
) -> FittedPredictors:
    """Fit a predictor for each site, one by one, to the given recall (signs), or as its method does. ``cold``: site
    key -> neurons to predict; sites without any get no predictor. ``stats``, ``work``: as for :func:`fit`. Raises
    StaleArtifactError: ``stats`` belong to other weights. CalibrationError: fewer than two tokens.
    """
    model_hash = _check_profiled(model, sites, stats)
    result = FittedPredictors()
    result.model_hash = model_hash
    sites = [s for s in sites if len(cold[s.key])]
    if not sites:
        return result
    cuts = {s.key: stats[s.key].cut for s in sites}
    made_from: dict[str, Any] = {"model": model_hash, "text": digest(data), "statistics": digest([cold, cuts])}
    made_from |= {name: getattr(settings, name) for name in ("method", "n_tokens", "target_recall", "seed")}
    made_from |= {"custom": described(settings).get("custom")}
    how = {"seed": settings.seed, "progress": progress}
    with work_folder(work, made_from):
        samples = _samples(model, {"all": data}, {"all": settings.n_tokens}, sites, cuts, work, how)["all"]
        if settings.method == Method.CUSTOM:
            result |= fit_methods(model, sites, settings, samples)
        for site in sites if settings.method != Method.CUSTOM else ():
            result[site.key] = _fit_signs(model, site, samples[site.key], cold[site.key], settings.target_recall)
    return result


def fit_methods(
    model: nn.Module, sites: Sequence[FFNSite], settings: Any, samples: Mapping[str, Samples]
) -> dict[str, SparseMethod]:
    """Site key -> the method of one's own in ``settings``, fitted to the site's samples; each may see all first."""
    by_key = {site.key: site for site in sites}

    def given(key: str) -> LayerSamples:
        return layer_samples(model, by_key[key], samples[key].split(0.25)[0])

    methods = allocated({key: method_for(settings, key) for key in by_key}, given)
    return {site.key: fit_method(methods[site.key], model, site, samples[site.key]) for site in sites}


def _fit_signs(model: nn.Module, site: FFNSite, samples: Samples, cold: torch.Tensor, target_recall: float) -> SignBit:
    """The margin is set on half of the tokens, the card measured on the others."""
    if len(samples) < 2:
        expected, fix = "at least 2 (thousands are good)", "Pass more text."
        found = str(len(samples))
        raise CalibrationError("tokens to calibrate sign-bit predictors on", expected=expected, found=found, fix=fix)
    weights = site.weights(model)
    held_back, other = samples.split(0.5)
    predictor = SignBit.from_weights(weights.up if weights.gate is None else weights.gate)
    settings: dict[str, Any] = {"neurons": cold, "weights": weights}
    predictor = calibrate(predictor, held_back, site, target_recall=target_recall, **settings)
    predictor.card = measure(predictor, other, site, **settings)
    let_go(model, weights)
    return predictor
