"""Triton's kernels in its interpreter (tests/conftest.py), on tensors of the CPU: against the readable reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn_layers import close, drawn, layer, predictors, quantize, quantized

from torch_pi2.errors import ShapeError
from torch_pi2.ops import ACTIVATIONS, load, reference
from torch_pi2.ops.gpu import ffn as gpu
from torch_pi2.ops.gpu import kernels
from torch_pi2.ops.gpu import linear as gpu_linear
from torch_pi2.ops.linear import linear
from torch_pi2.ops.predictors import most_differing
from torch_pi2.predict.signbit import pack_signs

load()
FLOAT = ("float", False)
NONE: tuple[Any, ...] = ([], gpu.NO_PREDICTOR, 0.0, "float", False)


def launch(*args: Any) -> torch.Tensor:
    """Of x, rows and three biases, then ``active``, a predictor of five and how the layer computes."""
    layer, active, predictor, how = args[:5], args[5], args[6:11], args[11:]
    if active is None and predictor[1] != gpu.NO_PREDICTOR:
        return gpu.predicted_ffn(*layer, *predictor, *how)
    return gpu.sparse_ffn(*layer, active, *how)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """The interpreter takes milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PARTS", 3)
        yield


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_gates_and_masks(activation: str) -> None:
    for size, dtype in (((7, 2, 17, 2), torch.float32), ((70, 3, 40, 1), torch.float16)):
        tensors = layer(*size, dtype=dtype)
        n_hot = size[0] // 3
        mask_TC = drawn(size[3], size[0] - n_hot) < 0
        for active, threshold in ((None, 0.0), (mask_TC, 0.2)):
            settings = (activation, size[1] == 3, n_hot, threshold)
            found = launch(*tensors, active, *NONE, *settings, *FLOAT)
            close(found, reference.sparse_ffn(*tensors, active, *settings))


@pytest.mark.parametrize("neurons", [1, 64, 65, pytest.param(700, marks=pytest.mark.slow)])
def test_numbers_of_neurons_and_tiles(neurons: int) -> None:
    """Listed in one tile, in all of one, in two, and in runs that a program takes in several rounds."""
    tensors = layer(neurons, 3, 40, 1)
    for n_hot in {0, neurons // 2, neurons}:
        settings = ("relu", False, n_hot, 0.0)
        close(launch(*tensors, None, *NONE, *settings, *FLOAT), reference.sparse_ffn(*tensors, None, *settings))


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize(("rows", "hidden"), [(2, 64), (3, 111)])
def test_quantised_rows(weights: str, int8_activations: bool, rows: int, hidden: int) -> None:
    tensors = quantized(weights, layer(75, rows, hidden, 2))
    mask_TC = drawn(2, 65) < 0
    for active in (None, mask_TC):
        settings = ("relu", True, 10, 0.0, weights, int8_activations)
        found = launch(*tensors, active, *NONE, *settings)
        close(found, reference.sparse_ffn(*tensors, active, *settings))


def test_predictors() -> None:
    """Of the cold neurons alone, and of some that are hot now besides."""
    for n_hot, extra, weights in ((30, 0, "float"), (50, 20, "int4")):
        tensors = layer(100, 3, 77, 2)
        tensors = tensors if weights == "float" else quantized(weights, tensors)
        for predictor in predictors(77, 100 - n_hot + extra):
            settings = ("relu", True, n_hot, 0.0, weights, False)
            found = launch(*tensors, None, *predictor, *settings)
            close(found, reference.predicted_ffn(*tensors, *predictor, *settings))


@pytest.mark.parametrize("hidden", [1, 31, 111])
def test_signs_are_those_of_the_reference_bit_for_bit(hidden: int) -> None:
    """Of any size, at cuts that are met exactly, with a NaN and a negative zero in tokens."""
    x_TH, signs = drawn(3, hidden), pack_signs(drawn(150, hidden))
    x_TH[1, 0], x_TH[2, 0] = float("nan"), -0.0
    words = signs.view(torch.int32)
    for margin, (n_hot, neurons) in itertools.product((0.0, 1.0, 1.2), ((0, 150), (20, 150), (40, 170))):
        tiles = -(-neurons // kernels.TILE)
        lists, counts = (torch.zeros(3, tiles, *room, dtype=torch.int32) for room in ((kernels.TILE,), ()))
        kernels.list_signed[(tiles, 3)](
            x_TH, words, lists, counts, most_differing(hidden, margin), 150, n_hot, neurons, tiles,
            H=hidden, WORDS=words.shape[1], TILE=kernels.TILE, BLOCK=2,
        )  # fmt: skip
        active_TC = reference.predict_signbit(x_TH, signs, hidden, margin)
        for t in range(3):
            listed = [int(i) for tile in range(tiles) for i in lists[t, tile, : counts[t, tile]]]
            cold = [i for i in range(n_hot, neurons) if active_TC[t, i - neurons]]
            assert listed == [*range(n_hot), *cold]


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.3, 1.0, 1.1, 1 / 3, 1e9, math.inf, math.nan])
def test_the_most_signs_that_may_differ(margin: float) -> None:
    for columns in (1, 64, 111):
        most = most_differing(columns, margin)
        assert [d <= most for d in range(columns + 1)] == [columns - d >= margin * d for d in range(columns + 1)]


def test_output_is_rounded_once() -> None:
    x, *weights = layer(64, 3, 33, 2, torch.float16)
    settings = (None, *NONE, "silu", False, 0, 0.0, *FLOAT)
    half = launch(x.half(), *weights, *settings)
    assert torch.equal(half, launch(x.half().float(), *weights, *settings).half())


def test_bfloat16() -> None:
    """Its last bit is not looked at: the interpreter rounds towards zero."""
    tensors = layer(64, 3, 33, 2, torch.bfloat16)
    settings = ("silu", False, 0, 0.0, *FLOAT)
    found = launch(tensors[0].bfloat16(), *tensors[1:], None, *NONE, *settings)
    wanted = reference.sparse_ffn(tensors[0].bfloat16(), *tensors[1:], None, *settings)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, 3, 9])
def test_linear(tokens: int) -> None:
    """Few tokens by the kernel, many as a product of floats."""
    for weights, int8_activations, dtype in (("int4", False, torch.float16), ("int8", True, torch.float32)):
        x, rows, bias = drawn(tokens, 77).to(dtype), quantize(drawn(21, 77), weights), drawn(21)
        for added in (None, bias):
            found = gpu_linear.linear(x, rows, added, weights, int8_activations)
            wanted = linear(x, rows, added, weights, int8_activations)
            assert found.dtype is dtype
            torch.testing.assert_close(found, wanted, rtol=2e-3 if dtype is torch.float16 else 1e-6, atol=0.02)
    whole = gpu_linear.linear(x, rows, bias, "int8", True)
    with pytest.MonkeyPatch.context() as patch:  # seven rows at a time
        patch.setattr(gpu_linear, "TEMPORARY_BYTES", 8 * 77 * 4 - 1)
        torch.testing.assert_close(gpu_linear.linear(x, rows, bias, "int8", True), whole)
    assert gpu_linear.linear(x.view(1, tokens, 77), rows, None, "int8").shape == (1, tokens, 21)


@pytest.mark.parametrize("columns", [1, 32, 77, 160])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_dequantised_bit_for_bit(weights: str, columns: int) -> None:
    """Rows that lie together, and one row of every neuron; in one block and in several."""
    rows_NRb = quantize(drawn(3 * 7, columns) * 100, weights).view(7, 3, -1)
    for rows in (rows_NRb.flatten(0, 1), rows_NRb[:, 1], rows_NRb[:0, 2]):
        for dtype, most in ((torch.float32, 4096), (torch.float16, 64)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gpu_linear, "MOST_BLOCK", most)
                found = gpu_linear.dequantize(rows, weights, columns, dtype)
            assert torch.equal(found, reference.dequantize(rows, weights, columns, dtype))
    odd = torch.zeros(1 + rows_NRb.numel(), dtype=torch.uint8)[1:].view(21, -1).copy_(rows_NRb.flatten(0, 1))
    found = gpu_linear.dequantize(odd, weights, columns, torch.float32)
    assert torch.equal(found, reference.dequantize(odd, weights, columns, torch.float32))
    with pytest.raises(ShapeError, match="rows: expected"):
        gpu_linear.dequantize(rows_NRb[:, 0], weights, columns + 32, torch.float32)


def test_ggmls_blocks_are_dequantised_there_too() -> None:
    rows = torch.randint(0, 255, (3, 2 * 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows[:, [1, 3, 21, 23]] = 60  # scales that are numbers
    found = gpu_linear.dequantize(rows, "q4_1", 64, torch.float32)
    assert torch.equal(found, torch.ops.pi2.dequantize(rows, "q4_1", 64, torch.float32))


@pytest.mark.slow
def test_the_same_bits_again_and_in_any_company() -> None:
    x, *weights = quantized("int4", layer(200, 3, 64, 5))
    mask_TC = drawn(5, 150) < 0
    settings = ("relu", True, 50, 0.0, "int4", False)
    together = launch(x, *weights, mask_TC, *NONE, *settings)
    assert torch.equal(together, launch(x, *weights, mask_TC, *NONE, *settings))
    for t in range(5):
        alone = launch(x[t : t + 1], *weights, mask_TC[t : t + 1], *NONE, *settings)
        assert torch.equal(alone[0], together[t])


def test_many_tokens_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, mask_TC = layer(70, 3, 24, 5), drawn(5, 60) < 0
    settings = ("relu", True, 10, 0.0, *FLOAT)
    wanted = launch(*tensors, mask_TC, *NONE, *settings)
    monkeypatch.setattr(gpu, "MOST_TOKENS", 2)
    assert torch.equal(launch(*tensors, mask_TC, *NONE, *settings), wanted)


def test_strided_inputs_and_any_leading_shape() -> None:
    x, *weights = layer(50, 3, 24, 4)
    settings = (None, *NONE, "relu", False, 3, 0.0, *FLOAT)
    flat = launch(x, *weights, *settings)
    assert torch.equal(launch(x.T.contiguous().T, *weights, *settings), flat)
    assert torch.equal(launch(x.view(2, 2, 24), *weights, *settings), flat.view(2, 2, 24))
    assert torch.equal(launch(x[0], *weights, *settings), flat[0])
    assert launch(x[:0], *weights, *settings).shape == (0, 24)


def test_nan_stays_in_its_token_and_what_is_not_computed_is_not_read() -> None:
    x, rows, *biases = layer(50, 3, 24, 3)
    x[1, 4] = float("nan")
    settings = ("relu", True, 0, 0.0, *FLOAT)
    for active in (None, torch.ones(3, 50, dtype=torch.bool)):
        y = launch(x, rows, *biases, active, *NONE, *settings)
        assert y.isnan().any(1).tolist() == [False, True, False]
    rows[7] = float("inf")
    active = torch.ones(1, 50, dtype=torch.bool)
    active[0, 7] = False
    assert launch(x[:1], rows, *biases, active, *NONE, *settings).isfinite().all()


def test_they_are_what_the_operators_are_on_a_gpu() -> None:
    tensors = layer(50, 3, 24, 3)
    settings = ("relu", True, 10, 0.0)
    found = gpu.sparse_ffn(*tensors, None, *settings)
    torch.testing.assert_close(found, torch.ops.pi2.sparse_ffn(*tensors, None, *settings), rtol=1e-4, atol=1e-4)
    for predictor in predictors(24, 40):
        found = gpu.predicted_ffn(*tensors, *predictor, *settings)
        wanted = torch.ops.pi2.predicted_ffn(*tensors, *predictor, *settings)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for name in ("sparse_ffn", "predicted_ffn", "linear", "dequantize"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pi2::{name}", "CUDA")
