"""Thresholds for layers without exact zeros: so that a share of each layer is skipped, or as much as the loss bears.

With ``sparsity`` every layer skips the same share (CATS, arXiv 2404.08763); with ``max_loss`` each has the share that
:mod:`~torch_pi2.fitting.spread` gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_pi2.base.progress import bar
from torch_pi2.fitting.loss import causal_lm_loss, mean_loss
from torch_pi2.fitting.scores import read_first, score_scales
from torch_pi2.fitting.sets import at_most, split
from torch_pi2.fitting.spread import Spread
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.run import profile
from torch_pi2.spec.config import Config
from torch_pi2.spec.loss_curve import LossCurve
from torch_pi2.spec.site import FFNSite

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
        made_by: ``score``; with a budget what a :class:`~torch_pi2.spec.loss_curve.LossCurve` says.
    """

    sites: Sequence[FFNSite] = ()
    cuts: dict[str, float] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


def choose_thresholds(
    model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], config: Config, *, progress: bool = False
) -> Thresholds:
    """Thresholds of ``sites``, whose activations have no exact zeros, by ``score``, ``sparsity`` or ``max_loss``.

    Raises:
        ConfigError: see :func:`~torch_pi2.fitting.scores.score_scales`. CalibrationError: with ``max_loss`` fewer than
            10 sequences, or a model without next-token logits.
    """
    if config.max_loss is None:
        scored = Scored(model, data, sites, config, progress=progress)
        return Thresholds(scored.sites, scored.cuts(config.sparsity), scored.scales, {"score": config.score})
    parts = split(data, config.batch_size)
    scored = Scored(model, [*parts["fit"], *parts["calibrate"]], sites, config, progress=progress)
    spread = scored.spread(parts["calibrate"], progress=progress)
    held = at_most(parts["evaluate"], _EVAL_TOKENS)
    curve, share = _within(scored, spread, held, config, config.max_loss, progress)
    if not share:
        _log.warning("no neuron can be skipped within max_loss=%g: thresholds are 0", config.max_loss)
    return Thresholds(scored.sites, scored.cuts(spread.shares(share)), scored.scales, curve.to_json())


class Scored:
    """The scores of a model's layers on ``data``, and thresholds on them; other arguments as :func:`choose_thresholds`.

    Attributes:
        sites: as :func:`~torch_pi2.fitting.scores.read_first` has them. scales: see
            :func:`~torch_pi2.fitting.scores.score_scales`.
    """

    def __init__(
        self, model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], config: Config, *, progress: bool = False
    ) -> None:
        self.model, self.sites = model, [read_first(site, config.score) for site in sites]
        self.scales = score_scales(model, data, self.sites, config.score, progress=progress)
        settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
        self._stats = profile(model, data, self.sites, scales=self.scales, progress=progress, **settings)

    def cuts(self, shares: float | Mapping[str, float]) -> dict[str, float]:
        """Thresholds by key, with which layers skip ``shares`` of their neurons, all the same or by key; 0: none."""
        own = shares if isinstance(shares, Mapping) else dict.fromkeys((s.key for s in self.sites), shares)
        return {key: self._stats.threshold_for(key, share) if share else 0.0 for key, share in own.items()}

    def masked(self, cuts: Mapping[str, float]) -> PredictedMaskMode:
        """A context inside which the model skips what is not above ``cuts``."""
        return self._masked(self._on_gates(cuts))

    def spread(self, data: list[Batch], *, progress: bool = False) -> Spread:
        """Shares of layers' own, by what skipping does on ``data``."""
        args = self.model, data, self.sites
        return Spread(*args, lambda share: self._on_gates(self.cuts(share)), self._masked, progress=progress)

    def _on_gates(self, cuts: Mapping[str, float]) -> dict[str, float | torch.Tensor]:
        return {key: cut / self.scales[key] if key in self.scales else cut for key, cut in cuts.items()}

    def _masked(self, own: Mapping[str, float | torch.Tensor]) -> PredictedMaskMode:
        return PredictedMaskMode(self.model, self.sites, dict.fromkeys(own), thresholds=own)


def _within(
    scored: Scored, spread: Spread, held: list[Batch], config: Config, max_loss: float, progress: bool
) -> tuple[LossCurve, float]:
    """The curve on ``held``, and the largest share before the loss has risen by ``max_loss``."""
    model, points = scored.model, dict[float, tuple[float, float]]()
    dense, _ = mean_loss(model, held, causal_lm_loss, None)

    def fits(share: float) -> bool:
        loss, skipped = mean_loss(model, held, causal_lm_loss, scored.masked(scored.cuts(spread.shares(share))))
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
