"""Rows in ggml's blocks, as GGUF files have them: another reader's numbers bit for bit, linear layers, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import pytest
import torch
from ggml_rows import gguf_values, random_rows
from gguf import quants
from operators import opcheck

from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.formats import FORMATS, GGML, QUANTIZED, row_bytes
from torch_pi2.ops import load
from torch_pi2.ops.constants import constants
from torch_pi2.ops.operators import REFERENCES
from torch_pi2.ops.quantized import quantize
from torch_pi2.ops.rows import row_of_neurons, values

reference = SimpleNamespace(**REFERENCES)

load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = [1, 2, 3, 5, 13]


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_numbers_are_those_of_the_package_gguf_bit_for_bit(kind: str, blocks: int) -> None:
    columns = blocks * FORMATS[kind].block
    for rows in (1, 3, 33):
        stored = random_rows(kind, rows, columns)
        assert stored.shape == (rows, row_bytes(kind, columns))
        wanted = gguf_values(stored, kind)
        assert rows < 33 or wanted.count_nonzero() > 0.5 * wanted.numel()
        assert torch.equal(torch.ops.pi2.dequantize(stored, kind, columns, torch.float32), wanted)
        assert torch.equal(reference.dequantize(stored, kind, columns, torch.float32), wanted)
        for dtype in (torch.bfloat16, torch.float16):
            found = torch.ops.pi2.dequantize(stored, kind, columns, dtype)
            assert found.dtype is dtype
            assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("kind", ["q4_1", "q5_0", "q5_1"])
def test_what_the_package_gguf_quantises_is_near_its_weights(kind: str) -> None:
    w = torch.randn(7, 160, generator=torch.Generator().manual_seed(1))
    rows = torch.from_numpy(quants.quantize(w.numpy(), gguf.GGMLQuantizationType[kind.upper()]))
    off = torch.ops.pi2.dequantize(rows, kind, 160, torch.float32) - w
    assert float(off.norm() / w.norm()) < (0.09 if kind == "q4_1" else 0.05)


def test_bytes_of_the_formats_are_ggmls_own() -> None:
    for kind in GGML:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        assert (FORMATS[kind].block, FORMATS[kind].block_bytes) == (block, size)
        assert FORMATS[kind].bits_per_weight == 8 * size / block
        assert row_bytes(kind, 3 * block) == 3 * size
    assert QUANTIZED == ("int4", "int8")


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("int8_activations", [False, True])
def test_threads_and_company_change_no_bit(isa: str, kind: str, int8_activations: bool) -> None:
    columns, threads = 3 * FORMATS[kind].block, torch.get_num_threads()
    stored = random_rows(kind, 131, columns)
    x_TK = torch.randn(71, columns, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([torch.ops.pi2.linear(x[None], stored, None, kind, int8_activations) for x in x_TK])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for tokens in (1, 2, 3, 5, 11):
            found = torch.ops.pi2.linear(x_TK[:tokens], stored, None, kind, int8_activations)
            assert torch.equal(found, alone[:tokens])
    many = torch.ops.pi2.linear(x_TK, stored, None, kind, int8_activations)
    torch.set_num_threads(1)
    for tokens in (12, 13, 31, 71):  # from 12 on with int8 activations in another order, the same for all
        assert torch.equal(torch.ops.pi2.linear(x_TK[:tokens], stored, None, kind, int8_activations), many[:tokens])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", GGML)
def test_opcheck(kind: str) -> None:
    columns = FORMATS[kind].block
    x, rows = torch.randn(3, columns), random_rows(kind, 5, columns)
    opcheck(torch.ops.pi2.dequantize.default, (rows, kind, columns, torch.bfloat16))
    opcheck(torch.ops.pi2.linear.default, (x, rows, torch.ones(5), kind, False))
    opcheck(torch.ops.pi2.linear.default, (x[None], rows, None, kind, True))
    out = torch.ops.pi2.linear.out(x, rows, None, kind, True, out=torch.empty(3, 5))
    assert torch.equal(out, torch.ops.pi2.linear(x, rows, None, kind, True))


def test_linear_refuses_what_is_no_whole_block() -> None:
    rows = random_rows("q4_k", 5, 512)
    fault = r"columns of q4_k: expected a multiple of 256 \(its blocks\), found 300\. Pass the columns that the rows"
    with pytest.raises(RuntimeError, match=f"pi2: {fault}"):
        torch.ops.pi2.linear(torch.ones(2, 300), rows, None, "q4_k", False)
    with pytest.raises(RuntimeError, match=f"pi2: {fault}"):
        torch.ops.pi2.dequantize(rows, "q4_k", 300, torch.float32)
    with pytest.raises(ShapeError, match=fault):
        row_bytes("q4_k", 300)
    with pytest.raises(RuntimeError, match=r"pi2: rows: expected contiguous uint8 5 x 144 .*rows of 256 q4_k numbers"):
        torch.ops.pi2.linear(torch.ones(2, 256), rows, None, "q4_k", False)
    with pytest.raises(RuntimeError, match=r"uint8 \[rows, 144\] for 256 columns of q4_k"):
        torch.ops.pi2.dequantize(rows, "q4_k", 256, torch.float32)


@pytest.mark.parametrize("kind", GGML)
def test_neurons_and_quantize_refuse_them_by_name(kind: str) -> None:
    columns = FORMATS[kind].block
    x, rows = torch.ones(2, columns), random_rows(kind, 16, columns)
    only = rf"found '{kind}'\. Blocks of GGUF files are for torch\.ops\.pi2\.linear and dequantize, and for gate and up"
    with pytest.raises(RuntimeError, match=rf"weights: expected int4 or int8, {only}"):
        torch.ops.pi2.quantize(torch.ones(4, columns), kind)
    if not constants().blocks >> FORMATS[kind].code & 1:
        what = f"kernels that take blocks, found 16 rows, {columns} columns of {kind} and kernels for"
        with pytest.raises(RuntimeError, match=what):
            torch.ops.pi2.linear_blocks(x, rows, None, kind)
    with pytest.raises(RuntimeError, match=rf"weights: expected float, int4 or int8, {only}"):
        torch.ops.pi2.sparse_ffn(x, rows.view(8, 2, -1), None, None, None, None, "relu", False, 0, 0.0, kind, False)
    with pytest.raises(RuntimeError, match=rf"weights: expected float, int4 or int8, {only}"):
        torch.ops.pi2.experts_ffn(
            x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), rows.view(2, 4, 2, -1), [], "none", [], "",
            False, "relu", False, [], kind, False,
        )  # fmt: skip
    with pytest.raises(ConfigError, match=rf"weights: expected int4 or int8, found '{kind}'\. .*nothing is quantised"):
        quantize("w", torch.ones(4, columns), kind)


def neurons(first: str, down: str, count: int, rows: int, hidden: int) -> torch.Tensor:
    """uint8 ``[count, bytes]``: gate (if ``rows`` is 3) and up rows in ``first``, down rows in ``down``."""

    def stored(kind: str, seed: int) -> torch.Tensor:
        if kind in GGML:
            return random_rows(kind, count + seed, hidden, hidden**-0.5)[seed:]
        w = torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)) * hidden**-0.5
        return torch.ops.pi2.quantize(w, kind)

    return torch.cat([*(stored(first, r) for r in range(rows - 1)), stored(down, 9)], 1)


@pytest.mark.parametrize(
    ("first", "down"), [*((f, d) for f in (*GGML, "int4", "int8") for d in QUANTIZED), ("tq2_0", "tq2_0")]
)
def test_sparse_ffn_with_down_rows_in_another_format(isa: str, first: str, down: str) -> None:
    generator, threads = torch.Generator().manual_seed(5), torch.get_num_threads()
    hidden, weights = 256, f"{first}+{down}"
    for rows, count in ((3, 85), (2, 40)):
        neuron_rows = neurons(first, down, count, rows, hidden)
        bias = [torch.randn(n, generator=generator) for n in (count, count, hidden)]
        biases = (bias[0] if rows == 3 else None, *bias[1:])
        for tokens in (1, 5, 14, 70):
            x = torch.randn(tokens, hidden, generator=generator)
            for int8_activations in (False, True):
                args = (x, neuron_rows, *biases, None, "relu", False, 7, 0.0, weights, int8_activations)
                found, wanted = torch.ops.pi2.sparse_ffn(*args), reference.sparse_ffn(*args)
                torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * (1 + float(wanted.abs().max())))
                torch.set_num_threads(1)
                assert torch.equal(torch.ops.pi2.sparse_ffn(*args), found)
                torch.set_num_threads(threads)


def test_opcheck_of_neurons_in_two_formats() -> None:
    neuron_rows = neurons("q4_k", "int8", 8, 3, 256)
    settings = (None, "relu", False, 2, 0.0, "q4_k+int8", True)
    opcheck(torch.ops.pi2.sparse_ffn.default, (torch.randn(3, 256), neuron_rows, None, None, None, *settings))


@pytest.mark.parametrize(("first", "hidden"), [("q4_1", 96), ("q5_0", 32), ("q5_1", 160), ("q4_k", 256), ("q6_k", 512)])
def test_experts_in_two_formats(isa: str, first: str, hidden: int) -> None:
    generator, experts = torch.Generator().manual_seed(6), 3
    for rows, count in ((3, 37), (2, 70)):
        each = [neurons(first, "int8", count + e, rows, hidden)[e:] for e in range(experts)]
        biases = [torch.randn(experts, n, generator=generator) for n in (count, count, hidden)]
        for tokens in (1, 4, 33):
            x = torch.randn(tokens, hidden, generator=generator)
            index = torch.randint(0, experts + 1, (tokens, 2), generator=generator)
            routing = torch.rand(tokens, 2, generator=generator)
            for int8_activations in (False, True):
                settings = ([], "none", [], "", False, "relu", False, [], f"{first}+int8", int8_activations)
                args = (x, index, routing, torch.stack(each), *settings, biases[0] if rows == 3 else None, *biases[1:])
                found, wanted = torch.ops.pi2.experts_ffn(*args), reference.experts_ffn(*args)
                torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * (1 + float(wanted.abs().max())))


def test_opcheck_and_refusals_of_experts_in_two_formats() -> None:
    stack = torch.stack([neurons("q4_k", "int8", 8, 3, 256)] * 2)
    routed = (torch.randn(3, 256), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    settings = ([], "none", [], "", False, "relu", False, [], "q4_k+int8", True)
    opcheck(torch.ops.pi2.experts_ffn.default, (*routed, stack, *settings))
    shape = r"neuron_rows: expected (contiguous )?\[experts, neurons, bytes\]"
    with pytest.raises(RuntimeError, match=rf"pi2: {shape}, none of them 0, found \[2, 8, 1, 560\]"):
        torch.ops.pi2.experts_ffn(*routed, stack[:, :, None], *settings)
    with pytest.raises(RuntimeError, match=r"neuron_rows: expected .*\[neurons, 560 .*found \[8, 559\]"):
        torch.ops.pi2.experts_ffn(*routed, stack[:, :, 1:].contiguous(), *settings)


def test_rows_of_neurons_in_two_formats() -> None:
    """Views, whatever R is; of one format, too."""
    for rows in (2, 3):
        both = neurons("q5_0", "int8", 5, rows, 96)
        parts = [row_of_neurons(both, r, "q5_0+int8", 96) for r in range(rows)]
        assert [kind for _, kind in parts] == ["q5_0"] * (rows - 1) + ["int8"]
        assert torch.equal(torch.cat([part for part, _ in parts], 1), both)
        assert all(part.untyped_storage().data_ptr() == both.data_ptr() for part, _ in parts)
    one = torch.zeros(5, 3, 54, dtype=torch.uint8)
    assert row_of_neurons(one, 2, "int4", 96)[1] == "int4"
    assert row_of_neurons(one, 2, "int4", 96)[0].shape == (5, 54)


def test_neurons_in_two_formats_are_refused_by_name() -> None:
    x, neuron_rows = torch.ones(2, 256), neurons("q4_k", "int8", 8, 3, 256)

    def call(weights: str, rows: torch.Tensor = neuron_rows, bias_down: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = torch.ops.pi2.sparse_ffn(
            x.to(rows.device), rows, None, None, bias_down, None, "relu", False, 0, 0.0, weights, False
        )
        return found

    sizes = r"neuron_rows: expected .*\[neurons, 560 \(gate, up, down\) or 416 \(up, down\)\].* q4_k\+int8"
    with pytest.raises(RuntimeError, match=rf"pi2: {sizes}\), found \[8, 559\]\. Put the bytes"):
        call("q4_k+int8", neuron_rows[:, 1:].contiguous())
    with pytest.raises(RuntimeError, match=rf"pi2: {sizes}\), found another layout or dtype, \[8, 1, 560\]"):
        call("q4_k+int8", neuron_rows[:, None])
    for weights, found in (
        ("q4_k+q6_k", "q6_k"),
        ("q4_k+tq2_0", "tq2_0"),
        ("q4_k+float", "float"),
        ("float+int8", "float"),
        ("+int8", ""),
    ):
        with pytest.raises(RuntimeError, match=rf"weights: expected int4(,| or) int8.*, found '{found}'"):
            call(weights)
    with pytest.raises(RuntimeError, match=r"dtype of bias_down: expected float32 \(the weights are quantised\)"):
        call("q4_k+int8", bias_down=torch.ones(256, dtype=torch.bfloat16))


def test_values_of_rows_in_any_shape() -> None:
    rows = random_rows("q6_k", 6, 512)
    assert torch.equal(values(rows.view(2, 3, -1), "q6_k", 512), gguf_values(rows, "q6_k").view(2, 3, -1))
