"""Lowering decomposes programs once where ExecuTorch does so three times; the ``.pte`` is the same to the byte."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from tiny_models import _hf, randomise
from torch import nn

import torch_pi2
from torch_pi2.export.decoder import Lanes, method_spec
from torch_pi2.export.delegated import delegated_copy, exported_layers, prepare_rest, registered, split_hot_cold
from torch_pi2.export.hot import hot_chunks
from torch_pi2.export.partitioner import lower
from torch_pi2.export.program import MethodSpec, trace
from torch_pi2.export.store import BYTES

lowering: Any = importlib.import_module("torch_pi2.export.partitioner")
Programs = Mapping[str, torch.export.ExportedProgram]


def decoder_programs(model: nn.Module, linears: str, methods: Sequence[str], hot: bool = False) -> Programs:
    torch_pi2.optimize(randomise(model.eval(), 0.05), method="exact")
    layers = exported_layers(model)
    with registered(layers) as name, torch.no_grad():
        private = delegated_copy(model, layers, name)
        prepare_rest(private, linears)
        lanes = Lanes(private, 4, 32)
        if hot:
            lanes = lanes.variant()
            split_hot_cold(lanes.model, [(hot_chunks(ffn, 1, 16), 16) for ffn in layers])
        return trace({method: method_spec(method, lanes, 16) for method in methods}, "model")


def blob(*of_call: int) -> bytes:
    return repr(of_call).encode().ljust(BYTES, b"\0")


def by_executorch(programs: Programs, patch: pytest.MonkeyPatch) -> bytes:
    """The ``.pte`` as ``to_edge_transform_and_lower`` makes it."""

    def delegated(programs: Programs, partitioners: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
        return to_edge_transform_and_lower(
            dict(programs),
            partitioner={key: [partitioner] for key, partitioner in partitioners.items()},
            constant_methods=dict(constants),
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )

    with patch.context() as inner:
        inner.setattr(lowering, "_delegated", delegated)
        return b"".join(lower(programs, "model", blob=blob).pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "linears", "methods", "hot"),
    [
        ("Llama", {"hidden_act": "relu"}, "int8", ("decode_b1", "decode_b4"), False),
        ("Llama", {"num_hidden_layers": 3}, "float32", ("decode_b1",), True),
    ],
)
def test_decoders(
    name: str, config: dict[str, Any], linears: str, methods: Sequence[str], hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    programs = decoder_programs(_hf(name, **config), linears, methods, hot)
    assert b"".join(lower(programs, "model", blob=blob).pieces) == by_executorch(programs, monkeypatch)


class Double(nn.Module):
    """Linear layers of which XNNPACK takes only one, so that the other is decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.other(self.one(x).double())
        return y


@pytest.mark.slow
def test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    programs = trace({"forward": MethodSpec(Double().eval(), (torch.zeros(3, 4),))}, "model")
    assert b"".join(lower(programs, "model").pieces) == by_executorch(programs, monkeypatch)
