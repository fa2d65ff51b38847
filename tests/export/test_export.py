"""``torch_pi2.export_program``: the pi2 operators are in the graph and the program computes the same."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import torch_pi2
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.program import export_program
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.ops.constants import constants


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(24, 70), nn.Linear(70, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_operators_are_in_the_program_and_any_length_runs() -> None:
    from torch_pi2.planner.hot_neurons import plan_without_data
    from torch_pi2.rewrite.rewrite import rewrite
    from torch_pi2.types.plan import weights_hash

    model = nn.Sequential(nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))).eval()
    x = torch.randn(2, 5, 24)
    sites = torch_pi2.find_sites(model, (x,))
    rewrite(model, plan_without_data(sites, weights_hash(model, sites), torch_pi2.Config(method="exact")))
    length = torch.export.Dim("length", min=2, max=64)
    exported = export_program(model, (x,), dynamic_shapes=({1: length},))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("pi2.sparse_ffn.default") == 1
    longer = torch.randn(2, 33, 24)
    with torch.no_grad(), sparse_only():  # eager, so many would go by matrix products, whose last bits differ
        torch.testing.assert_close(exported.module()(longer), model(longer), rtol=0, atol=0)


def test_a_program_has_no_blocks_which_are_for_this_cpu() -> None:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="relu",
    )
    model = torch_pi2.optimize(transformers.LlamaForCausalLM(config).eval(), weights="int4", activations="int8")
    linears = [m for m in model.modules() if isinstance(m, QuantLinear)]
    for linear in linears:
        linear.use_blocks()
    x = torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(x, use_cache=False).logits
    rows, blocks = [m.rows for m in linears], [m.blocks for m in linears]
    assert any(blocks) == bool(constants().blocks)
    exported = export_program(model, (x,), {"use_cache": False})
    assert not any("blocks" in str(node.target) or "int4_blocks" in node.args for node in exported.graph.nodes)
    with torch.no_grad():
        found = exported.module()(x, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert [m.blocks for m in linears] == blocks
    assert all(m.rows is row for m, row in zip(linears, rows, strict=True))


def test_dense_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"found a dense model.*optimize"):
        export_program(Two(), (torch.zeros(1, 2, 24),))


def test_the_reason_of_torch_export_is_passed_on() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))).eval()
    x = torch.randn(2, 24)
    torch_pi2.optimize(model, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    with pytest.raises(
        UnsupportedModelError, match=r"torch\.export of Sequential: expected a model that torch\.export"
    ):
        export_program(model, (x, x))


def test_ffns_that_would_come_out_dense_are_refused() -> None:
    model = Two().eval()
    x = torch.randn(2, 24)
    torch_pi2.optimize(model, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0: .*it would come out dense"):
        export_program(model, (x,))


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_itself_refuses_what_would_come_out_dense(strict: bool) -> None:
    model = Two().eval()
    x = torch.randn(2, 24)
    torch_pi2.optimize(model, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    # a strict export has an error of its own for one that is raised
    message = "raise UnsupportedModelError" if strict else r"blocks\.0: .*it would come out dense\. .*restore"
    with pytest.raises(Exception, match=message):
        torch.export.export(model, (x,), strict=strict)
    restored = torch_pi2.restore(model)
    assert torch.export.export(restored, (x,), strict=strict)
