"""Steps that are recorded: the calls of the model, bit by bit, or the model itself where they could be others."""

from __future__ import annotations

import copy
import cProfile
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_experts import build
from tiny_models import EXPECTED, tiny
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

import torch_pi2
from torch_pi2.base import progress
from torch_pi2.decode import step_graph
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.step_graph import GraphRunner, StepGraph, record
from torch_pi2.errors import ArtifactError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.watch import Watch

IDS = torch.arange(6)[None]


def steps(decoder: Decoder, count: int = 14, first: int = 0) -> torch.Tensor:
    """Logits of some steps."""
    decoder.prompt(IDS)
    return torch.stack([decoder.step(torch.tensor([[(first + i) % 60]]))[0] for i in range(count)])


def replay(decoder: Decoder, batch: int = 1) -> GraphRunner:
    return decoder._runners[batch, 1, False]


def never_recorded(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **how: int) -> torch.Tensor:
    """:func:`steps` as the model alone makes them."""
    with monkeypatch.context() as patch:
        patch.setattr(step_graph, "_BEFORE", 1000)
        return steps(Decoder(model, max_tokens=40, logits=True, compiled=False), **how)


# --- functions ---


def test_calls_of_every_form_are_made_again() -> None:
    weight, room = torch.randn(4, 4), torch.zeros(9, 4)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = weight[ids[0]]
        room[1 : 1 + x.shape[0]] = x  # __setitem__
        low, high = torch.split(x, [1, x.shape[1] - 1], dim=-1)
        best = torch.cat([high, low], -1).topk(2)
        y = torch.nn.functional.silu(best.values.T) if x.dim() == 2 else x
        y = 1 - y * 2.5 + torch.arange(y.shape[1], dtype=torch.float32)
        y.add_(room.sum())
        return y[..., :2, None].to(torch.float64).reshape(-1)

    ids = torch.tensor([[0, 1, 2]])
    result, calls = record(forward, ids)
    assert calls is not None
    made = StepGraph(calls)
    for other in (ids, torch.tensor([[3, 1, 0]])):
        assert torch.equal(made(other), forward(other))
    assert result.dtype == torch.float64


def test_what_is_written_in_place_is_read_again() -> None:
    """Also where programs of the core compute what is around it."""
    positions, room = torch.arange(4), torch.zeros(4)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        layers = [positions[:2].add(1).unsqueeze(0) for _ in range(5)]
        reads = [room[1:].to(torch.float64) for _ in range(2)]
        room.view(2, 2)[0].add_(ids[0, 0])
        reads += [room[1:].to(torch.float64)]
        counts = [torch.arange(3) for _ in range(3)]
        counts[0].add_(5)
        later = torch.arange(3).view(3)
        later.mul_(2)
        flags = ids[0, 0] > torch.arange(4)
        masks = [flags.to(torch.int64)]
        some = flags[1:]
        some &= ids[0, 0] < 3
        masks += [flags.to(torch.int64)]
        return torch.cat([*layers, *(x[None] for x in (*reads, *counts, later, *masks))], -1)

    result, calls = record(forward, torch.ones(1, 1, dtype=torch.int64))
    assert calls is not None
    made = StepGraph(calls)
    room.zero_()
    assert torch.equal(made(torch.ones(1, 1, dtype=torch.int64)), result)
    for value in (7, 2, 9):
        room.zero_()
        wanted = forward(torch.full((1, 1), value))
        room.zero_()
        assert torch.equal(made(torch.full((1, 1), value)), wanted)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * len(x.tolist()),
        lambda x: x * float(x[0, 0]),
        lambda x: x * torch.equal(x, x),
        lambda x: x[:, x.max().long() - 1 :],
        lambda x: x.cpu().detach().apply_(lambda v: v + 1),
    ],
)
def test_what_depends_on_values_is_not_recorded(asks: Any) -> None:
    result, made = record(asks, torch.ones(1, 2))
    assert made is None
    assert isinstance(result, torch.Tensor)


def test_what_nobody_saw_depend_on_values_is_found_out() -> None:
    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            secret = ids * 2
        return secret + 1

    made = GraphRunner(forward, lambda: True)
    for i in range(14):
        assert torch.equal(made(IDS + i), (IDS + i) * 2 + 1)
    assert not made.is_stable


def test_a_call_that_fails_is_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "_BEFORE", 1)
    weight, box = torch.randn(8, 2), {"down": False}

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if box["down"]:
            raise OSError("the model knows why")
        return weight[ids]

    made = GraphRunner(forward, lambda: True)
    for _ in range(4):
        made(IDS)
    assert made.is_stable
    box["down"] = True
    assert torch.equal(made(IDS), weight[IDS])
    with pytest.raises(OSError, match="the model knows why"):
        made(IDS + 100)


# --- models ---


@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_depends_on_the_default_device(compiled: bool) -> None:
    model = tiny("llama-relu")

    def found() -> list[torch.Tensor]:
        decoder = Decoder(model, max_tokens=40, batch=2, logits=True, compiled=compiled, backend="eager")
        decoder.prompt(ids)
        decoder.fork(2)
        made = [decoder.step(fed[:2]) for _ in range(12)]
        decoder.retain([1])
        return [*made, *(decoder.step(fed[2:]) for _ in range(12))]

    ids, fed = IDS, torch.tensor([[3], [4], [5]])
    wanted = found()
    with torch.device("meta"):
        assert all(map(torch.equal, found(), wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"falcon-bias"}))  # which has no such cache
def test_replayed_steps_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name)
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=False, recorded=True)  # also code of the checkpoint
    assert torch.equal(steps(decoder), never_recorded(monkeypatch, model))
    assert replay(decoder).is_stable
    assert torch.equal(steps(decoder, first=9), never_recorded(monkeypatch, model, first=9))


def test_several_sequences_of_an_optimised_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_pi2.optimize(tiny("llama-relu").to(torch.bfloat16), weights="int8", activations="int8")

    def answered(before: int) -> tuple[Decoder, list[torch.Tensor]]:
        monkeypatch.setattr(step_graph, "_BEFORE", before)
        decoder = Decoder(model, max_tokens=40, batch=3, logits=True, compiled=False)
        for tokens in (4, 6, 5):
            list(decoder.add(IDS[:, :tokens]))
        found = [decoder.step(torch.arange(i, i + 3)[:, None]) for i in range(8)]
        decoder.retain([0, 2])
        return decoder, found + [decoder.step(torch.arange(i, i + 2)[:, None]) for i in range(8)]

    (plain, expected), (decoder, found) = answered(1000), answered(3)
    assert all(map(torch.equal, found, expected))
    assert replay(decoder, 3).is_stable
    assert replay(decoder, 2).is_stable
    assert not replay(plain, 3).is_stable


def test_a_step_is_made_once() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"), method="exact")
    with Watch(sparse_layers(model)) as watched:
        decoder = Decoder(model, max_tokens=40, logits=True, compiled=False)
        steps(decoder, 14)
        counts = watched.counts()
    assert replay(decoder).is_stable
    assert {int(found[0]) for found in counts} == {14 + IDS.shape[1]}


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_see_every_step(compiled: bool) -> None:
    model, seen = tiny("llama-relu"), list[int]()
    model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _y: seen.append(int(inputs[0][0, -1])))
    steps(Decoder(model, max_tokens=40, logits=True, compiled=compiled, backend="eager"))
    assert seen == [5, *range(14)]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_that_comes_between_prompts_is_called(everywhere: bool) -> None:
    model, calls = tiny("llama-relu"), list[int]()
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=False)
    steps(decoder)
    assert replay(decoder).is_stable
    if everywhere:
        hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    else:
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        steps(decoder, 1)
        once = len(calls)
        steps(decoder, 1)
    finally:
        hook.remove()
    assert len(calls) == 2 * once > 0
    decoder.prompt(IDS)
    assert len(calls) == 2 * once


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_changes_between_prompts_is_seen(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_pi2.optimize(tiny("llama-relu"), method="exact")
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=compiled, backend="eager")
    before = steps(decoder)
    for layer in model.model.layers:
        layer.mlp.down_proj.sparse_ffn.threshold = 0.02  # another constant of a call
    changed = steps(decoder)
    assert not torch.equal(changed, before)
    assert torch.allclose(changed, never_recorded(monkeypatch, model), atol=1e-5)
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # other tensors
    assert torch.allclose(steps(decoder), never_recorded(monkeypatch, model), atol=1e-4)


def test_over_a_store_errors_have_their_names(tmp_path: Path) -> None:
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu"), method="exact"), tmp_path / "sparse")
    torch_pi2.pack(tmp_path / "sparse", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB")
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=False)
    steps(decoder)
    assert replay(decoder).is_stable
    torch_pi2.stats(model)["store"].close()
    with pytest.raises(ArtifactError, match="found a store that has been closed"):
        decoder.step(torch.tensor([[1]]))


class Around(nn.Module):
    """A feed-forward layer with something around it: what Python there may hold."""

    def __init__(self, inner: nn.Module, changes: Callable[[Around, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self._changes = inner, changes
        self.scales, self.by_name, self.factor, self.function = [1.0], {"a": 1.0}, torch.tensor(1.0), torch.relu
        self.calls, self.mean = 0, nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._changes(self, self.inner(x))


def around(changes: Callable[[Around, torch.Tensor], torch.Tensor]) -> tuple[nn.Module, Around]:
    model: Any = tiny("llama-relu")
    made = model.model.layers[0].mlp = Around(model.model.layers[0].mlp, changes)
    return model.eval(), made


CHANGES: dict[str, Callable[[Around], Any]] = {
    "a list": lambda layer: layer.scales.__setitem__(0, 2.0),
    "a mapping": lambda layer: layer.by_name.update(a=3.0),
    "a tensor that is no buffer": lambda layer: setattr(layer, "factor", torch.tensor(2.0)),
    "a function": lambda layer: setattr(layer, "function", torch.tanh),
    "a forward": lambda layer: setattr(layer.inner, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_what_modules_hold_is_seen_between_prompts(what: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer = around(lambda y, x: y.function(x * y.scales[0] * y.by_name["a"] * y.factor))
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=compiled, backend="eager", recorded=True)
    before = steps(decoder)
    assert decoder._compiled_steps or replay(decoder).is_stable
    CHANGES[what](layer)
    found, expected = steps(decoder), never_recorded(monkeypatch, model)
    assert not torch.allclose(before, expected, atol=1e-4)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_decoder_goes_on_with_other_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=40, logits=True, compiled=False)
    steps(decoder)
    model.set_attn_implementation("eager")
    assert torch.equal(steps(decoder), never_recorded(monkeypatch, model))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_changes_before_the_first_step_is_seen(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=40, batch=2, logits=True, compiled=compiled, backend="eager")
    model.set_attn_implementation("eager")  # whose masks are others
    assert torch.allclose(steps(decoder), never_recorded(monkeypatch, model), atol=1e-4)
    model.set_attn_implementation("sdpa")
    decoder = Decoder(model, max_tokens=40, batch=2, logits=True, compiled=compiled, backend="eager")
    decoder.prompt(IDS)
    model.set_attn_implementation("eager")
    assert torch.allclose(steps(decoder), never_recorded(monkeypatch, model), atol=1e-4)


def _grows(layer: Around, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > layer.calls:  # tables are made anew for a longer prompt than there was
        layer.calls, layer.factor = x.shape[1], torch.tensor(1 + x.shape[1] / 10)
    return x * layer.factor


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_prompt_changes_is_seen_by_the_steps_after_it(
    compiled: bool, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(compiled: bool) -> torch.Tensor:
        model, _ = around(_grows)
        decoder = Decoder(model, max_tokens=60, logits=True, compiled=compiled, backend="eager", recorded=True)
        found = []
        for tokens in (6, 12):
            ids = IDS.repeat(1, tokens // 6)
            decoder.clear_cache()
            if joins:
                list(decoder.add(ids))
            else:
                decoder.prompt(ids)
            found += [decoder.step(torch.tensor([[i]]))[0] for i in range(14)]
        return torch.stack(found)

    found = answers(compiled)
    monkeypatch.setattr(step_graph, "_BEFORE", 1000)
    assert torch.allclose(found, answers(False), atol=1e-4)


def _counts(layer: Around, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * 2 if layer.calls % 12 == 0 else x


def _follows(layer: Around, x: torch.Tensor) -> torch.Tensor:
    layer.mean.mul_(0.9).add_(x[0, -1, 0] * 0.1)
    return x + layer.mean


def _by_size(_layer: Around, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if len((x[0] > 1).nonzero()) > 6 else x


def _by_numpy(_layer: Around, x: torch.Tensor) -> torch.Tensor:
    return x * np.float64(0.5)


@pytest.mark.parametrize("changes", [_counts, _follows, _by_size, _by_numpy])
def test_models_with_python_of_their_own(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer = around(changes)
    found = steps(Decoder(model, max_tokens=40, logits=True, compiled=False, recorded=True), 30)
    layer.calls = 0
    layer.mean.zero_()
    assert torch.equal(found, never_recorded(monkeypatch, model, count=30))


# --- code that changes ---


def _scaled(factor: float) -> Callable[..., Any]:
    """Makes a function whose first result is ``factor`` times that of another one."""

    def changed(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = usual(*args, **kwargs)
            return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

        return call

    return changed


class Settings:
    factor = 1.0


class Steered(modeling_llama.LlamaMLP):
    """Code of a user, which reads what no module holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.settings.factor


def _replaced(holder: Any, name: str, factor: float = 3.0) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda _, patch: patch.setattr(holder, name, _scaled(factor)(getattr(holder, name)))


def _registered(_: Any, patch: pytest.MonkeyPatch) -> None:
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _scaled(3.0)(usual))


def _known_instead(_: Any, patch: pytest.MonkeyPatch) -> None:
    """A function of transformers in place of another."""
    patch.setattr(modeling_llama, "rotate_half", modeling_gptj.rotate_every_two)


CODE: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "a method of a class": _replaced(modeling_llama.LlamaRMSNorm, "forward"),
    "a method of a base class": _replaced(nn.Linear, "forward"),
    "a function of a module": _replaced(modeling_llama, "apply_rotary_pos_emb", 2.0),
    "another function of transformers": _known_instead,
    "PyTorch's attention": _replaced(torch.nn.functional, "scaled_dot_product_attention"),
    "a registry": _registered,
    "a method of tensors": _replaced(torch.Tensor, "pow"),
    "code of a function": lambda _, patch: patch.setattr(
        modeling_llama.rotate_half, "__code__", modeling_gptj.rotate_every_two.__code__
    ),
    "an attribute of a class": lambda _, patch: patch.setattr(Settings, "factor", 3.0),
    "a module in place of another": lambda model, _: setattr(model.model.layers[1], "mlp", nn.Identity()),
    "a field of a configuration": lambda model, _: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("what", "within"),
    [(what, False) for what in CODE] + [(what, True) for what in CODE if what != "a field of a configuration"],
)
def test_other_code_is_heeded(what: str, within: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama-relu")
    if what == "an attribute of a class":
        model.model.layers[0].mlp.__class__ = Steered
        model.model.layers[0].mlp.settings = Settings
    decoder = Decoder(model, max_tokens=60, logits=True, compiled=compiled, backend="eager")
    steps(decoder)
    assert decoder._compiled_steps or replay(decoder).is_stable or what == "an attribute of a class"
    if within:
        decoder.prompt(IDS)
        early = [decoder.step(torch.tensor([[i]]))[0] for i in range(14)]
    with monkeypatch.context() as patch:
        CODE[what](model, patch)
        own = Decoder(model, max_tokens=60, logits=True, recorded=False)
        if within:
            found = torch.stack([decoder.step(torch.tensor([[i]]))[0] for i in range(14, 28)])
            own._kv, own.lengths, own.cache = decoder._kv, list(decoder.lengths), decoder.cache
            own.rollback(14)
            expected = torch.stack([own.step(torch.tensor([[i]]))[0] for i in range(14, 28)])
            assert not torch.allclose(found[0], early[-1], atol=1e-4)
        else:
            found, expected = steps(decoder), steps(own)
    assert torch.allclose(found, expected, atol=1e-4)
    again = steps(decoder)
    if what not in ("a module in place of another", "a field of a configuration"):
        assert not torch.allclose(again, found, atol=1e-4) or within  # and so it is when the change is undone
    assert torch.allclose(again, never_recorded(monkeypatch, model), atol=1e-4)


@pytest.mark.parametrize("recorded", [None, True])
def test_what_nothing_compares_is_found_out_within_64_steps(
    recorded: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable of a user's function. It is heeded at once unless recording was asked for."""
    factor = [1.0]
    model, _ = around(lambda _, x: x * factor[0])

    def answer(recorded: bool | None) -> list[torch.Tensor]:
        decoder, found, factor[0] = (
            Decoder(model, max_tokens=120, logits=True, compiled=False, recorded=recorded),
            [],
            1.0,
        )
        decoder.prompt(IDS)
        for i in range(100):
            factor[0] = 1.0 if i < 50 else 3.0
            found.append(decoder.step(torch.tensor([[i % 60]]))[0])
        return found

    right = list(map(torch.equal, answer(recorded), answer(False)))
    if recorded is None:
        assert all(right)
        return
    assert all(right[:50])
    assert not any(right[50:73])
    assert "up to 63 steps before it were" in caplog.text


def test_the_user_is_told_what_is_not_recorded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_said", set())
    model, _ = around(lambda _, x: x * 2)
    steps(Decoder(model, max_tokens=40, logits=True, compiled=False))
    assert "Around.forward" in caplog.text
    assert "recorded=True) records them all the same" in caplog.text


def test_mixtures_are_recorded() -> None:
    """Named tuples bring code that is generated."""
    decoder = Decoder(torch_pi2.optimize(build("Mixtral")), max_tokens=40, logits=True, compiled=False)
    steps(decoder)
    assert replay(decoder).is_stable


class _HalvedInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5)


def test_modules_of_torch_jit_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees what they write in place."""
    model = tiny("llama-relu")
    model.model.norm = torch.jit.script(_HalvedInPlace())
    with torch.no_grad():
        found = steps(Decoder(model, max_tokens=40, logits=True, compiled=False))
    assert torch.equal(found, never_recorded(monkeypatch, model))


class _Finalized:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        pass


def test_what_garbage_collection_calls_is_no_part_of_a_step() -> None:
    decoder, before = Decoder(tiny("llama-relu"), max_tokens=40, logits=True, compiled=False), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        decoder.prompt(IDS)
        for _ in range(14):
            _Finalized()
            decoder.step(IDS[:, :1])
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
    assert replay(decoder).is_stable


def test_recording_may_be_refused() -> None:
    decoder = Decoder(tiny("llama-relu"), max_tokens=40, logits=True, recorded=False)
    steps(decoder)
    assert not replay(decoder).is_stable
    assert not decoder._compiled_steps


def test_a_profiler_sees_every_step() -> None:
    decoder, profiler = Decoder(tiny("llama-relu"), max_tokens=40, logits=True, compiled=False), cProfile.Profile()
    with profiler:
        steps(decoder)
    assert not replay(decoder).is_stable
    steps(decoder)
    assert replay(decoder).is_stable


def test_recordings_leave_no_source_behind() -> None:
    before = len(torch.fx.graph_module._loader.eval_cache)
    decoder = Decoder(tiny("llama-relu"), max_tokens=40, compiled=False, logits=True)
    steps(decoder)
    assert replay(decoder).is_stable
    assert len(torch.fx.graph_module._loader.eval_cache) == before


def test_a_decoder_is_not_copied() -> None:
    decoder = Decoder(tiny("llama-relu"), max_tokens=40, compiled=False)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make another one of its model"):
            copied(decoder)


# --- compiled ---


@pytest.mark.slow
def test_compiled_steps_need_no_dynamo() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"), weights="int8", activations="int8")
    counters = torch._dynamo.utils.counters
    counters.clear()
    found, expected = (steps(Decoder(model, max_tokens=40, logits=True, compiled=c), 4) for c in (True, False))
    assert torch.allclose(found, expected, atol=1e-4)
    assert "calls_captured" not in counters["stats"]
    assert counters["aot_autograd"]["total"] == 1


@pytest.mark.slow
@pytest.mark.long
def test_compiled_steps_are_found_on_disk_by_the_next_process(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
import torch, torch_pi2
from tiny_experts import build
from tiny_models import tiny
model = torch_pi2.optimize(tiny("llama-relu"), weights="int8", activations="int8")
decoder = torch_pi2.Decoder(model, max_tokens=40)
decoder.step(decoder.prompt(torch.arange(6)[None]))
print(dict(torch._dynamo.utils.counters["aot_autograd"]))
"""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    told = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert "'autograd_cache_miss': 1" in told[0]
    assert "'autograd_cache_hit': 1" in told[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"compiled": False}, {"backend": "eager"}, {"backend": "torch_pi2"}])
def test_a_decoder_that_is_gone_keeps_nothing_alive(how: dict[str, Any]) -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=40, logits=True, **how)
    steps(decoder)
    assert decoder._compiled_steps or replay(decoder).is_stable
    held = weakref.ref(model), weakref.ref(model.get_input_embeddings().weight)
    del model, decoder
    gc.collect()
    assert [ref() for ref in held] == [None, None]
