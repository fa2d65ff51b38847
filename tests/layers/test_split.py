"""Parts of layers: by hand, over a store, of copies, of several threads, and as a plan goes on."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from operators import opcheck
from shared import small_store
from thread_link import ThreadLink
from tiny_models import tiny

import torch_pi2
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import HybridFFN, TransferBuffer
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.ops import ffn as reference
from torch_pi2.profiling.data import Batch
from torch_pi2.store.storefile import StoreReader


def stored_layers(folder: Path, budget: int | str = "1GiB") -> list[OffloadedFFN]:
    found = sparse_layers(torch_pi2.load(folder, budget=budget))
    assert all(isinstance(layer, OffloadedFFN) for layer in found)
    return found  # type: ignore[return-value]


def split_off(layer: OffloadedFFN, count: int, link: ThreadLink) -> None:
    with StoreReader(layer.store.path) as reader:
        layer.split_off(count, link, reader.as_computed(reader.read_layer(layer.store_layer, (0, count))))


def ran(layer: SparseFFN, tokens: int = 2, seed: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, layer.site.hidden, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(), sparse_only():
        return layer(x)  # type: ignore[no-any-return]


def test_a_store_has_the_bits_of_memory_for_any_number_of_chunks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = small_store(tmp_path_factory)
    layer = stored_layers(folder / "store")[1]
    same = sparse_layers(torch_pi2.load(folder / "plain"))[1]
    whole, link = ran(layer), ThreadLink()
    for count in (0, HybridFFN.CHUNK, 3 * HybridFFN.CHUNK, layer.site.intermediate):
        split_off(layer, count, link)
        same.split_off(count, link)
        assert torch.equal(ran(layer), ran(same))
        if count <= layer.n_hot:  # of others on a GPU none is missed
            torch.testing.assert_close(ran(layer), whole, rtol=1e-4, atol=1e-4)
    layer.end_split()
    assert torch.equal(ran(layer), whole)


def test_what_is_elsewhere_is_neither_read_nor_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    layer = stored_layers(small_store(tmp_path_factory) / "store")[1]
    store = layer.store
    every = store.stats()["slots"]
    store.resize(store.stats()["cache_bytes"] // 8)
    split_off(layer, 512, ThreadLink())
    assert store.left_out == [0, 512, 0, 0]
    store.preload()
    store.stats(reset=True)
    ran(layer, tokens=1)
    stats = store.stats()
    assert stats["slots"] == every // 8
    assert 0 < stats["wanted"] <= layer.site.intermediate - 512
    layer.end_split()
    assert store.left_out == [0] * 4
    with pytest.raises(RuntimeError, match="first: expected 4 numbers, one a layer, found 1"):
        torch.ops.pi2.store_leave_out(store.number, [0])
    with pytest.raises(RuntimeError, match="first of layer 2: expected 0 to 1024, found 1025"):
        torch.ops.pi2.store_leave_out(store.number, [0, 0, 1025, 0])
    split_off(layer, 512, ThreadLink())
    store.close()
    layer.end_split()
    assert layer.split is None


def test_the_operator_leaves_out_first_neurons(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(small_store(tmp_path_factory) / "store" / "pi2" / "model.pi2", 1 << 20)
    neurons, hidden, _ = store.layers()[0]
    x = torch.randn(3, hidden)
    rest = (0, None, None, None, [], "none", 0.0, "", False, "relu", False, 100, 0.0, False)
    for first in (0, 64, 256, neurons):
        opcheck(torch.ops.pi2.stored_ffn.default, (x, store.number, *rest, first))
        with StoreReader(store.path) as reader:
            wanted = reference.stored_ffn(x, reader, *rest, first)
        torch.testing.assert_close(
            torch.ops.pi2.stored_ffn(x, store.number, *rest, first), wanted, rtol=1e-4, atol=1e-4
        )
    for wrong in (-1, neurons + 1):
        with pytest.raises(RuntimeError, match=f"first: expected 0 to {neurons}, found {wrong}"):
            torch.ops.pi2.stored_ffn(x, store.number, *rest, wrong)


def test_what_a_plan_says_later_is_said_of_both_parts() -> None:
    layer = sparse_layers(torch_pi2.optimize(tiny("drelu")))[0]
    layer.split_off(10, ThreadLink())
    assert layer.split is not None
    layer.by_batch, layer.dense_from = ((1, 4), (8, 30)), 7
    ran(layer)
    hot, cold = layer.split.hot, layer.split.cold
    assert hot.by_batch == ((1, 4), (8, 10))
    assert cold.by_batch == ((1, 0), (8, 20))
    assert (hot.dense_from, cold.dense_from) == (7, 7)


def test_copies_and_threads() -> None:
    layer = sparse_layers(torch_pi2.optimize(tiny("drelu")))[0]
    layer.split_off(10, ThreadLink())
    wanted = [ran(layer, seed=seed) for seed in range(8)]
    assert layer.split is not None
    link = layer.split.link
    other = copy.deepcopy(layer, {id(link): link})  # as a link to a GPU is copied
    assert other.split is not None
    assert other.split.cold.neuron_rows.data_ptr() != layer.split.cold.neuron_rows.data_ptr()
    assert other.split.cold.neuron_rows.data_ptr() == other.neuron_rows[10:].data_ptr()
    with ThreadPoolExecutor(4) as pool:
        for which in (layer, other):
            for found, expected in zip(pool.map(lambda seed: ran(which, seed=seed), range(8)), wanted, strict=True):  # noqa: B023
                assert torch.equal(found, expected)
    to_a_gpu = TransferBuffer.__new__(TransferBuffer)
    to_a_gpu.device = torch.device("cuda", 0)
    assert copy.deepcopy(to_a_gpu) is to_a_gpu


def test_batches_come_to_where_models_are_calibrated() -> None:
    batch = Batch(torch.zeros(1, 2).long(), None, (1, torch.ones(2)), {"bias": [torch.ones(3)], "flag": True})
    found = batch.on_the_cpu()
    assert found.kwargs["flag"] is True
    assert (found.args[0], found.mask_BT) == (1, None)
    assert [t.device.type for t in (found.input_ids, found.args[1], found.kwargs["bias"][0])] == ["cpu"] * 3  # type: ignore[union-attr]
