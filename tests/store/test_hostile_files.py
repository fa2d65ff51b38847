"""Every file that Python reads, spoiled field by field: a named error, in bounded memory, and never a wait."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile import (
    DEEP,
    DIGITS,
    ODD,
    TARGETS,
    changed,
    documents,
    fuzz,
    path_of,
    places,
    refused,
    write_sound,
)

import torch_pi2
from torch_pi2.base.reading import MOST_DEPTH, parse
from torch_pi2.errors import ArtifactError

#: May be right in some place, so that a file with it may be sound.
_PERHAPS = ("missing", "null", "text", "truth", "fraction", "negative", "zero", "huge", "list", "object")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    write_sound(root)
    return root


@contextmanager
def bounded(path: Path) -> Iterator[None]:
    """Memory for 64 MiB and twice the file more than there is now, and ten seconds."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = now + (64 << 20) + 2 * (path.stat().st_size if path.is_file() else 0)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{path}: still reading after 60 s"))
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "gguf"])
def test_every_field(sound: Path, name: str) -> None:
    target, path = TARGETS[name], path_of(sound, name)
    whole, wrong, count = path.read_bytes(), [], 0
    assert refused(name, path) is None
    for text, value, other in documents(name, whole):
        for way in places(value):
            free = text in target.free or any(key in target.free for key in way)
            for kind, odd in ODD.items():
                count += 1
                path.write_bytes(other(changed(value, way, odd)))
                at = f"{text} {way} {kind}"
                try:
                    error = refused(name, path)
                except BaseException as raw:
                    wrong.append(f"{at}: {type(raw).__name__}: {str(raw)[:80]}")
                    continue
                if error is None and kind not in _PERHAPS and not (free and kind not in ("deep", "digits")):
                    wrong.append(f"{at}: no error")
    path.write_bytes(whole)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])
    assert count >= 15


#: (file, text in it, way to a field, value) and what the error says.
NAMED: list[tuple[str, str, tuple[str | int, ...], Any, str]] = [
    ("plan", "", ("layers", 0, "site", "owner"), 3, "layers, 0, site, owner: expected text, found 3"),
    ("plan", "", ("layers", 0, "site", "layer"), "1", "site, layer: expected a whole number, 0 or more, found '1'"),
    ("plan", "", ("layers", 0, "site", "hidden"), 4.0, "site, hidden: expected a whole number, 1 or more"),
    ("plan", "", ("layers", 1, "site", "up", "expert"), "0", "site, up, expert: expected a whole number"),
    ("plan", "", ("layers", 0, "site", "activation"), "tanh", "site, activation: expected relu or relu2 or"),
    ("plan", "", ("layers", 0, "n_hot"), True, "layers, 0, n_hot: expected a whole number, 0 or more, at most 8"),
    ("plan", "", ("layers", 0, "site", "gate", "rows"), [8, 8], "gate, rows: expected the first of some rows and"),
    ("plan", "", ("layers", 0, "site", "intermediate"), 3 * 10**9, "site, intermediate: expected a whole number"),
    ("plan", "", ("layers", 0, "site", "intermediate"), 2 * 10**9, "a permutation of 2000000000 neurons"),
    ("plan", "", ("layers", 0, "site", "key"), "e", "layers: expected layers of different keys, found one twice"),
    ("plan", "", ("layers", 0, "threshold"), DEEP, f"found damage (lists or objects more than {MOST_DEPTH} deep)"),
    ("plan", "", ("version",), DIGITS, "found damage (a whole number of thousands of digits)"),
    ("plan", "", ("version",), True, "expected torch_pi2.plan version 2, found torch_pi2.plan version True"),
    ("stats", "layers", (0, "tokens"), -1, "layers, 0, tokens: expected a whole number, 0 or more, found -1"),
    ("stats", "layers", (0, "batch_sizes"), [1, 2], "a.batch_fired: expected int64 [2, 8], found int64 [1, 8]"),
    ("stats", "header", ("a.fired", "shape"), [2, 4], "expected int64 [2], found int64 [2, 4]"),
    ("predictors", "predictors", ("a", "card", "recall"), None, "predictors, a, card, recall: expected a number"),
    ("predictors", "predictors", ("a", "kind"), "magic", "predictors, a, kind: expected lowrank or signbit"),
    ("weights", "linears", (), {"a": True}, "linears, a: expected a whole number, 1 or more"),
    ("weights", "header", ("layers.0.bundles", "dtype"), "F4", "found F4 in layers.0.bundles"),
    ("hardware", "", ("cores",), True, "cores: expected a whole number, 1 or more, found True"),
    ("hardware", "", ("store", "slot_us"), 10**400, "store, slot_us: expected a number, 0 or more"),
    ("device", "", ("latency_us", "value"), float("nan"), "latency_us, value: expected a number, 0 or more, found nan"),
    ("accesses", "run", ("slots",), 2.5, "run, slots: expected a whole number, 0 or more, found 2.5"),
    ("index", "", ("weight_map", "w"), "../one.safetensors", "w: expected the name of a file in this folder"),
    ("index", "", ("weight_map", "w"), "/etc/passwd", "w: expected the name of a file in this folder"),
    ("config", "", ("layers",), DEEP, "config.json: expected a model's configuration, found damage (lists or"),
]


@pytest.mark.parametrize(("name", "text", "way", "value", "message"), NAMED, ids=lambda v: str(v)[:24])
def test_named(sound: Path, name: str, text: str, way: tuple[str | int, ...], value: Any, message: str) -> None:
    path = path_of(sound, name)
    whole = path.read_bytes()
    _, old, other = next(found for found in documents(name, whole) if found[0] == text)
    path.write_bytes(other(changed(old, way, value) if way else value))
    try:
        with bounded(path):
            error = refused(name, path)
    finally:
        path.write_bytes(whole)
    assert message in str(error)


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


NOT_FILES = {
    "folder": (Path.mkdir, "a folder"),
    "pipe": (os.mkfifo, "a pipe or a device"),
    "socket": (_socket, "No such device or address"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "a link to nothing"),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
}


@pytest.mark.parametrize(("name", "kind"), [*((name, "pipe") for name in TARGETS), *(("plan", k) for k in NOT_FILES)])
def test_what_is_no_regular_file_is_refused_at_once(sound: Path, name: str, kind: str) -> None:
    path, (make, found) = path_of(sound, name), NOT_FILES[kind]
    aside = path.rename(path.with_suffix(".aside"))
    try:
        make(path)
        with bounded(path), pytest.raises(ArtifactError) as raised:
            TARGETS[name].read(path)
        assert found in str(raised.value)
        assert path.name in str(raised.value)
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        aside.rename(path)


def test_a_store_that_is_no_file_is_no_missing_plan(tmp_path: Path) -> None:
    (tmp_path / "pi2" / "model.pi2").mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"model\.pi2: expected .*a folder"):
        torch_pi2.load(tmp_path)


#: Small values of which a text has many, so that they take far more than it.
BOMBS = {
    "lists": "[" + "[]," * 1_500_000 + "0]",
    "objects": "[" + "{}," * 1_500_000 + "0]",
    "lists in lists": "[" + "[[]]," * 900_000 + "0]",
    "one field each": "[" + '{"a":1000},' * 500_000 + "0]",
    "numbers": "[" + "1000," * 2_000_000 + "0]",
    "texts": "[" + '"ab",' * 2_000_000 + "0]",
    "names": "{" + ",".join(f'"{i:x}":1000' for i in range(700_000)) + "}",
    "wide text": '["' + "a" * 9_000_000 + '\U0001f600"]',
    "deep": "[" * 4_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_of_what_is_refused(sound: Path, tmp_path: Path, bomb: str) -> None:
    text = BOMBS[bomb]
    for name in ("plan", "hardware", "device", "config"):
        path = tmp_path / TARGETS[name].file
        path.write_text(text)
        with bounded(path):
            assert isinstance(refused(name, path), ArtifactError)
    path = tmp_path / "model.pi2"
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode())
    with bounded(path):
        assert isinstance(refused("store", path), ArtifactError)


@pytest.mark.slow
def test_a_large_plan_is_not_refused_for_its_size() -> None:
    """As many experts as the largest models have."""
    site = {
        "key": "model.layers.{}.mlp.experts.{}",
        "up": {"weight": "w" * 44, "bias": None, "rows": [0, 2048], "expert": 3},
    }
    entry = {"site": site | dict.fromkeys(("gate", "down"), site["up"]), "n_hot": 0, "hidden": 7168, "owner": "o" * 30}
    text = json.dumps({"layers": [entry] * 23_424}, indent=1)
    assert len(parse(text, "plan.json")["layers"]) == 23_424


@pytest.mark.parametrize("name", TARGETS)
def test_at_random(sound: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first of what ``make fuzz`` does: the same ones each time."""
    monkeypatch.chdir(tmp_path)
    assert fuzz(sound, name, seed=1, executions=60) == 60
