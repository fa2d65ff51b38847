"""Activations of the second matrix: up is computed first, and decides whether gate and down are."""

from __future__ import annotations

import pytest
import torch
from drawn_layers import layer as make

from torch_pi2.ops import reference
from torch_pi2.ops.activations import ACTIVATIONS, exact_zeros, on_up, second, shaped, swapped

SIZES = [(7, 17, 3), (300, 111, 5), (989, 128, 19), (513, 64, 70)]  # I, H, T
TEXTS = ["silu", "gelu_tanh", "silu[in=1.5,out=0.5,limit=0.8,plus=1]"]


@pytest.mark.parametrize("activation", TEXTS)
def test_the_operator_against_the_reference_and_the_other_order(isa: str, activation: str) -> None:
    for intermediate, hidden, tokens in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            x, rows, *biases = make(intermediate, 3, hidden, tokens, dtype)
            turned = (rows[:, [1, 0, 2]].contiguous(), biases[1], biases[0], biases[2])
            own = torch.rand(intermediate, generator=torch.Generator().manual_seed(2)) * 0.5
            for threshold, thresholds in ((0.0, None), (0.3, None), (0.0, own)):
                settings = (None, swapped(activation), False, intermediate // 3, threshold, "float", False, thresholds)
                wanted = reference.sparse_ffn(x, *turned, *settings)
                found = torch.ops.pi2.sparse_ffn(x, *turned, *settings)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()) + 1e-6)
            dense = torch.ops.pi2.sparse_ffn(x, rows, *biases, None, activation, False, intermediate, 0.0)
            found = torch.ops.pi2.sparse_ffn(x, *turned, None, swapped(activation), False, intermediate, 0.0)
            torch.testing.assert_close(found, dense, rtol=0, atol=1e-5 * float(dense.abs().max()) + 1e-6)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantised_weights(isa: str, weights: str) -> None:
    x, rows, bias_gate, bias_up, bias_down = make(300, 3, 96, 5, torch.float32)
    stored = torch.ops.pi2.quantize(rows.reshape(-1, 96), weights).view(300, 3, -1)
    for int8_activations in (False, True):
        settings = (None, swapped("silu"), False, 0, 0.4, weights, int8_activations)
        wanted = reference.sparse_ffn(x, stored, bias_gate, bias_up, bias_down, *settings)
        found = torch.ops.pi2.sparse_ffn(x, stored, bias_gate, bias_up, bias_down, *settings)
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))


def test_the_second_and_down_are_read_where_the_first_is_above_the_threshold() -> None:
    x, *weights = make(640, 3, 64, 3, torch.float32)
    above = int(((x @ weights[0][:, 0].T + weights[1]).abs() > 1.0).sum())
    torch.ops.pi2.counters(True)
    torch.ops.pi2.sparse_ffn(x, *weights, None, swapped("silu"), False, 0, 1.0)
    _, tokens, pairs, gate_rows, up_rows, down_rows, _ = torch.ops.pi2.counters(True).tolist()
    assert (tokens, pairs, gate_rows) == (3, 3 * 640, 3 * 640)
    assert up_rows == down_rows == above
    assert 0 < above < pairs


def test_company_and_threads_change_no_bit(isa: str) -> None:
    x, *weights = make(2100, 3, 80, 71, torch.bfloat16)
    settings = (None, swapped("silu"), False, 0, 0.3)
    together = torch.ops.pi2.sparse_ffn(x, *weights, *settings)
    for t in (0, 1, 63, 70):
        assert torch.equal(torch.ops.pi2.sparse_ffn(x[t : t + 1], *weights, *settings)[0], together[t])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(torch.ops.pi2.sparse_ffn(x, *weights, *settings), together)
    finally:
        torch.set_num_threads(before)


def test_texts() -> None:
    assert swapped("silu") == "silu[second=1]"
    assert swapped("silu[limit=7,plus=1]") == "silu[limit=7,plus=1,second=1]"
    assert all(swapped(swapped(text)) == text and second(swapped(text)) and not second(text) for text in TEXTS)
    assert [shaped(f"silu[{numbers}]") for numbers in ("second=0", "second=2", "sigmas=1,second=1")] == [None] * 3
    assert not exact_zeros(swapped("relu"))
    v = torch.linspace(-3, 3, 7)
    assert torch.equal(ACTIVATIONS[swapped("silu")](v), v)
    assert torch.equal(on_up(swapped("silu"), False)(v), torch.nn.functional.silu(v))


def test_where_there_is_no_second_matrix_it_says_so() -> None:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    with pytest.raises(RuntimeError, match="activation: expected one without second but for gated neurons"):
        torch.ops.pi2.sparse_ffn(x, *weights, None, swapped("silu"), True, 0, 0.0)
    x, *weights = make(50, 2, 24, 3, torch.float32)
    with pytest.raises(RuntimeError, match="activation: expected one without second but for gated neurons"):
        torch.ops.pi2.sparse_ffn(x, *weights, None, swapped("silu"), False, 0, 0.0)
    rows = torch.randn(2, 40, 3, 24)
    index, routing = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(RuntimeError, match="activation: expected one without sigmas and second for experts"):
        torch.ops.pi2.experts_ffn(
            x, index, routing, rows, [], "none", [], "", False, swapped("silu"), False, [0.0, 0.0], "float"
        )
