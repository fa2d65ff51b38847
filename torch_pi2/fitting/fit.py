"""``fit``: trains one low-rank predictor per FFN and sizes it until the *model's* loss hardly changes.

After PowerInfer (arXiv 2312.12456, section 5.1), whose predictors start at a size guessed from sparsity and
skew and are adjusted until perplexity stays put. Here, per layer:

1. *rank* and format (int4 or int8): from that guess up or down for as long as the layer's cost falls at the same
   recall, quantised as it will run; cost is the bytes that the predictor takes and those of what it lets through;
2. *recall*: raised in the layers that hurt the loss most until the whole model is within tolerance, then
   lowered wherever there is slack.

Three disjoint sets of sequences are used: one to fit, one to set thresholds, one to take the losses and the
cards from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.mapped import let_go
from torch_pi2.base.progress import bar
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.fitting.kept import Kept, KeptFiles, Losses, begun
from torch_pi2.fitting.loss import LossFn, causal_lm_loss, mean_loss
from torch_pi2.fitting.search import FitSettings, Layer, Search, initial_rank
from torch_pi2.fitting.sets import at_most, profiled_hash, split
from torch_pi2.fitting.train import measure
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.routed import modules_of
from torch_pi2.ops import load as load_library
from torch_pi2.predict.file import FitReport, FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.profiling.data import Batch, batches, digest
from torch_pi2.profiling.recorder import check_sites
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.predictor import PredictorCard
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats

#: ``predictors -> context`` inside which the model skips what they do not predict.
ApplyFn = Callable[[Mapping[str, LowRank]], AbstractContextManager[Any]]

_log = logging.getLogger("torch_pi2")


def cold_neurons(stats: ActivationStats, key: str, hot_frequency: float) -> torch.Tensor:
    """Neurons that fire for less than ``hot_frequency`` of single tokens, int64 ascending."""
    return torch.nonzero(stats.frequency(key) < hot_frequency).flatten()


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
    apply: ApplyFn | None = None,
    cold: Mapping[str, torch.Tensor] | None = None,
    work: Path | None = None,
    progress: bool = True,
) -> FittedPredictors:
    """Fit low-rank predictors for the cold neurons of every site.

    Those of the experts of one module get the rank of the largest among them.

    Args:
        model, data, tokenizer: as ``profile``; at least 10 sequences.
        stats: of this model; its thresholds decide what firing means.
        loss_fn: what must hardly change (default: causal language modelling).
        apply: how predictors are applied while the loss is taken; None: :class:`PredictedMaskMode`.
        cold: site key -> cold neurons; None: those that fire for less than ``settings.hot_frequency`` of tokens.
        work: folder for samples and predictors meanwhile, else in memory: the same call goes on after a kill. All
            processes of ``torch.distributed``'s default group, if there is one, make this call, and share the layers:
            the result is that of one process with as many threads.

    Returns:
        Predictors with cards measured on the evaluation sequences, and ``report``. Those sequences also steer the
        search, so the loss to quote is one taken on other text (``torch-pi2 eval``).

    Raises:
        StaleArtifactError: ``stats`` are of other weights, or another fit was begun in ``work``.
        CalibrationError: too few sequences. ConfigError: samples in memory that exceed ``settings.max_bytes``.
        ArtifactError: ``work`` cannot be written, or another process fits there.
    """
    load_library()
    settings = settings or FitSettings()
    check_sites(model, sites)
    model_hash = profiled_hash(model, sites, stats)
    shape = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
    parts = split(list(batches(data, tokenizer=tokenizer, **shape)), settings.batch_size)
    parts["evaluate"] = at_most(parts["evaluate"], settings.eval_tokens)
    if cold is None:
        cold = {s.key: cold_neurons(stats, s.key, settings.hot_frequency) for s in sites}
    sites = [s for s in sites if len(cold[s.key])]
    cuts = {s.key: stats[s.key].cut for s in sites}
    ranks = Ranks(together=work is not None)
    made_from = {"model": model_hash, "text": digest(parts), "statistics": digest([cold, cuts]), **vars(settings)}
    with begun(work, made_from, ranks):
        samples = _samples(model, parts, sites, cuts, settings, work, ranks, progress)
        layers = [
            Layer(
                s,
                cold[s.key],
                samples["fit"],
                samples["calibrate"],
                initial_rank(s, stats[s.key].active_share, stats[s.key].skew()),
                settings.target_recall,
                kept=Kept() if work is None else KeptFiles(work / f"layer-{i}", s.hidden),
            )
            for i, s in enumerate(sites)
        ]
        masked = {s.key: cold[s.key] for s in sites}
        losses = Losses(work)

        def loss_in(make: Callable[[], Any]) -> tuple[float, float]:
            return losses.take(lambda: mean_loss(model, parts["evaluate"], loss_fn, make(), ranks), ranks)

        dense_loss, _ = loss_in(lambda: None)

        def change(predictors: Mapping[str, LowRank]) -> tuple[float, float]:
            # What is predicted is computed whole, whatever its gate: thresholds said what predictors had to find.
            loss, skipped = loss_in(
                lambda: apply(predictors) if apply else PredictedMaskMode(model, sites, predictors, masked)
            )
            return loss / dense_loss - 1, skipped

        with bar(None, "fit", progress, total=len(layers) + settings.max_rounds, unit="step") as shown:
            search = Search(layers, settings, change, shown.update, ranks)
            search.run()
        result = FittedPredictors(_of_one_rank(search.predictors(), sites))
        result.model_hash = model_hash

        def card(layer: Layer) -> PredictorCard:
            key, weights = layer.site.key, layer.site.weights(model)
            measured: dict[str, Any] = {"neurons": layer.cold, "weights": weights}
            found = measure(result[key], samples["evaluate"][key], layer.site, **measured)
            let_go(model, weights)
            return found

        for layer, found in zip(layers, ranks.map(card, layers)):
            result[layer.site.key].card = found
        tokens = {name: sum(b.n_tokens for b in part) for name, part in parts.items()}
        result.report = _report(search, settings, result, dense_loss, tokens)
    return result


def _samples(
    model: nn.Module,
    parts: Mapping[str, list[Batch]],
    sites: Sequence[FFNSite],
    cuts: Mapping[str, float | torch.Tensor],
    settings: FitSettings,
    work: Path | None,
    ranks: Ranks,
    progress: bool,
) -> dict[str, Mapping[str, Samples]]:
    """Of each part of the data, by site."""
    if not sites:
        return {name: {} for name in parts}
    held = max(1, min(settings.n_tokens // 4, 4096))
    wanted = dict(zip(parts, (settings.n_tokens, held, held)))
    bounds: dict[str, Any] = {"seed": settings.seed, "max_bytes": settings.max_bytes, "progress": progress}

    def collect(name: str) -> Mapping[str, Samples]:
        folder = None if work is None else work / f"samples-{name}"
        return collect_samples(model, parts[name], sites, wanted[name], thresholds=cuts, folder=folder, **bounds)

    if work is None:
        return {name: collect(name) for name in parts}
    ranks.map(lambda name: len(collect(name)), list(parts))
    return {name: collect(name) for name in parts}  # finds them in their folders


def _report(
    search: Search, settings: FitSettings, result: FittedPredictors, dense_loss: float, tokens: dict[str, int]
) -> FitReport:
    """What was found, with a warning if that is not what was wanted."""
    change, rows = search.found, []
    for layer in search.layers:
        card = result[layer.site.key].card
        assert card is not None
        sizes: dict[str, Any] = {"cold": len(layer.cold), "rank": layer.rank, "target_recall": layer.recall}
        sizes["weights"] = layer.weights
        rows.append({"key": layer.site.key} | sizes | card.to_json())
    accepted = [r for r in search.rounds if r["change"] == change]
    report = FitReport(
        dense_loss=dense_loss,
        loss=dense_loss * (1 + change),
        change=change,
        tolerance=settings.tolerance,
        met=change <= settings.tolerance,
        skipped=accepted[-1]["skipped"] if accepted else 0.0,
        rounds=search.rounds,
        layers=rows,
        tokens=tokens,
    )
    if not report.met:
        _log.warning(
            "predictors change the loss by %.2f %%, more than the tolerance of %.2f %%, after %d rounds: "
            "calibrate on more text or raise max_rounds",
            100 * change,
            100 * settings.tolerance,
            len(search.rounds),
        )
    return report


def _of_one_rank(predictors: dict[str, LowRank], sites: Sequence[FFNSite]) -> dict[str, LowRank]:
    """``predictors``, of which those of the experts of one module have the rank of the largest."""
    result = dict(predictors)
    for own in modules_of(sites).values():
        rank = max(predictors[site.key].rank for site in own)
        result |= {site.key: predictors[site.key].padded(rank) for site in own}
    return result
