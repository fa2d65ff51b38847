"""Predictor kind ``mask``: a choice of neurons made by the caller, in memory and over a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from operators import opcheck
from stores import SMALL, store_of

import torch_pi2
from torch_pi2.layers.offloaded import Store
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load
from torch_pi2.store.storefile import StoreReader

load()
ODD = SMALL | {"hidden_size": 72, "intermediate_size": 117}
TOKENS = (1, 2, 3, 7, 33, 70)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int4", "int8", "slots"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two layers; ``slots``: with whole neurons in clusters, others with their gates apart."""
    made, slots = tmp_path_factory.mktemp("masks"), request.param == "slots"
    weights = "int4" if slots else request.param
    torch_pi2.synthetic(made / "saved", ODD, active=0.3, predictor=None, weights=weights)
    torch_pi2.pack(made / "saved", made / "store", cluster=8 if slots else 1)
    return store_of(made / "store")


def masked(active: torch.Tensor) -> tuple[Any, ...]:
    return [active], "mask", 0.0, "", False


@pytest.mark.parametrize("int8", [False, True])
def test_a_mask_has_the_bits_of_the_layer_in_memory(isa: str, packed: Path, int8: bool) -> None:
    store = Store(packed, 1 << 20)
    with StoreReader(packed) as reader:
        weights = reader.operand_of(reader.keys[0])
        rows = reader.as_computed(reader.read_layer(0))
    if int8 and weights == "float":
        pytest.skip("int8 activations are for quantised neurons")
    neurons, hidden, _ = store.layers()[0]
    g = torch.Generator().manual_seed(1)
    dtype = rows.dtype if weights == "float" else torch.float32
    biases = [torch.randn(n, generator=g).to(dtype) for n in (neurons, neurons, hidden)]
    for tokens in TOKENS:
        for n_hot, more in ((0, 0), (37, 0), (37, 37), (neurons, 5)):
            x = torch.randn(tokens, hidden, generator=g)
            cold = neurons - n_hot
            mask = torch.rand(tokens, cold + more, generator=g) < 0.3
            mask[0] = False
            settings = ("silu", False, n_hot, 0.0)
            call = (x, rows, *biases, *masked(mask), *settings, weights, int8)
            found = torch.ops.pi2.predicted_ffn(*call)
            chosen = mask[:, more:].contiguous()
            assert torch.equal(found, torch.ops.pi2.sparse_ffn(x, rows, *biases, chosen, *settings, weights, int8))
            stored = (*biases, *masked(mask), *settings, int8)
            assert torch.equal(torch.ops.pi2.stored_ffn(x, store.number, 0, *stored), found)
            wanted = reference.predicted_ffn(*call)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()) + 1e-6)
            if n_hot < neurons:  # each token with its own row
                alone = torch.ops.pi2.stored_ffn(x[-1:], store.number, 0, *biases, *masked(mask[-1:]), *settings, int8)
                assert torch.equal(alone, found[-1:])


def test_a_long_prompt_is_cut_into_slices_with_their_rows() -> None:
    neurons, tokens = (1 << 17) + 77, 70  # 64 tokens have 8 MiB of mask
    x, rows = torch.randn(tokens, 1), torch.randn(neurons, 2, 1)
    mask = torch.rand(tokens, neurons) < 0.01
    settings = ("relu", False, 30, 0.0)
    found = torch.ops.pi2.predicted_ffn(x, rows, None, None, None, *masked(mask), *settings)
    wanted = torch.ops.pi2.sparse_ffn(x, rows, None, None, None, mask[:, 30:].contiguous(), *settings)
    assert torch.equal(found, wanted)


def test_of_a_store_only_chosen_neurons_are_read(packed: Path) -> None:
    store = Store(packed, 1 << 20)
    neurons, hidden, _ = store.layers()[0]
    mask = torch.rand(2, 3, neurons) < 0.2
    store.stats(reset=True)
    call = (store.number, 0, None, None, None, *masked(mask), "silu", False, 0, 0.0)
    found = torch.ops.pi2.stored_ffn(torch.randn(2, 3, hidden), *call)
    assert found.shape == (2, 3, hidden)
    assert store.stats()["wanted"] == int(mask.flatten(0, 1).any(0).sum())


def test_operators_with_a_mask(packed: Path) -> None:
    store = Store(packed, 1 << 20)
    neurons, hidden, _ = store.layers()[0]
    with StoreReader(packed) as reader:
        weights, rows = reader.operand_of(reader.keys[0]), reader.as_computed(reader.read_layer(0))
        x, mask = torch.randn(2, 3, hidden), torch.rand(2, 3, neurons) < 0.4
        call = (None, None, None, *masked(mask), "relu", False, 20, 0.0)
        opcheck(torch.ops.pi2.predicted_ffn.default, (x, rows, *call, weights))
        opcheck(torch.ops.pi2.stored_ffn.default, (x, store.number, 0, *call))
        found = torch.ops.pi2.stored_ffn(x, store.number, 0, *call)
        torch.testing.assert_close(found, reference.stored_ffn(x, reader, 0, *call), rtol=1e-3, atol=1e-4)
    for tensors, message in (
        ([], "predictor: expected 1 tensor for kind mask, found 0"),
        ([mask.float()], "dtype of predictor tensor active: expected bool"),
        ([mask[..., :90]], "expected at least 97 cold neurons .*last columns"),
        ([mask[:, :2]], r"active: expected 6 tokens x 117 .*\[2, 3, 72\], found \[2, 2, 117\]"),
        ([mask.mT.contiguous().mT], "layout of predictor tensor active: expected contiguous"),
    ):
        wrong = (*call[:3], tensors, *call[4:])
        if tensors and tensors[0].shape[-1] == 90:
            wrong = (*call[:3], [tensors[0].contiguous()], *call[4:])
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.predicted_ffn(x, rows, *wrong, weights)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.stored_ffn(x, store.number, 0, *wrong)
    with pytest.raises(RuntimeError, match="kind: expected a predictor that computes, found 'mask'"):
        torch.ops.pi2.store_lookahead(store.number, 1, *masked(mask[0, :1]), 0)
