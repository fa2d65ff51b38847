"""4-bit weights for the NPU by what its outputs lose: which numbers they may be, and what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_pi2.export.qnn.quantize import MOST, NpuGrid, block_scales, calibrate
from torch_pi2.fitting.gptq import Moments, Solver

HIDDEN, NEURONS = 64, 96


class Gated(nn.Module):
    """Two linear layers of the same input, and one of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, NEURONS), nn.Linear(HIDDEN, NEURONS, bias=False)
        self.down = nn.Linear(NEURONS, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.gate(x)) * self.up(x))
        return y


def inputs(tokens: int, seed: int) -> torch.Tensor:
    """Correlated, and of very different sizes."""
    mixed = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9)) * torch.logspace(-1, 1, HIDDEN)
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)) @ mixed / 8


def to_nearest(w_NK: torch.Tensor, block: int) -> torch.Tensor:
    groups = w_NK.unflatten(1, (-1, block or w_NK.shape[1]))
    scale_NG1 = (
        block_scales(w_NK, block)[..., None] if block else groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / MOST
    )
    return ((groups / scale_NG1).round().clamp(-7, 7) * scale_NG1).flatten(1)


def check_grid(w_NK: torch.Tensor, scale_NG: torch.Tensor, block: int) -> None:
    """Each weight is -7 to 7 times its scale, and scales are 1 to 16 times a sixteenth of the row's largest."""
    whole = w_NK.unflatten(1, (scale_NG.shape[1], -1)) / scale_NG[..., None]
    torch.testing.assert_close(whole, whole.round().clamp(-7, 7), rtol=0, atol=1e-3)
    multiples = scale_NG / scale_NG.amax(1, keepdim=True) * 16
    torch.testing.assert_close(multiples, multiples.round().clamp(1, 16), rtol=0, atol=1e-3)
    assert scale_NG.shape == (len(w_NK), w_NK.shape[1] // block if block else 1)


@pytest.mark.parametrize("block", [0, 16, 32])
def test_solved_weights_are_what_the_npu_can_have_and_lose_less(block: int) -> None:
    x_TK, other_TK = inputs(400, 1), inputs(200, 2)
    w_NK = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(3))
    w_NK[5] = 0  # a neuron that was pruned
    moments = Moments(HIDDEN)
    moments.add(x_TK)
    made_NK, scale_NK = Solver("x", moments, NpuGrid(block)).solve_values(w_NK)
    check_grid(made_NK, scale_NK[:, :: block or HIDDEN], block)
    assert not made_NK[5].any()
    lost = [float((other_TK @ (found - w_NK).T).norm()) for found in (made_NK, to_nearest(w_NK, block))]
    assert lost[0] < 0.8 * lost[1]


@pytest.mark.parametrize("block", [0, 32])
def test_layers_of_a_program_are_solved_one_after_another(block: int) -> None:
    torch.manual_seed(0)
    model = Gated()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    example = (torch.zeros(3, HIDDEN),)
    module: Any = torch.export.export(model, example, dynamic_shapes=({0: tokens},)).module()
    samples = [(x,) for x in inputs(600, 1).split(100)]
    with torch.no_grad():
        made, scales = calibrate(module, samples, block)
        assert {*scales} == {"gate.weight", "up.weight", "down.weight"}
        for name, scale in scales.items():
            check_grid(made.get_parameter(name), scale, block)
        assert torch.equal(module.get_parameter("up.weight"), model.up.weight)  # what was given is as it was
        x = inputs(300, 2)
        right = model(x)
        gained = float((made(x) - right).norm())
        for name in scales:
            weight = model.get_parameter(name)
            weight.copy_(to_nearest(weight, block))
        assert gained < 0.8 * float((model(x) - right).norm())
