"""Fitted predictors in int4 and int8, end to end: the bits of PyTorch from a saved folder, a store and a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import randomise
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.api import _read_as
from torch_pi2.export.run import Bundle
from torch_pi2.fitting.fit import fit
from torch_pi2.fitting.search import FitSettings
from torch_pi2.graph import find_sites
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.rows import values
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRank, LowRankRows
from torch_pi2.rewrite.state import ModelState
from torch_pi2.types.stats import ActivationStats

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
SHORT = {"n_tokens": 800, "steps": 40, "max_rounds": 1, "tolerance": 0.5, "hot_frequency": 0.9, "seq_len": 32}
TEXT = torch.randint(0, 96, (40, 32), generator=torch.Generator().manual_seed(1))
IDS = TEXT[:2, :12]


def dense() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2, hidden_act="relu", eos_token_id=None, max_position_embeddings=64)
    return randomise(LlamaForCausalLM(config).eval(), 0.2)


@pytest.fixture(scope="module", params=["int4", "int8"])
def fitted(request: pytest.FixtureRequest) -> tuple[str, ActivationStats, FittedPredictors]:
    """In int4, and as older files have them, in int8 with a scale per row."""
    model = dense()
    stats = torch_pi2.profile(model, TEXT, method="lowrank", seq_len=32)
    sites = [_read_as(site, stats[site.key]) for site in find_sites(model)]
    found = fit(model, TEXT, sites, stats, FitSettings(**SHORT))
    for key, p in found.items() if request.param == "int8" else ():
        (a, a_scale), (b, b_scale) = (by_row(values(m, "int4", n)) for m, n in ((p.a, p.hidden), (p.b, p.rank)))
        found[key] = LowRank(a, a_scale, b, b_scale, p.bias, p.threshold, p.card)
    return request.param, stats, found


def by_row(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = m.abs().amax(1).clamp_min(1e-12) / 127
    return (m / scale[:, None]).round().to(torch.int8), scale


@pytest.mark.slow
@pytest.mark.parametrize("stored", [{}, {"weights": "int4", "activations": "int8"}], ids=["float", "int4"])
def test_bits_are_the_same_everywhere(
    fitted: tuple[str, ActivationStats, FittedPredictors], stored: dict[str, Any], tmp_path: Path
) -> None:
    weights, stats, predictors = fitted
    kind = LowRankRows if weights == "int4" else LowRank
    assert predictors
    assert all(type(p) is kind and p.weights == weights for p in predictors.values())
    how: dict[str, Any] = {"method": "lowrank", "hot_frequency": 0.9, **stored}
    model = torch_pi2.optimize(dense(), stats=stats, predictors=predictors, **how)
    layers = list(sparse_layers(model))
    assert [layer.predictor_weights for layer in layers] == ["int4" if weights == "int4" else ""] * 2
    seen = {"activations": stored.get("activations", "float")}
    with torch.no_grad():
        wanted = model(IDS).logits
        torch_pi2.save(model, tmp_path / "saved")
        assert torch.equal(torch_pi2.load(tmp_path / "saved", **seen)(IDS).logits, wanted)
        torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
        over = torch_pi2.load(tmp_path / "store", budget="1GiB", **seen)
        assert torch.equal(over(IDS).logits, wanted)
        alone = nn.Sequential(model.model.layers[0].mlp)
        ModelState.of(model).attach(alone)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
        folder = torch_pi2.export(alone, tmp_path / "bundle", args=(x,))
        with Bundle(folder) as bundle:
            found = bundle(x)
        assert torch.equal(found, alone(x))
        assert not torch.equal(found, layers[0]._compute(x, layers[0].site.intermediate, 0.0)), "something was left out"
