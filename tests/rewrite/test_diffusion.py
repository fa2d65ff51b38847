"""Feed-forward layers as diffusion transformers have them (PixArt, SD3, Flux): written here as their libraries do."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from rewriting import assert_same_state, close
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, randomise
from torch import nn

import torch_pi2
from torch_pi2.graph.find import search

X = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(1))
TIME = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))


class Gelu(nn.Module):
    """The first linear with its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, INTERMEDIATE)

    def forward(self, x):
        return F.gelu(self.proj(x), approximate="tanh")


class GeGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE)

    def forward(self, x):
        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * F.gelu(gate)


class Feed(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleList([first, nn.Dropout(0.0), nn.Linear(INTERMEDIATE, HIDDEN)])

    def forward(self, x):
        for part in self.net:
            x = part(x)
        return x


class Block(nn.Module):
    """What the step of the diffusion says shifts, scales and gates the layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(HIDDEN, elementwise_affine=False), Feed(first)
        self.step = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x, time):
        shift, scale, gate = self.step(F.silu(time))[:, None].chunk(3, dim=-1)
        return x + gate * self.ff(self.norm(x) * (1 + scale) + shift)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(Gelu()), Block(GeGlu())])

    def forward(self, x, time):
        for block in self.blocks:
            x = block(x, time)
        return x


@torch.no_grad()
def test_blocks_of_diffusion_transformers() -> None:
    torch.manual_seed(0)
    dense = randomise(Model().eval())
    found = search(dense, (X, TIME))
    assert [(site.key, site.form) for site in found.sites] == [
        ("blocks.0.ff.net", "gelu_tanh(up)"),
        ("blocks.1.ff.net", "gelu(gate)*up"),
    ]
    assert found.left == {}
    wanted, model = dense(X, TIME), copy.deepcopy(dense)
    torch_pi2.optimize(model, [(X, TIME)], method="threshold", sparsity=0.0)
    assert close(model(X, TIME), wanted)
    assert_same_state(torch_pi2.restore(model), dense.state_dict())


class Glu(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.glu, self.down = first, nn.GLU(), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x):
        return self.down(self.glu(self.first(x)))


@torch.no_grad()
def test_a_sigmoid_for_a_gate_stays_dense_and_is_named() -> None:
    """No value of it is zero, and none is near it for long: there is nothing to skip."""
    model = nn.Sequential(FunctionalBlock(), Glu(nn.Linear(HIDDEN, 2 * INTERMEDIATE))).eval()
    wanted = model(X)
    torch_pi2.optimize(model, [(X,)], method="exact")
    assert model.torch_pi2.left == {"1": "another formula, of glu"}
    assert close(model(X), wanted)


class Batched(nn.Module):
    """Two matrices in one batched product: no matmul with a parameter of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, HIDDEN, 64)), nn.Parameter(torch.randn(2, 64, HIDDEN))
        self.bias = nn.Parameter(torch.randn(2, 1, 64))

    def forward(self, x):
        return torch.bmm(F.relu(torch.baddbmm(self.bias, x, self.up)), self.down)


@torch.no_grad()
def test_batched_products_stay_as_they_are() -> None:
    model = nn.Sequential(FunctionalBlock(), Batched()).eval()
    wanted = model(X)
    torch_pi2.optimize(model, [(X,)], method="exact")
    assert [layer.site.key for layer in model.torch_pi2.plan.layers] == ["0"]
    assert close(model(X), wanted)
