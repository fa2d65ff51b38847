"""Windows of text, what hooks see of neurons, and how the weight of the penalty is steered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from tiny_tokenizers import byte_tokenizer

import torch_pi2
from torch_pi2.errors import NonFiniteError, UnsupportedModelError
from torch_pi2.training.settings import SparsifySettings
from torch_pi2.training.sparsify import held_back, windows_of
from torch_pi2.training.trainer import SparseLoss, Steering
from torch_pi2.training.zeros import Zeros, _soft_count, measure, next_token_loss


def test_windows_have_every_token_once_and_ends_between_texts() -> None:
    tokenizer = byte_tokenizer("abc")
    texts = ["def f(x):\n", "é", ""]
    ids = [i for text in texts if text for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    found = windows_of(texts, tokenizer, 3)
    assert found.flatten().tolist() == ids[: len(ids) // 3 * 3]
    assert windows_of([], tokenizer, 3).shape == (0, 3)


def test_every_training_window_begins_with_the_bos_token() -> None:
    tokenizer, texts = byte_tokenizer("abc", bos=True), ["def f(x):\n", "é" * 20]
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    found = windows_of(texts, tokenizer, 4)
    assert found[:, 0].eq(tokenizer.bos_token_id).all()
    rest, wanted = ([i for i in some if i] for some in (found.flatten().tolist(), ids))  # 0 is BOS, and the end
    assert rest == wanted[: len(rest)]
    assert len(rest) > len(wanted) - 4


def test_held_back_windows_are_the_last_ones() -> None:
    windows = torch.arange(1000, dtype=torch.int32).view(500, 2)
    train, heldout = held_back(windows, 4)
    assert torch.equal(torch.cat([train, heldout]), windows)
    assert len(heldout) == 10


@pytest.mark.parametrize("name", ["llama-relu", "gpt2-relu", "phi3"])
def test_measured_is_what_the_formula_gives(name: str) -> None:
    model: Any = tiny(name)
    sites = torch_pi2.find_sites(model)
    ids = torch.randint(3, 60, (5, 8), generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}
    for site in sites:
        down = model.get_submodule(site.down.weight.removesuffix(".weight"))
        down.register_forward_pre_hook(lambda _m, inputs, key=site.key: seen.update({key: inputs[0]}))
    zeros = Zeros(model, sites)
    found = measure(model, zeros, ids, batch=2)
    logits = model(input_ids=ids).logits
    labels = ids.clone()
    assert found.nats_per_token == pytest.approx(float(model(input_ids=ids, labels=labels).loss.detach()), rel=1e-5)
    assert found.zeros == pytest.approx({key: float((h == 0).float().mean()) for key, h in seen.items()}, abs=1e-6)
    soft = [
        h.abs() / (h.abs() + 0.1 * h.square().mean(-1, keepdim=True).sqrt())
        for h in (h.detach() for h in seen.values())
    ]
    assert found.penalty == pytest.approx(sum(float(part.mean()) for part in soft) / len(seen), rel=1e-5)
    assert found.penalty < 1 - found.mean_zeros
    halves = [measure(model, zeros, ids, part=(i, 2), reduce=lambda sums: sums) for i in range(2)]
    assert 0.6 * halves[0].nats_per_token + 0.4 * halves[1].nats_per_token == pytest.approx(found.nats_per_token)
    assert float(next_token_loss(logits, ids)) == pytest.approx(found.nats_per_token, rel=1e-5)


def test_a_weight_that_no_module_computes_is_refused() -> None:
    model: Any = tiny("llama-relu")
    zeros = Zeros(model, torch_pi2.find_sites(model))
    zeros.remove()
    with pytest.raises(UnsupportedModelError, match=r"training of model.layers.0.mlp \(LlamaMLP\): expected a call of"):
        zeros.take()


def test_the_penalty_has_a_gradient_where_a_token_has_no_values() -> None:
    h = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 20.0]], requires_grad=True)
    _soft_count(h).sum().backward()
    assert h.grad is not None
    assert h.grad[0].tolist() == [0, 0, 0]
    assert h.grad[1, 1] > 10 * h.grad[1, 2] > 0  # what is small becomes zero


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model: Any = tiny("llama-relu")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"loss on held-out text: expected a finite number, found nan"):
        measure(model, Zeros(model, torch_pi2.find_sites(model)), torch.randint(3, 60, (2, 8)))


def test_the_weight_grows_while_there_are_too_few_zeros() -> None:
    model: Any = tiny("llama-relu")
    zeros = Zeros(model, torch_pi2.find_sites(model))
    loss = SparseLoss(zeros, SparsifySettings(target_sparsity=0.9), None, 2.0)

    def after(done: float, share: float, times: int = 1, *, first: float = 0.0) -> float:
        loss.weight = 2.0
        steering = Steering(loss, torch.zeros(0, 2), first, False)
        for _ in range(times):
            steering._steer(done, share)
        return steering.loss.weight

    assert after(0.0, 0.45) == pytest.approx(2.0)  # half of the target is aimed at in the beginning
    assert after(0.0, 0.7, first=0.7) == pytest.approx(2.0)  # or what there was
    assert after(0.25, 0.8, first=0.7) == pytest.approx(2.0)
    assert after(0.25, 0.95, first=0.95) < 2.0
    assert after(0.5, 0.9) == pytest.approx(2.0)
    assert after(1.0, 0.9) == pytest.approx(2.0)
    assert 2.0 < after(0.5, 0.89) < after(0.5, 0.5)
    assert after(0.5, 0.95) < 2.0
    assert after(1.0, 0.0, times=1000) == pytest.approx(2e4)
    assert after(1.0, 1.0, times=1000) >= 2e-4
