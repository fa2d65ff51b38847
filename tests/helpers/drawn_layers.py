"""Random layers, their neurons in rows, and predictors of them, as operators take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_pi2.formats import GROUP, row_bytes
from torch_pi2.ops import load


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer(neurons: int, rows: int, hidden: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """x, neuron_rows, bias_gate, bias_up, bias_down."""
    neuron_rows = (drawn(neurons, rows, hidden) * hidden**-0.5).to(dtype)
    bias_gate, bias_up = (drawn(neurons, seed=seed).to(dtype) for seed in (1, 2))
    return drawn(tokens, hidden), neuron_rows, bias_gate if rows == 3 else None, bias_up, drawn(hidden).to(dtype)


def quantize(w: torch.Tensor, weights: str) -> torch.Tensor:
    load()
    rows: torch.Tensor = torch.ops.pi2.quantize(w.float().contiguous(), weights)
    return rows


def quantized(weights: str, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    x, rows, *biases = tensors
    held = torch.stack([quantize(row, weights) for row in rows.unbind(1)], 1).contiguous()
    return x, held, *(None if bias is None else bias.float() for bias in biases)


def quantised(*shape: int, weights: str, seed: int = 0) -> torch.Tensor:
    """Random rows of ``shape[-1]`` numbers of about unit size."""
    *leading, n = shape
    size, groups = row_bytes(weights, n), -(-n // GROUP)
    generators = [torch.Generator().manual_seed(seed + more) for more in (0, 1)]
    out = torch.randint(0, 256, (*leading, size), dtype=torch.uint8, generator=generators[0])
    scale = (0.5 + torch.rand(*leading, groups, generator=generators[1])) * (0.2 if weights == "int4" else 0.014)
    out[..., size - 2 * groups :] = scale.half().view(torch.uint8)
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.float().abs().max()) + 1e-7)


def predictors(hidden: int, cold: int, rank: int = 19) -> Iterator[tuple[Any, ...]]:
    a, b = drawn(rank, hidden), drawn(cold, rank)
    bias = drawn(cold)
    scales = drawn(rank).abs() * 0.01, drawn(cold).abs() * 0.01
    steps = [(tensor * 40).clamp(-127, 127).to(torch.int8) for tensor in (a, b)]
    by_row = [steps[0], scales[0], steps[1], scales[1]]
    yield by_row, "lowrank", 0.1, "float", False
    yield [*by_row, bias], "lowrank", 0.1, "float", False
    for weights, int8 in (("int4", True), ("int8", False)):
        yield [quantize(a, weights), quantize(b, weights), bias], "lowrank_q", 0.1, weights, int8
