"""Lowering once what repeats itself gives the ``.pte`` that ExecuTorch's own way of lowering gives, to the byte."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from tiny_models import _hf, _opt, randomise
from torch import nn

import torch_pi2
from torch_pi2.export import xnnpack
from torch_pi2.export.blob import BYTES
from torch_pi2.export.decoder import Lanes, decoder_methods
from torch_pi2.export.hot import hot_chunks
from torch_pi2.export.linears import prepare_rest
from torch_pi2.export.lower import Method, lower, trace
from torch_pi2.export.markers import registered
from torch_pi2.export.partitioner import BlobPartitioner
from torch_pi2.export.standins import delegated_copy, exported_layers, split_hot_cold

lowering: Any = importlib.import_module("torch_pi2.export.lower")
Programs = Mapping[str, torch.export.ExportedProgram]


def programs_of(
    model: nn.Module, linears: str = "float32", batches: Sequence[int] = (1,), prompt: bool = False, hot: bool = False
) -> Programs:
    """Traced methods of a decoder: decoding in ``batches``, without ``prompt`` nothing else."""
    torch_pi2.optimize(randomise(model.eval(), 0.05), method="exact")
    layers = exported_layers(model)
    with registered(layers) as name, torch.no_grad():
        private = delegated_copy(model, layers, name)
        prepare_rest(private, linears)
        lanes = Lanes(private, max(batches), 32)
        if hot:
            for split, ffn in zip(split_hot_cold(private), layers):
                split.hot, split.first = hot_chunks(ffn, 1, 16), 16
        length = torch.export.Dim.DYNAMIC(min=1, max=16)
        ids, start = torch.zeros((1, 8), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        methods = {}
        for key, module in decoder_methods(lanes, batches).items():
            if key.startswith("decode"):
                step = torch.zeros((int(key.removeprefix("decode_b")), 1), dtype=torch.int64)
                methods[key] = Method(module, (step, step.clone()))
            elif prompt and key == "forward":
                methods[key] = Method(module, (ids, start), None, ({1: length}, None))
            elif prompt:
                methods[key] = Method(module, (torch.zeros(lanes.lanes, dtype=torch.int64),))
        return trace(methods, "model")


def blob(*of_call: int) -> bytes:
    return repr(of_call).encode().ljust(BYTES, b"\0")


def slowly(programs: Programs, patch: pytest.MonkeyPatch) -> bytes:
    """The ``.pte`` by ExecuTorch's own means."""

    def delegated(programs: Programs, partitioners: Mapping[str, Any], constants: Mapping[str, Any]) -> Any:
        return to_edge_transform_and_lower(
            dict(programs),
            partitioner={key: [partitioner] for key, partitioner in partitioners.items()},
            constant_methods=dict(constants),
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )

    with patch.context() as inner:
        inner.setattr(xnnpack, "xnnpack_partitioner", lambda _: XnnpackPartitioner())
        inner.setattr(lowering, "_delegated", delegated)
        inner.setattr(lowering, "_Parts", BlobPartitioner)
        return b"".join(lower(programs, "model", blob=blob).pieces)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each part that goes through XNNPACK's passes, all of them."""
    found: list[int] = []
    through = xnnpack._through_passes

    def counted(program: torch.export.ExportedProgram) -> Any:
        found.append(1)
        return through(program)

    monkeypatch.setattr(xnnpack, "_through_passes", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (lambda: _hf("Llama", hidden_act="relu"), {"linears": "int8", "batches": (1, 4)}),
        (lambda: _hf("Llama", num_hidden_layers=4, tie_word_embeddings=True), {"linears": "int4"}),
        (lambda: _hf("Llama", num_hidden_layers=3), {"hot": True}),
        (lambda: _hf("Gemma2", num_hidden_layers=4, head_dim=8, sliding_window=8), {"batches": (2,)}),
        (lambda: _hf("Qwen2"), {"linears": "int4"}),
        (lambda: _opt(), {"linears": "int8"}),
        (lambda: _hf("GPTNeoX"), {"prompt": True}),
    ],
    ids=["llama", "llama-int4", "llama-hot", "gemma2", "qwen2", "opt", "gpt-neox"],
)
def test_the_same_bytes(model: Any, settings: Any, passed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    programs = programs_of(model(), **settings)
    found = b"".join(lower(programs, "model", blob=blob).pieces)
    assert 0 < len(passed) < found.count(b"XH00")  # parts: some are repeated
    assert found == slowly(programs, monkeypatch)


class Fused(nn.Module):
    """Its constants are not those that XNNPACK's passes make of them, the same ones twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.erf(block(x))
        return x


class Double(nn.Module):
    """Linear layers of which XNNPACK takes one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.other(self.one(x).double())
        return y


class Sizes(nn.Module):
    """Computes with sizes, which has its place before other operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        return torch.erf(x[: half + 1] * 2) * (half * 3)


@pytest.mark.parametrize(
    ("module", "size"), [(Fused, (1, 2, 3, 3)), (Double, (3, 4)), (Sizes, (8, 4))], ids=["fused", "double", "sizes"]
)
def test_what_cannot_be_repeated(
    module: type[nn.Module], size: tuple[int, ...], passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim.DYNAMIC(min=2, max=16)},) if module is Sizes else None
    made = module().eval()
    for name, buffer in made.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    programs = trace({"forward": Method(made, (torch.zeros(size),), None, shapes)}, "model")
    found = b"".join(lower(programs, "model").pieces)
    assert module is not Fused or len(passed) == 2
    assert found == slowly(programs, monkeypatch)
