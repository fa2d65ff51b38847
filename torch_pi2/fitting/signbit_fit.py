"""Sign-bit predictors of a whole model: no training, one pass over calibration data for the margins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.mapped import let_go
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.fitting.kept import begun
from torch_pi2.fitting.sets import profiled_hash
from torch_pi2.fitting.train import measure
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.profiling.data import digest
from torch_pi2.profiling.samples import SampleFiles, Samples, collect_samples, sample_groups
from torch_pi2.types.site import FFNSite, FFNWeights
from torch_pi2.types.stats import ActivationStats


@fresh_settings()
def fit_signbit(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    *,
    cold: Mapping[str, torch.Tensor],
    n_tokens: int = 8192,
    target_recall: float = 0.9,
    seed: int = 0,
    work: Path | None = None,
    progress: bool = True,
) -> FittedPredictors:
    """A :class:`SignBit` per site, its margin set on half of ``n_tokens`` tokens, its card taken on the other half.

    Args:
        data: calibration batches. stats: of this model; its thresholds decide what firing means.
        cold: site key -> neurons that are predicted; sites without any get no predictor.
        target_recall: of every layer.
        work: as in :func:`torch_pi2.fitting.fit.fit`.

    Raises:
        StaleArtifactError: ``stats`` are of other weights. CalibrationError: fewer than two tokens.
    """
    model_hash = profiled_hash(model, sites, stats)
    result = FittedPredictors()
    result.model_hash = model_hash
    sites = [s for s in sites if len(cold[s.key])]
    if not sites:
        return result
    cuts = {s.key: stats[s.key].cut for s in sites}
    ranks = Ranks(together=work is not None)
    made_from: dict[str, Any] = {"model": model_hash, "text": digest(data), "statistics": digest([cold, cuts])}
    made_from |= {"method": "signbit", "n_tokens": n_tokens, "target_recall": target_recall, "seed": seed}
    options: dict[str, Any] = {"thresholds": cuts, "seed": seed, "progress": progress}
    with begun(work, made_from, ranks):
        if work is None:
            groups = sample_groups(model, data, sites, n_tokens, **options)
        else:
            folder = work / "samples"
            ranks.first(lambda: len(collect_samples(model, data, sites, n_tokens, folder=folder, **options)))
            groups = iter([SampleFiles(folder)])
        for samples in groups:
            own = [site for site in sites if site.key in samples]

            def made(site: FFNSite, samples: Mapping[str, Samples] = samples) -> SignBit:
                return _made(model, site, samples[site.key], cold[site.key], target_recall)

            result |= dict(zip((site.key for site in own), ranks.map(made, own)))
    return result


def _made(model: nn.Module, site: FFNSite, samples: Samples, cold: torch.Tensor, target_recall: float) -> SignBit:
    if len(samples) < 2:
        raise CalibrationError(
            "tokens to calibrate sign-bit predictors on",
            expected="at least 2 (thousands are good)",
            found=str(len(samples)),
            fix="Pass more text.",
        )
    weights = site.weights(model)
    held, other = samples.split(0.5)
    predictor = SignBit.from_weights(weights.up if weights.gate is None else weights.gate)
    settings: dict[str, Any] = {"neurons": cold, "weights": weights}
    predictor = calibrate_signbit(predictor, held, site, target_recall=target_recall, **settings)
    predictor.card = measure(predictor, other, site, **settings)
    let_go(model, weights)
    return predictor


def calibrate_signbit(
    predictor: SignBit,
    held_back: Samples,
    site: FFNSite,
    *,
    target_recall: float = 0.95,
    neurons: torch.Tensor | None = None,
    weights: FFNWeights | None = None,
) -> SignBit:
    """A copy of ``predictor`` with the largest margin that reaches ``target_recall`` on ``held_back``, and its card.

    Args:
        neurons: those that are predicted (the cold ones); None: all.
        weights: with them the card has ``mass_recall``.

    Raises:
        ConfigError: target_recall outside (0, 1]. CalibrationError: no held-back tokens.
    """
    if not 0 < target_recall <= 1:
        raise ConfigError(
            "target_recall",
            expected="more than 0, at most 1",
            found=str(target_recall),
            fix="0.95 is a good start.",
        )
    if not len(held_back):
        raise CalibrationError(
            "held-back samples", expected="at least one token", found="none", fix="Collect more tokens."
        )
    index = torch.arange(held_back.intermediate) if neurons is None else neurons.long()
    # A histogram over 0..H instead of all scores: exact, and small for any number of tokens.
    count_H = torch.zeros(predictor.hidden + 1, dtype=torch.int64)
    rows = torch.arange(len(held_back)).split(1024)
    for some in rows:
        agree = predictor.scores(held_back.x_NH[some].float())[:, index]
        hit = agree[held_back.fired(some)[:, index]].round().long()
        count_H += torch.bincount(hit, minlength=predictor.hidden + 1)
    total = int(count_H.sum())
    at_least_H = count_H.flip(0).cumsum(0).flip(0)  # pairs that fire and agree in so many places or more
    enough = torch.nonzero(at_least_H >= math.ceil(target_recall * total)).flatten()
    # Without a single firing neuron nothing need be predicted.
    needed = int(enough[-1]) if total else predictor.hidden
    # Half a place below the count that must still pass, so that rounding cannot exclude it.
    margin = max(0.0, (needed - 0.5) / (predictor.hidden - needed + 0.5))
    new = SignBit(predictor.signs, predictor.hidden, margin)
    new.card = measure(new, held_back, site, neurons=neurons, weights=weights)
    return new
