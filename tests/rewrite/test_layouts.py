"""Weights in other layouts than ``nn.Linear``'s: transposed, bare, down tied to up; and numbers in activations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import assert_same_state, close
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, _hf, randomise, tiny
from torch import nn

import torch_pi2
from torch_pi2.checkpoint.quantize import quantize
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.program import export_program
from torch_pi2.export.run import Bundle
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import replacement_of
from torch_pi2.rewrite.rewrite import restore

IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
X_BTH = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))
NAMES = ("gpt2-relu", "gpt2", "llama-quick-gelu")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: tiny(name) for name in NAMES}


def optimised(model: nn.Module, **settings: Any) -> nn.Module:
    return torch_pi2.optimize(copy.deepcopy(model), **({"method": "exact"} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_quantised_saved_packed_and_from_a_checkpoint(
    models: dict[str, nn.Module], name: str, weights: str, tmp_path: Path
) -> None:
    # as quantize() chooses of a checkpoint: the exact gate, or where that skips nothing every neuron
    sparse = optimised(models[name], weights=weights, method="exact" if name == "gpt2-relu" else "dense")
    wanted = logits(sparse)
    assert not close(wanted, logits(models[name]), 1e-4)
    torch_pi2.save(sparse, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved")), wanted)
    assert close(logits(load_dense(tmp_path / "saved")), wanted, 1e-4)
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)), wanted)
    models[name].save_pretrained(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", weights)
    found = torch_pi2.load(tmp_path / "out")
    assert torch.equal(logits(found), wanted)
    assert found.torch_pi2.plan.model_hash == sparse.torch_pi2.plan.model_hash


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_exported(models: dict[str, nn.Module], name: str) -> None:
    sparse = optimised(models[name])
    with torch.no_grad():
        wanted = sparse(IDS, use_cache=False).logits
        program = export_program(sparse, kwargs={"input_ids": IDS, "use_cache": False})
        assert torch.equal(program.module()(input_ids=IDS, use_cache=False).logits, wanted)


class Tied(nn.Module):
    """Down is up transposed."""

    def __init__(self, act: Any = F.relu) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(HIDDEN, INTERMEDIATE), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.act(self.up(x)), self.up.weight.t())


def test_down_that_is_up_transposed_stays_dense() -> None:
    """Calibration could not tell up from down."""
    model = nn.Sequential(FunctionalBlock(), Tied()).eval()
    assert torch_pi2.supported(model, (X_BTH,)).left == {"1.up": "1.up.weight stands in two places of it"}


class Bare(nn.Module):
    """A module that is the layer, and nothing else; or code of a block that does more."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(HIDDEN, INTERMEDIATE)),
            nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN)),
        )
        self.b1, self.b2 = nn.Parameter(torch.randn(INTERMEDIATE)), nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.b1, x.reshape(-1, HIDDEN), self.w1)
        y = (F.relu(y) @ self.w2 + self.b2).reshape(x.shape)
        return x + y if self.residual else y


@torch.no_grad()
def test_bare_parameters(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = randomise(nn.Sequential(FunctionalBlock(), Bare(False), Bare(True)).eval())
    wanted = model(X_BTH)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch_pi2.optimize(model, [(X_BTH,)], method="exact")
    assert [y.site.key for y in model.torch_pi2.plan.layers] == ["0", "1"]
    reason = "its weights are no linear layers', but parameters of Bare, which computes more"
    assert model.torch_pi2.left == {"2": reason}
    assert f"left dense: 2 ({reason})" in caplog.text
    assert close(model(X_BTH), wanted)
    assert_same_state(restore(model), state)
    with pytest.raises(UnsupportedModelError, match=r"rewriting 0 \(Bare\): expected modules that compute the FFN"):
        torch_pi2.optimize(nn.Sequential(Bare(True)).eval(), [(X_BTH,)], method="exact")


@pytest.mark.slow
@torch.no_grad()
def test_a_multiplier_of_the_result() -> None:
    class Scaled(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.up, self.down, self.last = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN, bias=False), last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(F.relu(self.up(x) * 0.5)) * 0.25
            return y if self.last else x + y

    torch.manual_seed(0)
    model = randomise(nn.Sequential(FunctionalBlock(), Scaled(True), Scaled(False)).eval())
    wanted = model(X_BTH)
    torch_pi2.optimize(model, [(X_BTH,)], method="exact")
    found = {y.site.key: y.site.activation for y in model.torch_pi2.plan.layers}
    # within the residual block, whose own code multiplies, it is no part of the layer
    assert found == {"0": "relu", "1": "relu[out=0.125]", "2": "relu[out=0.5]"}
    assert isinstance(replacement_of(model[1]), SparseFFN)
    assert close(model(X_BTH), wanted)


@pytest.mark.slow
def test_bundles_have_numbers_of_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = optimised(randomise(_hf("Llama", hidden_act="quick_gelu", num_hidden_layers=1).eval()))
    ids = list(range(3, 12))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1]
    with Bundle(torch_pi2.export(model, tmp_path / "bundle", max_tokens=32, batches=(1,))) as bundle:
        torch.testing.assert_close(bundle.logits(ids, len(ids))[0], wanted, rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"silu\[in=1\.702.*hot parts of bundles have no others"):
        torch_pi2.export(model, tmp_path / "hot", max_tokens=32, batches=(1,), hot={1: 1})
