"""Drift between a plan and what fires: none where nothing changed, all where everything did; and statistics updated."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torch_pi2.errors import ConfigError, StaleArtifactError
from torch_pi2.observe.drift import Drift, drift, update
from torch_pi2.store.firing import power_law
from torch_pi2.types.machine_plan import Bucket, HardwarePlan, PromptPlan
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats

NEURONS, LAYERS, HOT = 2000, 3, 300


def site(index: int) -> FFNSite:
    key = f"layers.{index}"
    refs = (LinearRef(f"{key}.{name}.weight") for name in ("gate", "up", "down"))
    return FFNSite(key, index, "relu", False, *refs, 8, NEURONS, key)


def sampled(
    p_LI: torch.Tensor,
    tokens: int,
    seed: int,
    *,
    sizes: tuple[int, ...] = (1, 4),
    experts: bool = False,
    **made_by: Any,
) -> ActivationStats:
    """Statistics of ``tokens`` tokens of which each neuron fires for its share, independently, and as many groups."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for i, p_I in enumerate(p_LI):
        grouped = [
            torch.binomial(
                torch.full((NEURONS,), float(tokens)).double(), 1 - (1 - p_I) ** s, generator=generator
            ).long()
            for s in sizes
        ]
        layers[f"layers.{i}"] = LayerStats(
            key=f"layers.{i}",
            layer=i,
            threshold=0.0,
            tokens=tokens,
            fired=grouped[0],
            zeros=tokens - grouped[0],
            abs_sum=torch.zeros(NEURONS, dtype=torch.float64),
            batch_sizes=sizes,
            batch_groups=torch.full((len(sizes),), tokens),
            batch_fired=torch.stack(grouped),
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
            cofire_bits=torch.zeros((0, NEURONS // 8), dtype=torch.uint8),
            experts="block" if experts else None,
        )
    return ActivationStats(layers, "hash", {"tokens": tokens} | made_by)


def plan_of(stats: ActivationStats, *, hot: int = HOT, hardware: HardwarePlan | None = None) -> Plan:
    """The most frequent neurons of each layer hot."""
    layers = []
    for i, layer in enumerate(stats):
        order = torch.argsort(layer.frequency(), descending=True, stable=True).to(torch.int32)
        layers.append(LayerPlan(site(i), "lowrank", hot, order))
    return Plan(layers, stats.model_hash, {"stats": stats.made_by}, hardware)


@pytest.fixture(scope="module")
def p_LI() -> torch.Tensor:
    """Frequencies by layer, each in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    law = power_law(NEURONS, 0.1)
    return torch.stack([law[torch.randperm(NEURONS, generator=generator)] for _ in range(LAYERS)])


def shuffled(p_LI: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([p_I[torch.randperm(NEURONS, generator=generator)] for p_I in p_LI])


@pytest.mark.parametrize(("planned", "live"), [(1000, 300), (1000, 1000), (1000, 30_000), (30_000, 500)])
@pytest.mark.parametrize("batch", [1, 4])
def test_noise_is_no_drift(p_LI: torch.Tensor, planned: int, live: int, batch: int) -> None:
    plan = plan_of(sampled(p_LI, planned, 1))
    by_chance = drift(plan, sampled(p_LI, live, 2), batch=batch)
    # Without the rule, neurons of nearly the same frequency would make it large.
    order = torch.argsort(sampled(p_LI, live, 2)["layers.0"].frequency(batch), descending=True)[:HOT]
    naive = 1 - len(set(order.tolist()) & set(plan.layers[0].order[:HOT].tolist())) / HOT
    assert by_chance.share <= 0.02 < naive
    assert by_chance.tokens == live
    assert [layer.groups for layer in by_chance.layers] == [live] * LAYERS


def test_nothing_changed_at_all(p_LI: torch.Tensor) -> None:
    stats = sampled(p_LI, 1000, 1)
    assert drift(plan_of(stats), stats).share == 0


def test_a_shuffled_order_has_drifted(p_LI: torch.Tensor) -> None:
    plan = plan_of(sampled(p_LI, 1000, 1))
    found = drift(plan, sampled(shuffled(p_LI), 1000, 2))
    assert found.share > 0.8 * (1 - HOT / NEURONS)  # what is hot in both by accident has not
    assert found.worst.share == max(layer.share for layer in found.layers)
    few = drift(plan, sampled(shuffled(p_LI), 10, 2))
    assert few.share < found.share  # of ten tokens little can be said
    some_LI = p_LI.clone()
    some_LI[1] = shuffled(p_LI)[1]
    one = drift(plan, sampled(some_LI, 1000, 2))
    assert one.worst.key == "layers.1"
    assert one.share == pytest.approx(found.layers[1].share / LAYERS, abs=0.02)
    assert json.loads(json.dumps(one.to_json()))["layers"][1]["drifted"] == one.layers[1].drifted


def test_the_bucket_of_a_batch_decides(p_LI: torch.Tensor) -> None:
    none = (0,) * LAYERS
    buckets = (
        Bucket(1, hot=(HOT, 0, NEURONS), accelerator=none, resident=(100, 200, NEURONS)),
        Bucket(4, hot=(HOT, HOT, HOT), accelerator=none, resident=none),
    )
    hardware = HardwarePlan({}, None, 0, 128, buckets, PromptPlan(none))
    stats = sampled(p_LI, 1000, 1)
    plan, live = plan_of(stats, hot=0, hardware=hardware), sampled(shuffled(p_LI), 1000, 2)
    one, four = drift(plan, live), drift(plan, live, batch=4)
    assert [layer.hot for layer in one.layers] == [HOT, 0, NEURONS]
    assert [layer.drifted > 0 for layer in one.layers] == [True, False, False]  # of no neurons, or all, none can
    assert [layer.resident_drifted > 0 for layer in one.layers] == [True, True, False]
    assert one.resident_share == sum(y.resident_drifted for y in one.layers) / (300 + NEURONS)
    assert [layer.hot for layer in four.layers] == [HOT] * LAYERS
    assert four.share > 0.5
    assert four.resident_share == 0


def test_layers_without_tokens_say_nothing(p_LI: torch.Tensor) -> None:
    stats = sampled(p_LI, 500, 1, sizes=(1,), experts=True)
    plan, live = plan_of(stats), sampled(shuffled(p_LI), 500, 2, sizes=(1,), experts=True)
    silent = live["layers.2"]
    silent.tokens, silent.batch_groups = 0, torch.zeros(1, dtype=torch.int64)
    found = drift(plan, live, batch=4)  # experts: by their tokens
    assert [layer.groups for layer in found.layers] == [500, 500, 0]
    assert found.layers[2].drifted == 0
    assert found.share == (found.layers[0].drifted + found.layers[1].drifted) / (2 * HOT)


def test_what_drift_refuses(p_LI: torch.Tensor) -> None:
    stats = sampled(p_LI, 100, 1)
    plan, other = plan_of(stats), sampled(p_LI, 100, 2)
    other.model_hash = "another"
    with pytest.raises(
        StaleArtifactError, match=r"live statistics: expected FFN weights hash, found another. Watch the"
    ):
        drift(plan, other)
    with pytest.raises(ConfigError, match=r"expected 1 to 4 .*, found 8"):
        drift(plan, stats, batch=8)
    del stats.layers["layers.1"]
    with pytest.raises(ConfigError, match=r"layer in the activation statistics: .* found 'layers.1'"):
        drift(plan, stats)
    assert Drift(1, 5, ()).share == 0


def test_an_update_counts_every_token(p_LI: torch.Tensor) -> None:
    stats, live = sampled(p_LI, 300, 1, sizes=(1, 2), verb="profile"), sampled(shuffled(p_LI), 100, 2, sizes=(1, 4))
    before = stats["layers.0"].fired.clone()
    both = update(stats, live)
    assert torch.equal(stats["layers.0"].fired, before)
    merged = both["layers.0"]
    assert torch.equal(merged.fired, before + live["layers.0"].fired)
    assert torch.equal(merged.zeros, 400 - merged.fired)
    assert (merged.batch_sizes, merged.batch_groups.tolist()) == ((1, 2, 4), [400, 300, 100])
    assert torch.equal(merged.batch_fired[1], stats["layers.0"].batch_fired[1])
    assert torch.equal(merged.batch_fired[2], live["layers.0"].batch_fired[1])
    assert both.made_by == {"verb": "profile", "tokens": 400, "updated": {"tokens": 100, "weight": None}}
    assert both.tokens == 400


@pytest.mark.parametrize(("weight", "tokens"), [(0.5, (100, 100)), (0.1, (300, 33)), (0.9, (11, 100))])
def test_a_weight_makes_the_other_count_less(p_LI: torch.Tensor, weight: float, tokens: tuple[int, int]) -> None:
    stats, live = sampled(p_LI, 300, 1), sampled(shuffled(p_LI), 100, 2)
    merged = update(stats, live, weight)["layers.0"]
    assert merged.tokens == sum(tokens)
    wanted = (tokens[0] * stats["layers.0"].frequency() + tokens[1] * live["layers.0"].frequency()) / sum(tokens)
    assert float((merged.frequency() - wanted).abs().max()) <= 1.5 / sum(tokens)
    assert int(merged.fired.max()) <= merged.tokens
    # a plan of what weighs more is nearer to it
    plan = plan_of(update(stats, live, 0.9))
    assert drift(plan, sampled(shuffled(p_LI), 1000, 3)).share < drift(plan_of(stats), live).share / 4


def test_what_an_update_refuses(p_LI: torch.Tensor) -> None:
    stats, live = sampled(p_LI, 300, 1), sampled(p_LI, 100, 2)
    for weight in (0.0, 1.0, -1.0):
        with pytest.raises(
            ConfigError, match=r"weight of the live statistics: expected more than 0, less than 1, found"
        ):
            update(stats, live, weight)
    live["layers.1"].threshold = 0.5
    with pytest.raises(
        ConfigError, match=r"of layers.1: expected threshold 0.0, 2000 neurons, found threshold 0.5, 2000"
    ):
        update(stats, live)
    del live.layers["layers.1"]
    with pytest.raises(
        ConfigError, match=r"expected layers.0, layers.1, layers.2, found layers.0, layers.2. Watch the"
    ):
        update(stats, live)
    live.model_hash = "another"
    with pytest.raises(StaleArtifactError, match="found another"):
        update(stats, live)
