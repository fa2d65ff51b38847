"""The greedy plan, by measured frequencies alone: the most frequent are hot; others get the layer's cheapest method."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from torch_pi2.base.fields import argument
from torch_pi2.base.progress import log
from torch_pi2.errors import ConfigError
from torch_pi2.ops import ACTIVATIONS
from torch_pi2.ops.activations import exact_zeros, of_all
from torch_pi2.predict import AnyPredictor
from torch_pi2.types.config import Config, described
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.plan import LayerPlan, Plan, in_own_order
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats, LayerStats


def gate_method(site: FFNSite) -> str:
    """The method without a predictor: ``exact`` where the activation has exact zeros, else ``threshold``."""
    assert site.activation in ACTIVATIONS
    return Method.EXACT if exact_zeros(site.activation) else Method.THRESHOLD


def hot_cut(site: FFNSite, stats: LayerStats, config: Config) -> float:
    """Firing frequency from which a neuron is hot when a predictor selects the others; infinity for experts.

    ``config.hot_frequency`` for ReLU-family layers. With a threshold the average neuron fires ``1 - sparsity`` of the
    time (``max_loss``: as measured), and the cut lies as far above that as hot_frequency lies above 0.
    """
    if site.experts is not None:
        return math.inf
    if gate_method(site) == "exact":
        return config.hot_frequency
    skipped = config.sparsity if config.max_loss is None else 1 - stats.active_share
    return 1 - (1 - config.hot_frequency) * skipped


def plan_layer(
    site: FFNSite, all_stats: ActivationStats, predictor: AnyPredictor | None, config: Config, weight_bytes: float
) -> LayerPlan:
    """Plan one FFN, or expert, from its statistics. ``weight_bytes``: of one FFN weight, to compare the bytes a
    predictor reads with those it saves. Raises ConfigError: no predictor, or statistics of another ``sparsity``.
    """
    stats = all_stats[site.key]
    frequency_I = stats.frequency()
    order = torch.argsort(frequency_I, descending=True, stable=True).to(torch.int32)
    dense = LayerPlan(site, Method.DENSE, site.intermediate, order, 0.0, 1.0)
    if config.method == Method.DENSE and site.experts is None:
        return dense
    if config.method == Method.CUSTOM:
        return _plan_custom(dense, predictor)
    gate = gate_method(site) if config.method not in (Method.EXACT, Method.DENSE) else Method.EXACT
    if gate == Method.THRESHOLD:
        _check_threshold(site, all_stats, config)
    n_hot = int((frequency_I >= hot_cut(site, stats, config)).sum())
    if n_hot == site.intermediate and not (gate == Method.THRESHOLD and config.method in ("auto", Method.THRESHOLD)):
        log.warning("%s: every neuron fires too often to be worth choosing; it stays dense", site.key)
        return dense

    active = float(frequency_I.mean())
    if gate == Method.THRESHOLD:
        # hot neurons would skip the threshold and save nothing, as all gates are computed anyway
        gated = LayerPlan(site, gate, 0, order, stats.threshold, active, stats.thresholds)
    elif gate_method(site) == "exact":
        cold_I = order[n_hot:].long()
        gated = LayerPlan(site, gate, n_hot, order, 0.0, float(frequency_I[cold_I].mean()))
    else:
        gated = LayerPlan(site, gate, n_hot, order, 0.0, 1.0)
    if of_all(site.activation):  # a predictor would skip some
        return gated
    if predictor is None or predictor.card is None:
        if config.method in PREDICTED:
            fix = "Call torch_pi2.fit first, or choose method='auto'."
            argument(config.method, f"method of {site.key}", fix).wrong(
                f"a fitted predictor for '{config.method}'", "none"
            )
        return gated
    kind = getattr(predictor, "kind", Method.LOWRANK)
    if config.method in PREDICTED and config.method != kind:
        fix = "Fit again with this config (torch_pi2.fit(..., config=config))."
        argument(kind, f"predictor of {site.key}", fix).wrong(f"one for method '{config.method}'", f"one for '{kind}'")
    predicted = LayerPlan(site, kind, n_hot, order, 0.0, predictor.card.predicted_active)
    read = predictor.card.bytes + predicted_bytes(predicted, weight_bytes)
    if config.method == kind or (config.method == "auto" and read < gated_bytes(site, active, weight_bytes)):
        return predicted
    return gated


def _plan_custom(dense: LayerPlan, method: Any) -> LayerPlan:
    """No neuron is hot: the method decides for all of them, by a mask or by thresholds that the kernels know."""
    if method is None:
        return dense if dense.site.experts is None else replace(dense, method=Method.EXACT, n_hot=0)
    active, cut_I = method.card.predicted_active, getattr(method, "cut_I", None)
    if dense.site.experts is not None:
        fix = "Use another method there."
        for there, found, expected in (
            (method.scope == "prompt", "scope 'prompt'", "scope 'token': a sequence's tokens go to different experts"),
            (cut_I is not None, "cut_I", "a method with select: an expert has one threshold"),
            (method.bias_H is not None, "bias_H", "a method without it: experts have no such bias"),
        ):
            if there:
                raise ConfigError(f"method of {dense.site.key}", expected=expected, found=found, fix=fix)
    if cut_I is None:
        return replace(dense, method=Method.CUSTOM, n_hot=0, expected_active=active)
    thresholds = cut_I.detach().float().cpu()
    least = max(float(thresholds.max()), torch.finfo(torch.float32).tiny)
    how: dict[str, Any] = {"threshold": least, "thresholds": thresholds}
    return replace(dense, method=Method.THRESHOLD, n_hot=0, expected_active=active, **how)


def predicted_bytes(layer: LayerPlan, weight_bytes: float) -> float:
    """Mean bytes that a token reads with a predictor: hot neurons and predicted ones."""
    neuron_bytes = layer.site.rows_per_neuron * layer.site.hidden * weight_bytes
    return (layer.n_hot + layer.expected_active * layer.n_cold) * neuron_bytes


def gated_bytes(site: FFNSite, active: float, weight_bytes: float) -> float:
    """Mean bytes that a token reads without a predictor, if the share ``active`` of the neurons fires."""
    rows = site.rows_per_neuron
    share = (1 + (rows - 1) * active) / rows  # of a neuron: its first row, and the others if it fires
    return site.intermediate * share * rows * site.hidden * weight_bytes


def plan_experts(
    sites: Sequence[FFNSite], stats: ActivationStats, predictors: Mapping, config: Config, weight_bytes: float
) -> list[LayerPlan]:
    """:func:`plan_layer` for experts of a module, of one method; predictors if all have some and read less together."""
    layers = [plan_layer(site, stats, predictors.get(site.key), config, weight_bytes) for site in sites]
    if len({layer.method for layer in layers}) == 1:
        return layers
    gated = [plan_layer(site, stats, None, config, weight_bytes) for site in sites]
    if {site.key for site in sites} - predictors.keys():
        return gated
    kinds = {getattr(predictors[site.key], "kind", Method.LOWRANK) for site in sites}
    asked = [replace(config, method=kind) for kind in kinds]
    predicted = [plan_layer(site, stats, predictors[site.key], asked[0], weight_bytes) for site in sites]
    read = sum(predicted_bytes(layer, weight_bytes) + _bytes(predictors[layer.site.key]) for layer in predicted)
    without = sum(gated_bytes(site, float(stats[site.key].frequency().mean()), weight_bytes) for site in sites)
    return predicted if len(kinds) == 1 and read < without else gated


def _bytes(predictor: AnyPredictor) -> int:
    return 0 if predictor.card is None else predictor.card.bytes


def _check_threshold(site: FFNSite, all_stats: ActivationStats, config: Config) -> None:
    made = {name: all_stats.made_by.get(name, getattr(Config, name)) for name in ("score", "max_loss")}
    if made != {name: getattr(config, name) for name in made}:
        expected = f"statistics taken with score={config.score!r} and max_loss={config.max_loss}"
        other = f"score={made['score']!r} and max_loss={made['max_loss']}"
        fix = "Profile again with this config (torch_pi2.profile(..., config=config))."
        raise ConfigError(f"threshold of {site.key}", expected=expected, found=other, fix=fix)
    if config.max_loss is not None:
        return
    found, wanted = all_stats[site.key].threshold, all_stats.threshold_for(site.key, config.sparsity)
    if found != wanted:
        expected = f"statistics taken with the threshold for sparsity {config.sparsity} ({wanted:.4g})"
        fix = "Profile again with this config (torch_pi2.profile(..., config=config))."
        raise ConfigError(f"threshold of {site.key}", expected=expected, found=f"a threshold of {found:.4g}", fix=fix)


def greedy_plan(
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    predictors: Mapping | None,
    config: Config,
    weight_bytes: float = 2,
) -> Plan:
    """The plan of a whole model; ``made_by`` records settings and calibration."""
    fitted = predictors or {}
    layers: list[LayerPlan] = []
    for name, group in groupby(sites, key=lambda site: site.experts):
        if name is None:
            layers += [plan_layer(site, stats, fitted.get(site.key), config, weight_bytes) for site in group]
        else:
            layers += plan_experts(list(group), stats, fitted, config, weight_bytes)
    made_by: dict[str, Any] = {"planner": "greedy", "config": described(config), "stats": stats.made_by}
    return Plan(layers, stats.model_hash, made_by)


def plan_without_data(sites: Sequence[FFNSite], model_hash: str, config: Config) -> Plan:
    """Exact gate (or dense) in the model's own neuron order: lossless, without calibration."""
    return Plan(in_own_order(sites, config.method), model_hash, {"planner": "none", "config": described(config)})
