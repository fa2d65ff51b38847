"""Experts of other forms than Mixtral's: biases, transposed, interleaved, clamped, without gates, sorted by expert."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_experts import IDS, SIZES, logits, off
from torch import nn

import torch_pi2
from torch_pi2.checkpoint.quantize import quantize
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import DeviceError, UnsupportedModelError
from torch_pi2.export.program import export_program
from torch_pi2.graph import FFNSite, find_sites
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts

#: Name -> its configuration, its class, and more settings; I of its experts is 40 or 48.
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 5, "head_dim": 16}),
    "llama 4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"num_local_experts": 3, "intermediate_size_mlp": 96, "head_dim": 16, "num_experts_per_tok": 1},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 40,
            "layers_block_type": ["moe", "attention", "moe"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}
ACTIVATION = {"gpt-oss": "silu[in=1.702,out=0.587544066,limit=7,plus=1]", "nemotron-h": "relu2"}


def build(name: str) -> nn.Module:
    config_class, model_class, more = FORMS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES | more)
    model: nn.Module = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build(name) for name in FORMS}


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, SparseExperts)]


def optimised(model: nn.Module, **settings: Any) -> nn.Module:
    return torch_pi2.optimize(copy.deepcopy(model), **({"method": "exact"} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_they_compute_what_transformers_does_and_come_back(models: dict[str, nn.Module], name: str) -> None:
    model = models[name]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    sparse = optimised(model)
    sites = find_sites(model)
    assert {s.activation for s in sites if s.experts} == {ACTIVATION.get(name, "silu")}
    assert all(FFNSite.from_json(s.to_json()) == s for s in sites)
    assert len(experts_of(sparse)) == len({s.experts for s in sites if s.experts})
    assert not [key for key in sparse.torch_pi2.left if not key.endswith("self_attn")]
    for ids in (IDS, IDS[:1, :1], IDS[:, :7]):
        assert off(logits(sparse, ids), logits(model, ids)) < 2e-5
    after = sparse.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[k], state[k]) for k in state)
    found = logits(sparse)
    assert torch.equal(logits(copy.deepcopy(sparse)), found)
    torch_pi2.restore(sparse)
    assert all(torch.equal(v, state[k]) for k, v in sparse.state_dict().items())
    assert torch.equal(logits(sparse), logits(model))


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4", "nemotron-h"])
def test_calibrated_thresholds(models: dict[str, nn.Module], name: str) -> None:
    ids = torch.randint(1, SIZES["vocab_size"], (8, 16), generator=torch.Generator().manual_seed(1))
    settings = {
        "batch_size": 4,
        "seq_len": 16,
        "sparsity": 0.3,
        "method": "threshold" if name != "nemotron-h" else "exact",
    }
    sparse = torch_pi2.optimize(copy.deepcopy(models[name]), ids, **settings)
    methods = {str(y.method) for y in sparse.torch_pi2.plan.layers if y.site.experts}
    assert methods == {"exact" if name == "nemotron-h" else "threshold"}
    assert off(logits(sparse), logits(models[name])) < (2e-5 if name == "nemotron-h" else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("name", FORMS)
def test_quantised_saved_packed_and_from_a_checkpoint(
    models: dict[str, nn.Module], name: str, weights: str, tmp_path: Path
) -> None:
    model = models[name]
    sparse = optimised(model, weights=weights)
    wanted = logits(sparse)
    assert 1e-4 < off(wanted, logits(model)) < (0.4 if weights == "int4" else 0.05)
    torch_pi2.save(sparse, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved")), wanted)
    assert off(logits(load_dense(tmp_path / "saved")), wanted) < 2e-5
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    stored = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    assert all(isinstance(m, OffloadedExperts) for m in experts_of(stored))
    assert torch.equal(logits(stored), wanted)
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store")), wanted)
    model.save_pretrained(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", weights)
    found = torch_pi2.load(tmp_path / "out")
    assert torch.equal(logits(found), wanted)
    assert found.torch_pi2.plan.model_hash == sparse.torch_pi2.plan.model_hash


@pytest.mark.parametrize("name", FORMS)
def test_floats_over_a_store(models: dict[str, nn.Module], name: str, tmp_path: Path) -> None:
    models[name].save_pretrained(tmp_path / "float")
    torch_pi2.pack(tmp_path / "float", tmp_path / "store")
    stored = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    assert torch.equal(logits(stored), logits(optimised(models[name])))


def test_arguments_by_the_names_of_the_original(models: dict[str, nn.Module]) -> None:
    sparse = optimised(models["gpt-oss"])
    experts = experts_of(sparse)[0]
    x_TH, index_TK = torch.randn(3, 64), torch.tensor([[0, 1], [2, 3], [4, 0]])
    routing_TK = torch.rand(3, 2)
    with torch.no_grad():
        found = experts(x_TH, router_indices=index_TK, routing_weights=routing_TK)
        assert torch.equal(found, experts(x_TH, index_TK, top_k_weights=routing_TK))
        original = models["gpt-oss"].model.layers[0].mlp.experts
        assert off(found, original(x_TH, index_TK, routing_TK)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "llama 4"])
def test_compiled_and_exported(models: dict[str, nn.Module], name: str) -> None:
    sparse = optimised(models[name])
    with torch.no_grad():
        wanted = sparse(IDS, use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(sparse, backend="eager", fullgraph=True)
        assert torch.equal(compiled(IDS, use_cache=False).logits, wanted)
        program = export_program(sparse, kwargs={"input_ids": IDS, "use_cache": False})
        found = [str(node.target) for node in program.graph.nodes if "pi2." in str(node.target)]
        assert found.count("pi2.experts_ffn.default") == 2
        assert torch.equal(program.module()(input_ids=IDS, use_cache=False).logits, wanted)


def test_gpus_have_no_numbers_of_activations(models: dict[str, nn.Module]) -> None:
    experts = experts_of(optimised(models["gpt-oss"]))[0]
    with pytest.raises(UnsupportedModelError, match=r"activation silu\[in=1\.702.*kernels on a GPU have no others"):
        experts.split_off([48] * 5, SimpleNamespace(device="cpu"))
    experts.site = replace(experts.site, activation="silu")
    with pytest.raises(DeviceError, match=r"experts, whose experts have biases: expected it on the CPU"):
        experts.check_gpu_has_kernels()


@pytest.mark.parametrize("name", ["gpt-oss", "llama 4"])
def test_other_weights_and_another_dtype(models: dict[str, nn.Module], name: str) -> None:
    sparse, other = optimised(models[name]), copy.deepcopy(models[name])
    for parameter in other.parameters():
        parameter.data.mul_(-0.5)
    sparse.load_state_dict(other.state_dict())
    assert off(logits(sparse), logits(other)) < 2e-5
    half, dense = sparse.to(torch.bfloat16), other.to(torch.bfloat16)
    wanted = logits(other.float())
    assert off(logits(half).float(), wanted) < 0.02 + 2 * off(logits(dense.to(torch.bfloat16)).float(), wanted)


def test_neurons_without_gates_lie_in_blocks(tmp_path: Path) -> None:
    shape = {
        "model_type": "nemotron_h", "hidden_size": 128, "intermediate_size": 96, "vocab_size": 256,
        "layers_block_type": ["moe", "full_attention", "moe"], "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
    }  # fmt: skip
    torch_pi2.synthetic(tmp_path / "made", shape, weights="int4", predictor=None)
    model = torch_pi2.load(tmp_path / "made", activations="int8")
    wanted = logits(model)
    for experts in experts_of(model):
        assert experts.neuron_rows.stride()[1:3] == (experts.neuron_rows.shape[3], 96 * experts.neuron_rows.shape[3])
    torch_pi2.save(model, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved", activations="int8")), wanted)
    torch_pi2.pack(tmp_path / "made", tmp_path / "store")
    stored = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16, activations="int8")
    assert torch.equal(logits(stored), wanted)
    values = [experts.dense_values() for experts in experts_of(model)]
    for experts, before in zip(experts_of(model), values, strict=True):
        experts.leave_blocks()
        assert experts.neuron_rows.is_contiguous()
        assert all(torch.equal(value, before[name]) for name, value in experts.dense_values().items())
    assert torch.equal(logits(model), wanted)
