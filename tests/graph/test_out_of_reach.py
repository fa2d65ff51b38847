"""What small random inputs do not reach: clamps, guards, thresholds. Such a layer is found out, or it stays as it is.

Every odd layer stands beside a plain one. Whatever torch_pi2 makes of the model, it computes what the dense one does,
on inputs of all magnitudes; the plain layer is sparse, and the odd one is named.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewriting import sequential
from tiny_models import HIDDEN, INTERMEDIATE, randomise
from torch import nn

import torch_pi2
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.of_model import sparse_layers

X_BTH = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
MAGNITUDES = (1e-3, 1.0, 30.0, 1e3, 1e5, 1e9)


class MLP(nn.Module):
    """``after(down(inside(up(before(x)))))``; the parts are functions."""

    def __init__(self, inside=F.relu, before=lambda x: x, after=lambda y: y) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.inside, self.before, self.after = inside, before, after

    def forward(self, x):
        return self.after(self.down(self.inside(self.up(self.before(x)))))


class Gated(nn.Module):
    def __init__(self, inside) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(HIDDEN, INTERMEDIATE)
        self.down, self.inside = nn.Linear(INTERMEDIATE, HIDDEN), inside

    def forward(self, x):
        return self.down(self.inside(self.gate(x), self.up(x)))


class Residual(nn.Module):
    """Code of a block around the linears of ``mlp``: no module computes the layer alone."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down, self.inside, self.n = mlp.up, mlp.down, mlp.inside, nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return x + self.down(self.inside(self.up(x)))


def guard(h):
    """T5's, without asking for the dtype."""
    return h.clamp(-64504.0, 64504.0)


def if_large(x):
    return x / 2 if x.abs().max() > 50 else x


def if_large_item(x):
    return x / 2 if x.abs().max().item() > 50 else x


class PerNeuron(nn.Module):
    """A clamp of its own for each neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.linspace(20, 60, INTERMEDIATE))

    def forward(self, h):
        return torch.minimum(F.relu(h), self.most)


class Slopes(nn.Module):
    """PReLU with a slope for each neuron, all of them zero so far."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(INTERMEDIATE))

    def forward(self, h):
        return torch.where(h > 0, h, self.slope * h)


INSIDE = {
    "clamp": lambda h: F.relu(h).clamp(max=50),
    "clamp before": lambda h: F.relu(h.clamp(-300, 300)),
    "clamp of 1e6": lambda h: F.relu(h).clamp_max(1e6),
    "clamp of 1e-2": lambda h: F.relu(h) * (h.abs() > 1e-3),
    "fp16": lambda h: guard(F.relu(h)),
    "largest": lambda h: F.relu(h).clamp(max=torch.finfo(torch.float32).max),
    "where": lambda h: torch.where(h > 100, h * 2, F.relu(h)),
    "where negative": lambda h: torch.where(h < -1000, h, F.relu(h)),
    "window": lambda h: torch.where((h > 100) & (h < 101), 0.0, F.relu(h)),
    "masked_fill": lambda h: F.relu(h).masked_fill(h > 500, 0.0),
    "hardtanh": lambda h: F.hardtanh(h, 0.0, 70.0),
    "module": nn.Sequential(nn.ReLU(), nn.Hardtanh(-50, 50)),
    "threshold": lambda h: F.threshold(h, 1e-3, 0.0),
    "minimum": lambda h: torch.minimum(F.relu(h), torch.full_like(h, 40.0)),
    "softcap": lambda h: 1000 * torch.tanh(F.relu(h) / 1000),
    "integers": lambda h: F.relu(h).to(torch.int32).to(h.dtype),
    "nan_to_num": lambda h: torch.nan_to_num(F.relu(h)),
    "isinf": lambda h: torch.where(torch.isinf(h), 0.0, F.relu(h)),
    "per neuron": PerNeuron(),
    "learned slopes": Slopes(),
}
ODD = {f"inside: {name}": lambda f=f: MLP(f) for name, f in INSIDE.items()} | {
    "before: clamp": lambda: MLP(before=lambda x: x.clamp(-80, 80)),
    "before: if": lambda: MLP(before=if_large),
    "before: item": lambda: MLP(before=if_large_item),
    "before: nan_to_num": lambda: MLP(before=torch.nan_to_num),
    "after: clamp": lambda: MLP(after=lambda y: y.clamp(-5000, 5000)),
    "after: clamp of 1e8": lambda: MLP(after=lambda y: y.clamp(max=1e8)),
    "after: fp16": lambda: MLP(after=guard),
    "after: softcap": lambda: MLP(after=lambda y: 3000 * torch.tanh(y / 3000)),
    "block": lambda: Residual(MLP(lambda h: F.relu(h).clamp(max=50))),
    "block of modules": lambda: Residual(MLP(nn.Sequential(nn.ReLU(), nn.Hardtanh(-50, 50)))),
    "chain": lambda: nn.Sequential(nn.LayerNorm(HIDDEN), *sequential(nn.ReLU(), nn.Hardtanh(-50, 50))),
    "gated: swiglu clamped": lambda: Gated(lambda g, u: F.relu(g).clamp(max=40) * u),
    "gated: both": lambda: Gated(lambda g, u: F.relu(g.clamp(max=7)) * u.clamp(-7, 7)),
    "gated: product": lambda: Gated(lambda g, u: (F.relu(g) * u).clamp(-1e5, 1e5)),
}  # fmt: skip


def beside_plain(odd: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"plain": MLP(), "odd": odd})
    model.forward = lambda x: torch.cat([model["plain"](x), model["odd"](x)], -1)
    return randomise(model.eval())


def inputs() -> list[torch.Tensor]:
    tiny = X_BTH * 1e-3
    broken = X_BTH.clone()
    broken[0, 0, 0], broken[1, 1, 1] = float("nan"), float("inf")
    return [*(X_BTH * m for m in MAGNITUDES), tiny, broken]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error; what is not finite must be so in both."""
    assert torch.equal(found.isfinite(), wanted.isfinite())
    scale = wanted[wanted.isfinite()].abs().max()
    return float((found - wanted)[wanted.isfinite()].abs().max() / scale)


#: Sparse all the same: code around the layer does the rest, or a clamp is a number of its activation.
FOUND = {"before: clamp", "before: if", "before: item", "before: nan_to_num"} | {
    n for n in ODD if n.startswith("after")
}
CLAMPED = {
    "inside: clamp": "relu[limit=50]",
    "inside: clamp before": "relu[limit=300]",
    "inside: clamp of 1e6": "relu[limit=1000000]",
    "inside: hardtanh": "relu[limit=70]",
    "block": "relu[limit=50]",
    "gated: both": "relu[limit=7]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
@torch.no_grad()
def test_eager(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = beside_plain(ODD[name]())
    wanted = [model(x) for x in inputs()]
    torch_pi2.optimize(model, [(X_BTH.repeat(8, 2, 1),)], torch_pi2.Config(method="exact"))
    for x, y in zip(inputs(), wanted):
        assert off(model(x), y) < 1e-5
    keys = [layer.site.key for layer in sparse_layers(model)]
    left = model.torch_pi2.left
    if name in {*FOUND, *CLAMPED}:
        assert (keys, left) == (["plain", "odd"], {})
        assert sparse_layers(model)[1].site.activation == CLAMPED.get(name, "relu")
    else:
        assert keys == ["plain"]
        assert [key.split(",")[0] for key in left] == ["odd"]
        assert f"left dense: {next(iter(left))} ({left[next(iter(left))]})" in caplog.text


@pytest.mark.slow
@torch.no_grad()
def test_nothing_but_odd_layers() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"found 0 \(another formula, of gt, .*relu, where\).*use the model as it is"
    ):
        torch_pi2.optimize(nn.Sequential(ODD["inside: where"]()), [(X_BTH.repeat(8, 2, 1),)])
