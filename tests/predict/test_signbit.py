"""The sign-bit predictor: packing, calibration, files, plans, and what it is worth on the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2.errors import ArtifactError, CalibrationError, ConfigError, StaleArtifactError
from torch_pi2.fitting.train import calibrate, measure
from torch_pi2.observe import counters
from torch_pi2.ops.predictors import predict_signbit
from torch_pi2.predict.file import FittedPredictors, load_predictors, save_predictors
from torch_pi2.predict.signbit import SignBit, pack_signs
from torch_pi2.profiling.samples import Samples
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.types.stats import pack_bits

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "drelu-stdlib-5m"


def test_packing() -> None:
    w = torch.zeros(2, 65)
    w[0, [0, 9, 64]] = torch.tensor([-1.0, -2.0, -3.0])
    w[1] = -0.0
    packed = pack_signs(w)
    assert packed.shape == (2, 16)
    assert packed[0].tolist() == [1, 2, *[0] * 6, 1, *[0] * 7]
    assert not packed[1].any()
    assert torch.equal(pack_signs(w.bfloat16()), packed)


def made_up(tokens: int = 400, hidden: int = 100, neurons: int = 60) -> tuple[torch.Tensor, Samples]:
    """A gate with a negative bias built in: about a tenth of its neurons fire."""
    g = torch.Generator().manual_seed(0)
    gate = torch.randn(neurons, hidden, generator=g)
    x = torch.randn(tokens, hidden, generator=g)
    return gate, Samples(x, pack_bits(x @ gate.T > 1.3 * hidden**0.5), neurons)


class _Site:
    """What a card needs of a site."""

    rows_per_neuron, hidden, intermediate, activation, activation_on_up = 3, 100, 60, "relu", True


def test_scores_and_activity_agree() -> None:
    gate, samples = made_up()
    for margin in (0.0, 0.5, 1.0, 1.5):
        predictor = SignBit(pack_signs(gate), 100, margin)
        found = predict_signbit(samples.x_NH, predictor.signs, 100, margin)
        assert torch.equal(found, predictor.scores(samples.x_NH) >= predictor.threshold)
    agree = ((gate[None] < 0) == (samples.x_NH[:, None] < 0)).sum(-1)
    assert torch.equal(predictor.scores(samples.x_NH), agree.float())


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99, 1.0])
def test_calibration_reaches_the_recall_and_not_much_more(recall: float) -> None:
    gate, samples = made_up()
    neurons = torch.arange(10, 60)
    predictor = calibrate(SignBit.from_weights(gate), samples, _Site(), target_recall=recall, neurons=neurons)
    assert predictor.card.recall >= recall
    active, fired = (predictor.scores(samples.x_NH) >= predictor.threshold)[:, neurons], samples.fired()[:, neurons]
    assert predictor.card.recall == pytest.approx(float((active & fired).sum() / fired.sum()))
    assert predictor.card.precision > float(fired.float().mean())  # better than chance
    stricter = SignBit(predictor.signs, 100, predictor.margin * 1.1)
    assert measure(stricter, samples, _Site(), neurons=neurons).recall < recall
    assert predictor.card.bytes == 60 * 16 + 16


def test_nothing_fires_nothing_is_predicted() -> None:
    gate, samples = made_up()
    silent = Samples(samples.x_NH, torch.zeros_like(samples.fired_bits), 60)
    predictor = calibrate(SignBit.from_weights(gate), silent, _Site())
    assert predictor.card.predicted_active < 0.01


def test_refusals() -> None:
    gate, samples = made_up()
    with pytest.raises(ConfigError, match="target_recall: expected more than 0"):
        calibrate(SignBit.from_weights(gate), samples, _Site(), target_recall=0.0)
    with pytest.raises(CalibrationError, match="held-back samples: expected at least one token"):
        calibrate(SignBit.from_weights(gate), Samples(samples.x_NH[:0], samples.fired_bits[:0], 60), _Site())


def test_file_roundtrip_and_damage(tmp_path: Path) -> None:
    gate, samples = made_up()
    predictor = calibrate(SignBit.from_weights(gate), samples, _Site())
    save_predictors(tmp_path, FittedPredictors({"a.mlp": predictor}), "hash")
    read = load_predictors(tmp_path)["a.mlp"]
    assert isinstance(read, SignBit)
    assert torch.equal(read.signs, predictor.signs)
    assert (read.hidden, read.margin, read.card) == (100, predictor.margin, predictor.card)
    tensors = predictor.tensors()
    with pytest.raises(
        ArtifactError,
        match=r"sign-bit predictor: expected uint8 signs .*found signs uint8 \[60, 16\], hidden int64 \[1\]\.",
    ):
        SignBit.read({"signs": tensors["signs"], "hidden": tensors["hidden"]}, None, 0.0, None)
    with pytest.raises(ArtifactError, match="The file is damaged"):
        SignBit.read({**tensors, "signs": tensors["signs"][:, :8]}, None, 0.0, None)
    with pytest.raises(ArtifactError, match="expected a finite margin, 0 or more, found nan"):
        SignBit.read({**tensors, "margin": torch.tensor([float("nan")]).double()}, None, 0.0, None)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def trained() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.mark.slow
def test_trained_model_end_to_end(trained: nn.Module, tokenizer, tmp_path: Path) -> None:
    """Calibrated without training it finds the firing neurons of a real model far better than chance."""
    config = torch_pi2.Config(method="signbit", calibration_tokens=8192, target_recall=0.95)
    text = stdlib_text("train", max_bytes=40_000)
    ids = tokenizer(stdlib_text("heldout", max_bytes=2000), return_tensors="pt").input_ids[0, :256].view(32, 8)

    def mean_loss(model: nn.Module) -> float:
        """A few tokens a call: prompts are computed densely where predicting gains nothing."""
        return sum(float(model(row[None], labels=row[None]).loss) for row in ids) / len(ids)

    with torch.no_grad():
        dense_loss = mean_loss(trained)
        model = torch_pi2.optimize(trained, text, config, tokenizer=tokenizer)
        counters.reset()
        loss = mean_loss(model)
        share = counters.read()
    parts = model.torch_pi2
    planned = [y for y in parts.plan.layers if y.method == "signbit"]
    assert planned
    for layer in planned:
        card = parts.predictors[layer.site.key].card
        assert card.recall > 0.9  # on other tokens than the margin was set on
        assert card.predicted_active < 0.95
        assert card.precision > 1.05 * parts.stats[layer.site.key].frequency()[layer.order[layer.n_hot :].long()].mean()
    assert loss < 1.05 * dense_loss
    assert share["gate_rows"] < 0.95 * share["neurons"]

    torch_pi2.save(model, tmp_path / "model", tokenizer=tokenizer)
    again = torch_pi2.load(tmp_path / "model", trust_remote_code=True)
    with torch.no_grad():
        assert mean_loss(again) == loss
    torch_pi2.restore(model)
    with torch.no_grad():
        assert mean_loss(model) == dense_loss


@pytest.mark.slow
def test_plans_need_the_right_predictor(trained: nn.Module, tokenizer) -> None:
    text = stdlib_text("train", max_bytes=8000)
    config = torch_pi2.Config(method="signbit", calibration_tokens=1024)
    stats = torch_pi2.profile(trained, text, tokenizer=tokenizer, config=config)
    with pytest.raises(ConfigError, match="expected a fitted predictor for 'signbit', found none"):
        torch_pi2.plan(trained, stats, config=config)
    fitted = torch_pi2.fit(trained, text, stats=stats, tokenizer=tokenizer, config=config)
    with pytest.raises(ConfigError, match=r"expected one for method 'lowrank', found one for 'signbit'"):
        torch_pi2.plan(trained, stats, fitted, config=torch_pi2.Config(method="lowrank"))
    plan = torch_pi2.plan(trained, stats, fitted, config=config)
    from torch_pi2.rewrite.rewrite import rewrite

    with pytest.raises(ConfigError, match="expected tensors signs, hidden, margin, as its plan says 'signbit'"):
        rewrite(trained, plan, {})
    with pytest.raises(CalibrationError, match="method 'signbit'"):
        torch_pi2.optimize(trained, None, config)
    stats.model_hash = "0" * 64
    with pytest.raises(StaleArtifactError, match="activation statistics"):
        torch_pi2.fit(trained, text, stats=stats, tokenizer=tokenizer, config=config)
