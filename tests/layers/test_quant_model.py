"""Quantised models in memory: equal to the dense model of what their rows stand for, honest about what is lost."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import make_plan, predictor
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.errors import (
    ConfigError,
    DeviceError,
    GradientError,
    NonFiniteError,
    ShapeError,
)
from torch_pi2.formats import row_bytes
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops.constants import constants
from torch_pi2.rewrite.linears import Storage, find_linears, quantize_linears
from torch_pi2.rewrite.rewrite import rewrite
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, weights_hash
from torch_pi2.types.site import FFNSite, LinearRef

IDS = torch.arange(3, 35).reshape(2, 16) % 64
CALIBRATION = torch.randint(3, 64, (40, 32), generator=torch.Generator().manual_seed(5))


def quantised(name: str, **config: object) -> tuple[nn.Module, nn.Module]:
    """A tiny model as it was, and quantised."""
    dense = tiny(name)
    settings = {"method": "exact", "weights": "int4"} | config
    return dense, torch_pi2.optimize(copy.deepcopy(dense), config=torch_pi2.Config(**settings))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def linear(rows: int = 70, columns: int = 48, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias).eval()


# --- one linear layer ---


@pytest.mark.skipif(not constants().blocks, reason="this CPU has no kernels for blocks")
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_linears_of_int8_activations_keep_their_rows_in_blocks_and_show_it_to_nobody(kind: str, tmp_path: Path) -> None:

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=72, num_hidden_layers=2, hidden_act="relu", **sizes)).eval()
    model = torch_pi2.optimize(dense, config=torch_pi2.Config(method="exact", weights=kind, activations="int8"))
    linears = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    in_blocks = [name for name, m in linears.items() if m.blocks]
    assert len(in_blocks) == 8
    assert sorted(set(linears) - set(in_blocks)) == ["lm_head"]  # 72 rows are no whole number of blocks
    rowwise = copy.deepcopy(model)
    for module in rowwise.modules():
        if isinstance(module, QuantLinear):
            module.leave_blocks()
    wanted = logits(model)
    assert near(logits(rowwise), wanted)  # sums in another order
    for a, b in zip(model.state_dict().items(), rowwise.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    assert f"-> 128, {kind}, int8 activations" in str(linears[in_blocks[0]])
    for name, saved in (("blocks", model), ("rows", rowwise)):
        torch_pi2.save(saved, tmp_path / name)
    files = [(tmp_path / name / "pi2" / "weights.safetensors").read_bytes() for name in ("blocks", "rows")]
    assert files[0] == files[1]
    loaded = torch_pi2.load(tmp_path / "rows", activations="int8")
    assert torch.equal(logits(loaded), wanted)
    with torch.no_grad():
        key = loaded.get_submodule("model.layers.0.self_attn.k_proj")
        x = torch.randn(9, 128)
        assert torch.equal(torch.cat([key(x[t : t + 1]) for t in range(9)]), key(x))
    compiled = torch_pi2.Decoder(loaded, max_tokens=24)
    eager = torch_pi2.Decoder(model, max_tokens=24, compiled=False)
    for decoder in (compiled, eager):
        decoder.prompt(IDS[:1])
    for token in IDS[1:, :6].flatten():
        ids = token.reshape(1, 1)
        assert torch.equal(compiled.step(ids), eager.step(ids))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_linear_computes_with_what_its_rows_stand_for(kind: str) -> None:
    float_layer = linear()
    made = QuantLinear.from_linear(float_layer, kind)
    x = torch.randn(2, 3, 48)
    with torch.no_grad():
        assert near(made(x), F.linear(x, made.dequantized(), float_layer.bias))
        for dtype in (torch.bfloat16, torch.float16):
            assert made(x.to(dtype)).dtype is dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert made(x).dtype is torch.bfloat16
    weight = float_layer.weight.detach()
    assert made.relative_error(weight) == pytest.approx(
        float((made.dequantized() - weight).norm() / weight.norm()), rel=1e-5
    )
    assert made.rows.shape == (70, row_bytes(kind, 48))
    assert str(made) == f"QuantLinear(48 -> 70, {kind}, bias=True)"


def test_linear_looks_like_the_float_layer_from_outside() -> None:
    float_layer = linear().to(torch.bfloat16)
    made = QuantLinear.from_linear(float_layer, "int8")
    assert made.weight.shape == float_layer.weight.shape
    assert made.weight.dtype is torch.bfloat16
    assert isinstance(made.weight, OffloadedParameter)
    state = made.state_dict()
    assert set(state) == {"weight", "bias"}
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert near(state["weight"].float(), float_layer.weight.detach().float(), 0.02)
    assert torch.equal(state["bias"], float_layer.bias)
    with pytest.raises(ConfigError, match=r"load_state_dict into a quantised linear layer: expected a float model"):
        made.load_state_dict(float_layer.state_dict())


def test_converting_the_model_leaves_rows_and_bias_exact() -> None:
    made = QuantLinear.from_linear(linear(), "int4")
    rows, bias = made.rows.clone(), made.bias.clone()
    made.to(torch.bfloat16)
    assert torch.equal(made.rows, rows)
    assert torch.equal(made.bias, bias)
    assert made.dtype is torch.bfloat16
    assert copy.deepcopy(made).dequantized().dtype is torch.bfloat16


def test_linear_refuses() -> None:
    made = QuantLinear.from_linear(linear(), "int4")
    with torch.no_grad(), pytest.raises(ShapeError, match=r"quantised linear layer: expected \[..., 48\]"):
        made(torch.ones(2, 47))
    with pytest.raises(GradientError, match=r"torch.ops.pi2.linear: expected no gradients"):
        made(torch.ones(2, 48, requires_grad=True))
    with pytest.raises(DeviceError, match=r"device of lm_head: expected cpu, found meta"):
        QuantLinear.from_linear(nn.Linear(32, 64, device="meta"), "int4", name="lm_head")
    with pytest.raises(ConfigError, match=r"weights: expected int4 or int8, found 'int2'"):
        QuantLinear.from_linear(linear(), "int2")
    with pytest.raises(ShapeError, match=r"rows of a linear layer: expected uint8 \[N, 36\] \(48 columns of int4\)"):
        QuantLinear(torch.zeros(3, 35, dtype=torch.uint8), None, 48, "int4")


# --- a whole model ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("drelu", "int8"),
        ("llama-bias", "int4"),
        ("gemma2", "int4"),
        ("phi3", "int4"),
        ("opt", "int4"),
        ("falcon-bias", "int8"),
        ("nemotron", "int4"),
    ],
)
def test_model_equals_the_dense_model_of_its_rows(name: str, kind: str) -> None:
    """Every form of FFN, fused and with biases: the float model with the dequantised weights gives the same logits."""
    dense, model = quantised(name, weights=kind, method="exact" if name not in ("gemma2", "phi3") else "dense")
    assert any(isinstance(m, QuantLinear) for m in model.modules())
    before, error = logits(dense), 0.12 if kind == "int4" else 0.01
    state = model.state_dict()
    assert set(state) == set(dense.state_dict())
    if getattr(dense.config, "tie_word_embeddings", False):
        dense.lm_head.weight = nn.Parameter(dense.lm_head.weight.detach().clone())  # the head has rows of its own
    dense.load_state_dict(state)
    assert near(logits(model), logits(dense))
    assert not torch.equal(logits(dense), before)
    assert all(0 < e < error for e in model.torch_pi2.quantization.values())


@pytest.mark.parametrize("block", [FunctionalBlock, GatedBlock], ids=lambda b: b.__name__)
def test_lazy_layers_compute_with_their_rows(block: type[nn.Module]) -> None:
    model, x = plain(block(), block()), torch.randn(2, 5, HIDDEN)
    dense = copy.deepcopy(model)
    method = "exact" if block is FunctionalBlock else "dense"
    rewrite(model, make_plan(model, (x,), method=method), storage=Storage("int4"))
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert near(model(x), dense(x))


def test_predictors_choose_among_quantised_neurons() -> None:
    """Float and quantised neurons skip the same neurons, whichever form the predictor has."""
    model = tiny("drelu")
    plan = make_plan(model, method="lowrank")
    rows = {"a": torch.randn(4, HIDDEN), "b": torch.randn(INTERMEDIATE, 4), "bias": torch.randn(INTERMEDIATE)}
    rows |= {name: torch.ops.pi2.quantize(rows[name], "int8") for name in ("a", "b")}
    for tensors in (predictor(), rows):
        predictors = {layer.site.key: {**tensors, "threshold": 0.1} for layer in plan.layers}
        found = rewrite(copy.deepcopy(model), plan, predictors, storage=Storage("int8"))
        wanted = copy.deepcopy(model)
        wanted.load_state_dict(found.state_dict())
        sites = [layer.site for layer in plan.layers]
        rewrite(wanted, replace(plan, model_hash=weights_hash(wanted, sites)), predictors)
        assert all(layer.has_predictor for layer in sparse_layers(found))
        assert near(logits(found), logits(wanted))
    broken = {key: {**p, "a": p["a"][:, :-1]} for key, p in predictors.items()}
    with pytest.raises(ShapeError, match=r"predictor a of model.layers.0.mlp: expected \(4, 18\), found \(4, 33\)"):
        rewrite(copy.deepcopy(model), plan, broken)


@pytest.mark.skipif(not constants().blocks, reason="this CPU has no kernels for blocks")
@pytest.mark.parametrize("bias", [False, True])
def test_predictors_of_int8_activations_keep_their_rows_in_blocks_and_show_it_to_nobody(bias: bool) -> None:
    hidden, intermediate, rank, n_hot = 128, 203, 64, 22
    gate, up, down = (LinearRef(f"mlp.{name}") for name in ("gate", "up", "down"))
    site = FFNSite("mlp", 0, "relu", False, gate, up, down, hidden, intermediate, "mlp")
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (rank, hidden), "b": (intermediate, rank)}
    given = {k: torch.ops.pi2.quantize(torch.randn(*shape, generator=g), "int4") for k, shape in shapes.items()}
    if bias:
        given["bias"] = torch.randn(intermediate, generator=g)
    order = torch.randperm(intermediate, generator=g).int()
    plan = LayerPlan(site, Method.LOWRANK, n_hot, order)
    made = SparseFFN.empty(site, plan, "int4", given, 0.3, int8_activations=True)
    assert made.predictor_format == "int4_blocks"
    cold = order[n_hot:].long()
    wanted = {name: t if name == "a" else t[cold] for name, t in given.items()}
    found = made.predictor_rows()
    assert set(found) == {*wanted, "bias"}
    assert all(torch.equal(found[name], t) for name, t in wanted.items())
    x = torch.randn(50, hidden, generator=g)
    mask = made.predict(x)
    made.leave_blocks()
    assert (made.predictor_format, mask.shape) == ("int4", (50, intermediate - n_hot))
    assert float((made.predict(x) != mask).float().mean()) <= 0.005  # sums in another order
    assert 0 < int(mask.sum()) < mask.numel()


def test_what_stays_float() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(FunctionalBlock(), FunctionalBlock())
            self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
            self.router, self.narrow = nn.Linear(HIDDEN, 8), nn.Linear(16, 64)
            self.unused, self.head = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks(x)
            y = self.attention(y, y, y)[0] * self.router(y)[..., :1]
            return self.head(y) + self.narrow(y[..., :16]) + F.linear(y, self.unused.weight)

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 5, HIDDEN)
    from torch_pi2.profiling.data import Batch

    sites = torch_pi2.graph.find_sites(model, (x,))
    linears, skipped = find_linears(model, sites, Batch(None, None, (x,)))
    assert set(linears) == {"head"}
    assert skipped == {
        "attention.out_proj": "a NonDynamicallyQuantizableLinear",
        "router": "small (32 -> 8)",
        "narrow": "small (16 -> 64)",
        "unused": "not called as a module",
    }


def test_head_tied_to_the_embedding_gets_rows_of_its_own() -> None:
    dense, model = quantised("drelu")
    assert isinstance(model.lm_head, QuantLinear)
    assert torch.equal(model.get_input_embeddings().weight, dense.get_input_embeddings().weight)
    assert not model.config.tie_word_embeddings
    assert model.generate(IDS, max_new_tokens=4).shape == (2, 20)


def test_float_memory_goes_layer_by_layer() -> None:
    model = tiny("llama")
    sites = torch_pi2.graph.find_sites(model)
    linears, _ = find_linears(model, sites)
    weights = [layer.weight for layer in linears.values()]
    assert quantize_linears(model, linears, Storage("int4")).keys() == {"lm_head"}
    assert not linears
    assert [w.untyped_storage().nbytes() for w in weights] == [4]
    tied = tiny("drelu")
    linears, _ = find_linears(tied, torch_pi2.graph.find_sites(tied))
    quantize_linears(tied, linears, Storage("int4"))
    assert tied.get_input_embeddings().weight.numel() == 64 * HIDDEN


class Interrupted(BaseException):
    """As Ctrl-C: not an Exception."""


def three_linears(tied: bool = False) -> tuple[nn.Module, dict[str, nn.Linear]]:

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=tied, **sizes)).eval()
    linears, _ = find_linears(model, torch_pi2.graph.find_sites(model))
    assert len(linears) == 9
    return model, linears


@pytest.mark.parametrize("error", [MemoryError, Interrupted])
@pytest.mark.parametrize("n", [0, 4, 8])
def test_linears_that_fail_leave_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, n: int, error: type[BaseException]
) -> None:
    model, linears = three_linears()
    modules, wanted, names = list(model.modules()), logits(model), list(linears)
    real, calls = QuantLinear.from_linear, []

    def fail(*args: object, **kwargs: object) -> QuantLinear:
        calls.append(1)
        if len(calls) == n + 1:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(QuantLinear, "from_linear", fail)
    with pytest.raises(error):
        quantize_linears(model, linears, Storage("int4"))
    assert len(calls) == n + 1
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert torch.equal(logits(model), wanted)
    assert list(linears) == names
    quantize_linears(model, linears, Storage("int4"))
    assert isinstance(model.lm_head, QuantLinear)


def test_hooks_stay() -> None:
    model, calls = tiny("llama"), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    torch_pi2.optimize(model, config=torch_pi2.Config(method="dense", weights="int8"))
    logits(model)
    assert isinstance(model.lm_head, QuantLinear)
    assert calls == [1] * len(calls)
    assert calls


# --- what cannot be done ---


def test_quantising_cannot_be_undone() -> None:
    _, model = quantised("drelu")
    found = logits(model)
    with pytest.raises(ConfigError, match=r"int4 in lm_head, which is lossy: .* Load the checkpoint again"):
        torch_pi2.restore(model)
    assert torch.equal(logits(model), found)
    with pytest.raises(ConfigError, match=r"other weights for model.layers.0.mlp.*: expected a layer with float weigh"):
        model.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), found)
    bare = rewrite(tiny("drelu"), make_plan(tiny("drelu")), storage=Storage("int8"))  # no linears: another check
    with pytest.raises(ConfigError, match=r"original weights of model.layers.0.mlp: .* int8, which is lossy"):
        torch_pi2.restore(bare)
    logits(bare)


def test_broken_weights_are_refused_before_anything_is_changed() -> None:
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        model = tiny("llama")
        with torch.no_grad():
            model.get_parameter(name)[3, 1] = float("nan")
        state = copy.deepcopy(model.state_dict())
        with pytest.raises(NonFiniteError, match=r"lm_head.weight: expected finite|layers.1.mlp down: expected finite"):
            torch_pi2.optimize(model, config=torch_pi2.Config(method="dense", weights="int4"))
        assert not sparse_layers(model)
        assert all(torch.equal(t, state[k]) or k == name for k, t in model.state_dict().items())


@pytest.mark.parametrize("late", ["install", "quantize_linears"])
def test_what_fails_late_leaves_a_running_model_and_says_so(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_pi2.rewrite import rewrite as module

    model, real = tiny("drelu"), getattr(module, late)

    def fail(model: nn.Module, what: Any, *more: Any, **how: Any) -> None:
        if late == "quantize_linears" or what.site.layer == 1:
            raise KeyboardInterrupt
        real(model, what, *more, **how)

    monkeypatch.setattr(module, late, fail)
    wanted = logits(model)
    with pytest.raises(KeyboardInterrupt) as caught:
        torch_pi2.optimize(model, config=torch_pi2.Config(method="exact", weights="int8"))
    assert "dequantised weights now: load the checkpoint again" in caught.value.__notes__[0]
    assert not sparse_layers(model)
    assert not hasattr(model, "torch_pi2")
    assert near(logits(model), wanted, 0.05)
    assert not torch.equal(logits(model), wanted)
