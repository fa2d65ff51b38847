"""Recipes of ``executorch.export`` for optimised models: from PyTorch to ExecuTorch's runtime and its Inspector."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.pass_base import ExportPass
from executorch.export import ExportRecipe, LoweringRecipe, export, recipe_registry
from exported import IDS, Logits, Small, backends, dense, exact, experts, signbit
from torch import nn

import torch_pi2
from torch_pi2.decode import executorch as backend
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.export.etdump import call_figures
from torch_pi2.export.recipe import Pi2RecipeProvider, Pi2RecipeType
from torch_pi2.layers.of_model import sparse_layers

FIGURES = ("wanted", "hits", "reads", "bytes_read", "wait_ns")


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
    recipe = ExportRecipe.get_recipe(Pi2RecipeType.FFN_XNNPACK, model=model, store=tmp_path / "model.pi2")
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


class Counted(ExportPass):
    """A user's pass."""

    calls = 0

    def call(self, graph_module: torch.fx.GraphModule) -> Any:
        Counted.calls += 1
        return super().call(graph_module)


@pytest.mark.slow
def test_combined_with_other_recipes_passes_and_settings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 24)
    model = torch_pi2.optimize(Small().eval(), [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    ours = ExportRecipe.get_recipe(Pi2RecipeType.FFN, model=model, store=tmp_path / "model.pi2")
    passes = LoweringRecipe(edge_transform_passes=[lambda _method, _program: [Counted()]])
    mine = ExportRecipe(
        "mine", lowering_recipe=passes, executorch_backend_config=ExecutorchBackendConfig(segment_alignment=4096)
    )
    quantised = ExportRecipe.get_recipe(XNNPackRecipeType.PT2E_INT8_DYNAMIC_PER_CHANNEL)
    with torch.no_grad():  # quantising runs the model
        wanted = model(x)
        session = export(model, [(x,)], ExportRecipe.combine([ours, mine, quantised]))
    assert Counted.calls == 1
    assert sorted(backends(session.get_edge_program_manager())) == ["Pi2Backend", "XnnpackBackend", "XnnpackBackend"]
    session.save_to_pte(str(tmp_path / "model.pte"))
    header = (tmp_path / "model.pte").read_bytes()[8:32]  # "eh00", its bytes, those of the program, where segments are
    assert int.from_bytes(header[16:24], "little") % 4096 == 0
    backend.load_library()
    from executorch.runtime import Runtime

    backend.set_options({"store_path": str(tmp_path)})
    method = Runtime.get().load_program(tmp_path / "model.pte").load_method("forward")
    assert method is not None
    error = (method.execute((x,))[0] - wanted).abs().max() / wanted.abs().max()
    assert 0 < error < 0.05  # linear layers have 8 bits


def test_what_is_refused(tmp_path: Path) -> None:
    model, store = exact(), tmp_path / "model.pi2"

    def refused(**options: Any) -> str:
        with pytest.raises((ConfigError, ArtifactError)) as error:
            ExportRecipe.get_recipe(Pi2RecipeType.FFN_XNNPACK, **options)
        return str(error.value)

    what = "recipe pi2_ffn_xnnpack: expected the options model and store, found "
    assert refused(model=model).startswith(f"{what}no store. ExportRecipe.get_recipe(Pi2RecipeType.FFN_XNNPACK")
    assert refused().startswith(f"{what}no model and no store. ")
    assert refused(model=model, store=store, speed=11).startswith(f"{what}the option speed. ")
    assert "found a dense model" in refused(model=dense(), store=store)
    assert "model" in refused(model="model", store=store)
    assert not store.exists()
    (tmp_path / "file").write_text("")
    assert "file" in refused(model=model, store=tmp_path / "file" / "model.pi2")
    assert Pi2RecipeProvider().create_recipe(XNNPackRecipeType.FP32) is None
    assert recipe_registry.get_supported_recipes("pi2") == list(Pi2RecipeType)


def test_executorch_is_imported_by_who_wants_recipes_alone() -> None:
    code = "import sys, torch_pi2, torch_pi2.export, torch_pi2.export.etdump; print('executorch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False"]
