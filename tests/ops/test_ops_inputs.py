"""``sparse_input_linear``: against its reference and the dense layer, on odd sizes; bits; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_layers import quantised
from operators import opcheck

from torch_pi2.ops import linear as reference
from torch_pi2.ops import load

load()
FORMATS = ["float32", "bfloat16", "float16", "int4", "int8"]
SIZES = [(1, 1, 1), (1, 77, 111), (3, 300, 33), (7, 65, 1), (70, 130, 2050), (1, 1030, 64)]


def layer(form: str, tokens: int, channels: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """x, rows, bias, and the operator's name of the format."""
    g = torch.Generator().manual_seed(3)
    x, bias = torch.randn(tokens, channels, generator=g), torch.randn(outputs, generator=g)
    if form in ("int4", "int8"):
        return x, quantised(channels, outputs, weights=form, seed=4), bias, form
    rows = torch.randn(channels, outputs, generator=g) * channels**-0.5
    return x, rows.to(getattr(torch, form)), bias, "float"


def masks(x: torch.Tensor) -> list[torch.Tensor | None]:
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[0] = False
    return [None, mask]


def check(*call: Any, relative: float = 1e-5) -> torch.Tensor:
    found: torch.Tensor = torch.ops.pi2.sparse_input_linear(*call)
    wanted = reference.sparse_input_linear(*call)
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=relative, atol=relative * float(wanted.abs().max()) + 1e-7)
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_follows_the_reference(isa: str, form: str, size: tuple[int, int, int]) -> None:
    x, rows, bias, weights = layer(form, *size)
    for active in masks(x):
        for threshold in (0.0, 0.7):
            found = check(x, rows, size[2], bias, active, threshold, weights)
            check(x, rows, size[2], None, active, threshold, weights)
            if active is not None:
                assert torch.equal(found[0], bias)  # a token without any channel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_inputs_and_leading_sizes(dtype: torch.dtype) -> None:
    x, rows, bias, weights = layer("int4", 6, 130, 75)
    x = x.to(dtype).view(2, 3, 130)
    found = check(x, rows, 75, bias, torch.rand(2, 3, 130) < 0.5, 0.3, weights, relative=2**-7)
    assert found.shape == (2, 3, 75)
    assert torch.ops.pi2.sparse_input_linear(x[:, :0], rows, 75, bias, None, 0.3, weights).shape == (2, 0, 75)
    strided = torch.randn(130, 6).T
    check(strided, rows, 75, bias, (torch.rand(130, 6) < 0.5).T, 0.3, weights)


@pytest.mark.parametrize("form", FORMATS)
def test_bits_depend_on_neither_company_nor_threads(isa: str, form: str) -> None:
    x, rows, bias, weights = layer(form, 70, 1100, 1060)
    active = masks(x)[1]
    assert active is not None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = torch.ops.pi2.sparse_input_linear(x, rows, 1060, bias, active, 0.2, weights)
        for count in (1, 2):
            torch.set_num_threads(count)
            for t in (0, 1, 40, 64, 69):
                one = slice(t, t + 1)
                alone = torch.ops.pi2.sparse_input_linear(x[one], rows, 1060, bias, active[one], 0.2, weights)
                assert torch.equal(alone, together[one])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMATS)
def test_all_channels_are_the_dense_layer(form: str) -> None:
    x, rows, bias, weights = layer(form, 5, 96, 77)
    dense = rows.float() if weights == "float" else torch.ops.pi2.dequantize(rows, weights, 77, torch.float32)
    found = torch.ops.pi2.sparse_input_linear(x, rows, 77, bias, None, 0.0, weights)
    torch.testing.assert_close(found, x @ dense + bias, rtol=1e-4, atol=1e-5)


def test_rows_of_other_channels_are_not_read() -> None:
    """They are not even zero times a number: that would be NaN here. NaN in an input shows."""
    x, rows, _, _ = layer("float32", 2, 40, 9)
    rows[7:] = torch.nan
    active = torch.zeros(2, 40, dtype=torch.bool)
    active[:, :7] = True
    found = torch.ops.pi2.sparse_input_linear(x, rows, 9, None, active)
    torch.testing.assert_close(found, x[:, :7] @ rows[:7])
    x[:, 7:] = 0.5
    assert torch.ops.pi2.sparse_input_linear(x, rows, 9, None, None, 0.5).isfinite().all()
    x[1, 3] = torch.nan
    found = torch.ops.pi2.sparse_input_linear(x, rows, 9, None, None, 1e9)
    assert torch.equal(found[0], torch.zeros(9))
    assert found[1].isnan().all()


def test_opcheck() -> None:
    for form in FORMATS:
        x, rows, bias, weights = layer(form, 6, 70, 45)
        mask = torch.rand(2, 3, 70) < 0.5
        opcheck(torch.ops.pi2.sparse_input_linear.default, (x.view(2, 3, 70), rows, 45, bias, mask, 0.1, weights), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.zeros(2, 71)},
            r"rows: expected contiguous \[71 channels, 36\] \(45 outputs in int4\), found \[70",
        ),
        ({"x": torch.zeros(2, 70).double()}, "dtype of x: expected float32, bfloat16 or float16"),
        ({"x": torch.tensor(1.0)}, r"x and outputs: expected \[..., channels\] and 1 or more, found \[\] and 45"),
        ({"outputs": 0}, r"1 or more, found \[2, 70\] and 0"),
        ({"outputs": 65}, r"rows: expected contiguous \[70 channels, 54\].*found"),
        (
            {"weights": "float"},
            "dtype of rows: expected float32, bfloat16 or float16 with weights 'float', found uint8",
        ),
        ({"weights": "q4_k"}, "weights: expected float, int4 or int8, found 'q4_k'"),
        ({"bias": torch.zeros(44)}, r"shape of bias: expected \[45\]"),
        ({"active": torch.zeros(2, 70)}, "dtype of active: expected bool"),
        ({"active": torch.zeros(1, 70).bool()}, "shape of active: expected 2 tokens x 70"),
        ({"threshold": -0.1}, "threshold: expected 0 or more, found -0.1"),
        ({"threshold": float("nan")}, "threshold: expected 0 or more, found -?nan"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    sound = {"x": torch.zeros(2, 70), "rows": quantised(70, 45, weights="int4"), "outputs": 45, "bias": None}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pi2.sparse_input_linear(**sound | {"active": None, "threshold": 0.0, "weights": "int4"} | change)
