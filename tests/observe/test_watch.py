"""Watching what fires: counts against PyTorch, in memory and over stores."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import SYNTHETIC
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.graph import find_sites
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules, sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.layers.rows import row_of_each
from torch_pi2.observe.watch import Watch
from torch_pi2.ops import ACTIVATIONS
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.rewrite.rewrite import apply
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash

VOCABULARY = 64


def ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def planned(name: str, method: str = "exact", *, hot: float = 0.4, weights: str = "float") -> nn.Module:
    """A tiny model rewritten by a plan of random neuron orders."""
    return copy.deepcopy(_planned(name, method, hot, weights))


@cache
def _planned(name: str, method: str, hot: float, weights: str) -> nn.Module:
    model = tiny(name)
    sites = find_sites(model)
    generator = torch.Generator().manual_seed(3)
    threshold = 0.4 if method == "threshold" else 0.0
    layers, predictors = [], FittedPredictors()
    for site in sites:
        order = torch.randperm(site.intermediate, generator=generator).to(torch.int32)
        n_hot = 0 if method == "threshold" else int(hot * site.intermediate)
        layers.append(LayerPlan(site, method, n_hot, order, threshold, 0.5))
        if method == "signbit":
            gate = site.weights(model).gate
            assert gate is not None
            predictors[site.key] = SignBit.from_weights(gate)
    parts = SparseState(Plan(layers, weights_hash(model, sites)), predictors, None)
    return apply(model, parts, False, Config(weights=weights))


def fires(layer: SparseFFN, x_TH: torch.Tensor, cut: float) -> torch.Tensor:
    """``[T, I]`` bool in original order, from the layer's weights in float64."""
    act, double_TH = ACTIVATIONS[layer.site.activation], x_TH.double()

    def row(role: str) -> torch.Tensor:
        place = 0 if role == "gate" else layer.neuron_rows.shape[1] - 2
        w_IH = row_of_each(layer.neuron_rows, place, layer.weights, layer.site.hidden, torch.float32)
        y_TI = (double_TH @ w_IH.double().T).index_select(1, layer.inverse)
        bias = layer.bias_gate if role == "gate" else layer.bias_up
        return y_TI if bias is None else y_TI + bias.double()[layer.inverse]

    score_TI = row("gate" if layer.site.gated else "up")
    first_TI, score_TI = score_TI, act(score_TI)
    if layer.site.activation_on_up:
        score_TI = score_TI * act(row("up"))
    doubt = first_TI.abs() if cut == 0 else (score_TI.abs() - cut).abs()
    assert float(doubt.min()) > 1e-7, "roundings could decide whether a neuron fires: use other data"
    asked_TI = torch.ones_like(score_TI, dtype=torch.bool)
    if layer.has_predictor:
        asked_TI[:, layer.order[layer.n_hot :]] = layer.predict(x_TH)
    return (score_TI.abs() > cut) & asked_TI


class Reference:
    """The inputs of a model's sparse layers, and what must be counted of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.x: dict[str, list[torch.Tensor]] = {layer.site.key: [] for layer in sparse_layers(model)}
        self._hooks = [
            module.register_forward_pre_hook(
                partial(self._experts if isinstance(layer, SparseExperts) else self._ffn, layer)
            )
            for layer, module in called_modules(model).items()
        ]

    def _ffn(self, layer: Any, _module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.x[layer.site.key].append(args[0].reshape(-1, layer.site.hidden))

    def _experts(self, layer: Any, _module: Any, args: tuple[torch.Tensor, ...]) -> None:
        for e, site in enumerate(layer.sites):
            self.x[site.key].append(args[0][(args[1] == e).any(1)])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self, counts: list[torch.Tensor], cut: float = 0.0) -> None:
        for layer, found in zip(sparse_layers(self.model), counts, strict=True):
            calls = self.x[layer.site.key]
            fired_I = sum(fires(layer, x, cut).sum(0) for x in calls if len(x))
            assert int(found[0]) == sum(map(len, calls))
            assert torch.equal(found[1:], fired_I[layer.order])
            assert 0 < int(found[1:].sum()) < int(found[0]) * layer.site.intermediate


def watch(model: nn.Module) -> Watch:
    return Watch(sparse_layers(model))


@pytest.fixture
def referred() -> Iterator[Callable[[nn.Module], Reference]]:
    made: list[Reference] = []

    def make(model: nn.Module) -> Reference:
        made.append(Reference(model))
        return made[-1]

    yield make
    for reference in made:
        reference.close()


def run(model: nn.Module, vocabulary: int = VOCABULARY) -> None:
    """Steps of 1, 2, 3, 8 and 16 sequences, and a prompt."""
    with torch.no_grad():
        for batch, tokens in ((1, 1), (2, 1), (3, 1), (8, 1), (16, 1), (1, 25)):
            model(ids(batch, tokens, seed=batch) % vocabulary)


CASES = [
    ("llama-bias", "exact", 0.4, "float"),
    ("drelu", "exact", 0.3, "float"),
    ("opt", "exact", 0.3, "float"),
    ("llama", "threshold", 0.0, "float"),
    ("llama-relu", "signbit", 0.3, "int4"),
    ("nemotron", "dense", 1.0, "int8"),
]


@pytest.mark.parametrize(("name", "method", "hot", "weights"), CASES)
def test_counts_are_those_of_the_layer(
    referred: Callable[[nn.Module], Reference], name: str, method: str, hot: float, weights: str
) -> None:
    model = planned(name, method, hot=hot, weights=weights)
    run(model)  # before anybody watches
    reference = referred(model)
    with watch(model) as watched:
        run(model)
        reference.check(watched.counts(), 0.4 if method == "threshold" else 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Synthetic models, quantised: layers with low-rank predictors, and experts; and the stores packed from them."""
    base = tmp_path_factory.mktemp("watch")
    torch_pi2.synthetic(base / "plain", "tiny", active=0.2, weights="int4", layers=2, rank=32)
    mixtral = SYNTHETIC | {"model_type": "mixtral", "num_local_experts": 4}
    torch_pi2.synthetic(base / "experts", mixtral, active=0.3, weights="int4", predictor=None)
    for name in ("plain", "experts"):
        torch_pi2.pack(base / name, base / f"{name}-store")
    return {name: base / name for name in ("plain", "experts", "plain-store", "experts-store")}


@pytest.mark.parametrize("name", ["plain", "experts"])
def test_over_stores_as_in_memory(
    folders: dict[str, Path], referred: Callable[[nn.Module], Reference], name: str
) -> None:
    model = torch_pi2.load(folders[name])
    over = torch_pi2.load(folders[f"{name}-store"], budget="64MiB")
    assert any(layer.has_predictor for layer in sparse_layers(model)) == (name == "plain")
    reference = referred(model)
    found: list[list[torch.Tensor]] = []
    before = torch.get_num_threads()
    try:
        for each, threads in ((model, 2), (over, 1), (over, 2)):
            torch.set_num_threads(threads)
            with watch(each) as watched:
                run(each)
                if threads == 2 and each is model:
                    reference.check(watched.counts())
                with sparse_only(), torch.no_grad():
                    each(ids(2, 40) % 48)  # a prompt that is streamed from a store
                found.append(watched.counts())
    finally:
        torch.set_num_threads(before)
    if name == "plain":
        assert {int(counts[0]) for counts in found[0]} == {55 + 80}
    for counts in found[1:]:
        assert all(map(torch.equal, found[0], counts))


def test_two_threads_lose_nothing() -> None:
    model = planned("llama-relu")
    threads = [threading.Thread(target=run, args=(model,)) for _ in range(2)]
    with watch(model) as watched:
        run(model)
        once = watched.counts()
    sums = [torch.zeros_like(counts) for counts in once]
    with watch(model) as watched:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sums = list(map(torch.add, sums, watched.counts(reset=True)))
        sums = list(map(torch.add, sums, watched.counts(reset=True)))
        assert not any(counts.any() for counts in watched.counts())
    assert all(torch.equal(both, 2 * alone) for both, alone in zip(sums, once, strict=True))


def test_only_while_it_is_on() -> None:
    model = planned("llama-relu")
    watched = watch(model)
    watched.stop()  # it was not started: nothing to stop
    watched.start()
    with pytest.raises(ConfigError, match=r"expected one watch of it at a time, found another one running. Stop that"):
        watch(model).start()
    with pytest.raises(ConfigError, match="one watch of it at a time"):
        watched.start()
    run(model)
    assert {int(counts[0]) for counts in watched.counts()} == {55}
    watched.stop()
    run(model)
    with watched:
        run(model)
        assert {int(counts[0]) for counts in watched.counts()} == {55}  # from the second start
    with watch(planned("llama-relu")), watch(model) as other:  # another model at the same time
        assert not any(counts.any() for counts in other.counts())


def test_a_closed_store_is_refused(folders: dict[str, Path]) -> None:
    over = torch_pi2.load(folders["plain-store"], budget="64MiB")
    watched = watch(over)
    over.torch_pi2.store.close()
    with pytest.raises(ArtifactError, match="an open store, found a store that has been closed"):
        watched.start()


def test_a_watch_that_is_dropped_ends() -> None:
    model = planned("llama-relu")
    dropped = watch(model).start()
    del dropped
    gc.collect()
    with watch(model) as watched:  # not refused: the first one is gone
        run(model)
        assert all(int(counts[0]) > 0 for counts in watched.counts())
