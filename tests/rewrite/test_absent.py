"""What an optimised model no longer has says so by name: every use of a weight, over all ways of rewriting."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import MLP, X_BTH, Around, FusedBlock, close, make_plan, sequential
from tiny_experts import build
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn
from torch.func import functional_call

import torch_pi2
from torch_pi2.base.absent import AbsentParameter
from torch_pi2.errors import ConfigError
from torch_pi2.rewrite.rewrite import rewrite

IDS_BT = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))


@dataclass
class Way:
    """A dense model, how it is optimised, an input, and one of the weights that it no longer has then."""

    build: Callable[[], nn.Module]
    weight: str
    x: torch.Tensor = X_BTH
    optimize: Callable[[nn.Module, torch.Tensor], nn.Module] = lambda m, x: rewrite(m, make_plan(m, (x,)))

    @property
    def pickles(self) -> bool:
        return isinstance(self.build(), nn.Sequential)


def _exact(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return torch_pi2.optimize(model, config=torch_pi2.Config(method="exact"))


def _quantised(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return torch_pi2.optimize(model, method="exact", weights="int8")


WAYS = {
    "owner": Way(lambda: Around(MLP()).eval(), "mlp.up.weight"),
    "owner, bias": Way(lambda: Around(MLP()).eval(), "mlp.down.bias"),
    "chain": Way(lambda: plain(*sequential(nn.ReLU())), "0.weight"),
    "chain, last": Way(lambda: plain(*sequential(nn.ReLU())), "2.weight"),
    "lazy": Way(lambda: plain(FunctionalBlock()), "0.banana.weight"),
    "lazy, down": Way(lambda: plain(FunctionalBlock()), "0.cherry.bias"),
    "lazy, gated": Way(lambda: plain(GatedBlock()), "0.b.weight"),
    "lazy, fused": Way(lambda: plain(FusedBlock()), "0.gu.weight"),
    "Llama": Way(lambda: tiny("llama-relu"), "model.layers.0.mlp.down_proj.weight", IDS_BT, _exact),
    "OPT": Way(lambda: tiny("opt"), "model.decoder.layers.1.fc1.weight", IDS_BT, _exact),
    "experts": Way(lambda: build("Mixtral"), "model.layers.0.mlp.experts.gate_up_proj", IDS_BT, _exact),
    "quantised FFN": Way(lambda: tiny("llama-relu"), "model.layers.0.mlp.up_proj.weight", IDS_BT, _quantised),
    "quantised linear": Way(lambda: tiny("llama-relu"), "lm_head.weight", IDS_BT, _quantised),
}


USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data,
    "data.zero_": lambda p: p.data.zero_(),
    "data set": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "copied": lambda p: torch.zeros(p.shape).copy_(p),
    "add_": lambda p: p.add_(1),
    "+": lambda p: p + 1,
    "==": lambda p: p == 0,
    "[]": lambda p: p[0],
    "[] =": lambda p: p.__setitem__(0, 1.0),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: p.numpy(),
    "tolist": lambda p: p.tolist(),
    "T": lambda p: p.T,
    "data_ptr": lambda p: p.data_ptr(),
    "equal": lambda p: torch.equal(p, p),
    "stack": lambda p: torch.stack([p, p]),
    "matmul": lambda p: torch.ones(3, p.shape[0]) @ p,
    "linear": lambda p: F.linear(torch.ones(1, p.shape[-1]), p),
    "set_": lambda p: p.set_(torch.zeros(p.shape)),
    "init": lambda p: nn.init.zeros_(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "clip": lambda p: torch.nn.utils.get_total_norm([p]),
}


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_what_an_optimised_model_no_longer_has(name: str) -> None:
    way = WAYS[name]
    model = way.build()
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    dense = _out(model, way.x)
    way.optimize(model, way.x)
    _cannot_be_read_or_changed(model, way.weight, parameters[way.weight], values[way.weight].shape)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in values.values())
    _is_not_called_with_others(model, way)
    for twin in (copy.deepcopy(model), *([pickle.loads(pickle.dumps(model))] if way.pickles else [])):
        assert torch.equal(_out(twin, way.x), _out(model, way.x))
        assert twin.get_parameter(way.weight) is not model.get_parameter(way.weight)
        _is_not_called_with_others(twin, way)
        twin.to(torch.bfloat16)
        assert twin.get_parameter(way.weight).dtype == twin.state_dict()[way.weight].dtype == torch.bfloat16
        with pytest.raises(ConfigError, match="norm of"):
            twin.get_parameter(way.weight).norm()
    if "quantised" in name:
        return
    torch_pi2.restore(model)
    assert all(p is parameters[name] and type(p) is nn.Parameter for name, p in model.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert torch.equal(_out(model, way.x), dense)
    assert not torch.equal(_first(functional_call(model, {way.weight: values[way.weight] * 2}, (way.x,))), dense)


@torch.no_grad()
def test_a_model_over_a_store(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "plain", "tiny", layers=1, active=0.2, weights="float32")
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", offload=torch_pi2.OffloadConfig(preload=False))
    weight = "model.layers.0.mlp.up_proj.weight"
    held = model.get_parameter(weight)
    _cannot_be_read_or_changed(model, weight, held, held.shape)
    _is_not_called_with_others(model, Way(nn.Module, weight, IDS_BT))
    with pytest.raises(ConfigError, match=r"found one in model\.pi2"):
        model.state_dict()


@torch.no_grad()
def test_parts_cannot_be_called_by_hand() -> None:
    """``fc1(x)`` gives what it gave, or raises: not the whole FFN's result."""
    for name in ("owner", "chain"):
        way = WAYS[name]
        model = way.build()
        parts = [m for m in model.modules() if isinstance(m, nn.Linear | nn.ReLU)]
        way.optimize(model, way.x)
        for held in parts:  # those of before compute what they did, or raise
            if isinstance(held, nn.ReLU):
                assert torch.equal(held(way.x), F.relu(way.x))
                continue
            with pytest.raises(ConfigError, match=r"linear of .*weight: expected a parameter with its values"):
                held(torch.ones(1, held.in_features))
    first, act, last = model  # the chain's
    passed, wide = first(X_BTH), torch.ones(1, INTERMEDIATE)
    assert "the modules after it" in repr(passed)
    assert (passed.dtype, passed.device.type) == (torch.float32, "cpu")
    for use in (lambda: passed + 1, passed.norm, passed.numpy, lambda: passed.shape, lambda: F.relu(passed)):
        with pytest.raises(ConfigError, match=r"calling a part of .* by hand.*from 0 on.*Call the whole block"):
            use()
    for call in (lambda: act(wide), lambda: last(wide), lambda: last(act(X_BTH))):
        with pytest.raises(ConfigError, match="found a tensor of something else"):
            call()
    assert torch.equal(last(act(passed)), model(X_BTH))
    other = WAYS["chain"].build()
    WAYS["chain"].optimize(other, X_BTH)
    with pytest.raises(ConfigError, match="by hand"):
        other[1](passed)


@torch.no_grad()
def test_parts_cannot_be_replaced() -> None:
    for name, part, value in (("owner", "up", nn.Linear(HIDDEN, INTERMEDIATE)), ("lazy", "in_features", 3)):
        way = WAYS[name]
        model = way.optimize(way.build(), way.x)
        module = model.mlp if name == "owner" else model[0].banana
        with pytest.raises(ConfigError, match=rf"assigning {part} of .*would not see it.*restore"):
            setattr(module, part, value)
        module.seen_by_the_caller = True
        assert module.seen_by_the_caller


@pytest.mark.parametrize("name", [name for name in WAYS if not name.startswith("quantised")])
@torch.no_grad()
def test_what_does_not_run_takes_no_assignments(name: str) -> None:
    """Held from before or found in the model: a forward, a part, a setting; copies and pickles are no loophole."""
    way = WAYS[name]
    model = way.build()
    held = {where: module for where, module in model.named_modules() if not isinstance(module, nn.LayerNorm)}
    classes = {where: type(module) for where, module in held.items()}
    way.optimize(model, way.x)
    running = {id(module) for module in model.modules()}
    gone = {where: module for where, module in held.items() if id(module) not in running}
    assert gone
    for module in (*gone.values(), *copy.deepcopy(gone).values()):
        for attribute in ("forward", *module._modules, *(n for n in vars(module) if n in ("in_features", "inplace"))):
            with pytest.raises(ConfigError, match=rf"assigning {attribute} of a \w+ in a feed-forward.*restore"):
                setattr(module, attribute, getattr(module, attribute))
        module.seen_by_the_caller = True
        module.eval()
    if way.pickles:
        assert torch.equal(_out(pickle.loads(pickle.dumps(model)), way.x), _out(model, way.x))
    torch_pi2.restore(model)
    assert {where: type(module) for where, module in held.items()} == classes
    for module in gone.values():
        module.forward = module.forward


def _compiled(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [lambda model: model, _compiled], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_chain_runs_whole_or_raises(run: Callable[[nn.Module], Any]) -> None:
    """A module of it replaced, left out, called alone or with a hook between them: in graphs as in eager mode."""

    def changed(change: Callable[[Any], Any]) -> Any:
        model = WAYS["chain"].optimize(WAYS["chain"].build(), X_BTH)
        return change(model) or model

    def hooked(model: Any) -> None:
        model[0].register_forward_hook(lambda module, args, out: out * 2)

    def hooked_before(model: Any) -> None:
        model[2].register_forward_pre_hook(lambda module, args: (F.gelu(args[0]),))

    for change in (
        lambda model: model.__setitem__(1, nn.Identity()),
        lambda model: model.__setitem__(1, nn.GELU()),
        lambda model: model.__delitem__(1),
        lambda model: model[1:],
        hooked,
        hooked_before,
    ):
        with pytest.raises(ConfigError, match=r"calling a part of .* by hand.*Call the whole block"):
            run(changed(change))(X_BTH)
    assert not isinstance(_compiled(changed(lambda model: model[0]))(X_BTH), torch.Tensor)
    model = changed(lambda model: model[0].register_forward_hook(lambda *_: None) and None)
    assert close(run(model)(X_BTH), model(X_BTH))


#: What PEFT does to put an adapter on; the real one is no dependency.
PEFT = """
def inject_adapter(model, target, made):
    for name in [name for name, _ in model.named_modules() if name.endswith(target)]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made(model.get_submodule(name)))
"""


def test_an_adapter_put_on_later_is_refused_or_heeded() -> None:
    peft: dict[str, Any] = {"__name__": "peft.tuners"}
    exec(PEFT, peft)
    adapter = type("Lora", (nn.Linear,), {"__module__": "peft.tuners"})(1, 1)
    model = _exact(tiny("llama-relu"), IDS_BT)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ConfigError, match=r"assigning up_proj of model\.layers\.0\.mlp"):
        peft["inject_adapter"](model, "up_proj", lambda linear: adapter)
    assert [name for name, _ in model.named_modules()] == names
    peft["inject_adapter"](model, "q_proj", lambda linear: adapter)
    with pytest.raises(ConfigError, match=r"adapters in it \(model\.layers\.0\.self_attn\.q_proj\).*merge_and_unload"):
        torch_pi2.save(model, "never made")


class Adapted(nn.Linear):
    """Weights that are changed as PEFT changes them: through ``.data``."""

    def merge(self, sign: int) -> None:
        self.weight.data += sign * 0.3


@torch.no_grad()
def test_an_adapter_merged_before_is_not_unmerged_in_silence() -> None:
    model = plain(FunctionalBlock())
    linear = model[0].banana
    linear.__class__ = Adapted
    before = model(X_BTH)
    linear.merge(1)
    merged = model(X_BTH)
    rewrite(model, make_plan(model, (X_BTH,)))
    with pytest.raises(ConfigError, match=r"data of 0\.banana\.weight"):
        linear.merge(-1)
    with pytest.raises(ConfigError, match=r"data of 0\.banana\.weight"):
        model[0].banana.merge(-1)
    assert close(model(X_BTH), merged)
    torch_pi2.restore(model)
    linear.merge(-1)
    assert close(model(X_BTH), before)


def _cannot_be_read_or_changed(model: nn.Module, name: str, held: nn.Parameter, shape: torch.Size) -> None:
    owner, _, local = name.rpartition(".")
    attribute = getattr(model.get_submodule(owner), local)
    for parameter in (held, attribute, model.get_parameter(name), dict(model.named_parameters())[name]):
        for use in USES.values():
            with pytest.raises(ConfigError, match=rf"{local}: expected a parameter with its values.*restore"):
                use(parameter)
        assert (parameter.shape, parameter.dtype, parameter.device.type) == (shape, torch.float32, "cpu")
        assert isinstance(parameter, nn.Parameter)
        assert "in a sparse layer" in repr(parameter)
        assert (parameter.numel(), parameter.nbytes, parameter.grad) == (shape.numel(), 0, None)
        assert parameter.untyped_storage().nbytes() <= 4
    model.requires_grad_(False).zero_grad()
    assert not any(p.requires_grad for p in model.parameters())


def _is_not_called_with_others(model: nn.Module, way: Way) -> None:
    wanted, (owner, _, local) = _out(model, way.x), way.weight.rpartition(".")
    zeros = {way.weight: torch.zeros(model.get_parameter(way.weight).shape)}
    with pytest.raises(ConfigError, match=rf"a call with other parameters \(.*{local} of .*restore"):
        functional_call(model, zeros, (way.x,))
    assert torch.equal(_out(model, way.x), wanted)
    assert torch.equal(_first(functional_call(model, dict(model.named_parameters()), (way.x,))), wanted)
    kept = {n: torch.zeros_like(p) for n, p in model.named_parameters() if not isinstance(p, AbsentParameter)}
    if kept:  # what the model still has is heeded
        assert not torch.equal(_first(functional_call(model, kept, (way.x,))), wanted)
    module, own = model.get_submodule(owner), model.get_parameter(way.weight)
    with pytest.raises(ConfigError, match=local):
        _assigned_and_called(module, local, zeros[way.weight], model, way.x)
    if module._parameters[local] is not own:  # a module that does not run: the next call has said so
        setattr(module, local, own)
    assert torch.equal(_out(model, way.x), wanted)


def _assigned_and_called(module: nn.Module, name: str, value: torch.Tensor, model: nn.Module, x: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(value))
    model(x)


def _out(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _first(model(x))


def _first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits
