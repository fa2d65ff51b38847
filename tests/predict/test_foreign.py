"""Predictors and layers that are not ours are refused by name, or the model says that it is lossy."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.graph.dispatch import NeuronClusterMode
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.predict.file import save_predictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.rewrite.rewrite import rewrite

IDS = torch.randint(3, 64, (20, 32), generator=torch.Generator().manual_seed(0))
HOW = {"method": "signbit", "seq_len": 32, "hot_frequency": 0.9}


class Mine(SignBit):
    """A predictor with scores that the kernels would not ask for."""

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        return SignBit.scores(self, x_TH) * 0


def subclass(fitted: Any) -> Any:
    return Mine(fitted.signs, fitted.hidden, fitted.margin, fitted.card)


def patched(fitted: Any) -> Any:
    fitted.scores = types.MethodType(Mine.scores, fitted)
    return fitted


def duck(fitted: Any) -> Any:
    return types.SimpleNamespace(card=fitted.card, threshold=0.0, scores=fitted.scores, tensors=fitted.tensors)


@pytest.mark.parametrize("form", [subclass, patched, duck])
def test_predictors_that_layers_would_not_ask_are_refused(form: Any, tmp_path: Path) -> None:
    model = tiny("llama-relu")
    stats = torch_pi2.profile(model, IDS, **HOW)
    predictors = torch_pi2.fit(model, IDS, stats=stats, **HOW)
    plan = torch_pi2.plan(model, stats, predictors, **HOW)
    foreign = {key: form(predictor) for key, predictor in predictors.items()}
    for use in (
        lambda: torch_pi2.optimize(model, stats=stats, predictors=foreign, **HOW),
        lambda: torch_pi2.plan(model, stats, foreign, **HOW),
        lambda: rewrite(model, plan, foreign),
        lambda: save_predictors(tmp_path, foreign, stats.model_hash),
    ):
        with pytest.raises(ConfigError, match=r"predictors?.*: expected a .*SparseMethod"):
            use()
    with torch.no_grad(), NeuronClusterMode(plan, foreign) as mode:
        model(IDS)
    assert mode.lossy


def test_methods_of_layers_cannot_be_assigned() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    layer = sparse_layers(model)[0]
    for name in ("_compute", "predict", "forward", "whole"):
        with pytest.raises(ConfigError, match=f"{name} of model.layers.0.mlp: .*NeuronClusterMode"):
            setattr(layer, name, lambda x: x)
    assert not model.torch_pi2.lossy


@pytest.mark.parametrize("way", ["class", "instance", "threshold"])
def test_a_changed_model_says_that_it_is_lossy(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    assert not model.torch_pi2.lossy
    assert model.torch_pi2.loss_change == 0
    layer = sparse_layers(model)[0]
    if way == "class":
        monkeypatch.setattr(SparseFFN, "_compute", lambda self, x, *_: torch.zeros_like(x))
    elif way == "instance":
        layer.__dict__["_compute"] = lambda x, *_: torch.zeros_like(x)
    else:
        layer.threshold = 0.5
    assert model.torch_pi2.lossy
    assert model.torch_pi2.loss_change is None
    assert model.torch_pi2.changed
