"""Activations with numbers, of a layer's cut and of the second matrix, and thresholds of neurons' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_layers import layer as make
from operators import opcheck

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load
from torch_pi2.ops.activations import ACTIVATIONS, cut, cuts, exact_zeros, norm, of_all, on_up, second, shaped, swapped
from torch_pi2.ops.gpu import operators as gpu_operators

load()
SIZES = [
    (7, 3, 17, 3),
    (300, 3, 111, 5),
    (989, 3, 128, 19),
    (513, 3, 64, 70),
    (2, 2, 17, 1),
    (513, 2, 64, 70),
]  # I, R, H, T
CUTS = ["gelu_tanh[sigmas=1.64485363]", "relu2[sigmas=0.5]", "silu[in=2,limit=3,plus=1,sigmas=-0.25]", "relu[sigmas=0]"]
NUMBERED = [
    "silu[in=1.702,out=0.587544066,limit=7,plus=1]",
    "silu[limit=0.5]",
    "gelu[in=0.25,plus=-0.5]",
    "gelu_tanh[in=2]",
    "relu[out=0.5]",
    "relu2[in=2,limit=1]",
]
NORMED = ["relu2[rms=1e-05]", "relu[in=0.5,limit=3,plus=0.5,rms=0.02]", "silu[rms=1]"]
SECOND = ["silu", "gelu_tanh", "silu[in=1.5,out=0.5,limit=0.8,plus=1]"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own(neurons: int) -> torch.Tensor:
    """Thresholds of their own."""
    return torch.rand(neurons, generator=generator(2)) * 0.5


def compare(tensors: Any, *settings: Any, atol: float = 1e-5) -> torch.Tensor:
    """What the operator gives, after a comparison with the reference."""
    wanted = reference.sparse_ffn(*tensors, *settings)
    found: torch.Tensor = torch.ops.pi2.sparse_ffn(*tensors, *settings)
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol * float(wanted.abs().max()) + 1e-6)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_operator_equals_the_reference(isa: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tensors, hot = make(*size, dtype), size[0] // 3
    mask = torch.rand(size[3], size[0] - hot, generator=generator(1)) < 0.3
    for activation in [*CUTS, *NUMBERED, *([*NORMED, *map(swapped, SECOND)] if size[1] == 3 else ())]:
        for active, threshold in ((None, 0.0), (mask, 0.2)):
            for activation_on_up in {False, activation in NUMBERED}:
                compare(tensors, active, activation, activation_on_up, hot, threshold)
    for active in (None, mask):
        found = compare(tensors, active, "silu", False, hot, 9.0, "float", False, own(size[0]))
        without = torch.ops.pi2.sparse_ffn(*tensors, active, "silu", False, hot, 0.0)
        assert size[0] < 300 or not torch.allclose(found, without, atol=1e-3)  # they do drop something


@pytest.mark.parametrize("activation", SECOND)
def test_the_second_matrix_first_is_the_same_layer(isa: str, activation: str) -> None:
    for size in SIZES[:4]:
        x, rows, *biases = make(*size, torch.float32)
        turned = (rows[:, [1, 0, 2]].contiguous(), biases[1], biases[0], biases[2])
        dense = torch.ops.pi2.sparse_ffn(x, rows, *biases, None, activation, False, size[0], 0.0)
        found = torch.ops.pi2.sparse_ffn(x, *turned, None, swapped(activation), False, size[0], 0.0)
        torch.testing.assert_close(found, dense, rtol=0, atol=1e-5 * float(dense.abs().max()) + 1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 40, 130])  # the last ones through panels of int8 activations
def test_quantised_weights(isa: str, tokens: int) -> None:
    x, rows, *biases = make(300, 3, 96, tokens, torch.float32)
    stored = torch.ops.pi2.quantize(rows.reshape(-1, 96), "int4").view(300, 3, -1)
    for int8_activations in (False, True):
        for activation, threshold, thresholds in (
            *((numbered, 0.0, None) for numbered in (*NUMBERED, CUTS[0], *NORMED)),
            (swapped("silu"), 0.4, None),
            ("silu", 0.0, own(300)),
        ):
            settings = (None, activation, False, 0, threshold, "int4", int8_activations, thresholds)
            compare((x, stored, *biases), *settings, atol=3e-5)


ALONE = [("relu", 0.0), (CUTS[0], 0.0), (NORMED[0], 0.0), (swapped("silu"), 0.3)]


@pytest.mark.parametrize(("activation", "threshold"), ALONE)
def test_company_threads_and_the_hot_boundary_change_no_bit(isa: str, activation: str, threshold: float) -> None:
    x, *weights = make(2100, 3, 80, 71, torch.bfloat16)

    def run(x: torch.Tensor, n_hot: int = 0) -> torch.Tensor:
        found: torch.Tensor = torch.ops.pi2.sparse_ffn(x, *weights, None, activation, False, n_hot, threshold)
        return found

    together = run(x)
    assert all(torch.equal(run(x[t : t + 1])[0], together[t]) for t in (0, 1, 63, 64, 70))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for n_hot in (0, 1, 777, 2100) if threshold == 0 else (0,):
                assert torch.equal(run(x, n_hot), together)
    finally:
        torch.set_num_threads(before)


ABOVE: list[tuple[str, float, Callable[[torch.Tensor], torch.Tensor]]] = [
    (CUTS[0], 0.0, lambda gates: gates > cut(CUTS[0], gates)),
    (swapped("silu"), 1.0, lambda ups: ups.abs() > 1.0),
]


@pytest.mark.parametrize(("activation", "threshold", "above"), ABOVE)
def test_the_other_rows_are_read_where_the_first_is_above(activation: str, threshold: float, above: Any) -> None:
    x, *weights = make(640, 3, 64, 3, torch.float32)
    wanted = int(above((x @ weights[0][:, 0].T + weights[1]).double()).sum())
    torch.ops.pi2.counters(True)
    torch.ops.pi2.sparse_ffn(x, *weights, None, activation, False, 0, threshold)
    _, tokens, pairs, gate_rows, up_rows, down_rows, _ = torch.ops.pi2.counters(True).tolist()
    assert (tokens, pairs, gate_rows) == (3, 3 * 640, 3 * 640)
    assert up_rows == down_rows == wanted
    assert 0 < wanted < pairs


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


def test_a_norm_of_all_neurons() -> None:
    """Scales of h cancel but for what is added; its weights are no bias; without them they are 1; NaN stays."""
    x, rows, bias_gate, weight, bias_down = make(300, 3, 24, 3, torch.float32)

    def run(weight: torch.Tensor | None, activation: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = torch.ops.pi2.sparse_ffn(
            x, rows, bias_gate, weight, bias, None, activation, False, 0, 0.0
        )
        return found

    y = run(weight, "relu2[rms=1e-12]")
    torch.testing.assert_close(run(weight, "relu2[out=8,rms=1e-12]"), y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(2 * weight, "relu2[rms=1e-12]", bias_down), 2 * y + bias_down, rtol=1e-5, atol=1e-6)
    assert torch.equal(run(None, NORMED[0]), run(torch.ones(300), NORMED[0]))
    x[1, 4] = float("nan")
    assert run(weight, NORMED[0]).isnan().any(1).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match="expected one without rms but for gated neurons"):
        torch.ops.pi2.sparse_ffn(x, rows[:, 1:].contiguous(), None, weight, None, None, NORMED[0], False, 0, 0.0)


def test_texts() -> None:
    assert cuts(CUTS[0])
    assert not cuts("gelu_tanh[in=2]")
    assert exact_zeros(CUTS[0])
    assert not exact_zeros(swapped("relu"))
    gate = torch.tensor([[0.0, 0.0, 0.0, 4.0]])
    assert ACTIVATIONS["relu[sigmas=1]"](gate)[0].tolist() == pytest.approx([0, 0, 0, 3 - 3**0.5])
    assert swapped("silu[limit=7,plus=1]") == "silu[limit=7,plus=1,second=1]"
    assert all(swapped(swapped(text)) == text and second(swapped(text)) and not second(text) for text in SECOND)
    wrong = ("second=0", "second=2", "sigmas=1,second=1", "sigmas=nan", "rms=-1", "sigmas=1,rms=1", "second=1,rms=1")
    assert [shaped(f"silu[{numbers}]") for numbers in wrong] == [None] * 7
    assert norm(NORMED[0]) == 1e-5
    assert [of_all(text) for text in (NORMED[0], CUTS[0], NUMBERED[0])] == [True, True, False]
    v = torch.linspace(-3, 3, 7)
    assert torch.equal(ACTIVATIONS[swapped("silu")](v), v)
    assert torch.equal(on_up(swapped("silu"), False)(v), torch.nn.functional.silu(v))


def test_thresholds_beside_others() -> None:
    """All alike, with a predictor, and to torch.compile."""
    tensors = make(300, 3, 96, 7, torch.float32)
    same = torch.ops.pi2.sparse_ffn(*tensors, None, "silu", False, 10, 0.0, "float", False, torch.full((300,), 0.25))
    assert torch.equal(same, torch.ops.pi2.sparse_ffn(*tensors, None, "silu", False, 10, 0.25))
    signs = torch.randint(0, 256, (280, 16), generator=generator(2), dtype=torch.uint8)
    signs[:, 12:] = 0
    settings = ([signs], "signbit", 1.0, "", False, "silu", False, 20, 0.0, "float", False, own(300))
    wanted = reference.predicted_ffn(*tensors, *settings)
    found = torch.ops.pi2.predicted_ffn(*tensors, *settings)
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()))
    settings = (None, "silu", False, 4, 0.0, "float", False, own(300))
    opcheck(torch.ops.pi2.sparse_ffn.default, (*tensors, *settings))
    with pytest.raises(UnsupportedModelError, match="thresholds on a GPU: expected one threshold for a layer"):
        gpu_operators.sparse_ffn(*tensors, *settings)


@pytest.mark.parametrize("activation", [CUTS[0], NORMED[0], swapped("silu")])
def test_experts_have_neither(activation: str) -> None:
    x, index, routing = torch.ones(3, 24), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    rows, layer = torch.randn(2, 40, 3, 24), (activation, False, [0.0, 0.0], "float")
    with pytest.raises(RuntimeError, match="activation: expected one without sigmas, second and rms for experts"):
        torch.ops.pi2.experts_ffn(x, index, routing, rows, [], "none", [], "", False, *layer)
