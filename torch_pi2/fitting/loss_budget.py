"""Divides a loss budget among layers: a layer skips more neurons if that changes the model's predictions less.

The allocation follows TEAL (arXiv 2408.14690) with other costs. The squared error that a threshold causes in a layer's
output is measured on the layer alone. How much that error moves the distribution of next tokens differs between layers
and grows in proportion to it (a divergence is quadratic in small changes), so one run of the model per layer finds the
factor. Divergences of layers add up, so the best shares are those where one more neuron costs the same in all layers.
Losses are too noisy to serve as costs in place of divergences. Squared contributions of single neurons would not do in
place of the error of the output, as these have directions in common.

If there are several scores, each layer uses the one that costs least at its share: up tells small contributions apart
better, the activated gate large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.mapped import let_go
from torch_pi2.fitting.loss import divergences
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.routed import intermediate
from torch_pi2.profiling.data import Batch, evenly
from torch_pi2.profiling.recorder import Firing, record
from torch_pi2.types.site import FFNSite

#: Shares at which a layer's error is measured; the share at which the model is run; calibration tokens for both.
_SHARES, _MODEL_SHARE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 0.6
_TOKENS = 2048

#: Site key -> cut on the output of its first matrix, one number or ``[I]``.
Cuts = Mapping[str, float | torch.Tensor]


@dataclass(frozen=True)
class ScoreCuts:
    """One kind of score: ``sites`` with the matrix first that it reads, and share -> ``cuts`` of all sites."""

    sites: Sequence[FFNSite]
    cuts: Callable[[float], Cuts]


def masked(model: nn.Module, sites: Sequence[FFNSite], cuts: Cuts) -> PredictedMaskMode:
    """A context inside which ``model`` skips neurons of the sites in ``cuts`` that are not above them."""
    return PredictedMaskMode(model, sites, dict.fromkeys(cuts), thresholds=cuts)


class Allocation:
    """Share of neurons to skip, and which score to use, by layer. All experts of a module share both.

    Args:
        data: about 2,000 tokens of it are used.
    """

    def __init__(
        self, model: nn.Module, data: list[Batch], scores: Sequence[ScoreCuts], *, progress: bool = False
    ) -> None:
        self._groups: dict[str, list[FFNSite]] = {}
        for site in scores[0].sites:
            self._groups.setdefault(site.experts or site.key, []).append(site)
        some = evenly(data, _TOKENS)
        by_score = [self._measure(model, some, score, progress) for score in scores]
        # [scores, shares] in nats
        self._costs = {name: np.stack([costs[name] for costs in by_score]) for name in self._groups}

    def _measure(self, model: nn.Module, data: list[Batch], score: ScoreCuts, progress: bool) -> dict[str, np.ndarray]:
        """Costs of each layer at all shares."""
        errors = _errors(model, data, score.sites, [score.cuts(share) for share in _SHARES], progress)
        at = score.cuts(_MODEL_SHARE)
        contexts = [masked(model, score.sites, {y.key: at[y.key] for y in own}) for own in self._groups.values()]
        costs = {}
        for (name, own), divergence in zip(
            self._groups.items(), divergences(model, data, contexts, progress=progress), strict=True
        ):
            error = torch.stack([errors[site.key] for site in own]).sum(0)
            whole = float(error[_SHARES.index(_MODEL_SHARE)])
            costs[name] = (error * (divergence / whole if whole else 0.0)).numpy()
        return costs

    def score(self, site: FFNSite, share: float) -> int:
        """Index of the score that costs least if ``site`` skips ``share``."""
        costs = self._costs[site.experts or site.key]
        return int(np.argmin([np.interp(share, _SHARES, of_score) for of_score in costs]))

    def shares(self, mean: float) -> dict[str, float]:
        """Site key -> share to skip; the mean over all neurons is ``mean``, at most 0.95."""
        weights = {name: sum(site.intermediate for site in own) for name, own in self._groups.items()}
        remaining = mean * sum(weights.values())
        shares = dict.fromkeys(weights, 0.0)
        steps = [(slope / weights[name], name, width) for name in weights for slope, width in self._slopes(name)]
        for _, name, width in sorted(steps):
            taken = min(width, remaining / weights[name])
            shares[name] += taken
            remaining -= taken * weights[name]
        return {site.key: shares[name] for name, own in self._groups.items() for site in own}

    def _slopes(self, name: str) -> list[tuple[float, float]]:
        """Segments of the lower convex hull of a layer's costs: ``(slope, width)``, slopes ascending."""
        hull: list[tuple[float, float]] = []
        for x, y in zip(_SHARES, self._costs[name].min(0).tolist(), strict=True):
            while len(hull) > 1 and (y - hull[-1][1]) * (x - hull[-2][0]) <= (y - hull[-2][1]) * (x - hull[-1][0]):
                hull.pop()
            hull.append((x, y))
        return [((b - a) / (right - left), right - left) for (left, a), (right, b) in pairwise(hull)]


def _errors(
    model: nn.Module,
    data: list[Batch],
    sites: Sequence[FFNSite],
    cuts: Sequence[Cuts],
    progress: bool,
) -> dict[str, torch.Tensor]:
    """Site key -> squared error of its outputs on ``data`` with each of ``cuts``, float64 ``[len(cuts)]``."""
    errors = {site.key: torch.zeros(len(cuts), dtype=torch.float64) for site in sites}

    def add(firing: Firing) -> None:
        site, real_T = firing.site, firing.real_T
        weights = site.weights(model)
        _, h_NI = intermediate(site, weights, firing.x_TH[real_T])
        down_HI, score_NI = weights.down.float(), firing.score_TI[real_T]
        for i, cut in enumerate(cuts):
            lost_NH = F.linear(h_NI * (score_NI <= cut[site.key]), down_HI)
            errors[site.key][i] += lost_NH.square().sum(dtype=torch.float64)
        let_go(model, weights)

    record(model, data, sites, add, progress=progress, label="errors")
    return errors
