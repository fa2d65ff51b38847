"""``Pi2Partitioner`` in ExecuTorch's own ways of lowering: lists of partitioners, recipes, ETRecord, its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from tiny_experts import build
from tiny_models import _hf, tiny
from torch import nn

import torch_pi2
from torch_pi2.decode import executorch as backend
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.partitioner import Pi2Partitioner
from torch_pi2.layers.of_model import sparse_layers

IDS = torch.tensor([[5, 9, 40, 11, 33, 7, 21, 60]])
CONFIG = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)


class Logits(nn.Module):
    """A user's module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(ids, use_cache=False).logits
        return logits


def dense() -> nn.Module:
    torch.manual_seed(0)
    return _hf("Llama", hidden_act="relu", num_hidden_layers=1).eval()


def exact() -> nn.Module:
    return torch_pi2.optimize(dense(), method="exact")


def quantised() -> nn.Module:
    """What XNNPACK knows of its linears, another list of operators to preserve would decompose, without an error."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

    model = exact()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8))
    return model


def int4() -> nn.Module:
    return torch_pi2.optimize(dense(), method="exact", weights="int4", activations="int8")


def signbit() -> nn.Module:
    text = torch.randint(3, 60, (32, 24), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="signbit", target_recall=0.9, calibration_tokens=700)
    return torch_pi2.optimize(dense(), text, config)


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Logits(model).eval(), (IDS,), strict=False)


def backends(edge: Any) -> list[str]:
    module = edge.exported_program().graph_module
    calls = [n.args[0].target for n in module.graph.nodes if "executorch_call_delegate" in str(n.target)]
    return [getattr(module, name).backend_id for name in calls]


@pytest.fixture
def ran() -> Iterator[Callable[[Path], torch.Tensor]]:
    """Logits of IDS by ExecuTorch's runtime with our library."""
    backend.load_library()
    from executorch.runtime import Runtime

    def run(pte: Path) -> torch.Tensor:
        backend.set_options({"store_path": str(pte.parent)})
        method = Runtime.get().load_program(pte).load_method("forward")
        assert method is not None
        found: torch.Tensor = method.execute((IDS,))[0]
        return found

    yield run
    backend.set_options({"store_path": ""})


def experts() -> nn.Module:
    return torch_pi2.optimize(build("Mixtral", num_hidden_layers=1), method="exact")


@pytest.mark.parametrize(
    ("make", "way"), [(quantised, "list"), (int4, "reversed"), (signbit, "rest"), (experts, "list")]
)
def test_any_program_of_the_model(make: Callable[[], nn.Module], way: str, tmp_path: Path, ran: Any) -> None:
    model = make()
    program, store = exported(model), tmp_path / "model.pi2"
    ours = Pi2Partitioner(model, store, XnnpackPartitioner() if way == "rest" else None)
    both = {"list": [ours, XnnpackPartitioner()], "reversed": [XnnpackPartitioner(), ours], "rest": [ours]}[way]
    with torch.no_grad():
        edge = to_edge_transform_and_lower(program, partitioner=both, compile_config=CONFIG, generate_etrecord=True)
        done = edge.to_executorch()
        wanted = model(IDS, use_cache=False).logits
    found = backends(edge)
    assert found.count("Pi2Backend") == 1
    assert found.count("XnnpackBackend") >= 3
    left = [str(node.target) for node in edge.exported_program().graph.nodes]
    assert not any("quantize" in name or "addmm" in name for name in left)
    done.save(str(tmp_path / "model.pte"))
    torch.testing.assert_close(ran(tmp_path / "model.pte"), wanted, rtol=1e-3, atol=1e-3)
    for ffn in sparse_layers(model):
        assert ffn.neuron_rows[0].numpy().tobytes() not in done.buffer  # weights are in the store alone
    done.get_etrecord().save(str(tmp_path / "etrecord.bin"))
    assert (tmp_path / "etrecord.bin").stat().st_size > 1000


def test_a_recipe(tmp_path: Path, ran: Any) -> None:
    from executorch.export import ExportRecipe, LoweringRecipe, export

    model = exact()
    lowering = LoweringRecipe(
        partitioners=[Pi2Partitioner(model, tmp_path / "model.pi2"), XnnpackPartitioner()], edge_compile_config=CONFIG
    )
    with torch.no_grad():
        session = export(Logits(model).eval(), [(IDS,)], ExportRecipe("ours", lowering_recipe=lowering))
        session.save_to_pte(str(tmp_path / "model.pte"))
        wanted = model(IDS, use_cache=False).logits
    torch.testing.assert_close(ran(tmp_path / "model.pte"), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", [1, -1])
def test_a_program_of_which_nothing_would_be_ours(order: int, tmp_path: Path) -> None:
    ours = Pi2Partitioner(exact(), tmp_path / "model.pi2")
    program = exported(dense())
    message = "expected a program with feed-forward layers of its model.*found one with no operator of ours"
    with pytest.raises(ConfigError, match=message):
        to_edge_transform_and_lower(program, partitioner=[ours, XnnpackPartitioner()][::order], compile_config=CONFIG)
    with pytest.raises(ConfigError, match=message):
        to_edge(program, compile_config=CONFIG).to_backend(ours)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a dense model"):
        Pi2Partitioner(dense(), tmp_path / "model.pi2")
    assert not (tmp_path / "model.pi2").exists()
    ours = Pi2Partitioner(exact(), tmp_path / "model.pi2")
    other = torch_pi2.optimize(tiny("opt"), method="exact")
    with pytest.raises(ConfigError, match=r"found a layer of another one \(.*neuron_rows\)"):
        to_edge_transform_and_lower(exported(other), partitioner=[ours], compile_config=CONFIG)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.mlp(self.mlp(x))
            return y

    twice = torch_pi2.optimize(Twice().eval(), [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    ours = Pi2Partitioner(twice, tmp_path / "twice.pi2")
    with torch.no_grad():
        program = torch.export.export(twice, (torch.randn(3, 24),), strict=False)
    with pytest.raises(UnsupportedModelError, match="found layer 0 called twice"):
        to_edge_transform_and_lower(program, partitioner=[ours, XnnpackPartitioner()], compile_config=CONFIG)
