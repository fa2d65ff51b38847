"""``recurrence`` and ``conv_step``: against the references, the same bits in any company, refusals."""

from __future__ import annotations

import pytest
import torch
from operators import opcheck

from torch_pi2.ops import load
from torch_pi2.ops import states as reference

load()
#: batch, heads, groups, rows, width
SIZES = [(1, 1, 1, 1, 1), (2, 6, 2, 13, 37), (1, 64, 8, 64, 128), (3, 4, 4, 70, 16), (1, 2, 1, 5, 33)]


def operands(size: tuple[int, ...], transposed: bool, update: bool, one_decay: bool) -> list[torch.Tensor | None]:
    batch, heads, groups, rows, width = size
    generator = torch.Generator().manual_seed(rows + width)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = some(batch, heads, *((width, rows) if transposed else (rows, width)))
    decay = some(batch, heads, 1 if one_decay else width).sigmoid()
    k, r = some(batch, groups, width), some(batch, groups, width)
    pair = [some(batch, heads, width) / width, some(batch, heads, width)] if update else [None, None]
    return [state, decay, some(batch, heads, rows), k, r, *pair]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("update", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_recurrence(size: tuple[int, ...], transposed: bool, update: bool) -> None:
    given = operands(size, transposed, update, one_decay=size[0] == 1)
    expected_state = given[0].double()
    expected = reference.recurrence(
        expected_state, *(None if t is None else t.double() for t in given[1:]), transposed=transposed
    )
    state = given[0].clone()
    y = torch.ops.pi2.recurrence(state, *given[1:], transposed)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-5, atol=1e-5)
    alone = [None if t is None else t[-1:].clone() for t in given]
    assert torch.equal(torch.ops.pi2.recurrence(*alone, transposed), y[-1:])
    assert torch.equal(alone[0], state[-1:])
    again, threads = given[0].clone(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(torch.ops.pi2.recurrence(again, *given[1:], transposed), y)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "channels", "length", "taps"), [(1, 1, 1, 1), (2, 300, 3, 4), (1, 6144, 4, 4), (3, 17, 7, 3)]
)
@pytest.mark.parametrize("silu", [True, False])
def test_conv_step(dtype: torch.dtype, batch: int, channels: int, length: int, taps: int, silu: bool) -> None:
    x, weight, bias = torch.randn(batch, channels), torch.randn(channels, taps), torch.randn(channels)
    x, weight, bias, state = (t.to(dtype) for t in (x, weight, bias, torch.randn(batch, channels, length)))
    for b in (bias, None):
        expected_state, before = state.clone(), state.clone()
        expected = reference.conv_step(x, expected_state, weight, b, silu)
        y = torch.ops.pi2.conv_step(x, before, weight, b, silu)
        torch.testing.assert_close(y, expected)
        assert torch.equal(before, expected_state)


def test_opcheck() -> None:
    opcheck(torch.ops.pi2.recurrence.default, (*operands((2, 4, 2, 5, 7), True, True, False), True))
    x, state, weight = torch.randn(2, 5), torch.randn(2, 5, 4), torch.randn(5, 4)
    opcheck(torch.ops.pi2.conv_step.default, (x, state, weight, None, True))


@pytest.mark.parametrize("place", range(7))
def test_recurrence_refuses_other_shapes(place: int) -> None:
    given = operands((2, 4, 2, 5, 7), False, True, False)
    given[place] = given[place][..., :-1]
    with pytest.raises(RuntimeError, match="pi2: "):
        torch.ops.pi2.recurrence(*given)


def test_conv_step_refuses_other_shapes() -> None:
    x, state, weight = torch.randn(2, 5), torch.randn(2, 5, 3), torch.randn(5, 5)
    with pytest.raises(RuntimeError, match="taps"):
        torch.ops.pi2.conv_step(x, state, weight, None, True)
    with pytest.raises(RuntimeError, match="pi2: x"):
        torch.ops.pi2.conv_step(x[:, :4], state, weight[:, :4], None, True)
