"""Partial sums of chunks: against the reference, and that they add up to the layer's own bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from operators import opcheck
from shared import small_store

import torch_pi2
from torch_pi2.distributed.shard_store import shards_in
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load
from torch_pi2.ops.constants import chunk_neurons, constants
from torch_pi2.store.storefile import StoreReader

load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "store"


def _calls(model: torch.nn.Module) -> tuple[OffloadedFFN, list[tuple[Any, ...]]]:
    """A layer, and what the operator takes after the store and the layer: predicted, and all of them."""
    layer = next(m for m in model.modules() if isinstance(m, OffloadedFFN))
    biases = (layer.bias_gate, layer.bias_up, layer.bias_down)
    form = (layer.site.activation, layer.site.activation_on_up, layer.n_hot, layer.threshold, layer.int8_activations)
    ways = (layer.asked(), ([], "none", 0.0, "", False))
    return layer, [(*biases, *how, *form, 0, layer.thresholds) for how in ways]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("tokens", [1, 3, 11])
def test_the_chunks_of_a_layer_are_its_sum(folder: Path, tokens: int, activations: str, isa: str) -> None:
    layer, calls = _calls(torch_pi2.load(folder, budget="1GiB", activations=activations))
    hidden, neurons = layer.site.hidden, layer.site.intermediate
    chunks = -(-neurons // chunk_neurons(neurons))
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
    for call in calls:
        parts = torch.ops.pi2.stored_ffn(x, layer.store.number, 0, *call, chunks)
        assert parts.shape == (chunks, tokens, hidden)
        assert parts.dtype == torch.float32
        y = torch.ops.pi2.stored_ffn(x, layer.store.number, 0, *call)
        assert torch.equal(torch.ops.pi2.add_parts(parts, list(range(chunks)), layer.bias_down, x), y)
        with StoreReader(folder / "pi2" / "model.pi2") as reader:
            wanted = reference.stored_ffn(x, reader, 0, *call, chunks)
        torch.testing.assert_close(parts, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()) + 1e-7)


def test_the_chunks_of_a_shard_are_those_of_the_layer(tmp_path: Path) -> None:
    model = tiny_models._hf("Llama", intermediate_size=2000, hidden_act="relu").eval()
    torch_pi2.save(torch_pi2.optimize(model, method="exact"), tmp_path / "plain")
    torch_pi2.pack(tmp_path / "plain", tmp_path / "2", ranks=2)
    with StoreReader(shards_in(tmp_path / "2")[1] / "pi2" / "model.pi2") as reader:
        neurons, hidden, chunk = reader.entries[0].neurons, reader.entries[0].hidden, reader.entries[0].chunk
        chunks = -(-neurons // chunk)
        assert chunk == chunk_neurons(2000) != chunk_neurons(neurons)
        settings = (None, None, None, [], "none", 0.0, "", False, "relu", False, 0, 0.0, False, 0, None)
        store = Store(reader.path, 1 << 20)
        x = torch.randn(2, hidden)
        found = torch.ops.pi2.stored_ffn(x, store.number, 0, *settings, chunks)
        wanted = reference.stored_ffn(x, reader, 0, *settings, chunks)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        opcheck(torch.ops.pi2.stored_ffn.default, (x, store.number, 0, *settings, chunks))
        with pytest.raises(
            RuntimeError, match=f"parts: expected 0 or {chunks}, the chunks of the whole layer, found 9"
        ):
            torch.ops.pi2.stored_ffn(x, store.number, 0, *settings, 9)
        most = min(constants().gemm_tokens, constants().stream_from)
        with pytest.raises(RuntimeError, match=f"x: expected at most {most - 1} tokens where parts are asked for"):
            torch.ops.pi2.stored_ffn(torch.randn(most, hidden), store.number, 0, *settings, chunks)
        store.close()


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 2, 17), (16, 5, 96), (2, 0, 8)], ids=str)  # P, T, H
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_added_in_order(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(sum(size))
    parts, bias = torch.randn(size, generator=g), torch.randn(size[2], generator=g).to(dtype)
    like = torch.empty(size[1], size[2], dtype=dtype)
    for order in ([*range(size[0])], [*range(size[0])][::-1], []):
        for one in (bias, None):
            found = torch.ops.pi2.add_parts(parts, order, one, like)
            assert torch.equal(found, reference.add_parts(parts, order, one, like))
            assert found.dtype == dtype
    gaps = torch.randn(size[0], size[2], size[1], generator=g).transpose(1, 2)
    assert torch.equal(torch.ops.pi2.add_parts(gaps, [0], None, like), gaps[0].to(dtype))


def test_opcheck_and_checks_of_arguments() -> None:
    parts, like = torch.randn(3, 2, 8), torch.randn(1, 2, 8)
    opcheck(torch.ops.pi2.add_parts.default, (parts, [2, 0], torch.randn(8), like))
    for wrong, message in (
        ((parts.double(), [0], None, like), "parts: expected float32"),
        ((parts[0], [0], None, like), "parts: expected float32"),
        ((parts, [3], None, like), "order: expected 0 to 2, found 3"),
        ((parts, [-1], None, like), "order: expected 0 to 2, found -1"),
        ((parts, [0], torch.randn(7), like), "bias: expected 8 numbers"),
        ((parts, [0], None, torch.randn(2, 7)), "for like of so many tokens"),
        ((parts, [0], None, like.long()), "like"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.add_parts(*wrong)
