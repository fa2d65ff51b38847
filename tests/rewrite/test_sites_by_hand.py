"""FFNs that ``find_sites`` does not see, described by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_pi2
from torch_pi2.errors import ShapeError, UnsupportedModelError
from torch_pi2.layers.of_model import sparse_layers

H, I = 24, 64  # noqa: E741


class Hidden(nn.Module):
    """An FFN whose code no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ffns = nn.ModuleList(Hidden() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for ffn in self.ffns:
            x = x + ffn(x)
        return x


def sites() -> list[torch_pi2.FFNSite]:
    made = []
    for n in range(2):
        up, down = (torch_pi2.LinearRef(f"ffns.{n}.{m}.weight", f"ffns.{n}.{m}.bias") for m in ("up", "down"))
        made.append(torch_pi2.FFNSite(f"ffns.{n}", n, "relu", False, None, up, down, H, I, f"ffns.{n}"))
    return made


X = torch.randn(5, 40, H, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("calibrated", [True, False])
def test_they_are_optimised_as_any_other(calibrated: bool) -> None:
    model = Model().eval()
    with pytest.raises(UnsupportedModelError, match="found no graph at all"):
        torch_pi2.find_sites(model, (X,))
    dense = copy.deepcopy(model)
    torch_pi2.optimize(model, [(X,)], method="exact" if not calibrated else "auto", sites=sites())
    assert [layer.site for layer in sparse_layers(model)] == sites()
    with torch.no_grad():
        torch.testing.assert_close(model(X[:1, :3]), dense(X[:1, :3]), rtol=1e-5, atol=1e-5)
        torch_pi2.restore(model)
        assert torch.equal(model(X), dense(X))


def test_a_site_that_is_wrong_is_refused() -> None:
    model = Model().eval()
    first = sites()[0]
    with pytest.raises(ShapeError, match=r"up of ffns.0: expected \[63, 24\], found \[64, 24\]"):
        torch_pi2.optimize(model, [(X,)], method="exact", sites=[replace(first, intermediate=63)])
    up = torch_pi2.LinearRef("ffns.2.up.weight")
    with pytest.raises(UnsupportedModelError, match=r"expected a parameter ffns.2.up.weight"):
        torch_pi2.optimize(model, [(X,)], method="exact", sites=[replace(first, up=up)])


def test_a_formula_that_is_not_the_model_s_changes_no_results() -> None:
    model = Model().eval()
    wanted = model(X).detach()
    torch_pi2.optimize(model, [(X,)], method="exact", sites=[replace(site, activation="relu2") for site in sites()])
    with torch.no_grad():
        torch.testing.assert_close(model(X), wanted, rtol=1e-5, atol=1e-5)
