"""Thresholds for layers without exact zeros: so that a share of each layer is skipped, or as much as the loss bears.

With ``sparsity`` every layer skips the same share (CATS, arXiv 2404.08763); with ``max_loss`` each has the share that
:mod:`~torch_pi2.fitting.spread` gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torch_pi2.base.progress import bar
from torch_pi2.distributed.ranks import Ranks
from torch_pi2.errors import CalibrationError
from torch_pi2.fitting.loss import causal_lm_loss, divergences, mean_loss
from torch_pi2.fitting.scores import read_first, score_scales
from torch_pi2.fitting.sets import at_most, split
from torch_pi2.fitting.spread import Cuts, Spread, Way, masked
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.run import profile
from torch_pi2.types.config import Config
from torch_pi2.types.loss_curve import LossCurve
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.site import FFNSite

_log = logging.getLogger("torch_pi2")

#: Shares of neurons at which the curve is taken, and how often the step across the budget is halved.
_CURVE, _HALVINGS = tuple(n / 10 for n in range(1, 10)), 5
_EVAL_TOKENS = 16_384


@dataclass(frozen=True)
class Thresholds:
    """What was chosen, and how.

    Attributes:
        sites: as their scores read them. cuts: site key -> the threshold on its score. scales: see
            :func:`~torch_pi2.fitting.scores.score_scales`.
        made_by: ``score``; with a budget what a :class:`~torch_pi2.types.loss_curve.LossCurve` says.
    """

    sites: Sequence[FFNSite] = ()
    cuts: dict[str, float] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)

    def masked(self, model: nn.Module) -> PredictedMaskMode:
        """A context inside which ``model`` skips what is not above."""
        return masked(model, self.sites, _on_first(self.cuts, self.scales))


def _on_first(cuts: Mapping[str, float], scales: Mapping[str, torch.Tensor]) -> Cuts:
    """Cuts on what first matrices make, of those on scores."""
    return {key: cut / scales[key] if key in scales else cut for key, cut in cuts.items()}


def choose_thresholds(
    model: nn.Module,
    data: list[Batch],
    sites: Sequence[FFNSite],
    config: Config,
    *,
    progress: bool = False,
    ranks: Ranks | None = None,
) -> Thresholds:
    """Thresholds of ``sites``, whose activations have no exact zeros, by ``score``, ``sparsity`` or ``max_loss``.

    Args:
        ranks: processes that make this call with the same arguments, and share the batches of profiles and of losses;
            None: this one takes all.

    Raises:
        ConfigError: see :func:`~torch_pi2.fitting.scores.score_scales`. CalibrationError: with ``max_loss`` fewer than
            10 sequences; with it, or several scores to compare, a model without next-token logits.
    """
    several = len(_names(config, sites)) > 1
    if config.max_loss is not None or several:
        _check_says_what_is_next(model, data[0], config)
    if config.max_loss is None:
        scored = Scored(model, data, sites, config, progress=progress, ranks=ranks)
        if several:
            scored.spread(data, progress=progress)  # which says what each score costs a layer
        return replace(scored.thresholds(config.sparsity), made_by={"score": config.score})
    parts = split(data, config.batch_size)
    scored = Scored(model, [*parts["fit"], *parts["calibrate"]], sites, config, progress=progress, ranks=ranks)
    spread = scored.spread(parts["calibrate"], progress=progress)
    held = at_most(parts["evaluate"], _EVAL_TOKENS)
    curve, share = _within(scored, spread, held, config, config.max_loss, progress, ranks)
    if not share:
        _log.warning("no neuron can be skipped within max_loss=%g: thresholds are 0", config.max_loss)
    return replace(scored.thresholds(spread.shares(share)), made_by=curve.to_json())


def _check_says_what_is_next(model: nn.Module, batch: Batch, config: Config) -> None:
    """Raises CalibrationError: ``model`` gives no next-token logits, by which layers and scores are compared."""
    try:
        divergences(model, [batch], [])
    except CalibrationError as error:
        raise CalibrationError(
            f"thresholds of {type(model).__name__} with "
            + (f"score='{config.score}'" if config.max_loss is None else f"max_loss={config.max_loss:g}"),
            expected="a model that takes token ids and gives logits [B, T, vocabulary], to see what skipping does",
            found="another one",
            fix="Choose score='output' or 'up', and sparsity=... without max_loss.",
        ) from error


class _Score:
    """One score of a model's layers on ``data``."""

    def __init__(
        self,
        model: nn.Module,
        data: list[Batch],
        sites: Sequence[FFNSite],
        score: str,
        config: Config,
        progress: bool,
        ranks: Ranks | None,
    ) -> None:
        self.sites = [read_first(site, score) for site in sites]
        self.scales = score_scales(model, data, self.sites, score, progress=progress)
        settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
        self._stats = profile(model, data, self.sites, scales=self.scales, progress=progress, ranks=ranks, **settings)

    def cut(self, key: str, share: float) -> float:
        """The threshold with which a layer skips ``share`` of its neurons; of none 0."""
        return self._stats.threshold_for(key, share) if share else 0.0

    def first_cuts(self, share: float) -> Cuts:
        """Of all layers, on what their first matrices make."""
        return _on_first({site.key: self.cut(site.key, share) for site in self.sites}, self.scales)


def _names(config: Config, sites: Sequence[FFNSite]) -> tuple[str, ...]:
    """What ``config.score`` stands for: experts have one threshold, predictors learn up less well."""
    if config.score != "auto":
        return (config.score,)
    if any(site.experts for site in sites):
        return ("gate",)
    return ("output",) if config.method in PREDICTED else ("output", "up")


class Scored:
    """The scores of a model's layers on ``data``, and thresholds on them; other arguments as :func:`choose_thresholds`.

    With ``auto`` of several, which :meth:`spread` compares.
    """

    def __init__(
        self,
        model: nn.Module,
        data: list[Batch],
        sites: Sequence[FFNSite],
        config: Config,
        *,
        progress: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self._spread: Spread | None = None
        self._each = [_Score(model, data, sites, name, config, progress, ranks) for name in _names(config, sites)]

    def spread(self, data: list[Batch], *, progress: bool = False) -> Spread:
        """Shares of layers' own, by what skipping does on ``data``."""
        ways = [Way(each.sites, each.first_cuts) for each in self._each]
        self._spread = found = Spread(self.model, data, ways, progress=progress)
        return found

    def thresholds(self, shares: float | Mapping[str, float]) -> Thresholds:
        """With which layers skip ``shares`` of their neurons, all the same or by key; 0: none."""
        sites: list[FFNSite] = []
        found = Thresholds(sites)
        for at, site in enumerate(self._each[0].sites):
            share = shares[site.key] if isinstance(shares, Mapping) else shares
            each = self._each[self._spread.way(site, share) if self._spread else 0]
            sites.append(each.sites[at])
            found.cuts[site.key] = each.cut(site.key, share)
            if site.key in each.scales:
                found.scales[site.key] = each.scales[site.key]
        return found


def _within(
    scored: Scored,
    spread: Spread,
    held: list[Batch],
    config: Config,
    max_loss: float,
    progress: bool,
    ranks: Ranks | None,
) -> tuple[LossCurve, float]:
    """The curve on ``held``, and the largest share before the loss has risen by ``max_loss``."""
    model, points = scored.model, dict[float, tuple[float, float]]()
    dense, _ = mean_loss(model, held, causal_lm_loss, None, ranks)

    def fits(share: float) -> bool:
        skips = scored.thresholds(spread.shares(share)).masked(model)
        loss, skipped = mean_loss(model, held, causal_lm_loss, skips, ranks)
        points[share] = skipped, loss / dense - 1
        shown.update()
        return points[share][1] <= max_loss

    with bar(None, "loss curve", progress, total=len(_CURVE) + _HALVINGS, unit="step") as shown:
        good = [fits(share) for share in _CURVE]
        first = good.index(False) if False in good else len(good)
        low, high = (0.0, *_CURVE)[first], (*_CURVE, 1.0)[first]
        for _ in range(_HALVINGS if high < 1 else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    found = points[low][1] if low else 0.0
    return LossCurve(config.score, max_loss, found, tuple(sorted(points.values()))), low
