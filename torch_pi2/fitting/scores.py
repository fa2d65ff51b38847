"""What ``|act(gate)|`` of a neuron is multiplied by, so that what it adds to the layer's output can be compared.

A neuron adds ``act(gate) * up * down row``, of which the gate alone is known before the other rows are read. CATS
(arXiv 2404.08763) compares ``|act(gate)|``: a neuron whose down row is ten times as long counts no more there. That
length is known beforehand, and the usual size of up is what weights or calibration text say (WINA, arXiv 2505.19427,
weights the inputs of matrices likewise).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.mapped import let_go
from torch_pi2.errors import ConfigError
from torch_pi2.fitting.sets import at_most
from torch_pi2.ops.activations import exact_zeros, on_up
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.firing import Firing
from torch_pi2.profiling.recorder import record
from torch_pi2.types.site import FFNSite

#: Tokens of which up is measured, and the least of a layer's mean that a neuron counts: thresholds are finite.
_TOKENS, _LEAST = 8192, 1e-4


def score_scales(
    model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], score: str, *, progress: bool = False
) -> dict[str, torch.Tensor]:
    """Site key -> ``[I]`` float32, with a mean of 1 over the layer's neurons; none for ``gate``.

    Args:
        sites: as :func:`read_first` has them.
        score: ``gate``: 1; ``norms``: norm of the down row times that of the up row; ``output`` and ``up``: norm of the
            down row times the root mean square of the second factor on ``data``.

    Raises:
        ConfigError: another score than ``gate`` for experts, whose operator has one threshold for each.
    """
    if score == "gate":
        return {}
    for site in sites:
        if site.experts is not None:
            raise ConfigError(
                f"score of {site.key}",
                expected="'gate': an expert has one threshold for all of its neurons",
                found=repr(score),
                fix="Choose score='gate'.",
            )
    up_I = _up_norms(model, sites) if score == "norms" else _up_sizes(model, data, sites, progress)
    scales = {}
    for site in sites:
        scale_I = _norms(model, site.weights(model).down, 0) * up_I[site.key]
        scale_I = scale_I / scale_I.mean().clamp_min(1e-30)
        scales[site.key] = scale_I.clamp_min(_LEAST)
    return scales


def read_first(site: FFNSite, score: str) -> FFNSite:
    """The layer with the matrix first that ``score`` is of; one with exact zeros as it is."""
    swaps = score == "up" and site.gated and not site.activation_on_up and not exact_zeros(site.activation)
    return site.swapped() if swaps else site


def _up_norms(model: nn.Module, sites: Sequence[FFNSite]) -> dict[str, torch.Tensor]:
    ones = {site.key: torch.ones(site.intermediate) for site in sites if not site.gated}
    return ones | {s.key: _norms(model, s.weights(model).up, 1) for s in sites if s.gated}


def _norms(model: nn.Module, weight: torch.Tensor, dim: int) -> torch.Tensor:
    norms: torch.Tensor = weight.detach().float().norm(dim=dim)
    let_go(model, [weight])
    return norms


def _up_sizes(model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], progress: bool) -> dict[str, torch.Tensor]:
    squares = {site.key: torch.zeros(site.intermediate) for site in sites}
    tokens = dict.fromkeys(squares, 0)

    def add(firing: Firing) -> None:
        site, x_NH = firing.site, firing.x_TH[firing.real_T]
        weights = site.weights(model)
        up_NI = F.linear(x_NH, weights.up, weights.bias_up).float()
        let_go(model, [weights.up])
        squares[site.key] += on_up(site.activation, site.activation_on_up)(up_NI).square().sum(0)
        tokens[site.key] += len(x_NH)

    gated = [site for site in sites if site.gated]
    if gated:
        record(model, at_most(data, _TOKENS), gated, add, progress=progress, label="scores")
    return {
        site.key: (squares[site.key] / max(1, tokens[site.key])).sqrt() if site.gated else torch.ones(site.intermediate)
        for site in sites
    }
