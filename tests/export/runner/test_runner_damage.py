"""The C++ runner over damaged and hostile bundles: what is wrong with a file is said by name, none of it is used."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runner_calls
from runner_calls import change, refused, run
from tiny_bundle import ROOM, write_manifest

from torch_pi2.export.manifest import sealed

#: What a refused file may take: 64 MiB, twice its size, and the program itself.
_OWN = 24 << 20


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (folder / "chat.json").write_text(
        json.dumps(
            {
                "format": "torch_pi2.chat",
                "version": 3,
                "user": ["<", ">"],
                "system_user": None,
                "strips": {"user": True},
            }
        )
    )
    write_manifest(folder)
    return folder


def check_refusal(result: subprocess.CompletedProcess[bytes], name: str) -> None:
    """The runner ended with one line that names ``name``, and wrote nothing else."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert result.stdout == b""
    lines = [line for line in result.stderr.decode().splitlines() if line.startswith("pi2_runner: ")]
    assert len(lines) == 1
    assert name in lines[0]
    assert ": expected " in lines[0]
    assert len(lines[0]) < 1000


CHAT = ("--chat", "--prompt", "def", "--max-new-tokens", 4)


def test_every_file_of_which_a_byte_is_changed_is_refused(copy: Path) -> None:
    rng = random.Random(1)
    for name in ("manifest.json", "model.pte", "tokenizer.json", "chat.json"):
        file = copy / name
        whole = file.read_bytes()
        for at in sorted({0, 9, 20, len(whole) - 1, *rng.sample(range(len(whole)), 12)}):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
            check_refusal(runner_calls.call(copy, *CHAT), name)
        file.write_bytes(whole)
    assert run(copy, *CHAT)["new_tokens"] == 4


def test_an_edited_manifest_is_taken_if_that_is_meant(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"TinyDecoder"', '"Edited"'))
    message = r"manifest.json: expected its CRC32C of all that follows in the first line, "
    assert message in refused(copy, *CHAT)
    assert run(copy, *CHAT, "--no-verify")["new_tokens"] == 4
    path.write_text(json.dumps(json.loads(path.read_text())))  # without the line
    assert "in the first line, found none: it was changed or damaged. " in refused(copy, *CHAT)
    assert "expected --verify or --no-verify, found both. " in refused(copy, *CHAT, "--verify", "--no-verify")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: d.update(max_tokens=ROOM * 4),
            f"max_tokens: expected {ROOM * 4}, as manifest.json says, found {ROOM}. ",
        ),
        (lambda d: d.update(max_tokens=ROOM - 1), f"found {ROOM}. The program counts"),
        (
            lambda d: d["model"].update(vocab=299),
            "logits of forward: expected [1, 1, 299], as manifest.json says, found",
        ),
        (lambda d: d["methods"]["forward"].update(max_tokens=9), "input of forward: expected [1, 9], as manifest"),
        (
            lambda d: (d["methods"].update(decode_b8={**d["methods"].pop("decode_b4"), "batch": 8}), d.update(lanes=8)),
            "method decode_b8: expected there, as manifest.json says, found none. ",
        ),
    ],
)
def test_what_the_program_states_counts(copy: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    edit(data)
    (copy / "manifest.json").write_text(sealed(data))
    assert message in refused(copy, *CHAT)


DEEP = "[" * 100_000 + "]" * 100_000
#: File, field (names of files have dots, so it is a path), its value as text of JSON.
FIELDS: list[tuple[str, tuple[str, ...], str]] = [
    ("manifest.json", ("version",), "null"),
    ("manifest.json", ("files",), DEEP),
    ("manifest.json", ("files", "model.pi2", "bytes"), "1e400"),
    ("manifest.json", ("methods", "decode_b2", "batch"), "18446744073709551616"),
    ("manifest.json", ("model", "vocab"), "0"),
    ("manifest.json", ("lanes",), "NaN"),
    ("chat.json", ("user",), '["<"]'),
    ("chat.json", ("strips",), DEEP),
    ("tokenizer.json", ("model",), "{}"),
    ("tokenizer.json", ("added_tokens",), DEEP),
]


@pytest.mark.parametrize(("name", "path", "value"), FIELDS, ids=range(len(FIELDS)))
def test_wrong_fields_are_refused_by_name(copy: Path, name: str, path: tuple[str, ...], value: str) -> None:
    data = json.loads((copy / name).read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@@"
    text = json.dumps(data).replace('"@@"', value)
    with_seal = name == "manifest.json" and value not in (DEEP, "NaN", "1e400")
    (copy / name).write_text(sealed(json.loads(text)) if with_seal else text)
    if name != "manifest.json":
        write_manifest(copy)
    check_refusal(runner_calls.call(copy, *CHAT), name)


#: What a tokenizer's steps make of a short text, or a short file of them.
_NESTED = '{"type": "Sequence", "normalizers": [' * 10_000 + "]}" * 10_000
_DOUBLES = {"type": "Replace", "pattern": {"String": "d"}, "content": "dd"}
_IDS = {"SpecialToken": {"id": "s"}}
GROWTH: dict[str, tuple[str, Any, str]] = {
    "nested": ("normalizer", json.loads("[]"), "JSON of at most 64 levels"),
    "doubling": ("normalizer", {"type": "Sequence", "normalizers": [_DOUBLES] * 60}, "leave at most 4 MiB of text"),
    "backtracking": (
        "normalizer",
        {"type": "Replace", "pattern": {"Regex": r"^((\w|d)+)+\d$"}, "content": ""},
        "a text that it can match",
    ),
    "around": (
        "post_processor",
        {"type": "TemplateProcessing", "single": [_IDS] * 200, "special_tokens": {"s": {"ids": list(range(9))}}},
        "at most 1024 tokens around a text",
    ),
}


@pytest.mark.parametrize("name", GROWTH)
def test_work_of_a_tokenizer_is_bounded(copy: Path, name: str) -> None:
    part, step, message = GROWTH[name]
    text = json.dumps({**json.loads((copy / "tokenizer.json").read_text()), part: "@@"})
    (copy / "tokenizer.json").write_text(text.replace('"@@"', _NESTED if name == "nested" else json.dumps(step)))
    write_manifest(copy)
    start = os.times()
    result = runner_calls.call(copy, "--prompt", "d" * 40, "--json")
    check_refusal(result, message)
    assert os.times().children_user - start.children_user < 10


def hostile(kind: str, file: Path) -> None:
    """Something else in the place of ``file``."""
    content = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind == "dangling link":
        file.symlink_to("nothing")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link out":
        outside = file.parent.parent / file.name
        outside.write_bytes(content)
        file.symlink_to(outside)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "dangling link", "device", "link out", "gone"])
def test_what_is_no_file_of_the_folder_is_refused(copy: Path, kind: str) -> None:
    hostile(kind, copy / "tokenizer.json")
    for verify in ((), ("--no-verify",)):
        check_refusal(runner_calls.call(copy, *CHAT, *verify), str(copy))


def test_links_within_the_folder_and_stores_elsewhere_are_taken(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").rename(copy / ".tokenizer")
    (copy / "tokenizer.json").symlink_to(".tokenizer")
    (copy / "model.pi2").rename(tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "linked").symlink_to(copy)
    for folder in (copy, tmp_path / "linked"):
        assert run(folder, *CHAT, "--store", tmp_path / "link")["new_tokens"] == 4


def test_files_that_the_manifest_does_not_name_are_not_used(copy: Path) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    for name, options, message in (
        ("chat.json", CHAT, "chat.json: expected the chat template of the bundle, found no such file: "),
        ("tokenizer.json", ("--prompt", "d"), "manifest.json, files: expected tokenizer.json, for text, found none. "),
    ):
        change(copy, files={n: entry for n, entry in data["files"].items() if n != name})
        assert message in refused(copy, *options)


@pytest.mark.parametrize("name", ["../model.pte", "a/b", "a\\b", "..", "", "a\nb", "manifest.json"])
def test_names_of_files_are_plain(copy: Path, name: str) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    change(copy, files={**data["files"], name: data["files"]["model.pte"]})
    assert "manifest.json, files: expected names of files without folders, found " in refused(copy, *CHAT)


@pytest.mark.parametrize(
    ("name", "text"),
    [("manifest.json", "["), ("chat.json", "[],"), ("tokenizer.json", '"\\u0000",')],
)
def test_memory_of_what_is_refused_is_bounded(copy: Path, name: str, text: str) -> None:
    size = 6 << 20
    (copy / name).write_text("[" + text * (size // len(text)))
    if name != "manifest.json":
        write_manifest(copy)
    most = (64 << 20) + 2 * size + _OWN
    result = subprocess.run(
        [runner_calls.FOLDER / "pi2_runner", copy, *map(str, CHAT)],
        capture_output=True,
        timeout=20,
        env={},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)),
    )
    check_refusal(result, name)
