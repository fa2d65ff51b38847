"""Models over a neuron store: the bits of the model in memory, the budget, and specific errors when reading fails."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offloading import CONFIGS, IDS, logits, smallest
from operators import opcheck
from shared import small_store
from torch import nn

import torch_pi2
from torch_pi2.base.units import mebibytes
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.offloaded import STATISTICS, OffloadedFFN, Store
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load
from torch_pi2.rewrite.state import store_and_budget
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.offload import OffloadConfig


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the store packed from it."""
    base = small_store(tmp_path_factory)
    return base / "plain", base / "store"


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bits_do_not_depend_on_the_budget(
    folders: tuple[Path, Path], config: OffloadConfig, activations: str
) -> None:
    plain, store = folders
    in_memory = torch_pi2.load(plain, activations=activations)
    with torch_pi2.layers.prompt.sparse_only():
        wanted = logits(in_memory)
    for extra in (0, 100_000, 1 << 30):
        model = torch_pi2.load(store, activations=activations, budget=smallest(store) + extra, offload=config)
        layers = [m for m in model.modules() if isinstance(m, OffloadedFFN)]
        assert layers
        assert all(layer.neuron_rows.is_meta for layer in layers)
        for _ in range(2):
            assert torch.equal(logits(model), wanted)
        stats = torch_pi2.stats(model)
        assert set(STATISTICS) < set(stats)
        assert stats["cache_bytes"] <= stats["budget"].cache
        assert stats["wanted"] > 0
        if extra == 1 << 30 and config.engine != "mmap" and config.preload and not config.window:
            assert stats["hit_rate"] == 1
            assert stats["bytes_read"] == 0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_guesses_about_the_next_layer_are_read_before_it(folders: tuple[Path, Path], compiled: bool) -> None:
    plain, store = folders
    ids = torch.arange(3, 43)[:, None, None]

    def decoded(model: nn.Module) -> list[int]:
        decoder = Decoder(model, max_tokens=64, compiled=compiled)
        decoder.prompt(IDS[:1])
        found = [int(decoder.step(ids[0]))]  # a step that is compiled has no room for a cache meanwhile
        if model.torch_pi2.store:
            torch_pi2.stats(model, reset=True)
        return [*found, *(int(decoder.step(token)) for token in ids[1:])]

    config = OffloadConfig(lookahead=True, preload=False)
    model = torch_pi2.load(store, budget=smallest(store) + 100_000, offload=config, context=64)
    assert decoded(model) == decoded(torch_pi2.load(plain))
    stats = torch_pi2.stats(model)
    assert 0.5 * stats["guessed"] < stats["used"] <= stats["guessed"]
    assert stats["used"] > 0.4 * (stats["wanted"] - stats["hits"])  # of four layers the first has none before it


@pytest.mark.slow
def test_compiled_decoding_over_a_store(folders: tuple[Path, Path]) -> None:
    plain, store = folders
    tokens = []
    for model in (torch_pi2.load(plain), torch_pi2.load(store, budget=smallest(store) + 200_000)):
        decoder = Decoder(model, max_tokens=24)
        with torch_pi2.layers.prompt.sparse_only():
            token = decoder.prompt(IDS[:1])
        tokens.append([int(token)])
        for _ in range(6):
            token = decoder.step(token)
            tokens[-1].append(int(token))
    assert tokens[0] == tokens[1]


def test_small_caches_keep_more_of_what_is_frequent(folders: tuple[Path, Path]) -> None:
    path = folders[1] / "pi2" / "model.pi2"
    for policy, share, tokens in (("lfu", 0.25, 1.25), ("lru", 0.5, 2)):
        config, enough = OffloadConfig(policy=policy), int((1 << 20) / tokens)
        assert Store(path, 1 << 20, config).hot_share == share
        assert Store(path, 1 << 20, config, token_bytes=enough).hot_share == share
        assert Store(path, 1 << 20, config, token_bytes=enough + 1).hot_share == 0.9
    assert Store(path, 1 << 20, OffloadConfig(hot_share=0.75), token_bytes=1 << 20).hot_share == 0.75
    _, whole = store_and_budget(torch_pi2.load(folders[1], budget="1GiB"))
    model = torch_pi2.load(folders[1], budget=whole.smallest + whole.in_slots(whole.token))
    store, budget = store_and_budget(model)
    assert 0 < budget.cache < 1.25 * budget.token
    assert store.hot_share == 0.9


def test_two_models_over_one_store_and_closing(folders: tuple[Path, Path]) -> None:
    _, folder = folders
    first, second = (torch_pi2.load(folder, budget=smallest(folder) + 50_000) for _ in range(2))
    wanted = logits(first)
    assert torch.equal(logits(second), wanted)
    torch_pi2.stats(first)["store"].close()
    with pytest.raises(ArtifactError, match=r"expected an open store, found a store that has been closed"):
        logits(first)
    assert torch.equal(logits(second), wanted)


def test_damage_after_loading_is_an_error_and_repair_heals_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "store"
    shutil.copytree(folders[1], folder)
    path = folder / "pi2" / "model.pi2"
    with StoreReader(path) as reader:
        entry = reader.entries[1]
    model = torch_pi2.load(folder, budget=smallest(folder), offload=OffloadConfig(preload=False))
    wanted = logits(model)
    whole = path.read_bytes()
    slots = slice(entry.slots, entry.slots + entry.neurons * entry.slot_bytes)
    with path.open("r+b") as file:  # in place: the same file stays open
        file.seek(slots.start)
        file.write(bytes(b ^ 1 for b in whole[slots]))
    with pytest.raises(ArtifactError, match=r"model\.pi2, read for .*found layer 1, neuron \d+ at \d+: its checksum"):
        logits(model)
    with path.open("r+b") as file:
        file.write(whole)
    assert torch.equal(logits(model), wanted)
    os.truncate(path, slots.start)
    with pytest.raises(ArtifactError, match=r"found layer \d+, neuron .*Input/output error"):
        logits(model)
    with pytest.raises(ArtifactError, match=r"model\.pi2"):
        torch_pi2.load(folder, budget="1GiB")


def test_what_cannot_be_done_says_so(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    plain, folder = folders
    with pytest.raises(ConfigError, match=r"expected a folder with a neuron store .* torch_pi2.pack"):
        torch_pi2.load(plain, budget="1GiB")
    with pytest.raises(ConfigError, match=r"expected at least [\d.]+ MiB \(fixed .*\), found 1.0 MiB. Give"):
        torch_pi2.load(folder, budget="1MiB", context=100_000)
    least = torch_pi2.stats(torch_pi2.load(folder, budget=smallest(folder)))["budget"].smallest
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        model = torch_pi2.load(folder, budget=least + 10_000)
    assert "holds less than the" in caplog.text
    enough = mebibytes(torch_pi2.stats(model)["budget"].cliff, up=True)
    assert f"From a budget of {enough} on it would not." in caplog.text
    with pytest.raises(ConfigError, match=r"expected a layer in memory, found one in model\.pi2"):
        model.state_dict()
    with pytest.raises(ConfigError, match=rf"at least {mebibytes(least, up=True)} .*, found {mebibytes(least - 1)}\. "):
        torch_pi2.load(folder, budget=least - 1)
    for settings in ({"offload": OffloadConfig()}, {"context": 64}):
        named = ", ".join(f"{name}=..." for name in sorted(settings, reverse=True))
        with pytest.raises(ConfigError, match=re.escape(f"load({folder}, {named}): expected a budget with it, found")):
            torch_pi2.load(folder, **settings)
    with pytest.raises(ConfigError, match=r"group=\.\.\.\): expected a shard, found a whole model"):
        torch_pi2.load(folder, group=torch_pi2.GroupConfig())
    with pytest.raises(ConfigError, match=r"load\(context=\.\.\.\): expected a whole number, 1 or more, .*found -1"):
        torch_pi2.load(folder, budget="1GiB", context=-1)
    with pytest.raises(ConfigError, match="expected a model over a neuron store, found one in memory"):
        torch_pi2.stats(nn.Linear(2, 2))
    with pytest.raises(ArtifactError, match="expected a sound neuron store, found cannot be opened: No such file"):
        Store(folder / "nothing", 0)
    for settings, message in (
        ({"engine": "tape"}, "OffloadConfig.engine: expected auto or io_uring or pread or mmap, found 'tape'"),
        (
            {"policy": "clock"},
            "OffloadConfig.policy: expected lru or sieve or s3-fifo or lfu or static or none, found 'clock'",
        ),
        ({"io_threads": 0}, "OffloadConfig.io_threads: expected a whole number, 1 or more"),
        ({"hot_share": 2.0}, "OffloadConfig.hot_share: expected a number, 0 or more, at most 1, found 2.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            OffloadConfig(**settings)


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_margin_leaves_out_what_is_neither_likely_nor_in_memory(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, lookahead: bool
) -> None:
    plain, store = folders
    wanted = logits(torch_pi2.load(plain))
    config = OffloadConfig(miss_margin=0.5, lookahead=lookahead)
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        whole = torch_pi2.load(store, budget="1GiB", offload=config)
    assert "lossy: 4 layers with low-rank predictors (method='lowrank'; not experts) leave" in caplog.text
    assert whole.torch_pi2.lossy
    assert whole.torch_pi2.loss_change is None
    assert torch.equal(logits(whole), wanted)  # everything is there
    assert torch_pi2.stats(whole)["left_out"] == 0
    assert "lossy" not in str(torch_pi2.stats(whole))

    higher = torch_pi2.load(plain)  # what it comes to if nothing is there
    for module in higher.modules():
        if isinstance(module, SparseFFN):
            module.predictor_threshold += 0.5
    with torch_pi2.layers.prompt.sparse_only():
        fewer = logits(higher, IDS[:1])
    assert not torch.equal(fewer, wanted[:1])
    nothing = torch_pi2.load(store, budget="1GiB", offload=replace(config, policy="none", lookahead=False))
    with torch_pi2.layers.prompt.sparse_only():
        for ids in IDS[:1, :, None].split(1, dim=1):
            found = nothing(ids.view(1, 1)).logits
            assert torch.equal(found, higher(ids.view(1, 1)).logits)
    stats = torch_pi2.stats(nothing)
    assert stats["left_out"] > 0
    assert str(stats).endswith(f" of cache); {stats['left_out']} neurons were left out (lossy)")

    some = torch_pi2.load(store, budget=smallest(store) + 100_000, offload=replace(config, preload=False))
    decoder = Decoder(some, max_tokens=64, compiled=False)
    decoder.prompt(IDS[:1])
    for token in torch.arange(3, 43):
        decoder.step(token.view(1, 1))
    stats = torch_pi2.stats(some)
    assert 0 < stats["left_out"] < stats["wanted"]


def test_a_margin_that_nothing_can_be_done_with_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"miss_margin: expected a number, 0 or more, found -1"):
        OffloadConfig(miss_margin=-1)
    with pytest.raises(ConfigError, match=r"miss_margin: expected a finite number, found nan"):
        OffloadConfig(miss_margin=float("nan"))
    with pytest.raises(ConfigError, match=r"miss_margin: expected engine .*found mmap, where only the system knows"):
        torch_pi2.load(folders[1], budget="1GiB", offload=OffloadConfig(miss_margin=1, engine="mmap"))
    torch_pi2.synthetic(tmp_path / "plain", "tiny", active=0.2, predictor=None)
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    with pytest.raises(
        ConfigError,
        match=r"miss_margin: expected layers with low-rank predictors .*, found methods exact and 0 mixtures",
    ):
        torch_pi2.load(tmp_path / "store", budget="1GiB", offload=OffloadConfig(miss_margin=1))
    with pytest.raises(ConfigError, match=r"drop_experts: expected mixtures of experts, found methods"):
        torch_pi2.load(tmp_path / "store", budget="1GiB", offload=OffloadConfig(drop_experts=0.1))
    assert "lossy" not in caplog.text


def test_copies_share_the_store_and_conversions_leave_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import pickle

    model = torch_pi2.load(folders[1], budget=smallest(folders[1]) + 50_000)
    wanted = logits(model)
    twin = copy.deepcopy(model).cpu()
    loaded = torch_pi2.stats(model)
    parts = loaded["budget"]
    small = torch_pi2.set_budget(model, parts.smallest + 10_000)
    assert torch_pi2.stats(twin)["budget"] == small  # of the one cache that there is
    assert torch_pi2.set_budget(twin, parts.total) == parts == torch_pi2.stats(model)["budget"]
    assert torch_pi2.stats(model)["resident"] >= loaded["resident"] - 4  # filled again, layers alike
    del model
    assert torch.equal(logits(twin), wanted)
    assert logits(twin.to(torch.float32)).dtype == torch.float32
    with pytest.raises(ConfigError, match="found an open neuron store, which means nothing to another process"):
        pickle.dumps(twin)
    with pytest.raises(ConfigError, match="over a neuron store: expected a model in memory, found 4 layers"):
        torch_pi2.save(twin, tmp_path / "copy")


def test_more_tokens_than_the_budget_has_room_for(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """Of all sequences together, however they come to be so many; once."""
    long = torch.arange(1, 51).repeat(4, 1)
    message = "keys and values of {} tokens, all sequences together, take more memory than"

    def stepped(model: Any) -> None:
        decoder = Decoder(model, max_tokens=64, compiled=False)
        token = decoder.prompt(long[:1])
        for _ in range(3):
            token = decoder.step(token)

    def left(model: Any) -> None:
        decoder = Decoder(model, max_tokens=64, batch=3, compiled=False)
        decoder.prompt(long[:2, :20])
        decoder.retain([1])
        decoder.fork(2)
        decoder.clear_cache()
        Decoder(model, max_tokens=64, compiled=False).prompt(long[:1, :45])

    for decode, found in (
        (left, None),
        (lambda model: Decoder(model, max_tokens=64, batch=4, compiled=False).prompt(long[:, :20]), 80),
        (stepped, 51),
    ):
        for context in (50, 100):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "torch_pi2"):
                decode(torch_pi2.load(folders[1], budget="1GiB", context=context))
            told = [r.getMessage() for r in caplog.records if "keys and values" in r.getMessage()]
            assert len(told) == (context == 50 and found is not None)
            assert all(message.format(found) in t and "has room for those of 50. Load it with a" in t for t in told)


@pytest.mark.parametrize("share", [0.1, 0.5])  # of neurons: up to which the predictor is followed, and above
@pytest.mark.parametrize("tokens", [40, 700])
def test_long_prompts_have_the_bits_of_models_in_memory(folders: tuple[Path, Path], share: float, tokens: int) -> None:
    ids = torch.arange(tokens)[None] * 7 % 500
    in_memory = torch_pi2.load(folders[0], activations="int8")
    models = [in_memory]
    for extra in (0, 100_000):
        models.append(torch_pi2.load(folders[1], activations="int8", budget=smallest(folders[1]) + extra))
    if not torch.ops.pi2.kernel_tables().endswith("vnni"):
        share = 0.1  # without tiles models in memory follow the predictor
    for model in models:
        for layer in (m for m in model.modules() if isinstance(m, SparseFFN)):
            layer.expected_share = share
    wanted = logits(in_memory, ids)
    for model in models[1:]:
        torch_pi2.stats(model, reset=True)
        for _ in range(2):
            assert torch.equal(logits(model, ids), wanted)
        stats = torch_pi2.stats(model)
        # the next layer is read meanwhile, where most of a layer is wanted
        assert stats["used"] > 0.15 * (stats["wanted"] - stats["hits"])
        assert (stats["cache_bytes"] == 0) == (stats["hits"] == 0)


def test_parts_of_a_budget_add_up(folders: tuple[Path, Path]) -> None:
    least = smallest(folders[1])
    small, large = (torch_pi2.stats(torch_pi2.load(folders[1], budget=b))["budget"] for b in (least, "20GiB"))
    assert small.smallest == large.smallest <= least
    assert small.whole == large.whole
    assert large.cache == large.neurons
    assert small.smallest < small.cliff < small.whole
    at_cliff = torch_pi2.stats(torch_pi2.load(folders[1], budget=small.cliff))["budget"]
    assert at_cliff.cache >= at_cliff.token
    exact = torch_pi2.stats(torch_pi2.load(folders[1], budget=small.whole))["budget"]
    assert exact.cache == exact.neurons


def test_operators(folders: tuple[Path, Path]) -> None:
    """``opcheck``, and the checks of arguments."""
    load()
    store = Store(folders[1] / "pi2" / "model.pi2", 1 << 20)
    neurons, hidden, rows = store.layers()[0]
    assert rows == 3
    assert "direct" in store.describe() or "page cache" in store.describe()
    x = torch.randn(2, hidden)
    settings = (store.number, 0, None, None, None, [], "none", 0.0, "", False, "relu", False, 0, 0.0)
    opcheck(torch.ops.pi2.stored_ffn.default, (x, *settings))
    opcheck(torch.ops.pi2.crc32c.default, (torch.randint(0, 256, (3, 77), dtype=torch.uint8),))
    with StoreReader(store.path) as reader:
        wanted = reference.stored_ffn(x, reader, *settings[1:])
    torch.testing.assert_close(torch.ops.pi2.stored_ffn(x, *settings), wanted, rtol=1e-4, atol=1e-4)
    for position, value, message in (
        (1, 99, "layer: expected 0 to"),
        (0, 10**6, "store: expected an open one, found number 1000000"),
        (6, "lowrank", "predictor: expected 4 tensors"),
        (6, "oracle", "kind: expected lowrank, lowrank_q, signbit or mask, found 'oracle'"),
        (5, [x], "predictor: expected no tensors for kind none, found 1"),
        (12, neurons + 1, f"n_hot: expected 0 to {neurons}"),
    ):
        wrong = [*settings]
        wrong[position] = value
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.stored_ffn(x, *wrong)
    with pytest.raises(RuntimeError, match=f"hidden size of x: expected {hidden}"):
        torch.ops.pi2.stored_ffn(x[:, :-1], *settings)


def test_lookahead_refuses_what_does_not_fit(folders: tuple[Path, Path]) -> None:
    store = Store(folders[1] / "pi2" / "model.pi2", 1 << 20)
    announce, signs = torch.ops.pi2.store_lookahead, torch.zeros(1024, 32, dtype=torch.uint8)
    how = ("signbit", 1.0, "", False)
    assert announce(store.number, 1, [signs], *how, 0)
    for layer in (0, 4):
        with pytest.raises(RuntimeError, match=f"layer: expected 1 to 3, found {layer}"):
            announce(store.number, layer, [signs], *how, 0)
    with pytest.raises(RuntimeError, match="n_hot: expected 0 to 1024, found 1025"):
        announce(store.number, 1, [signs], *how, 1025)
    assert announce(store.number, 1, [signs], *how, 24)  # the first 24 rows are of neurons that are hot
    with pytest.raises(RuntimeError, match="expected at least 1024 cold neurons"):
        announce(store.number, 1, [signs[24:]], *how, 0)
    store.close()
    with pytest.raises(RuntimeError, match="expected an open one"):
        announce(store.number, 1, [signs], *how, 0)


def test_the_operator_follows_its_reference_with_a_predictor(folders: tuple[Path, Path]) -> None:
    model = torch_pi2.load(folders[1], budget="1GiB")
    layer = next(m for m in model.modules() if isinstance(m, OffloadedFFN))
    assert layer.has_predictor
    x = torch.randn(3, layer.site.hidden)
    predictor = [t for t in layer.predictor() if t is not None]
    how = (layer.predictor_kind, layer.predictor_threshold, layer.predictor_format)
    site = (layer.site.activation, layer.site.activation_on_up, layer.n_hot, layer.threshold)
    biases = (layer.bias_gate, layer.bias_up, layer.bias_down)
    with StoreReader(layer.store.path) as reader:
        wanted = reference.stored_ffn(x, reader, layer.store_layer, *biases, predictor, *how, False, *site)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


_MEASURE = """
import sys, torch, torch_pi2
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
torch.set_num_threads(1)
small = torch_pi2.load(sys.argv[1], budget=sys.argv[3])  # whatever libraries need is there after this
with torch.no_grad():
    small(torch.arange(64)[None])
del small
before = rss()
model = torch_pi2.load(sys.argv[2], budget=sys.argv[3], context=64)
with torch.no_grad():
    for _ in range(3):
        model(torch.arange(64)[None])
print(rss() - before)
"""


@pytest.mark.slow
def test_memory_stays_within_the_budget(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 4, "vocab_size": 256}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 2}
    torch_pi2.synthetic(tmp_path / "plain", shape, active=0.02, weights="int4")
    report = torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    budget = 96 << 20
    assert report.file_bytes > 2.5 * budget
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folders[1]), str(tmp_path / "store"), str(budget)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= budget  # its peaks: test_budget_memory.py


def test_a_layer_after_one_of_another_width_is_not_guessed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vision tower's, say: the others are, all the same."""
    model = torch_pi2.load(folders[1], budget="1GiB", offload=OffloadConfig(preload=False))
    layers = [module for module in model.modules() if isinstance(module, OffloadedFFN)]
    (neurons, hidden, rows), *others = layers[0].store.layers()
    monkeypatch.setattr(layers[0].store, "layers", lambda: [(neurons, 2 * hidden, rows), *others])
    x_TH = torch.randn(1, hidden).to(model.dtype)
    for layer in layers[:3]:
        layer.announce()
    guessed = []
    with torch.no_grad():
        for layer in layers[:2]:
            layer(x_TH)
            guessed.append(layer.store.stats(reset=True)["guessed"])
    assert guessed[0] == 0 < guessed[1]
