"""Watching what fires: counts against PyTorch, in memory and over stores, and what statistics are made of them."""

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
from torch_pi2.observe.watch import Watch, watch
from torch_pi2.ops import ACTIVATIONS
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.rewrite.rewrite import apply
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash
from torch_pi2.types.stats import ActivationStats

SIZES = (1, 2, 4, 8, 16)
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

    def check(self, stats: ActivationStats, cut: float = 0.0) -> None:
        assert list(stats.layers) == [layer.site.key for layer in sparse_layers(self.model)]
        for layer in sparse_layers(self.model):
            found, calls = stats[layer.site.key], self.x[layer.site.key]
            fired = [fires(layer, x, cut) for x in calls if len(x)]
            assert found.tokens == sum(map(len, calls))
            assert torch.equal(found.fired, sum(f.sum(0) for f in fired))
            assert 0 < int(found.fired.sum()) < found.tokens * found.intermediate
            sizes = (1,) if layer.site.experts is not None else SIZES
            assert found.batch_sizes == sizes
            for k, size in enumerate(sizes):
                steps = [f for f in fired if size == 1 or len(f) <= SIZES[-1]]
                grouped = [f[: len(f) // size * size].reshape(-1, size, f.shape[1]).any(1) for f in steps]
                assert int(found.batch_groups[k]) == sum(map(len, grouped))
                assert torch.equal(found.batch_fired[k], sum(g.sum(0) for g in grouped)), size


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
        assert watched.tokens == 1 + 2 + 3 + 8 + 16 + 25
    reference.check(watched.stats(), 0.4 if method == "threshold" else 0.0)


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
    found: list[ActivationStats] = []
    before = torch.get_num_threads()
    try:
        for each, threads in ((model, 2), (over, 1), (over, 2)):
            torch.set_num_threads(threads)
            with watch(each) as watched:
                run(each)
                if threads == 2 and each is model:
                    reference.check(watched.stats())
                with sparse_only(), torch.no_grad():
                    each(ids(2, 40) % 48)  # a prompt that is streamed from a store
            found.append(watched.stats())
    finally:
        torch.set_num_threads(before)
    assert found[0].tokens == 55 + 80
    for stats in found[1:]:
        assert stats.model_hash == found[0].model_hash
        assert stats.tokens == found[0].tokens
        for a, b in zip(found[0], stats, strict=True):
            assert a.tokens == b.tokens
            assert torch.equal(a.fired, b.fired)
            assert torch.equal(a.batch_fired, b.batch_fired)
            assert torch.equal(a.batch_groups, b.batch_groups)


def test_two_threads_lose_nothing() -> None:
    model = planned("llama-relu")
    threads = [threading.Thread(target=run, args=(model,)) for _ in range(2)]
    with watch(model) as once:
        run(model)
    sums = {s.key: torch.zeros_like(s.fired) for s in once.stats()}
    with watch(model) as watched:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for stats in watched.stats(reset=True):
                sums[stats.key] += stats.fired
        for stats in watched.stats(reset=True):
            sums[stats.key] += stats.fired
        assert watched.tokens == 0
    for stats in once.stats():
        assert torch.equal(sums[stats.key], 2 * stats.fired)


def test_only_while_it_is_on() -> None:
    model = planned("llama-relu")
    watched = watch(model)
    with pytest.raises(ConfigError, match=r"expected a watch that was started, found one that was not. Call start"):
        watched.stop()
    watched.start()
    with pytest.raises(ConfigError, match=r"expected one watch of it at a time, found another one running. Stop that"):
        watch(model).start()
    with pytest.raises(ConfigError, match="one watch of it at a time"):
        watched.start()
    run(model)
    assert watched.stop().tokens == watched.tokens == 55
    run(model)
    assert watched.tokens == 55
    with watched:
        run(model)
    assert watched.stats()["model.layers.0.mlp"].tokens == watched.tokens == 55  # from the second start
    with watch(planned("llama-relu")), watch(model) as other:  # another model at the same time
        pass
    assert other.tokens == 0


def test_what_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"expected a model that torch_pi2.optimize has rewritten, found a dense model"
    ):
        watch(tiny("llama"))
    over = torch_pi2.load(folders["plain-store"], budget="64MiB")
    watched = watch(over)
    over.torch_pi2.store.close()
    with pytest.raises(ArtifactError, match="an open store, found a store that has been closed"):
        watched.start()


def test_statistics_are_whole(tmp_path: Path) -> None:
    model = planned("llama-relu")
    with Watch(model, batch_sizes=(1, 2, 4)) as watched:
        pass
    empty = watched.stats()
    with pytest.raises(
        ConfigError, match=r"firing frequency of .*: expected statistics of some tokens, found none\. Prof"
    ):
        empty.frequency("model.layers.0.mlp")
    assert empty["model.layers.0.mlp"].active_share == 0
    with watched, torch.no_grad():
        run(model)
        model(ids(4, 1))
    stats = watched.stats()
    assert stats.made_by == {"verb": "watch", "watched": True, "tokens": 59}
    again = ActivationStats.load(stats.save(tmp_path), model_hash=model.torch_pi2.plan.model_hash)
    assert [a.active_share for a in again] == [a.active_share for a in stats]
    assert (again.tokens, again.made_by) == (59, stats.made_by)
    for a in stats:
        assert torch.equal(a.frequency(), a.fired.double() / a.tokens)
        assert torch.equal(a.zeros, a.tokens - a.fired)
        assert a.batch_groups.tolist() == [59, 4, 1]
    key = "model.layers.1.mlp"
    assert stats.threshold_for(key, 0.1) == 0.0
    with pytest.raises(
        ConfigError, match=r"expected 1 to 4 \(what was profiled\), found 8. .* or watch so many sequences"
    ):
        stats.frequency(key, 8)
    with pytest.raises(
        ConfigError, match=r"expected statistics with scores, found counts alone, of a model that was wat"
    ):
        stats.threshold_for(key, 0.99)


def test_thresholds_are_those_of_the_profile() -> None:
    model = tiny("llama")
    torch_pi2.optimize(model, ids(16, 32), Config(method="threshold", batch_size=4, seq_len=32, calibration_tokens=512))
    profiled = model.torch_pi2.stats
    with watch(model) as watched:
        run(model)
    live = watched.stats()
    for a, b in zip(profiled, live, strict=True):
        assert a.threshold == b.threshold > 0  # those of the profile, without being asked for


def test_a_watch_that_is_dropped_ends() -> None:
    model = planned("llama-relu")
    dropped = watch(model).start()
    del dropped
    gc.collect()
    with watch(model) as watched:  # not refused: the first one is gone
        run(model)
    assert watched.tokens > 0


def test_thresholds_come_from_statistics_in_the_store(folders: dict[str, Path], tmp_path: Path) -> None:
    torch_pi2.pack(folders["plain"], tmp_path / "store")
    with watch(torch_pi2.load(tmp_path / "store", budget="64MiB")) as watched:
        run(torch_pi2.load(tmp_path / "store", budget="64MiB"))
    watched.stats().save(tmp_path / "store" / "pi2" / "stats.safetensors")
    assert Watch(torch_pi2.load(tmp_path / "store", budget="64MiB")).stats().tokens == 0
