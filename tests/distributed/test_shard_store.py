"""Shards: which neurons are in which, what they say of themselves, and damage that is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Damaged, store_of, toy

import torch_pi2
from torch_pi2.base.fields import Field
from torch_pi2.cli.inspect import describe, render
from torch_pi2.distributed.join import check_activations
from torch_pi2.distributed.shard_store import check_complete, partition_layers, partition_neurons, shards_in
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import GroupConfig, Shard, ShardLayer


def _store(folder: Path, neurons: tuple[int, ...] = (250, 129), **how: Any) -> Path:
    folder.mkdir()
    torch_pi2.pack(toy(folder / "plain", neurons), folder / "store", **how)
    return folder


def test_a_shard_has_its_neurons_and_nothing_of_the_others(tmp_path: Path) -> None:
    base = _store(tmp_path / "base", cluster=4)
    report = torch_pi2.pack(base / "store", base / "2", ranks=2, cluster=4)
    found = shards_in(base / "2")
    assert [*found] == [0, 1]
    assert report.neurons == 250 + 129
    assert report.layers == 2
    with StoreReader(store_of(base / "store")) as whole, Parts(base / "store" / "pi2") as parts:
        plan = parts.plan()
        for rank, folder in found.items():
            with StoreReader(store_of(folder)) as reader:
                shard = reader.shard
                assert shard is not None
                assert (shard.rank, shard.ranks) == (rank, 2)
                assert reader.verify() > 0
                for index, layer in enumerate(plan.layers):
                    at = shard.layers[layer.site.key].positions()
                    assert torch.equal(reader.read_layer(index), whole.read_layer(index)[at])
                    bias = f"{layer.site.key}.bias_up"
                    assert torch.equal(reader.read(bias).view(torch.int32), whole.read(bias)[at].view(torch.int32))
                    assert reader.entries[index].n_hot == (int((at < 5).sum()) if index == 0 else len(at))
                    assert reader.entries[index].chunk == 64
                assert torch.equal(reader.read("lm_head.weight"), whole.read("lm_head.weight"))
                assert reader.metadata["orders_hash"] == whole.metadata["orders_hash"]
            with Parts(folder / "pi2") as own:
                assert own.plan().orders_hash == plan.orders_hash


def test_shards_replace_earlier_ones_and_are_not_packed_again(tmp_path: Path) -> None:
    base = _store(tmp_path / "base")
    other = _store(tmp_path / "other", (250, 130))
    for folder in (base, base, other):
        torch_pi2.pack(folder / "store", folder / "2", ranks=2)
    assert sorted(p.name for p in (base / "2").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert not list((base / "2").rglob(".*"))
    for source, found in ((base / "2", "shards"), (base / "2" / "rank-1-of-2", "shard 1 of 2")):
        with pytest.raises(ConfigError, match=f"a store with all neurons, found {found}. Name the folder that they"):
            torch_pi2.pack(source, tmp_path / "out")
    (base / "2" / "rank-0-of-2" / "notes.docx").write_text("mine")
    with pytest.raises(ArtifactError, match=r"a folder with other files in it: rank-0-of-2/notes\.docx"):
        torch_pi2.pack(base / "store", base / "2", ranks=2)
    shards = []
    for path in (base / "2" / "rank-0-of-2", other / "2" / "rank-1-of-2"):
        with StoreReader(store_of(path)) as reader:
            assert reader.shard is not None
            shards.append(reader.shard)
    with pytest.raises(ArtifactError, match="together have each chunk of each layer once, found others"):
        check_complete([replace(shards[0], layers={}), shards[1]], "here")


_STAGE = "some chunks of every layer, or all of those of blocks that follow each other"
#: The first of two shards by neurons, changed in this way.
DAMAGE: dict[str, tuple[Any, str]] = {
    "other neurons": (lambda said: said["layers"]["layers.0"].update(neurons=251), "metadata has checksum|neurons and"),
    "another chunk": (lambda said: said["layers"]["layers.1"].update(chunks=[0, 1]), "neurons and chunks of a shard"),
    "chunks twice": (lambda said: said["layers"]["layers.0"].update(chunks=[1, 1]), "ascending numbers of chunks"),
    "a chunk beyond": (lambda said: said["layers"]["layers.0"].update(chunks=[4]), "at most 3, found 4"),
    "no chunks": (lambda said: said["layers"]["layers.0"].update(chunks=[]), _STAGE),
    "one rank": (lambda said: said.update(ranks=1), "2 or more, at most 64, found 1"),
    "more ranks than chunks": (lambda said: said.update(ranks=5), "no more machines than each layer has chunks"),
    "rank beyond": (lambda said: said.update(rank=2), "at most 1, found 2"),
    "another layer": (lambda said: said["layers"].update(more=said["layers"]["layers.0"]), "the layers of the store"),
    "more": (lambda said: said.update(more=1), "no other fields"),
}
#: The first of two stages: layers.0 is here, whole; layers.1 is not.
DAMAGED_STAGES: dict[str, tuple[Any, str]] = {
    "half of a layer": (lambda said: said["layers"]["layers.0"].update(chunks=[0, 1]), _STAGE),
    "nothing": (lambda said: said["layers"]["layers.0"].update(chunks=[]), _STAGE),
    "two kinds": (lambda said: said["layers"]["layers.1"].update(chunks=[0]), "the layers of the store, in their ord"),
    "all": (lambda said: said["layers"]["layers.1"].update(chunks=[0, 1, 2]), "the layers of the store"),
    "in no row": (lambda said: said["layers"].update(other=said["layers"].pop("layers.1")), _STAGE),
    "in another row": (lambda said: said["layers"].update({"a.1": said["layers"].pop("layers.1")}), _STAGE),
    "backwards": (
        lambda said: said.update(layers={key: said["layers"][key] for key in ("layers.1", "layers.0")}),
        _STAGE,
    ),
    "not in a row": (lambda said: said["layers"].update({"layers.2": said["layers"]["layers.0"]}), _STAGE),
    "part of a block": (
        lambda said: said.update(
            layers={"layers.0": said["layers"]["layers.0"], "layers.0.b": said["layers"]["layers.1"]}
        ),
        _STAGE,
    ),
}


@pytest.mark.parametrize(("by", "damage"), [("neurons", DAMAGE), ("layers", DAMAGED_STAGES)])
def test_damaged_shards_are_refused(tmp_path: Path, by: str, damage: dict[str, tuple[Any, str]]) -> None:
    base = _store(tmp_path / "base")
    torch_pi2.pack(base / "store", base / "2", ranks=2, by=by)
    path = store_of(shards_in(base / "2")[0])
    sound = path.read_bytes()
    for change, expected in damage.values():
        path.write_bytes(sound)
        damaged = Damaged(path)
        said = json.loads(damaged.meta["shard"])
        change(said)
        damaged.meta["shard"] = json.dumps(said)
        damaged.write(path, sealed="metadata has" not in expected)
        with pytest.raises(ArtifactError, match=expected):
            StoreReader(path).close()
    path.write_bytes(sound)
    damaged = Damaged(path)
    del damaged.meta["shard"]
    damaged.write(path)
    with pytest.raises(ArtifactError, match=r"neurons and chunks of a shard of layers\.0"):
        StoreReader(path).close()


def test_a_shard_says_what_it_is(tmp_path: Path) -> None:
    base = _store(tmp_path / "base")
    torch_pi2.pack(base / "store", base / "2", ranks=2)
    found = describe(base / "2" / "rank-1-of-2")
    assert [layer["neurons"] for layer in found["layers"]] == [122, 64]
    assert found["layers"][0]["hot"] + found["layers"][0]["cold"] == 122
    assert "\nshard 1 of 2, store version 2: 186 of 379 neurons in int4" in render(found)
    assert "\nstore version 2: " in render(describe(base / "store"))


def _plan(neurons: int, method: str = "lowrank", n_hot: int = 70, active: float = 0.1) -> Plan:
    from torch_pi2.types.site import FFNSite, LinearRef

    site = FFNSite("a", 0, "relu", False, None, LinearRef("a.up"), LinearRef("a.down"), 8, neurons, "a")
    order = torch.arange(neurons, dtype=torch.int32).flip(0)
    return Plan([LayerPlan(site, method, n_hot, order, expected_active=active)], "ab")


def test_chunks_are_partitioned_by_their_work() -> None:
    plan = _plan(14336, n_hot=1792)
    even = partition_neurons(plan, 2)
    work = [sum(1.0 if p < 1792 else 0.1 for p in shard.layers["a"].positions().tolist()) for shard in even]
    assert max(work) < 1.15 * min(work)
    assert [len(shard.layers["a"].chunks) for shard in even] == [8, 8]
    assert [len(shard.layers["a"].chunks) for shard in partition_neurons(plan, 3, [2, 1, 1])] == [8, 4, 4]
    assert [len(shard.layers["a"].chunks) for shard in partition_neurons(plan, 3, [100, 1, 1])] == [14, 1, 1]
    assert [len(shard.layers["a"].chunks) for shard in partition_neurons(plan, 2, [1e308, 1e308])] == [8, 8]
    assert sorted(c for shard in partition_neurons(plan, 16) for c in shard.layers["a"].chunks) == list(range(16))
    for ranks, shares, expected in (
        (1, None, "expected 2 to 64 machines"),
        (65, None, "expected 2 to 64 machines, found 65"),
        (17, None, "17 machines for a: expected at most 16, as it has 16 chunks of 896 neurons"),
        (2, [1.0], "expected 2 numbers above 0"),
        (2, [1.0, 0.0], "found 1, 0"),
    ):
        with pytest.raises(ConfigError, match=expected):
            partition_neurons(plan, ranks, shares)
    with pytest.raises(ConfigError, match="5 machines for a: expected at most 4, as it has 4 chunks of 64 neurons"):
        partition_neurons(_plan(250), 5)


def _row(neurons: Sequence[int], names: str = "model.layers.{}.mlp") -> Plan:
    layers = []
    for i, count in enumerate(neurons):
        [layer] = _plan(count).layers
        layers.append(replace(layer, site=replace(layer.site, key=names.format(i))))
    return Plan(layers, "ab")


def test_layers_are_partitioned_by_their_weights() -> None:
    def blocks(plan: Plan, ranks: int, shares: Sequence[float] | None = None) -> list[list[int]]:
        shards = partition_layers(plan, ranks, shares)
        assert all(shard.by_layers for shard in shards)
        count = len(plan.layers)
        for shard in shards:
            assert [shard.has(f"model.layers.{i}.mlp.up.weight") for i in range(count)] == [
                i in shard.blocks(count) for i in range(count)
            ]
            assert shard.has("lm_head.weight")
            assert Shard.from_json(Field(json.loads(shard.to_json()), "shard", "")) == shard
        return [[*shard.blocks(count)] for shard in shards]

    even = _row([256] * 8)
    assert blocks(even, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert blocks(even, 3) == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert blocks(even, 2, [3, 1]) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert blocks(even, 3, [100, 1, 1]) == [[0, 1, 2, 3, 4, 5], [6], [7]]
    assert blocks(even, 3, [100, 1, 1]) == [[0, 1, 2, 3, 4, 5], [6], [7]]
    assert blocks(even, 3, [1, 1, 100]) == [[0], [1], [2, 3, 4, 5, 6, 7]]
    assert blocks(even, 8) == [[i] for i in range(8)]
    assert blocks(_row([64] * 64), 64) == [[i] for i in range(64)]
    assert blocks(_row([1024, 64, 64, 64]), 2) == [[0], [1, 2, 3]]
    experts = Plan([y for i in (0, 1) for y in _row([64] * 3, f"model.layers.{i}.mlp.experts.{{}}").layers], "ab")
    assert [[y.site.key for y in shard.plan(experts).layers] for shard in partition_layers(experts, 2)] == [
        [f"model.layers.{i}.mlp.experts.{j}" for j in range(3)] for i in range(2)
    ]
    # blocks without neurons are where the one before is, the first ones with the first
    gaps = Plan([even.layers[i] for i in (2, 3, 6)], "ab")
    assert [[*shard.blocks(8)] for shard in partition_layers(gaps, 2, [1, 1])] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    with pytest.raises(ConfigError, match="9 machines for 8 blocks of layers: expected at most 8, found 9"):
        partition_layers(even, 9)
    for names in ("ffn_{}", "{}.mlp.x", "a{}.0"):
        with pytest.raises(ConfigError, match=r"expected feed-forward layers in the blocks of one row, .* found"):
            partition_layers(_row([64] * 3, names), 2)


def test_shares_are_for_several_machines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pack\(by='layers'\): expected ranks with it"):
        torch_pi2.pack(tmp_path, tmp_path / "out", by="layers")
    with pytest.raises(ConfigError, match=r"pack\(by=...\): expected neurons or layers, found 'rows'"):
        torch_pi2.pack(tmp_path, tmp_path / "out", ranks=2, by="rows")
    with pytest.raises(ConfigError, match="expected ranks with it, more than 1, found one machine"):
        torch_pi2.pack(tmp_path, tmp_path / "out", shares=[1.0])


@pytest.mark.parametrize("activation", ["gelu_tanh[sigmas=1.6]", "relu2[rms=1e-05]"])
def test_layers_that_need_all_neurons_are_not_divided(activation: str) -> None:
    plan = _plan(250)
    plan.layers[0].site = replace(plan.layers[0].site, activation=activation)
    with pytest.raises(ConfigError, match="a in shards: expected an activation of each neuron by itself, found one"):
        check_activations(plan)


def test_a_layer_of_a_shard() -> None:
    plan = _plan(250)
    layer = replace(plan.layers[0], thresholds=torch.arange(250.0))
    shard = Shard(0, 2, {"a": ShardLayer(250, (0, 1, 3))})
    assert shard.layers["a"].ranges == [(0, 128), (192, 250)]
    mine = shard.layer(layer)
    assert mine.site.intermediate == shard.layers["a"].neurons == 186
    assert mine.n_hot == 70
    assert mine.order.tolist() == list(range(186))
    assert mine.thresholds is not None
    assert mine.thresholds[128:].tolist() == [249.0 - p for p in range(192, 250)]
    assert Shard(1, 2, {"a": ShardLayer(250, (2, 3))}).layer(layer).n_hot == 0


def test_settings_of_a_group_are_checked() -> None:
    for how, expected in (
        ({"reduction": "rings"}, "GroupConfig.reduction: expected "),
        ({"timeout_s": 0.0}, "GroupConfig.timeout_s: expected a number, above 0, found 0"),
        ({"timeout_s": "1"}, "GroupConfig.timeout_s"),
    ):
        with pytest.raises(ConfigError, match=expected):
            GroupConfig(**how)
