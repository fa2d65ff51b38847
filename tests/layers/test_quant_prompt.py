"""Prompts: many tokens go through matrix products, with the decode path's result."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rewriting import make_plan, predictor
from tiny_models import HIDDEN, tiny
from torch import nn

from torch_pi2.layers import prompt
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import PREDICTED_SHARE, PROMPT_TOKENS, sparse_only, takes_prompt_path
from torch_pi2.observe import counters
from torch_pi2.rewrite.linears import Storage
from torch_pi2.rewrite.rewrite import rewrite

X = torch.randn(3, 20, HIDDEN, generator=torch.Generator().manual_seed(4))


def layer_of(model: nn.Module, *, kind: str = "float", method: str = "exact", **plan: object) -> SparseFFN:
    return sparse_layers(rewrite(model, make_plan(model, method=method, **plan), storage=Storage(kind)))[0]


def both(layer: SparseFFN, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Result over the prompt path, over the decode path, and calls of the sparse operator in the former."""
    before = counters.read()["calls"]
    with torch.no_grad():
        found = layer.whole(x)
        calls = counters.read()["calls"] - before
        with sparse_only():
            return found, layer.whole(x), calls


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("name", ["drelu", "llama-bias", "opt", "nemotron", "gemma"])
@pytest.mark.parametrize("kind", ["float", "int4", "int8"])
def test_prompts_get_the_result_of_decoding(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_SLICE", 20)  # of 48 neurons: two whole slices and a rest
    found, wanted, calls = both(layer_of(tiny(name), kind=kind, method="dense" if name == "gemma" else "exact"), X)
    assert calls == 0
    assert found.shape == X.shape
    assert off(found, wanted) < 1e-5


@pytest.mark.parametrize("kind", ["float", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(tiny("drelu").to(dtype), kind=kind)
    found, wanted, calls = both(layer, X.to(dtype))
    assert (calls, found.dtype) == (0, dtype)
    assert 0 < off(found, wanted) < (0.03 if dtype is torch.bfloat16 else 0.004)


def test_prompts_do_not_overflow_between_the_products() -> None:
    layer = layer_of(tiny("drelu").half())
    layer.neuron_rows[:, :2] *= 200  # gate times up: 40,000 times as much, beyond 65504
    layer.neuron_rows[:, 2] /= 4000
    found, wanted, calls = both(layer, 4 * X.half())
    x = 4 * X
    h = torch.relu(x @ layer.neuron_rows[:, 0].float().T) * torch.relu(x @ layer.neuron_rows[:, 1].float().T)
    assert float(h.max()) > torch.finfo(torch.float16).max
    assert calls == 0
    assert found.isfinite().all()
    assert off(found, wanted) < 0.004


@pytest.mark.parametrize("kind", ["float", "int8"])
def test_threshold_drops_in_prompts_what_it_drops_in_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_SLICE", 20)
    layer = layer_of(tiny("llama"), kind=kind, method="threshold", threshold=0.2)
    assert 0 < layer.n_hot < layer.site.intermediate
    found, wanted, calls = both(layer, X)
    assert calls == 0
    assert off(found, wanted) < 1e-5
    with torch.no_grad():
        assert off(layer._compute(X, layer.site.intermediate, 0.0), wanted) > 1e-3


def test_few_tokens_and_int8_activations_stay_with_the_operator() -> None:
    layer = layer_of(tiny("drelu"))
    x = X.reshape(-1, HIDDEN)
    assert not takes_prompt_path(layer, x[: PROMPT_TOKENS - 1])
    assert takes_prompt_path(layer, x[:PROMPT_TOKENS])
    assert not takes_prompt_path(layer, x.double())
    with sparse_only():
        assert not takes_prompt_path(layer, x)
        with sparse_only():
            pass
        assert not takes_prompt_path(layer, x)
    assert takes_prompt_path(layer, x)
    layer.int8_activations = True
    assert not takes_prompt_path(layer, x)


def test_predicted_layers_stay_sparse_while_that_is_faster() -> None:
    for active, dense in ((0.05, False), (2 * PREDICTED_SHARE, True)):
        model = tiny("drelu")
        plan = make_plan(model, method="lowrank", hot=0.05)
        plan.layers = [replace(layer, expected_active=active) for layer in plan.layers]
        predictors = {layer.site.key: {**predictor(), "threshold": 0.1} for layer in plan.layers}
        layer = sparse_layers(rewrite(copy.deepcopy(model), plan, predictors))[0]
        assert takes_prompt_path(layer, X) is dense
        found, wanted, calls = both(layer, X)
        assert calls == (0 if dense else 1)
        if dense:  # what the predictor would have missed is there
            assert off(found, layer._compute(X, layer.site.intermediate, 0.0)) < 1e-5
            assert off(found, wanted) > 1e-3


def test_prompts_under_autocast_are_computed_as_without() -> None:
    layer = layer_of(tiny("drelu"))
    x = X.reshape(-1, HIDDEN)
    with torch.no_grad():
        wanted = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())


def test_nan_stays_visible_in_its_token() -> None:
    x = X.clone()
    x[1, 4, 3] = float("nan")
    found, _, _ = both(layer_of(tiny("drelu"), kind="int4"), x)
    assert found.isnan().any(-1).sum() == 1
    assert found[1, 4].isnan().any()
