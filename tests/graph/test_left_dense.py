"""What is found and stays dense is named with the reason; what is lossy is said; calibration data of all forms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from rewriting import close
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, plain, tiny
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import torch_pi2
from torch_pi2.errors import ConfigError, NoFFNFoundError, UnsupportedModelError
from torch_pi2.graph.experts import all_experts
from torch_pi2.graph.find import search
from torch_pi2.types.config import Config

IDS_NT = torch.randint(3, VOCAB, (16, 16), generator=torch.Generator().manual_seed(0))
X_BTH = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))
EXACT = Config(method="exact", batch_size=4, seq_len=16, calibration_tokens=128)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


class Layer(nn.Module):
    """``compute(self, x)`` with these modules and parameters."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


class Integers(nn.Linear):
    """I-BERT's: a linear that holds more than its matrix."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("integers", torch.zeros(sizes[::-1]))


def up(n_out: int = INTERMEDIATE) -> nn.Linear:
    return nn.Linear(HIDDEN, n_out)


def down() -> nn.Linear:
    return nn.Linear(INTERMEDIATE, HIDDEN)


def adapter(n_out: int = INTERMEDIATE) -> nn.Module:
    """A LoRA that is not merged."""
    return nn.Sequential(nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, n_out, bias=False))


def weight_normed() -> nn.Module:
    block = FunctionalBlock()
    nn.utils.parametrizations.weight_norm(block.banana)
    return block


def shared_up() -> nn.Module:
    def compute(m, x):
        x = x + m.one(F.relu(m.up(m.n(x))))
        return x + m.two(F.relu(m.up(m.n(x))))

    return Layer(compute, up=up(), one=down(), two=down(), n=nn.LayerNorm(HIDDEN))


def shared_inside() -> nn.Module:
    layer = Layer(lambda m, x: m.down(F.relu(m.gate(x)) * m.up(x)), gate=up(), up=up(), down=down())
    layer.up.weight = layer.gate.weight
    return layer


def used_twice() -> nn.Module:
    def compute(m, x):
        h = F.relu(m.up(m.n(x)))
        return m.one(h) + m.two(h)

    return Layer(compute, up=up(), one=down(), two=down(), n=nn.LayerNorm(HIDDEN))


def learned() -> nn.Module:
    """As Apertus' xIELU."""

    def compute(m, x):
        h = m.up(x)
        return m.down(torch.where(h > 0, F.softplus(m.alpha) * h * h, torch.min(h, m.alpha) * 0.5))

    return Layer(compute, up=up(), down=down(), alpha=nn.Parameter(torch.tensor([0.5])))


def top_k() -> nn.Module:
    def compute(m, x):
        h = F.relu(m.up(x))
        return m.down(torch.where(h < h.topk(8, -1).values[..., -1:], 0.0, h))

    return Layer(compute, up=up(), down=down())


def adapted_behind_a_norm() -> nn.Module:
    """As in Zamba 2: a layer with gate and up in one linear, whose norm comes after another linear."""

    def compute(m, x):
        x = m.n(m.o(x))
        gate, up = (m.gate_up(x) + m.adapter(x)).chunk(2, -1)
        return m.down(F.silu(gate) * up)

    two = {"gate_up": up(2 * INTERMEDIATE), "adapter": adapter(2 * INTERMEDIATE)}
    return Layer(compute, o=nn.Linear(HIDDEN, HIDDEN), n=nn.RMSNorm(HIDDEN), down=down(), **two)


def three() -> nn.Module:
    more = {"more": nn.Linear(INTERMEDIATE, INTERMEDIATE - 8), "down": nn.Linear(INTERMEDIATE - 8, HIDDEN)}
    return Layer(lambda m, x: m.down(F.relu(m.more(F.relu(m.up(x))))), up=up(), **more)


def joined() -> nn.Module:
    def compute(m, x):
        h = F.relu(m.up(x))
        return m.down(torch.cat([h[..., :8], h[..., 8:] * 0.5], -1))

    return Layer(compute, up=up(), down=down())


def normed() -> nn.Module:
    """A norm between the projections, as BitNet has."""
    return Layer(lambda m, x: m.down(m.n(F.relu(m.up(x)))), up=up(), down=down(), n=nn.LayerNorm(INTERMEDIATE))


def in_block() -> nn.Module:
    """The layer is code of the block, and no module can replace its linears."""
    parts = {"up": Integers(HIDDEN, INTERMEDIATE), "down": down(), "n": nn.LayerNorm(HIDDEN)}
    return Layer(lambda m, x: x + m.down(F.relu(m.up(m.n(x)))), **parts)


def adapted() -> nn.Module:
    return Layer(lambda m, x: m.down(F.relu(m.up(x) + 2 * m.adapter(x))), up=up(), down=down(), adapter=adapter())


def tied() -> nn.Module:
    """Down is up transposed."""
    return Layer(lambda m, x: F.linear(F.relu(m.up(x)), m.up.weight.t()), up=up())


_MORE = "more matmuls than gate, up and down"
LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "tied": (tied, "1.up", "1.up.weight stands in two places of it"),
    "weight_norm": (weight_normed, "1", "weights that are computed from parameters"),
    "shared up": (shared_up, "1", "1.up.weight is shared by 2 layers of one module"),
    "shared inside": (shared_inside, "1", "1.gate.weight stands in two places of it"),
    "used twice": (used_twice, "1", "linear uses what it computes inside"),
    "norm": (normed, "1", "a norm over all its neurons stands before the last matmul"),
    "more in a linear": (in_block, "1", "Integers holds more than one matmul (integers)"),
    "learned": (learned, "1", "an activation with parameters of its own between its matmuls"),
    "topk": (top_k, "1", "topk between its matmuls"),
    "adapter": (adapted, "1", _MORE),
    "adapter behind a norm": (adapted_behind_a_norm, "1", _MORE),
    "three matmuls": (three, "1", _MORE),
    "cat": (joined, "1", "cat between its matmuls"),
}


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_a_layer_left_dense_is_named(name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    make, key, reason = LEFT[name]
    model = nn.Sequential(FunctionalBlock(), make()).eval()
    wanted = model(X_BTH)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch_pi2.optimize(model, [(X_BTH,)], EXACT)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert close(model(X_BTH), wanted)
    assert [layer.site.key for layer in model.torch_pi2.plan.layers] == ["0"]
    assert model.torch_pi2.left == {key: reason}
    assert f"left dense: {key} ({reason})" in caplog.text
    model.torch_pi2.plan.save(tmp_path)
    assert torch_pi2.plan.__module__  # the plan keeps it
    assert type(model.torch_pi2.plan).load(tmp_path).made_by["left"] == {key: reason}


class Routed(nn.Module):
    """Experts in a list, of which a call reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FunctionalBlock() for _ in range(3))

    def forward(self, x):
        return self.experts[int(x.argmax()) % 1](x)


def test_layers_that_the_example_does_not_reach_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = torch_pi2.optimize(nn.Sequential(FunctionalBlock(), Routed()).eval(), [(X_BTH,)], EXACT)
    assert [layer.site.key for layer in model.torch_pi2.plan.layers] == ["0", "1.experts.0"]
    assert set(model.torch_pi2.left) == {"1.experts.1", "1.experts.2"}
    assert (
        "1.experts.1, 1.experts.2 (the example inputs do not reach it, or it is kept from torch.compile)" in caplog.text
    )


def test_layers_that_a_plan_leaves_dense_are_named() -> None:
    model = torch_pi2.optimize(tiny("llama"), IDS_NT, Config(method="dense", batch_size=4, seq_len=16))
    assert set(model.torch_pi2.left.values()) == {"choosing neurons would not pay"}


def low_rank(norm: nn.Module) -> nn.Module:
    """DeepSeek's queries: two matrices with a norm between them, where the model's sizes happen to fit."""
    return Layer(lambda m, x: x + m.b(m.n(m.a(x))), a=up(48), n=norm, b=nn.Linear(48, HIDDEN))


@pytest.mark.parametrize("norm", [nn.LayerNorm(48), nn.RMSNorm(48)], ids=lambda norm: type(norm).__name__)
def test_a_matrix_of_low_rank_with_a_norm_is_no_layer(norm: nn.Module) -> None:
    assert search(nn.Sequential(FunctionalBlock(), low_rank(norm)).eval(), (X_BTH,)).left == {}


def test_gates_with_a_matrix_per_head_are_no_experts() -> None:
    config = transformers.RecurrentGemmaConfig(
        **SIZES | {"intermediate_size": 96, "num_hidden_layers": 3}, lru_width=32, attention_window_size=16
    )
    assert search(transformers.RecurrentGemmaForCausalLM(config).eval()).left == {}


# --- experts with clamps ---

MOE = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
#: Family -> its settings, and the activation that its clamps make.
CLAMPED = {
    "DeepseekV4": ({"n_routed_experts": 4, "moe_intermediate_size": 24}, "silu[limit=10]"),
    "GptOss": ({}, "silu[in=1.702,out=0.587544066,limit=7,plus=1]"),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_clamps_are_numbers_of_the_activation(name: str) -> None:
    more, activation = CLAMPED[name]
    config = getattr(transformers, f"{name}Config")(**MOE | more)
    forms, unknown = all_experts(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert {form.activation for form in forms.values()} == {activation}
    assert not unknown


@pytest.mark.parametrize("clamp", [0.5, 1e9])
def test_experts_are_tried_at_all_magnitudes(clamp: float) -> None:
    """Mixtral's experts with a clamp of the gate alone."""
    config = transformers.MixtralConfig(**MOE)
    model = transformers.MixtralForCausalLM(config).eval()
    experts: Any = model.model.layers[0].mlp.experts

    class Clamped(type(experts)):  # type: ignore[misc]
        limit = clamp

        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=self.limit)) * up

    assert "model.layers.0.mlp.experts" in all_experts(model)[0]
    experts.__class__ = Clamped
    reason = all_experts(model)[1]["model.layers.0.mlp.experts"]
    assert "a forward that computes something else as well" in reason
    assert f"{clamp:g}" in reason


# --- weights of other libraries ---


def test_torchao_weights_are_named() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny("llama-relu")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    reason = (
        r"model\.layers\.0\.mlp, model\.layers\.1\.mlp \(weights of class \w+, quantised or spread by another library"
    )
    with pytest.raises(NoFFNFoundError, match=reason):
        torch_pi2.optimize(model, IDS_NT, EXACT)


@pytest.mark.parametrize("each", [False, True])
def test_weights_that_fsdp_has_divided(each: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = ModuleWrapPolicy({LlamaDecoderLayer}) if each else None
        how = {"auto_wrap_policy": policy, "device_id": torch.device("cpu"), "use_orig_params": True}
        model = FullyShardedDataParallel(tiny("llama-relu"), **how)
        for of in (model, model.module) if each else (model,):
            with pytest.raises(ConfigError, match="expected whole weights, found those that FullyShardedDataPar"):
                torch_pi2.optimize(of)
    finally:
        dist.destroy_process_group()


def attention_of_torchao() -> nn.Module:
    """Feed-forward layers of floats, and attention that torchao has quantised."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny("llama-relu")

    def is_attention(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "self_attn" in name

    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=is_attention)
    return model


def test_linears_of_torchao_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_pi2")
    model = attention_of_torchao()
    with torch.no_grad():
        wanted = model(IDS_NT).logits
        torch_pi2.optimize(model, weights="int8")
        off = (model(IDS_NT).logits - wanted).norm() / wanted.norm()
    assert off < 0.02
    assert "self_attn.q_proj stays float: weights of class Int8Tensor, quantised or spread by another" in caplog.text
    with pytest.raises(
        UnsupportedModelError, match=r"found model.layers.0.self_attn.q_proj.weight, weights of class I"
    ):
        torch_pi2.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is lossy ---


@pytest.mark.parametrize("method", ["auto", "threshold", "exact"])
def test_what_is_lossy_is_said(method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_pi2")
    name = "llama" if method != "exact" else "llama-relu"
    config = Config(method=method, batch_size=4, seq_len=16, calibration_tokens=128)
    block = plain(nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE), nn.SiLU(), nn.Linear(INTERMEDIATE, HIDDEN)))
    model = block if method != "exact" else tiny(name)
    torch_pi2.optimize(model, [(X_BTH,)] if model is block else IDS_NT, config)
    parts = model.torch_pi2
    if method == "exact":
        assert (parts.lossy, parts.loss_change) == (False, 0.0)
        assert "lossy" not in caplog.text
        return
    assert (parts.lossy, parts.loss_change) == (True, None)
    line = "lossy: 1 of 1 layers threshold (what that does to the loss was not measured)"
    assert line in caplog.text
    assert ("method 'auto' chose what is " + line in caplog.text) is (method == "auto")


# --- calibration data ---


def clip() -> nn.Module:
    small = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"hidden_act": "gelu"}
    text = small | {"bos_token_id": 1, "eos_token_id": 2}
    vision = {k: v for k, v in small.items() if k not in ("vocab_size", "pad_token_id")}
    vision |= {"image_size": 32, "patch_size": 16}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_ff": INTERMEDIATE, "num_layers": 1, "num_heads": 4, "d_kv": 8}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
DATA: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "dicts with more than ids": (clip, [{"input_ids": IDS_NT[i : i + 4], "pixel_values": IMAGES} for i in (0, 4)], 2),
    "an encoder and decoder": (t5, IDS_NT, 2),
    "lists of tensors": (lambda: plain(FunctionalBlock()), [[X_BTH]], 1),
}


@pytest.mark.parametrize("name", DATA)
@torch.no_grad()
def test_calibration_data(name: str) -> None:
    make, data, layers = DATA[name]
    model = make().eval()
    torch_pi2.optimize(model, data, EXACT)
    assert len(model.torch_pi2.plan.layers) == layers
    assert all(layer.tokens > 0 for layer in model.torch_pi2.stats)


def test_layers_whose_weights_are_all_buffers_are_named() -> None:
    """As VeRA's frozen matrices, with a vector between them."""
    own = Layer(lambda m, x: F.linear(F.linear(x, m.a) * m.d, m.b), d=nn.Parameter(torch.randn(INTERMEDIATE)))
    own.register_buffer("a", torch.randn(INTERMEDIATE, HIDDEN))
    own.register_buffer("b", torch.randn(HIDDEN, INTERMEDIATE))
    found = search(plain(FunctionalBlock(), nn.LayerNorm(HIDDEN), own), (X_BTH,))
    assert [site.owner for site in found.sites] == ["0"]
    assert set(found.left) == {"2"}
