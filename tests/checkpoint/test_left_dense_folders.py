"""A layer that cannot be replaced without its weights stops no folder: it stays dense there, and that is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import close, predictor
from tiny_models import randomise
from torch import nn

import torch_pi2
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import ConfigError, NoFFNFoundError
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.plan import Plan

IDS = torch.arange(3, 19).view(2, 8)
KEYS = ["model.layers.0.mlp", "model.layers.1.mlp"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes LLaMAs in whose layers of these numbers the module of the FFN adds its input: one that does more. Without
    exact zeros, a quantised folder has linear layers of it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    class Inline(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    init, numbers = modeling_llama.LlamaDecoderLayer.__init__, [1]

    def with_inline(self: Any, config: Any, layer_idx: int) -> None:
        init(self, config, layer_idx)
        if layer_idx in numbers:
            self.mlp.__class__ = Inline

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", with_inline)

    def make(*chosen: int, hidden_act: str = "relu") -> nn.Module:
        numbers[:] = [*chosen]
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, hidden_act=hidden_act, pad_token_id=0)
        return randomise(LlamaForCausalLM(config).eval())

    return make


def check(model: nn.Module) -> None:
    """Layer 0 has neurons alone, and it is said why layer 1 has none."""
    parts: Any = model.torch_pi2
    assert [layer.site.key for layer in parts.plan.layers] == KEYS[:1]
    assert parts.left[KEYS[1]] == "part of it is code of its owner"


def test_a_quantised_folder(inline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dense = inline(1, hidden_act="silu")
    dense.save_pretrained(tmp_path / "float")
    report = torch_pi2.quantize(tmp_path / "float", tmp_path / "int8", "int8")
    assert f"left dense: {KEYS[1]} (part of it is code of its owner)" in caplog.text
    matrices = [f"{KEYS[1]}.{name}_proj" for name in ("gate", "up", "down")]
    assert {KEYS[0], *matrices} < report.errors.keys()
    model = torch_pi2.load(tmp_path / "int8")
    check(model)
    assert all(isinstance(model.get_submodule(name), QuantLinear) for name in matrices)
    found = logits(model)
    assert close(found, logits(load_dense(tmp_path / "int8")), 1e-4)
    assert 0 < (found - logits(dense)).norm() / logits(dense).norm() < 0.05
    torch_pi2.pack(tmp_path / "int8", tmp_path / "store")
    over = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    check(over)
    assert torch.equal(logits(over), found)


@pytest.mark.parametrize("hidden_act", ["relu", "silu"])
def test_saved_after_it_was_quantised_in_memory(inline: Any, hidden_act: str, tmp_path: Path) -> None:
    """The layer's neurons are in the folder, behind lazy tensors as in memory."""
    sparse = torch_pi2.quantize_(inline(1, hidden_act=hidden_act), "int4")
    assert [layer.site.key for layer in sparse.torch_pi2.plan.layers] == KEYS
    torch_pi2.save(sparse, tmp_path / "saved")
    model = torch_pi2.load(tmp_path / "saved")
    assert [layer.site.key for layer in model.torch_pi2.plan.layers] == KEYS
    assert torch.equal(logits(model), logits(sparse))
    assert close(logits(load_dense(tmp_path / "saved")), logits(sparse), 1e-4)
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)), logits(model))
    torch_pi2.save(model, tmp_path / "again")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "again")), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["quantize", "pack"])
def test_an_optimised_folder_keeps_the_rest_of_its_plan(inline: Any, verb: str, tmp_path: Path) -> None:
    """Predictors and statistics are bound to the hash of all layers, which stays."""
    model = inline(1)
    ids = torch.randint(3, 96, (16, 32), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="lowrank", calibration_tokens=512, seq_len=32)
    stats = torch_pi2.profile(model, ids, config=config)
    predictors = FittedPredictors()
    for site in find_sites(model):
        made = predictor(64, 96)
        predictors[site.key] = LowRank.from_tensors(made, -1e9, PredictorCard(0.9, 0.5, 0.2, 100, 0.1, 4))
    saved = torch_pi2.save(torch_pi2.optimize(model, config=config, stats=stats, predictors=predictors), tmp_path / "a")
    if verb == "quantize":
        torch_pi2.quantize(saved, tmp_path / "b")
        made = torch_pi2.load(tmp_path / "b")
    else:
        torch_pi2.pack(saved, tmp_path / "b")
        made = torch_pi2.load(tmp_path / "b", budget="1GiB", context=16)
    assert made.torch_pi2.left == {}
    before, after = Plan.load(saved / "pi2"), made.torch_pi2.plan
    assert after.model_hash == before.model_hash
    assert torch.equal(after.layers[0].order, before.layers[0].order)
    assert after.layers[0].method == "lowrank"
    assert close(logits(made), logits(load_dense(tmp_path / "b")), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1GiB", None])
def test_a_store_of_layers_that_are_code(inline: Any, tmp_path: Path, budget: str | None) -> None:
    """Behind lazy tensors; their steps are not recorded, which would ask the store for dense weights."""
    model = inline(0, 1)
    model.save_pretrained(tmp_path / "float")
    assert torch_pi2.pack(tmp_path / "float", tmp_path / "store").layers == 2
    made = torch_pi2.load(tmp_path / "store", budget=budget)
    assert made.torch_pi2.left == {}
    torch.testing.assert_close(logits(made), logits(model))
    ids = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(made.generate(IDS[:1], **ids), model.generate(IDS[:1], **ids))


@pytest.mark.slow
def test_where_no_layer_is_left_there_are_linear_layers(inline: Any, tmp_path: Path) -> None:
    model = inline(0, 1, hidden_act="silu")
    model.save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "int8", "int8")
    made = torch_pi2.load(tmp_path / "int8")
    assert made.torch_pi2.plan.layers == []
    assert made.torch_pi2.left.keys() == {*KEYS}
    assert 0 < (logits(made) - logits(model)).norm() / logits(model).norm() < 0.05


@pytest.fixture(scope="module")
def bitnet() -> nn.Module:
    """No layer of it can be made sparse: a norm stands before down, and nothing is exactly zero."""
    from transformers import BitNetConfig, BitNetForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96}
    config = BitNetConfig(
        **sizes, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=False, hidden_act="silu"
    )
    return randomise(BitNetForCausalLM(config).eval())


def test_without_any_layer_linears_are_quantised(
    bitnet: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bitnet.save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "disk", "int8")
    said = "no feed-forward layer becomes neurons, 11 linear layers are quantised"
    assert said in caplog.text
    on_disk = torch_pi2.load(tmp_path / "disk")
    reason = "a norm over all its neurons stands before the last matmul"
    assert on_disk.torch_pi2.left == dict.fromkeys(KEYS, reason)
    caplog.clear()
    in_memory = torch_pi2.quantize_(copy.deepcopy(bitnet), "int8")
    assert said in caplog.text
    assert in_memory.torch_pi2.left == on_disk.torch_pi2.left
    assert torch.equal(logits(on_disk), logits(in_memory))
    assert close(logits(on_disk), logits(load_dense(tmp_path / "disk")), 1e-4)
    assert 0 < (logits(on_disk) - logits(bitnet)).norm() / logits(bitnet).norm() < 0.05
    torch_pi2.save(in_memory, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved")), logits(in_memory))
    ids = on_disk.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, in_memory.generate(IDS[:1], max_new_tokens=4, do_sample=False))


def test_what_wants_neurons_is_refused_without_them(bitnet: nn.Module, tmp_path: Path) -> None:
    bitnet.save_pretrained(tmp_path / "float")
    with pytest.raises(NoFFNFoundError, match="a norm over all its neurons"):
        torch_pi2.pack(tmp_path / "float", tmp_path / "store")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "int4")
    with pytest.raises(ConfigError, match="expected layers of neurons, found none"):
        torch_pi2.pack(tmp_path / "int4", tmp_path / "store")
    with pytest.raises(NoFFNFoundError, match="a norm over all its neurons"):
        torch_pi2.optimize(copy.deepcopy(bitnet), method="exact", weights="int4")
    with pytest.raises(NoFFNFoundError, match=r"quantising Sequential: expected feed-forward layers, or linear layers"):
        torch_pi2.quantize_(nn.Sequential(nn.Linear(8, 8)), "int4", [(torch.randn(2, 64, 8),)])
