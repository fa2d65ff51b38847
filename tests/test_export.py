"""``torch_pi2.export.program``: the pi2 operators are in the graph and the program computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export import program
from torch_pi2.runtime.prompt import sparse_only


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
    from torch_pi2.graph.rewrite import rewrite
    from torch_pi2.plan.greedy import plan_without_data
    from torch_pi2.plan.plan import weights_hash

    model = nn.Sequential(nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))).eval()
    x = torch.randn(2, 5, 24)
    sites = torch_pi2.find_sites(model, (x,))
    rewrite(model, plan_without_data(sites, weights_hash(model, sites), torch_pi2.Config(method="exact")))
    length = torch.export.Dim("length", min=2, max=64)
    exported = program(model, (x,), dynamic_shapes=({1: length},))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("pi2.sparse_ffn.default") == 1
    longer = torch.randn(2, 33, 24)
    with torch.no_grad(), sparse_only():  # eager, so many would go by matrix products, whose last bits differ
        torch.testing.assert_close(exported.module()(longer), model(longer), rtol=0, atol=0)


def test_dense_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"found a dense model.*optimize"):
        program(Two(), (torch.zeros(1, 2, 24),))


def test_the_reason_of_torch_export_is_passed_on() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))).eval()
    x = torch.randn(2, 24)
    torch_pi2.optimize(model, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    with pytest.raises(
        UnsupportedModelError, match=r"torch\.export of Sequential: expected a model that torch\.export"
    ):
        program(model, (x, x))


def test_ffns_that_would_come_out_dense_are_refused() -> None:
    model = Two().eval()
    x = torch.randn(2, 24)
    torch_pi2.optimize(model, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    with pytest.raises(UnsupportedModelError, match=r"all 2 sparse FFNs.*only 0 \(not blocks\.0, blocks\.1\)"):
        program(model, (x,))
