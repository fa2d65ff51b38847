"""Predictors, predicted layers and quantised neurons as operators: against the references, on odd sizes; refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drawn_layers import quantised
from operators import opcheck

from torch_pi2.ops import load, rows
from torch_pi2.ops.constants import constants
from torch_pi2.ops.linear import to_blocks
from torch_pi2.ops.operators import REFERENCES
from torch_pi2.predict.signbit import pack_signs

reference = SimpleNamespace(**REFERENCES)

load()
FORMATS = [("int4", False), ("int4", True), ("int8", False), ("int8", True)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer(weights: str, neurons: int = 300, rows_: int = 3, hidden: int = 111, tokens: int = 5) -> tuple:
    g = generator(2)
    biases = (
        torch.randn(neurons, generator=g) if rows_ == 3 else None,
        torch.randn(neurons, generator=g),
        torch.randn(hidden, generator=g),
    )
    x = torch.randn(tokens, hidden, generator=g)
    if weights == "float":
        return x, torch.randn(neurons, rows_, hidden, generator=g) * hidden**-0.5, *biases
    return x, quantised(neurons, rows_, hidden, weights=weights), *biases


def test_rounded_activations() -> None:
    x = torch.tensor([[127.0, -63.4, 0.5, 1.5, *[0.0] * 28, 2.0], [float("nan"), *[1.0] * 31, 0.0]])
    found = rows.rounded_activations(x)
    torch.testing.assert_close(found[0, :4], torch.tensor([127.0, -63.0, 0.0, 2.0]))  # ties to even
    assert found[0, 32] == 2.0
    assert found[1, :32].isnan().all()
    assert found[1, 32] == 0


@pytest.mark.parametrize(("weights", "int8_activations"), FORMATS)
@pytest.mark.parametrize("size", [(1, 3, 1, 1), (300, 3, 111, 5), (513, 2, 64, 70), (70, 3, 320, 1)], ids=str)
def test_quantised_layer_equals_the_reference(isa: str, weights: str, int8_activations: bool, size: tuple) -> None:
    tensors = layer(weights, *size)
    n_hot = size[0] // 3
    mask_TC = torch.rand(size[3], size[0] - n_hot, generator=generator(1)) < 0.3
    for active in (None, mask_TC):
        for activation, threshold in (("relu", 0.0), ("silu", 0.2)):
            settings = (active, activation, size[1] == 3, n_hot, threshold, weights, int8_activations)
            wanted = reference.sparse_ffn(*tensors, *settings)
            found = torch.ops.pi2.sparse_ffn(*tensors, *settings)
            torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6 * float(wanted.abs().max()) + 1e-7)


@pytest.mark.parametrize(("weights", "int8_activations"), [("float", False), *FORMATS])
@pytest.mark.parametrize(("neurons", "tokens"), [(700, 9), (5000, 70)])
def test_layer_does_not_depend_on_company_or_threads(
    isa: str, weights: str, int8_activations: bool, neurons: int, tokens: int
) -> None:
    x, *tensors = layer(weights, neurons, 3, 96, tokens)
    settings = ("relu", True, 100, 0.0, weights, int8_activations)
    mask_TC = torch.rand(tokens, neurons - 100, generator=generator(3)) < 0.2
    together = torch.ops.pi2.sparse_ffn(x, *tensors, mask_TC, *settings)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for t in range(tokens):
            alone = torch.ops.pi2.sparse_ffn(x[t], *tensors, mask_TC[t], *settings)
            assert torch.equal(alone, together[t])
    finally:
        torch.set_num_threads(before)


def lowrank_q(weights: str, tokens: int = 5, hidden: int = 77, rank: int = 40, cold: int = 530) -> tuple:
    g = generator(5)
    a = quantised(rank, hidden, weights=weights, seed=3)
    b = quantised(cold, rank, weights=weights, seed=4)
    return torch.randn(tokens, hidden, generator=g), a, b, torch.randn(cold, generator=g)


@pytest.mark.parametrize(("weights", "int8_activations"), FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 256, 33, 700), (70, 77, 40, 530)], ids=str)
def test_quantised_predictor_equals_the_reference(isa: str, weights: str, int8_activations: bool, shape: tuple) -> None:
    x, a, b, bias = lowrank_q(weights, *shape)
    for bias_or_none in (bias, None):
        found = torch.ops.pi2.predict_lowrank_q(x, a, b, bias_or_none, weights, int8_activations, 0.05)
        wanted = reference.predict_lowrank_q(x, a, b, bias_or_none, weights, int8_activations, 0.05)
        assert found.shape == (shape[0], shape[3])
        # Scores at the threshold may round either way: to int8 by a step, else in the last bits.
        assert float((found != wanted).float().mean()) <= (0.005 if int8_activations else 0.0005)


def in_blocks(a: torch.Tensor, b: torch.Tensor, weights: str, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In blocks of 16 rows, b filled up by rows before its own."""
    filled = torch.cat((b[: -len(b) % 16], b))
    return to_blocks(a, weights, hidden), to_blocks(filled, weights, len(a))


needs_blocks = pytest.mark.skipif(not constants().blocks, reason="no kernels for blocks on this CPU")


@needs_blocks
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("shape", [(1, 64, 64, 700), (3, 256, 128, 16), (70, 128, 64, 535)], ids=str)
def test_a_predictor_in_blocks_equals_the_reference(weights: str, shape: tuple[int, int, int, int]) -> None:
    x, a, b, bias = lowrank_q(weights, *shape)
    blocks = in_blocks(a, b, weights, shape[1])
    found = torch.ops.pi2.predict_lowrank_q(x, *blocks, bias, f"{weights}_blocks", True, 0.05)
    assert found.shape == (shape[0], shape[3])
    for args in ((*blocks, bias, f"{weights}_blocks"), (a, b, bias, weights)):
        assert float((found != reference.predict_lowrank_q(x, *args, True, 0.05)).float().mean()) <= 0.005
    for t in range(shape[0]):  # alone as in company
        alone = torch.ops.pi2.predict_lowrank_q(x[t : t + 1], *blocks, bias, f"{weights}_blocks", True, 0.05)
        assert torch.equal(found[t : t + 1], alone)
    call = (x, *blocks, bias, f"{weights}_blocks", True, 0.05)
    opcheck(torch.ops.pi2.predict_lowrank_q.default, call)


@needs_blocks
@pytest.mark.parametrize("n_hot", [0, 1, 16, 37, 210])
def test_rows_of_neurons_that_are_hot_now_are_skipped(n_hot: int) -> None:
    cold, hidden = 211, 128
    x, *tensors = layer("int4", cold, 3, hidden, 5)
    _, a, b, bias = lowrank_q("int4", 5, hidden, 64, cold)
    rows = ([a, b, bias], "lowrank_q", 0.05, "int4", True)
    blocks = ([*in_blocks(a, b, "int4", hidden), bias], "lowrank_q", 0.05, "int4_blocks", True)
    signs = ([pack_signs(torch.randn(cold, hidden))], "signbit", 1.0, "float", False)
    for case in (rows, blocks, signs):
        settings = ("relu", True, n_hot, 0.0, "int4", True)
        active = predict(x, case)[:, n_hot:].contiguous()
        found = torch.ops.pi2.predicted_ffn(x, *tensors, *case, *settings)
        assert torch.equal(found, torch.ops.pi2.sparse_ffn(x, *tensors, active, *settings))
        wanted = reference.predicted_ffn(x, *tensors, *case, *settings)
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max()) + 1e-6)


@needs_blocks
def test_bad_blocks() -> None:
    x, a, b, bias = lowrank_q("int4", 1, 128, 64, 100)
    blocks = in_blocks(a, b, "int4", 128)
    op = torch.ops.pi2.predict_lowrank_q
    for call in (
        (x, *blocks, bias, "int4_blocks", False, 0.0),  # float activations
        (x, *blocks, torch.zeros(200), "int4_blocks", True, 0.0),  # more biases than rows
        (x, a[:60], b[:, :27].contiguous(), bias, "int4_blocks", True, 0.0),  # rank 60
    ):
        with pytest.raises(RuntimeError, match=r"blocks.*16 rows and 64 columns|expected contiguous uint8"):
            op(*call)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 700), (9, 65, 517), (3, 300, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_signbit_equals_the_reference(isa: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, hidden, cold = shape
    w = torch.randn(cold, hidden, generator=generator())
    w[0, 0] = -0.0
    x = torch.randn(tokens, hidden, generator=generator(1)).to(dtype)
    x[0, 0] = -0.0
    agreeing = ((w[None] < 0) == (x[:, None] < 0)).sum(-1)
    for margin in (0.0, 0.8, 1.0, 1.3):
        found = torch.ops.pi2.predict_signbit(x, pack_signs(w), hidden, margin)
        assert torch.equal(found, reference.predict_signbit(x, pack_signs(w), hidden, margin))
        assert torch.equal(found, agreeing.double() >= margin * (hidden - agreeing))
    x[-1, -1] = float("nan")
    assert torch.ops.pi2.predict_signbit(x, pack_signs(w), hidden, 1e9)[-1].all()


def predicted_cases() -> list[tuple]:
    """Predictor tensors, kind, cut, weights and int8 activations for 77 inputs and 200 cold neurons."""
    g = generator(9)
    _, a, b, bias = lowrank_q("int4", cold=200)
    a8 = torch.randint(-127, 128, (19, 77), dtype=torch.int8, generator=g)
    b8 = torch.randint(-127, 128, (200, 19), dtype=torch.int8, generator=g)
    scales = torch.rand(19, generator=g) * 0.01, torch.rand(200, generator=g) * 0.01
    return [
        ([a8, scales[0], b8, scales[1], bias], "lowrank", 0.1, "float", False),
        ([a8, scales[0], b8, scales[1]], "lowrank", 0.01, "float", False),
        ([a, b, bias], "lowrank_q", 0.1, "int4", False),
        ([a, b], "lowrank_q", 0.1, "int4", True),
        ([pack_signs(torch.randn(200, 77, generator=g))], "signbit", 1.0, "float", False),
    ]


def predict(x: torch.Tensor, case: tuple) -> torch.Tensor:
    tensors, kind, cut, weights, int8_activations = case
    if kind == "signbit":
        return torch.ops.pi2.predict_signbit(x, *tensors, x.shape[-1], cut)
    if kind == "lowrank":
        return torch.ops.pi2.predict_lowrank(x, *tensors, *[None] * (5 - len(tensors)), cut)
    return torch.ops.pi2.predict_lowrank_q(x, *tensors, *[None] * (3 - len(tensors)), weights, int8_activations, cut)


@pytest.mark.parametrize("weights", ["float", "int4", "int8"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_predicted_layer_has_the_bits_of_its_parts(isa: str, weights: str, tokens: int) -> None:
    x, *tensors = layer(weights, 230, 3, 77, tokens)
    for case in predicted_cases():
        active = predict(x, case)
        assert 0 < int(active.sum()) < active.numel()
        settings = ("relu", True, 30, 0.0, weights, weights == "int8")
        found = torch.ops.pi2.predicted_ffn(x, *tensors, *case, *settings)
        assert torch.equal(found, torch.ops.pi2.sparse_ffn(x, *tensors, active, *settings))


def test_all_hot_and_empty_inputs() -> None:
    x, *tensors = layer("float", 30, 3, 77, 3)
    signs = torch.zeros(0, 16, dtype=torch.uint8)
    case = ([signs], "signbit", 1.0, "float", False)
    found = torch.ops.pi2.predicted_ffn(x, *tensors, *case, "relu", True, 30, 0.0)
    assert torch.equal(found, torch.ops.pi2.sparse_ffn(x, *tensors, None, "relu", True, 30, 0.0))
    assert torch.ops.pi2.predicted_ffn(x[:0], *tensors, *case, "relu", True, 30, 0.0).shape == (0, 77)
    assert torch.ops.pi2.predict_signbit(x.view(3, 1, 77), signs, 77, 1.0).shape == (3, 1, 0)


def test_opcheck() -> None:
    x, *tensors = layer("int4", 230, 3, 77, 3)
    settings = ("relu", True, 30, 0.0, "int4", True)
    opcheck(torch.ops.pi2.sparse_ffn.default, (x, *tensors, None, *settings))
    for case in predicted_cases():
        opcheck(torch.ops.pi2.predicted_ffn.default, (x, *tensors, *case, *settings))
    opcheck(torch.ops.pi2.predict_lowrank_q.default, (*lowrank_q("int8"), "int8", True, 0.0))
    signs = pack_signs(torch.randn(40, 77))
    opcheck(torch.ops.pi2.predict_signbit.default, (x, signs, 77, 1.0))


LOWRANK = {
    "x": torch.zeros(2, 77),
    "a": torch.zeros(19, 77, dtype=torch.int8),
    "a_scale": torch.zeros(19),
    "b": torch.zeros(20, 19, dtype=torch.int8),
    "b_scale": torch.zeros(20),
    "b_bias": None,
    "threshold": 0.0,
}
_X, _A, _B, _BIAS = lowrank_q("int4")
QUANTISED = {
    "x": _X,
    "a": _A,
    "b": _B,
    "b_bias": _BIAS,
    "weights": "int4",
    "int8_activations": False,
    "threshold": 0.0,
}
SIGNS = pack_signs(torch.randn(9, 77))
SIGNBIT = {"x": _X, "signs": SIGNS, "columns": 77, "margin": 1.0}
BAD: list[tuple[str, dict, dict, str]] = [
    ("lowrank", LOWRANK, {"x": torch.zeros(2, 76)}, "hidden size of x: expected 77"),
    ("lowrank", LOWRANK, {"a": torch.zeros(19, 77)}, "dtype of predictor tensor a: expected int8, found another"),
    ("lowrank", LOWRANK, {"b": LOWRANK["b"].T.contiguous().T}, "layout of predictor tensor b: expected"),
    ("lowrank", LOWRANK, {"b": LOWRANK["b"][:, 1:]}, r"tensor b: expected \[20, 19\], found \[20, 18\]"),
    ("lowrank", LOWRANK, {"a_scale": torch.zeros(18)}, r"tensor a_scale: expected \[19\], found .*Fit"),
    ("lowrank", LOWRANK, {"a_scale": torch.zeros(19).half()}, "dtype of predictor tensor a_scale: expected float32"),
    ("lowrank_q", QUANTISED, {"b": _B[:, :-1]}, r"tensor b: expected contiguous uint8 530 x 36 \(rows of 40 int4"),
    ("lowrank_q", QUANTISED, {"weights": "float"}, "weights: expected int4 or int8, found 'float'"),
    ("lowrank_q", QUANTISED, {"b_bias": _BIAS[1:]}, r"tensor b_bias: expected \[530\], found \[529\]"),
    ("lowrank_q", QUANTISED, {"a": _A[:0]}, r"tensor a: expected a row and a column at least, found \[0, 54\]"),
    ("signbit", SIGNBIT, {"columns": 64}, "hidden size of x: expected 64"),
    ("signbit", SIGNBIT, {"signs": SIGNS[:, :8]}, r"signs: expected \[neurons, 16\] for hidden .*, found \[9, 8\]"),
    ("signbit", SIGNBIT, {"signs": SIGNS.char()}, "dtype of signs: expected uint8"),
    ("signbit", SIGNBIT, {"signs": SIGNS.T.contiguous().T}, "layout of signs: expected contiguous"),
    ("signbit", SIGNBIT, {"margin": -1.0}, r"margin: expected a finite number of at least 0, found -1\."),
    ("signbit", SIGNBIT, {"margin": float("nan")}, "margin: expected a finite number of at least 0, found -?nan"),
]


@pytest.mark.parametrize(("kind", "sound", "change", "message"), BAD)
def test_bad_predictors(kind: str, sound: dict, change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.pi2, f"predict_{kind}")(**sound | change)


def test_bad_predicted_layers() -> None:
    x, *tensors = layer("float", 230, 3, 77, 3)
    for predictor, kind, message in (
        ([], "oracle", "kind: expected lowrank, lowrank_q, signbit or mask, found 'oracle'"),
        ([], "signbit", "predictor: expected 1 tensor for kind signbit, found 0"),
        ([torch.zeros(1)] * 4, "lowrank_q", r"expected 2 tensors \(and a bias\) .*, found 4"),
        ([SIGNS], "signbit", "expected at least 200 cold .*, found 9"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.predicted_ffn(x, *tensors, predictor, kind, 1.0, "int4", False, "relu", True, 30, 0.0)


def test_timings_tell_predictor_and_layer_apart() -> None:
    x, *tensors = layer("float", 230, 3, 77, 3)
    torch.ops.pi2.timings(True)
    for _ in range(3):
        torch.ops.pi2.predicted_ffn(x, *tensors, *predicted_cases()[0], "relu", True, 30, 0.0)
    found = torch.ops.pi2.timings(True)
    assert sorted(found[:, :4].tolist()) == [[1, 200, 77, 3], [2, 230, 77, 3]]
    assert (found[:, 4] > 0).all()
    assert torch.ops.pi2.timings(False).shape == (0, 5)


def test_neurons_of_a_step_are_counted_once_for_each_group() -> None:
    """From 12 tokens on those that fire few neurons and those that fire many go different ways."""
    neurons, hidden, tokens = 512, 128, 16
    g = generator()
    w = torch.randn(3 * neurons, hidden, generator=g) * hidden**-0.5
    rows_IR = torch.ops.pi2.quantize(w, "int4").view(neurons, 3, -1)
    x, bias = torch.randn(tokens, hidden, generator=g), torch.full((neurons,), -1.6)
    x[::2] *= 8  # two in five gates fire, of the others one in twenty; and half of the ups

    def counted(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        watch = torch.ops.pi2.firing_start([rows_IR], [0.0], sizes)
        torch.ops.pi2.sparse_ffn(x, rows_IR, bias, None, None, None, "relu", True, 0, 0.0, "int4", True)
        found: torch.Tensor = torch.ops.pi2.firing_read(watch, 0, False)
        torch.ops.pi2.firing_stop(watch)
        return found

    sizes = [2, 4, 16]
    found = counted(x, sizes)
    alone_TI = torch.stack([counted(x[t : t + 1], [])[0, 1:] for t in range(tokens)])
    assert 0.01 < float(alone_TI[1::2].float().mean()) < 0.05 < 0.15 < float(alone_TI[::2].float().mean())
    for k, size in enumerate([1, *sizes]):
        wanted = alone_TI.view(tokens // size, size, neurons).amax(1).sum(0)
        assert int(found[k, 0]) == tokens // size
        # sums in another order: a neuron at zero may fire or not
        assert int((found[k, 1:] - wanted).abs().sum()) <= 0.01 * int(wanted.sum())
        assert int(found[k, 1:].max()) <= tokens // size
