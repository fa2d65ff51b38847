"""The committed checkpoint, loaded as any user would: real sparsity, an exact exact gate, a predictor good enough."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.eval.work import work
from torch_pi2.observe import counters
from torch_pi2.profiling.text import stdlib_text

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "drelu-stdlib-5m"
CONFIG = torch_pi2.Config(method="lowrank", calibration_tokens=20_000)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def dense(tokenizer) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def heldout() -> str:
    return stdlib_text("heldout", max_bytes=60_000)


@pytest.fixture(scope="module")
def calibration() -> str:
    return stdlib_text("train", max_bytes=80_000)


@pytest.fixture(scope="module")
def sparse(dense, tokenizer, calibration) -> nn.Module:
    return torch_pi2.optimize(copy.deepcopy(dense), calibration, CONFIG, tokenizer=tokenizer)


def loss(model: nn.Module, tokenizer, text: str) -> float:
    return bits_per_byte(model, tokenizer, text, window=256, max_tokens=16_384).nats_per_token


def test_folder_is_complete_and_small() -> None:
    assert sum(p.stat().st_size for p in FOLDER.iterdir() if p.is_file()) <= 12 * 2**20
    recorded = json.loads((FOLDER / "training.json").read_text())
    assert recorded["command"].startswith("python examples/train_drelu_lm.py")
    rows = [json.loads(line) for line in (FOLDER / "train_log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == recorded["arguments"]["steps"]
    assert rows[-1]["heldout_bits_per_byte"] < rows[0].get("heldout_bits_per_byte", 8)


@pytest.mark.slow
def test_sparsity_comes_from_training(dense, tokenizer, heldout) -> None:
    """Exact zeros on held-out text agree with the training log, and are far above those of random weights."""
    logged = json.loads((FOLDER / "train_log.jsonl").read_text().splitlines()[-1])["sparsity_per_layer"]
    stats = torch_pi2.profile(dense, heldout, tokenizer=tokenizer, config=CONFIG)
    measured = [layer.sparsity for layer in stats]
    assert measured == pytest.approx(logged, abs=0.05)
    assert sum(measured) / len(measured) > 0.85
    random = type(dense)(dense.config).eval()
    at_random = [layer.sparsity for layer in torch_pi2.profile(random, heldout, tokenizer=tokenizer, config=CONFIG)]
    assert max(at_random) < 0.8  # relu * relu of random numbers: three in four are zero


def test_exact_gate_equals_dense_at_every_batch_size(dense, tokenizer, heldout) -> None:
    sparse = torch_pi2.optimize(copy.deepcopy(dense), config=torch_pi2.Config(method="exact"))
    ids = tokenizer(heldout, return_tensors="pt")["input_ids"][0]
    counters.reset()
    with torch.no_grad():
        for batch, length in ((1, 1), (1, 100), (2, 33), (3, 64), (8, 16), (17, 5)):
            ids_BT = ids[: batch * length].view(batch, length)
            wanted, found = dense(ids_BT).logits, sparse(ids_BT).logits
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    done = counters.read()
    assert done["down_rows"] / done["neurons"] < 0.2


def test_generated_text_is_the_same(dense, tokenizer) -> None:
    sparse = torch_pi2.optimize(copy.deepcopy(dense), config=torch_pi2.Config(method="exact"))
    tokenizer.padding_side = "left"
    prompts = ["def main(", "class Reader:\n    def __init__(self, path):\n", "import os\n"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    for settings in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9, "temperature": 0.8}):
        texts = []
        for model in (dense, sparse):
            torch.manual_seed(11)
            texts.append(model.generate(**inputs, max_new_tokens=24, **settings))
        assert torch.equal(*texts)


@pytest.mark.slow
@pytest.mark.long
def test_lowrank_predictor_keeps_the_loss(dense, sparse, tokenizer, heldout, tmp_path) -> None:
    """Held-out loss within 1 % of dense while at least 70 % of cold neurons are skipped (issue's acceptance)."""
    plan = sparse.torch_pi2.plan
    n_hot, n_cold = (sum(getattr(layer, n) for layer in plan.layers) for n in ("n_hot", "n_cold"))
    assert n_cold > 4 * n_hot
    counters.reset()
    change = loss(sparse, tokenizer, heldout) / loss(dense, tokenizer, heldout) - 1
    done = counters.read()
    tokens = done["tokens"] // len(plan.layers)
    cold_computed = (done["gate_rows"] - tokens * n_hot) / (tokens * n_cold)
    assert abs(change) < 0.01
    assert cold_computed < 0.3
    for layer in plan.layers:
        card = sparse.torch_pi2.predictors[layer.site.key].card
        assert card.recall > 0.5
        assert card.bytes < 0.2 * 3 * 256 * 1024 * 4
        assert card.rank > 0
    torch_pi2.save(sparse, tmp_path / "m", tokenizer=tokenizer)
    again = torch_pi2.load(tmp_path / "m", trust_remote_code=True)
    ids_BT = tokenizer(heldout[:400], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids_BT).logits, sparse(ids_BT).logits)


@pytest.mark.slow
def test_gptq_costs_far_less_than_rounding(dense, tokenizer, calibration, heldout) -> None:
    """int4 of all linear layers. docs/RESULTS.md: 0.31 against 0.93 %, scored and calibrated on more tokens."""

    def change(**how: object) -> float:
        model = torch_pi2.quantize_(copy.deepcopy(dense), "int4", calibration, tokenizer=tokenizer, **how)
        return bits_per_byte(model, tokenizer, heldout, window=256, max_tokens=8192).bits_per_byte / before - 1

    before = bits_per_byte(dense, tokenizer, heldout, window=256, max_tokens=8192).bits_per_byte
    assert 0 < change(quantization="gptq") < 0.65 * change(quantization="rtn")


@pytest.mark.slow
@pytest.mark.long
def test_what_quantisation_costs(dense, sparse, tokenizer, calibration, heldout) -> None:
    """Bits per byte of every format, dense and behind a predictor; sparsity may add 1 % to its format.

    Measured on 16,384 tokens, dense: int8 +0.03 %, int4 +0.93 %, int4 with int8 activations +0.94 %; the predictor adds
    0.96 % to float, 0.98 % to int4. (Fewer tokens and formats here, for time.)
    """

    from transformers import AutoModelForCausalLM

    def costs(weights: str, activations: str) -> tuple[float, float, float]:
        """Loss of a format, dense and behind the predictors of the tests above, and the share of rows used."""
        found = []
        for method in ("dense", "lowrank"):
            config = replace(CONFIG, method=method, weights=weights, activations=activations)
            fitted = sparse.torch_pi2.predictors if method == "lowrank" else None
            fresh = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype=torch.float32).eval()
            model = torch_pi2.optimize(fresh, calibration, config, stats=stats, predictors=fitted, tokenizer=tokenizer)
            with work() as done:
                found.append(bits_per_byte(model, tokenizer, heldout, max_tokens=8192, window=256).bits_per_byte)
        return found[0], found[1], done.rows_used or 1.0

    stats = torch_pi2.profile(dense, calibration, config=CONFIG, tokenizer=tokenizer)
    base = bits_per_byte(dense, tokenizer, heldout, max_tokens=8192, window=256).bits_per_byte
    for weights, activations in (("int4", "float"), ("int4", "int8")):
        quantised, behind, rows_used = costs(weights, activations)
        assert 0.001 < quantised / base - 1 <= 0.02, (weights, activations)  # lossy: no change would be suspicious
        assert abs(behind / quantised - 1) < 0.01, (weights, activations)
        assert rows_used < 0.2
