"""Weights that a sparse layer has: no use of one reads or changes an old value, whatever the replacement strategy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import MLP, X_BTH, Around, FusedBlock, close, make_plan, sequential
from tiny_experts import build
from tiny_models import INTERMEDIATE, VOCAB, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn
from torch.func import functional_call

import torch_pi2
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.rewrite.rewrite import rewrite

IDS_BT = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))


@dataclass
class Case:
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


CASES = {
    "module": Case(lambda: Around(MLP()).eval(), "mlp.up.weight"),
    "module, bias": Case(lambda: Around(MLP()).eval(), "mlp.down.bias"),
    "sequential": Case(lambda: plain(*sequential(nn.ReLU())), "0.weight"),
    "sequential, last": Case(lambda: plain(*sequential(nn.ReLU())), "2.weight"),
    "lazy": Case(lambda: plain(FunctionalBlock()), "0.banana.weight"),
    "lazy, down": Case(lambda: plain(FunctionalBlock()), "0.cherry.bias"),
    "lazy, gated": Case(lambda: plain(GatedBlock()), "0.b.weight"),
    "lazy, fused": Case(lambda: plain(FusedBlock()), "0.gu.weight"),
    "Llama": Case(lambda: tiny("llama-relu"), "model.layers.0.mlp.down_proj.weight", IDS_BT, _exact),
    "OPT": Case(lambda: tiny("opt"), "model.decoder.layers.1.fc1.weight", IDS_BT, _exact),
    "experts": Case(lambda: build("Mixtral"), "model.layers.0.mlp.experts.gate_up_proj", IDS_BT, _exact),
    "quantised FFN": Case(lambda: tiny("llama-relu"), "model.layers.0.mlp.up_proj.weight", IDS_BT, _quantised),
    "quantised linear": Case(lambda: tiny("llama-relu"), "lm_head.weight", IDS_BT, _quantised),
}


USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "data set": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "copied": lambda p: torch.zeros(p.shape).copy_(p),
    "add_": lambda p: p.add_(1),
    "+": lambda p: p + 1,
    "[]": lambda p: p[0],
    "[] =": lambda p: p.__setitem__(0, 1.0),
    "detach": lambda p: p.detach(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: p.numpy(),
    "T": lambda p: p.T,
    "data_ptr": lambda p: p.data_ptr(),
    "stack": lambda p: torch.stack([p, p]),
    "linear": lambda p: F.linear(torch.ones(1, p.shape[-1]), p),
    "set_": lambda p: p.set_(torch.zeros(p.shape)),
    "init": lambda p: nn.init.zeros_(p),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_offloaded_weights(name: str) -> None:
    case = CASES[name]
    model = case.build()
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    dense = _out(model, case.x)
    case.optimize(model, case.x)
    _cannot_be_read_or_changed(model, case.weight, parameters[case.weight], values[case.weight].shape)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in values.values())
    _is_not_called_with_others(model, case)
    for twin in (copy.deepcopy(model), *([pickle.loads(pickle.dumps(model))] if case.pickles else [])):
        assert torch.equal(_out(twin, case.x), _out(model, case.x))
        assert twin.get_parameter(case.weight) is not model.get_parameter(case.weight)
        _is_not_called_with_others(twin, case)
        twin.to(torch.bfloat16)
        assert twin.get_parameter(case.weight).dtype == twin.state_dict()[case.weight].dtype == torch.bfloat16
        with pytest.raises(ConfigError, match="norm of"):
            twin.get_parameter(case.weight).norm()
    if "quantised" in name:
        return
    torch_pi2.restore(model)
    assert all(p is parameters[name] and type(p) is nn.Parameter for name, p in model.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert torch.equal(_out(model, case.x), dense)
    assert not torch.equal(_first(functional_call(model, {case.weight: values[case.weight] * 2}, (case.x,))), dense)


@torch.no_grad()
def test_a_model_over_a_store(tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "plain", "tiny", layers=1, active=0.2, weights="float32")
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", offload=torch_pi2.OffloadConfig(preload=False))
    weight = "model.layers.0.mlp.up_proj.weight"
    held = model.get_parameter(weight)
    _cannot_be_read_or_changed(model, weight, held, held.shape)
    _is_not_called_with_others(model, Case(nn.Module, weight, IDS_BT))
    with pytest.raises(ConfigError, match=r"found one in model\.pi2"):
        model.state_dict()


@torch.no_grad()
def test_parts_cannot_be_called_by_hand() -> None:
    """``fc1(x)`` gives what it gave, or raises: not the whole FFN's result."""
    case = CASES["module"]
    model = case.optimize(case.build(), case.x)
    with pytest.raises(ConfigError, match=r"linear of mlp.up.weight: expected a parameter with its values"):
        model.mlp.up(X_BTH)
    case = CASES["sequential"]
    model = case.optimize(case.build(), case.x)
    first, act, last = model
    fused, wide = first(X_BTH), torch.ones(1, INTERMEDIATE)
    assert "the modules after it" in repr(fused)
    assert (fused.dtype, fused.device.type) == (torch.float32, "cpu")
    for use in (lambda: fused + 1, lambda: fused.norm, lambda: fused.shape, lambda: F.relu(fused)):
        with pytest.raises(ConfigError, match=r"calling a part of .* by hand.*from 0 on.*Call the whole block"):
            use()
    for call in (lambda: act(wide), lambda: last(wide), lambda: last(act(X_BTH))):
        with pytest.raises(ConfigError, match="found a tensor of something else"):
            call()
    assert torch.equal(last(act(fused)), model(X_BTH))


def _compiled(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("run", [lambda model: model, _compiled], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_chain_runs_whole_or_raises(run: Callable[[nn.Module], Any]) -> None:
    """A module of it replaced, left out, called alone or with a hook between them: in graphs as in eager mode."""

    def changed(change: Callable[[Any], Any]) -> Any:
        model = CASES["sequential"].optimize(CASES["sequential"].build(), X_BTH)
        return change(model) or model

    def hooked(model: Any) -> None:
        model[0].register_forward_hook(lambda module, args, out: out * 2)

    def hooked_before(model: Any) -> None:
        model[2].register_forward_pre_hook(lambda module, args: (F.gelu(args[0]),))

    for change in (
        lambda model: model.__setitem__(1, nn.Identity()),
        lambda model: model.__setitem__(1, nn.GELU()),
        lambda model: model.__delitem__(1),
        hooked,
        hooked_before,
    ):
        with pytest.raises(ConfigError, match=r"calling a part of .* by hand.*Call the whole block"):
            run(changed(change))(X_BTH)
    model = changed(lambda model: model[0].register_forward_hook(lambda *_: None) and None)
    assert close(run(model)(X_BTH), model(X_BTH))


@pytest.mark.parametrize("name", ["llama-relu", "opt"])
@torch.no_grad()
def test_an_adapter_put_on_later_is_refused_or_heeded(name: str) -> None:
    """As PEFT does it: by ``setattr`` on the parent of each module whose name fits."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.scale = base, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.base(x) * self.scale
            return y

    model = _exact(tiny(name), IDS_BT)
    wanted = _out(model, IDS_BT)

    def inject(target: str) -> list[Adapter]:
        found = [name for name, _ in model.named_modules() if name.endswith(target)]
        adapters = [Adapter(model.get_submodule(name)) for name in found]
        for path, adapter in zip(found, adapters, strict=True):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, adapter)
        return adapters

    if name == "llama-relu":
        with pytest.raises(ConfigError, match=r"assigning up_proj of model\.layers\.0\.mlp.*restore"):
            inject("up_proj")
    adapters = inject("q_proj")
    assert torch.equal(_out(model, IDS_BT), wanted)
    for adapter in adapters:
        adapter.scale = 2.0
    assert not torch.equal(_out(model, IDS_BT), wanted)
    if name == "opt":  # a sequence: whatever computes with what is between its modules is told
        inject("fc1")
        with pytest.raises(ConfigError, match=r"calling a part of .* by hand"):
            model(IDS_BT)


def test_a_model_with_adapters_is_not_saved() -> None:
    model = _exact(tiny("llama-relu"), IDS_BT)
    model.model.layers[0].self_attn.q_proj = type("Lora", (nn.Linear,), {"__module__": "peft.tuners"})(1, 1)
    with pytest.raises(ConfigError, match=r"adapters in it \(model\.layers\.0\.self_attn\.q_proj\).*merge_and_unload"):
        torch_pi2.save(model, "never made")


def test_a_model_whose_layers_were_taken_out_is_not_saved() -> None:
    model = _exact(tiny("llama-relu"), IDS_BT)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ConfigError, match=r"another or none at model\.layers\.1\.mlp: .*taken out or replaced"):
        torch_pi2.save(model, "never made")


@pytest.mark.parametrize("weights", ["float", "int4"])
def test_a_model_whose_layers_were_exchanged_is_not_saved(weights: str, tmp_path: Path) -> None:
    """Files are by name: quantised layers would be loaded into their old places."""
    model: Any = torch_pi2.optimize(tiny("llama-relu"), method="exact", weights=weights)
    first, second = model.model.layers

    def refused() -> None:
        with pytest.raises(ConfigError, match=r"another or none at model\.layers\.0\.mlp: layers were exchanged"):
            torch_pi2.save(model, "never made")

    first.mlp, second.mlp = second.mlp, first.mlp
    refused()
    first.mlp, second.mlp = second.mlp, first.mlp
    model.model.layers = nn.ModuleList((second, first))
    refused()
    model.model.layers = nn.ModuleList((first, second))
    torch_pi2.save(torch.compile(model), tmp_path / "as it was")


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


@pytest.mark.parametrize("name", ["Llama", "OPT", "experts", "quantised FFN", "quantised linear"])
@torch.no_grad()
def test_type_converts_floats_only(name: str) -> None:
    """``model.type`` casts integers, too: orders of neurons and quantised rows are none of its business."""
    case = CASES[name]
    typed, moved = (case.optimize(case.build(), case.x) for _ in range(2))
    typed.type(torch.bfloat16)
    moved.to(torch.bfloat16)
    assert torch.equal(_out(typed, case.x), _out(moved, case.x))
    assert all(torch.equal(a, b) for a, b in zip(typed.state_dict().values(), moved.state_dict().values(), strict=True))


@torch.no_grad()
def test_threads_that_save_a_model_get_its_weights() -> None:
    model = _exact(tiny("opt"), IDS_BT)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def right(_: int) -> bool:
        return all(torch.equal(value, values[name]) for name, value in model.state_dict().items())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(60)))


@pytest.mark.parametrize("name", ["Llama", "OPT"])
@torch.no_grad()
def test_restore_is_refused_under_a_patched_forward(name: str) -> None:
    """What accelerate puts around a forward would go on calling the sparse layer, whatever becomes of the weights."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    case = CASES[name]
    model = case.build()
    dense = _out(model, case.x)
    case.optimize(model, case.x)
    sparse = _out(model, case.x)
    patched = case.weight.split(".down")[0] if name == "Llama" else case.weight.removesuffix(".weight")
    add_hook_to_module(model.get_submodule(patched), ModelHook())
    with pytest.raises(ConfigError, match=rf"restoring {patched}: .*remove_hook_from_submodules"):
        torch_pi2.restore(copy.deepcopy(model) if name == "Llama" else model)
    remove_hook_from_submodules(model)
    assert torch.equal(_out(model, case.x), sparse)
    assert torch.equal(_out(torch_pi2.restore(model), case.x), dense)


@torch.no_grad()
def test_a_linear_of_two_layers_is_loaded_for_both_or_not_at_all() -> None:
    model = plain(FunctionalBlock(), FunctionalBlock(), FunctionalBlock())
    model[1].banana = model[0].banana
    with pytest.raises(UnsupportedModelError, match=r"0\.banana is a part of other modules, too"):
        rewrite(model, make_plan(model, (X_BTH,)))  # lazy tensors: it has one forward
    model = plain(Around(MLP()), Around(MLP()))
    model[1].mlp.up = model[0].mlp.up
    dense, state = model(X_BTH), {name: value * 2 for name, value in model.state_dict().items()}
    rewrite(model, make_plan(model, (X_BTH,)))
    with pytest.raises(ConfigError, match="several sparse layers have copies"):
        model.load_state_dict(state)
    with pytest.raises(ConfigError, match="several sparse layers have copies"):
        copy.deepcopy(model).load_state_dict(state)
    torch_pi2.restore(model).load_state_dict(state)
    assert not close(model(X_BTH), dense)


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


def _is_not_called_with_others(model: nn.Module, case: Case) -> None:
    wanted, (owner, _, local) = _out(model, case.x), case.weight.rpartition(".")
    zeros = {case.weight: torch.zeros(model.get_parameter(case.weight).shape)}
    with pytest.raises(ConfigError, match=rf"assigning .*{local}.*restore"):
        functional_call(model, zeros, (case.x,))
    assert torch.equal(_out(model, case.x), wanted)
    assert torch.equal(_first(functional_call(model, dict(model.named_parameters()), (case.x,))), wanted)
    kept = {n: torch.zeros_like(p) for n, p in model.named_parameters() if not isinstance(p, OffloadedParameter)}
    if kept:  # what the model still has is heeded
        assert not torch.equal(_first(functional_call(model, kept, (case.x,))), wanted)
    module, own = model.get_submodule(owner), model.get_parameter(case.weight)
    with pytest.raises(ConfigError, match=rf"assigning .*{local}.*restore"):
        setattr(module, local, nn.Parameter(zeros[case.weight]))
    with pytest.raises(ConfigError, match=rf"assigning .*{local}.*restore"):
        delattr(module, local)
    assert module._parameters[local] is own
    assert torch.equal(_out(model, case.x), wanted)


def _out(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _first(model(x))


def _first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("name", ["", "data", "state_dict"])
@torch.no_grad()
def test_memory_that_something_outside_has_too_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = plain(FunctionalBlock(), Around(MLP()))
    held = {"": None, "data": model[1].mlp.up.weight.data, "state_dict": model.state_dict()}[name]
    rewrite(model, make_plan(model, (X_BTH,)))
    said = [
        r.getMessage() for r in caplog.records if "tensors outside of the model have the memory of" in r.getMessage()
    ]
    assert bool(said) == (held is not None)
    assert not said or f"of {'1.mlp.up.weight' if name == 'data' else '0.banana.weight and 7 more'}" in said[0]


@pytest.mark.parametrize("name", ["_modules", "_parameters"])
def test_guarded_mappings_are_not_updated_in_silence(name: str) -> None:
    model = plain(FunctionalBlock(), Around(MLP()))
    rewrite(model, make_plan(model, (X_BTH,)))
    new = {"_modules": {"up": nn.Linear(1, 1)}, "_parameters": {"weight": nn.Parameter(torch.zeros(1))}}[name]
    with pytest.raises(ConfigError, match="assigning "):
        getattr(model[1].mlp if name == "_modules" else model[1].mlp.up, name).update(new)
