"""Neurons that a caller asks a store to read ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import SMALL, store_of

import torch_pi2
from torch_pi2.errors import ArtifactError
from torch_pi2.layers.offloaded import Store
from torch_pi2.types.offload import OffloadConfig

NEURONS, HIDDEN, HOT = 117, 72, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a slot for each neuron, whole."""
    base = tmp_path_factory.mktemp("prefetch")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": NEURONS, "num_hidden_layers": 3}
    torch_pi2.synthetic(base / "saved", SMALL | sizes, active=0.3, weights="int4", rank=16)
    torch_pi2.pack(base / "saved", base / "store", cluster=1)
    return store_of(base / "store")


def ffn(store: Store, layer: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    how = ([mask], "mask", 0.0, "", False, "silu", False, HOT, 0.0)
    y: torch.Tensor = torch.ops.pi2.stored_ffn(x, store.number, layer, None, None, None, *how)
    return y


@pytest.mark.parametrize("after", [None, 0])
def test_what_is_asked_for_is_there(path: Path, after: int | None) -> None:
    """After a call of another layer, or at once; results keep their bits, and of a second call nothing is left."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, HIDDEN, generator=g)
    masks = [torch.rand(3, NEURONS - HOT, generator=g) < 0.2 for _ in range(2)]
    wanted = [ffn(Store(path, 1 << 20), layer, x, masks[0]) for layer in (0, 2)]
    store = Store(path, 1 << 20, OffloadConfig(preload=False))
    more = torch.cat((torch.ones(3, 5, dtype=torch.bool), masks[0]), 1).view(3, 1, -1)  # the last columns count
    store.prefetch(2, masks[1], HOT, after=after)
    store.prefetch(2, more, HOT, after=after)
    needed = HOT + int(masks[0].any(0).sum())
    both = HOT + int((masks[0] | masks[1]).any(0).sum())
    guessed = store.stats()["guessed"]
    assert guessed == (both if after is None else 0)  # the second request replaces the first
    for _ in range(2):
        assert torch.equal(ffn(store, 0, x, masks[0]), wanted[0])
        assert store.stats()["guessed"] == (both if after is None else needed)
    assert torch.equal(ffn(store, 2, x, masks[0]), wanted[1])
    found = store.stats()
    assert found["guessed"] == (both if after is None else needed)
    assert found["used"] == needed


def test_any_thread_may_ask(path: Path) -> None:
    x, mask = torch.randn(1, HIDDEN), torch.rand(1, NEURONS - HOT) < 0.3
    wanted = [ffn(Store(path, 1 << 20), layer, x, mask) for layer in range(3)]
    store = Store(path, 30_000, OffloadConfig(preload=False))
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for layer in range(3):
                store.prefetch(layer, torch.rand(2, NEURONS - HOT) < 0.5, HOT)
                store.prefetch(layer, torch.rand(2, NEURONS - HOT) < 0.5, HOT, after=(layer + 1) % 3)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(50):
            for layer in range(3):
                assert torch.equal(ffn(store, layer, x, mask), wanted[layer])
    finally:
        over.set()
        asking.join()
    assert store.stats()["guessed"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, "layer: expected 0 to 2, found 3"),
        ({"n_hot": NEURONS + 1}, f"n_hot: expected 0 to {NEURONS}, found {NEURONS + 1}"),
        (
            {"n_hot": HOT - 1},
            rf"active: expected bool \[..., {NEURONS - HOT + 1} or more\], found \[2, {NEURONS - HOT}\]",
        ),
        ({"active": torch.zeros(2, NEURONS)}, "active: expected bool .* of another dtype"),
        ({"active": torch.tensor(True)}, r"active: expected bool .*, found \[\]"),
        ({"after": 1}, "after: expected -1, or a layer of the store other than 1, found 1"),
        ({"after": 3}, "after: expected -1, or a layer of the store other than 1, found 3"),
    ],
)
def test_bad_requests(path: Path, change: dict[str, Any], message: str) -> None:
    sound = {"layer": 1, "active": torch.zeros(2, NEURONS - HOT, dtype=torch.bool), "n_hot": HOT}
    store = Store(path, 1 << 20)
    with pytest.raises(RuntimeError, match=message):
        store.prefetch(**sound | change)
    store.prefetch(1, torch.zeros(0, NEURONS, dtype=torch.bool), HOT)  # no token needs anything
    assert store.stats()["guessed"] == 0
    store.close()
    with pytest.raises(ArtifactError, match="closed"):
        store.prefetch(**sound)


def test_behind_the_reads_of_a_mixture(path: Path) -> None:
    """Layers 1 and 2 as experts: what layer 0 will need is read with their call, once."""
    g = torch.Generator().manual_seed(4)
    x, mask = torch.randn(3, HIDDEN, generator=g), torch.rand(3, NEURONS - HOT, generator=g) < 0.3
    wanted, store = ffn(Store(path, 1 << 20), 0, x, mask), Store(path, 1 << 20, OffloadConfig(preload=False))
    index, routing = torch.tensor([[0, 1], [1, 2], [2, 2]]), torch.rand(3, 2, generator=g)
    how = ([torch.rand(3, 2, NEURONS, generator=g) < 0.3], "mask", [], "", False, "silu", False, [])
    store.prefetch(0, mask, HOT, after=1)
    for _ in range(2):
        torch.ops.pi2.stored_experts(x, index, routing, store.number, 1, 2, *how)
        read = store.stats()
    assert torch.equal(ffn(store, 0, x, mask), wanted)
    found = store.stats()
    needed = HOT + int(mask.any(0).sum())
    assert found["used"] - read["used"] == needed
    assert found["reads"] == read["reads"]
