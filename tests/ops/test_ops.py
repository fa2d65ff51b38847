"""The operators: registration, every kernel against the readable reference on odd sizes, losslessness, refusals."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from drawn_layers import layer as make
from operators import opcheck

from torch_pi2.base import library as base_library
from torch_pi2.errors import ConfigError, GradientError, LibraryMissingError, UnsupportedModelError
from torch_pi2.observe import counters
from torch_pi2.ops import ACTIVATIONS, library, load
from torch_pi2.ops.activations import Shaped, check_plain, exact_zeros, scaled, shaped
from torch_pi2.ops.operators import REFERENCES

reference = SimpleNamespace(**REFERENCES)

load()
SIZES = [(1, 3, 1, 1), (7, 2, 17, 3), (300, 3, 111, 5), (989, 3, 128, 19), (513, 2, 64, 70)]  # I, R, H, T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_kernel_equals_the_reference(isa: str, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    intermediate, rows, hidden, tokens = size
    tensors = make(intermediate, rows, hidden, tokens, dtype)
    n_hot = intermediate // 3
    mask_TC = torch.rand(tokens, intermediate - n_hot, generator=torch.Generator().manual_seed(1)) < 0.3
    for activation in ACTIVATIONS:
        for active in (None, mask_TC):
            for threshold in (0.0, 0.2):
                settings = (active, activation, rows == 3, n_hot, threshold)
                wanted = reference.sparse_ffn(*tensors, *settings)
                found = torch.ops.pi2.sparse_ffn(*tensors, *settings)
                torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    "text",
    [
        "silu[",
        "silu[]",
        "silu[in=]",
        "silu[in=x]",
        "silu[foo=1]",
        "silu[limit=-1]",
        "silu[in=1.5",
        "tanh[in=2]",
        "silu]",
        "silu[in=nan]",
        "silu[in=1,5]",
    ],
)
def test_what_is_no_activation_is_refused(text: str) -> None:
    assert text not in ACTIVATIONS
    with pytest.raises(KeyError):
        ACTIVATIONS[text]
    with pytest.raises(RuntimeError, match=r"activation: expected relu, .* or identity, found"):
        torch.ops.pi2.sparse_ffn(*make(8, 3, 16, 2, torch.float32), None, text, False, 0, 0.0)


def test_texts_of_activations() -> None:
    assert shaped("silu") == Shaped("silu")
    assert shaped("silu[in=2]") == Shaped("silu", scale_in=2.0)
    assert shaped("silu[plus=1,in=2]") is None  # another order: one activation has one text
    assert shaped("silu[in=1]") is None
    assert Shaped("gelu", 0.1, 1 / 3, 7.0, -1.0).text == "gelu[in=0.1,out=0.333333333,limit=7,plus=-1]"
    assert shaped("gelu[in=0.1,out=0.333333333,limit=7,plus=-1]") == Shaped("gelu", 0.1, 0.333333333, 7.0, -1.0)
    assert scaled("silu[in=2,out=0.5]", 2.0) == "silu[in=2]"
    assert exact_zeros("relu[out=0.5]")
    assert not exact_zeros("silu[limit=7]")
    assert list(ACTIVATIONS) == ["relu", "relu2", "silu", "gelu", "gelu_tanh", "identity"]
    with pytest.raises(
        UnsupportedModelError, match=r"activation silu\[in=2\]: expected one of relu, .*bundles have no"
    ):
        check_plain("silu[in=2]", "bundles")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_is_rounded_once(isa: str, dtype: torch.dtype) -> None:
    x, *weights = make(64, 3, 33, 6, dtype)
    settings = (None, "silu", False, 0, 0.0)
    half = torch.ops.pi2.sparse_ffn(x.to(dtype), *weights, *settings)
    full = torch.ops.pi2.sparse_ffn(x.to(dtype).float(), *weights, *settings)
    assert half.dtype is dtype
    assert torch.equal(half, full.to(dtype))


def test_any_superset_of_the_firing_neurons_is_exact(isa: str) -> None:
    x, *weights = make(400, 3, 64, 5, torch.float32)
    exact = torch.ops.pi2.sparse_ffn(x, *weights, None, "relu", True, 0, 0.0)
    gate_TI = x @ weights[0][:, 0].T + weights[1]
    superset_TI = (gate_TI > -0.1) | (torch.rand(5, 400) < 0.1)
    assert torch.equal(torch.ops.pi2.sparse_ffn(x, *weights, superset_TI, "relu", True, 0, 0.0), exact)


def test_a_mask_of_no_cold_neurons() -> None:
    x, rows = torch.randn(5, 16), torch.randn(7, 3, 16)
    arguments = (x, rows, None, None, None, torch.zeros(5, 0, dtype=torch.bool), "relu", False, 7, 0.0)
    assert torch.allclose(torch.ops.pi2.sparse_ffn(*arguments), reference.sparse_ffn(*arguments), atol=1e-5)


def test_strided_inputs_and_any_leading_shape() -> None:
    x, *weights = make(50, 3, 24, 12, torch.float32)
    settings = (None, "relu", False, 0, 0.0)
    flat = torch.ops.pi2.sparse_ffn(x, *weights, *settings)
    strided = x.T.contiguous().T.reshape(12, 24)
    assert torch.equal(torch.ops.pi2.sparse_ffn(strided.view(12, 24), *weights, *settings), flat)
    assert torch.equal(torch.ops.pi2.sparse_ffn(x.view(3, 4, 24), *weights, *settings), flat.view(3, 4, 24))
    assert torch.ops.pi2.sparse_ffn(x[:0], *weights, *settings).shape == (0, 24)
    assert torch.equal(torch.ops.pi2.sparse_ffn(x[0], *weights, *settings), flat[0])


def test_nan_stays_visible() -> None:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    x[1, 4] = float("nan")
    for active in (None, torch.ones(3, 50, dtype=torch.bool)):
        y = torch.ops.pi2.sparse_ffn(x, *weights, active, "relu", True, 0, 0.0)
        assert y.isnan().any(1).tolist() == [False, True, False]


def predictor(tokens: int = 5, hidden: int = 77, rank: int = 19, cold: int = 530) -> tuple:
    g = torch.Generator().manual_seed(3)
    a = torch.randint(-127, 128, (rank, hidden), dtype=torch.int8, generator=g)
    b = torch.randint(-127, 128, (cold, rank), dtype=torch.int8, generator=g)
    a_scale, b_scale, bias = (torch.rand(n, generator=g) * 0.01 for n in (rank, cold, cold))
    return torch.randn(tokens, hidden, generator=g), a, a_scale, b, b_scale, bias


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 256, 16, 700), (40, 77, 19, 530)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predictor_equals_the_reference(isa: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, *tensors = predictor(*shape)
    x = x.to(dtype)
    threshold = 0.05
    found = torch.ops.pi2.predict_lowrank(x, *tensors, threshold)
    wanted = reference.predict_lowrank(x, *tensors, threshold)
    assert found.shape == (shape[0], shape[3])
    assert found.dtype is torch.bool
    a, a_scale, b, b_scale, bias = tensors
    scores = torch.relu(x.double() @ a.double().T * a_scale) @ b.double().T * b_scale + bias
    near = (scores - threshold).abs() < 1e-4 * scores.abs().max()
    assert torch.equal(found | near, wanted | near)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_reference_has_the_arguments_of_its_operator(name: str) -> None:
    load()
    schema = getattr(torch.ops.pi2, name).default._schema
    own = inspect.signature(REFERENCES[name]).parameters.values()
    wanted = [(a.name.replace("store", "reader"), a.default_value) for a in schema.arguments]
    assert [(p.name, None if p.default is p.empty else p.default) for p in own] == wanted


def test_opcheck_functional_operators() -> None:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    mask = torch.rand(3, 40) < 0.5
    for args in ((x, *weights, None, "relu", True, 3, 0.0), (x, *weights, mask, "silu", False, 10, 0.1)):
        opcheck(torch.ops.pi2.sparse_ffn.default, args)
    opcheck(torch.ops.pi2.predict_lowrank.default, (*predictor(), 0.0))


def out_variants() -> dict[str, tuple]:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    rows = torch.ops.pi2.quantize(torch.randn(5, 24), "int4")
    layer = ("relu", True, 3, 0.0)
    return {
        "sparse_ffn": (x, *weights, None, *layer),
        "predicted_ffn": (x, *weights, [torch.zeros(47, 8).byte()], "signbit", 1.0, "", False, *layer),
        "linear": (x, rows, torch.ones(5), "int4", True),
        "dequantize": (rows, "int4", 24, torch.float32),
    }


@pytest.mark.parametrize("name", out_variants())
def test_out_variants(name: str) -> None:
    # No functionalisation: PyTorch refuses it for custom `Tensor(a!)` returns, which ExecuTorch's .out form needs.
    args, packet = out_variants()[name], getattr(torch.ops.pi2, name)
    wanted = packet(*args)
    out = torch.empty_like(wanted)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(packet.out, args, {"out": out}, test_utils=utils)
    assert packet.out(*args, out=out) is out
    assert torch.equal(out, wanted)
    strided = torch.empty(wanted.shape[::-1]).T
    for wrong in (torch.empty(3, 6), out.double(), strided):
        with pytest.raises(RuntimeError, match=r"pi2: out: expected a contiguous tensor .*, found "):
            packet.out(*args, out=wrong)


def test_gradients_are_refused() -> None:
    x, *weights = make(50, 3, 24, 3, torch.float32)
    with pytest.raises(GradientError, match=r"argument 0 requires grad.*no_grad.*restore"):
        torch.ops.pi2.sparse_ffn(x.requires_grad_(), *weights, None, "relu", True, 3, 0.0)
    with torch.no_grad():
        torch.ops.pi2.sparse_ffn(x, *weights, None, "relu", True, 3, 0.0)
    x, *tensors = predictor()
    with pytest.raises(GradientError, match="predict_lowrank"):
        torch.ops.pi2.predict_lowrank(x.requires_grad_(), *tensors, 0.0)


ROWS = {"neuron_rows": torch.zeros(50, 3, 18, dtype=torch.uint8), "weights": "int4"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 5)}, r"hidden size of x: expected 24 \(the layer's\), found 5"),
        ({"x": torch.zeros(3, 24, dtype=torch.int32)}, "dtype of x: expected float32, bfloat16 or float16"),
        ({"neuron_rows": torch.zeros(50, 4, 24)}, r"expected contiguous \[neurons, 3"),
        ({"bias_up": torch.zeros(49)}, r"shape of bias_up: expected \[50\], found 1 dimensions of 49"),
        ({"bias_up": torch.zeros(50, dtype=torch.float16)}, "dtype of bias_up: expected that of neuron_rows"),
        ({"active": torch.zeros(3, 50)}, "dtype of active: expected bool"),
        ({"active": torch.zeros(47, 3, dtype=torch.bool)}, "shape of active: expected 3 tokens x 47 cold"),
        ({"active": torch.zeros(3, 50, dtype=torch.bool)}, "shape of active: expected 3 tokens x 47 cold"),
        ({"activation": "swish"}, "expected relu, relu2, silu, gelu, gelu_tanh or identity, found 'swish'"),
        ({"n_hot": 51}, "n_hot: expected 0 to 50, found 51"),
        ({"threshold": -1.0}, "threshold: expected 0 or more"),
        ({"weights": "int3"}, "weights: expected float, int4 or int8, found 'int3'"),
        ({"weights": "int4"}, "dtype of neuron_rows: expected uint8 with weights 'int4'"),
        ({"int8_activations": True}, "int8_activations: expected false with float"),
        (ROWS | {"weights": "float"}, "dtype of neuron_rows: expected float32, .* with weights 'float', found uint8"),
        (
            ROWS | {"weights": "int8"},
            r"neuron_rows: expected rows of 34 bytes .*24 of x in int8\), found 18",
        ),
        (ROWS | {"x": torch.zeros(3, 96)}, r"neuron_rows: expected rows of 54 bytes \(hidden size 96"),
        (
            ROWS | {"bias_up": torch.zeros(50).half()},
            r"dtype of bias_up: expected float32 \(the weights are quantised\)",
        ),
        ({"activation": "relu[sigmas=0]"}, "activation_on_up: expected false with sigmas, which are of the gates"),
        ({"activation": "silu[second=1]"}, "activation: expected one without second but for gated neurons"),
        ({"thresholds": torch.zeros(29)}, r"shape of thresholds: expected \[50\], found 1 dimensions of 29"),
        ({"thresholds": torch.zeros(50).double()}, "dtype of thresholds: expected float32, whatever the weights"),
        ({"thresholds": torch.zeros(100)[::2]}, "layout of thresholds: expected contiguous"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_arguments(change: dict, message: str) -> None:
    names = ("x", "neuron_rows", "bias_gate", "bias_up", "bias_down")
    args = dict(zip(names, make(50, 3, 24, 3, torch.float32)))
    args |= {"active": None, "activation": "relu", "activation_on_up": True, "n_hot": 3, "threshold": 0.0} | change
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pi2.sparse_ffn(**args)


def test_counters_count_the_work() -> None:
    x, *weights = make(50, 3, 24, 4, torch.float32)
    mask = torch.zeros(4, 40, dtype=torch.bool)
    mask[0, :7] = True
    counters.reset()
    torch.ops.pi2.sparse_ffn(x, *weights, mask, "relu", True, 10, 0.0)
    done = counters.read()
    assert (done["calls"], done["tokens"], done["neurons"]) == (1, 4, 200)
    assert done["gate_rows"] == 4 * 10 + 7
    assert 0 < done["down_rows"] <= done["up_rows"] < done["gate_rows"]


def test_reading_every_bundle_sees_every_byte() -> None:
    neuron_rows = torch.randn(37, 3, 16)
    everything = torch.ops.pi2.plain_read(neuron_rows, None)
    assert torch.ops.pi2.plain_read(neuron_rows, torch.randperm(37)) == everything
    neuron_rows[11, 2, 5] += 1
    assert torch.ops.pi2.plain_read(neuron_rows, None) != everything
    with pytest.raises(RuntimeError, match="index: expected 0 to 36, found 37"):
        torch.ops.pi2.plain_read(neuron_rows, torch.tensor([1, 37]))


def test_unknown_instruction_set_is_not_selected() -> None:
    before = torch.ops.pi2.kernel_tables()
    assert not torch.ops.pi2.select_kernels("abacus")
    assert torch.ops.pi2.kernel_tables() == before


def test_instruction_set_from_the_environment() -> None:
    code = "import torch; from torch_pi2.ops import load; load(); print(torch.ops.pi2.kernel_tables())"
    env = {"PI2_CPU_CAPABILITY": "scalar", "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip().endswith(":scalar")


def test_misspelt_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI2_CPU_CAPABILITY", "scaler")
    with pytest.raises(ConfigError, match="PI2_CPU_CAPABILITY: expected one of scalar"):
        library._check_instruction_set()


def test_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_library, "_LIBRARY", "libpi2_missing.so")
    with pytest.raises(LibraryMissingError, match=r"libpi2_missing\.so.*no such file.*make install"):
        base_library.library_path()


def test_broken_library_says_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "libpi2_torch.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(base_library, "library_path", lambda: broken)
    monkeypatch.setattr(library, "_fragment", None)
    with pytest.raises(LibraryMissingError, match=r"(file too short|invalid ELF).*Build it again"):
        library.load()
