"""Thresholds for layers without exact zeros: the same share of each, or spread over layers by what the loss bears.

TEAL (arXiv 2408.14690) gives each layer its own share, greedily. Here the greedy walk is taken in closed form: what a
layer's output lacks is, of the neurons that are skipped, the sum of squared scores, and the loss rises by a layer's own
factor times that. Skipping next, whatever the layer, where the next neuron costs least means one price for all layers,
``factor * threshold ** 2``. Factors take one evaluation a layer; the curve of loss over price takes some more, and the
largest price within the budget is chosen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_pi2.base.progress import bar
from torch_pi2.fitting.loss import causal_lm_loss, mean_loss
from torch_pi2.fitting.scores import score_scales
from torch_pi2.fitting.sets import at_most, split
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.run import profile
from torch_pi2.spec.config import Config
from torch_pi2.spec.loss_curve import LossCurve
from torch_pi2.spec.site import FFNSite
from torch_pi2.spec.stats import LayerStats, bin_edge

_log = logging.getLogger("torch_pi2")

#: Share of a layer's neurons that is skipped, of that layer alone, to see what the loss thinks of it.
_TRIED = 0.6
#: Shares of all neurons at which the curve is taken, and how often the step across the budget is halved.
_CURVE, _HALVINGS = tuple(n / 10 for n in range(1, 10)), 5
#: The least factor of a layer over the largest: a loss that does not rise says that it is small, not that it is none.
_LEAST_FACTOR = 1e-3
_EVAL_TOKENS = 16_384


@dataclass(frozen=True)
class Thresholds:
    """What was chosen, and how.

    Attributes:
        cuts: site key -> the threshold on its score. scales: see :func:`~torch_pi2.fitting.scores.score_scales`.
        made_by: ``score``; with a budget what a :class:`~torch_pi2.spec.loss_curve.LossCurve` says.
    """

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
    settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
    if config.max_loss is None:
        scales = score_scales(model, data, sites, config.score, progress=progress)
        stats = profile(model, data, sites, scales=scales, progress=progress, **settings)
        cuts = {site.key: stats.threshold_for(site.key, config.sparsity) for site in sites}
        return Thresholds(cuts, scales, {"score": config.score})
    walk = Walk(model, data, sites, config, progress=progress)
    cuts, found = walk.within(config.max_loss)
    if not any(cuts.values()):
        _log.warning("no neuron can be skipped within max_loss=%g: thresholds are 0", config.max_loss)
    curve = LossCurve(config.score, config.max_loss, found, walk.points)
    return Thresholds(cuts, walk.scales, curve.to_json())


class Walk:
    """Along the price of a skipped neuron, the same for all layers: thresholds for shares of all neurons.

    Args: as of :func:`choose_thresholds`; ``max_loss`` and ``sparsity`` are not read.

    Attributes:
        scales: see :func:`~torch_pi2.fitting.scores.score_scales`. stats: of the sequences that thresholds are from.
    """

    def __init__(
        self, model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], config: Config, *, progress: bool = False
    ) -> None:
        parts = split(data, config.batch_size)
        seen, self._held = [*parts["fit"], *parts["calibrate"]], at_most(parts["evaluate"], _EVAL_TOKENS)
        self._model, self._sites = model, sites
        self.scales = score_scales(model, seen, sites, config.score, progress=progress)
        settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
        self.stats = profile(model, seen, sites, scales=self.scales, progress=progress, **settings)
        self._weights = {site.key: site.intermediate for site in sites}
        self._shares = {site.key: _Skipped(self.stats[site.key]) for site in sites}
        self._points: dict[float, tuple[float, float]] = {}
        self._dense, _ = mean_loss(model, self._held, causal_lm_loss, None)
        with bar(sites, "thresholds of layers", progress, unit="layer") as shown:
            factors = {site.key: self._factor(site.key) for site in shown}
        least = max(*factors.values(), 0.0) * _LEAST_FACTOR or 1.0
        self._factors = {key: max(factor, least) for key, factor in factors.items()}
        self._progress = progress

    def masked(self, cuts: Mapping[str, float]) -> PredictedMaskMode:
        """A context inside which the model skips what is not above ``cuts``, thresholds on the score by key."""
        chosen = [site for site in self._sites if cuts.get(site.key, 0.0) > 0]
        own = {s.key: cuts[s.key] / self.scales[s.key] if s.key in self.scales else cuts[s.key] for s in chosen}
        return PredictedMaskMode(self._model, chosen, dict.fromkeys(own), thresholds=own)

    def _change(self, cuts: Mapping[str, float]) -> tuple[float, float]:
        """Relative increase of the loss, and the share of neurons that were skipped."""
        loss, skipped = mean_loss(self._model, self._held, causal_lm_loss, self.masked(cuts))
        here = sum(self._weights[key] for key, cut in cuts.items() if cut > 0)
        return loss / self._dense - 1, skipped * here / sum(self._weights.values())

    def _factor(self, key: str) -> float:
        cut = self.stats.threshold_for(key, _TRIED)
        missing = self._shares[key].missing(cut)
        return self._change({key: cut})[0] / missing if missing else 0.0

    def cuts(self, share: float) -> dict[str, float]:
        """Thresholds at one price, with which ``share`` of all neurons is skipped."""
        every = sum(self._weights.values())
        low, high = -80.0, 80.0  # of the price's logarithm
        for _ in range(60):
            middle = (low + high) / 2
            cuts = self._at(math.exp(middle))
            skipped = sum(self._shares[key].share(cut) * self._weights[key] for key, cut in cuts.items()) / every
            low, high = (middle, high) if skipped < share else (low, middle)
        return self._at(math.exp(low))

    def _at(self, price: float) -> dict[str, float]:
        return {key: math.sqrt(price / factor) for key, factor in self._factors.items()}

    def _evaluate(self, share: float) -> float:
        change, skipped = self._change(self.cuts(share))
        self._points[share] = skipped, change
        return change

    def within(self, max_loss: float) -> tuple[dict[str, float], float]:
        """The thresholds that skip most before the loss has risen by ``max_loss``, and by how much it has."""
        low, high = 0.0, 1.0
        with bar(None, "loss curve", self._progress, total=len(_CURVE) + _HALVINGS, unit="step") as shown:
            for share in _CURVE:
                if self._evaluate(share) > max_loss:
                    high = min(high, share)
                elif high == 1.0:
                    low = share
                shown.update()
            for _ in range(_HALVINGS if high < 1.0 else 0):
                share = (low + high) / 2
                low, high = (low, share) if self._evaluate(share) > max_loss else (share, high)
                shown.update()
        return (self.cuts(low), self._points[low][1]) if low else (dict.fromkeys(self._weights, 0.0), 0.0)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Shares that have been tried, ascending, and what they did to the loss."""
        return tuple(sorted(self._points.values()))


class _Skipped:
    """Of a layer's histogram of scores: what thresholds skip."""

    def __init__(self, stats: LayerStats) -> None:
        counts = stats.score_hist.double()
        filled = torch.nonzero(counts).flatten().tolist()
        last = filled[-1] if filled else 0
        edges = [bin_edge(index) for index in range(last + 2)]
        self._edges = torch.tensor(edges, dtype=torch.float64)
        middle = (self._edges[1:] + self._edges[:-1]) / 2
        counts = counts[: last + 1] / max(1.0, float(counts.sum()))
        zero = torch.zeros(1, dtype=torch.float64)
        self._below = torch.cat([zero, counts.cumsum(0)])
        self._squares = torch.cat([zero, (counts * middle.square()).cumsum(0)])

    def share(self, cut: float) -> float:
        """Share of (token, neuron) pairs whose score is below ``cut``."""
        return self._at(self._below, cut)

    def missing(self, cut: float) -> float:
        """Their squared scores, over all pairs."""
        return self._at(self._squares, cut)

    def _at(self, sums: torch.Tensor, cut: float) -> float:
        index = int(torch.searchsorted(self._edges, cut, right=True)) - 1
        if index < 0:
            return 0.0
        if index >= len(self._edges) - 1:
            return float(sums[-1])
        low, high = float(self._edges[index]), float(self._edges[index + 1])
        part = (cut - low) / (high - low)
        return float(sums[index] + part * (sums[index + 1] - sums[index]))
