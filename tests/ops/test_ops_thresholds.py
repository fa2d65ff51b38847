"""Thresholds of neurons' own: every kernel that compares with them, against the reference."""

from __future__ import annotations

import pytest
import torch
from operators import opcheck

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.ops import load, reference
from torch_pi2.ops.gpu import ffn as gpu_ffn

load()
SIZES = [(1, 3, 1, 1), (7, 2, 17, 3), (300, 3, 111, 5), (989, 3, 128, 19), (513, 2, 64, 70)]  # I, R, H, T


def layer(intermediate: int, rows: int, hidden: int, tokens: int) -> tuple:
    g = torch.Generator().manual_seed(intermediate)
    neuron_rows = torch.randn(intermediate, rows, hidden, generator=g) * hidden**-0.5
    bias_gate, bias_up = (torch.randn(intermediate, generator=g) for _ in range(2))
    x, bias_down = torch.randn(tokens, hidden, generator=g), torch.randn(hidden, generator=g)
    thresholds = torch.rand(intermediate, generator=g) * 0.6
    return (x, neuron_rows, bias_gate if rows == 3 else None, bias_up, bias_down), thresholds


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_kernel_equals_the_reference(isa: str, size: tuple[int, int, int, int]) -> None:
    tensors, thresholds = layer(*size)
    n_hot, tokens = size[0] // 3, size[3]
    mask_TC = torch.rand(tokens, size[0] - n_hot, generator=torch.Generator().manual_seed(1)) < 0.5
    for active in (None, mask_TC):
        settings = (active, "silu", False, n_hot, 9.0, "float", False, thresholds)
        wanted = reference.sparse_ffn(*tensors, *settings)
        found = torch.ops.pi2.sparse_ffn(*tensors, *settings)
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()) + 1e-7)
        without = torch.ops.pi2.sparse_ffn(*tensors, *settings[:4], 0.0)
        assert size[0] < 300 or not torch.allclose(found, without, atol=1e-3)  # they do drop something


@pytest.mark.parametrize("tokens", [1, 5, 40])  # the last through panels of int8 activations
@pytest.mark.parametrize("int8_activations", [False, True])
def test_with_quantised_weights(isa: str, int8_activations: bool, tokens: int) -> None:
    (x, rows, gate, up, down), thresholds = layer(300, 3, 96, tokens)
    stored = torch.ops.pi2.quantize(rows.reshape(-1, 96), "int4").view(300, 3, -1)
    settings = (None, "silu", False, 20, 0.0, "int4", int8_activations, thresholds)
    wanted = reference.sparse_ffn(x, stored, gate, up, down, *settings)
    found = torch.ops.pi2.sparse_ffn(x, stored, gate, up, down, *settings)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_one_for_all_is_the_layers_own() -> None:
    tensors, _ = layer(300, 3, 96, 7)
    settings = (None, "silu", False, 10)
    same = torch.full((300,), 0.25)
    found = torch.ops.pi2.sparse_ffn(*tensors, *settings, 0.0, "float", False, same)
    assert torch.equal(found, torch.ops.pi2.sparse_ffn(*tensors, *settings, 0.25))


def test_with_a_predictor() -> None:
    tensors, thresholds = layer(300, 3, 96, 7)
    g = torch.Generator().manual_seed(2)
    signs = torch.randint(0, 256, (280, 16), generator=g, dtype=torch.uint8)
    signs[:, 12:] = 0
    settings = ([signs], "signbit", 1.0, "", False, "silu", False, 20, 0.0, "float", False, thresholds)
    wanted = reference.predicted_ffn(*tensors, *settings)
    found = torch.ops.pi2.predicted_ffn(*tensors, *settings)
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()))


def test_opcheck() -> None:
    tensors, thresholds = layer(30, 3, 24, 5)
    opcheck(torch.ops.pi2.sparse_ffn.default, (*tensors, None, "silu", False, 4, 0.0, "float", False, thresholds))


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        (torch.zeros(29), r"shape of thresholds: expected \[30\], found 1 dimensions of 29"),
        (torch.zeros(30, dtype=torch.float64), "dtype of thresholds: expected float32, whatever the weights"),
        (torch.zeros(60)[::2], "layout of thresholds: expected contiguous"),
    ],
)
def test_what_is_refused(thresholds: torch.Tensor, message: str) -> None:
    tensors, _ = layer(30, 3, 24, 5)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pi2.sparse_ffn(*tensors, None, "silu", False, 4, 0.0, "float", False, thresholds)


def test_a_gpu_refuses_them() -> None:
    tensors, thresholds = layer(30, 3, 24, 5)
    with pytest.raises(UnsupportedModelError, match="thresholds on a GPU: expected one threshold for a layer"):
        gpu_ffn.sparse_ffn(*tensors, None, "silu", False, 4, 0.0, "float", False, thresholds)
