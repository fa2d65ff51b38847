"""Prefetchers and priorities in Python: what is read ahead, and what stays in the cache; no bit changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from replaying import decoded, loaded
from shared import small_store
from tiny_experts import SHAPE, SYNTHETIC

import torch_pi2
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.observe.replay import replay
from torch_pi2.types.offload import OffloadConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory) / "store"


def test_what_is_asked_for_is_read_ahead_and_used(folder: Path) -> None:
    ids = torch.arange(1, 7)[None]
    chosen = torch_pi2.record(loaded(folder, 1.0), ids, ["input", "selected"], progress=False)
    keys, seen = list(chosen), list[str]()

    def ahead(key: str, x_TH: torch.Tensor, experts_TK: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        assert experts_TK is None
        assert torch.equal(x_TH, chosen[key]["input"])
        seen.append(key)
        later = keys[keys.index(key) + 1 :][:1]
        return {after: chosen[after]["selected"] for after in later}

    model, other = (loaded(folder, 1.0, preload=False) for _ in range(2))
    with torch.no_grad(), sparse_only():
        wanted = other(ids).logits
        with torch_pi2.prefetching(model, ahead):
            assert torch.equal(model(ids).logits, wanted)
    assert seen == keys
    stats, before = torch_pi2.stats(model), torch_pi2.stats(other)
    assert before["guessed"] == before["hits"] == 0
    needed = sum(int(own["selected"].any(0).sum()) for own in list(chosen.values())[1:])
    assert stats["guessed"] == stats["used"] == needed > 0


def test_every_step_asks_and_recorded_steps_come_back(folder: Path) -> None:
    calls = list[tuple[str, int]]()

    def ahead(key: str, x_TH: torch.Tensor, experts_TK: torch.Tensor | None) -> None:
        calls.append((key, len(x_TH)))

    model = loaded(folder, 0.4)

    def text() -> list[int]:
        (tokens,) = torch_pi2.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=24, eos_token_id=[]).sequences
        assert len(tokens) == 24
        return tokens

    wanted = text()
    text()  # by now on recorded calls
    with torch_pi2.prefetching(model, ahead):
        assert text() == wanted
    layers = len(sparse_layers(model))
    assert len(calls) >= layers * 20
    assert {tokens for _, tokens in calls} == {1, 3}
    before = len(calls)
    assert text() == wanted
    assert len(calls) == before


def test_the_cache_is_smaller_than_what_is_asked_for(folder: Path) -> None:
    wanted = decoded(loaded(folder, 0.2))
    model = loaded(folder, 0.2)
    every = {y.site.key: torch.ones(y.site.intermediate, dtype=torch.bool) for y in sparse_layers(model)}
    with torch_pi2.prefetching(model, lambda key, x, experts: {k: m for k, m in every.items() if k != key}):
        assert torch.equal(decoded(model), wanted)
    assert torch_pi2.stats(model)["guessed"] > 0


def test_a_mixture_says_which_experts(tmp_path: Path) -> None:
    torch_pi2.synthetic(
        tmp_path / "saved", {"model_type": "mixtral"} | SYNTHETIC | SHAPE["mixtral"], active=0.3, weights="int4"
    )
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    ids = torch.arange(1, 9)[None]
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", offload=OffloadConfig(preload=False))
    by_key = {y.site.key: y.site for y in sparse_layers(model)}
    modules = list(dict.fromkeys(str(site.experts) for site in by_key.values()))
    seen = list[str]()

    def ahead(key: str, x_TH: torch.Tensor, experts_TK: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        assert experts_TK is not None
        assert experts_TK.shape == (8, 2)
        seen.append(key)
        later = modules[modules.index(key) + 1 :][:1]
        wanted = [k for k, site in by_key.items() if site.experts in later and site.up.expert in experts_TK]
        return {k: torch.ones(by_key[k].intermediate, dtype=torch.bool) for k in wanted}

    with torch.no_grad():
        wanted = torch_pi2.load(tmp_path / "store", budget="1GiB")(ids).logits
        with torch_pi2.prefetching(model, ahead):
            assert torch.equal(model(ids).logits, wanted)
    assert seen == modules
    assert torch_pi2.stats(model)["used"] > 0


def test_mistakes(folder: Path) -> None:
    plain = torch_pi2.load(folder.parent / "plain")
    with (
        pytest.raises(ConfigError, match="expected a model over a neuron store, found one in memory"),
        torch_pi2.prefetching(plain, lambda *_: None),
    ):
        pass
    model = loaded(folder, 0.4)
    key = sparse_layers(model)[1].site.key
    for asked, message in (
        ({"no": torch.ones(4, dtype=torch.bool)}, "neurons of 'no': expected a key of model.layers.0.mlp, "),
        (
            {key: torch.ones(4, dtype=torch.bool)},
            rf"neurons of '{key}': expected torch.bool of shape \[\d+\], found torch.bool \[4\]",
        ),
        ({key: torch.ones(sparse_layers(model)[1].site.intermediate)}, "expected torch.bool of shape"),
    ):
        with (
            torch_pi2.prefetching(model, lambda *_, asked=asked: asked),  # type: ignore[misc]
            pytest.raises(ConfigError, match=message),
        ):
            decoded(model)
    assert torch.equal(decoded(model), decoded(loaded(folder, 0.4)))


# --- priorities ---


class Least(torch_pi2.CachePolicy):
    """What priorities do, in a replay."""

    values: list[float]

    def start(self) -> None:
        self.time, self.last = 0, dict[int, int]()

    def began(self, layer: int) -> None:
        self.time += 1

    def used(self, slot: int) -> None:
        self.last[slot] = self.time

    inserted = used

    def erased(self, slot: int) -> None:
        del self.last[slot]

    def victim(self, pinned: set[int]) -> int | None:
        free = (slot for slot in self.last if slot not in pinned)
        return min(free, key=lambda slot: (self.values[self.keys[slot]], self.last[slot]), default=None)


def test_the_cache_keeps_what_has_priority(folder: Path, tmp_path: Path) -> None:
    wanted = decoded(loaded(folder, 0.3, hot_share=0.0))
    model = loaded(folder, 0.3, hot_share=0.0)
    g = torch.Generator().manual_seed(0)
    priorities = {y.site.key: torch.rand(y.site.intermediate, generator=g) for y in sparse_layers(model)}
    torch_pi2.prioritize(model, priorities)
    with torch_pi2.record_accesses(model, tmp_path / "a") as recorder:
        assert torch.equal(decoded(model), wanted)
    accesses = recorder.accesses
    assert accesses is not None
    assert not accesses.run["whole"]  # a replay by its policy would have other hits
    Least.values = torch.cat([priorities[y.site.key][y.order] for y in sparse_layers(model)]).tolist()
    slots = accesses.run["slots"]
    assert accesses.run["hits"] == replay(accesses, Least, slots).hits != replay(accesses, "lru", slots).hits


def test_priorities_may_change_with_each_call_and_be_forgotten(folder: Path, tmp_path: Path) -> None:
    wanted = decoded(loaded(folder, 0.2))
    model = loaded(folder, 0.2)
    sizes = {y.site.key: y.site.intermediate for y in sparse_layers(model)}

    def live(key: str, x_TH: torch.Tensor, experts_TK: torch.Tensor | None) -> None:
        torch_pi2.prioritize(model, {key: torch.rand(sizes[key])})

    with torch_pi2.prefetching(model, live):
        assert torch.equal(decoded(model), wanted)
    torch_pi2.prioritize(model, None)
    other = loaded(folder, 0.2)
    for each in (model, other):
        decoded(each)
        parts = torch_pi2.stats(each)["budget"]
        torch_pi2.set_budget(each, parts.smallest)  # empties the cache
        torch_pi2.set_budget(each, parts.total)
        decoded(each)
        torch_pi2.stats(each, reset=True)
        decoded(each)
    assert torch_pi2.stats(model)["hits"] == torch_pi2.stats(other)["hits"] > 0


def test_wrong_priorities(folder: Path) -> None:
    model = loaded(folder, 0.4)
    key, size = sparse_layers(model)[0].site.key, sparse_layers(model)[0].site.intermediate
    for priorities, message in (
        ({"no": torch.rand(size)}, "neurons of 'no': expected a key of model.layers.0.mlp, ..., found torch.float32"),
        (
            {key: torch.rand(size).double()},
            rf"neurons of '{key}': expected torch.float32 of shape \[{size}\], found torch.f",
        ),
        ({key: torch.rand(2, size)}, rf"expected torch.float32 of shape \[{size}\], found torch.float32 \[2, {size}\]"),
        ({key: torch.full((size,), torch.nan)}, f"priorities of {key}: expected numbers, found NaN"),
    ):
        with pytest.raises(ConfigError, match=message):
            torch_pi2.prioritize(model, priorities)
    mapped = torch_pi2.load(folder, budget="1GiB", offload=OffloadConfig(engine="mmap"))
    with pytest.raises(ConfigError, match="mmap: expected pread or io_uring, found no cache"):
        torch_pi2.prioritize(mapped, None)
    with pytest.raises(ConfigError, match="expected a model over a neuron store, found one in memory"):
        torch_pi2.prioritize(torch_pi2.load(folder.parent / "plain"), {})
    torch_pi2.stats(model)["store"].close()
    with pytest.raises(ArtifactError, match="a store that has been closed"):
        torch_pi2.prioritize(model, None)
