"""Recorded accesses, replays of them, and budgets that change while a model is in use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import CLOSED, decoded, loaded
from shared import small_store
from torch import nn

import torch_pi2
from torch_pi2.base.files import atomic_write
from torch_pi2.base.tensorfile import packed, read_tensors
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error
from torch_pi2.observe import policies
from torch_pi2.observe.accesses import Accesses, StoredLayer
from torch_pi2.observe.replay import OPTIMAL, as_run, replay, slots_of
from torch_pi2.ops.constants import lists
from torch_pi2.types.offload import OffloadConfig

POLICIES = tuple(lists().policies)
#: The policy of the page, in the file of a user.
_PAGE = (Path(__file__).parents[2] / "docs" / "RESEARCH.md").read_text()
LRU = next(block for block in re.findall(r"^```python\n(.*?)^```", _PAGE, re.M | re.S) if "class Lru" in block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic model over a store."""
    return small_store(tmp_path_factory) / "store"


def recorded(folder: Path, path: Path, share: float = 0.4, **config: Any) -> tuple[Accesses, dict[str, Any]]:
    model = loaded(folder, share, **config)
    with torch_pi2.record_accesses(model, path) as recorder:
        decoded(model)
    assert recorder.accesses is not None
    return recorder.accesses, torch_pi2.stats(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_of_a_run_has_its_hits(folder: Path, tmp_path: Path, policy: str) -> None:
    settings: dict[str, Any]
    for settings in ({}, {"preload": False, "window": 3, "hot_share": 0.0})[: 2 if policy == "lru" else 1]:
        accesses, stats = recorded(folder, tmp_path / "a", policy=policy, **settings)
        found = as_run(Accesses.load(tmp_path / "a"))
        assert accesses.run["whole"]
        assert accesses.run["hits"] == stats["hits"] == found.hits
        assert accesses.run["wanted"] == stats["wanted"] == found.wanted > 0
        assert accesses.run["slots"] == stats["slots"]
        assert (found.hits > 0) == (policy != "none")
        assert accesses.passes == 13
        best = replay(accesses, OPTIMAL, stats["slots"])
        assert best.hit_rate >= found.hit_rate
        assert best.reads_per_pass <= found.reads_per_pass


def test_what_a_replay_cannot_repeat_is_said(folder: Path, tmp_path: Path) -> None:
    accesses, _ = recorded(folder, tmp_path / "a", lookahead=True)
    assert not accesses.run["whole"]
    model = loaded(folder, 0.4)
    decoded(model)
    with torch_pi2.record_accesses(model, tmp_path / "b") as recorder:
        decoded(model)
    assert recorder.accesses is not None
    assert not recorder.accesses.run["whole"]
    assert recorder.accesses.run["hits"] > 0
    assert main(["replay", str(tmp_path / "b"), "--policies", "lru", "--budget", "50%"]) == 0


def test_more_memory_and_everything(folder: Path, tmp_path: Path) -> None:
    accesses, _ = recorded(folder, tmp_path / "a")
    for policy in ("lru", "static", OPTIMAL):
        rates = [replay(accesses, policy, n * accesses.slots // 4).hit_rate for n in range(5)]
        assert rates == sorted(rates)
        assert rates[0] == 0
        assert rates[-1] == 1
    empty = replay(accesses, "lru", accesses.slots, preload=False)
    assert empty.hit_rate < 1
    nothing = replay(accesses, "none", accesses.slots)
    assert nothing.read_bytes_per_pass == nothing.reads_per_pass * accesses.stored[0].read_bytes
    assert slots_of(accesses, "25%") == accesses.slots // 4
    assert slots_of(accesses, "1GiB") == accesses.slots
    assert slots_of(accesses, str(10 * accesses.place_bytes + 1)) == 10


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accesses, stats = recorded(folder, tmp_path / "a")
    command = ["replay", str(tmp_path / "a"), "--budget", "40%,200KB", "--policies", "lru,lfu,optimal"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["as_run"]["same"]
    assert result["as_run"]["hit_rate"] == stats["hit_rate"]
    assert [(c["policy"], c["slots"]) for c in result["caches"]][:3] == [
        (policy, slots_of(accesses, "40%")) for policy in ("lru", "lfu", "optimal")
    ]
    assert len(result["caches"]) == 6
    assert main(["replay", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "a replay has the same hits" in text
    for policy in (*POLICIES, OPTIMAL):
        assert text.count(f" {policy} ") >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--policies", "clock"],
            "policy: expected lru or sieve or s3-fifo or lfu or static or none or optimal, found",
        ),
        (["--budget", "130%"], "budget: expected 0% to 100%, or bytes, found '130%'"),
        (["--budget", "much"], "budget: expected bytes, or text such as"),
    ],
)
def test_wrong_arguments(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if not (tmp_path.parent / "a").exists():
        recorded(folder, tmp_path.parent / "a")
    assert main(["replay", str(tmp_path.parent / "a"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_wrong_settings_of_a_replay(folder: Path, tmp_path: Path) -> None:
    accesses, _ = recorded(folder, tmp_path / "a")
    with pytest.raises(ConfigError, match="hot_share: expected a number, 0 or more, at most 1, found 2"):
        replay(accesses, "lru", 4, hot_share=2.0)
    with pytest.raises(ConfigError, match="window: expected a whole number, 0 or more, found -1"):
        replay(accesses, "lru", 4, window=-1)


def test_recording_says_what_cannot_be(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="expected a model over a neuron store, found one in memory"):
        torch_pi2.record_accesses(nn.Linear(2, 2), tmp_path / "a")
    model = loaded(folder, 0.4)
    with pytest.raises(ConfigError, match="capacity: expected 1 byte or more, found 0"):
        torch_pi2.record_accesses(model, tmp_path / "a", capacity=0)
    with pytest.raises(ArtifactError, match="the name of a folder"):
        torch_pi2.record_accesses(model, tmp_path)
    recorder = torch_pi2.record_accesses(model, tmp_path / "a", capacity=1000)
    with pytest.raises(ConfigError, match="expected one that was started, found one that was not"):
        recorder.stop()
    recorder.start()
    with pytest.raises(ConfigError, match=r"expected one recording at a time, .* found accesses are being recorded"):
        torch_pi2.record_accesses(model, tmp_path / "b").start()
    decoded(model)
    recorder.stop()
    assert "calls were lost: they need more than 1000 bytes" in caplog.text
    accesses = Accesses.load(tmp_path / "a")
    assert accesses.run["lost"] > 0
    assert accesses.wanted.nbytes <= 1000
    assert not accesses.run["whole"]
    with pytest.raises(ZeroDivisionError), torch_pi2.record_accesses(model, tmp_path / "c"):
        decoded(model, lambda i: 1 // (5 - i))
    assert Accesses.load(tmp_path / "c").run["hits"] > 0
    recorder = torch_pi2.record_accesses(model, tmp_path / "d")
    with pytest.raises(ZeroDivisionError), recorder:
        _ = recorder.stop(), 1 // 0
    store = torch_pi2.stats(model)["store"]
    with pytest.raises(ZeroDivisionError) as caught, torch_pi2.record_accesses(model, tmp_path / "e"):
        _ = store.close(), 1 // 0
    assert "a store that has been closed" in caught.value.__notes__[0]
    with pytest.raises(ArtifactError, match=CLOSED):
        torch_pi2.record_accesses(model, tmp_path / "e").start()
    with pytest.raises(ArtifactError, match=CLOSED):
        torch_pi2.stats(model)
    model = loaded(folder, 0.4)
    with pytest.raises(ArtifactError, match=CLOSED), torch_pi2.record_accesses(model, tmp_path / "e"):
        torch_pi2.stats(model)["store"].close()
    assert not (tmp_path / "e").exists()


def _with(**metadata: str) -> Callable[..., Any]:
    return lambda tensors, meta: (tensors, meta | metadata)


def _run(**values: Any) -> Callable[..., Any]:
    return lambda tensors, meta: (tensors, meta | {"run": json.dumps(json.loads(meta["run"]) | values)})


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda tensors, meta: (tensors | {name: change(tensors[name])}, meta)


def _set(tensor: torch.Tensor, value: int) -> torch.Tensor:
    tensor[0] = value
    return tensor


DAMAGE: dict[str, tuple[Callable[..., Any], str]] = {
    "version": (_with(version="2"), "expected torch_pi2.accesses version 1, found torch_pi2.accesses version 2"),
    "format": (_with(format="pt"), "found pt version 1"),
    "no JSON": (_with(stored="["), "a, stored: expected JSON, found damage"),
    "no layers": (_with(stored="[]"), "stored: expected a list of 1 or more, found []"),
    "sizes": (_with(stored='[["a", 8, 0, 512]]'), "stored, 0, 2: expected a whole number, 1 or more"),
    "fields": (_with(stored='[["a", 8]]'), "stored, 0: expected a list of 4"),
    "place": (_with(place_bytes="-5"), "place_bytes: expected a whole number, 1 or more"),
    "policy": (_run(policy=3), "run, policy: expected text, found 3"),
    "hot share": (_run(hot_share=1.5), "run, hot_share: expected a number, 0 or more, at most 1, found 1.5"),
    "slots": (_run(slots=-1), "run, slots: expected a whole number, 0 or more, found -1"),
    "resident": (_run(resident=[1, 2, 3, 10**6]), "run, resident, 3: expected a whole number"),
    "resident of fewer": (_run(resident=[1]), "run, resident: expected a list of 4, found [1]"),
    "missing": (_with(run="{}"), "run: expected a field policy, found none"),
    "tensor": (lambda tensors, meta: ({"layers": tensors["layers"]}, meta), "damage (no tensor streamed)"),
    "dtype": (_tensor("layers", lambda t: t.long()), "layers: torch.int64"),
    "shape": (_tensor("wanted", lambda t: t[None]), "2 dimensions"),
    "layer": (_tensor("layers", lambda t: _set(t, 99)), "call 0: expected layer 0 to 3, found 99"),
    "streamed": (_tensor("streamed", lambda t: _set(t, 7)), "call 0: expected streamed 0 or 1, found 7"),
    "calls": (_tensor("streamed", lambda t: t[1:].clone()), "expected as many calls in streamed as in layers"),
    "short": (_tensor("wanted", lambda t: t[1:].clone()), "bytes of bits, found"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage(folder: Path, tmp_path: Path, damage: Callable[..., Any], message: str) -> None:
    path = tmp_path.parent / "sound"
    if not path.exists():
        recorded(folder, path)
    tensors, metadata = damage(*read_tensors(path))
    atomic_write(tmp_path / "a", packed(tensors, metadata))
    with pytest.raises(ArtifactError) as caught:
        Accesses.load(tmp_path / "a")
    assert message in str(caught.value)


def test_files_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a safetensors file, found nothing"):
        Accesses.load(tmp_path / "a")
    recorded(folder, tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match="expected a whole safetensors file, found damage"):
        Accesses.load(tmp_path / "a")
    for bit in range(0, 8 * len(whole), 997):  # an error of ours, or accesses that can be replayed
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a").write_bytes(flipped)
        try:
            accesses = Accesses.load(tmp_path / "a")
            replay(accesses, "lru", min(accesses.slots, 100))
        except Pi2Error:
            pass


# --- policies in Python ---


def lru_file(folder: Path) -> str:
    (folder / "mine.py").write_text(LRU)
    return f"{folder / 'mine.py'}:Lru"


@pytest.mark.parametrize("preload", [True, False])
def test_a_policy_in_python_has_the_hits_of_its_twin(folder: Path, tmp_path: Path, preload: bool) -> None:
    accesses, _ = recorded(folder, tmp_path / "a")
    mine = lru_file(tmp_path)
    for share, hot_share in ((0.0, 0.5), (0.1, 0.0), (0.3, None), (0.6, 0.9), (1.0, 0.5)):
        how: Any = {"slots": round(share * accesses.slots), "hot_share": hot_share, "preload": preload}
        wanted, found = replay(accesses, "lru", **how), replay(accesses, mine, **how)
        assert replace(found, policy="lru") == wanted
    assert wanted.hits > 0
    assert found.policy == mine


def made_up(seed: int) -> Accesses:
    """Calls of layers with clusters of several neurons, some of which stream."""
    g = torch.Generator().manual_seed(seed)
    stored = [StoredLayer("a", 40, 1, 512), StoredLayer("b", 50, 3, 512), StoredLayer("c", 17, 4, 512)]
    layers = torch.arange(3, dtype=torch.int32).repeat(60)
    streamed = (torch.rand(len(layers), generator=g) < 0.4).to(torch.uint8)
    rows: list[int] = []
    for layer, doubled in zip(layers.tolist(), streamed.tolist()):
        for _ in range(1 + doubled):
            fires = torch.rand(stored[layer].neurons, generator=g) < torch.linspace(0.9, 0.05, stored[layer].neurons)
            bits = sum(1 << i for i in torch.nonzero(fires).flatten().tolist())
            rows += bits.to_bytes(-(-stored[layer].neurons // 8), "little")
    run = {"resident": [4, 7, 0], "hot_share": 0.5, "preload": True, "window": 0}
    return Accesses(tuple(stored), "", 512, run, layers, streamed, torch.tensor(rows, dtype=torch.uint8))


@pytest.mark.parametrize("seed", range(4))
def test_also_with_clusters_and_prompts_that_stream(tmp_path: Path, seed: int) -> None:
    accesses, mine = made_up(seed), lru_file(tmp_path)

    class Keep(torch_pi2.CachePolicy):
        def victim(self, pinned: set[int]) -> None:
            return None

    for slots in range(0, accesses.slots + 1, 5):
        for policy, twin in ((mine, "lru"), (Keep, "static")):
            for hot_share in (None, 0.7):
                found = replay(accesses, policy, slots, hot_share=hot_share)
                assert replace(found, policy=twin) == replay(accesses, twin, slots, hot_share=hot_share)


def test_what_a_policy_is_told(tmp_path: Path) -> None:
    accesses = made_up(0)

    class Told(torch_pi2.CachePolicy):
        def start(self) -> None:
            assert self.first == [0, 40, 57, 62]
            assert self.keys == [-1] * self.slots == [-1] * 20
            self.inside, self.order = set[int](), list[str]()

        def began(self, layer: int) -> None:
            assert layer == len(self.order) % 3
            self.order.append("call")

        def used(self, slot: int) -> None:
            assert slot in self.inside

        def inserted(self, slot: int) -> None:
            assert 0 <= self.keys[slot] < 62
            self.inside.add(slot)

        def erased(self, slot: int) -> None:
            self.inside.remove(slot)

        def victim(self, pinned: set[int]) -> int | None:
            return max(self.inside - pinned, default=None)

    assert replay(accesses, Told, 20).hits > 0
    Told.victim = lambda self, pinned: max(pinned)  # type: ignore[method-assign,assignment]
    with pytest.raises(
        ConfigError, match="victim of cache policy Told: expected None, or a slot that was inserted and is"
    ):
        replay(accesses, Told, 20)


def test_policies_are_found_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses, _ = recorded(folder, tmp_path / "a")
    monkeypatch.setattr(policies._PLUGINS, "_known", {})
    scope: dict[str, Any] = {}
    exec(LRU, scope)

    def hits(name: str) -> int:
        command = ["replay", str(tmp_path / "a"), "--budget", "40%", "--json", "--policies", f"lru,{name}"]
        assert main(command) == 0
        lru, mine = json.loads(capsys.readouterr().out)["caches"]
        assert mine["policy"] == name
        assert mine["hits"] == lru["hits"] > 0
        return mine["hits"]

    wanted = hits(lru_file(tmp_path))
    assert torch_pi2.register_cache_policy(scope["Lru"]) is scope["Lru"]
    assert hits("my-lru") == wanted == replay(accesses, scope["Lru"], slots_of(accesses, "40%")).hits
    assert policies.policy_names() == [*POLICIES, OPTIMAL, "my-lru"]
    about = tmp_path / "packages" / "cachepack-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cachepack\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[torch_pi2.cache_policies]\nof-a-package = cachepack:Lru\nno = json:loads\n"
    )
    (about.parent / "cachepack.py").write_text(LRU)
    monkeypatch.syspath_prepend(about.parent)
    assert hits("of-a-package") == wanted
    assert policies.policy_names()[-3:] == ["my-lru", "no", "of-a-package"]
    with pytest.raises(
        ConfigError, match=r"entry point no of torch_pi2.cache_policies: expected a class that derives from"
    ):
        replay(accesses, "no", 4)


def test_policies_that_are_none(folder: Path, tmp_path: Path) -> None:
    accesses, lru = made_up(0), lru_file(tmp_path)
    for name, message in (
        (str(tmp_path / "none.py:Lru"), r"class of a file: expected a file .*none\.py, found none of that name"),
        (lru.replace("Lru", "Lfu"), "expected a class that derives from CachePolicy, found None"),
        ("lfu2", r"policy: expected lru or .* or optimal.*, found 'lfu2'. Choose one of them, or FILE.py:CLASS"),
    ):
        with pytest.raises(ConfigError, match=message):
            replay(accesses, name, 4)
    with pytest.raises(ConfigError, match="window: expected 0 for a policy in Python, found 3"):
        replay(accesses, lru, 4, window=3)
    for made, message in (
        (int, "class to register: expected a class that derives from CachePolicy"),
        (type("A", (torch_pi2.CachePolicy,), {}), "name of A: expected text, found ''"),
        (type("A", (torch_pi2.CachePolicy,), {"name": "lru"}), "no built-in's name, found 'lru'"),
        (type("A", (torch_pi2.CachePolicy,), {"name": "a,b"}), "letters, digits and -"),
    ):
        with pytest.raises(ConfigError, match=message):
            torch_pi2.register_cache_policy(made)


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])  # csrc/tests/test_replay.cc has all
def test_another_budget_in_the_middle_of_decoding(folder: Path, policy: str) -> None:
    model = loaded(folder, 0.8, policy=policy, lookahead=policy == "lfu")
    wanted = decoded(model)
    parts = torch_pi2.stats(model)["budget"]
    shares = iter([0.1, 0.6, 0.0, 0.8, 0.3, 0.0] * 2)

    def resize(i: int) -> None:
        share = next(shares)
        made = torch_pi2.set_budget(model, parts.smallest + parts.in_slots(int(share * parts.neurons)))
        stats = torch_pi2.stats(model)
        assert stats["budget"] == made
        assert stats["cache_bytes"] == made.cache
        assert made.cache == pytest.approx(share * parts.neurons, abs=parts.slot)

    assert torch.equal(decoded(model, resize), wanted)


def test_budgets_that_cannot_be(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(folder, 0.5)
    wanted = decoded(model)
    parts = torch_pi2.stats(model)["budget"]
    with pytest.raises(ConfigError, match=r"expected at least [\d.]+ MiB, for all but neurons, found 0.0 MiB. Give"):
        torch_pi2.set_budget(model, 1000)
    with pytest.raises(ConfigError, match=r"expected at most [\d.]+ MiB, as it was loaded, found 1024.0 MiB"):
        torch_pi2.set_budget(model, "1GiB")
    with pytest.raises(ConfigError, match="expected a model over a neuron store, found one in memory"):
        torch_pi2.set_budget(nn.Linear(2, 2), "1GiB")
    assert torch_pi2.stats(model)["budget"] == parts
    torch_pi2.set_budget(model, parts.smallest + parts.in_slots(parts.token // 2))
    assert "holds less than the" in caplog.text
    assert torch_pi2.stats(model)["store"].hot_share == 0.9
    assert torch.equal(decoded(model), wanted)
    mapped = torch_pi2.load(folder, budget="1GiB", offload=OffloadConfig(engine="mmap"))
    with pytest.raises(ConfigError, match="engine: expected pread or io_uring, found mmap"):
        torch_pi2.set_budget(mapped, parts.whole)
    store = torch_pi2.stats(model)["store"]
    with pytest.raises(ConfigError, match=r"cache_bytes: expected 0 to \d+, with which it was opened, found -1"):
        store.resize(-1)
    store.close()
    with pytest.raises(ArtifactError, match=CLOSED):
        store.resize(0)
    with pytest.raises(ArtifactError, match=CLOSED):
        torch_pi2.set_budget(model, parts.smallest)


def test_what_a_policy_remembers_is_in_the_budget(folder: Path) -> None:
    lru, ghosts = (torch_pi2.stats(loaded(folder, 0.5, policy=p))["budget"] for p in ("lru", "s3-fifo"))
    assert ghosts.neuron_tables == lru.neuron_tables + 4 * lru.neurons // lru.slot
    assert replace(ghosts, neuron_tables=lru.neuron_tables, total=lru.total) == lru


_MEASURE = """
import sys, torch, torch_pi2
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
torch.set_num_threads(1)
model = torch_pi2.load(sys.argv[1], budget="1GiB")
store, parts = model.torch_pi2.store, model.torch_pi2.budget
with torch.no_grad():
    model(torch.arange(8)[None])
full = rss()
torch_pi2.set_budget(model, parts.smallest + parts.in_slots(parts.neurons // 8))
small = rss()
with torch.no_grad():
    for i in range(4):
        model(torch.arange(8)[None] + 8 * i)
print(parts.neurons, full - small, rss() - small)
torch_pi2.set_budget(model, parts.whole)
print(rss() - small)
"""


@pytest.mark.slow
def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 256}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    torch_pi2.synthetic(tmp_path / "plain", shape, active=0.02, weights="int4")
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    neurons, freed, later, grown = map(int, done.stdout.split())
    assert freed > 0.8 * 7 / 8 * neurons
    assert later < (4 << 20)
    assert grown > 0.8 * 7 / 8 * neurons
