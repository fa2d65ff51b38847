"""Hot experts on a device that works by itself: a thread of the CPU in a GPU's place, which has its own queue."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_link import ThreadLink, placed
from tiny_experts import IDS, build, logits
from torch import nn

import torch_pi2
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.of_model import homes
from torch_pi2.rewrite.gpu import hot_on_gpu, rest_bytes
from torch_pi2.store.storefile import StoreReader

CALIBRATION = torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(0))
EXPERTS, NEURONS = 4, 200


def made(method: str = "exact", weights: str = "float") -> nn.Module:
    calibration = None if method == "exact" else CALIBRATION
    return torch_pi2.optimize(build("Mixtral", intermediate_size=NEURONS), calibration, method=method, weights=weights)


def mixtures(model: nn.Module) -> list[SparseExperts]:
    found = homes(model)
    assert all(isinstance(module, SparseExperts) for module in found)
    return found  # type: ignore[return-value]


def split(model: nn.Module, there: Sequence[int], link: ThreadLink) -> None:
    for module in mixtures(model):
        module.split_off(there, link)


@pytest.mark.parametrize(
    ("method", "weights"),
    [("exact", "float"), ("threshold", "int8"), pytest.param("lowrank", "int4", marks=pytest.mark.slow)],
)
def test_both_parts_together_are_the_module(method: str, weights: str) -> None:
    """Whichever experts are there: a predictor says of a neuron what it would have said on the CPU."""
    model = made(method, weights)
    wanted = logits(model)
    for there in ([], [0, 3], [0, 1, 2, 3]):
        split(model, there, ThreadLink())
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        for module in mixtures(model):
            assert module.split is not None
            hot = module.split.hot
            assert (0 if hot is None else len(hot.neuron_rows)) == len(there)  # no memory for others


def test_both_work_at_the_same_time_and_in_order() -> None:
    model, link = made(), ThreadLink(together=True)
    split(model, [1, 2], link)
    logits(model)
    assert [{*link.done[i : i + 2]} for i in range(0, len(link.done), 2)] == [{"hot", "cold"}] * 2


def test_an_index_that_names_no_expert() -> None:
    """-1 adds nothing, as E does; others are refused as by a module that is not divided."""
    module = mixtures(made())[0]
    x, ones = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), torch.ones(2, 2)
    index = torch.tensor([[0, 1], [2, EXPERTS]])
    for there in ([0, 3], [1]):
        module.split_off(there, ThreadLink())
        with torch.no_grad():
            wanted = module(x, index, ones)
            assert torch.equal(module(x, torch.where(index == EXPERTS, -1, index), ones), wanted)
            for wrong in (-2, EXPERTS + 1):
                with pytest.raises(RuntimeError, match=rf"index: expected 0 to 3, or 4 for no expert, found {wrong}"):
                    module(x, torch.where(index == 1, wrong, index), ones)


def test_over_a_store_the_cache_is_for_the_others(tmp_path: Path) -> None:
    torch_pi2.save(made(weights="int8"), tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    wanted = logits(model)
    for module in mixtures(model):
        assert isinstance(module, OffloadedExperts)
        with StoreReader(module.store.path) as reader:
            rows = [reader.as_computed(reader.read_layer(module.first_layer + expert)) for expert in (0, 3)]
        module.split_off([0, 3], ThreadLink(), torch.stack(rows))
        assert module.store.left_out[module.first_layer :][:EXPERTS] == [NEURONS, 0, 0, NEURONS]
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    for module in mixtures(model):
        module.end_split()
    assert torch.equal(logits(model, IDS), wanted)


def test_as_many_experts_as_have_room(tmp_path: Path) -> None:
    """In memory and over a store, whose file knows which are wanted, too. Loaded weights reach them."""
    dense: Any = build("Mixtral", intermediate_size=NEURONS)
    model = torch_pi2.optimize(copy.deepcopy(dense), CALIBRATION, method="exact")
    torch_pi2.save(model, tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    for tried in (model, torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)):
        wanted = logits(tried)
        some = sum(module.neuron_rows.nbytes for module in mixtures(tried)) * 2 // 5
        hot_on_gpu(tried, rest_bytes(tried) + some, ThreadLink())
        assert {*placed(tried).values()} == {0, NEURONS}
        parts = [module.split.hot for module in mixtures(tried) if module.split is not None]
        assert sum(tensor.nbytes for part in parts if part is not None for tensor in part.buffers()) <= some
        torch.testing.assert_close(logits(tried), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    other = {name: value * 1.5 for name, value in dense.state_dict().items() if "experts" in name}
    model.load_state_dict(other, strict=False)
    dense.load_state_dict(other, strict=False)
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=2e-5 * float(wanted.abs().max()))


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
            module.split_off([0, 2], ThreadLink())
            found = module(x, index, routing)
            assert torch.equal(module(x[:0], index[:0], routing[:0]), x[:0])
        module.end_split()
        torch.testing.assert_close(found, wanted, rtol=2**-9, atol=1e-3)
