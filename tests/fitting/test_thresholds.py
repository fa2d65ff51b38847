"""Scores and loss budgets for layers without exact zeros, on a SwiGLU model that is right about its own text."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_experts
import tiny_models
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import INTERMEDIATE

import torch_pi2
from torch_pi2 import errors
from torch_pi2.base.fields import to_json
from torch_pi2.cli.inspect import describe, render
from torch_pi2.fitting import loss as loss_module
from torch_pi2.fitting import thresholds
from torch_pi2.fitting.loss import causal_lm_loss, divergences, mean_loss
from torch_pi2.fitting.thresholds import _SHARES, read_first, score_scales
from torch_pi2.graph import find_sites
from torch_pi2.graph.dispatch import NeuronClusterMode
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.observe import counters
from torch_pi2.profiling.data import Batch, batches, split
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats, LossCurve

QUICK = {"calibration_tokens": 4000, "seq_len": 32}


@cache
def own_text() -> torch.Tensor:
    """What the model itself would say: whatever is left out of it makes it worse at this."""
    torch.manual_seed(11)
    start = torch.randint(0, 64, (120, 1))
    settings = {"max_new_tokens": 31, "min_new_tokens": 31, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    return tiny_models.tiny("llama").generate(start, **settings)


def optimised(**config: object) -> torch.nn.Module:
    model = tiny_models.tiny("llama")
    return torch_pi2.optimize(model, own_text(), torch_pi2.Config(method="threshold", **(QUICK | config)))


def held_out() -> list:
    return split(list(batches(own_text(), batch_size=8, seq_len=32)), 8)["evaluate"]


@torch.no_grad()
def loss(model: torch.nn.Module) -> float:
    parts = [causal_lm_loss(model, batch) for batch in held_out()]
    return sum(total for total, _ in parts) / sum(count for _, count in parts)


@torch.no_grad()
def logits(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    return model(ids_BT).logits


def spread_of(model: torch.nn.Module, **config: object) -> thresholds.Scored:
    data, settings = list(batches(own_text(), batch_size=8, seq_len=32)), torch_pi2.Config(**(QUICK | config))
    scored = thresholds.Scored(model, data, find_sites(model), settings)
    scored.allocate(data)
    return scored


@pytest.mark.parametrize("score", ["gate", "auto"])
def test_layers_that_matter_less_skip_more(score: str) -> None:
    model = tiny_models.tiny("llama")
    sites = find_sites(model)
    with torch.no_grad():
        sites[0].weights(model).down.mul_(0.05)
    scored = spread_of(model, score=score)
    for mean in (0.0, 0.1, 0.35, 0.6, 0.95):
        shares = scored.shares(mean)
        assert sum(shares.values()) / len(sites) == pytest.approx(mean)
        assert shares[sites[0].key] > max(shares.values()) - 1e-9
    shares = scored.shares(0.5)
    assert shares[sites[0].key] > shares[sites[1].key] + 0.1

    kl = {}
    for name, own in (("spread", shares), ("same", dict.fromkeys(shares, 0.5))):
        (kl[name],) = divergences(model, held_out(), [scored.thresholds(own).masked(model)])
    assert kl["spread"] < 0.9 * kl["same"]


def test_with_auto_a_layer_has_the_score_that_costs_least_at_its_share() -> None:
    model = tiny_models.tiny("llama")
    sites = find_sites(model)
    by_score = {score: spread_of(model, score=score) for score in ("output", "up")}
    scored = spread_of(model, score="auto")
    for share in (0.2, 0.5, 0.8, 0.95):
        shares = dict.fromkeys((site.key for site in sites), share)
        for site, chosen in zip(sites, scored.thresholds(shares).sites, strict=True):
            cost = {score: float(np.interp(share, _SHARES, of._costs[site.key][0])) for score, of in by_score.items()}
            assert chosen.up_first == (cost["up"] < cost["output"])
        assert sum(scored.shares(share).values()) == pytest.approx(share * len(sites))
    with torch.no_grad():  # in the first layer gates tell nothing, in the second up
        for matrix in (sites[0].weights(model).gate, sites[1].weights(model).up):
            matrix.copy_(matrix[:1].clone().expand_as(matrix))
    torch_pi2.optimize(model, own_text(), method="threshold", score="auto", sparsity=0.5, **QUICK)
    assert [layer.site.up_first for layer in model.torch_pi2.plan.layers] == [True, False]


@pytest.mark.parametrize("score", ["gate", "auto"])
def test_experts_of_a_module_skip_one_share(score: str) -> None:
    model = tiny_experts.build("Mixtral", hidden_act="silu")
    sites = find_sites(model)
    data = list(batches(torch.randint(0, 64, (16, 32)), batch_size=8, seq_len=32))
    scored = thresholds.Scored(model, data, sites, torch_pi2.Config(score=score, **QUICK))
    scored.allocate(data)
    shares = scored.shares(0.4)
    assert not scored.thresholds(shares).scales
    assert shares.keys() == {site.key for site in sites}
    assert len({(site.experts, shares[site.key]) for site in sites}) == len({site.experts for site in sites})


def test_divergences_are_means_over_real_tokens() -> None:
    model = tiny_models.tiny("llama")
    ids = own_text()[:3, :16]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :5] = False
    scored = spread_of(model)
    skips = scored.thresholds(0.7).masked(model)
    found = divergences(model, [Batch(ids[:2], mask[:2]), Batch(ids[2:], mask[2:])], [nullcontext(), skips])
    assert found[0] == 0
    with torch.no_grad():
        dense = torch.cat([model(ids[:2], attention_mask=mask[:2].long()).logits, model(ids[2:]).logits])
        with skips:
            sparse = torch.cat([model(ids[:2], attention_mask=mask[:2].long()).logits, model(ids[2:]).logits])
    p, q = dense[mask].double().softmax(-1), sparse[mask].double().softmax(-1)
    assert found[1] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_what_scores_are() -> None:
    model = tiny_models.tiny("llama")
    sites, data = find_sites(model), list(batches(own_text(), batch_size=8, seq_len=32))
    assert score_scales(model, data, sites, "gate") == {}
    seen: dict[str, list[torch.Tensor]] = {ref.weight: [] for site in sites for ref in (site.gate, site.up)}
    for name, found in seen.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_hook(lambda _, __, y, found=found: found.append(y.detach().flatten(0, 1)))
    for batch in data:
        logits(model, batch.input_ids)
    for score in ("output", "up"):
        scales = score_scales(model, data, [read_first(site, score) for site in sites], score)
        for site in sites:
            weights = site.weights(model)
            gate_TI, up_TI = (torch.cat(seen[ref.weight]) for ref in (site.gate, site.up))
            second_TI = F.silu(gate_TI) if score == "up" else up_TI
            wanted = weights.down.norm(dim=0) * second_TI.square().mean(0).sqrt()
            torch.testing.assert_close(scales[site.key], wanted / wanted.mean())


@pytest.mark.parametrize("score", ["output", "up"])
def test_neurons_are_skipped_where_their_score_is_below_the_threshold(score: str) -> None:
    model, dense = optimised(score=score, sparsity=0.5), tiny_models.tiny("llama")
    data = list(batches(own_text(), batch_size=8, seq_len=32))
    scales = score_scales(dense, data, [read_first(site, score) for site in find_sites(dense)], score)
    plans = {plan.site.key: plan for plan in model.torch_pi2.plan.layers}
    for layer in sparse_layers(model):
        plan = plans[layer.site.key]
        torch.testing.assert_close(
            plan.thresholds * scales[layer.site.key], torch.full((INTERMEDIATE,), plan.threshold)
        )
        assert layer.site.up_first == (score == "up")
        site = layer.site.swapped() if layer.site.up_first else layer.site
        weights, x_TH = site.weights(dense), torch.randn(9, site.hidden)
        gate_TI = F.silu(F.linear(x_TH, weights.gate, weights.bias_gate))
        up_TI = F.linear(x_TH, weights.up, weights.bias_up)
        h_TI, first_TI = gate_TI * up_TI, up_TI if score == "up" else gate_TI
        kept_TI = first_TI.abs() * scales[layer.site.key] > plan.threshold
        assert 0.2 < float(kept_TI.float().mean()) < 0.9
        with torch.no_grad():
            torch.testing.assert_close(layer(x_TH), F.linear(h_TI * kept_TI, weights.down), atol=2e-5, rtol=0)
    counters.reset()
    with sparse_only():
        logits(model, own_text())
    done = counters.read()
    assert done["up_rows"] / done["gate_rows"] == pytest.approx(0.5, abs=0.02)


def test_without_a_score_of_their_own_neurons_share_a_threshold() -> None:
    plan = optimised(sparsity=0.5).torch_pi2.plan
    assert all(layer.threshold > 0 and layer.thresholds is None for layer in plan.layers)
    assert json.loads(plan.to_json())["version"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("score", ["output", "auto"])
def test_the_budget_is_obeyed_and_used(score: str) -> None:
    dense, skipped = loss(tiny_models.tiny("llama")), []
    for budget in (0.01, 0.05):
        model = optimised(score=score, max_loss=budget)
        with sparse_only():
            change = loss(model) / dense - 1
        found = model.torch_pi2.loss_change
        assert found == pytest.approx(change, abs=1e-4)
        assert 0.5 * budget < found <= budget
        assert model.torch_pi2.lossy
        made = model.torch_pi2.stats.made_by
        assert (made["score"], made["max_loss"]) == (score, budget)
        shares = [point["skipped"] for point in made["loss_curve"]]
        assert shares == sorted(shares)
        assert 6 <= len(shares) <= 14  # five halvings after the first share that costs too much
        assert made["loss_curve"][0]["change"] < budget < made["loss_curve"][-1]["change"]
        skipped.append(1 - sum(layer.expected_active for layer in model.torch_pi2.plan.layers) / 2)
    assert 0.05 < skipped[0] < skipped[1]


def test_the_curve_is_in_the_folder_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_pi2"):
        model = optimised(score="output", max_loss=0.05)
    assert f"lossy: 2 of 2 layers threshold (loss {model.torch_pi2.loss_change:+.2%} on held-out data)" in caplog.text
    torch_pi2.save(model, tmp_path / "m")
    curve = LossCurve.of(model.torch_pi2.stats.made_by, "here")
    assert curve.loss_change == model.torch_pi2.loss_change
    found = describe(tmp_path / "m")
    assert found["thresholds"] == to_json(curve)
    shown = render(found)
    assert f"thresholds on the score 'output': loss {curve.loss_change:+.2%} (max_loss 5.0%)" in shown
    assert f"{curve.loss_curve[0].skipped:.0%} {curve.loss_curve[0].change:+.2%}" in shown


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"loss_curve": [{"skipped": 2, "change": 0}]},
            "0, skipped: expected a number, 0 or more, at most 1",
        ),
        ({"max_loss": "much"}, "here, max_loss: expected a number"),
        ({"score": 1}, "here, score: expected text"),
    ],
)
def test_damaged_curves(wrong: dict, message: str) -> None:
    made = {"score": "gate", "max_loss": 0.01, "loss_change": 0.009, "loss_curve": [{"skipped": 0.5, "change": 0.009}]}
    assert LossCurve.of({"tokens": 5}, "here") is None
    assert to_json(LossCurve.of(made, "here")) == made
    with pytest.raises(errors.ArtifactError, match=message):
        LossCurve.of(made | wrong, "here")


def test_no_budget_for_anything(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "mean_loss", lambda *args: (2.0 if args[3] else 1.0, 0.5))
    model = optimised(max_loss=0.5)
    assert "no neuron can be skipped within max_loss=0.5: thresholds are 0" in caplog.text
    assert not model.torch_pi2.lossy
    assert torch.allclose(logits(model, own_text()), logits(tiny_models.tiny("llama"), own_text()), atol=1e-4)


@pytest.mark.parametrize("score", ["output", "up"])
def test_the_same_in_memory_in_a_folder_and_over_a_store(tmp_path: Path, score: str) -> None:
    model = optimised(score=score, max_loss=0.05)
    prompt = own_text()[:2, :5]
    with sparse_only():
        wanted = logits(model, own_text()[:3])
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    torch_pi2.save(model, tmp_path / "m")
    torch_pi2.pack(tmp_path / "m", tmp_path / "store")
    for folder, how in (("m", {}), ("store", {}), ("store", {"budget": "64MiB"})):
        other = torch_pi2.load(tmp_path / folder, **how)
        with sparse_only():
            assert torch.equal(logits(other, own_text()[:3]), wanted)
        assert torch.equal(other.generate(prompt, max_new_tokens=8, do_sample=False), tokens)
        assert other.torch_pi2.loss_change == model.torch_pi2.loss_change
    assert torch.equal(logits(torch_pi2.restore(model), own_text()), logits(tiny_models.tiny("llama"), own_text()))


@pytest.mark.parametrize("score", ["output", "up"])
def test_half_precision_and_prompts_compare_with_the_same_thresholds(score: str) -> None:
    model = optimised(score=score, sparsity=0.6)
    layer = next(iter(sparse_layers(model)))
    x = torch.randn(40, layer.site.hidden)
    with torch.no_grad(), sparse_only():
        alone = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), alone, atol=1e-4, rtol=0)  # a prompt: matrix products
    wanted = layer.thresholds.clone()
    model.to(torch.bfloat16)
    assert layer.thresholds.dtype == torch.float32
    assert torch.equal(layer.thresholds, wanted)


@pytest.mark.parametrize("score", ["output", "up"])
def test_the_dispatch_mode_skips_the_same(score: str) -> None:
    model = optimised(score=score, sparsity=0.6)
    with sparse_only():
        wanted = logits(model, own_text()[:2])
    plan, dense = model.torch_pi2.plan, tiny_models.tiny("llama")
    plan.bind(dense)
    with torch.no_grad(), NeuronClusterMode(plan):
        torch.testing.assert_close(dense(own_text()[:2]).logits, wanted, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["output", "up"])
def test_predictors_are_fitted_to_what_the_score_says(score: str) -> None:
    model = tiny_models.tiny("llama")
    config = torch_pi2.Config(method="lowrank", score=score, max_loss=0.05, tolerance=0.2, **QUICK)
    torch_pi2.optimize(model, own_text(), config)
    assert {layer.method for layer in model.torch_pi2.plan.layers} <= {"lowrank", "dense"}
    assert model.torch_pi2.loss_change < 0.2
    assert all(layer.thresholds is None for layer in model.torch_pi2.plan.layers)  # what is predicted is computed
    assert {layer.site.up_first for layer in model.torch_pi2.plan.layers} == {score == "up"}


def test_statistics_of_another_score_are_refused() -> None:
    model = tiny_models.tiny("llama")
    config = torch_pi2.Config(method="threshold", score="output", **QUICK)
    stats = torch_pi2.profile(model, own_text(), config=config)
    with pytest.raises(
        errors.ConfigError, match=r"score='gate' and max_loss=0\.01, found score='output'.*Profile again"
    ):
        torch_pi2.plan(model, stats, config=torch_pi2.Config(method="threshold", max_loss=0.01))


def test_experts_know_one_threshold() -> None:
    model = tiny_experts.build("Mixtral", hidden_act="silu")
    with pytest.raises(errors.ConfigError, match=r"score of .*expected 'gate': an expert has one threshold"):
        torch_pi2.optimize(model, own_text(), method="threshold", score="output", **QUICK)


@pytest.mark.parametrize(
    ("settings", "said"), [({"score": "auto"}, "score='auto'"), ({"score": "up", "max_loss": 0.01}, "max_loss=0.01")]
)
def test_only_next_tokens_tell_what_skipping_does(settings: dict, said: str) -> None:
    model = tiny_models.tiny("llama").model.layers[0].mlp
    data = [(torch.randn(8, 32, tiny_models.HIDDEN),) for _ in range(16)]
    with pytest.raises(errors.CalibrationError, match=rf"thresholds of LlamaMLP with {said}: .* Choose score='output'"):
        torch_pi2.optimize(model, data, method="threshold", **QUICK, **settings)
    torch_pi2.optimize(model, data, method="threshold", score="up", **QUICK)
    assert model.torch_pi2.plan.layers[0].site.up_first


def test_what_is_of_gates_and_what_is_of_up_do_not_go_together() -> None:
    model = tiny_models.tiny("llama")
    gate, up = (torch_pi2.profile(model, own_text(), score=score, **QUICK) for score in ("output", "up"))
    fitted = torch_pi2.fit(model, own_text(), stats=gate, method="signbit", score="output", **QUICK)
    with pytest.raises(errors.StaleArtifactError, match=r"predictors: .*: up or gate is first, as their score says"):
        torch_pi2.plan(model, up, fitted, method="signbit", score="up")


@pytest.mark.parametrize("name", ["falcon", "llama-relu", "drelu"])
def test_statistics_of_up_are_refused_by_layers_that_have_none(name: str) -> None:
    model = tiny_models.tiny(name)
    stats = torch_pi2.profile(model, own_text(), method="threshold", **QUICK)
    stats = ActivationStats({y.key: replace(y, up_first=True) for y in stats}, stats.model_hash, stats.made_by)
    message = (
        "statistics of .*: expected statistics of its first matrix: it has no up, or zeros .*, found statistics of up"
    )
    with pytest.raises(errors.StaleArtifactError, match=message):
        torch_pi2.optimize(model, stats=stats, method="threshold", score="up", **QUICK)


@pytest.mark.parametrize("score", ["output", "up"])
def test_files_with_thresholds(tmp_path: Path, score: str) -> None:
    model = optimised(score=score, sparsity=0.5)
    plan, stats = model.torch_pi2.plan, model.torch_pi2.stats
    plan.save(tmp_path)
    stats.save(tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 3
    with safe_open(tmp_path / "stats.safetensors", "pt") as file:
        assert file.metadata()["version"] == ("3" if score == "up" else "2")
    again, seen = Plan.load(tmp_path), ActivationStats.load(tmp_path)
    for one, other, counted in zip(plan.layers, again.layers, seen, strict=True):
        assert torch.equal(one.thresholds, other.thresholds)
        assert torch.equal(one.thresholds, counted.thresholds)
        assert counted.up_first == other.site.up_first == (score == "up")
    key = plan.layers[0].site.key
    tensors = load_file(tmp_path / "plan.safetensors")
    meta = {"model_hash": plan.model_hash}
    tensors[f"{key}.thresholds"][3] = 0.125
    save_file(tensors, tmp_path / "plan.safetensors", meta)
    with pytest.raises(errors.StaleArtifactError, match="from different plans"):
        Plan.load(tmp_path)
    for wrong in (torch.full((INTERMEDIATE,), float("nan")), torch.ones(47), torch.ones(INTERMEDIATE).double()):
        tensors[f"{key}.thresholds"] = wrong
        save_file(tensors, tmp_path / "plan.safetensors", meta)
        with pytest.raises(errors.ArtifactError, match=f"{key}.thresholds, finite numbers of 0 or more"):
            Plan.load(tmp_path)
    head = stats.save(tmp_path / "again")
    for wrong, message in ((-torch.ones(INTERMEDIATE), "numbers of 0 or more"), (torch.ones(47), r"float32 \[48\]")):
        counts = load_file(head)
        counts[f"{key}.thresholds"] = wrong
        with safe_open(head, "pt") as file:
            about = {name: value for name, value in file.metadata().items() if not name.endswith(("checks", "_check"))}
        save_file(counts, tmp_path / "stats.safetensors", about)
        with pytest.raises(errors.ArtifactError, match=message):
            ActivationStats.load(tmp_path)


def test_large_vocabularies_take_no_more_logits_than_a_call_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny_models.tiny("llama"), held_out()
    skips = spread_of(model).thresholds(0.7).masked(model)
    wanted = [mean_loss(model, data, causal_lm_loss, None)[0], *divergences(model, data, [nullcontext(), skips])]
    shapes = []
    model.lm_head.register_forward_hook(lambda *call: shapes.append(call[-1].shape[:2]))
    monkeypatch.setattr(loss_module, "_CALL_BYTES", 2 * 32 * 64 * 4, raising=False)  # two rows of 32 tokens
    monkeypatch.setattr(loss_module, "_FLOAT_BYTES", 5 * 64 * 4, raising=False)
    found = [mean_loss(model, data, causal_lm_loss, None)[0], *divergences(model, data, [nullcontext(), skips])]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert max(rows for rows, _ in shapes) <= 2
    shapes.clear()
    torch_pi2.profile(model, own_text(), **QUICK)  # reads no logits
    assert max(tokens for _, tokens in shapes) <= 8  # those of an example of inputs


def test_exact_zeros_need_no_thresholds(caplog: pytest.LogCaptureFixture) -> None:
    model = torch_pi2.optimize(tiny_models.tiny("drelu"), own_text(), method="threshold", sparsity=0.9, **QUICK)
    assert {layer.method for layer in model.torch_pi2.plan.layers} == {"exact"}
    assert "thresholds are for activations without exact zeros" in caplog.text
