"""Operators over quantised rows: the formats, C++ against the reference bit for bit, kernels of linear, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ggml_rows import random_rows
from operators import opcheck

from torch_pi2.errors import ConfigError, DtypeError, NonFiniteError, ShapeError
from torch_pi2.formats import FORMATS, GGML, QUANTIZED, row_bytes
from torch_pi2.ops import load
from torch_pi2.ops.linear import from_blocks, to_blocks
from torch_pi2.ops.operators import REFERENCES
from torch_pi2.ops.quantized import quantize
from torch_pi2.ops.rows import values

reference = SimpleNamespace(**REFERENCES)

load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 5), (7, 32), (70, 33), (33, 100), (65, 320)]  # N, K


def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)) * scale


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_and_dequantize_are_the_reference_bit_for_bit(
    kind: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    for scale in (1.0, 1e-6, 1e-9, 300.0, 0.0):
        w = matrix(*size, scale).to(dtype)
        rows = torch.ops.pi2.quantize(w, kind)
        assert rows.shape == (size[0], row_bytes(kind, size[1]))
        assert torch.equal(rows, reference.quantize(w, kind))
        for out in DTYPES:
            wanted = reference.dequantize(rows, kind, size[1], out)
            assert torch.equal(torch.ops.pi2.dequantize(rows, kind, size[1], out), wanted)


def test_bytes_are_as_documented() -> None:
    """Built by hand: integers -8 to 7 at both ends of the nibbles, and the float16 scale behind all values."""
    integers = torch.arange(32) % 16 - 8.0
    rows = torch.ops.pi2.quantize(0.5 * integers[None], "int4")
    low, high = integers[:16] + 8, integers[16:] + 8
    assert rows[0, :16].tolist() == (low + 16 * high).int().tolist()
    assert rows[0, 16:].view(torch.float16).tolist() == [0.5]
    assert torch.equal(values(rows, "int4", 32)[0], 0.5 * integers)
    rows = torch.ops.pi2.quantize(torch.tensor([[127.0, -127.0, 3.0]]), "int8")
    assert rows[0, :3].view(torch.int8).tolist() == [127, -127, 3]
    assert rows[0, 3:32].tolist() == [0] * 29
    assert [FORMATS[kind].bits_per_weight for kind in QUANTIZED] == [4.5, 8.5]


@pytest.mark.parametrize(("kind", "bound"), [("int4", 0.084), ("int8", 0.006)])
def test_error_on_normal_weights(kind: str, bound: float) -> None:
    """A scale of |v| / 8 alone gives 0.086 with int4."""
    w = matrix(64, 512)
    off = torch.ops.pi2.dequantize(torch.ops.pi2.quantize(w, kind), kind, 512, torch.float32) - w
    assert float(off.norm() / w.norm()) < bound


def drawn_rows(kind: str, rows: int, columns: int) -> torch.Tensor:
    if kind in GGML:
        return random_rows(kind, rows, columns, columns**-0.5)
    quantised: torch.Tensor = torch.ops.pi2.quantize(matrix(rows, columns, columns**-0.5), kind)
    return quantised


@pytest.mark.parametrize("kind", [*QUANTIZED, *GGML])
def test_strided_rows_and_nan(isa: str, kind: str) -> None:
    columns = 2 * (FORMATS[kind].block or 32)
    several = torch.stack([drawn_rows(kind, 9, columns), drawn_rows(kind, 9, columns)], 1)
    found = torch.ops.pi2.dequantize(several[:, 1], kind, columns, torch.float32)
    assert torch.equal(found, values(several[:, 1], kind, columns))
    for tokens, int8_activations in ((3, False), (3, True), (13, True)):
        x = matrix(tokens, columns)
        x[1, 5] = float("nan")
        y = torch.ops.pi2.linear(x, several[:, 0].contiguous(), None, kind, int8_activations)
        assert y.isnan().all(1).tolist() == y.isnan().any(1).tolist() == [token == 1 for token in range(tokens)]


@pytest.mark.parametrize("kind", [*QUANTIZED, *GGML])
@pytest.mark.parametrize("int8_activations", [False, True])
def test_linear_equals_the_reference(isa: str, kind: str, int8_activations: bool) -> None:
    generator, block = torch.Generator().manual_seed(2), FORMATS[kind].block
    sizes = [(1, block), (7, 2 * block), (33, 3 * block), (70, 5 * block)] if block else [*SIZES, (130, 1024)]
    for rows, columns in sizes:
        quantised = drawn_rows(kind, rows, columns)
        bias = torch.randn(rows, generator=generator)
        for tokens in (1, 3, 70):
            for dtype in DTYPES:
                x = torch.randn(tokens, columns, generator=generator).to(dtype)
                for b in (None, bias):
                    args = (x, quantised, b, kind, int8_activations)
                    found, wanted = torch.ops.pi2.linear(*args), reference.linear(*args)
                    assert found.dtype is dtype
                    rounding = 2e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
                    torch.testing.assert_close(
                        found.float(), wanted.float(), rtol=0, atol=rounding * (1 + float(wanted.abs().max()))
                    )


def takes_blocks(kind: str = "int4") -> bool:
    """Whether the kernels that are chosen now do (``constants`` keeps what it read first)."""
    said = dict(part.split("=") for part in torch.ops.pi2.constants().split())
    return bool(int(said["blocks"]) >> FORMATS[kind].code & 1)


@pytest.mark.parametrize("kind", [*QUANTIZED, *GGML])
def test_linear_blocks_equals_the_reference_and_a_token_alone(isa: str, kind: str) -> None:
    generator, threads = torch.Generator().manual_seed(3), torch.get_num_threads()
    for rows, columns in (
        ((16, 256), (48, 768), (144, 2304)) if FORMATS[kind].block == 256 else ((16, 64), (48, 192), (144, 1088))
    ):
        quantised = drawn_rows(kind, rows, columns)
        blocks, bias = to_blocks(quantised, kind, columns), torch.randn(rows, generator=generator)
        assert torch.equal(from_blocks(blocks, kind, columns), quantised)
        x_TK = torch.randn(71, columns, generator=generator)
        if not takes_blocks(kind):
            with pytest.raises(RuntimeError, match=f"expected .* kernels that take blocks, found .* kernels for {isa}"):
                torch.ops.pi2.linear_blocks(x_TK, blocks, bias, kind)
            continue
        for dtype in DTYPES:
            for b in (None, bias):
                alone = torch.cat([torch.ops.pi2.linear_blocks(x[None], blocks, b, kind) for x in x_TK.to(dtype)])
                wanted = reference.linear_blocks(x_TK.to(dtype), blocks, b, kind)
                rounding = 2e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    alone.float(), wanted.float(), rtol=0, atol=rounding * (1 + float(wanted.abs().max()))
                )
                for tokens in (2, 3, 7, 8, 12, 48, 49, 71):  # the prompt's panels, too
                    found = torch.ops.pi2.linear_blocks(x_TK[:tokens].to(dtype), blocks, b, kind)
                    assert found.dtype is dtype
                    assert torch.equal(found, alone[:tokens])
        torch.set_num_threads(1)
        assert torch.equal(torch.ops.pi2.linear_blocks(x_TK.to(dtype), blocks, bias, kind), alone)
        torch.set_num_threads(threads)


@pytest.mark.skipif(not takes_blocks(), reason="this CPU has no kernels for blocks")
def test_linear_blocks_refuses_what_is_not_whole() -> None:
    for rows, columns in ((17, 64), (16, 96)):
        quantised = torch.ops.pi2.quantize(matrix(rows, columns), "int4")
        with pytest.raises(
            RuntimeError, match=f"multiple of 16 rows and of 64 columns.* found {rows} rows, {columns} c"
        ):
            torch.ops.pi2.linear_blocks(matrix(1, columns), quantised, None, "int4")
    blocks = torch.ops.pi2.quantize(matrix(16, 64), "int4")
    opcheck(torch.ops.pi2.linear_blocks.default, (matrix(3, 64), blocks, torch.ones(16), "int4"))
    for kind in filter(takes_blocks, ("q4_k", "q5_0")):
        stored = to_blocks(random_rows(kind, 16, 256), kind, 256)
        opcheck(torch.ops.pi2.linear_blocks.default, (matrix(3, 256), stored, torch.ones(16), kind))
    x = matrix(3, 64)
    x[1, 5] = float("nan")
    assert torch.ops.pi2.linear_blocks(x, blocks, None, "int4").isnan().all(1).tolist() == [False, True, False]


def test_opcheck() -> None:
    w, x = matrix(5, 40), matrix(3, 40)
    opcheck(torch.ops.pi2.quantize.default, (w, "int4"))
    for kind in QUANTIZED:
        rows = torch.ops.pi2.quantize(w, kind)
        opcheck(torch.ops.pi2.dequantize.default, (rows, kind, 40, torch.bfloat16))
        opcheck(torch.ops.pi2.linear.default, (x, rows, torch.ones(5), kind, False))
        opcheck(torch.ops.pi2.linear.default, (x[None], rows, None, kind, True))


def test_refusals_of_the_operators() -> None:
    rows = torch.ops.pi2.quantize(matrix(5, 40), "int4")
    with pytest.raises(RuntimeError, match=r"weights: expected int4 or int8, found 'int3'"):
        torch.ops.pi2.quantize(matrix(5, 40), "int3")
    with pytest.raises(RuntimeError, match=r"pi2: rows: expected contiguous uint8 5 x 72 .*rows of 100 int4 numbers"):
        torch.ops.pi2.linear(torch.ones(2, 100), rows, None, "int4", False)
    with pytest.raises(RuntimeError, match=r"pi2: rows: .* found another dtype, \[5, 36\]"):
        torch.ops.pi2.linear(torch.ones(2, 40), rows.char(), None, "int4", False)
    with pytest.raises(RuntimeError, match=r"pi2: rows: .* found strided, \[5, 36\]"):
        torch.ops.pi2.linear(torch.ones(2, 40), rows.T.contiguous().T, None, "int4", False)
    with pytest.raises(RuntimeError, match=r"uint8 \[rows, 36\] for 40 columns of int4"):
        torch.ops.pi2.dequantize(rows[:, :-1], "int4", 40, torch.float32)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_refuses_what_no_integer_stands_for(kind: str, dtype: torch.dtype) -> None:
    w = matrix(70, 100).to(dtype)
    for bad, shown in ((float("nan"), "NaN"), (float("inf"), "inf"), (float("-inf"), "-inf")):
        broken = w.clone()
        broken[69, 2] = broken[66, 99] = broken[66, 98] = bad  # the first is named, whichever thread met one
        with pytest.raises(RuntimeError, match=rf"w: expected finite .*found {shown} in row 66, column 98\. Check"):
            torch.ops.pi2.quantize(broken, kind)


def test_quantize_refuses_weights_out_of_range() -> None:
    w = matrix(4, 40)
    w[2, 39] = -524064.0
    with pytest.raises(RuntimeError, match=r"at most 524032 \(int4 .*, found -524064 in row 2, column 39"):
        torch.ops.pi2.quantize(w, "int4")
    w[2, 39] = 524032.0  # the scale is the largest float16
    assert torch.equal(torch.ops.pi2.quantize(w, "int4"), reference.quantize(w, "int4"))
    assert torch.isfinite(values(torch.ops.pi2.quantize(w, "int4"), "int4", 40)).all()
    w[2, 39] = 8319009.0
    with pytest.raises(RuntimeError, match=r"at most 8319008 \(int8 "):
        torch.ops.pi2.quantize(w, "int8")


def test_refusals_of_the_python_face() -> None:
    w = matrix(4, 40)
    with pytest.raises(ConfigError, match=r"weights: expected int4 or int8, found 'float'"):
        quantize("w", w, "float")
    with pytest.raises(DtypeError, match=r"dtype of w: expected float32, bfloat16 or float16, found float64"):
        quantize("w", w.double(), "int4")
    with pytest.raises(ShapeError, match=r"w: expected \[rows, columns\], found \(40,\)"):
        quantize("w", w[0], "int4")
    for bad in (float("nan"), float("-inf")):
        broken = w.clone()
        broken[2, 3] = bad
        with pytest.raises(NonFiniteError, match=r"values of layers.7.q_proj: .* found 1 NaN or infinite of 160"):
            quantize("layers.7.q_proj", broken, "int8")
    with pytest.raises(NonFiniteError, match=r"at most 524032, for int4 with float16 scales, found 600000"):
        quantize("w", torch.full((1, 32), 6e5), "int4")
    assert torch.isfinite(values(quantize("w", torch.full((1, 32), 5.2e5), "int4"), "int4", 32)).all()
