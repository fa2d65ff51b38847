"""Routers of mixtures of experts: which parameters a block chooses by, and blocks that choose otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_experts import build
from torch import nn

from torch_pi2.graph.routed import find_router


def block_of(name: str, **more: Any) -> nn.Module:
    return build(name, **more).model.layers[-1].mlp


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Qwen2Moe"])
def test_a_linear_layer_with_a_softmax(name: str) -> None:
    block = block_of(name)
    router = find_router(block, block.experts, block.experts.num_experts)
    assert router is not None
    assert router.weight.data_ptr() == block.gate.weight.data_ptr()
    assert (router.bias, router.correction, router.chosen) == (None, None, 2)
    x_TH = torch.randn(9, 64)
    assert torch.equal(router.choose(x_TH), block.gate(x_TH)[2])


def test_a_linear_layer_with_a_bias() -> None:
    block = block_of("GptOss", num_local_experts=4, head_dim=16)
    block.router.bias.data.normal_(0, 3)
    router = find_router(block, block.experts, 4)
    assert router is not None
    assert router.bias is not None
    assert router.bias.data_ptr() == block.router.bias.data_ptr()
    assert router.correction is None


def deepseek(groups: int) -> nn.Module:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    mixture = {"n_routed_experts": 8, "moe_intermediate_size": 40, "first_k_dense_replace": 0, "n_shared_experts": 1}
    kept = {"n_group": groups, "topk_group": 1, "num_key_value_heads": 4}
    block = block_of("DeepseekV3", **sizes, **mixture, **kept)
    block.gate.e_score_correction_bias.normal_(0, 0.5)
    return block


def test_sigmoids_with_a_correction() -> None:
    block = deepseek(groups=1)
    router = find_router(block, block.experts, 8)
    assert router is not None
    assert router.bias is None
    assert router.correction is not None
    assert router.correction.data_ptr() == block.gate.e_score_correction_bias.data_ptr()
    x_TH = torch.randn(9, 64)
    assert torch.equal(router.choose(x_TH).sort(-1).values, block.gate(x_TH)[2].sort(-1).values)


def test_blocks_that_choose_otherwise_have_none() -> None:
    block = deepseek(groups=4)  # two of the experts of one group
    assert find_router(block, block.experts, 8) is None
    block = block_of("Mixtral")
    block.gate.forward = lambda x: (x, torch.ones(64, 2), torch.randint(0, 4, (64, 2)))  # by chance
    assert find_router(block, block.experts, 4) is None
    block.forward = lambda _x, _more: None  # called with something else
    assert find_router(block, block.experts, 4) is None
    assert find_router(nn.Identity(), nn.Identity(), 4) is None
