"""Triton's kernels in its interpreter (tests/conftest.py), on tensors of the CPU: against the readable reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn_layers import close, drawn, layer, predictors, quantize, quantized

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.ops import ACTIVATIONS, load
from torch_pi2.ops import ffn as reference
from torch_pi2.ops.gpu import kernels
from torch_pi2.ops.gpu import operators as gpu
from torch_pi2.ops.linear import linear

load()
FLOAT = ("float", False)
NONE: tuple[Any, ...] = ([], gpu.NO_PREDICTOR, 0.0, "float", False)


def launch(*args: Any) -> torch.Tensor:
    """Of x, rows and three biases, then a predictor of five and how the layer computes."""
    layer, predictor, how = args[:5], args[5:10], args[10:]
    if predictor[1] != gpu.NO_PREDICTOR:
        return gpu.predicted_ffn(*layer, *predictor, *how)
    return gpu.sparse_ffn(*layer, None, *how)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """The interpreter takes milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PARTS", 3)
        yield


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_gates(activation: str) -> None:
    for size, dtype in (((7, 2, 17, 2), torch.float32), ((70, 3, 40, 1), torch.float16)):
        tensors = layer(*size, dtype=dtype)
        for threshold in (0.0, 0.2):
            settings = (activation, size[1] == 3, size[0] // 3, threshold)
            close(launch(*tensors, *NONE, *settings, *FLOAT), reference.sparse_ffn(*tensors, None, *settings))


@pytest.mark.parametrize("neurons", [1, 64, 65, pytest.param(700, marks=pytest.mark.slow)])
def test_numbers_of_neurons_and_tiles(neurons: int) -> None:
    """Listed in one tile, in all of one, in two, and in runs that a program takes in several rounds."""
    tensors = layer(neurons, 3, 40, 1)
    for n_hot in {0, neurons // 2, neurons}:
        settings = ("relu", False, n_hot, 0.0)
        close(launch(*tensors, *NONE, *settings, *FLOAT), reference.sparse_ffn(*tensors, None, *settings))


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize(("rows", "hidden"), [(2, 64), (3, 111)])
def test_quantised_rows(weights: str, int8_activations: bool, rows: int, hidden: int) -> None:
    tensors = quantized(weights, layer(75, rows, hidden, 2))
    settings = ("relu", True, 10, 0.0, weights, int8_activations)
    close(launch(*tensors, *NONE, *settings), reference.sparse_ffn(*tensors, None, *settings))


def test_predictors() -> None:
    """Of the cold neurons alone, and of some that are hot now besides."""
    for n_hot, extra, weights in ((30, 0, "float"), (50, 20, "int4")):
        tensors = layer(100, 3, 77, 2)
        tensors = tensors if weights == "float" else quantized(weights, tensors)
        for predictor in predictors(77, 100 - n_hot + extra):
            settings = ("relu", True, n_hot, 0.0, weights, False)
            found = launch(*tensors, *predictor, *settings)
            close(found, reference.predicted_ffn(*tensors, *predictor, *settings))


def test_output_is_rounded_once() -> None:
    x, *weights = layer(64, 3, 33, 2, torch.float16)
    settings = (*NONE, "silu", False, 0, 0.0, *FLOAT)
    half = launch(x.half(), *weights, *settings)
    assert torch.equal(half, launch(x.half().float(), *weights, *settings).half())


def test_bfloat16() -> None:
    """Its last bit is not looked at: the interpreter rounds towards zero."""
    tensors = layer(64, 3, 33, 2, torch.bfloat16)
    settings = ("silu", False, 0, 0.0, *FLOAT)
    found = launch(tensors[0].bfloat16(), *tensors[1:], *NONE, *settings)
    wanted = reference.sparse_ffn(tensors[0].bfloat16(), *tensors[1:], None, *settings)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, 3, 9])
def test_linear(tokens: int) -> None:
    """Few tokens by the kernel, many as a product of floats."""
    for weights, int8_activations, dtype in (("int4", False, torch.float16), ("int8", True, torch.float32)):
        x, rows, bias = drawn(tokens, 77).to(dtype), quantize(drawn(21, 77), weights), drawn(21)
        for added in (None, bias):
            found = gpu.linear(x, rows, added, weights, int8_activations)
            wanted = linear(x, rows, added, weights, int8_activations)
            assert found.dtype is dtype
            torch.testing.assert_close(found, wanted, rtol=2e-3 if dtype is torch.float16 else 1e-6, atol=0.02)
    whole = gpu.linear(x, rows, bias, "int8", True)
    with pytest.MonkeyPatch.context() as patch:  # seven rows at a time
        patch.setattr(gpu, "TEMPORARY_BYTES", 8 * 77 * 4 - 1)
        torch.testing.assert_close(gpu.linear(x, rows, bias, "int8", True), whole)
    assert gpu.linear(x.view(1, tokens, 77), rows, None, "int8").shape == (1, tokens, 21)


def test_the_same_bits_in_any_company_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, *weights = quantized("int4", layer(70, 3, 24, 5))
    predictor = list(predictors(24, 60))[2]
    settings = (*weights, *predictor, "relu", True, 10, 0.0, "int4", False)
    together = launch(x, *settings)
    for t in range(5):
        assert torch.equal(launch(x[t : t + 1], *settings)[0], together[t])
    monkeypatch.setattr(gpu, "MOST_TOKENS", 2)
    assert torch.equal(launch(x, *settings), together)


def test_strided_inputs_and_any_leading_shape() -> None:
    x, *weights = layer(50, 3, 24, 4)
    settings = (*NONE, "relu", False, 3, 0.0, *FLOAT)
    flat = launch(x, *weights, *settings)
    assert torch.equal(launch(x.T.contiguous().T, *weights, *settings), flat)
    assert torch.equal(launch(x.view(2, 2, 24), *weights, *settings), flat.view(2, 2, 24))
    assert torch.equal(launch(x[0], *weights, *settings), flat[0])
    assert launch(x[:0], *weights, *settings).shape == (0, 24)


def test_nan_stays_in_its_token_and_what_is_not_computed_is_not_read() -> None:
    x, rows, *biases = layer(50, 3, 24, 3)
    predictor = next(iter(predictors(24, 50)))
    settings = ("relu", True, 0, 0.0, *FLOAT)
    skipped = int((~reference.predicted(x[:1], *predictor)).nonzero()[0, 1])
    x[1, 4] = float("nan")
    for how in (NONE, predictor):
        y = launch(x, rows, *biases, *how, *settings)
        assert y.isnan().any(1).tolist() == [False, True, False]
    rows[skipped] = float("inf")
    assert launch(x[:1], rows, *biases, *predictor, *settings).isfinite().all()


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


def test_what_has_no_kernels_is_refused() -> None:
    tensors = layer(50, 3, 24, 1)
    with pytest.raises(UnsupportedModelError, match="active on a GPU: expected None: a predictor"):
        gpu.sparse_ffn(*tensors, torch.ones(1, 50, dtype=torch.bool), "relu", True, 0, 0.0)
    with pytest.raises(ConfigError, match="predictor on a GPU: expected none or lowrank or lowrank_q, found 'signbit'"):
        gpu.predicted_ffn(*tensors, [], "signbit", 1.0, "", False, "relu", True, 0, 0.0)
