"""Thresholds on scores of neurons, below which layers without exact zeros skip them.

With ``sparsity`` every layer skips the same share (CATS, arXiv 2404.08763). With ``max_loss`` a budget of loss is
divided among the layers (:class:`Scored`).

A neuron adds ``act(gate) * up * down row``, and only the gate is known before the other rows are read. CATS compares
``|act(gate)|``, whatever the length of the down row. That length is known beforehand, and calibration text shows the
usual size of up (WINA, arXiv 2505.19427, weights the inputs of matrices likewise). The other scores multiply
``|act(gate)|`` by both, which approximates a neuron's contribution to the layer's output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.base.fields import to_json
from torch_pi2.base.memory import let_go
from torch_pi2.base.progress import bar, log
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.fitting.loss import causal_lm_loss, divergences, mean_loss
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.ops.activations import exact_zeros, on_up
from torch_pi2.profiling.data import Batch, at_most, evenly, split
from torch_pi2.profiling.recorder import Firing, record
from torch_pi2.profiling.run import profile
from torch_pi2.types.config import Config
from torch_pi2.types.method import PREDICTED
from torch_pi2.types.site import FFNSite, intermediate
from torch_pi2.types.stats import LossCurve, LossPoint

#: Tokens on which up is measured; minimum scale relative to the layer's mean, so that thresholds stay finite.
_TOKENS, _LEAST = 8192, 1e-4
#: Shares at which a layer's error is measured; the share at which the model runs; calibration tokens for each.
_SHARES, _MODEL_SHARE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 0.6
_ALLOCATION_TOKENS, _DIVERGENCE_TOKENS = 2048, 1024
#: Shares of neurons at which the loss curve is measured; bisections of the step that crosses the budget.
_CURVE, _HALVINGS = tuple(n / 10 for n in range(1, 10)), 5
_EVAL_TOKENS = 16_384

#: Site key -> cut on the output of its first matrix, one number or ``[I]``.
Cuts = Mapping[str, float | torch.Tensor]


def score_scales(
    model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], score: str, *, progress: bool = False
) -> dict[str, torch.Tensor]:
    """Site key -> ``[I]`` float32 with mean 1: the norm of the down row times the root mean square of the second factor
    on ``data``; empty for the score ``gate``. ``sites``: from :func:`read_first`. Raises ConfigError: a score other
    than ``gate`` for experts, whose operator has one threshold per expert.
    """
    if score == "gate":
        return {}
    for site in sites:
        if site.experts is not None:
            expected = "'gate': an expert has one threshold for all of its neurons"
            raise ConfigError(f"score of {site.key}", expected=expected, found=repr(score), fix="Choose score='gate'.")
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
    scales = {}
    for site in sites:
        down_HI = site.weights(model).down
        scale_I = down_HI.detach().float().norm(dim=0)
        let_go(model, [down_HI])
        if site.gated:
            scale_I *= (squares[site.key] / max(1, tokens[site.key])).sqrt()
        scales[site.key] = (scale_I / scale_I.mean().clamp_min(1e-30)).clamp_min(_LEAST)
    return scales


def read_first(site: FFNSite, score: str) -> FFNSite:
    """``site`` with the matrix first that ``score`` reads; unchanged if it has exact zeros."""
    swaps = score == "up" and site.gated and not site.activation_on_up and not exact_zeros(site.activation)
    return site.swapped() if swaps else site


def masked(model: nn.Module, sites: Sequence[FFNSite], cuts: Cuts) -> PredictedMaskMode:
    """A context inside which ``model`` skips neurons of the sites in ``cuts`` that are not above them."""
    return PredictedMaskMode(model, sites, dict.fromkeys(cuts), thresholds=cuts)


@dataclass(frozen=True)
class Thresholds:
    """Thresholds (``cuts``) by site key. ``sites``: with the matrix first that their score reads. ``scales``: see
    :func:`score_scales`. ``made_by``: ``score``; with a loss budget the fields of a
    :class:`~torch_pi2.types.stats.LossCurve`.
    """

    sites: Sequence[FFNSite] = ()
    cuts: dict[str, float] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)

    def masked(self, model: nn.Module) -> PredictedMaskMode:
        """:func:`masked` by these thresholds."""
        return masked(model, self.sites, _cuts_on_outputs(self.cuts, self.scales))


def _cuts_on_outputs(cuts: Mapping[str, float], scales: Mapping[str, torch.Tensor]) -> Cuts:
    """``cuts`` on scores as cuts on the outputs of first matrices."""
    return {key: cut / scales[key] if key in scales else cut for key, cut in cuts.items()}


class _Score:
    """One kind of score, measured on ``data``."""

    def __init__(
        self, model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], score: str, config: Config, progress: bool
    ) -> None:
        self.sites = [read_first(site, score) for site in sites]
        self.scales = score_scales(model, data, self.sites, score, progress=progress)
        settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        self._stats = profile(model, data, self.sites, scales=self.scales, progress=progress, **settings)

    def cut(self, key: str, share: float) -> float:
        """The threshold with which a layer skips ``share`` of its neurons; 0 for no neurons."""
        return self._stats.threshold_for(key, share) if share else 0.0

    def output_cuts(self, share: float) -> Cuts:
        """Cuts of all layers on the outputs of their first matrices."""
        return _cuts_on_outputs({site.key: self.cut(site.key, share) for site in self.sites}, self.scales)


def _score_names(config: Config, sites: Sequence[FFNSite]) -> tuple[str, ...]:
    """The scores of ``config.score``; for ``auto``: experts have one threshold, and predictors learn up less well."""
    if config.score != "auto":
        return (config.score,)
    if any(site.experts for site in sites):
        return ("gate",)
    return ("output",) if config.method in PREDICTED else ("output", "up")


def _errors(model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], cuts: Sequence, progress: bool) -> dict:
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


class Scored:
    """Scores of a model's layers on ``data``, and thresholds on them. Arguments as for :func:`choose_thresholds`.

    :meth:`allocate` decides what share of its neurons each layer skips: more where that changes the model's predictions
    less. It follows TEAL (arXiv 2408.14690) with other costs. The squared error that a threshold causes in a layer's
    output is measured on the layer alone. How much this error moves the distribution of next tokens differs between
    layers and is proportional to it (a divergence is quadratic in small changes), so one run of the model per layer
    finds the factor. Divergences of layers add up: the best shares are those at which one more neuron costs the same in
    all layers. Losses are too noisy to serve as costs, and squared contributions of single neurons would ignore that
    these have directions in common.

    With several scores (``auto``), each layer uses the one that costs least at its share: up tells small contributions
    apart better, the activated gate large ones. All experts of a module share one share and one score.
    """

    def __init__(
        self, model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], config: Config, *, progress: bool = False
    ) -> None:
        self.model = model
        self._scores = [_Score(model, data, sites, name, config, progress) for name in _score_names(config, sites)]
        self._groups: dict[str, list[FFNSite]] = {}
        for site in self._scores[0].sites:
            self._groups.setdefault(site.experts or site.key, []).append(site)
        self._costs: dict[str, np.ndarray] = {}  # [scores, shares] in nats, after allocate

    def allocate(self, data: list[Batch], *, progress: bool = False) -> None:
        """Measure on about 2,000 tokens of ``data`` what each score costs each layer at each share."""
        some = evenly(data, _ALLOCATION_TOKENS)
        by_score = [self._measure(some, score, progress) for score in self._scores]
        self._costs = {name: np.stack([costs[name] for costs in by_score]) for name in self._groups}

    def _measure(self, data: list[Batch], score: _Score, progress: bool) -> dict[str, np.ndarray]:
        """Costs of each layer at all shares."""
        errors = _errors(self.model, data, score.sites, [score.output_cuts(share) for share in _SHARES], progress)
        at = score.output_cuts(_MODEL_SHARE)
        contexts = [masked(self.model, score.sites, {y.key: at[y.key] for y in own}) for own in self._groups.values()]
        found = divergences(self.model, evenly(data, _DIVERGENCE_TOKENS), contexts, progress=progress)
        costs = {}
        for (name, own), divergence in zip(self._groups.items(), found, strict=True):
            error = torch.stack([errors[site.key] for site in own]).sum(0)
            whole = float(error[_SHARES.index(_MODEL_SHARE)])
            costs[name] = (error * (divergence / whole if whole else 0.0)).numpy()
        return costs

    def shares(self, mean: float) -> dict[str, float]:
        """Site key -> share to skip, after :meth:`allocate`; the mean over all neurons is ``mean``, at most 0.95."""
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

    def thresholds(self, shares: float | Mapping[str, float]) -> Thresholds:
        """Thresholds with which layers skip ``shares`` of their neurons: one share for all, or by site key."""
        sites: list[FFNSite] = []
        chosen = Thresholds(sites)
        for at, site in enumerate(self._scores[0].sites):
            share = shares[site.key] if isinstance(shares, Mapping) else shares
            # the score that costs least at this share; the first before allocate()
            costs = self._costs.get(site.experts or site.key, np.zeros((1, len(_SHARES))))
            each = self._scores[int(np.argmin([np.interp(share, _SHARES, of_score) for of_score in costs]))]
            sites.append(each.sites[at])
            chosen.cuts[site.key] = each.cut(site.key, share)
            if site.key in each.scales:
                chosen.scales[site.key] = each.scales[site.key]
        return chosen


def choose_thresholds(
    model: nn.Module, data: list[Batch], sites: Sequence[FFNSite], config: Config, *, progress: bool = False
) -> Thresholds:
    """Thresholds of ``sites``, whose activations have no exact zeros, by ``score``, ``sparsity`` or ``max_loss``.
    Raises ConfigError: see :func:`score_scales`. CalibrationError: fewer than 10 sequences with ``max_loss``; no
    next-token logits, which ``max_loss`` and the comparison of several scores need.
    """
    several = len(_score_names(config, sites)) > 1
    if config.max_loss is not None or several:
        _check_next_token_logits(model, data[0], config)
    if config.max_loss is None:
        scored = Scored(model, data, sites, config, progress=progress)
        if several:
            scored.allocate(data, progress=progress)  # measures what each score costs a layer
        return replace(scored.thresholds(config.sparsity), made_by={"score": config.score})
    sets = split(data, config.batch_size)
    scored = Scored(model, [*sets["fit"], *sets["calibrate"]], sites, config, progress=progress)
    scored.allocate(sets["calibrate"], progress=progress)
    held_out = at_most(sets["evaluate"], _EVAL_TOKENS)
    curve, share = _largest_share(scored, held_out, config, config.max_loss, progress)
    if not share:
        log.warning("no neuron can be skipped within max_loss=%g: thresholds are 0", config.max_loss)
    return replace(scored.thresholds(scored.shares(share)), made_by=to_json(curve))


def _check_next_token_logits(model: nn.Module, batch: Batch, config: Config) -> None:
    try:
        divergences(model, [batch], [])
    except CalibrationError as error:
        setting = f"score='{config.score}'" if config.max_loss is None else f"max_loss={config.max_loss:g}"
        expected = "a model that takes token ids and gives logits [B, T, vocabulary], to measure what skipping does"
        what = f"thresholds of {type(model).__name__} with {setting}"
        fix = "Choose score='output' or 'up', and sparsity=... without max_loss."
        raise CalibrationError(what, expected=expected, found="a different model", fix=fix) from error


def _largest_share(
    scored: Scored, held_out: list[Batch], config: Config, max_loss: float, progress: bool
) -> tuple[LossCurve, float]:
    """The loss curve on ``held_out``, and the largest share that raises the loss by at most ``max_loss``."""
    model, points = scored.model, dict[float, tuple[float, float]]()

    def fits(share: float) -> bool:
        skips = scored.thresholds(scored.shares(share)).masked(model)
        loss, skipped = mean_loss(model, held_out, causal_lm_loss, skips, shown.update)
        points[share] = skipped, loss / dense - 1
        return points[share][1] <= max_loss

    total = (1 + len(_CURVE) + _HALVINGS) * len(held_out)
    with bar(None, "loss curve", progress, total=total, unit="batch") as shown:
        dense, _ = mean_loss(model, held_out, causal_lm_loss, None, shown.update)
        first = next((i for i, share in enumerate(_CURVE) if not fits(share)), len(_CURVE))
        low, high = (0.0, *_CURVE)[first], (*_CURVE, 1.0)[first]
        for _ in range(_HALVINGS if high < 1 else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    change = points[low][1] if low else 0.0
    curve = tuple(LossPoint(*point) for point in sorted(points.values()))
    return LossCurve(score=config.score, max_loss=max_loss, loss_change=change, loss_curve=curve), low
