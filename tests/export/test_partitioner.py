"""``Pi2Partitioner`` in ExecuTorch's own ways of lowering: lists of partitioners, recipes, ETRecord, its runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.pass_base import ExportPass
from exported import IDS, Small, backends, dense, edge_config, exact, exported_program, int4, quantised, signbit
from tiny_models import _hf, tiny
from torch import nn

import torch_pi2
from torch_pi2.decode import executorch as backend
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import delegated
from torch_pi2.export.delegated import exported_layers
from torch_pi2.export.partitioner import Pi2Partitioner
from torch_pi2.layers.of_model import sparse_layers

CONFIG = edge_config()


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


# of experts, in a list: test_recipe.py
@pytest.mark.parametrize(
    ("make", "way"),
    [pytest.param(quantised, "list", marks=pytest.mark.slow), (int4, "reversed"), (signbit, "rest")],
)
def test_any_program_of_the_model(make: Callable[[], nn.Module], way: str, tmp_path: Path, ran: Any) -> None:
    model = make()
    program, store = exported_program(model), tmp_path / "model.pi2"
    ours = Pi2Partitioner(model, store, XnnpackPartitioner() if way == "rest" else None)
    both = {"list": [ours, XnnpackPartitioner()], "reversed": [XnnpackPartitioner(), ours], "rest": [ours]}[way]
    edge = to_edge_transform_and_lower(program, partitioner=both, compile_config=CONFIG, generate_etrecord=True)
    done = edge.to_executorch()
    with torch.no_grad():
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


def of_ours() -> list[str]:
    """What torch and ExecuTorch have of ours where their own functions and methods are."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "executorch") or not isinstance(module, ModuleType):
            continue
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name]
        for holder in (module, *kinds):
            for key, value in list(vars(holder).items()):
                if str(getattr(value, "__module__", "")).startswith("torch_pi2"):
                    found.append(f"{name}.{key}")
    return found


@pytest.mark.slow
def test_nothing_of_the_framework_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As passes of the user see it, which run; nor is a model known to anything global. Settings of the user, too."""
    seen: list[Any] = []

    class Look(ExportPass):
        def call(self, graph_module: torch.fx.GraphModule) -> Any:
            seen.append((of_ours(), dict(delegated._models)))
            return super().call(graph_module)

    model = torch_pi2.optimize(Small().eval(), [(torch.randn(80, 24),)], method="exact")
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(5, 24),), strict=False)
    edge = to_edge_transform_and_lower(
        program,
        transform_passes=[Look()],
        partitioner=[Pi2Partitioner(model, tmp_path / "model.pi2"), XnnpackPartitioner()],
        compile_config=CONFIG,
        constant_methods={"answer": 42},
    )
    edge.transform([Look()])
    done = edge.to_executorch(ExecutorchBackendConfig(passes=[Look()], external_constants=True))
    assert seen == [([], {})] * 3
    assert "Pi2Backend" in backends(edge)
    done.write_tensor_data_to_file(str(tmp_path))
    assert len(list(tmp_path.glob("*.ptd"))) == 1
    monkeypatch.setattr("executorch.exir.lowered_backend_module.legalize_graph", exported_layers)
    assert of_ours() == ["executorch.exir.lowered_backend_module.legalize_graph"]


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_program_of_which_nothing_would_be_ours(order: int, tmp_path: Path) -> None:
    ours = Pi2Partitioner(exact(), tmp_path / "model.pi2")
    program = exported_program(dense())
    message = "expected a program with feed-forward layers of its model.*found one with no operator of ours"
    with pytest.raises(ConfigError, match=message):
        to_edge_transform_and_lower(program, partitioner=[ours, XnnpackPartitioner()][::order], compile_config=CONFIG)
    with pytest.raises(ConfigError, match=message):
        to_edge(program, compile_config=CONFIG).to_backend(ours)


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a dense model"):
        Pi2Partitioner(dense(), tmp_path / "model.pi2")
    assert not (tmp_path / "model.pi2").exists()
    ours = Pi2Partitioner(exact(), tmp_path / "model.pi2")
    other = torch_pi2.optimize(tiny("opt"), method="exact")
    with pytest.raises(ConfigError, match=r"found a layer of another one \(.*neuron_rows\)"):
        to_edge_transform_and_lower(exported_program(other), partitioner=[ours], compile_config=CONFIG)

    torch.manual_seed(1)
    others = [torch_pi2.optimize(_hf("Llama", hidden_act="relu", num_hidden_layers=1).eval(), method="exact"), exact()]
    for ffn in sparse_layers(others[1]):
        ffn.threshold = 0.25  # type: ignore[union-attr]
    for model, name in zip(others, ("inner.model.layers.0.mlp.down_proj.sparse_ffn.neuron_rows", "threshold")):
        for order in (1, -1):
            with pytest.raises(ConfigError, match=rf"a program of the model .*found a layer of another one \({name}\)"):
                to_edge_transform_and_lower(
                    exported_program(model),
                    partitioner=[ours, XnnpackPartitioner()][::order],
                    compile_config=CONFIG,
                )

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
