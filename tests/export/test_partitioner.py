"""``Pi2Partitioner`` in ExecuTorch's own ways of lowering: lists of partitioners, recipes, ETRecord, its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.export import ExportRecipe, LoweringRecipe, export
from exported import (
    IDS,
    Logits,
    backends,
    dense,
    edge_config,
    exact,
    experts,
    exported_program,
    int4,
    quantised,
    signbit,
)
from tiny_models import _hf, tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import executorch as backend
from torch_pi2.export.etdump import call_figures
from torch_pi2.export.partitioner import Pi2Partitioner
from torch_pi2.layers.of_model import sparse_layers

CONFIG = edge_config()
FIGURES = ("wanted", "hits", "reads", "bytes_read", "wait_ns")


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


# of experts, in a list: test_from_the_model_to_the_inspector
@pytest.mark.slow
@pytest.mark.parametrize(("make", "way"), [(quantised, "list"), (int4, "reversed"), (signbit, "rest")])
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


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_program_of_which_nothing_would_be_ours(order: int, tmp_path: Path) -> None:
    ours = Pi2Partitioner(exact(), tmp_path / "model.pi2")
    program = exported_program(dense())
    message = "expected a program with feed-forward layers of its model.*found one without"
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
    other = torch_pi2.optimize(_hf("Llama", hidden_act="relu", num_hidden_layers=1).eval(), method="exact")
    rows = "inner.model.layers.0.mlp.down_proj.sparse_ffn.neuron_rows"
    for order in (1, -1):
        both = [ours, XnnpackPartitioner()][::order]
        with pytest.raises(ConfigError, match=rf"a program of the model .*found a layer of another one \({rows}\)"):
            to_edge_transform_and_lower(exported_program(other), partitioner=both, compile_config=CONFIG)
    other = exact()
    for ffn in sparse_layers(other):
        ffn.threshold = 0.25  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"a program of the model .*found a layer of another one \(threshold\)"):
        to_edge_transform_and_lower(exported_program(other), partitioner=[ours], compile_config=CONFIG)

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


# --- recipes and profiles ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    for key in ("store_path", "cache_bytes_kib", "preload"):
        backend.set_options({key: ""})


def profiled(folder: Path, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, list[Any]], dict[str, Any]]:
    """Logits of IDS, run twice; events of our delegate by name, what our store counts."""
    backend.load_library()
    from executorch.devtools import Inspector
    from executorch.runtime import Runtime

    backend.set_options({"store_path": str(folder), **options})
    program = Runtime.get().load_program(folder / "model.pte", enable_etdump=True)
    method = program.load_method("forward")
    assert method is not None
    found = [method.execute((IDS,))[0] for _ in range(2)]
    assert torch.equal(*found)
    (about,) = backend.stats()["stores"]
    dump = str(folder / "events.etdp")
    program.write_etdump_result_to_file(dump, str(folder / "debug.bin"))
    inspector = Inspector(dump, etrecord=str(folder / "etrecord.bin"), delegate_metadata_parser=call_figures)
    events: dict[str, list[Any]] = {}
    for block in inspector.event_blocks:
        block.to_dataframe(include_delegate_debug_data=True)
        for event in block.events:
            if event.is_delegated_op and event.delegate_backend_name == "Pi2Backend":
                events.setdefault(event.name, []).append(event)
    return found[0], events, about


@pytest.mark.parametrize(
    ("make", "event"),
    [(signbit, "pi2_ffn.0"), pytest.param(experts, "pi2_experts.0", marks=pytest.mark.slow)],
)
def test_from_the_model_to_the_inspector(make: Callable[[], nn.Module], event: str, tmp_path: Path) -> None:
    model = make()
    partitioners = [Pi2Partitioner(model, tmp_path / "model.pi2"), XnnpackPartitioner()]
    lowering = LoweringRecipe(partitioners=partitioners, edge_compile_config=CONFIG)
    recipe = ExportRecipe("pi2", lowering_recipe=lowering)
    session = export(Logits(model).eval(), [(IDS,)], recipe, generate_etrecord=True)
    session.save_to_pte(str(tmp_path / "model.pte"))
    session.get_executorch_program_manager().get_etrecord().save(str(tmp_path / "etrecord.bin"))
    assert any(parameter.requires_grad for parameter in model.parameters())  # as before
    found = backends(session.get_edge_program_manager())
    assert found.count("Pi2Backend") == 1
    assert found.count("XnnpackBackend") >= 3
    left = [str(node.target) for node in session.get_edge_program_manager().exported_program().graph.nodes]
    assert not any("quantize" in name or "addmm" in name for name in left)
    pte = (tmp_path / "model.pte").read_bytes()
    assert all(ffn.neuron_rows[0].numpy().tobytes() not in pte for ffn in sparse_layers(model))  # in the store alone
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
    for cache in (4, ""):  # less than a call wants; room for all
        logits, events, about = profiled(tmp_path, {"cache_bytes_kib": cache, "preload": False})
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
        assert list(events) == [event]
        (call,) = events[event]
        assert [name.split(".")[1] for name in call.op_types] == ["predicted_ffn" if make is signbit else "experts_ffn"]
        assert call.debug_handles
        assert any("mlp" in str(modules) for modules in call.module_hierarchy.values())
        figures = call.delegate_debug_metadatas
        assert figures["tokens"] == [IDS.numel()] * 2
        assert figures["wanted"][0] == figures["wanted"][1] > 0
        for name in FIGURES:
            assert sum(figures[name]) == about[name], name
        if cache:
            assert min(figures["bytes_read"]) > 4096
        else:
            assert figures["reads"][1] == figures["bytes_read"][1] == 0
            assert figures["hits"][1] == figures["wanted"][1]
