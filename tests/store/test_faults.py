"""What goes wrong around a store: files exchanged, interrupts, company, forks, full disks. A specific error or none at
all, and the next call computes the right bits. ``csrc/tests/test_faults.cc`` has the faults of single reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import SMALL, Damaged, logits, small, store_of, toy
from torch import nn

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ArtifactError, Pi2Error, StaleArtifactError
from torch_pi2.layers.offloaded import Store
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.offload import OffloadConfig

LAYERS = 3
IDS = torch.arange(1, 13)[None]
SHAPE = SMALL | {"num_hidden_layers": LAYERS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Stores of two models of one shape."""
    base = tmp_path_factory.mktemp("faults")
    for name, seed in (("one", 0), ("two", 1)):
        torch_pi2.synthetic(base / f"{name}-plain", SHAPE, active=0.2, rank=16, seed=seed)
        torch_pi2.pack(base / f"{name}-plain", base / name)
    return base / "one", base / "two"


@pytest.fixture
def one(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first."""
    return Path(shutil.copytree(folders[0], tmp_path / "one"))


def generated(model: Any) -> list[int]:
    return list(model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)[0])


def flip(path: Path, layer: int) -> None:
    """Every byte of a layer's slots, in place; twice, and it is as before."""
    with StoreReader(path) as reader:
        entry, after = reader.entries[layer], reader.entries[layer].checks
        after = min([e.slots for e in reader.entries if e.slots > entry.slots] + [after])
    with path.open("r+b") as file:
        file.seek(entry.slots)
        data = file.read(after - entry.slots)
        file.seek(entry.slots)
        file.write(bytes(b ^ 255 for b in data))


# --- exchanged files ---


def test_a_store_that_is_replaced_while_it_is_loaded(
    folders: tuple[Path, Path], one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python checked one file, the core opens the next: nothing is computed with it."""
    real = Store._open

    def late(self: Store, cache_bytes: int) -> int:
        shutil.copy(store_of(folders[1]), one / "other")
        os.replace(one / "other", store_of(one))
        return real(self, cache_bytes)

    monkeypatch.setattr(Store, "_open", late)
    with pytest.raises(StaleArtifactError, match=r"as in plan\.json"):
        torch_pi2.load(one, budget="1GiB")


# --- errors and interrupts in the middle ---


def test_steps_that_fail_can_be_repeated(one: Path) -> None:
    """Layers before the one that failed have the token in their cache already."""
    model = small(one)
    decoder = Decoder(model, max_tokens=24, compiled=False)

    def run(disturb: Any) -> tuple[list[int], list[torch.Tensor]]:
        tokens = [decoder.prompt(IDS)]
        for step in range(6):
            disturb(step, tokens[-1])
            tokens.append(decoder.step(tokens[-1]))
        caches = [t.clone() for layer in decoder.cache.layers for t in (layer.keys, layer.values)]
        return [int(t) for t in tokens], caches

    def damaged(step: int, token: torch.Tensor) -> None:
        flip(store_of(one), step % LAYERS)
        with pytest.raises(
            ArtifactError, match=rf"found layer {step % LAYERS}, neuron \d+ .*its checksum does not match"
        ):
            decoder.step(token)
        flip(store_of(one), step % LAYERS)

    def interrupted(step: int, token: torch.Tensor) -> None:
        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.get_submodule(f"model.layers.{step % LAYERS}").register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            decoder.step(token)
        hook.remove()

    wanted = run(lambda *_: None)
    for disturb in (damaged, interrupted):
        tokens, caches = run(disturb)
        assert tokens == wanted[0]
        assert all(map(torch.equal, caches, wanted[1]))


# --- company ---


def test_two_models_and_many_threads_over_one_store(folders: tuple[Path, Path]) -> None:
    models = [small(folders[0]), small(folders[0], engine="pread", policy="sieve", pipeline=False)]
    wanted = logits(models[0])
    found: list[torch.Tensor] = []

    def work(model: nn.Module) -> None:
        for _ in range(4):
            found.append(logits(model))

    threads = [threading.Thread(target=work, args=(models[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == 32
    assert all(torch.equal(f, wanted) for f in found)
    for model in models:
        stats = torch_pi2.stats(model)
        assert stats["hits"] <= stats["wanted"]
        assert stats["resident"] <= stats["slots"]


_FORKED = """
import os, signal, sys, torch, torch_pi2
torch.set_num_threads(1)
from torch_pi2.errors import ArtifactError
model = torch_pi2.load(sys.argv[1], budget="64MiB")
ids = torch.arange(1, 13)[None]
with torch.no_grad():
    wanted = model(ids).logits
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            model(ids)
        except ArtifactError as error:
            refused = "opened in another process (fork): open it again in this one" in str(error)
        again = torch_pi2.load(sys.argv[1], budget="64MiB")
        same = torch.equal(again(ids).logits, wanted)
        del model, again  # neither waits for threads that are not there
        os._exit(0 if refused and same else 1)
    _, status = os.waitpid(child, 0)
    assert torch.equal(model(ids).logits, wanted)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_can_load_anew(folders: tuple[Path, Path]) -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED, str(folders[0])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- reading in Python, and packing ---


def test_short_reads_are_finished(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreReader(store_of(one)) as reader:
        wanted = reader.read_layer(1)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, max(1, size // 2), at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][: len(parts[0]) // 2 + 1]], at))
    with StoreReader(store_of(one)) as reader:
        assert torch.equal(reader.read_layer(1), wanted)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_reads_that_fail(one: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Of the n-th read or later while a model is loaded."""
    calls = []

    def failing(real: Any) -> Any:
        def read(*args: Any) -> Any:
            calls.append(args)
            if len(calls) >= n:
                raise OSError(5, "Input/output error")
            return real(*args)

        return read

    with monkeypatch.context() as patch:
        for name in ("pread", "preadv"):
            patch.setattr(os, name, failing(getattr(os, name)))
        with pytest.raises(ArtifactError, match=r"model\.pi2: expected .*, found damage \(.*Input/output error"):
            torch_pi2.load(one, budget="1GiB")
    torch_pi2.load(one, budget="1GiB")


# --- two parsers of one superblock ---

_FIELDS = [(8, 4), (24, 8), (32, 4), (36, 4), (72, 4)] + [
    (128 * entry + at, size)
    for entry in (1, 2)
    for at, size in ((0, 8), (8, 8), *((16 + 4 * k, 4) for k in range(9)), (64, 4))
]
#: What only the file's JSON header can contradict, or version 1's zeros: the core does not look at either.
_HEADER_ONLY = {"slots", "checks", "weights", "bundles", "length of checks"}


@pytest.fixture(scope="module")
def toy_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    torch_pi2.pack(toy(root / "in"), root / "out")
    return store_of(root / "out")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_core_and_python_take_the_same_superblocks(toy_store: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = Damaged(toy_store)
    for _ in range(data.draw(st.integers(0, 2))):
        at, size = data.draw(st.sampled_from(_FIELDS))
        old = int.from_bytes(damaged.data[at : at + size], "little")
        near = st.sampled_from([old - 4096, old - 512, old - 1, old + 1, old + 512, old + 4096])
        value = data.draw(near | st.sampled_from([0, 1, 2, 3, 4, 5, 64, 2**31, 2**32 - 1]) | st.integers(0, 2**64 - 1))
        damaged.data[at : at + size] = (value % 256**size).to_bytes(size, "little")
    if data.draw(st.booleans()) or data.draw(st.booleans()):
        damaged.seal()
    damaged.write(tmp_path / "f")
    python = core = ""
    layers: list[tuple[int, ...]] = []
    try:
        with StoreReader(tmp_path / "f") as reader:
            layers = [(e.neurons, e.hidden, e.rows) for e in reader.entries]
    except Pi2Error as error:
        python = str(error)
    try:
        store = Store(tmp_path / "f", 0, OffloadConfig(engine="pread", io_threads=1))
        found = store.layers()
        store.close()
    except Pi2Error as error:
        core = str(error)
    if core:
        assert python, core
    elif python:
        reasons = re.search(r"\(ValueError: ([\w, ]+) of layers\.\d: ", python)
        named = {*reasons[1].split(", ")} if reasons else set()
        assert named & _HEADER_ONLY or "values where" in python or "layers where the superblock has" in python, python
    else:
        assert found == layers
