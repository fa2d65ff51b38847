"""What stays in a store's cache, said and changed while a model decodes; replays of it; memory that is given back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaying import CLOSED, decoded, loaded
from shared import small_store
from torch import nn

import torch_pi2
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.offloaded import Store
from torch_pi2.observe.accesses import Accesses
from torch_pi2.observe.replay import OPTIMAL, as_run, replay
from torch_pi2.ops import load
from torch_pi2.rewrite.state import store_and_budget
from torch_pi2.types.offload import OffloadConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic model over a store."""
    return small_store(tmp_path_factory) / "store"


def store_of(model: nn.Module) -> Store:
    store: Store = torch_pi2.stats(model)["store"]
    return store


def settled(store: Store) -> dict[str, int]:
    """Figures of a store when it is as arranged."""
    for _ in range(6000):
        if store.stats()["arranging"] == 0:
            return store.stats()
        time.sleep(0.01)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])  # csrc/tests/test_arrange.cc has all
def test_what_is_arranged_stays_and_bits_do_not_change(folder: Path, policy: str) -> None:
    model = loaded(folder, 0.6, policy=policy, lookahead=policy == "lfu")
    wanted = decoded(model)
    store = store_of(model)
    neurons = [n for n, *_ in store.layers()]
    store.arrange([n // 8 * (layer % 4) for layer, n in enumerate(neurons)])
    assert store.resident == tuple(n // 8 * (layer % 4) for layer, n in enumerate(neurons))
    stats = settled(store)
    assert stats["fixed"] == sum(store.resident) <= stats["resident"] <= stats["slots"]
    for _ in range(2):
        assert torch.equal(decoded(model), wanted)
        assert store.stats()["fixed"] == stats["fixed"]
    store.arrange([0] * len(neurons))
    assert settled(store)["fixed"] == 0
    store.arrange(neurons)  # more than there is room for
    stats = settled(store)
    assert stats["fixed"] == stats["slots"] == stats["resident"] < sum(neurons)
    assert torch.equal(decoded(model), wanted)


def test_arranging_in_a_loop_while_decoding(folder: Path) -> None:
    model = loaded(folder, 0.5)
    wanted = decoded(model)
    store = store_of(model)
    neurons = [n for n, *_ in store.layers()]
    size = store.stats()["cache_bytes"]
    over, arranged = threading.Event(), 0

    def arrange() -> None:
        nonlocal arranged
        while not over.is_set():
            resident = [n * ((arranged + layer) % 4) // 6 for layer, n in enumerate(neurons)]
            store.arrange(resident, (None, size // 2, None, size)[arranged % 4])
            arranged += 1

    other = threading.Thread(target=arrange)
    other.start()
    try:
        for _ in range(4):
            assert torch.equal(decoded(model), wanted)
    finally:
        over.set()
        other.join()
    assert arranged > 4
    store.arrange([n // 4 for n in neurons], size)
    stats = settled(store)
    assert stats["cache_bytes"] == size
    assert stats["fixed"] == sum(n // 4 for n in neurons)


def test_another_budget_keeps_the_arrangement(folder: Path) -> None:
    model = loaded(folder, 0.8, policy="lru")
    wanted = decoded(model)
    store, parts = store_and_budget(model)
    neurons = [n for n, *_ in store.layers()]
    store.arrange([n // 2 for n in neurons])
    for share in (0.2, 0.6, 0.0, 0.8):
        torch_pi2.set_budget(model, parts.smallest + parts.in_slots(int(share * parts.neurons)))
        stats = settled(store)
        assert stats["fixed"] == min(sum(n // 2 for n in neurons), stats["slots"])
        assert torch.equal(decoded(model), wanted)


def test_replays_of_what_was_arranged(folder: Path, tmp_path: Path) -> None:
    for name, settings in (("a", {}), ("b", {"preload": False}), ("c", {"policy": "s3-fifo"})):
        config: dict[str, Any] = settings
        model = loaded(folder, 0.5, **config)
        store = store_of(model)
        resident = [n // 4 * (layer % 3) // 2 for layer, (n, *_) in enumerate(store.layers())]
        store.arrange(resident, store.stats()["cache_bytes"] * 4 // 5 if name == "c" else None)
        settled(store)
        with torch_pi2.record_accesses(model, tmp_path / name):
            decoded(model)
        stats = torch_pi2.stats(model)
        accesses = Accesses.load(tmp_path / name)
        assert accesses.run["whole"]
        assert accesses.run["resident"] == resident
        found = as_run(accesses)
        assert accesses.run["hits"] == found.hits > 0
        slots = stats["slots"]
        other = replay(accesses, store.config.policy, slots, hot_share=0.0)
        assert other.hits != found.hits
        assert replay(accesses, OPTIMAL, slots).hits >= found.hits
        with pytest.raises(RuntimeError, match="accesses: fixed: expected 4 numbers, one of each layer, found 1"):
            torch.ops.pi2.replay(*accesses.arguments, "lru", 1, 0.5, True, 0, [1])
    with torch_pi2.record_accesses(model, tmp_path / "d"):
        store.arrange([0] * len(resident))
        decoded(model)
    assert not Accesses.load(tmp_path / "d").run["whole"]


def test_what_cannot_be_arranged_says_so(folder: Path) -> None:
    model = loaded(folder, 0.5)
    store = store_of(model)
    neurons = [n for n, *_ in store.layers()]
    with pytest.raises(ConfigError, match=r"model\.pi2, resident: expected 4 numbers, one of each layer, found 1\."):
        store.arrange([1])
    for wrong in (-1, neurons[3] + 1):
        with pytest.raises(ConfigError, match=rf"expected 0 to {neurons[3]} neurons of layer 3, found {wrong}\."):
            store.arrange([0, 0, 0, wrong])
    with pytest.raises(ConfigError, match=r"cache_bytes: expected 0 or more, found -1\."):
        store.arrange(neurons, -1)
    with pytest.raises(ConfigError, match=r"cache_bytes: expected 0 to \d+, with which it was opened, found \d+\."):
        store.arrange(neurons, store.opened_bytes + 100_000)
    assert store.resident is None
    assert store.stats()["arranging"] == 0
    mapped = store_of(torch_pi2.load(folder, budget="1GiB", offload=OffloadConfig(engine="mmap")))
    with pytest.raises(ConfigError, match="engine: expected pread or io_uring, found mmap"):
        mapped.arrange(neurons)
    store.close()
    with pytest.raises(ArtifactError, match=CLOSED):
        store.arrange(neurons)


def test_memory_of_a_tensor_is_given_back(tmp_path: Path) -> None:
    load()
    page = 4096

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    tensor = torch.ones(16 << 20, dtype=torch.uint8)
    before = rss()
    given = torch.ops.pi2.give_back(tensor[100 : 12 << 20])
    assert (12 << 20) - 2 * page < given < 12 << 20
    assert given % page == 0
    assert before - rss() > 11 << 20
    assert int(tensor[: 12 << 20].sum()) == (12 << 20) - given
    assert bool((tensor[12 << 20 :] == 1).all())
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * (16 << 20)
    assert torch.ops.pi2.give_back(tensor[:100]) == 0
    with pytest.raises(RuntimeError, match=r"tensor: expected a contiguous one, found \[2, 100\] with gaps"):
        torch.ops.pi2.give_back(torch.zeros(2, 200)[:, :100])
    (tmp_path / "f").write_bytes(bytes(range(1, 129)) * 512)
    mapped = torch.from_numpy(np.memmap(tmp_path / "f", dtype=np.uint8, mode="c"))
    mapped[0] = 77
    assert torch.ops.pi2.give_back(mapped) == 0
    assert mapped[0] == 77
