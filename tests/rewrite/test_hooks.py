"""Hooks inside feed-forward layers: they see and change what they did, or are refused by name; none is dropped."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rewriting import MLP, X_BTH, Around, close, make_plan, sequential
from tiny_experts import build
from tiny_models import VOCAB, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn

import torch_pi2
from torch_pi2.base.modules import has_sparse_layers
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.graph.dispatch import NeuronClusterMode
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import replacement_of
from torch_pi2.rewrite.rewrite import restore, rewrite

IDS_BT = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))


class Steering:
    """A hook of any kind: counts its calls, remembers what it sees, and doubles it once it is switched on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on, self.seen = kind, False, []

    def register(self, module: nn.Module) -> Any:
        if self.kind == "pre":
            return module.register_forward_pre_hook(lambda m, args: self(args))
        if self.kind == "pre, kwargs":
            both = lambda m, args, kwargs: None if (out := self(args)) is None else (out, kwargs)  # noqa: E731
            return module.register_forward_pre_hook(both, with_kwargs=True)
        if self.kind == "post, kwargs":
            return module.register_forward_hook(lambda m, args, kwargs, out: self(out), with_kwargs=True)
        return module.register_forward_hook(lambda m, args, out: self(out))

    def __call__(self, value: Any) -> Any:
        tensor = value[0] if isinstance(value, tuple) else value
        if torch.compiler.is_compiling():  # what finds the layers
            return None
        self.seen.append(tensor.clone())
        return None if not self.on else (tensor * 2,) if isinstance(value, tuple) else tensor * 2


class Stack(nn.Module):
    """An encoder, whose layers have their linears beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


#: model, its input, modules inside its FFN (first linear, activation if it is a module, last linear)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, list[str]]] = {
    "sequential": (lambda: plain(*sequential(nn.ReLU())), X_BTH, ["0", "1", "2"]),
    "owned sequential": (lambda: plain(nn.LayerNorm(32), sequential(nn.ReLU())), X_BTH, ["1.0", "1.1", "1.2"]),
    "owner": (lambda: Around(MLP()).eval(), X_BTH, ["mlp.up", "mlp.down"]),
    "functional": (lambda: plain(FunctionalBlock()), X_BTH, ["0.banana", "0.cherry"]),
    "gated": (lambda: plain(GatedBlock()), X_BTH, ["0.a", "0.b", "0.c"]),
    "encoder": (lambda: plain(Stack()), X_BTH, ["0.encoder.layers.0.linear1", "0.encoder.layers.0.linear2"]),
    "OPT": (lambda: tiny("opt"), IDS_BT, [f"model.decoder.layers.0.{m}" for m in ("fc1", "activation_fn", "fc2")]),
    "Llama": (lambda: tiny("llama-relu"), IDS_BT, [f"model.layers.0.mlp.{m}" for m in ("act_fn", "down_proj")]),
}
KINDS = ("pre", "post", "pre, kwargs", "post, kwargs")


def out_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.logits


def optimized(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return rewrite(model, make_plan(model, () if x is IDS_BT else (x,)))


@pytest.fixture(autouse=True)
def _no_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules, and so no hooks
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hooks_inside_are_heeded(name: str) -> None:
    """All of them at once, each switched on alone: before optimize, and only after it (activation steering)."""
    make, x, inside = MODELS[name]
    dense = make()
    model = copy.deepcopy(dense)
    hooks = {(where, kind): (Steering(kind), Steering(kind)) for where in inside for kind in KINDS}
    handles = []
    for (where, _), pair in hooks.items():
        for hook, root in zip(pair, (dense, model), strict=True):
            handles.append(hook.register(root.get_submodule(where)))
    optimized(model, x)
    assert has_sparse_layers(model)
    for key, pair in {("none", ""): (), **hooks}.items():
        for hook in pair:
            hook.on = True
        for hook in (h for both in hooks.values() for h in both):
            hook.seen.clear()
        wanted = out_of(dense, x)
        assert close(out_of(model, x), wanted), key
        for other, (one, two) in hooks.items():
            assert len(one.seen) == len(two.seen) > 0, other
            assert all(close(b, a) for a, b in zip(one.seen, two.seen, strict=True)), other
        for hook in pair:
            hook.on = False
    for handle in handles:
        handle.remove()
    for hook in (h for both in hooks.values() for h in both):
        hook.seen.clear()
    assert close(out_of(model, x), out_of(dense, x))
    assert not any(h.seen for both in hooks.values() for h in both)
    restore(model)
    assert torch.equal(out_of(model, x), out_of(dense, x))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hooks_registered_later_are_heeded_or_raise(name: str) -> None:
    """Registered through the optimised model or on a module held from before: never without effect."""
    make, x, inside = MODELS[name]
    dense = make()
    model = copy.deepcopy(dense)
    held = {where: model.get_submodule(where) for where in inside}
    optimized(model, x)
    refused = 0
    for where in inside:
        module = model.get_submodule(where)
        assert module is held[where]
        for kind in KINDS:
            one, two = Steering(kind), Steering(kind)
            one.on = two.on = True
            handle = one.register(dense.get_submodule(where))
            wanted = out_of(dense, x)
            handle.remove()
            handle, found = _registered_and_called(two, module, model, x)
            if found is None:
                refused += 1
            else:
                assert close(found, wanted)
                assert all(close(b, a) for a, b in zip(one.seen, two.seen, strict=True))
            if handle is not None:
                handle.remove()
    assert (refused > 0) == (name not in ("functional", "gated", "encoder"))
    assert close(out_of(model, x), out_of(dense, x))
    restore(model)
    for where in inside:
        hook = Steering("post")
        handle = hook.register(model.get_submodule(where))
        out_of(model, x)
        handle.remove()
        assert hook.seen


def _registered_and_called(
    hook: Steering, module: nn.Module, model: nn.Module, x: torch.Tensor
) -> tuple[Any, torch.Tensor | None]:
    """The hook's handle and what the model gives then; None for what is refused by name."""
    handle = None
    with contextlib.suppress(ConfigError), _says("a hook inside .* computes as a whole.*torch_pi2.restore"):
        handle = hook.register(module)
    if handle is None:
        return None, None
    with contextlib.suppress(ConfigError), _says("calling a part of .* by hand.*torch_pi2.restore"):
        return handle, out_of(model, x)
    return handle, None


@contextlib.contextmanager
def _says(pattern: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(str(error)) from error
        raise


@torch.no_grad()
def test_hooks_before_and_after_a_chain_leave_it_one() -> None:
    model = plain(*sequential(nn.ReLU()))
    first, last = Steering("pre"), Steering("post")
    first.register(model[0])
    last.register(model[2])
    optimized(model, X_BTH)
    assert isinstance(replacement_of(model[0]), SparseFFN)
    model(X_BTH)
    assert len(first.seen) == len(last.seen) == 1
    first.on = last.on = True
    found = model(X_BTH)
    assert close(found, restore(model)(X_BTH))


@torch.no_grad()
def test_experts() -> None:
    """One module computes them all: its own hooks stay, and those with hooks inside stay dense."""
    model = build("Mixtral")
    experts: Any = model.get_submodule("model.layers.0.mlp.experts")
    config = torch_pi2.Config(method="exact")
    hook = Steering("post")
    handle = hook.register(experts.act_fn)
    torch_pi2.optimize(model, config=config)  # those of the other layer alone
    reason = "model.layers.0.mlp.experts.act_fn has a hook, which would not run"
    left = model.torch_pi2.plan.made_by["left"]
    assert {key.partition(".mlp.")[0]: why for key, why in left.items()} == {"model.layers.0": reason}
    assert {layer.site.key.partition(".mlp.")[0] for layer in model.torch_pi2.plan.layers} == {"model.layers.1"}
    assert model.get_submodule("model.layers.0.mlp.experts") is experts
    restore(model)
    with pytest.raises(UnsupportedModelError, match=r"experts.act_fn has a hook, which would not run"):
        rewrite(model, make_plan(model, hot=0.0))
    assert not has_sparse_layers(model)
    handle.remove()
    hook.register(experts)
    torch_pi2.optimize(model, config=config)
    hook.seen.clear()
    hook.on = True
    found = out_of(model, IDS_BT)
    assert hook.seen
    assert close(found, out_of(restore(model), IDS_BT))
    torch_pi2.optimize(model, config=config)
    with pytest.raises(ConfigError, match=r"a hook inside model\.layers\.0\.mlp\.experts"):
        Steering("pre").register(experts.act_fn)


@torch.no_grad()
def test_a_forward_put_on_a_module_is_not_dropped() -> None:
    """As accelerate's hooks are: an owner is left alone for its linears, and a linear is refused by name."""
    model = Around(MLP()).eval()
    plan = make_plan(model, (X_BTH,))
    original, factor = model.mlp.forward, [1.0]
    model.mlp.forward = lambda x: original(x) * factor[0]
    rewrite(model, plan)
    assert replacement_of(model.mlp) is None
    factor[0] = 2.0
    found = model(X_BTH)
    assert close(found, restore(model)(X_BTH))
    del model.mlp.forward
    model.mlp.down.forward = lambda x: nn.Linear.forward(model.mlp.down, x) * factor[0]
    factor[0] = 1.0
    with pytest.raises(UnsupportedModelError, match=r"mlp.down has a forward of its own"):
        rewrite(model, plan)


STATE_HOOKS = {
    "before loading": lambda module, seen: module.register_load_state_dict_pre_hook(lambda *_: seen.append(1)),
    "after loading": lambda module, seen: module.register_load_state_dict_post_hook(lambda *_: seen.append(1)),
    "before saving": lambda module, seen: module.register_state_dict_pre_hook(lambda *_: seen.append(1)),
    "after saving": lambda module, seen: module.register_state_dict_post_hook(lambda *_: seen.append(1)),
}


@pytest.mark.parametrize("name", STATE_HOOKS)
@pytest.mark.parametrize("where", ["0", "0.up", "0.down"])
def test_hooks_of_state_dicts_run(where: str, name: str) -> None:
    model, seen = plain(MLP()), list[int]()
    plan = make_plan(model, (X_BTH,))
    STATE_HOOKS[name](model.get_submodule(where), seen)
    rewrite(model, plan)
    STATE_HOOKS[name](model.get_submodule(where), seen)
    model.load_state_dict(model.state_dict())
    assert len(seen) == 2


def test_hooks_of_all_modules_are_refused() -> None:
    model = plain(FunctionalBlock())
    plan = make_plan(model, (X_BTH,))
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        handle = register(lambda *_: None)
        try:
            with pytest.raises(ConfigError, match=r"hooks on all modules.*Remove them"):
                rewrite(model, plan)
        finally:
            handle.remove()
    assert not has_sparse_layers(model)
    rewrite(model, plan)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match=r"hooks on all modules.*Remove them"):
            model(X_BTH)
    finally:
        handle.remove()


@torch.no_grad()
def test_neuron_cluster_mode() -> None:
    """Hooks run there as they are; what fires is decided before one between the matmuls, so that it is refused."""
    model = plain(*sequential(nn.ReLU()))
    plan = make_plan(model, (X_BTH,)).bind(model)
    outer = Steering("pre"), Steering("post")
    outer[0].register(model[0])
    outer[1].register(model[2])
    outer[0].on = outer[1].on = True
    wanted = model(X_BTH)
    with NeuronClusterMode(plan) as mode:
        assert close(model(X_BTH), wanted)
    assert mode.computed_share() < 1
    for where, kind in (("0", "post"), ("1", "pre"), ("1", "post"), ("2", "pre")):
        handle = Steering(kind).register(model.get_submodule(where))
        with pytest.raises(ConfigError, match=rf"NeuronClusterMode at .*found a hook on {where}\."), mode:
            pass
        handle.remove()
    with mode:
        assert close(model(X_BTH), wanted)
