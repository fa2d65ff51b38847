"""``follow``: layers with hot neurons by batch, prompts as planned, and a store whose cache follows."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plan_fakes import plan_of
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.plan_controller import PlanController, controller_of, follow
from torch_pi2.errors import ArtifactError, ConfigError, ShapeError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.layers.prompt import skips_predictor, sparse_only, takes_prompt_path
from torch_pi2.observe import counters
from torch_pi2.planner.hot_neurons import plan_without_data
from torch_pi2.rewrite.rewrite import rewrite
from torch_pi2.rewrite.state import store_and_budget
from torch_pi2.store.synthetic import SHAPES
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import HardwarePlan, Plan, PromptPlan, weights_hash

IDS = torch.arange(1, 9)[None]
PREDICTORS: dict[str, dict[str, Any]] = {
    "lowrank int4": {"predictor": "lowrank", "weights": "int4", "rank": 32},
    "lowrank, float weights": {"predictor": "lowrank", "weights": "float32", "rank": 32},
    "exact": {"predictor": None, "weights": "int4"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By predictor, a small synthetic model in which no neuron need be hot."""
    base = tmp_path_factory.mktemp("adapt")
    for name, settings in PREDICTORS.items():
        torch_pi2.synthetic(base / name, "tiny", layers=2, active=0.2, hot_frequency=1.01, **settings)
    return {name: base / name for name in PREDICTORS}


@pytest.fixture(scope="module")
def store(folders: dict[str, Path]) -> Path:
    """Of the model with low-rank predictors."""
    return packed(folders["lowrank int4"])


def packed(folder: Path) -> Path:
    made = folder.with_name(f"{folder.name} store")
    if not made.exists():
        torch_pi2.pack(folder, made)
    return made


def over_store(folder: Path, share: float, **settings: Any) -> tuple[nn.Module, int]:
    """With room for a share of the neurons; and the bytes of that cache."""
    _, whole = store_and_budget(torch_pi2.load(folder, budget="1GiB", offload=OffloadConfig(preload=False)))
    cache = int(share * whole.neurons) // whole.slot * whole.slot
    model = torch_pi2.load(folder, budget=whole.smallest + whole.in_slots(cache), offload=OffloadConfig(**settings))
    return model, model.torch_pi2.budget.cache


def logits(model: nn.Module, batch: int) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[:, :1].repeat(batch, 1)).logits


# --- layers ---


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", PREDICTORS)
def test_a_layer_computes_what_one_with_so_many_hot_neurons_does(
    folders: dict[str, Path], name: str, stored: bool
) -> None:
    folder = packed(folders[name]) if stored else folders[name]
    settings: dict[str, Any] = {"budget": "1GiB"} if stored else {}
    model = torch_pi2.load(folder, **settings)
    own = model.torch_pi2.plan
    layer, neurons = sparse_layers(model)[1], own.layers[1].site.intermediate
    layer.by_batch = ((1, 70), (3, 129), (4, neurons))
    x = torch.randn(9, layer.site.hidden, generator=torch.Generator().manual_seed(0))
    seen = set()
    for tokens, hot in ((1, 70), (2, 129), (3, 129), (4, neurons), (5, neurons), (9, neurons)):
        assert layer.hot_for(tokens) == hot
        other = replace(own, layers=[replace(y, n_hot=hot) for y in own.layers])
        same = sparse_layers(torch_pi2.load(folder, plan=other, **settings))[1]
        assert same.n_hot == hot
        with torch.no_grad():
            counters.reset()
            y = layer(x[:tokens])
            work = counters.read(reset=True)
            assert torch.equal(y, same(x[:tokens]))
            assert counters.read(reset=True) == work
        seen.add(work["gate_rows"] / tokens)
    if name != "exact":
        assert len(seen) > 2  # the more neurons are hot, the more are computed
        layer.by_batch = ()
        assert layer.hot_for(9) == layer.n_hot == 0


@pytest.mark.parametrize("name", ["lowrank int4", "lowrank, float weights"])
def test_all_hot_is_the_dense_layer_and_one_boundary_the_same_bits(folders: dict[str, Path], name: str) -> None:
    model = torch_pi2.load(folders[name])
    layer = sparse_layers(model)[0]
    x = torch.randn(2, layer.site.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.by_batch = ((1, 0), (2, layer.site.intermediate))
        assert torch.equal(layer(x), layer._compute(x, layer.site.intermediate, 0.0))
        layer.by_batch = ((1, 90), (2, 90))
        assert torch.equal(layer(x), torch.cat([layer(x[:1]), layer(x[1:])]))


@pytest.mark.parametrize("stored", [False, True])
def test_compiled_steps_have_the_hot_neurons_of_their_batch(folders: dict[str, Path], stored: bool) -> None:
    folder = folders["lowrank int4"]
    model = torch_pi2.load(packed(folder), budget="1GiB") if stored else torch_pi2.load(folder)
    neurons = sparse_layers(model)[0].site.intermediate
    follow(model, plan_of(model, {1: 64, 2: neurons}))
    eager = Decoder(model, max_tokens=16, batch=2, compiled=False)
    compiled = Decoder(model, max_tokens=16, batch=2, backend="eager")  # Dynamo alone: the same bits
    rows = {}
    for decoder in (eager, compiled):
        token = decoder.prompt(IDS)
        work = []
        for _ in range(2):
            decoder.step(token)  # compiles
            counters.reset()
            decoder.step(token)
            work.append(counters.read(reset=True)["gate_rows"])
            if decoder.batch == 1:
                decoder.fork(2)
                token = token.repeat(2, 1)
        rows[decoder] = work
    assert rows[eager] == rows[compiled]
    assert rows[eager][1] == 2 * neurons * len(sparse_layers(model)) > 2 * rows[eager][0]


@pytest.mark.parametrize("name", ["lowrank int4", "lowrank, float weights"])
def test_neurons_that_no_predictor_has_rows_for_stay_hot(folders: dict[str, Path], name: str) -> None:
    own = torch_pi2.load(folders[name]).torch_pi2.plan
    planned = replace(own, layers=[replace(y, n_hot=100) for y in own.layers])
    model = torch_pi2.load(folders[name], plan=planned)
    layer = sparse_layers(model)[0]
    assert layer.least_hot == 100
    with pytest.raises(ShapeError, match=r"expected 100 to \d+ hot neurons of .*, found 99\."):
        follow(model, plan_of(model, {1: 99}))


@pytest.mark.parametrize("stored", [False, True])
def test_an_exact_layer_may_have_fewer_hot_neurons_than_planned_first(folders: dict[str, Path], stored: bool) -> None:
    own = torch_pi2.load(folders["exact"]).torch_pi2.plan
    planned = replace(own, layers=[replace(y, n_hot=100) for y in own.layers])
    settings: dict[str, Any] = {"budget": "1GiB"} if stored else {}
    folder = packed(folders["exact"]) if stored else folders["exact"]
    model = torch_pi2.load(folder, plan=planned, **settings)
    wanted = {batch: logits(model, batch) for batch in (1, 2, 3)}
    follow(model, plan_of(model, {1: 0, 2: 7, 4: 300}))
    for layer in sparse_layers(model):
        assert (layer.n_hot, layer.least_hot, layer.hot_for(1), layer.hot_for(2)) == (100, 0, 0, 7)
        assert not layer.predictor()
    for batch, bits in wanted.items():
        assert torch.equal(logits(model, batch), bits)


def with_hot(method: str, n_hot: int, threshold: float = 0.0) -> nn.Module:
    """A tiny model with so many hot neurons in each layer."""
    model = tiny("llama-relu")
    plan = exact_plan(model)
    layers = [replace(y, method=method, n_hot=n_hot, threshold=threshold) for y in plan.layers]
    return rewrite(model, replace(plan, layers=layers))


def exact_plan(model: nn.Module) -> Plan:
    sites = torch_pi2.find_sites(model)
    return plan_without_data(sites, weights_hash(model, sites), torch_pi2.Config())


def test_layers_with_a_threshold_keep_their_hot_neurons() -> None:
    model = with_hot("threshold", 4, 0.1)
    follow(model, plan_of(model, {1: 0, 2: 48}))
    assert all(layer.by_batch == () and layer.hot_for(2) == 4 for layer in sparse_layers(model))


@pytest.mark.parametrize("method", ["exact", "dense", "threshold"])
def test_a_step_is_never_a_prompt(method: str) -> None:
    model = with_hot(method, 4, 0.1 if method == "threshold" else 0.0)
    wanted = {batch: logits(model, batch) for batch in (2, 4)}
    follow(model, plan_of(model, {1: 48, 4: 48}, dense_from=2))
    for batch, bits in wanted.items():
        assert torch.equal(logits(model, batch), bits)
    for layer in sparse_layers(model):
        assert layer.dense_from == 5
        x = torch.randn(5, layer.site.hidden)
        assert [takes_prompt_path(layer, x[:n]) for n in (4, 5)] == [False, True]
    follow(model, plan_of(model, {1: 48, 4: 48}, dense_from=0))
    assert all(layer.dense_from == 0 for layer in sparse_layers(model))  # never


def test_a_plan_says_from_when_on_prompts_are_dense(folders: dict[str, Path]) -> None:
    model = torch_pi2.load(folders["lowrank int4"])
    layer = sparse_layers(model)[0]
    layer.expected_share = 0.1  # sparse, however many tokens there are
    x = torch.randn(40, layer.site.hidden)

    def dense(tokens: int) -> bool:
        assert not skips_predictor(layer, x[:tokens])
        return takes_prompt_path(layer, x[:tokens])

    assert not dense(40)
    follow(model, plan_of(model, {1: 0}, dense_from=20))
    assert [dense(tokens) for tokens in (19, 20, 40)] == [False, True, True]
    with sparse_only():
        assert not dense(40)
    layer.expected_share = 1.0
    follow(model, plan_of(model, {1: 0}, dense_from=0))
    assert not dense(40)
    over = torch_pi2.load(packed(folders["lowrank int4"]), budget="1GiB")
    stored = sparse_layers(over)[0]
    follow(over, plan_of(over, {1: 0}, dense_from=20))
    assert not takes_prompt_path(stored, x)
    assert [skips_predictor(stored, x[:tokens]) for tokens in (19, 20)] == [False, True]


# --- the controller ---


def test_a_prompt_that_joins_is_one_more_sequence() -> None:
    """Its chunks, of one sequence each, are no steps of one: the plan goes up once and stays."""
    model = torch_pi2.optimize(tiny("llama-relu"))
    controller = follow(model, plan_of(model, {1: 4, 2: 8, 3: 12, 4: 48}))
    decoder = Decoder(model, max_tokens=32, batch=4, compiled=False, chunk_tokens=4)
    for sequences in (1, 2, 3):
        for _ in decoder.add(IDS):
            assert controller.sequences == sequences
        decoder.step(torch.ones(sequences, 1, dtype=torch.int64))
    assert controller.bucket.batch == 3


def test_generation_is_seen_and_its_batch_followed() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    how: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    wanted = model.generate(IDS, do_sample=False, **how)
    controller = follow(model, plan_of(model, {1: 4, 2: 8, 4: 48}))
    assert controller_of(model) is controller
    assert torch.equal(model.generate(IDS, do_sample=False, **how), wanted)
    assert (controller.sequences, controller.bucket.batch) == (1, 1)
    model.generate(IDS, do_sample=True, num_return_sequences=3, **how)
    assert (controller.sequences, controller.bucket.batch) == (3, 4)
    controller.batch(2)
    assert controller.bucket.batch == 2
    assert pickle.loads(pickle.dumps(controller)) is None


def test_another_plan_takes_over_and_restored_models_are_free() -> None:
    model = tiny("llama-relu")
    before = model.model.layers[0].mlp
    torch_pi2.optimize(model)
    first = follow(model, plan_of(model, {1: 4}))
    second = follow(model, plan_of(model, {1: 6}))
    first.batch(4)
    assert (controller_of(model), first.sequences) == (second, 1)
    assert sparse_layers(model)[1].by_batch == ((1, 6),)
    torch_pi2.restore(model)
    assert model.model.layers[0].mlp is before
    second.batch(3)  # nothing is left to follow
    assert controller_of(model) is None
    torch_pi2.optimize(model)
    assert controller_of(model) is None
    assert all(layer.by_batch == () for layer in sparse_layers(model))


def test_a_copy_follows_no_plan_until_it_is_given_one() -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    first = follow(model, plan_of(model, {1: 4, 2: 8}))
    twin, dense = copy.deepcopy(model), copy.deepcopy(model)
    assert controller_of(twin) is None
    second = follow(twin, plan_of(twin, {1: 6, 2: 7}))
    second.batch(2)
    torch_pi2.restore(dense)
    assert (controller_of(model), controller_of(twin), controller_of(dense)) == (first, second, None)
    assert (first.sequences, sparse_layers(model)[0].by_batch) == (1, ((1, 4), (2, 8)))


def test_a_budget_that_changes_while_a_plan_comes_into_force(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = over_store(store, 0.5)
    over, budget = store_and_budget(model)
    arrange, less = over.arrange, budget.smallest + budget.in_slots(cache // 4)

    def after_another(*args: Any) -> None:
        monkeypatch.undo()
        torch_pi2.set_budget(model, less)
        arrange(*args)

    monkeypatch.setattr(over, "arrange", after_another)
    follow(model, plan_of(model, {1: 0}, resident={1: 8}, budget=budget.total, cache={1: cache}))
    has = torch_pi2.stats(model)
    assert has["budget"].total <= less
    assert has["cache_bytes"] <= has["budget"].cache < cache


@pytest.mark.parametrize("before", [False, True])
def test_what_fails_half_way_leaves_the_model_as_it_was(store: Path, before: bool) -> None:
    model, cache = over_store(store, 0.5)
    first = follow(model, plan_of(model, {1: 64}, dense_from=30)) if before else None
    was = [(layer.by_batch, layer.dense_from) for layer in sparse_layers(model)]
    model.torch_pi2.store.close()
    with pytest.raises(ArtifactError, match="closed"):
        follow(model, plan_of(model, {1: 10}, dense_from=40, budget=1, cache={1: cache}))
    assert [(layer.by_batch, layer.dense_from) for layer in sparse_layers(model)] == was
    assert controller_of(model) is first
    if first is not None:
        first.batch(3)  # goes on
        assert first.sequences == 3


def test_decoders_say_how_many_sequences_there_are() -> None:
    model = tiny("llama-relu")
    torch_pi2.optimize(model)
    controller = follow(model, plan_of(model, {1: 0, 2: 8, 4: 48}))
    controller.batch(3)
    decoder = Decoder(model, max_tokens=16, batch=4, compiled=False)
    token = decoder.prompt(IDS)
    decoder.step(token)
    assert controller.sequences == 1
    decoder.fork(4)
    assert controller.bucket.batch == 4
    decoder.retain([0, 3])
    decoder.step(token.repeat(2, 1))
    assert (controller.sequences, controller.bucket.batch) == (2, 2)


def test_prompts_say_it_before_keys_and_values_want_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-relu")
    torch_pi2.optimize(model)
    controller = follow(model, plan_of(model, {1: 0, 2: 8, 4: 48}))
    decoder = Decoder(model, max_tokens=16, batch=4, compiled=False)
    seen: list[tuple[str, int]] = []
    tell, give_back = controller.batch, decoder._kv.give_back
    monkeypatch.setattr(controller, "batch", lambda n: (seen.append(("batch", n)), tell(n)))
    monkeypatch.setattr(decoder._kv, "give_back", lambda n: (seen.append(("give back", n)), give_back(n)))
    monkeypatch.setattr(model.torch_pi2, "store", Mock(budget=None))  # memory is given back over a store
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: seen.append(("read", controller.sequences)))
    for sequences, first in ((1, []), (4, []), (2, ["give back"])):  # at first there is nothing to give back
        decoder.prompt(IDS.repeat(sequences, 1))
        assert seen[: len(first) + 2] == [(what, sequences) for what in (*first, "batch", "read")]
        seen.clear()
    with pytest.raises(ShapeError, match="prompt: expected"):
        decoder.prompt(IDS.repeat(5, 1))
    assert seen == []


def broken(plan: HardwarePlan, **changes: Any) -> HardwarePlan:
    return replace(plan, buckets=(*plan.buckets[:-1], replace(plan.buckets[-1], **changes)))


def test_plans_that_cannot_be_followed() -> None:
    dense = tiny("llama-relu")
    model = with_hot("exact", 4)
    good = plan_of(model, {1: 4, 2: 8})
    own = exact_plan(tiny("llama-relu"))
    cases: Sequence[tuple[nn.Module, Any, type[Exception], str]] = (
        (dense, good, ConfigError, r"expected a model with sparse layers, .* found a model without\. Call torch_pi2"),
        (model, own, ConfigError, r"a plan with a part for hardware, found a plan without\. Plan with --hardware"),
        (model, broken(good, hot=(8,)), ShapeError, r"expected 2 layers, found hot of batch 2: 1\."),
        (model, broken(good, hot=(8, 49)), ShapeError, r"expected 0 to 48 hot neurons of .*\.1\.mlp, found 49\."),
        (model, broken(good, resident=(8, 49)), ShapeError, r"expected 0 to 48 resident neurons of .*, found 49\."),
        (model, replace(good, prompt=PromptPlan((0,))), ShapeError, r"expected 2 layers, found dense_from: 1\."),
    )
    for subject, plan, error, message in cases:
        with pytest.raises(error, match=message):
            follow(subject, plan)
    assert controller_of(model) is None
    layers = [replace(y, site=replace(y.site, key=f"other.{i}")) for i, y in enumerate(own.layers)]
    with pytest.raises(ShapeError, match=r"expected model\.layers\.0\.mlp, found other\.0\."):
        follow(model, replace(own, layers=layers, hardware=good))


# --- over a store ---


def switching(model: nn.Module, controller: PlanController | None) -> Iterator[torch.Tensor]:
    """Logits of steps while the number of sequences changes."""
    for batch in (1, 4, 4, 2, 1, 3, 1, 1):
        if controller is not None:
            controller.batch(batch)
        yield logits(model, batch)


def test_bits_over_a_store_while_its_cache_follows(store: Path, folders: dict[str, Path]) -> None:
    in_memory = torch_pi2.load(folders["lowrank int4"])
    hot = {1: 64, 2: 128, 4: 512}
    follow(in_memory, plan_of(in_memory, hot))
    wanted = list(switching(in_memory, None))
    model, cache = over_store(store, 0.6)
    slot = model.torch_pi2.budget.slot
    sizes = {1: cache, 2: cache - 100 * slot, 4: cache - 200 * slot}
    plan = plan_of(model, hot, budget=1, resident={1: 32, 2: 100, 4: 200}, cache=sizes)
    controller = follow(model, plan)
    for got, bits in zip(switching(model, controller), wanted, strict=True):
        assert torch.equal(got, bits)
        assert torch_pi2.stats(model)["cache_bytes"] <= sizes[controller.bucket.batch]
    controller.batch(4)
    torch_pi2.set_budget(model, model.torch_pi2.budget.smallest + 300 * (slot + 40))
    controller.batch(1)
    assert torch_pi2.stats(model)["cache_bytes"] <= 300 * slot  # the plan's is more than the budget has
    assert torch.equal(logits(model, 1), wanted[0])


def test_another_budget_keeps_to_the_plan(store: Path) -> None:
    model, cache = over_store(store, 0.8)
    opened, parts = store_and_budget(model)
    slot = parts.slot
    planned = {1: 400 * slot, 4: 300 * slot}
    assert planned[1] < cache
    plan = plan_of(model, {1: 64, 4: 128}, budget=1, resident={1: 100, 4: 60}, cache=planned)
    controller = follow(model, plan)
    wanted = logits(model, 1)

    def settled() -> tuple[int, int, tuple[int, ...]]:
        until = time.monotonic() + 30
        while opened.stats()["arranging"] and time.monotonic() < until:
            time.sleep(0.005)
        found = opened.stats()
        assert found["resident"] <= found["slots"]
        return found["cache_bytes"] // slot, found["fixed"], opened.resident

    assert settled() == (400, 200, (100, 100))
    for slots, expected in ((200, (200, 100, (50, 50))), (500, (400, 200, (100, 100))), (0, (0, 0, (0, 0)))):
        made = torch_pi2.set_budget(model, parts.smallest + parts.in_slots(slots * slot))
        assert made.cache == slots * slot
        assert settled() == expected
        assert torch.equal(logits(model, 1), wanted)
    controller.batch(4)
    torch_pi2.set_budget(model, parts.smallest + parts.in_slots(500 * slot))
    assert settled() == (300, 120, (60, 60))
    torch_pi2.set_budget(copy.deepcopy(model), parts.smallest + parts.in_slots(150 * slot))  # over the same store
    assert opened.stats()["cache_bytes"] == 150 * slot


def test_a_cache_that_is_smaller_than_planned(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, cache = over_store(store, 0.5)
    plan = plan_of(model, {1: 64}, budget=1, resident={1: 100}, cache={1: 2 * cache})
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        follow(model, plan)
    assert "fewer neurons than planned stay in memory" in caplog.text
    assert torch_pi2.stats(model)["store"].resident == (50, 50)
    assert torch_pi2.stats(model)["cache_bytes"] == cache


def test_a_plan_for_memory_leaves_a_store_alone(store: Path) -> None:
    model, cache = over_store(store, 0.5)
    follow(model, plan_of(model, {1: 64, 4: 128})).batch(4)
    assert torch_pi2.stats(model)["cache_bytes"] == cache
    assert sparse_layers(model)[0].by_batch == ((1, 64), (4, 128))


def test_guesses_are_made_with_the_hot_neurons_of_the_batch(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, stats = {}, {}
    told: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    announce = OffloadedFFN.announce

    def recorded(layer: OffloadedFFN, batch: int = 1) -> None:
        told[lookahead].append((layer.store_layer, batch, layer.hot_for(batch)))
        announce(layer, batch)

    monkeypatch.setattr(OffloadedFFN, "announce", recorded)
    for lookahead in (False, True):
        model, cache = over_store(store, 0.3, lookahead=lookahead, preload=False)
        neurons = sparse_layers(model)[0].site.intermediate
        sizes = dict.fromkeys((1, 2, 4), cache)
        controller = follow(model, plan_of(model, {1: 64, 2: 200, 4: neurons}, budget=1, cache=sizes))
        wanted[lookahead] = []
        for batch in (1, 2, 3, 4, 1):
            controller.batch(batch)
            wanted[lookahead].append(logits(model, batch))
        stats[lookahead] = torch_pi2.stats(model)
    assert all(map(torch.equal, wanted[False], wanted[True]))
    assert stats[False]["guessed"] == 0 < stats[True]["used"]
    assert told[False] == []
    # as loaded, followed, and then for each number of sequences that changes the bucket
    expected = ((1, 0), (1, 64), (2, 200), (4, neurons), (1, 64))
    assert [sorted(told[True][i : i + 2]) for i in range(0, 10, 2)] == [[(0, *now), (1, *now)] for now in expected]


def test_experts_have_no_hot_neurons_and_a_store_that_follows(tmp_path: Path) -> None:
    shape = SHAPES["tiny"] | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}
    torch_pi2.synthetic(tmp_path / "m", shape | {"intermediate_size": 256}, rank=16, layers=1, active=0.2)
    torch_pi2.pack(tmp_path / "m", tmp_path / "s")
    model, cache = over_store(tmp_path / "s", 0.5)
    wanted = [logits(model, batch) for batch in (1, 4)]
    plan = plan_of(model, {1: 0, 4: 100}, budget=1, resident={1: 10, 4: 20}, cache={1: cache, 4: cache // 2})
    controller = follow(model, plan)
    for batch, bits in zip((1, 4), wanted):
        controller.batch(batch)
        assert torch.equal(logits(model, batch), bits)
    assert torch_pi2.stats(model)["cache_bytes"] <= cache // 2
    assert all(isinstance(layer, OffloadedFFN) and layer.by_batch == () for layer in sparse_layers(model))
