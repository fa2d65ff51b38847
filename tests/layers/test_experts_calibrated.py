"""Mixtures of experts with calibration: thresholds and predictors of every expert from the tokens that it is given."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import nats_per_token
from tiny_experts import build, logits, off
from torch import nn

import torch_pi2
from torch_pi2.api import _fit, _profile
from torch_pi2.cli.inspect import describe, render
from torch_pi2.errors import NonFiniteError, UnsupportedModelError
from torch_pi2.eval.work import work
from torch_pi2.fitting.fit import fit as fit_predictors
from torch_pi2.fitting.fit import fit_layers
from torch_pi2.fitting.search import FitSettings
from torch_pi2.graph import FFNSite, find_sites
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.planner.hot_neurons import greedy_plan
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.predict.signbit import SignBit
from torch_pi2.profiling.data import MIN_TOKENS, batches
from torch_pi2.profiling.run import profile as profile_sites
from torch_pi2.rewrite.rewrite import apply
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.stats import ActivationStats

SMOOTH: dict[str, dict[str, Any]] = {
    "Mixtral": {"hidden_act": "silu"},
    "Qwen2Moe": {},
    "Qwen3Moe": {},
    "Olmoe": {"num_experts": 6},
}
TEXT = torch.randint(0, 96, (24, 32), generator=torch.Generator().manual_seed(1))
HELD = torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(2))
THRESHOLD = Config(method="threshold", sparsity=0.6)


def starved(**more: Any) -> nn.Module:
    """A Mixtral whose router gives expert 1 of the first block no token, and expert 2 of the second hardly any."""
    model = build("Mixtral", hidden_act="silu", **more)
    with torch.no_grad():
        first, second = (layer.mlp for layer in model.model.layers)
        own, x_TH = second.gate.forward, torch.zeros(0)
        first.gate.register_forward_hook(lambda _, args, out: (out[0], out[1], torch.where(out[2] == 1, 3, out[2])))
        assert own is not None
        assert not len(x_TH)

        def hardly(_: nn.Module, args: Any, out: Any) -> Any:
            index = torch.where(out[2] == 2, 0, out[2])
            index[0, 0] = 2
            return out[0], out[1], index

        second.gate.register_forward_hook(hardly)
    return model


@pytest.fixture(scope="module")
def smooth() -> nn.Module:
    return build("Mixtral", **SMOOTH["Mixtral"])


@pytest.fixture(scope="module")
def sites(smooth: nn.Module) -> list[FFNSite]:
    return find_sites(smooth)


@pytest.fixture(scope="module")
def stats(smooth: nn.Module, sites: list[FFNSite]) -> ActivationStats:
    return calibrated(smooth, sites)


def calibrated(model: nn.Module, sites: list[FFNSite]) -> ActivationStats:
    """As ``torch_pi2.profile``, of sites found before: capturing a model takes most of the time."""
    return _profile(model, list(batches(TEXT)), sites, THRESHOLD, progress=False)


def sparse(model: nn.Module, sites: list[FFNSite], stats: ActivationStats, config: Config, given: Any = None) -> Any:
    """As ``torch_pi2.optimize`` with statistics, of a copy."""
    plan = greedy_plan(sites, stats, given, config)
    return apply(copy.deepcopy(model), SparseState(plan, FittedPredictors(given or {}), stats), False, config)


def settings(**more: Any) -> dict[str, Any]:
    return {"batch_size": 8, "seq_len": 32, "progress": False} | more


# --- what is measured ---


@pytest.mark.parametrize(("implementation", "on_up"), [("eager", False), ("grouped_mm", True), ("batched_mm", False)])
def test_counts_are_those_of_a_plain_loop(smooth: nn.Module, sites: list[FFNSite], implementation: str, on_up: bool):
    model = copy.deepcopy(smooth)
    model.config._experts_implementation = implementation
    if on_up:
        sites = [copy.copy(site) for site in sites]
        for site in sites:
            object.__setattr__(site, "activation_on_up", True)
    routed: dict[str, list[Any]] = {}
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}.mlp.experts"
        layer.mlp.experts.register_forward_hook(lambda _, a, __, name=name: routed.setdefault(name, []).append(a))
    ids = TEXT[:8]
    stats = profile_sites(model, ids, sites, thresholds=0.1, **settings())
    assert stats.tokens == ids.numel()
    for site in sites:
        calls = routed[str(site.experts)]
        x_NH = torch.cat([x[(index == site.up.expert).any(-1)] for x, index, _ in calls])
        weights = site.weights(model)
        assert weights.gate is not None
        act = ACTIVATIONS[site.activation]
        score_NI = act(x_NH @ weights.gate.T)
        score_NI = (score_NI * act(x_NH @ weights.up.T) if on_up else score_NI).abs()
        found = stats[site.key]
        assert (found.tokens, found.experts, found.borrowed) == (len(x_NH), site.experts, 0)
        assert (found.fired - (score_NI > 0.1).sum(0)).abs().max() <= 1  # a score at the cut may go either way
        assert torch.allclose(found.abs_sum, score_NI.double().sum(0), rtol=1e-4)
        assert torch.allclose(stats[site.key].frequency(), found.fired.double() / len(x_NH))
    one_I = stats[sites[0].key].frequency()
    assert torch.equal(stats[sites[0].key].frequency(2), 1 - (1 - one_I) ** 2), "tokens of an expert are independent"
    assert sum(stats[site.key].tokens for site in sites) == 2 * 2 * ids.numel()  # two layers, two experts a token


def test_the_model_is_left_as_it_was(smooth: nn.Module, sites: list[FFNSite]) -> None:
    wanted = logits(smooth)
    experts: Any = smooth.model.layers[0].mlp.experts
    profile_sites(smooth, TEXT[:8], sites, **settings())
    with PredictedMaskMode(smooth, sites, {site.key: _Half(site) for site in sites}):
        assert off(logits(smooth), wanted) > 0.01
        assert "forward" in experts.__dict__
    assert "forward" not in experts.__dict__
    assert not experts._forward_hooks
    assert torch.equal(logits(smooth), wanted)


class _Half:
    """Predicts the first half of the neurons."""

    threshold = 0.5

    def __init__(self, site: FFNSite) -> None:
        self._n = site.intermediate

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        return (torch.arange(self._n) < self._n // 2).float().expand(len(x_TH), self._n)


def test_masked_experts_are_the_module_without_those_neurons(smooth: nn.Module, sites: list[FFNSite]) -> None:
    cut = copy.deepcopy(smooth)
    for layer in cut.model.layers:
        layer.mlp.experts.down_proj.data[:, :, 24:] = 0
    with PredictedMaskMode(smooth, sites, {site.key: _Half(site) for site in sites}) as mode:
        assert off(logits(smooth), logits(cut)) < 1e-5
    assert mode.cold_share == 0.5
    for expert in (0, 1, 3):
        cut.model.layers[1].mlp.experts.down_proj.data[expert] = smooth.model.layers[1].mlp.experts.down_proj[expert]
    with PredictedMaskMode(smooth, sites, {site.key: _Half(site) for site in [*sites[:4], sites[6]]}):
        assert off(logits(smooth), logits(cut)) < 1e-5  # of the second block expert 2 alone
    thresholds = {site.key: 1e9 for site in sites}
    for layer in cut.model.layers:
        layer.mlp.experts.down_proj.data.zero_()
    with PredictedMaskMode(smooth, sites, {site.key: _Half(site) for site in sites}, thresholds=thresholds):
        assert off(logits(smooth), logits(cut)) < 1e-5


def test_an_expert_with_few_tokens_is_measured_on_those_of_its_block(
    sites: list[FFNSite], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = starved()
    caplog.set_level(logging.WARNING, "torch_pi2")
    stats = calibrated(model, sites)
    none, few = stats["model.layers.0.mlp.experts.1"], stats["model.layers.1.mlp.experts.2"]
    assert none.tokens == none.borrowed >= MIN_TOKENS
    calls = 3  # batches of 8
    assert (few.tokens - few.borrowed) == calls
    assert few.borrowed >= MIN_TOKENS
    assert all(layer.borrowed == 0 for layer in stats if layer is not none and layer is not few)
    assert "2 of 8 experts were routed fewer than 64 calibration tokens (model.layers.0.mlp.experts.1" in caplog.text
    assert all(layer.threshold > 0 and layer.frequency().isfinite().all() for layer in stats)
    assert 0.3 < none.active_share < 0.5  # its own weights, its own threshold
    stats.save(tmp_path)
    read = ActivationStats.load(tmp_path)
    assert (read[none.key].borrowed, read[none.key].experts) == (none.borrowed, "model.layers.0.mlp.experts")
    assert stats[none.key].borrowed == none.tokens
    wanted = logits(model, HELD)
    assert 0.001 < off(logits(sparse(model, sites, stats, THRESHOLD), HELD), wanted) < 0.2
    cold = {site.key: torch.arange(48) for site in sites}
    predictors = fit_layers(
        model, list(batches(TEXT)), sites, stats, FitSettings(method="signbit"), cold=cold, progress=False
    )
    assert predictors.keys() == cold.keys()
    found = logits(sparse(model, sites, stats, Config(method="signbit", sparsity=0.6), predictors), HELD)
    assert 0 < off(found, wanted) < 0.2


# --- thresholds ---


@pytest.mark.parametrize("name", SMOOTH)
def test_a_calibrated_threshold_skips_the_share_that_was_asked_for(name: str, tmp_path: Path) -> None:
    model = build(name, **SMOOTH[name])
    wanted, loss, before = logits(model, HELD), nats_per_token(model, [HELD]), model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    assert torch_pi2.optimize(model, TEXT, THRESHOLD) is model
    layers = sparse_layers(model)
    assert {layer.method for layer in layers} == {"threshold"}
    experts = [layer for layer in layers if layer.site.experts is not None]
    for block in {layer.site.experts for layer in experts}:
        assert len({layer.threshold for layer in experts if layer.site.experts == block}) > 1  # each its own
    shared = [layer for layer in layers if layer.site.experts is None]
    assert len(shared) == (2 if name == "Qwen2Moe" else 0)
    with work() as done:
        logits(model, HELD)  # other tokens than those that it was calibrated on
    assert done.neurons_used == pytest.approx(0.4, abs=0.03)
    found = logits(model, HELD)
    assert 0.001 < off(found, wanted) < 0.2
    assert nats_per_token(model, [HELD]) == pytest.approx(loss, rel=0.05)
    torch_pi2.save(model, tmp_path / "saved")
    loaded = torch_pi2.load(tmp_path / "saved")
    assert torch.equal(logits(loaded, HELD), found)
    assert [layer.threshold for layer in sparse_layers(loaded)] == [layer.threshold for layer in layers]
    lines = [line for line in render(describe(tmp_path / "saved")).splitlines() if line.startswith("model.layers.")]
    of_experts = [line for line in lines if ".experts." in line]
    assert len(lines) - len(of_experts) == len(shared)
    assert len(of_experts) == len({layer.site.experts for layer in experts})
    assert all("experts.0-" in line and "threshold" in line for line in of_experts)
    torch_pi2.restore(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_exact_experts_lose_nothing_and_are_put_in_order(smooth: nn.Module, sites: list[FFNSite]) -> None:
    model = build("Mixtral")  # ReLU
    sites = [replace(site, activation="relu") for site in sites]
    wanted, stats = logits(model, HELD), calibrated(model, sites)
    for method in ("auto", "dense"):
        made = sparse(model, sites, stats, Config(method=method))
        layers = made.torch_pi2.plan.layers
        assert {(layer.method, layer.n_hot, layer.threshold) for layer in layers} == {("exact", 0, 0.0)}
        assert off(logits(made, HELD), wanted) < 1e-5
    fired = stats[layers[0].site.key].fired[layers[0].order.long()]
    assert torch.equal(fired, fired.sort(descending=True).values)


# --- predictors ---


def test_signbit_predictors_of_experts(
    smooth: nn.Module, sites: list[FFNSite], stats: ActivationStats, tmp_path: Path
) -> None:
    config = Config(method="signbit", sparsity=0.6, target_recall=0.8)
    wanted = logits(smooth, HELD)
    predictors = _fit(smooth, list(batches(TEXT)), sites, stats, config, False)
    assert set(predictors) == {site.key for site in sites}
    assert all(isinstance(p, SignBit) and p.card is not None and p.card.recall > 0.7 for p in predictors.values())
    model = sparse(smooth, sites, stats, config, predictors)
    experts: Any = model.model.layers[1].mlp.experts.sparse_ffn
    assert isinstance(experts, SparseExperts)
    assert experts.predictor_kind == "signbit"
    assert len(set(experts.cuts)) > 1
    with work() as done:
        found = logits(model, HELD)
    assert done.neurons_computed is not None
    assert done.neurons_computed < 0.95
    assert 0 < off(found, wanted) < 0.3
    with PredictedMaskMode(smooth, sites, predictors) as mode:
        assert off(logits(smooth, HELD), found) < 1e-4
    assert mode.cold_share == pytest.approx(done.neurons_computed, abs=1e-3)
    torch_pi2.save(model, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved"), HELD), found)


def test_lowrank_predictors_of_experts_have_one_rank(
    smooth: nn.Module, sites: list[FFNSite], stats: ActivationStats
) -> None:
    cold = {site.key: torch.arange(48) for site in sites}
    short = FitSettings(batch_size=8, seq_len=32, n_tokens=300, steps=8, max_rounds=1, tolerance=0.5)
    predictors = fit_predictors(smooth, TEXT, sites, stats, short, cold=cold, progress=False)
    assert predictors.report is not None
    assert predictors.report.met
    for block in (sites[:4], sites[4:]):
        assert len({predictors[site.key].rank for site in block}) == 1
    model = sparse(smooth, sites, stats, Config(method="lowrank", sparsity=0.6), predictors)
    with work() as done:
        found = logits(model, HELD)
    assert done.neurons_computed is not None
    assert 0 < done.neurons_computed < 1
    assert 0 < off(found, logits(smooth, HELD)) < 0.5
    short = predictors[sites[0].key]
    assert isinstance(short, LowRankRows)
    longer, x_TH = short.padded(short.rank + 5), torch.randn(4, 64)
    assert longer.rank == short.rank + 5
    assert torch.equal((longer.scores(x_TH) >= longer.threshold), (short.scores(x_TH) >= short.threshold))


def test_experts_of_a_block_have_one_method(smooth: nn.Module, sites: list[FFNSite], stats: ActivationStats) -> None:
    predictors: dict[str, Any] = {}
    for site in sites:
        gate = site.weights(smooth).gate
        assert gate is not None
        predictors[site.key] = SignBit.from_weights(gate)
        predictors[site.key].card = PredictorCard(1.0, 1.0, 0.05 if site.up.expert else 1.0, 10, 0.0)
    config = Config(sparsity=0.6)

    def methods(given: dict[str, Any]) -> list[set[str]]:
        layers = greedy_plan(sites, stats, given, config).layers
        return [{layer.method for layer in part} for part in (layers[:4], layers[4:])]

    # of expert 0 the predictor is worse than the threshold, of all four it is better
    assert methods(predictors) == [{"signbit"}, {"signbit"}]
    for site in sites[:3]:
        predictors[site.key].card = PredictorCard(1.0, 1.0, 1.0, 10, 0.0)
    assert methods(predictors) == [{"threshold"}, {"signbit"}]
    del predictors[sites[5].key]
    assert methods(predictors) == [{"threshold"}, {"threshold"}]


# --- stored ---


def test_calibrated_experts_are_quantised_packed_and_read(
    smooth: nn.Module, sites: list[FFNSite], stats: ActivationStats, tmp_path: Path
) -> None:
    float_model = sparse(smooth, sites, stats, THRESHOLD)
    torch_pi2.save(float_model, tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "int8", "int8")
    quantised = torch_pi2.load(tmp_path / "int8")
    wanted = logits(quantised, HELD)
    assert off(wanted, logits(float_model, HELD)) < 0.05
    with work() as done:
        logits(quantised, HELD)
    assert done.neurons_used == pytest.approx(0.4, abs=0.03)
    torch_pi2.pack(tmp_path / "int8", tmp_path / "store")
    least = torch_pi2.stats(torch_pi2.load(tmp_path / "store", budget="1GiB", context=16))["budget"].smallest
    for budget in (least, "1GiB"):
        stored = torch_pi2.load(tmp_path / "store", budget=budget, context=16)
        assert isinstance(stored.model.layers[0].mlp.experts.sparse_ffn, OffloadedExperts)
        assert torch.equal(logits(stored, HELD), wanted)
    assert torch_pi2.stats(stored)["wanted"] > 0


def test_padding_is_nobodys_token(smooth: nn.Module, sites: list[FFNSite]) -> None:
    model = copy.deepcopy(smooth)
    padded = {"input_ids": TEXT[:8].clone(), "attention_mask": torch.ones_like(TEXT[:8])}
    padded["attention_mask"][:, 20:] = 0
    whole = profile_sites(model, [{"input_ids": TEXT[:8, :20]}], sites, **settings())
    found = profile_sites(model, [padded], sites, **settings())
    for site in sites:
        assert found[site.key].tokens == whole[site.key].tokens
    assert sum(layer.tokens - layer.borrowed for layer in found) == 2 * 2 * 8 * 20


def test_what_cannot_be_measured_is_refused(smooth: nn.Module, sites: list[FFNSite]) -> None:
    broken = copy.deepcopy(smooth)
    router: Any = broken.model.layers[1].mlp.gate
    router.register_forward_hook(lambda _, args, out: (out[0], out[1] * float("inf"), out[2]))
    with pytest.raises(NonFiniteError, match=r"output of model.layers.1.mlp.experts: .* of 256 tokens"):
        profile_sites(broken, TEXT, sites, **settings())
    broken = copy.deepcopy(smooth)
    broken.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match=r"sites that never ran.*none for model.layers.1.mlp.experts\."):
        profile_sites(broken, TEXT, sites, **settings())
