"""Predictors: what is trained, quantised, calibrated, sized and stored, and how honestly it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import drelu_module, tiny
from torch import nn

import torch_pi2
from torch_pi2 import ops
from torch_pi2.errors import ArtifactError, CalibrationError, ConfigError, NonFiniteError, StaleArtifactError
from torch_pi2.fitting.fit import cold_neurons, fit
from torch_pi2.fitting.loss import causal_lm_loss
from torch_pi2.fitting.search import FitSettings, Layer, Search, initial_rank
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph import find_sites
from torch_pi2.graph.dispatch import PredictedMaskMode
from torch_pi2.planner.hot_neurons import gated_bytes
from torch_pi2.predict.file import FittedPredictors, load_predictors, save_predictors
from torch_pi2.predict.lowrank import ALWAYS, LowRank, LowRankRows
from torch_pi2.profiling.data import Batch
from torch_pi2.profiling.run import profile
from torch_pi2.profiling.samples import Samples, collect_samples
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite, FFNWeights, LinearRef
from torch_pi2.types.stats import ActivationStats, pack_bits

H, I = 16, 45  # noqa: E741  the package's suffixes; 45 is no multiple of 8


def layer(seed: int = 0) -> tuple[FFNSite, FFNWeights]:
    """A dReLU layer whose gate has rank 4 and is mostly negative: something a predictor can learn."""
    g = torch.Generator().manual_seed(seed)
    gate = torch.randn(I, 4, generator=g) @ torch.randn(4, H, generator=g) / 4
    weights = FFNWeights(
        gate,
        torch.randn(I, H, generator=g) / 4,
        torch.randn(H, I, generator=g) / 4,
        torch.full((I,), -1.0),
        torch.full((I,), 0.5),
        None,
    )
    refs = [LinearRef("gate.weight"), LinearRef("up.weight"), LinearRef("down.weight")]
    return FFNSite("ffn", 0, "relu", True, *refs, H, I, ""), weights


def train_lowrank(found: Samples, **how: Any) -> LowRankRows:
    ops.load()
    return LowRankRows.fitted(*train_matrices(found, **how))


def samples(n: int, seed: int, w: FFNWeights) -> Samples:
    x = torch.randn(n, H, generator=torch.Generator().manual_seed(seed))
    h = torch.relu(x @ w.gate.T + w.bias_gate) * torch.relu(x @ w.up.T + w.bias_up)
    return Samples(x, pack_bits(h > 0), I)


def test_training_learns_far_more_than_the_base_rate() -> None:
    site, w = layer()
    p = calibrate(train_lowrank(samples(2000, 1, w), rank=12, steps=400), samples(1000, 2, w), site, target_recall=0.95)
    card = measure(p, samples(1000, 3, w), site, weights=w)
    rate = samples(1000, 3, w).fired().float().mean().item()
    assert card.recall == pytest.approx(0.95, abs=0.02), "on tokens neither fitted to nor calibrated on"
    assert card.predicted_active < 0.45, "guessing would have to predict 0.95"
    assert card.precision > 1.8 * rate
    assert card.precision * card.predicted_active == pytest.approx(card.recall * rate, rel=1e-3)
    assert card.mass_recall is not None
    assert card.mass_recall > card.recall, "what is missed is small"
    assert card.rank == p.rank == 12
    assert card.bytes == (12 + I) * 18 + 4 * I
    assert card.cost_share == pytest.approx(12 * (H + I) / (3 * H * I))


def test_training_is_deterministic_and_seeded() -> None:
    _, w = layer()
    s = samples(300, 1, w)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        one, two, three = (train_lowrank(s, rank=4, steps=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is left alone"
    assert all(torch.equal(one.tensors()[k], two.tensors()[k]) for k in one.tensors())
    assert not torch.equal(one.a, three.a)


def test_bfloat16_inputs_train_too() -> None:
    site, w = layer()
    s = samples(2000, 1, w)
    p = train_lowrank(Samples(s.x_NH.bfloat16(), s.fired_bits, I), rank=12, steps=300)
    assert calibrate(p, samples(500, 2, w), site, target_recall=0.9).card.predicted_active < 0.45


def test_class_weights_make_misses_dearer_than_false_alarms() -> None:
    """At the uncalibrated threshold 0 the weighted loss errs towards predicting too much."""
    site, w = layer()
    p = train_lowrank(samples(2000, 1, w), rank=12, steps=400)
    card = measure(p, samples(1000, 2, w), site)
    assert card.recall > 0.85 > card.precision


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99, 1.0])
def test_calibration_reaches_its_target_with_the_highest_threshold(target: float) -> None:
    site, w = layer()
    held = samples(700, 2, w)
    p = calibrate(train_lowrank(samples(2000, 1, w), rank=8, steps=60), held, site, target_recall=target)
    assert p.card is not None
    assert p.card.recall >= target
    score, fired = p.scores(held.x_NH), held.fired()
    above = (score > p.threshold) & fired
    assert above.sum() / fired.sum() < target, "a threshold any higher would miss it"


def test_cold_neurons_only_are_fitted_and_measured() -> None:
    site, w = layer()
    cold = torch.arange(0, I, 2)
    s, held = samples(2000, 1, w), samples(500, 2, w)
    p = calibrate(train_lowrank(s, rank=8, neurons=cold, steps=100), held, site, target_recall=0.9, neurons=cold)
    hot = torch.arange(1, I, 2)
    assert bool((p.scores(held.x_NH) >= p.threshold)[:, hot].all()), "what was not fitted is always active"
    assert bool((p.bias[hot] == ALWAYS).all())
    mine = (p.scores(held.x_NH) >= p.threshold)[:, cold]
    assert p.card.predicted_active == pytest.approx(mine.float().mean().item())
    assert p.card.recall == pytest.approx(0.9, abs=0.01)


def test_a_layer_that_never_fires_is_predicted_silent() -> None:
    site, _ = layer()
    x = torch.randn(200, H)
    silent = Samples(x, torch.zeros(200, -(-I // 8), dtype=torch.uint8), I)
    p = calibrate(train_lowrank(silent, rank=2, steps=10), silent, site)
    assert (p.card.recall, p.card.precision, p.card.predicted_active) == (1.0, 1.0, 0.0)


def test_scores_are_the_operators() -> None:
    """``predict_lowrank`` on the rows of some neurons is this predictor on those neurons."""
    ops.load()
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-127, 128, size, generator=g, dtype=torch.int8) for size in ((6, H), (I, 6)))
    p = LowRank(a, torch.full((6,), 0.01), b, torch.full((I,), 0.01), torch.randn(I, generator=g), 0.3)
    x, some = torch.randn(2, 9, H, generator=g), torch.tensor([44, 0, 7, 8])
    got = torch.ops.pi2.predict_lowrank(x, p.a, p.a_scale, p.b[some], p.b_scale[some], p.bias[some], p.threshold)
    want = (p.scores(x.view(-1, H)) >= p.threshold)[:, some].view(2, 9, 4)
    assert float((got == want).float().mean()) > 0.98  # all but ties broken by the order of a sum


def test_too_few_samples_and_bad_targets_are_refused() -> None:
    site, w = layer()
    with pytest.raises(CalibrationError, match=r"predictor training samples: expected at least 64 tokens, found 63"):
        train_lowrank(samples(63, 1, w), rank=4)
    p = train_lowrank(samples(100, 1, w), rank=4, steps=5)
    for target in (0.0, 1.1):
        with pytest.raises(ConfigError, match=r"target_recall: expected more than 0, at most 1, found"):
            calibrate(p, samples(100, 2, w), site, target_recall=target)
    with pytest.raises(CalibrationError, match=r"held-back samples: expected at least one token, found none"):
        calibrate(p, samples(0, 2, w), site)


# ---- sizing on a whole model


@pytest.fixture(scope="module")
def sparse_model() -> tuple[nn.Module, list[FFNSite], torch.Tensor, ActivationStats]:
    """A tiny dReLU model trained for a moment to copy a pattern, so that there is a loss to keep."""
    module = drelu_module()
    torch.manual_seed(0)
    config = module.DReLULlamaConfig(
        vocab_size=24,
        hidden_size=24,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        hidden_act="relu",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = module.DReLULlamaForCausalLM(config)
    g = torch.Generator().manual_seed(1)
    step = torch.randint(1, 7, (64, 1), generator=g)
    ids = (torch.randint(0, 24, (64, 1), generator=g) + step * torch.arange(24)) % 24
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.1, torch.randint(0, 24, ids.shape, generator=g), ids)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        out = model(input_ids=ids, labels=ids, use_cache=False)
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
    model.eval()
    sites = find_sites(model)
    return model, sites, ids, profile(model, ids, sites, seq_len=24)


def wide(hidden: int, neurons: int) -> tuple[FFNSite, Samples]:
    """Samples of a layer whose gate has rank 6: predictors of few numbers find what fires."""
    g = torch.Generator().manual_seed(0)
    gate = torch.randn(neurons, 6, generator=g) @ torch.randn(6, hidden, generator=g)
    x = torch.randn(1200, hidden, generator=g)
    refs = [LinearRef("gate.weight"), LinearRef("up.weight"), LinearRef("down.weight")]
    fired = x @ gate.T > hidden**0.5 * 3
    return FFNSite("ffn", 0, "relu", False, *refs, hidden, neurons, ""), Samples(x, pack_bits(fired), neurons)


@pytest.mark.slow
def test_the_search_takes_the_rank_that_reads_least() -> None:
    ops.load()
    site, found = wide(64, 256)
    fit_on, held = found.split(0.3)
    layer = Layer(site, torch.arange(256), {"ffn": fit_on}, {"ffn": held}, 32, 0.9)
    chooser = Search([layer], FitSettings(steps=80), lambda _: (0.0, 0.0), lambda: None)
    chooser.choose_rank(layer)
    costs = {rank: chooser.cost(layer, rank, probe=True) for rank in (8, 16, 32, 64)}
    assert layer.rank == min(costs, key=lambda rank: costs[rank])
    chosen = chooser.predictor(layer, layer.rank)
    read = sum(t.nbytes for t in chosen.tensors().values())
    assert chooser.cost(layer, layer.rank) == pytest.approx(read / (3 * 64 * 256 * 2) + chosen.card.predicted_active)
    assert chosen.card.recall == pytest.approx(0.9, abs=0.02)


def test_int8_activations_are_measured_as_they_run() -> None:
    ops.load()
    site, found = wide(64, 48)
    settings = FitSettings(steps=20, weights="int4", activations="int8")
    layer = Layer(site, torch.arange(48), {"ffn": found}, {"ffn": found}, 32, 0.9)
    predictor = Search([layer], settings, lambda _: (0.0, 0.0), lambda: None).predictor(layer, 32)
    a, b, bias = predictor.tensors().values()
    masks = [
        torch.ops.pi2.predict_lowrank_q(found.x_NH, a, b, bias, "int4", int8, predictor.threshold)
        for int8 in (True, False)
    ]
    measured = predictor.scores(found.x_NH) >= predictor.threshold
    assert float((measured != masks[0]).float().mean()) < 1e-4 < float((measured != masks[1]).float().mean())


def test_padded_predictors_decide_the_same() -> None:
    ops.load()
    _, found = wide(64, 48)
    short = LowRankRows.fitted(*train_matrices(found, rank=24, steps=10))
    for rank in (24, 30, 70):
        longer = short.padded(rank)
        assert longer.rank == rank
        assert torch.equal(longer.scores(found.x_NH) >= 0.1, short.scores(found.x_NH) >= 0.1)
        again = {name: tensor.clone() for name, tensor in longer.tensors().items()}
        assert LowRankRows.from_rows(again, "int4", 64, 0.0, None).rank == rank
    short.int8_activations = True
    assert torch.equal(short.padded(40).scores(found.x_NH), short.scores(found.x_NH)), "measured with its inputs"


FIT = {"n_tokens": 800, "steps": 120, "max_rounds": 6, "seq_len": 24, "hot_frequency": 0.6}


@pytest.mark.slow
def test_fit_keeps_the_loss_within_tolerance_and_skips(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    got = fit(model, ids, sites, stats, FitSettings(tolerance=0.1, **FIT))
    report = got.report
    assert report is not None
    assert report.met
    assert report.change <= 0.1
    assert 0 < len(report.rounds) <= 6
    assert report.skipped > 0.2
    assert report.loss == pytest.approx(report.dense_loss * (1 + report.change))
    assert set(report.tokens) == {"fit", "calibrate", "evaluate"}
    assert sum(report.tokens.values()) == ids.numel()
    for row in report.layers:
        assert row["rank"] == got[row["key"]].rank
        assert row["predicted_active"] == got[row["key"]].card.predicted_active
    # The figure can be had again from nothing but the predictors and the evaluation rows.
    dealt = [8 * r + b for b in range(8) for r in range(8)]  # the order in which batches() hands out rows
    rows = ids[[row for i, row in enumerate(dealt) if i % 10 >= 8]]
    cold = {s.key: cold_neurons(stats, s.key, 0.6) for s in sites}
    batch = Batch(rows, torch.ones_like(rows).bool())
    with torch.no_grad(), PredictedMaskMode(model, sites, got, cold) as mode:
        total, count = causal_lm_loss(model, batch)
    assert total / count == pytest.approx(report.loss, rel=1e-4)
    assert 1 - mode.cold_share == pytest.approx(report.skipped, abs=1e-4)


def test_fit_is_deterministic_and_a_tight_tolerance_skips_less(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    loose, again = (fit(model, ids, sites, stats, FitSettings(tolerance=0.2, **FIT)) for _ in range(2))
    tight = fit(model, ids, sites, stats, FitSettings(tolerance=0.001, **FIT))
    assert loose.report == again.report
    assert all(torch.equal(loose[k].b, again[k].b) for k in loose)
    assert tight.report.skipped < loose.report.skipped
    assert any(r["step"].startswith("raise") for r in tight.report.rounds) or tight.report.met


def test_an_unreachable_tolerance_is_said_and_not_hidden(sparse_model: tuple, caplog: pytest.LogCaptureFixture) -> None:
    model, sites, ids, stats = sparse_model
    got = fit(model, ids, sites, stats, FitSettings(tolerance=1e-9, target_recall=0.2, **(FIT | {"max_rounds": 1})))
    assert not got.report.met
    assert "more than the tolerance of 0.00 %, after 1 rounds" in caplog.text


def test_callers_may_bring_their_loss(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model

    def count_loss(model: nn.Module, batch: Batch) -> tuple[float, int]:
        return float(batch.call(model).logits.square().sum()), batch.n_tokens

    cold = {s.key: torch.arange(s.intermediate) for s in sites}
    got = fit(model, ids, sites, stats, FitSettings(tolerance=0.3, **FIT), loss_fn=count_loss, cold=cold)
    assert got.report.layers[0]["cold"] == 45


def test_layers_without_cold_neurons_get_no_predictor(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    none = {s.key: torch.arange(0) for s in sites}
    assert dict(fit(model, ids, sites, stats, FitSettings(**FIT), cold=none)) == {}
    one = none | {sites[1].key: torch.arange(20)}
    assert set(fit(model, ids, sites, stats, FitSettings(tolerance=0.5, **FIT), cold=one)) == {sites[1].key}


def test_layers_that_too_few_tokens_reach_get_no_predictor(
    sparse_model: tuple, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in a ModuleDict, as Switch has them: one may see some 30 of 1,000 tokens."""
    model, sites, ids, stats = sparse_model
    key = sites[0].key

    def few(*args: Any, **how: Any) -> dict[str, Samples]:
        found = dict(collect_samples(*args, **how))
        return found | {key: Samples(found[key].x_NH[:32], found[key].fired_bits[:32], I)}

    monkeypatch.setattr("torch_pi2.fitting.fit.collect_samples", few)
    got = fit(model, ids, sites, stats, FitSettings(tolerance=0.5, **FIT))
    assert set(got) == {site.key for site in sites[1:]}
    assert f"too few of the tokens reach them (64): {key}" in caplog.text


def test_fit_refuses_what_it_cannot_use(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    with pytest.raises(CalibrationError, match=r"sequences to fit and to measure on: expected at least 10 .* found 9"):
        fit(model, ids[:9], sites, stats, FitSettings(**FIT))
    stale = ActivationStats(stats.layers, "0" * 64)
    with pytest.raises(StaleArtifactError, match=r"activation statistics: expected a profile of FFN weights"):
        fit(model, ids, sites, stale, FitSettings(**FIT))
    for name, value in (
        ("tolerance", 0.0),
        ("target_recall", 1.0),
        ("hot_frequency", 0),
        ("max_rounds", 0),
        ("margin", 2),
    ):
        with pytest.raises(ConfigError, match=f"{name}: expected .* found"):
            fit(model, ids, sites, stats, FitSettings(**(FIT | {name: value})))


def test_losses_that_cannot_be_taken_are_refused(sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    with pytest.raises(CalibrationError, match=r"loss of the model: expected token ids and logits .* found no ids"):
        causal_lm_loss(model, Batch(None, None, (ids,)))
    with pytest.raises(CalibrationError, match=r"found output Tensor"):
        causal_lm_loss(nn.Embedding(24, 3), Batch(ids[:, :5].reshape(-1), torch.ones(5).bool()))
    with pytest.raises(
        NonFiniteError, match=r"loss on the evaluation sequences: expected a finite number .* found nan"
    ):
        fit(model, ids, sites, stats, FitSettings(**FIT), loss_fn=lambda m, b: (float("nan"), 1))


def test_padding_counts_for_nothing_in_the_loss() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids).bool()
    mask[1, 7:] = False
    with torch.no_grad():
        total, count = causal_lm_loss(model, Batch(ids, mask))
        first = causal_lm_loss(model, Batch(ids[:1], mask[:1]))
        second = causal_lm_loss(model, Batch(ids[1:, :7], mask[1:, :7]))
    assert count == 11 + 6
    assert total == pytest.approx(first[0] + second[0], rel=1e-4)


def test_initial_rank_follows_density_and_skew() -> None:
    site = FFNSite("x", 0, "relu", True, None, LinearRef("u"), LinearRef("d"), 4096, 14336, "")
    dense, sparse = initial_rank(site, 0.3, 0.3), initial_rank(site, 0.05, 0.3)
    assert dense > sparse > initial_rank(site, 0.05, 0.7)
    assert initial_rank(site, 1.0, 0.0) == 2048
    assert initial_rank(site, 1e-9, 1.0) == 8


# ---- storage


def fitted() -> FittedPredictors:
    site, w = layer()
    p = calibrate(train_lowrank(samples(200, 1, w), rank=4, steps=10), samples(100, 2, w), site, weights=w)
    return FittedPredictors({"ffn": p})


def test_predictors_round_trip(tmp_path: Path, sparse_model: tuple) -> None:
    model, sites, ids, stats = sparse_model
    got = fit(model, ids, sites, stats, FitSettings(tolerance=0.5, **(FIT | {"max_rounds": 1})))
    digest = weights_hash(model, sites)
    path = save_predictors(tmp_path, got, digest)
    assert [p.name for p in tmp_path.iterdir()] == ["predictors.safetensors"]
    assert path.parent == tmp_path
    loaded = load_predictors(tmp_path, model_hash=digest)
    assert loaded.report == got.report
    x = torch.randn(9, 24)
    for key, p in got.items():
        assert torch.equal((loaded[key].scores(x) >= loaded[key].threshold), (p.scores(x) >= p.threshold))
        assert loaded[key].card == p.card
        assert loaded[key].threshold == p.threshold
    matrices = [t for n, t in load_file(path).items() if n.endswith((".a", ".b"))]
    assert matrices
    assert all(t.dtype in (torch.int8, torch.uint8) for t in matrices)


def test_stale_damaged_and_uncalibrated_predictors_are_refused(tmp_path: Path) -> None:
    path = save_predictors(tmp_path, fitted(), "a" * 64)
    with pytest.raises(StaleArtifactError, match=r"expected made from FFN weights bbbbbbbbbbbb, found aaaaaaaaaaaa"):
        load_predictors(tmp_path, model_hash="b" * 64)
    tensors = load_file(path)
    meta = {"format": "torch_pi2.predictors", "version": "1", "model_hash": "a", "report": "null", "predictors": "{"}
    save_file(tensors, path, metadata=meta)
    with pytest.raises(ArtifactError, match=r"predictors: expected JSON, found damage"):
        load_predictors(path)
    save_file(tensors, path, metadata={n: t for n, t in meta.items() if n != "model_hash"} | {"predictors": "{}"})
    with pytest.raises(ArtifactError, match=r"expected the hash of a model's weights, found none"):
        load_predictors(path)
    save_predictors(tmp_path, fitted(), "a" * 64)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ArtifactError, match=r"expected a whole safetensors file"):
        load_predictors(path)
    save_file(tensors, path, metadata=meta | {"version": "2"})
    with pytest.raises(
        ArtifactError, match=r"expected torch_pi2.predictors version 1, found torch_pi2.predictors version 2"
    ):
        load_predictors(path)
    bare = fitted()
    bare["ffn"].card = None
    with pytest.raises(ConfigError, match=r"predictor of ffn: expected one with a threshold and a card"):
        save_predictors(tmp_path, bare, "a" * 64)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"expected a folder that can be written"):
        save_predictors(tmp_path / "file", fitted(), "a" * 64)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    matrices = {"a": torch.zeros(4, H, dtype=torch.int8), "b": torch.zeros(I, 4, dtype=torch.int8)}
    t = matrices | {"a_scale": torch.ones(4), "b_scale": torch.ones(I), "bias": torch.zeros(I)}
    with pytest.raises(ArtifactError, match=r"low-rank predictor: expected a \[r, H\] .* b int8 \[45, 4\], a_scale"):
        LowRank.from_tensors({k: v for k, v in t.items() if k != "b_scale"}, 0.0, None)
    with pytest.raises(ArtifactError, match=r"shapes of a low-rank predictor: .* b int8 \[44, 4\]"):
        LowRank.from_tensors(t | {"b": t["b"][:-1]}, 0.0, None)


@pytest.mark.parametrize(("weights", "method"), [("float", "lowrank"), ("int4", "exact")])
def test_auto_counts_the_bytes_of_the_weights_as_they_will_be(weights: str, method: str) -> None:
    """A predictor of half of what the exact gate reads of floats has more bytes than all that it reads of int4."""
    model = tiny("llama-relu")
    stats = torch_pi2.profile(model, torch.arange(256).view(4, 64) % 50)
    fitted = FittedPredictors()
    for site in find_sites(model):
        half = int(gated_bytes(site, float(stats[site.key].frequency().mean()), 4) / 2)
        made = train_lowrank(samples(100, 0, layer()[1]), rank=4, steps=1)
        made.card = PredictorCard(0.9, 0.9, 0.01, half, 0.1, 4)
        fitted[site.key] = made
    plan = torch_pi2.plan(model, stats, fitted, weights=weights, hot_frequency=1.01)
    assert {layer.method for layer in plan.layers} == {method}
