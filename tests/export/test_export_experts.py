"""Bundles of mixtures of experts: tokens and logits of PyTorch in ``Bundle`` and the C++ runner, over any budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import bundle_of
from runner_calls import run
from tiny_experts import build
from torch import nn

import torch_pi2
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.export import executorch as backend
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.run import Bundle
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.rewrite.state import ModelState

PROMPT = [7, 30, 81, 5, 90, 11]
TEXT = torch.randint(0, 96, (24, 32), generator=torch.Generator().manual_seed(1))


def optimized(name: str, method: str = "exact", settings: dict[str, Any] | None = None, **config: Any) -> nn.Module:
    model = build(name, num_hidden_layers=1, max_position_embeddings=128, **(settings or {}))
    if method == "exact":
        return torch_pi2.optimize(model, method="exact", **config)
    return torch_pi2.optimize(model, TEXT, torch_pi2.Config(method=method, calibration_tokens=700, **config))


GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}

#: Every form of what a blob of a mixture has.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: optimized("Mixtral", settings={"intermediate_size": 1024}),
    "Mixtral signbit int4": lambda: optimized("Mixtral", "signbit", weights="int4", activations="int8"),
    "Mixtral lowrank": lambda: optimized(
        "Mixtral", "lowrank", {"num_local_experts": 2, "num_experts_per_tok": 1}, target_recall=0.7
    ),
    "Olmoe threshold": lambda: optimized("Olmoe", "threshold", {"num_experts": 6}, sparsity=0.6),
    # experts with biases and numbers in their activation, attention with sinks, a window of fewer tokens than are read
    "GptOss": lambda: optimized("GptOss", settings=GPT_OSS),
}


QUICK = ("Mixtral", "GptOss")


@pytest.fixture(scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    name = request.param
    return bundle_of(tmp_path_factory, f"experts-{name.replace(' ', '-')}", MODELS[name], batches=(1,))


@pytest.mark.slow
def test_tokens_and_logits_are_the_models(exported: tuple[nn.Module, Path]) -> None:
    model, folder = exported
    assert any(isinstance(home, SparseExperts) for home in homes(model))
    wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, pad_token_id=0)[0].tolist()
    ids = ",".join(map(str, PROMPT))
    with Bundle(folder) as bundle:
        (answer,) = bundle.generate(PROMPT, 30).sequences
        logits = bundle.logits([*PROMPT, 40], len(PROMPT))
    with torch.no_grad():
        expected = model(torch.tensor([[*PROMPT, 40]])).logits[0]
    assert len(set(wanted[6:])) > 2  # a text that says something
    assert answer.ids == wanted[6:]
    torch.testing.assert_close(logits[1], expected[-1], rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert run(folder, "--ids", ids, "--max-new-tokens", 30)["sequences"][0]["ids"] == wanted[6:]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    return bundle_of(tmp_path_factory, "experts-Mixtral", MODELS["Mixtral"], batches=(1,))


@pytest.mark.slow
def test_a_budget_changes_no_token(mixtral: tuple[nn.Module, Path]) -> None:
    _, folder = mixtral
    manifest = Manifest.load(folder)
    budget = manifest.fixed_bytes + (1 << 20)
    assert manifest.ffn_bytes == 3 << 20
    assert manifest.token_bytes == manifest.ffn_bytes // 2  # two of four experts, every gate of them
    with Bundle(folder) as bundle:
        wanted = bundle.generate(PROMPT, 20).sequences[0].ids
    with Bundle(folder, budget) as bundle:
        assert bundle.generate(PROMPT, 20).sequences[0].ids == wanted
        (about,) = backend.stats()["stores"]
    assert about["bytes_read"] > about["cache_bytes"]
    assert about["cache_bytes"] <= 1 << 20
    found = run(folder, "--ids", ",".join(map(str, PROMPT)), "--max-new-tokens", 20, "--budget", budget)
    assert found["sequences"][0]["ids"] == wanted
    assert found["memory"]["peak_bytes"] <= budget


def test_hot_parts_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = optimized("Mixtral")
    message = (
        r"expected feed-forward layers without experts, found 1 mixtures of experts \(model.layers.0.mlp.experts\)"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        torch_pi2.export(model, tmp_path / "b", hot={1: 1}, batches=(1,))
    assert not (tmp_path / "b").exists()


class Routed(nn.Module):
    """A mixture whose router is whoever calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.experts = model.model.layers[0].mlp.experts

    def forward(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, index, routing)
        return y


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Of the experts alone."""
    whole = optimized("Mixtral")
    model = Routed(whole).eval()
    ModelState.of(whole).attach(model)
    args = (torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    folder = tmp_path_factory.mktemp("experts") / "b"
    tokens = torch.export.Dim("tokens", min=1, max=70)
    return model, torch_pi2.export(model, folder, args=args, dynamic_shapes=({0: tokens},) * 3)


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_bits_of_the_operator(module: tuple[nn.Module, Path], tokens: int) -> None:
    """An expert twice, none, and unused ones."""
    model, folder = module
    g = torch.Generator().manual_seed(tokens)
    x, routing = torch.randn(tokens, 64, generator=g), torch.rand(tokens, 2, generator=g)
    index = torch.randint(0, 5, (tokens, 2), generator=g)
    with Bundle(folder) as bundle, torch.no_grad():
        assert torch.equal(bundle(x, index, routing), model(x, index, routing))


def test_a_router_of_another_model_is_refused(module: tuple[nn.Module, Path]) -> None:
    x, routing = torch.zeros(2, 64), torch.zeros(2, 2)
    with Bundle(module[1]) as bundle:
        for wrong in (5, -1):
            with pytest.raises(
                ArtifactError, match=rf"experts from layer 0: expected a router of this model.*found {wrong}"
            ):
                bundle(x, torch.tensor([[0, 1], [wrong, 2]]), routing)
        bundle(x, torch.tensor([[0, 1], [4, 2]]), routing)
