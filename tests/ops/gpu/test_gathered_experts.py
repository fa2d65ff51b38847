"""Mixtures of experts by Triton's kernels in its interpreter, on tensors of the CPU: against the readable reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn_layers import close, drawn, predictors, quantize
from operators import opcheck

from torch_pi2.ops import experts as reference
from torch_pi2.ops import load
from torch_pi2.ops.gpu import kernels
from torch_pi2.ops.gpu import operators as gpu

load()
EXPERTS, NEURONS, HIDDEN, TOKENS, SLOTS = 3, 70, 41, 3, 2
NONE: tuple[Any, ...] = ([], gpu.NO_PREDICTOR, 0.0, "float", False)


#: The interpreter takes long: one format is looked at each time.
WEIGHTS = ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "float16", "int8"))]


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """The interpreter takes milliseconds for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PARTS", 4)
        yield


def routed(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, index and routing: the second token has one expert, one of the third's slots is empty."""
    index_Tk = torch.arange(tokens * SLOTS).view(tokens, SLOTS) % EXPERTS
    index_Tk[1], index_Tk[-1, 0] = 2, EXPERTS
    return drawn(tokens, HIDDEN).to(dtype), index_Tk, drawn(tokens, SLOTS).abs()


def neurons(weights: str, rows: int = 3) -> tuple[torch.Tensor, str]:
    """``neuron_rows [E, I, R, ...]`` and what operators call their format."""
    values = drawn(EXPERTS, NEURONS, rows, HIDDEN) * HIDDEN**-0.5
    if weights in ("int4", "int8"):
        return quantize(values.view(-1, HIDDEN), weights).view(EXPERTS, NEURONS, rows, -1), weights
    return values.to(getattr(torch, weights)), "float"


def stacked(predictor: tuple[Any, ...]) -> tuple[Any, ...]:
    """An expert's, rolled by one neuron or rank from one expert to the next, with other cuts."""
    tensors, kind, cut, *others = predictor
    rolled = [torch.stack([tensor.roll(expert, 0) for expert in range(EXPERTS)]) for tensor in tensors]
    return rolled, kind, [cut * (1 + 0.1 * expert) for expert in range(EXPERTS)], *others


def both(
    tensors: tuple[Any, ...], predictor: tuple[Any, ...], settings: tuple[Any, ...], thresholds: list[float], *held: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels and reference make of it."""
    given, kind, cuts, *how = predictor
    cuts_E, thresholds_E = (torch.tensor(numbers, dtype=torch.float64) for numbers in (cuts, thresholds))
    found = gpu.gathered_experts(*tensors, given, kind, cuts_E, *how, *settings, thresholds_E, *held)
    cuts = [] if kind == gpu.NO_PREDICTOR else cuts
    return found, reference.experts_ffn(*tensors, given, kind, cuts, *how, *settings, thresholds, *held)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_exact_gates_and_thresholds(weights: str) -> None:
    for rows, thresholds in ((3, [0.0, 0.1, 0.3]), (2, [0.0] * 3)):
        neuron_rows, form = neurons(weights, rows)
        for int8_activations in {False, form != "float"}:
            close(*both((*routed(), neuron_rows), NONE, ("relu", rows == 3), thresholds, form, int8_activations))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_predictors(weights: str) -> None:
    neuron_rows, form = neurons(weights)
    for predictor in predictors(HIDDEN, NEURONS):
        close(*both((*routed(), neuron_rows), stacked(predictor), ("relu", True), [0.0, 0.2, 0.0], form, False))


def test_output_is_rounded_once() -> None:
    settings = ([], gpu.NO_PREDICTOR, torch.zeros(3).double(), "float", False, "silu", False)
    held = (torch.zeros(3).double(), "float", False)
    x_TH, index_Tk, routing_Tk = routed(dtype=torch.float16)
    rows = neurons("float16")[0]
    for weights_of_slots in (routing_Tk, routing_Tk.half()):
        half = gpu.gathered_experts(x_TH, index_Tk, weights_of_slots, rows, *settings, *held)
        whole = gpu.gathered_experts(x_TH.float(), index_Tk, weights_of_slots.float(), rows, *settings, *held)
        assert half.dtype is torch.float16
        assert torch.equal(half, whole.half())


@pytest.mark.slow
def test_the_same_bits_in_any_company_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TH, index_Tk, routing_Tk = routed(5)
    predictor, zeros = stacked(list(predictors(HIDDEN, NEURONS))[1]), torch.zeros(3).double()
    cuts_E = torch.tensor(predictor[2], dtype=torch.float64)
    others = (neurons("int4")[0], *predictor[:2], cuts_E, *predictor[3:], "relu", False, zeros, "int4", False)
    together = gpu.gathered_experts(x_TH, index_Tk, routing_Tk, *others)
    for t in range(5):
        alone = gpu.gathered_experts(x_TH[t : t + 1], index_Tk[t : t + 1], routing_Tk[t : t + 1], *others)
        assert torch.equal(alone[0], together[t])
    strided = (tensor.T.contiguous().T for tensor in (x_TH, index_Tk, routing_Tk))
    assert torch.equal(gpu.gathered_experts(*strided, *others), together)
    monkeypatch.setattr(gpu, "MOST_TOKENS", 2)
    assert torch.equal(gpu.gathered_experts(x_TH, index_Tk, routing_Tk, *others), together)


def test_slots_without_an_expert_add_nothing() -> None:
    """Whatever their weights are; and no tokens, or no slots, are no error."""
    x_TH, index_Tk, routing_Tk = routed()
    index_Tk[0], index_Tk[2] = EXPERTS, -1
    routing_Tk[0] = float("nan")
    others = (neurons("float32")[0], [], gpu.NO_PREDICTOR, torch.zeros(3).double(), "float", False, "relu", False)
    held = (torch.zeros(3).double(), "float", False)
    found = gpu.gathered_experts(x_TH, index_Tk, routing_Tk, *others, *held)
    assert found.ne(0).any(1).tolist() == [False, True, False]
    assert gpu.gathered_experts(x_TH[:0], index_Tk[:0], routing_Tk[:0], *others, *held).shape == (0, HIDDEN)
    assert not gpu.gathered_experts(x_TH, index_Tk[:, :0], routing_Tk[:, :0], *others, *held).any()


def test_the_operator_on_the_cpu_is_the_library() -> None:
    tensors, thresholds = (*routed(), neurons("float32")[0]), [0.0, 0.1, 0.2]
    thresholds_E, held = torch.tensor(thresholds, dtype=torch.float64), ("float", False)
    for predictor in (NONE, *map(stacked, predictors(HIDDEN, NEURONS))):
        given, kind, cuts, *how = predictor
        of_each = [] if kind == gpu.NO_PREDICTOR else cuts
        found = torch.ops.pi2.gathered_experts(
            *tensors, given, kind, torch.tensor(cuts).double(), *how, "relu", True, thresholds_E, *held
        )
        wanted = torch.ops.pi2.experts_ffn(*tensors, given, kind, of_each, *how, "relu", True, thresholds, *held)
        torch.testing.assert_close(found, wanted)
    settings = (*NONE[:2], torch.zeros(3).double(), *NONE[3:], "relu", True, thresholds_E, *held)
    checks = ("test_schema", "test_autograd_registration")
    opcheck(torch.ops.pi2.gathered_experts.default, (*tensors, *settings), test_utils=checks)
