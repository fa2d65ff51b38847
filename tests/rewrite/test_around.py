"""What code does around a feed-forward layer is heeded, however rarely it does something."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import tiny_experts
import torch
import torch.nn.functional as F
from rewriting import close
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, plain
from torch import nn

import torch_pi2
from torch_pi2.base.lookups import Lookups
from torch_pi2.errors import ConfigError
from torch_pi2.graph.experts import experts_form
from torch_pi2.types.site import ExpertsForm

EXAMPLE = [(torch.randn(4, 16, HIDDEN, generator=torch.Generator().manual_seed(1)),)]


def hostile_inputs() -> list[torch.Tensor]:
    """Long and many sequences, and one with tokens of zeros."""
    shapes = ((1, 300), (40, 3), (20, 40), (1, 57))
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(*shape, HIDDEN, generator=generator) for shape in shapes]
    inputs[2][:, 30:] = 0.0
    return inputs


class Layer(nn.Module):
    """``after(down(relu(up(before(x)))), x)``."""

    def __init__(self, before: Callable[[Any], Any] | None = None, after: Callable[[Any, Any], Any] | None = None):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.before, self.after = before, after

    def forward(self, x):
        y = self.down(F.relu(self.up(x if self.before is None else self.before(x))))
        return y if self.after is None else self.after(y, x)


class Odd(nn.Linear):
    """A linear layer that computes something else for later tokens."""

    def forward(self, x):
        return super().forward(x) * (torch.arange(x.shape[1], device=x.device) < 30)[:, None]


class Chain(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = up, nn.ReLU(), down

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def assigned(y, x):
    y = y.clone()
    y[:, 30:] = 0
    return y


def long(y, x):
    return y * 0.5 if x.shape[1] > 64 else y


AROUND: dict[str, Callable[[], nn.Module]] = {
    "zero tokens": lambda: Layer(after=lambda y, x: y * (x.abs().sum(-1, keepdim=True) > 0)),
    "later tokens": lambda: Layer(after=lambda y, x: y * (torch.arange(x.shape[1]) < 30)[:, None].to(x.device)),
    "later sequences": lambda: Layer(
        after=lambda y, x: y * (torch.arange(x.shape[0]) < 16)[:, None, None].to(x.device)
    ),
    "where": lambda: Layer(after=lambda y, x: torch.where(x.abs().amax(-1, True) == 0, 1.0, y)),
    "assigned": lambda: Layer(after=assigned),
    "length in Python": lambda: Layer(after=long),
    "one length": lambda: Layer(after=lambda y, x: y if x.shape[1] % 3 else y * 2),
    "batch in Python": lambda: Layer(after=lambda y, x: -y if x.shape[0] > 16 else y),
    "size as factor": lambda: Layer(after=lambda y, x: y * min(1, 30 / x.shape[1])),
    "numbers in Python": lambda: Layer(after=lambda y, x: y + 1 if bool((x.abs().sum(-1) == 0).any()) else y),
    "before": lambda: Layer(lambda x: x * (torch.arange(x.shape[1]) < 30)[:, None].to(x.device)),
    "before, in Python": lambda: Layer(lambda x: x[:, :1].expand_as(x) if len(x) > 16 else x),
    "down in a chain": lambda: Chain(nn.Linear(HIDDEN, INTERMEDIATE), Odd(INTERMEDIATE, HIDDEN)),
    "up in a chain": lambda: Chain(Odd(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)),
}


@pytest.mark.parametrize("name", AROUND)
@torch.no_grad()
def test_what_is_done_around_a_layer_is_not_dropped(name: str) -> None:
    model = plain(FunctionalBlock(), AROUND[name]())
    wanted = [model(x.clone()) for x in hostile_inputs()]
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    assert all(close(model(x.clone()), y) for x, y in zip(hostile_inputs(), wanted))
    assert "0" in {layer.site.key for layer in model.torch_pi2.plan.layers}  # the other layer is sparse all the same


class Reads(nn.Module):
    """A block that reads a parameter of its feed-forward layer."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mlp, self.read = Layer(), read

    def forward(self, x):
        return x + self.mlp(x) + self.read(self.mlp)


class Other(nn.Module):
    """A block that does something else where its layer's class has another forward, as registries of hooks may."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Layer()

    def forward(self, x):
        return self.mlp(x) if "forward" not in vars(self.mlp) else x


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean of a weight": (lambda: Reads(lambda mlp: mlp.down.weight.mean()), "raises ConfigError: mean of weight"),
    "a bias in its place": (lambda: Reads(lambda mlp: mlp.down.bias), "raises ConfigError: add of bias"),
    "another forward": (Other, "results change by"),
}


@pytest.mark.parametrize("name", OUTSIDE)
@torch.no_grad()
def test_a_layer_whose_parts_are_read_outside_stays_dense(name: str) -> None:
    make, reason = OUTSIDE[name]
    model = plain(FunctionalBlock(), make())
    wanted = [model(x.clone()) for x in hostile_inputs()]
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    assert list(model.torch_pi2.left) == ["1.mlp"]
    assert reason in model.torch_pi2.left["1.mlp"]
    assert all(close(model(x.clone()), y) for x, y in zip(hostile_inputs(), wanted))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x):
        return x * next(self.calls)


@torch.no_grad()
def test_a_model_that_gives_other_results_each_time_is_said_not_to_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = plain(FunctionalBlock(), Reads(lambda mlp: 0.0), Counting())
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    assert not model.torch_pi2.left
    assert "gives other results each time: not compared with the sparse model" in caplog.text


FACTORS = {"one": 1.0}


def scaled(y):
    return y * 1.0


class Registry:
    factor = 1.0


class Own(nn.Module):
    """A feed-forward layer that looks up numbers and functions everywhere."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = (
            nn.Linear(HIDDEN, INTERMEDIATE),
            nn.Linear(INTERMEDIATE, HIDDEN),
            nn.LeakyReLU(0.0),
        )
        self.numbers = [1.0]
        self.scale, self.settings, self.config = 1.0, {"scale": 1.0}, types.SimpleNamespace(scale=1.0)

    def helper(self, h):
        return F.relu(h)

    def forward(self, x):
        h = self.helper(self.act(self.up(x))) * self.scale * self.settings["scale"] * self.config.scale * self.factor
        return scaled(self.down(h * FACTORS["one"] * self.numbers[0] * Registry.factor))


def other_forward(self, x):
    return self.down(self.up(x))


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda m, p: setattr(m, "scale", 3.0),
    "mapping of the module": lambda m, p: m.settings.update(scale=3.0),
    "configuration": lambda m, p: setattr(m.config, "scale", 3.0),
    "another configuration": lambda m, p: setattr(m, "config", types.SimpleNamespace(scale=3.0)),
    "class attribute": lambda m, p: p.setattr(Own, "factor", 3.0),
    "attribute that hides the class's": lambda m, p: setattr(m, "factor", 3.0),
    "forward of the class": lambda m, p: p.setattr(Own, "forward", other_forward),
    "method of the class": lambda m, p: p.setattr(Own, "helper", lambda self, h: h),
    "call of the class": lambda m, p: p.setattr(Own, "__call__", other_forward, raising=False),
    "forward of an activation": lambda m, p: p.setattr(nn.LeakyReLU, "forward", lambda self, h: h),
    "slope of an activation": lambda m, p: setattr(m.act, "negative_slope", 0.5),
    "forward of a linear": lambda m, p: setattr(m.down, "forward", lambda x: x),
    "function of the module": lambda m, p: p.setitem(globals(), "scaled", lambda y: y * 3),
    "function of PyTorch": lambda m, p: p.setattr(F, "relu", lambda h: h),
    "mapping": lambda m, p: p.setitem(FACTORS, "one", 3.0),
    "list": lambda m, p: m.numbers.__setitem__(0, 3.0),
    "attribute of another class": lambda m, p: p.setattr(Registry, "factor", 3.0),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_a_replaced_forward_looks_up_may_not_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(FunctionalBlock(), Own())
    x = hostile_inputs()[0]
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    model(x)
    CHANGES[name](model[1], monkeypatch)
    with pytest.raises(ConfigError, match=r"which the code of 1 looks up|expected a parameter with its values"):
        model(x)
    monkeypatch.undo()


COUNTS = {"block": 0, "layer": 0}


class Counts(Layer):
    def forward(self, x):
        COUNTS["block"] += 1
        COUNTS["layer"] += 1
        return super().forward(x)


class ReadsCounts(Layer):
    def forward(self, x):
        return super().forward(x) if COUNTS["layer"] >= 0 else x


@torch.no_grad()
def test_a_layer_whose_code_looks_up_what_each_call_changes_stays_dense() -> None:
    """The first one, as its block counts; then the second, as the first counts now."""
    COUNTS.update(block=0, layer=0)
    blocks = [Reads(lambda _: COUNTS.update(block=COUNTS["block"] + 1) or 0.0) for _ in range(2)]
    blocks[0].mlp, blocks[1].mlp = Counts(), ReadsCounts()
    model = plain(FunctionalBlock(), *blocks)
    wanted = [model(x.clone()) for x in hostile_inputs()]
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    assert list(model.torch_pi2.left) == ["1.mlp", "2.mlp"]
    assert "which its code looks up, changes in each call" in model.torch_pi2.left["1.mlp"]
    before = COUNTS["layer"]
    assert all(close(model(x.clone()), y) for x, y in zip(hostile_inputs(), wanted))
    assert COUNTS["layer"] == before + len(wanted)


class Cast(Layer):
    """T5's: ``to`` is a tensor's, though modules have one, too."""

    def forward(self, x):
        return self.down(F.relu(self.up(x)).to(self.down.weight.dtype))


@torch.no_grad()
class _Sizes:
    @classmethod
    def most(cls) -> int:
        return HIDDEN


class _LooksUpWhatIsMadeAnew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if "x" in inspect.signature(self.forward).parameters and _Sizes.most() else -x


def test_class_methods_and_the_standard_library_are_no_change() -> None:
    """A class method is another object at each look-up, and so is what ``inspect`` looks up."""
    assert Lookups([_LooksUpWhatIsMadeAnew()]).changed() == ""


def test_methods_of_tensors_by_names_that_modules_have() -> None:
    model, x = plain(Cast()), hostile_inputs()[0]
    wanted = model(x)
    assert close(torch_pi2.optimize(model, EXAMPLE, method="exact")(x), wanted)


EXPERTS: dict[str, Callable[[Any, Any], Any]] = {
    "later tokens": lambda y, x: y * (torch.arange(len(x)) < 30)[:, None],
    "zero tokens": lambda y, x: y + (x.abs().sum(-1, keepdim=True) == 0),
    "length in Python": lambda y, x: y * 2 if len(x) > 300 else y,
    "one token": lambda y, x: y * 2 if len(x) == 1 else y,
}


@pytest.mark.parametrize("name", EXPERTS)
def test_what_experts_do_besides_is_seen(name: str) -> None:
    model = tiny_experts.build("Mixtral", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    kind = type(experts)

    class More(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return EXPERTS[name](kind.forward(self, hidden_states, top_k_index, top_k_weights), hidden_states)

    assert isinstance(experts_form(experts), ExpertsForm)
    experts.__class__ = More
    assert "a forward that computes something else as well" in str(experts_form(experts))


class OwnExperts(nn.Module):
    """Experts as a modelling file of one's own has them."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * INTERMEDIATE, HIDDEN, generator=draw) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, INTERMEDIATE, generator=draw) * 0.2)
        self.act_fn = nn.ReLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for expert in range(4):
            token, k = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            found = F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * top_k_weights[token, k, None]
            y.index_add_(0, token, found.to(y.dtype))
        return y


class Routes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4), OwnExperts()

    def forward(self, x):
        weight, index = self.router(x.flatten(0, 1)).softmax(-1).topk(2, -1)
        return x + self.experts(x.flatten(0, 1), index.int(), weight).view_as(x)


@torch.no_grad()
def test_experts_of_a_file_of_ones_own() -> None:
    """Their code calls ``to`` of a tensor, a name that modules have too, and the router gives int32."""
    model = plain(Routes())
    wanted = [model(x.clone()) for x in hostile_inputs()]
    torch_pi2.optimize(model, EXAMPLE, method="exact")
    assert len(model.torch_pi2.plan.layers) == 4
    assert all(close(model(x.clone()), y) for x, y in zip(hostile_inputs(), wanted))
