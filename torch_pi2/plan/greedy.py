"""The first plan: the most frequent neurons are hot; per layer the cheapest way of choosing among the others.

Greedy and measured on frequencies alone. The planner over measured hardware replaces the choice, not the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from torch_pi2.config import Config
from torch_pi2.errors import ConfigError
from torch_pi2.graph.sites import FFNSite
from torch_pi2.ops import ACTIVATIONS
from torch_pi2.ops.activations import SPARSE_ACTIVATIONS
from torch_pi2.plan.plan import LayerPlan, Plan

if TYPE_CHECKING:
    from torch_pi2.predict.lowrank import LowRank
    from torch_pi2.profile.stats import ActivationStats, LayerStats

# Bytes of a predictor's int8 weight over those of a 16-bit FFN weight.
_PREDICTOR_BYTES = 0.5


def gate_method(site: FFNSite) -> str:
    """The method that needs no predictor: ``exact`` where the activation has exact zeros, else ``threshold``."""
    assert site.activation in ACTIVATIONS
    return "exact" if site.activation in SPARSE_ACTIVATIONS else "threshold"


def gate_share(site: FFNSite, active: float) -> float:
    """Share of a cold neuron's bytes read when all first rows are computed and the rest where they fire."""
    rows = site.rows_per_neuron
    return (1 + (rows - 1) * active) / rows


def plan_layer(site: FFNSite, stats: LayerStats, predictor: LowRank | None, config: Config) -> LayerPlan:
    """Plan one FFN from its statistics. Raises ConfigError if ``lowrank`` is asked for and there is no predictor."""
    frequency_I = stats.frequency()
    order = torch.argsort(frequency_I, descending=True, stable=True).to(torch.int32)
    n_hot = int((frequency_I >= config.hot_frequency).sum())
    cold_active = float(frequency_I[order[n_hot:].long()].mean()) if n_hot < site.intermediate else 0.0
    layer = LayerPlan(site, gate_method(site), n_hot, order, stats.threshold, cold_active)
    if config.method == "dense" or n_hot == site.intermediate:
        return LayerPlan(site, "dense", site.intermediate, order, 0.0, 1.0)
    if config.method == "exact" and layer.method != "exact":
        layer.method, layer.threshold, layer.expected_active = "exact", 0.0, 1.0
    if predictor is None or predictor.card is None:
        if config.method == "lowrank":
            raise ConfigError(
                f"method of {site.key}",
                expected="a fitted predictor for 'lowrank'",
                found="none",
                fix="Call torch_pi2.fit first, or choose method='auto'.",
            )
        return layer
    predicted = predictor.card.predicted_active + _PREDICTOR_BYTES * predictor.card.cost_share
    if config.method == "lowrank" or (config.method == "auto" and predicted < gate_share(site, cold_active)):
        layer.method, layer.expected_active = "lowrank", predictor.card.predicted_active
    return layer


def greedy_plan(
    sites: Sequence[FFNSite],
    stats: ActivationStats,
    predictors: Mapping[str, LowRank] | None,
    config: Config,
) -> Plan:
    """The plan of a whole model; ``made_by`` records the settings and what they were measured on."""
    layers = [plan_layer(site, stats[site.key], (predictors or {}).get(site.key), config) for site in sites]
    made_by: dict[str, Any] = {"planner": "greedy", "config": asdict(config), "stats": stats.made_by}
    return Plan(layers, stats.model_hash, made_by)


def plan_without_data(sites: Sequence[FFNSite], model_hash: str, config: Config) -> Plan:
    """Exact gate (or dense) in the model's own neuron order: needs no calibration and is lossless."""
    dense = config.method == "dense"
    layers = []
    for site in sites:
        order = torch.arange(site.intermediate, dtype=torch.int32)
        layers.append(LayerPlan(site, "dense" if dense else "exact", site.intermediate if dense else 0, order))
    return Plan(layers, model_hash, {"planner": "none", "config": asdict(config)})
