"""The C++ runner over damaged and hostile bundles: what is wrong with a file is said by name, none of it is used."""

from __future__ import annotations

import copy as copying
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runner_calls
from runner_calls import change, refused, run
from tiny_bundle import ROOM, write_manifest
from tiny_tokenizers import TOKENIZERS

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


def said(result: subprocess.CompletedProcess[bytes], name: str) -> None:
    """It ended with one line that names ``name``, and wrote nothing else."""
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
        for at in sorted({0, 9, 20, len(whole) - 1, *rng.sample(range(len(whole)), 40)}):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
            said(runner_calls.call(copy, *CHAT), name)
        file.write_bytes(whole)
    assert run(copy, *CHAT)["new_tokens"] == 4


def test_damage_that_is_not_looked_for_neither_hangs_nor_crashes(copy: Path) -> None:
    """``--no-verify``: sizes alone. ExecuTorch looks at the program's structure, the program's sizes count."""
    rng = random.Random(2)
    file = copy / "model.pte"
    whole = file.read_bytes()
    refusals = 0
    for at in sorted(rng.sample(range(2048), 60)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        result = runner_calls.call(copy, *CHAT, "--no-verify")
        assert result.returncode in (0, 2), (at, result.returncode, result.stderr)
        refusals += result.returncode == 2
    assert refusals > 10


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


def deep(levels: int = 100_000) -> str:
    return "[" * levels + "]" * levels


#: Values instead of a field's, as text of JSON.
WRONG = ("null", '"text"', "true", "-1", "0", "1.5", "1e400", "NaN", "18446744073709551616", "[]", "{}", deep())
#: Fields of the manifest that the runner reads.
FIELDS = [
    *["format", "version", "kind", "target", "made_by", "files", "model", "methods", "max_tokens", "lanes", "eos"],
    *["bytes", "memory", "made_by.executorch", "files.model.pte", "files.model.pi2.bytes", "files.model.pte.crc32c"],
    *["files.tokenizer.json.sha256", "model.class", "model.linears", "model.vocab", "methods.forward.kind"],
    *["methods.forward.max_tokens", "methods.decode_b2.batch", "bytes.ffn", "memory.fixed_bytes", "memory.token_bytes"],
]


def place(data: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The object that has the field, and its name there; names of files have dots."""
    for name in data:
        if path == name:
            return data, name
        if path.startswith(name + ".") and isinstance(data[name], dict):
            return place(data[name], path.removeprefix(name + "."))
    raise KeyError(path)


def variants(data: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """What was done, and the text."""
    missing = copying.deepcopy(data)
    where, name = place(missing, path)
    del where[name]
    yield "missing", json.dumps(missing)
    marked = copying.deepcopy(data)
    where, name = place(marked, path)
    where[name] = "@@"
    for value in WRONG:
        yield value[:30], json.dumps(marked).replace('"@@"', value)


#: What has no text that makes no sense, or is not needed.
TAKEN = {
    ("made_by.executorch", "missing"), ("made_by.executorch", "null"), ("target", '"text"'), ("eos", "[]"),
    ("made_by", "{}"), ("model.class", '"text"'), ("model.linears", '"text"'),
    ("files.tokenizer.json.sha256", '"text"'), ("memory.fixed_bytes", "0"), ("memory.token_bytes", "0"),
    ("bytes.ffn", "0"),
}  # fmt: skip


def test_every_field_of_the_manifest_is_checked(copy: Path) -> None:
    file = copy / "manifest.json"
    whole = json.loads(file.read_text())
    tried = 0
    for path in FIELDS:
        for what, text in variants(whole, path):
            if text.startswith("{") and deep()[:9] not in text and "1e400" not in text and "NaN" not in text:
                text = sealed(json.loads(text))
            file.write_text(text)
            result = runner_calls.call(copy, *CHAT)
            if (path, what) in TAKEN:
                assert result.returncode == 0, (path, what, result.stderr)
            else:
                said(result, "manifest.json")
            tried += 1
    assert tried == len(FIELDS) * (len(WRONG) + 1)


def test_every_field_of_the_chat_is_checked(copy: Path) -> None:
    file = copy / "chat.json"
    whole = json.loads(file.read_text())
    taken = {("system_user", what) for what in ["missing", *(v[:30] for v in WRONG if v[0] not in "1NW[")]}
    taken |= {("system_user", v[:30]) for v in ("1.5", "18446744073709551616", "[]")}  # not read without --system
    taken |= {("strips", "{}")}
    for path in whole:
        for what, text in variants(whole, path):
            file.write_text(text)
            write_manifest(copy)
            result = runner_calls.call(copy, *CHAT)
            if (path, what) in taken:
                assert result.returncode == 0, (path, what, result.stderr)
            else:
                said(result, "chat.json")


def tokenizer_fields(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every field; of the vocabulary and the merges the first."""
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data))
    for name, value in items[:1] if path in (("model", "vocab"), ("model", "merges")) else items:
        yield (*path, name)
        if isinstance(value, (dict, list)):
            yield from tokenizer_fields(value, (*path, name))


def test_every_field_of_a_tokenizer_is_checked(tmp_path: Path) -> None:
    """Refused by one line, or another tokenizer; all of them in one process each would take minutes, so in one."""
    made = 0
    for name in ("llama3", "llama2", "mistral", "odd"):
        raw = TOKENIZERS[name]()
        whole = json.loads(raw.to_str())
        whole["added_tokens"] = whole["added_tokens"][:3]
        for path in tokenizer_fields(whole):
            at: Any = whole
            for key in path[:-1]:
                at = at[key]
            before = at[path[-1]]
            at[path[-1]] = "@@"
            text = json.dumps(whole)
            at[path[-1]] = before
            for value in ("null", "-1", "1e300", "18446744073709551616", "[]", "{}", '"(?:"', deep(3000)):
                (tmp_path / f"{made}").write_text(text.replace('"@@"', value))
                made += 1
    result = subprocess.run(
        [runner_calls.BUILT / "replay_tokenizer", tmp_path], capture_output=True, text=True, timeout=120, env={}
    )
    assert result.returncode == 0, result.stderr[-500:]
    assert result.stdout == f"{made} inputs\n"
    assert made > 500


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
    said(result, message)
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


@pytest.mark.parametrize("name", ["manifest.json", "model.pte", "model.pi2", "tokenizer.json", "chat.json"])
@pytest.mark.parametrize("kind", ["folder", "FIFO", "dangling link", "device", "link out", "gone"])
def test_what_is_no_file_of_the_folder_is_refused(copy: Path, name: str, kind: str) -> None:
    hostile(kind, copy / name)
    if (name, kind) == ("manifest.json", "link out"):
        assert run(copy, *CHAT)["new_tokens"] == 4  # whoever opens it has named it
        return
    for verify in ((), ("--no-verify",)):
        said(runner_calls.call(copy, *CHAT, *verify), str(copy))


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


@pytest.mark.parametrize(
    "name", ["../model.pte", "/etc/hostname", "a/b", "a\\b", "..", ".", "", "a\nb", "manifest.json"]
)
def test_names_of_files_are_plain(copy: Path, name: str) -> None:
    data = json.loads((copy / "manifest.json").read_text())
    change(copy, files={**data["files"], name: data["files"]["model.pte"]})
    assert "manifest.json, files: expected names of files without folders, found " in refused(copy, *CHAT)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", "[],"),
        ("manifest.json", "["),
        ("manifest.json", '{"a":'),
        ("chat.json", "[],"),
        ("tokenizer.json", "["),
        ("tokenizer.json", '"\\u0000",'),
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 6 << 20])
def test_memory_of_what_is_refused_is_bounded(copy: Path, name: str, text: str, size: int) -> None:
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
    said(result, name)
