"""manifest.json: what is written is read, everything else is refused by name, and files are what it says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_pi2.errors import ArtifactError
from torch_pi2.export.manifest import Manifest, MethodEntry, Model, describe_files, sealed
from torch_pi2.export.settings import check_bundle_folder

HASH = "0123456789abcdef" * 4
SUMS = {"crc32c": "01234567", "sha256": HASH}


def decoder(folder: Path) -> Manifest:
    """A manifest of small files that are in ``folder`` afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("model.pte", 1000), ("model.pi2", 5000), ("tokenizer.json", 0)):
        (folder / name).write_bytes(bytes(i % 251 for i in range(size)))
    return Manifest(
        kind="decoder",
        target="qnn:SM8650",
        made_by={"torch_pi2": "0.1.0", "executorch": "1.5.1"},
        files=describe_files(folder),
        model=Model("LlamaForCausalLM", "llama", HASH, "int4", "int8", 2, 64, 300),
        methods={
            "forward": MethodEntry("forward", 1, 16, (4, 4)),
            "decode_b1": MethodEntry("decode", 1, 1, (1, 2)),
            "decode_b2": MethodEntry("decode", 2, 1, (2, 3)),
            "fork": MethodEntry("fork", 2, 1),
        },
        max_tokens=32,
        lanes=2,
        pte_bytes=1000,
        store_bytes=5000,
        ffn_bytes=4000,
        fixed_bytes=1 << 20,
        token_bytes=400,
        eos=(0, 7),
        bos=1,
        lossy=("int4 weights",),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder(tmp_path / "bundle").save(tmp_path / "bundle")
    return tmp_path / "bundle"


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(sealed(data))


def test_written_and_read(folder: Path) -> None:
    found = Manifest.load(folder)
    assert found == decoder(folder)
    assert Manifest.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.batches == (1, 2)
    assert found.verify(folder, "all") == 6000
    assert found.verify(folder, "loaded") == 1000  # not the store
    assert found.verify(folder) == 0  # sizes alone


def fields(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of the file, but names that are free."""
    found = []
    for name, value in data.items():
        found.append((*path, name))
        if isinstance(value, dict) and name != "made_by":
            found += fields(value, (*path, name))
    return found


def place(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path[:-1]:
        data = data[name]
    return data


def test_every_field_is_required_and_of_its_type(tmp_path: Path) -> None:
    good = decoder(tmp_path / "b").to_json()
    free = ({"files", "methods"}, {"format", "version"})
    tried = 0
    for path in fields(good):
        if path[0] in free[1] or (len(path) == 2 and path[0] in free[0]):
            continue
        missing, wrong = copy.deepcopy(good), copy.deepcopy(good)
        del place(missing, path)[path[-1]]
        place(wrong, path)[path[-1]] = -1.5
        for data, where, expected, found in (
            (missing, path[:-1], f"a field {path[-1]}", "none"),
            (wrong, path, "", "-1.5"),
        ):
            with pytest.raises(ArtifactError) as error:
                Manifest.from_json(data, "here/manifest.json")
            assert error.value.what == ", ".join(("here/manifest.json", *where))
            assert error.value.expected.startswith(expected)
            assert error.value.found == found
            tried += 1
    assert tried > 80


#: An edit of the file, and what the message has to say.
CORRUPTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (
        lambda d: d.update(version=5),
        r"manifest\.json: expected torch_pi2\.bundle version 4, found .* version 5",
    ),
    "without checksums": (lambda d: d.update(version=2), r"torch_pi2\.bundle version 4, found .* version 2"),
    "format": (lambda d: d.update(format="other"), r"expected torch_pi2\.bundle version 4, found other version 4"),
    "kind": (lambda d: d.update(kind="model"), r"kind: expected decoder or module, found 'model'"),
    "target": (lambda d: d.update(target="qnn"), r"target: expected xnnpack or qnn:SOC"),
    "folder": (
        lambda d: d["files"].update({"../x": d["files"]["model.pte"]}),
        r"files: .* without folders, found '../x'",
    ),
    "itself": (lambda d: d["files"].update({"manifest.json": d["files"]["model.pte"]}), r"without folders"),
    "no program": (lambda d: d["files"].pop("model.pte"), r"files: expected an entry of model\.pte, found 'model\.pi2"),
    "no store": (lambda d: d["files"].pop("model.pi2"), r"files: expected an entry of model\.pi2"),
    "true": (
        lambda d: d["model"].update(layers=True),
        r"model, layers: expected a whole number, 0 or more, found True",
    ),
    "vocab": (lambda d: d["model"].update(vocab=None), r"model\.vocab: expected 1 or more in a decoder, found None"),
    "eos": (lambda d: d.update(eos=[-1]), r"eos, 0: expected a whole number, 0 or more, found -1"),
    "method kind": (lambda d: d["methods"]["fork"].update(kind="spoon"), r"methods\.fork: expected what its name says"),
    "batch": (lambda d: d["methods"]["decode_b2"].update(batch=3), r"methods\.decode_b2: expected what its name says"),
    "no prompt": (lambda d: d["methods"]["forward"].update(max_tokens=0), r"methods\.forward: expected what its name"),
    "negative": (lambda d: d["methods"]["forward"].update(hot_chunks=[1, -1]), r"hot_chunks, 1: expected a whole"),
    "no forward": (lambda d: d["methods"].pop("forward"), r"methods: expected forward and decode_bN"),
    "no decode": (
        lambda d: [d["methods"].pop(f"decode_b{b}") for b in (1, 2)],
        r"methods: expected forward and decode",
    ),
    "no fork": (lambda d: d["methods"].pop("fork"), r"methods: expected fork, for more than one lane"),
    "module": (lambda d: d.update(kind="module"), r"methods: expected only forward, found 'forward"),
    "lanes": (lambda d: d.update(lanes=3), r"lanes: expected 2, as the largest batch, found 3"),
    "room": (lambda d: d.update(max_tokens=8), r"max_tokens: expected at least 16, as its methods take, found 8"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_makes_no_sense_is_refused_by_name(name: str, folder: Path) -> None:
    edit, message = CORRUPTIONS[name]
    change(folder, edit)
    with pytest.raises(ArtifactError, match=message) as error:
        Manifest.load(folder)
    assert str(folder / "manifest.json") in str(error.value)


def test_what_is_no_manifest_is_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[:100])
    with pytest.raises(ArtifactError, match=r"manifest\.json: expected JSON, found damage"):
        Manifest.load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"a bundle: a folder with manifest\.json, found none in it"):
        Manifest.load(folder)
    with pytest.raises(ArtifactError, match="found no such folder"):
        Manifest.load(tmp_path / "nowhere")


def test_a_changed_byte_of_the_manifest_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):  # no multiple of 7: each bit has its turn
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 7)]) + whole[at + 1 :])
        with pytest.raises(ArtifactError, match=r"manifest\.json"):
            Manifest.load(folder)


def test_an_edit_by_hand_is_refused_unless_it_is_meant(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"bos": 1', '"bos": 2'))
    message = (
        r"manifest\.json: expected its CRC32C of all that follows in the first line, \w{8}, found \w{8}: it was ch"
    )
    with pytest.raises(ArtifactError, match=message + r".*pass --no-verify \(verify=False\) if the change is meant"):
        Manifest.load(folder)
    assert Manifest.load(folder, verify=False).bos == 2
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(ArtifactError, match="in the first line, found none: it was changed or damaged"):
        Manifest.load(folder)


def test_a_damaged_bundle_may_be_exported_again(folder: Path, tmp_path: Path) -> None:
    """That is what its refusal advises."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("qnn:SM8650", "qnn:SM8550"))
    with pytest.raises(ArtifactError, match="export again"):
        Manifest.load(folder)
    check_bundle_folder(folder)
    (folder / "notes.txt").touch()
    with pytest.raises(ArtifactError, match="an earlier bundle, found other files"):
        check_bundle_folder(folder)


def test_a_field_of_later_is_passed_over(folder: Path) -> None:
    change(folder, lambda d: d.update(colour="red"))
    assert Manifest.load(folder) == decoder(folder)


def test_files_are_compared(folder: Path) -> None:
    manifest = Manifest.load(folder)
    (folder / ".hidden").write_text("what a file manager leaves")
    manifest.verify(folder, "all")
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ArtifactError, match=r"notes\.txt: expected only the files that manifest\.json names"):
        manifest.verify(folder)
    (folder / "notes.txt").unlink()

    program = folder / "model.pte"
    whole = program.read_bytes()
    program.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"model\.pte: expected 1000 bytes.*found 999 bytes: it is cut"):
        manifest.verify(folder)
    program.write_bytes(whole + b"x")
    with pytest.raises(ArtifactError, match=r"model\.pte: expected 1000 bytes.*found 1001 bytes\. Copy"):
        manifest.verify(folder)
    program.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    manifest.verify(folder)  # the size is right
    with pytest.raises(
        ArtifactError,
        match=r"pte: expected CRC32C [0-9a-f]{8} and SHA-256 [0-9a-f]{12}\.\.\., .*: it was changed or dam",
    ):
        manifest.verify(folder, "all")
    with pytest.raises(
        ArtifactError, match=r"pte: expected CRC32C [0-9a-f]{8}, as manifest\.json says, found [^,]*: it was changed"
    ):
        manifest.verify(folder, "loaded")
    program.unlink()
    with pytest.raises(ArtifactError, match=r"model\.pte: expected 1000 bytes.*found no such file"):
        manifest.verify(folder)
    program.mkdir()
    with pytest.raises(ArtifactError, match=r"model\.pte: .*found no such file"):
        manifest.verify(folder)
