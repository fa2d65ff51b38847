"""How skipping is spread over layers: more where it does less to what the model says next (allocation as in TEAL,
arXiv 2408.14690, by other prices).

What a layer's output loses by a threshold, squared, the layer alone tells. By how much that moves the distribution of
next tokens differs from layer to layer, and grows in proportion (a divergence is quadratic in small changes): one run
of the model a layer finds the factor. Divergences of layers add up, so that the best shares are those where one more
neuron costs the same in all layers. Losses in the place of divergences are too noisy to be prices; squares of single
neurons' contributions in the place of the output's miss that these have directions in common.

Where there are several scores, a layer has the one that costs least at its share: up tells small contributions better,
the activated gate large ones.
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
from torch_pi2.fitting.sets import evenly
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.graph.routed import intermediate
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.firing import Firing
from torch_pi2.profiling.recorder import record
from torch_pi2.types.site import FFNSite

#: Shares at which a layer's error is taken, and that at which the model is run. Tokens of calibration data for both.
_SHARES, _PRICED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 0.6
_TOKENS = 2048

#: Site key -> cut on what its first matrix makes, one or ``[I]``.
Cuts = Mapping[str, float | torch.Tensor]


@dataclass(frozen=True)
class Way:
    """A score: ``sites`` as it reads them, and the ``cuts`` of all of them at a share."""

    sites: Sequence[FFNSite]
    cuts: Callable[[float], Cuts]


def masked(model: nn.Module, sites: Sequence[FFNSite], cuts: Cuts) -> PredictedMaskMode:
    """A context inside which ``model`` skips what is not above ``cuts``, of some or all of ``sites``."""
    return PredictedMaskMode(model, sites, dict.fromkeys(cuts), thresholds=cuts)


class Spread:
    """Shares of neurons to skip by layer, and by which of ``ways``; the experts of one module have one share.

    Args:
        data: some 2,000 tokens of it are used.
    """

    def __init__(self, model: nn.Module, data: list[Batch], ways: Sequence[Way], *, progress: bool = False) -> None:
        self._groups: dict[str, list[FFNSite]] = {}
        for site in ways[0].sites:
            self._groups.setdefault(site.experts or site.key, []).append(site)
        some = evenly(data, _TOKENS)
        found = [self._costs_of(model, some, way, progress) for way in ways]
        # [ways, shares] in nats
        self._costs = {name: np.stack([costs[name] for costs in found]) for name in self._groups}

    def _costs_of(self, model: nn.Module, data: list[Batch], way: Way, progress: bool) -> dict[str, np.ndarray]:
        errors = _errors(model, data, way.sites, [way.cuts(share) for share in _SHARES], progress)
        at = way.cuts(_PRICED)
        contexts = [masked(model, way.sites, {y.key: at[y.key] for y in own}) for own in self._groups.values()]
        costs = {}
        for (name, own), divergence in zip(
            self._groups.items(), divergences(model, data, contexts, progress=progress), strict=True
        ):
            error = torch.stack([errors[site.key] for site in own]).sum(0)
            whole = float(error[_SHARES.index(_PRICED)])
            costs[name] = (error * (divergence / whole if whole else 0.0)).numpy()
        return costs

    def way(self, site: FFNSite, share: float) -> int:
        """Which of the ways costs least where ``site`` skips ``share``."""
        costs = self._costs[site.experts or site.key]
        return int(np.argmin([np.interp(share, _SHARES, of) for of in costs]))

    def shares(self, mean: float) -> dict[str, float]:
        """Site key -> share to skip, such that over all neurons it is ``mean``, 0.95 at most."""
        weights = {name: sum(site.intermediate for site in own) for name, own in self._groups.items()}
        left = mean * sum(weights.values())
        found = dict.fromkeys(weights, 0.0)
        steps = [(slope / weights[name], name, width) for name in weights for slope, width in self._slopes(name)]
        for _, name, width in sorted(steps):
            taken = min(width, left / weights[name])
            found[name] += taken
            left -= taken * weights[name]
        return {site.key: found[name] for name, own in self._groups.items() for site in own}

    def _slopes(self, name: str) -> list[tuple[float, float]]:
        """Of the costs of the layer ``name`` the steps of the lower convex hull: ascending slope, and width."""
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
    """Site key -> squared norm of what its outputs on ``data`` lose by each of ``cuts``, float64 ``[len(cuts)]``."""
    found = {site.key: torch.zeros(len(cuts), dtype=torch.float64) for site in sites}

    def add(firing: Firing) -> None:
        site, real_T = firing.site, firing.real_T
        weights = site.weights(model)
        _, h_NI = intermediate(site, weights, firing.x_TH[real_T])
        down_HI, score_NI = weights.down.float(), firing.score_TI[real_T]
        for i, cut in enumerate(cuts):
            lost_NH = F.linear(h_NI * (score_NI <= cut[site.key]), down_HI)
            found[site.key][i] += lost_NH.square().sum(dtype=torch.float64)
        let_go(model, weights)

    record(model, data, sites, add, progress=progress, label="errors")
    return found
