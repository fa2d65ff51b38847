"""Models of which several processes have some layers each, as a pipeline: the bits of one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_experts
import tiny_models
import torch
from sharding import ANSWERS, FEW, answers_of_one, check_answers, one_thread, together  # noqa: F401
from shared import shared_folder

import torch_pi2
from torch_pi2.store.storefile import StoreReader

ALL = ("few", "many", "steps")
TEXT = [torch.randint(1, 60, (64,), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def _saved(folder: Path, model: Any, **settings: Any) -> None:
    optimised = torch_pi2.optimize(model, settings.pop("text", None), **settings)
    torch_pi2.save(optimised, folder / "plain")
    torch_pi2.pack(folder / "plain", folder / "store")


def _synthetic(folder: Path) -> None:
    torch_pi2.synthetic(folder / "plain", "tiny", active=0.2, weights="int4", layers=5)
    torch_pi2.pack(folder / "plain", folder / "store")


def _llama(**config: Any) -> Any:
    torch.manual_seed(0)
    return tiny_models.randomise(tiny_models._hf("Llama", num_hidden_layers=4, intermediate_size=200, **config).eval())


def _experts() -> Any:
    return tiny_experts.build("Mixtral", num_hidden_layers=3, intermediate_size=136)


MADE: dict[str, Callable[[Path], None]] = {
    "lowrank, int4": _synthetic,
    "tied": lambda f: _saved(f, _llama(hidden_act="relu", tie_word_embeddings=True), weights="int8", method="exact"),
    "experts": lambda f: _saved(
        f, tiny_experts.build("Mixtral", num_hidden_layers=3, intermediate_size=136), method="exact"
    ),
    "thresholds": lambda f: _saved(f, _llama(), text=TEXT, method="threshold", sparsity=0.5, score="output"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with a store and its stages."""

    def make(base: Path) -> None:
        for name, write in MADE.items():
            folder = base / name
            folder.mkdir(parents=True)
            write(folder)
            for ranks in (2, 3):
                torch_pi2.pack(folder / "store", folder / str(ranks), ranks=ranks, by="layers")

    return shared_folder(tmp_path_factory, "models-in-stages", make)


@pytest.mark.parametrize("name", MADE)
def test_two_processes_have_the_bits_of_one(made: Path, name: str, tmp_path: Path) -> None:
    together(tmp_path, ANSWERS, 2, made / name / "2", "chunks", "", "")
    check_answers(tmp_path, 2, answers_of_one(made / name / "store"), same=ALL)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiled"), [("lowrank, int4", ""), ("experts", "compiled")])
def test_three_processes_over_flash(made: Path, name: str, compiled: str, tmp_path: Path) -> None:
    """Compiled, weights are float32: Inductor rounds bfloat16 less where it fuses more."""
    smallest = torch_pi2.stats(torch_pi2.load(made / name / "store", budget="1GiB"))["budget"].smallest
    together(tmp_path, ANSWERS, 3, made / name / "3", "chunks", compiled, f"{smallest + 100_000}B")
    check_answers(
        tmp_path, 3, answers_of_one(made / name / "store", compiled=bool(compiled)), same=("few", "many", "steps")
    )


@pytest.mark.parametrize("name", MADE)
def test_stages_become_one_store_again(made: Path, name: str, tmp_path: Path) -> None:
    torch_pi2.pack(made / name / "3", tmp_path / "whole")
    store = made / name / "store"
    for folder in (tmp_path / "whole", store):
        torch_pi2.pack(folder, tmp_path / f"{folder.name}-again")
    whole, again = (StoreReader(tmp_path / f"{name}-again" / "pi2" / "model.pi2") for name in ("whole", "store"))
    with whole, again:
        assert whole.specs == again.specs
        assert whole.checks == again.checks
        assert all(
            json.loads(whole.metadata[n]) == json.loads(again.metadata[n]) for n in ("linears", "sites", "layers")
        )
        assert whole.verify() > 0
    torch_pi2.pack(made / name / "3", tmp_path / "neurons", ranks=2)
    torch_pi2.pack(made / name / "3", tmp_path / "layers", ranks=2, by="layers")
    for rank in range(2):
        path = Path(f"rank-{rank}-of-2") / "pi2" / "model.pi2"
        with StoreReader(tmp_path / "layers" / path) as made_again, StoreReader(made / name / "2" / path) as first:
            assert (made_again.specs, made_again.checks) == (first.specs, first.checks)


def test_a_stage_has_its_own_layers_alone(made: Path, tmp_path: Path) -> None:
    script = """
import torch_pi2
from torch_pi2.store.storefile import StoreReader
model = torch_pi2.load(sys.argv[4])
budget = torch_pi2.stats(model)["budget"]
layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
print([count > 0 for count in layers], budget.kv, budget.neurons)
made = torch_pi2.generate(model, torch.arange(1, 6)[None], max_new_tokens=12, do_sample=True, seed=3)
by_transformers = model.generate(torch.arange(1, 6)[None], max_new_tokens=12, do_sample=False)
print(made.sequences, by_transformers.tolist())
"""
    store = made / "thresholds" / "store"
    found = together(tmp_path, script, 2, store.parent / "2")
    model: Any = torch_pi2.load(store, budget="1GiB")
    budget = torch_pi2.stats(model)["budget"]
    drawn = torch_pi2.generate(model, FEW, max_new_tokens=12, do_sample=True, seed=3)
    greedy = model.generate(FEW, max_new_tokens=12, do_sample=False)
    for rank, said in enumerate(found):
        here = [layer // 2 == rank for layer in range(4)]
        assert said.splitlines() == [
            f"{here} {budget.kv // 2} {budget.neurons // 2}",
            f"{drawn.sequences} {greedy.tolist()}",
        ]
