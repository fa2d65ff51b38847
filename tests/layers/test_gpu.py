"""Layers on a GPU, where there is none: Triton's interpreter on tensors of the CPU, and ``meta`` in a GPU's place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.decomposition  # it looks at all operators: before one is exchanged
from offloading import smallest
from shared import small_store
from tiny_experts import build
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import DeviceError
from torch_pi2.layers import experts, ffn, gpu, linear, prompt
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.prompt import dense_on_gpu_from, single_steps, sparse_only
from torch_pi2.ops.gpu import kernels
from torch_pi2.ops.gpu import operators as gpu_operators

IDS = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(1))


@contextmanager
def interpreted() -> Iterator[list[str]]:
    """Layers take their tensors for those of a GPU; gives the predictors' kinds of the operators' calls."""
    kinds: list[str] = []

    def launched(operator: Any, kind: int | None) -> Any:
        def launch(*args: object) -> torch.Tensor:
            kinds.append(gpu_operators.NO_PREDICTOR if kind is None else str(args[kind]))
            return operator(*args)  # type: ignore[no-any-return]

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for module in (prompt, experts):
            patch.setattr(module, "on_gpu", lambda _: True)
        patch.setattr(torch.ops.pi2, "sparse_ffn", launched(gpu_operators.sparse_ffn, None))
        patch.setattr(torch.ops.pi2, "predicted_ffn", launched(gpu_operators.predicted_ffn, 6))
        patch.setattr(torch.ops.pi2, "gathered_experts", launched(gpu_operators.gathered_experts, 5))
        patch.setattr(kernels, "PARTS", 3)
        yield kinds


def logits(model: nn.Module, tokens: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS[:, :tokens], use_cache=False).logits
    return found


@pytest.mark.parametrize("name", ["drelu", "opt"])
def test_the_exact_gate_gives_the_dense_models_logits(name: str) -> None:
    dense, model = tiny(name), torch_pi2.optimize(tiny(name))
    layers = len(sparse_layers(model))
    with interpreted() as kinds:
        many = {"drelu": 3, "opt": 2}[name]
        torch.testing.assert_close(logits(model, many - 1), logits(dense, many - 1), rtol=0, atol=1e-4)
        assert kinds == [gpu_operators.NO_PREDICTOR] * layers
        torch.testing.assert_close(logits(model, many), logits(dense, many), rtol=0, atol=1e-4)
        assert len(kinds) == layers  # so many are dense
        with single_steps():
            logits(model, many)
        assert len(kinds) == 2 * layers


@pytest.mark.slow
def test_predicted_and_quantised_layers_compute_what_they_do_on_the_cpu() -> None:
    ids = torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))
    for weights in ("float", "int4"):
        model = torch_pi2.optimize(tiny("drelu"), ids, method="lowrank", weights=weights)
        with sparse_only():
            wanted = logits(model, 1)
        with interpreted() as kinds:
            torch.testing.assert_close(logits(model, 1), wanted, rtol=0, atol=1e-4)
        assert all(kind.startswith("lowrank") for kind in kinds), kinds


def test_quantised_layers_of_hot_neurons_are_dequantised_for_many_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of those not all at a time."""
    for weights, listed, many in (("int8", True, 7), ("float", False, 9)):
        model = torch_pi2.optimize(tiny("drelu"), weights=weights)
        layers = sparse_layers(model)
        for layer in layers:
            layer.n_hot = layer.site.intermediate
        wanted = [logits(model, tokens) for tokens in (many - 1, many)]
        monkeypatch.setattr(gpu_operators, "TEMPORARY_BYTES", 4 * layers[0].site.hidden * 50)
        with interpreted() as kinds:
            torch.testing.assert_close(logits(model, many - 1), wanted[0], rtol=0, atol=1e-4)
            assert kinds == [gpu_operators.NO_PREDICTOR] * len(layers) * listed
            torch.testing.assert_close(logits(model, many), wanted[1], rtol=0, atol=1e-4)
            assert len(kinds) == len(layers) * listed


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "float32", "int4", "int8"])
@pytest.mark.parametrize("rows", [2, 3])
def test_from_how_many_tokens_on_neurons_are_all_computed(rows: int, weights: str) -> None:
    """What each token reads by itself is no more than a dense layer reads: rows, and what they are converted to."""
    dense = tiny("drelu" if rows == 3 else "opt").to(torch.bfloat16 if weights == "bfloat16" else torch.float32)
    dense = dense.half() if weights == "float16" else dense
    layer = sparse_layers(torch_pi2.optimize(dense, weights=weights if weights.startswith("int") else "float"))[0]
    stored, factor = {
        "bfloat16": (2, 0),
        "float32": (4, 0),
        "float16": (2, 4),
        "int4": (0.5625, 4),
        "int8": (1.0625, 4),
    }[weights]  # bytes of a number; of float32 models
    reads = 0.75 * (stored + 2 * factor) if factor else stored
    for share, predicted in ((0.05, True), (0.1, True), (0.5, True), (0.3, False), (1.0, False)):
        layer.expected_share, layer.n_hot = share, 0
        layer.predictor_kind = "lowrank" if predicted else gpu_operators.NO_PREDICTOR
        # nobody has counted what an exact gate lets through: a tenth
        fires = 0.1 if share == 1 else share
        of_token = share if predicted else (1 + (rows - 1) * fires) / rows
        many = dense_on_gpu_from(layer)
        assert many == 2 or (many - 1) * of_token * stored <= reads
        assert many * of_token * stored > reads
    many_of_all = {"bfloat16": 2, "float32": 2, "float16": 4, "int4": 12, "int8": 7}[weights]
    layer.n_hot = layer.site.intermediate
    assert dense_on_gpu_from(layer) == many_of_all
    layer.n_hot, layer.by_batch = 0, ((1, 0), (4, layer.site.intermediate))
    assert dense_on_gpu_from(layer) == many_of_all


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_linear_layers_of_several_steps_have_the_bits_of_each(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantLinear.from_linear(tiny("drelu").lm_head, weights)
    x_TK = torch.randn(1, 20, layer.in_features, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(linear, "on_gpu", lambda _: True)
    monkeypatch.setattr(torch.ops.pi2, "linear", gpu_operators.linear)
    with torch.no_grad():
        each = torch.cat([layer(x_TK[:, t : t + 1]) for t in range(20)], 1)
        with single_steps():
            assert torch.equal(layer(x_TK), each)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "weights"),
    [("Mixtral", "exact", "float"), ("Mixtral", "threshold", "int4"), ("Olmoe", "lowrank", "int8")],
)
def test_mixtures_of_experts_compute_what_they_do_on_the_cpu(name: str, method: str, weights: str) -> None:
    more = {"num_experts": 4} if name == "Olmoe" else {}
    dense = build(name, hidden_act="relu", **more)
    ids = torch.randint(0, 96, (48, 16), generator=torch.Generator().manual_seed(0))
    model = torch_pi2.optimize(dense, None if method == "exact" else ids, method=method, weights=weights)
    wanted = logits(model, 3)
    with interpreted() as kinds:
        torch.testing.assert_close(logits(model, 3), wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))
    assert len(kinds) == 2
    assert all(kind.startswith("lowrank" if method == "lowrank" else gpu_operators.NO_PREDICTOR) for kind in kinds)


@pytest.fixture
def meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: tensor.is_meta)


@pytest.mark.usefixtures("meta_is_a_gpu")
def test_what_has_no_kernels_stays(tmp_path_factory: pytest.TempPathFactory) -> None:
    store: Path = small_store(tmp_path_factory) / "store"
    with pytest.raises(
        DeviceError, match=r"whose neurons are in a store: expected it on the CPU, found a move to a GPU"
    ):
        torch_pi2.load(store, budget=smallest(store)).to("meta")


@pytest.mark.usefixtures("meta_is_a_gpu")
def test_sign_bits_stay() -> None:
    ids = torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(DeviceError, match=r"whose predictor looks at sign bits: expected it on the CPU"):
        torch_pi2.optimize(tiny("drelu"), ids, method="signbit").to("meta")


@pytest.mark.usefixtures("meta_is_a_gpu")
def test_mixtures_go_there_as_a_whole() -> None:
    """Numbers that are to stay exact stay so."""
    model = torch_pi2.optimize(build("Mixtral")).to("meta").half()
    module = homes(model)[0]
    assert all(tensor.is_meta for tensor in module.buffers())
    dtypes = {tensor.dtype for name, tensor in module.named_buffers() if name in ("cuts_E", "thresholds_E")}
    assert (dtypes, module.dtype) == ({torch.float64}, torch.float16)


def test_inputs_that_are_elsewhere_are_refused() -> None:
    for model in (tiny("drelu"), build("Mixtral")):
        layer = homes(torch_pi2.optimize(model))[0]
        routed = [] if isinstance(layer, ffn.SparseFFN) else [torch.zeros(1, 2)] * 2
        with pytest.raises(DeviceError, match=r"input of .*mlp.*: expected cpu, where its neurons are, found meta"):
            layer(torch.empty(1, layer.site.hidden, device="meta"), *routed)


def test_gpus_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.check_gpu(torch.device("cpu"))
    device = torch.device("cuda", 0)
    with pytest.raises(DeviceError, match=r"a torch that was built for it, found torch .*, which sees none"):
        gpu.check_gpu(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(DeviceError, match=r"current GPU, cuda:1, .* found cuda:0\. Call torch.cuda.set_device\(0\)"):
        gpu.check_gpu(device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 0))
    with pytest.raises(DeviceError, match=r"Tesla P100: expected compute capability 7\.0 or later, found 6\.0"):
        gpu.check_gpu(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu.check_gpu(device)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DeviceError, match=r"expected Triton, found it is not installed\. pip install .*triton"):
        gpu.check_gpu(device)
