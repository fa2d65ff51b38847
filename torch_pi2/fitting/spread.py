"""How skipping is spread over layers: more where it does less to what the model says next (allocation as in TEAL,
arXiv 2408.14690, by other prices).

What a layer's output loses by a threshold, squared, the layer alone tells. By how much that moves the distribution of
next tokens differs from layer to layer, and grows in proportion (a divergence is quadratic in small changes): one run
of the model a layer finds the factor. Divergences of layers add up, so that the best shares are those where one more
neuron costs the same in all layers. Losses in the place of divergences are too noisy to be prices; squares of single
neurons' contributions in the place of the output's miss that these have directions in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.mapped import let_go
from torch_pi2.fitting.loss import divergences
from torch_pi2.fitting.sets import evenly
from torch_pi2.graph.routed import intermediate
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.firing import Firing
from torch_pi2.profiling.recorder import record
from torch_pi2.spec.site import FFNSite

#: Shares at which a layer's error is taken, and that at which the model is run. Tokens of calibration data for both.
_SHARES, _PRICED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 0.6
_TOKENS = 2048

#: Share -> the cuts of all sites on their scores, each one or ``[I]``.
Cuts = Callable[[float], Mapping[str, float | torch.Tensor]]
#: Cuts of some sites -> a context inside which the model skips what is below.
Masked = Callable[[Mapping[str, float | torch.Tensor]], AbstractContextManager[Any]]


class Spread:
    """Shares of neurons to skip by layer; the experts of one module have one share.

    Args:
        data: some 2,000 tokens of it are used.
        cuts, masked: of all of ``sites``.
    """

    def __init__(
        self,
        model: nn.Module,
        data: list[Batch],
        sites: Sequence[FFNSite],
        cuts: Cuts,
        masked: Masked,
        *,
        progress: bool = False,
    ) -> None:
        self._groups: dict[str, list[FFNSite]] = {}
        for site in sites:
            self._groups.setdefault(site.experts or site.key, []).append(site)
        some = evenly(data, _TOKENS)
        errors = _errors(model, some, sites, [cuts(share) for share in _SHARES], progress)
        at = cuts(_PRICED)
        contexts = [masked({site.key: at[site.key] for site in own}) for own in self._groups.values()]
        found = divergences(model, some, contexts, progress=progress)
        self._costs: dict[str, torch.Tensor] = {}
        for (name, own), divergence in zip(self._groups.items(), found, strict=True):
            error = torch.stack([errors[site.key] for site in own]).sum(0)
            whole = float(error[_SHARES.index(_PRICED)])
            self._costs[name] = error * (divergence / whole if whole else 0.0)

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
        for x, y in zip(_SHARES, self._costs[name].tolist(), strict=True):
            while len(hull) > 1 and (y - hull[-1][1]) * (x - hull[-2][0]) <= (y - hull[-2][1]) * (x - hull[-1][0]):
                hull.pop()
            hull.append((x, y))
        return [((b - a) / (right - left), right - left) for (left, a), (right, b) in pairwise(hull)]


def _errors(
    model: nn.Module,
    data: list[Batch],
    sites: Sequence[FFNSite],
    cuts: Sequence[Mapping[str, float | torch.Tensor]],
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
