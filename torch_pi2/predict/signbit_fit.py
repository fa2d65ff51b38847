"""Sign-bit predictors of a whole model: no training, one pass over calibration data for the margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import CalibrationError, StaleArtifactError
from torch_pi2.graph.sites import FFNSite
from torch_pi2.plan.plan import weights_hash
from torch_pi2.predict.signbit import SignBit
from torch_pi2.predict.size import FittedPredictors
from torch_pi2.predict.train import measure
from torch_pi2.profile.samples import sample_groups
from torch_pi2.profile.stats import ActivationStats
from torch_pi2.runtime.modes import fresh_settings


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
    progress: bool = True,
) -> FittedPredictors:
    """A :class:`SignBit` per site, its margin set on half of ``n_tokens`` tokens, its card taken on the other half.

    Args:
        data: calibration batches. stats: of this model; its thresholds decide what firing means.
        cold: site key -> neurons that are predicted; sites without any get no predictor.
        target_recall: of every layer.

    Raises:
        StaleArtifactError: ``stats`` are of other weights. CalibrationError: fewer than two tokens.
    """
    model_hash = weights_hash(model, list(sites))
    if stats.model_hash != model_hash:
        raise StaleArtifactError(
            "activation statistics",
            expected=f"a profile of FFN weights {model_hash[:12]}",
            found=stats.model_hash[:12],
            fix="Profile this model again.",
        )
    result = FittedPredictors()
    result.model_hash = model_hash
    sites = [s for s in sites if len(cold[s.key])]
    if not sites:
        return result
    cuts = {s.key: stats[s.key].threshold for s in sites}
    groups = sample_groups(model, data, sites, n_tokens, thresholds=cuts, seed=seed, progress=progress)
    by_key = {site.key: site for site in sites}
    for key, mine in (item for samples in groups for item in samples.items()):
        site = by_key[key]
        if len(mine) < 2:
            raise CalibrationError(
                "tokens to calibrate sign-bit predictors on",
                expected="at least 2 (thousands are good)",
                found=str(len(mine)),
                fix="Pass more text.",
            )
        weights = site.weights(model)
        held, other = mine.split(0.5)
        predictor = SignBit.from_weights(weights.up if weights.gate is None else weights.gate)
        settings: dict[str, Any] = {"neurons": cold[site.key], "weights": weights}
        predictor = predictor.calibrate(held, site, target_recall=target_recall, **settings)
        predictor.card = measure(predictor, other, site, **settings)
        result[site.key] = predictor
    return result
