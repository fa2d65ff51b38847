"""Activations that cut at so many deviations above the mean of all gates."""

from __future__ import annotations

import pytest
import torch
from drawn_layers import layer as make

from torch_pi2.ops import reference
from torch_pi2.ops.activations import ACTIVATIONS, cut, cuts, exact_zeros, shaped

SIZES = [(2, 3, 1, 1), (7, 2, 17, 3), (300, 3, 111, 5), (989, 3, 128, 19), (513, 2, 64, 70)]  # I, R, H, T
CUTS = ["gelu_tanh[sigmas=1.64485363]", "relu2[sigmas=0.5]", "silu[in=2,limit=3,plus=1,sigmas=-0.25]", "relu[sigmas=0]"]


@pytest.mark.parametrize("activation", CUTS)
def test_the_operator_against_the_reference(isa: str, activation: str) -> None:
    for intermediate, rows, hidden, tokens in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = make(intermediate, rows, hidden, tokens, dtype)
            mask = (
                torch.rand(tokens, intermediate - intermediate // 3, generator=torch.Generator().manual_seed(1)) < 0.3
            )
            for active in (None, mask):
                for threshold in (0.0, 0.2):
                    settings = (active, activation, False, intermediate // 3, threshold)
                    wanted = reference.sparse_ffn(*tensors, *settings)
                    found = torch.ops.pi2.sparse_ffn(*tensors, *settings)
                    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()) + 1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_quantised_weights(isa: str, tokens: int) -> None:
    x, rows, bias_gate, bias_up, bias_down = make(300, 3, 96, tokens, torch.float32)
    stored = torch.ops.pi2.quantize(rows.reshape(-1, 96), "int4").view(300, 3, -1)
    for int8_activations in (False, True):
        settings = (None, CUTS[0], False, 0, 0.0, "int4", int8_activations)
        wanted = reference.sparse_ffn(x, stored, bias_gate, bias_up, bias_down, *settings)
        found = torch.ops.pi2.sparse_ffn(x, stored, bias_gate, bias_up, bias_down, *settings)
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))


def test_company_threads_and_the_hot_boundary_change_no_bit(isa: str) -> None:
    x, *weights = make(2100, 3, 80, 71, torch.bfloat16)
    together = torch.ops.pi2.sparse_ffn(x, *weights, None, CUTS[0], False, 0, 0.0)
    for t in (0, 1, 63, 64, 70):
        assert torch.equal(
            torch.ops.pi2.sparse_ffn(x[t : t + 1], *weights, None, CUTS[0], False, 0, 0.0)[0], together[t]
        )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for n_hot in (0, 1, 777, 2100):
                found = torch.ops.pi2.sparse_ffn(x, *weights, None, CUTS[0], False, n_hot, 0.0)
                assert torch.equal(found, together)
    finally:
        torch.set_num_threads(before)


def test_up_and_down_are_read_where_a_gate_is_above_the_cut() -> None:
    x, *weights = make(640, 3, 64, 3, torch.float32)
    gates = (x @ weights[0][:, 0].T + weights[1]).double()
    above = int((gates > cut(CUTS[0], gates)).sum())
    torch.ops.pi2.counters(True)
    torch.ops.pi2.sparse_ffn(x, *weights, None, CUTS[0], False, 0, 0.0)
    _, tokens, pairs, gate_rows, up_rows, down_rows, _ = torch.ops.pi2.counters(True).tolist()
    assert (tokens, pairs, gate_rows) == (3, 3 * 640, 3 * 640)
    assert up_rows == down_rows == above
    assert 0 < above < 0.15 * pairs


def test_equal_gates_and_what_is_not_finite() -> None:
    x, rows, *_ = make(50, 3, 24, 3, torch.float32)
    rows[:, 0] = rows[0, 0]  # no deviation: none is above the mean
    y = torch.ops.pi2.sparse_ffn(x, rows, None, None, None, None, "relu[sigmas=1]", False, 0, 0.0)
    assert y.abs().max() < 1e-3
    x, *weights = make(50, 3, 24, 3, torch.float32)
    x[1, 4] = float("nan")
    y = torch.ops.pi2.sparse_ffn(x, *weights, None, CUTS[0], False, 0, 0.0)
    assert y.isnan().any(1).tolist() == [False, True, False]
    assert torch.ops.pi2.sparse_ffn(x[:0], *weights, None, CUTS[0], False, 0, 0.0).shape == (0, 24)


def test_texts() -> None:
    assert cuts(CUTS[0])
    assert not cuts("gelu_tanh[in=2]")
    assert exact_zeros(CUTS[0])
    assert shaped("gelu_tanh[sigmas=nan]") is None
    gate = torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    assert ACTIVATIONS["relu[sigmas=1]"](gate)[0].tolist() == pytest.approx([0, 0, 0, 3 - 3**0.5])


def test_what_cannot_have_a_cut_says_so() -> None:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    with pytest.raises(RuntimeError, match="activation_on_up: expected false with sigmas, which are of the gates"):
        torch.ops.pi2.sparse_ffn(x, *weights, None, CUTS[0], True, 0, 0.0)
    rows = torch.randn(2, 40, 3, 24)
    index, routing = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    layer = (CUTS[0], False, [0.0, 0.0], "float")
    with pytest.raises(RuntimeError, match="activation: expected one without sigmas and second for experts"):
        torch.ops.pi2.experts_ffn(x, index, routing, rows, [], "none", [], "", False, *layer)
