"""Hot experts on a device that works by itself: a thread of the CPU in a GPU's place, which has its own queue."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_link import ThreadLink
from tiny_experts import IDS, build, logits
from torch import nn

import torch_pi2
from torch_pi2.errors import ShapeError
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.store.storefile import StoreReader

CALIBRATION = torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(0))
EXPERTS = 4


def made(method: str = "exact", weights: str = "float") -> nn.Module:
    calibration = None if method == "exact" else CALIBRATION
    return torch_pi2.optimize(build("Mixtral"), calibration, method=method, weights=weights)


def mixtures(model: nn.Module) -> list[SparseExperts]:
    found = homes(model)
    assert all(isinstance(module, SparseExperts) for module in found)
    return found  # type: ignore[return-value]


def split(model: nn.Module, on_gpu: Sequence[bool], link: ThreadLink) -> None:
    for module in mixtures(model):
        module.split_off(on_gpu, link)


@pytest.mark.parametrize(("method", "weights"), [("exact", "float"), ("threshold", "int8"), ("signbit", "int4")])
def test_both_parts_together_are_the_module(method: str, weights: str) -> None:
    """Whichever experts are there: a predictor says of a neuron what it would have said on the CPU."""
    model = made(method, weights)
    wanted = logits(model)
    for on_gpu in ([False] * 4, [True, False, False, True], [True] * 4):
        split(model, on_gpu, ThreadLink())
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        for module in mixtures(model):
            assert module.split is not None
            hot = module.split.hot
            assert (0 if hot is None else len(hot.neuron_rows)) == sum(on_gpu)  # no memory for others


def test_both_work_at_the_same_time_and_in_order() -> None:
    model, link = made(), ThreadLink(together=True)
    split(model, [False, True, True, False], link)
    logits(model)
    assert [{*link.done[i : i + 2]} for i in range(0, len(link.done), 2)] == [{"hot", "cold"}] * 2


def test_inputs_of_other_dtypes_go_over_together() -> None:
    """x of two bytes a number beside weights of four, and slots that have no expert."""
    model = made().half()
    module = mixtures(model)[0]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()
    index = torch.tensor([[0, 1], [2, EXPERTS], [3, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        routing = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
        with torch.no_grad():
            wanted = module(x, index, routing)
            module.split_off([True, False, True, False], ThreadLink())
            found = module(x, index, routing)
            assert torch.equal(module(x[:0], index[:0], routing[:0]), x[:0])
        module.end_split()
        torch.testing.assert_close(found, wanted, rtol=2**-9, atol=1e-3)


def test_moves_copies_and_conversions() -> None:
    model = made()
    wanted = logits(model)
    split(model, [True, False, False, False], ThreadLink())
    model.to("cpu")  # where they are
    assert all(module.split is not None for module in mixtures(model))
    model.double().float()
    assert all(module.split is None for module in mixtures(model))
    assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(copy.deepcopy(model)), wanted)
    torch_pi2.restore(model)


def test_what_cannot_be_done_says_so() -> None:
    model = made()
    with pytest.raises(ShapeError, match=r"experts of .*mlp.experts on a GPU: expected 4 answers, .* found 3"):
        split(model, [True] * 3, ThreadLink())


def test_over_a_store_the_cache_is_for_the_others(tmp_path: Path) -> None:
    torch_pi2.save(made(weights="int8"), tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    wanted = logits(model)
    for module in mixtures(model):
        assert isinstance(module, OffloadedExperts)
        with StoreReader(module.store.path) as reader:
            rows: list[Any] = [reader.as_computed(reader.read_layer(module.first_layer + expert)) for expert in (0, 3)]
        module.split_off([True, False, False, True], ThreadLink(), torch.stack(rows))
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    for module in mixtures(model):
        module.end_split()
    assert torch.equal(logits(model, IDS), wanted)
