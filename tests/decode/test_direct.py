"""``Direct``: Dynamo is left out of the third call and those that follow, if nothing but the ids differs."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny

from torch_pi2.decode.decode import Decoder
from torch_pi2.decode.direct import Direct

IDS = torch.arange(6)[None]


def made(forward: Any) -> tuple[Direct, list[int]]:
    """It, and where its calls through Dynamo are counted."""
    direct, calls = Direct(forward, "eager"), []
    through = direct._through_dynamo
    direct._through_dynamo = lambda ids: (calls.append(1), through(ids))[1]
    return direct, calls


def test_the_third_call_goes_to_the_code() -> None:
    held = SimpleNamespace(weight=torch.tensor([2.0, 3.0]))
    direct, calls = made(lambda ids: ids[..., None] * held.weight)
    for i in range(5):
        assert torch.equal(direct(IDS + i), (IDS + i)[..., None] * held.weight)
    assert len(calls) == 2
    held.weight.mul_(2)  # new values in the same tensor
    assert torch.equal(direct(IDS), IDS[..., None] * held.weight)


def test_another_tensor_keeps_dynamo() -> None:
    held = SimpleNamespace(weight=torch.tensor([2.0]))
    direct, calls = made(lambda ids: ids * held.weight)
    for i in range(5):
        held.weight = torch.tensor([float(i)])
        assert torch.equal(direct(IDS), IDS * held.weight)
    assert len(calls) == 5
    for _ in range(3):
        direct(IDS)
    assert len(calls) == 6  # the same twice running


def test_what_is_kept_besides_keeps_dynamo() -> None:
    held = torch.nn.Module()
    held.last = None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        held.last = ids * 2
        return held.last + 1

    direct, calls = made(forward)
    for i in range(4):
        direct(IDS + i)
        assert torch.equal(held.last, (IDS + i) * 2)
    assert len(calls) == 4


def test_a_failure_is_no_confirmation() -> None:
    def forward(ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index(weight, [ids])

    weight = torch.arange(10.0)
    direct, _ = made(forward)
    for ids in (IDS, IDS + 1, IDS + 2):
        assert torch.equal(direct(ids), weight[ids])
    with pytest.raises(IndexError):
        direct(IDS + 100)
    assert torch.equal(direct(IDS + 3), weight[IDS + 3])


def test_steps_of_a_decoder_go_to_the_code() -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=24, batch=2, logits=True)
    eager = Decoder(model, max_tokens=24, batch=2, logits=True, compiled=False)
    for d in (decoder, eager):
        d.prompt(IDS)
        d.fork(2)
    for i in range(4):
        token = torch.tensor([[i], [i + 1]])
        assert torch.allclose(decoder.step(token), eager.step(token), atol=1e-4)
    assert decoder._runs[2, 1, False]._confirmed is not None
    decoder.keep([1])
    eager.keep([1])
    for i in range(4):  # another batch is another code
        assert torch.allclose(decoder.step(torch.tensor([[i]])), eager.step(torch.tensor([[i]])), atol=1e-4)
    decoder.prompt(IDS + 1)
    eager.prompt(IDS + 1)
    assert torch.allclose(decoder.step(torch.tensor([[3]])), eager.step(torch.tensor([[3]])), atol=1e-4)


def steps(decoder: Decoder, count: int = 4) -> torch.Tensor:
    """Logits of the last of some steps."""
    decoder.prompt(IDS)
    return [decoder.step(torch.tensor([[i]])) for i in range(count)][-1].clone()


def test_other_tensors_in_their_places_are_seen_from_the_next_prompt_on() -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=24, logits=True, backend="eager")
    eager = Decoder(model, max_tokens=24, logits=True, compiled=False)
    before = steps(decoder)
    assert decoder._runs[1, 1, False]._confirmed is not None
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    after = steps(decoder)
    assert not torch.allclose(after, before)
    assert torch.allclose(after, steps(eager), atol=1e-4)


def test_hooks_are_given_what_is_fed() -> None:
    model, box = tiny("llama-relu"), {}

    def keep(_module: Any, inputs: Any, _output: Any) -> None:
        box["ids"] = inputs[0]

    model.get_input_embeddings().register_forward_hook(keep)
    decoder = Decoder(model, max_tokens=24, backend="eager")
    decoder.prompt(IDS)
    for i in range(5):
        decoder.step(torch.tensor([[i]]))
        assert box["ids"].tolist() == [[i]]


@pytest.mark.parametrize("backend", ["eager", "torch_pi2"])
def test_a_decoder_that_is_gone_keeps_nothing_alive(backend: str) -> None:
    model = tiny("llama-relu")
    decoder = Decoder(model, max_tokens=24, logits=True, backend=backend)
    steps(decoder)
    assert decoder._runs[1, 1, False]._confirmed is not None
    held = weakref.ref(model), weakref.ref(model.get_input_embeddings().weight)
    del model, decoder
    gc.collect()
    assert [ref() for ref in held] == [None, None]
