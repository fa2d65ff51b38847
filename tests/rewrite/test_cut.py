"""Gemma 3n's first layers, whose gates are cut at so many deviations above their mean: in memory and stored."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from rewriting import assert_same_state, close
from stores import small
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, plain, randomise
from torch import nn

import torch_pi2
from torch_pi2.errors import GradientError
from torch_pi2.export.run import Bundle
from torch_pi2.graph.activation import identify
from torch_pi2.graph.find import search
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import replacement_of, sparse_layers
from torch_pi2.observe import counters
from torch_pi2.types.site import Formula

IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
TEXT = torch.randint(3, VOCAB, (16, 16), generator=torch.Generator().manual_seed(1))
SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("threshold", "lowrank", "auto")]
FORMS = ["gelu_tanh[sigmas=1.64485359](gate)*up", "gelu_tanh[sigmas=0](gate)*up", "gelu_tanh(gate)*up"]


def gemma3n(dtype: torch.dtype = torch.float32, cuts: tuple[float, ...] = (0.95, 0.5, 0.0), **more: int) -> nn.Module:
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=len(cuts),
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        head_dim=8,
        activation_sparsity_pattern=[*cuts],
        num_kv_shared_layers=0,
        laurel_rank=4,
        layer_types=["full_attention"] * len(cuts),
        **more,
    )
    torch.manual_seed(0)
    return randomise(transformers.Gemma3nForCausalLM(config).eval(), 0.2).to(dtype)


def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


def exact(model, **settings):
    return torch_pi2.optimize(model, TEXT, method="exact", batch_size=4, seq_len=16, calibration_tokens=128, **settings)


@pytest.mark.slow
@torch.no_grad()
def test_gemma3n_is_exact_and_comes_back() -> None:
    dense = gemma3n()
    assert [site.form for site in search(dense).sites] == FORMS
    model = exact(copy.deepcopy(dense))
    assert model.torch_pi2.plan.made_by["left"] == {}
    assert not model.torch_pi2.lossy
    assert [str(layer.method) for layer in sparse_layers(model)] == ["exact", "exact", "dense"]
    wanted = logits(dense)
    assert close(logits(model), wanted)
    assert close(logits(model, IDS[:1, :1]), logits(dense, IDS[:1, :1]))
    many = TEXT.repeat(1, 4)  # 1024 tokens: through matrix products
    assert close(logits(model, many), logits(dense, many))
    options = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), dense.generate(IDS, **options))
    counters.reset()
    sparse_layers(model)[0](torch.randn(3, HIDDEN))
    done = counters.read()
    assert 0 < done["up_rows"] < 0.15 * done["gate_rows"]
    with pytest.raises(GradientError), torch.enable_grad():
        model.train()(IDS)
    assert_same_state(torch_pi2.restore(model), dense.state_dict())
    assert torch.equal(logits(model.eval()), wanted)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_saved_packed_and_read_from_a_store(weights: str, tmp_path: Path) -> None:
    source = gemma3n()
    source.save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "quantised", weights)
    model = torch_pi2.load(tmp_path / "quantised")
    assert [layer.site.form for layer in sparse_layers(model)] == FORMS
    wanted = logits(model)
    torch_pi2.pack(tmp_path / "quantised", tmp_path / "packed")
    for stored in (torch_pi2.load(tmp_path / "packed", budget="1GiB"), small(tmp_path / "packed")):
        assert torch.equal(logits(stored), wanted)
        many = TEXT.repeat(1, 4)
        assert close(logits(stored, many), logits(model, many), 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("method", ["signbit", *SLOW])
def test_other_methods_leave_the_cut_layers_exact(method: str) -> None:
    model = torch_pi2.optimize(gemma3n(), TEXT.repeat(4, 1), method=method, batch_size=4, seq_len=16)
    methods = [str(layer.method) for layer in sparse_layers(model)]
    assert methods[:2] == ["exact", "exact"]
    assert methods[2] in ("threshold", "lowrank", "signbit")


class Cut(nn.Module):
    """Gemma 3n's layer with biases and parts of other names."""

    def __init__(self, k: float = 1.2, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        self.g, self.u = nn.Linear(HIDDEN, intermediate), nn.Linear(HIDDEN, intermediate)
        self.d, self.k = nn.Linear(intermediate, HIDDEN), k

    def forward(self, x):
        g = self.g(x)
        above = F.relu(g - (g.mean(-1, keepdim=True) + self.k * g.std(-1, keepdim=True, unbiased=False)))
        return self.d(F.silu(above) * self.u(x))


X = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@torch.no_grad()
def test_a_module_of_ones_own_eager_and_compiled() -> None:
    model = plain(FunctionalBlock(), Cut(), nn.LayerNorm(HIDDEN), Cut(-0.3, 101))
    wanted = model(X)
    torch_pi2.optimize(model, [(X,)], method="exact")
    forms = ["relu(up)", "silu[sigmas=1.2](gate)*up", "silu[sigmas=-0.3](gate)*up"]
    assert [layer.site.form for layer in model.torch_pi2.plan.layers] == forms
    assert isinstance(replacement_of(model[1]), SparseFFN)
    assert close(model(X), wanted)
    assert close(torch.compile(model)(X), wanted)


def test_what_only_looks_like_it() -> None:
    def of(statistic):
        return lambda p: F.gelu(F.relu(p[0] - statistic(p[0])), approximate="tanh") * p[1]

    shapes = [(1, 4, 48)] * 2
    found = identify(of(lambda g: g.mean(-1, keepdim=True) + 2 * g.std(-1, keepdim=True, unbiased=False)), shapes, 48)
    assert found == Formula("gelu_tanh[sigmas=2]", False, 0, 1)
    # what an unbiased deviation is too large by is a number
    found = identify(of(lambda g: g.mean(-1, keepdim=True) + 2 * g.std(-1, keepdim=True)), shapes, 48)
    assert found == Formula("gelu_tanh[sigmas=2.02116461]", False, 0, 1)
    for statistic in (
        lambda g: 2 * g.std(-1, keepdim=True, unbiased=False),
        lambda g: g.mean(-2, keepdim=True) + 2 * g.std(-2, keepdim=True, unbiased=False),
        lambda g: g.mean(-1, keepdim=True) + 0.1 + 2 * g.std(-1, keepdim=True, unbiased=False),
        lambda g: g.abs().mean(-1, keepdim=True) + 2 * g.std(-1, keepdim=True, unbiased=False),
    ):
        assert not isinstance(identify(of(statistic), shapes, 48), Formula)


@pytest.mark.slow
@torch.no_grad()
def test_bundles_have_it(tmp_path: Path) -> None:
    """A decoder of one layer, as lowering each takes seconds; layers of all forms follow, without a decoder."""
    model, ids = exact(gemma3n(cuts=(0.95,), altup_num_inputs=2)), list(range(3, 14))
    wanted = logits(model, torch.tensor([ids]))[0, -1]
    with Bundle(torch_pi2.export(model, tmp_path / "bundle", max_tokens=32, batches=(1,))) as bundle:
        assert close(bundle.logits(ids, len(ids))[0], wanted)
    layers = plain(Cut(), nn.LayerNorm(HIDDEN), Cut(0.0), nn.LayerNorm(HIDDEN), Cut(-0.3, 101))
    torch_pi2.optimize(layers, [(X,)], method="exact")
    with Bundle(torch_pi2.export(layers, tmp_path / "layers", args=(X,))) as bundle:
        assert close(bundle(X), layers(X))


class OverTokens(Cut):
    def forward(self, x):
        g = self.g(x)
        return self.d(
            F.silu(F.relu(g - (g.mean(0, keepdim=True) + g.std(0, keepdim=True, unbiased=False)))) * self.u(x)
        )


def test_a_cut_over_tokens_is_no_layer() -> None:
    found = search(plain(FunctionalBlock(), OverTokens()), (X,))
    assert [site.key for site in found.sites] == ["0"]


@torch.no_grad()
def test_hooks_inside_keep_it_dense_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = plain(FunctionalBlock(), Cut())
    seen: list[torch.Size] = []
    model[1].g.register_forward_hook(lambda m, a, y: seen.append(y.shape))
    wanted = model(X)
    torch_pi2.optimize(model, [(X,)], method="exact")
    assert list(model.torch_pi2.left) == ["1"]
    assert "1.g has a hook, which would not run" in caplog.text
    seen.clear()
    assert close(model(X), wanted)
    assert seen == [(2, 40, INTERMEDIATE)]
