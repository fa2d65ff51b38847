"""The first plan: the most frequent neurons are hot; per layer the cheapest way of choosing among the others.

Greedy and measured on frequencies alone. The planner over measured hardware replaces the choice, not the format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from torch_pi2.config import Config
from torch_pi2.errors import ConfigError
from torch_pi2.graph.sites import FFNSite
from torch_pi2.ops import ACTIVATIONS
from torch_pi2.ops.activations import SPARSE_ACTIVATIONS
from torch_pi2.plan.plan import PREDICTED, LayerPlan, Plan

if TYPE_CHECKING:
    from torch_pi2.predict.size import AnyPredictor
    from torch_pi2.profile.stats import ActivationStats

_log = logging.getLogger("torch_pi2")


def gate_method(site: FFNSite) -> str:
    """The method that needs no predictor: ``exact`` where the activation has exact zeros, else ``threshold``."""
    assert site.activation in ACTIVATIONS
    return "exact" if site.activation in SPARSE_ACTIVATIONS else "threshold"


def gate_share(site: FFNSite, active: float) -> float:
    """Share of a cold neuron's bytes read when all first rows are computed and the rest where they fire."""
    rows = site.rows_per_neuron
    return (1 + (rows - 1) * active) / rows


def hot_cut(site: FFNSite, config: Config) -> float:
    """Firing frequency from which a neuron is hot, when a predictor chooses among the others.

    ``config.hot_frequency`` for ReLU-family layers. Where firing is defined by a threshold, the average neuron fires
    ``1 - sparsity`` of the time by definition, so the cut lies as far above that as hot_frequency lies above 0.
    """
    if gate_method(site) == "exact":
        return config.hot_frequency
    return 1 - (1 - config.hot_frequency) * config.sparsity


def plan_layer(
    site: FFNSite, all_stats: ActivationStats, predictor: AnyPredictor | None, config: Config, weight_bytes: int
) -> LayerPlan:
    """Plan one FFN from its statistics.

    Args:
        weight_bytes: of one FFN weight, to compare what a predictor reads with what it saves.

    Raises:
        ConfigError: ``lowrank`` is asked for and there is no predictor, or the statistics were taken with another
            ``sparsity`` than the one to plan for.
    """
    stats = all_stats[site.key]
    frequency_I = stats.frequency()
    order = torch.argsort(frequency_I, descending=True, stable=True).to(torch.int32)
    dense = LayerPlan(site, "dense", site.intermediate, order, 0.0, 1.0)
    if config.method == "dense":
        return dense
    gate = gate_method(site) if config.method != "exact" else "exact"
    if gate == "threshold":
        _check_threshold(site, all_stats, config)
    n_hot = int((frequency_I >= hot_cut(site, config)).sum())
    if n_hot == site.intermediate and not (gate == "threshold" and config.method in ("auto", "threshold")):
        _log.warning("%s: every neuron fires too often to be worth choosing; it stays dense", site.key)
        return dense

    active = float(frequency_I.mean())
    if gate == "threshold":
        # Hot neurons would be spared the threshold and gain nothing for it: their gates are computed anyway.
        gated = LayerPlan(site, gate, 0, order, stats.threshold, active)
    elif gate_method(site) == "exact":
        cold_I = order[n_hot:].long()
        gated = LayerPlan(site, gate, n_hot, order, 0.0, float(frequency_I[cold_I].mean()))
    else:
        gated = LayerPlan(site, gate, n_hot, order, 0.0, 1.0)
    if predictor is None or predictor.card is None:
        if config.method in PREDICTED:
            raise ConfigError(
                f"method of {site.key}",
                expected=f"a fitted predictor for '{config.method}'",
                found="none",
                fix="Call torch_pi2.fit first, or choose method='auto'.",
            )
        return gated
    n_cold = site.intermediate - n_hot
    bundle_bytes = site.rows_per_neuron * site.hidden * weight_bytes
    predicted_bytes = n_hot * bundle_bytes + predictor.card.bytes
    predicted_bytes += int(predictor.card.predicted_active * n_cold * bundle_bytes)
    gated_bytes = site.intermediate * gate_share(site, active) * bundle_bytes
    kind = getattr(predictor, "kind", "lowrank")
    if config.method in PREDICTED and config.method != kind:
        raise ConfigError(
            f"predictor of {site.key}",
            expected=f"one for method '{config.method}'",
            found=f"one for '{kind}'",
            fix="Fit again with this config (torch_pi2.fit(..., config=config)).",
        )
    if config.method == kind or (config.method == "auto" and predicted_bytes < gated_bytes):
        return LayerPlan(site, kind, n_hot, order, 0.0, predictor.card.predicted_active)
    return gated


def _check_threshold(site: FFNSite, all_stats: ActivationStats, config: Config) -> None:
    found, wanted = all_stats[site.key].threshold, all_stats.threshold_for(site.key, config.sparsity)
    if found != wanted:
        raise ConfigError(
            f"threshold of {site.key}",
            expected=f"statistics taken with the threshold for sparsity {config.sparsity} ({wanted:.4g})",
            found=f"a threshold of {found:.4g}",
            fix="Profile again with this config (torch_pi2.profile(..., config=config)).",
        )


def greedy_plan(
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    predictors: Mapping[str, AnyPredictor] | None,
    config: Config,
    weight_bytes: int = 2,
) -> Plan:
    """The plan of a whole model; ``made_by`` records the settings and what they were measured on."""
    fitted = predictors or {}
    layers = [plan_layer(site, stats, fitted.get(site.key), config, weight_bytes) for site in sites]
    made_by: dict[str, Any] = {"planner": "greedy", "config": asdict(config), "stats": stats.made_by}
    return Plan(layers, stats.model_hash, made_by)


def plan_without_data(sites: Sequence[FFNSite], model_hash: str, config: Config) -> Plan:
    """Exact gate (or dense) in the model's own neuron order: needs no calibration and is lossless."""
    layers = []
    for site in sites:
        dense = config.method == "dense" and site.experts is None  # nothing of an expert is hot: exact, the same bits
        order = torch.arange(site.intermediate, dtype=torch.int32)
        layers.append(LayerPlan(site, "dense" if dense else "exact", site.intermediate if dense else 0, order))
    return Plan(layers, model_hash, {"planner": "none", "config": asdict(config)})
