"""Neuron stores: the bytes of the format, packing, and damage that is always noticed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from stores import HASH, Damaged, logits, pack, rename_checked, store_of, toy
from tiny_models import tiny

import torch_pi2
from torch_pi2.base.crc32c import continue_crc32c, crc32c
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.tensorfile import Spec, TensorReader, tensor_check
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, ConfigError, StaleArtifactError
from torch_pi2.store.storefile import StoreReader, part_of
from torch_pi2.store.superblock import LayerEntry, Superblock, slot_bytes
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``in``, a quantised folder, and ``out``, its store."""
    root = tmp_path_factory.mktemp("toys")
    pack(toy(root / "in"), root / "out")
    return root


def weights_of(folder: Path) -> Path:
    return folder / "pi2" / "weights.safetensors"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# --- bytes ---


def test_checksums_are_castagnolis() -> None:
    rows = torch.tensor([list(b"123456789")], dtype=torch.uint8)
    assert int(crc32c(rows)[0]) == 0xE3069283
    # RFC 3720, B.4
    vectors = {0x8A9136AA: [0] * 32, 0x62A8AB43: [255] * 32, 0x46DD794E: list(range(32)), 0x113FDB5C: range(31, -1, -1)}
    found = crc32c(torch.tensor([list(v) for v in vectors.values()], dtype=torch.uint8))
    assert found.tolist() == list(vectors)
    assert crc32c(torch.empty((0, 7), dtype=torch.uint8)).shape == (0,)


@pytest.mark.parametrize("sizes", [(0,), (9,), (4, 5), (5, 3, 1), (1, 1, 1, 1, 1, 4), (4096, 2, 4096, 3)])
def test_checksums_go_on_from_piece_to_piece(sizes: tuple[int, ...]) -> None:
    whole = (b"123456789" * 911)[: sum(sizes)]
    crc = start = 0
    for size in sizes:
        crc, start = continue_crc32c(crc, whole[start : start + size]), start + size
    assert crc == int(
        crc32c(torch.frombuffer(bytearray(whole) or bytearray(1), dtype=torch.uint8)[None, : len(whole)])[0]
    )


def test_superblock_to_the_byte(toys: Path) -> None:
    """What the core parses; layers of 50 gated and 9 plain neurons of 40 numbers."""
    data = store_of(toys / "out").read_bytes()
    assert data[:8] == (4096 - 8).to_bytes(8, "little")
    block = data[4096:8192]
    assert block[:12] == b"PI2STORE" + bytes.fromhex("01000000")
    assert block[16:72] == bytes.fromhex("0010000000000000") + len(data).to_bytes(8, "little") + bytes.fromhex(
        "0200000000100000" + HASH
    )
    assert block[128:176].hex() == (
        "0020000000000000"  # slots at 8192, after the superblock
        "00a2000000000000"  # checksums after the slots of both layers
        "32000000"
        "28000000"
        "03000000"
        "04000000"  # 50 neurons, hidden 40, 3 rows, int4
        "00020000"
        "24000000"
        "05000000"
        "03000000"  # slots of 512, rows of 36 bytes, 5 hot, layer 3
    )
    assert block[256:304].hex() == (
        "0090000000000000"  # on the next page
        "c8a2000000000000"
        "09000000"
        "28000000"
        "02000000"
        "04000000"
        "00020000"
        "24000000"
        "09000000"
        "04000000"  # dense: all are hot
    )
    assert not any(block[72:128] + block[176:256] + block[304:])
    checked = torch.frombuffer(bytearray(block[:12] + bytes(4) + block[16:]), dtype=torch.uint8)
    assert block[12:16] == int(crc32c(checked[None])[0]).to_bytes(4, "little")
    parsed = Superblock.parse(block)
    assert parsed.layers[0] == LayerEntry(8192, 0xA200, 50, 40, 3, 4, 512, 36, 5, 3)
    assert (parsed.pack(), parsed.layers[0].neuron_bytes) == (block, 108)


def test_the_same_input_gives_the_same_bytes_as_ever(toys: Path) -> None:
    """Everything behind the header, which names the version of torch_pi2: superblock, slots, checksums, tensors."""
    data = store_of(toys / "out").read_bytes()
    found = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    assert found == "27f160f167e445c1c5fb3b558a4aef2a25b60c1c6e974a5e4d6e39d5a6fa2252"


def test_superblocks_of_many_layers_take_more_pages() -> None:
    entry = LayerEntry(8192, 0, 1, 32, 2, 4, 512, 18, 0, 0)
    for layers, pages in ((1, 1), (31, 1), (32, 2), (1000, 32)):
        data = Superblock(1, b"h" * 32, (entry,) * layers).pack()
        assert len(data) == 4096 * pages
        assert len(Superblock.parse(data).layers) == layers


def test_slots() -> None:
    assert [slot_bytes(n) for n in (54, 512, 513, 4095, 4096, 4097, 6912)] == [512, 512, 1024, 4096, 4096, 8192, 8192]


def test_the_file_is_laid_out_as_documented(toys: Path) -> None:
    with StoreReader(store_of(toys / "out")) as store:
        in_order = sorted(store.specs, key=lambda name: (store.offset(name), store.specs[name].nbytes))
        assert [n for n in in_order if n != "none"][:7] == [
            "pi2.superblock",
            "layers.0.bundles",
            "pi2.padding.0",
            "layers.1.bundles",
            "layers.0.checks",
            "layers.1.checks",
            "pi2.padding.1",
        ]
        assert store.offset("pi2.padding.1") + store.specs["pi2.padding.1"].nbytes == 0xB000
        regions = store.regions()
        assert sum(regions.values()) == store.file_bytes == store_of(toys / "out").stat().st_size
        assert regions["bundles"] == 50 * 108 + 9 * 72
        assert regions["slot_padding"] == 59 * 512 - regions["bundles"]
        assert regions["linears"] == 70 * 36
    tensors = load_file(str(store_of(toys / "out")))
    assert not tensors["layers.0.bundles"][:, 108:].any()
    checks = tensors["layers.0.checks"].numpy().view("<u4").tolist()
    assert checks == crc32c(tensors["layers.0.bundles"][:, :108].contiguous()).tolist()


def test_clusters_share_slots(tmp_path: Path) -> None:
    torch_pi2.pack(toy(tmp_path / "in"), tmp_path / "out", cluster=8)
    data = store_of(tmp_path / "out").read_bytes()
    block = Superblock.parse(data[4096:8192])
    assert data[4096 + 8 : 4096 + 12] == bytes.fromhex("02000000")
    assert data[4096 + 128 + 48 : 4096 + 128 + 52] == bytes.fromhex("08000000")
    first, last = block.layers
    assert (first.cluster, first.slot_bytes, first.slots_in_file) == (8, 1024, 7)  # 8 x 108 bytes; 50 neurons
    assert (last.cluster, last.slot_bytes, last.slots_in_file) == (8, 1024, 2)  # 8 x 72 bytes; 9 neurons
    with StoreReader(store_of(tmp_path / "out")) as store, TensorReader(weights_of(tmp_path / "in")) as weights:
        wanted = weights.read("layers.0.bundles").flatten(1)
        assert torch.equal(store.read("layers.0.bundles")[6, : 2 * 108], wanted[48:].flatten())
        assert not store.read("layers.0.bundles")[6, 2 * 108 :].any()
        assert torch.equal(store.read_layer(0, (7, 49)).flatten(1), wanted[7:49])


def test_clusters_are_for_layers_without_predictors(tmp_path: Path) -> None:
    torch_pi2.pack(toy(tmp_path / "in"), tmp_path / "out")
    with StoreReader(store_of(tmp_path / "out")) as store:
        assert [entry.cluster for entry in store.entries] == [64, 64]
    for cluster in (0, 3, 128):
        with pytest.raises(ConfigError, match=rf"a power of two from 1 to 64, found {cluster}"):
            torch_pi2.pack(tmp_path / "in", tmp_path / "other", cluster=cluster)


@pytest.mark.parametrize("cluster", [1, None, 4])
def test_everything_comes_back(tmp_path: Path, cluster: int | None) -> None:
    source = toy(tmp_path / "in", (50, 9, 33))
    report = torch_pi2.pack(source, tmp_path / "out", cluster=cluster)
    with TensorReader(source / "pi2" / "weights.safetensors") as old, StoreReader(store_of(tmp_path / "out")) as new:
        for i, key in enumerate(new.keys):
            wanted = old.read(f"{key}.bundles")
            assert torch.equal(new.read_layer(i), wanted)
            assert torch.equal(new.read_layer(i, (3, 8)), wanted[3:8])
            in_slot = new.entries[i].cluster * new.entries[i].neuron_bytes
            assert new.entries[i].slot_bytes == slot_bytes(in_slot)
        weights = [name for name in new.checks if part_of(name) is None]
        for name in weights:
            assert old.spec(name) == new.spec(name)
            assert torch.equal(raw(new.read(name)), raw(old.read(name)))
        assert {*weights} == {n for n in old.specs if not n.endswith(".bundles")}
        parts = ("superblock", "bundles", "linears", "floats", "plan", "predictors", "stats")
        assert new.verify() == sum(new.regions()[part] for part in parts)
        assert json.loads(new.metadata["provenance"])["from"] == "torch_pi2.weights"
        for name in ("linears", "sites", "weights", "model_hash"):
            assert new.metadata[name] == old.metadata[name]
        assert report.regions == new.regions()
        assert (report.layers, report.neurons) == (3, 92)
        assert report.file_bytes == new.file_bytes
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert os.listdir(tmp_path / "out" / "pi2") == ["model.pi2"]


def test_pieces_do_not_show(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("store.writer", "store.storefile"):
        monkeypatch.setattr(f"torch_pi2.{module}.PIECE", 4096)
    pack(toys / "in", tmp_path / "out")
    assert store_of(tmp_path / "out").read_bytes() == store_of(toys / "out").read_bytes()
    with StoreReader(store_of(tmp_path / "out")) as store:
        store.verify()
    pack(toys / "out", tmp_path / "again")  # a store, packed once more
    with StoreReader(store_of(tmp_path / "again")) as store:
        store.verify()
        assert json.loads(store.metadata["provenance"])["from"] == "torch_pi2.store"
        old = load_file(str(store_of(toys / "out")))
        assert all(torch.equal(raw(t), raw(old[n])) for n, t in load_file(str(store_of(tmp_path / "again"))).items())


# --- models ---


@pytest.mark.parametrize(("name", "weights"), [("llama-bias", "int4"), ("phi3", "int8")])
def test_a_store_is_the_model_it_was_packed_from(tmp_path: Path, name: str, weights: str) -> None:
    tiny(name).save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "q", weights)
    pack(tmp_path / "q", tmp_path / "store")
    packed = torch_pi2.load(tmp_path / "store")
    assert torch.equal(logits(packed), logits(torch_pi2.load(tmp_path / "q")))
    assert torch.equal(logits(load_dense(tmp_path / "store")), logits(load_dense(tmp_path / "q")))
    pack(tmp_path / "float", tmp_path / "direct", weights=weights)
    assert store_of(tmp_path / "direct").read_bytes() == store_of(tmp_path / "store").read_bytes()
    torch_pi2.save(packed, tmp_path / "saved")  # in memory it is a quantised model like any other
    files = [load_file(str(tmp_path / n / "pi2" / "weights.safetensors")) for n in ("q", "saved")]
    assert all(torch.equal(files[0][n], files[1][n]) for n in files[0])
    assert sorted(os.listdir(tmp_path)) == ["direct", "float", "q", "saved", "store"]


@torch.no_grad()
def test_a_model_is_of_the_class_that_its_configuration_names(tmp_path: Path) -> None:
    """No causal language model: one without a head."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_hidden_layers=2, hidden_act="relu")).eval()
    ids = torch.arange(3, 12)[None]
    wanted = model(ids)[0]
    torch_pi2.save(torch_pi2.optimize(model), tmp_path / "saved")
    pack(tmp_path / "saved", tmp_path / "store")
    for folder in ("saved", "store"):
        loaded = torch_pi2.load(tmp_path / folder)
        assert type(loaded) is transformers.LlamaModel
        torch.testing.assert_close(loaded(ids)[0], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        assert type(load_dense(tmp_path / folder)) is transformers.LlamaModel


# --- full disks, company ---

Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_space_is_seen_before_writing(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1000))
    size = store_of(toys / "out").stat().st_size
    with pytest.raises(
        ArtifactError, match=rf"of {size} bytes: expected as many bytes of free space .*, found 1000\. .* free some sp"
    ):
        pack(toys / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_a_disk_that_fills_up(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    shutil.copytree(toys / "out", tmp_path / "out")
    before = store_of(tmp_path / "out").read_bytes()
    real, calls = os.pwrite, []

    def full(*args: Any) -> int:
        calls.append(args)
        if len(calls) == n:
            raise OSError(28, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ArtifactError, match=r"found No space left on device\. Choose another"):
            pack(toys / "in", tmp_path / "out", cluster=16)
    assert os.listdir(tmp_path) == ["out"]
    assert store_of(tmp_path / "out").read_bytes() == before
    pack(toys / "in", tmp_path / "out", cluster=16)
    assert store_of(tmp_path / "out").read_bytes() != before


def test_one_at_a_time(toys: Path, tmp_path: Path) -> None:
    class Done(Exception):
        pass

    def both() -> None:
        with replacing_folder(tmp_path / "out") as staging:
            (staging / "mine").write_text("x")
            with pytest.raises(
                ArtifactError, match=r"no other process that writes it, found one that has locked \.out\.lock"
            ):
                pack(toys / "in", tmp_path / "out")
            assert (staging / "mine").read_text() == "x"
            raise Done

    with pytest.raises(Done):
        both()
    pack(toys / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_what_cannot_be_packed(toys: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for options, error, message in (
        ({"weights": "int2"}, ConfigError, r"pack\(weights=\.\.\.\): expected int4 or .*, found 'int2'"),
        ({"weights": "int8"}, ConfigError, "expected int4, as the weights are, found 'int8'"),
        ({"weights": "float"}, ConfigError, "expected int4, as the weights are, found 'float'"),
        ({"folder_out": toys / "in" / "x"}, ConfigError, "pack's folders: expected two separate ones"),
        ({"folder_out": tmp_path / "other"}, ArtifactError, "found a folder with other files in it"),
    ):
        with pytest.raises(error, match=message):
            pack(**{"folder_in": toys / "in", "folder_out": tmp_path / "out", **options})
    with pytest.raises(ArtifactError, match="expected a hexadecimal model_hash, found 'xyz'"):
        pack(toy(tmp_path / "odd", model_hash="xyz"), tmp_path / "out")
    shutil.copytree(toys / "in", tmp_path / "in")
    plan = Plan.load(tmp_path / "in" / "pi2")
    plan.model_hash = "ef" * 32
    plan.save(tmp_path / "in" / "pi2")
    with pytest.raises(StaleArtifactError, match=r"as in plan\.json"):
        pack(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


_MEMORY = """
import re, sys, torch, torch_pi2
def read(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
torch_pi2.pack(sys.argv[1], sys.argv[3], cluster=1)  # everything imported once
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
report = torch_pi2.pack(sys.argv[2], sys.argv[4], cluster=1)
print(read("VmHWM") - before, report.file_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    toy(tmp_path / "small")
    toy(tmp_path / "big", (180_000,) * 4, 256)
    folders = [str(tmp_path / name) for name in ("small", "big", "a", "b")]
    done = subprocess.run([sys.executable, "-c", _MEMORY, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    memory, size = map(int, done.stdout.split())
    assert size > 300e6
    assert memory < 200e6
    shutil.rmtree(tmp_path / "big")
    shutil.rmtree(tmp_path / "b")


# --- damage: the rows of the table in docs/FORMATS.md ---


def _flip(d: Damaged, name: str, at: int = 0) -> None:
    d.data[d.at(name) + at] ^= 1


def _swap_names(d: Damaged) -> None:
    d.header["layers.0.checks"], d.header["layers.1.checks"] = d.header["layers.1.checks"], d.header["layers.0.checks"]


def _plan_of_two_dimensions(d: Damaged) -> None:
    d.header["pi2.plan"]["shape"] = [1, *d.header["pi2.plan"]["shape"]]


def _superblock_last(d: Damaged) -> None:
    """Everything else one superblock further to the front."""
    for name, entry in d.header.items():
        if name not in ("__metadata__", "pi2.superblock"):
            entry["data_offsets"] = [n - 4096 for n in entry["data_offsets"]]
    d.header["pi2.superblock"]["data_offsets"] = [len(d.data) - 4096, len(d.data)]
    d.data = d.data[4096:] + d.data[:4096]


ON_OPENING: dict[str, tuple[Callable[[Damaged], Any], str]] = {
    "no layers": (lambda d: d.meta.pop("layers"), r"f, layers: expected JSON, found damage"),
    "layers not JSON": (lambda d: d.meta.update(layers="["), "f, layers: expected JSON, found damage"),
    "layers of another kind": (lambda d: d.meta.update(layers="{}"), r"layers: expected a list, found \{\}"),
    "checks of another kind": (lambda d: d.meta.update(checks="3"), "tensors are not those of checks"),
    "layers that are numbers": (lambda d: d.meta.update(layers="[0, 1]"), "layers, 0: expected text, found 0"),
    "a layer twice": (lambda d: d.meta.update(layers='["layers.0"]' * 2), "f, layers: expected JSON, found damage"),
    "another layer": (lambda d: d.meta.update(layers='["layers.0", "x"]'), "layers: expected the keys of sites"),
    "deep layers": (
        lambda d: d.meta.update(layers="[" * 100_000),
        "found damage .lists or objects more than 64",
    ),
    "an unknown tensor": (lambda d: d.rename("norm", "x"), r"not those of layers and checks, e\.g\. norm"),
    "padding by another name": (lambda d: d.rename("pi2.padding.0", "pi2.paddinx.0"), r"e\.g\. pi2\.paddinx\.0"),
    "no checksums of a layer": (lambda d: d.rename("layers.1.checks", "pi2.padding.7"), r"e\.g\. layers\.1\.checks"),
    "no superblock": (lambda d: d.rename("pi2.superblock", "pi2.padding.7"), r"e\.g\. pi2\.superblock"),
    "superblock of another dtype": (lambda d: d.header["pi2.superblock"].update(dtype="I8"), "superblock is int8"),
    "superblock of two dimensions": (
        lambda d: d.header["pi2.superblock"].update(shape=[1, 4096]),
        r"uint8 \[1, 4096\]",
    ),
    "superblock not the first": (_superblock_last, r"pi2\.superblock is uint8 \[4096\] at byte"),
    "magic": (lambda d: d.number(0, 0x51), "magic b'Q"),
    "version": (lambda d: d.number(8, 6), "superblock version 6"),
    "checksum": (lambda d: _flip(d, "pi2.superblock", 4000), r"superblock checksum \w{8} where it says \w{8}"),
    "superblock's size": (lambda d: d.number(16, 8192, "<Q"), "2 layers in 8192 of 4096 bytes, pages of 4096"),
    "page": (lambda d: d.number(36, 512), "2 layers in 4096 of 4096 bytes, pages of 512"),
    "number of layers": (lambda d: d.number(32, 3), "2 layers where the superblock has 3"),
    "no layer": (lambda d: d.number(32, 0), "0 layers in 4096 of 4096 bytes"),
    "too many layers": (lambda d: d.number(32, 4_000_000_000), "4000000000 layers in 4096 of"),
    "reserved bytes": (lambda d: d.number(100, 1), "values where version 1 has others"),
    "reserved bytes of an entry": (lambda d: d.number(128 + 48, 1), "values where version 1 has others"),
    "clusters": (lambda d: (d.number(8, 2), d.number(128 + 48, 3)), "clusters of 3 neurons in layer 0"),
    "size of the file": (lambda d: d.number(24, 77, "<Q"), r"\d+ bytes where the superblock says 77"),
    "hash": (lambda d: d.meta.update(model_hash="ef" * 32), "model_hash efefefefefef where the superblock has 0123456"),
    "hash that is none": (lambda d: d.meta.update(model_hash="x" * 64), "ValueError: non-hexadecimal"),
    "kind": (lambda d: d.meta.update(weights="int8"), r"weights, row_bytes of layers\.0"),
    "slots": (lambda d: d.number(128, 12288, "<Q"), r"\(ValueError: slots of layers\.0: LayerEntry\(slots=12288"),
    "checks": (lambda d: d.number(256 + 8, 12288, "<Q"), r"\(ValueError: checks of layers\.1"),
    "neurons": (lambda d: d.number(128 + 16, 49), r"\(ValueError: bundles, length of checks of layers\.0"),
    "no neurons": (lambda d: d.number(128 + 16, 0), "neurons, n_hot, bundles, length of checks of layers.0"),
    "hidden": (lambda d: d.number(128 + 20, 65), r"\(ValueError: row_bytes of layers\.0"),
    "rows": (lambda d: d.number(128 + 24, 4), r"\(ValueError: rows of layers\.0"),
    "weights": (lambda d: d.number(128 + 28, 3), r"\(ValueError: weights of layers\.0"),
    "slot_bytes": (lambda d: d.number(128 + 32, 100), r"\(ValueError: slot_bytes, bundles of layers\.0"),
    "hot neurons": (lambda d: d.number(128 + 40, 51), r"\(ValueError: n_hot of layers\.0"),
    "names exchanged": (_swap_names, r"\(ValueError: checks, length of checks of layers\.0"),
    "no plan": (lambda d: rename_checked(d, "pi2.plan", "plan"), r"pi2\.plan\.layers\.\d\.order without pi2\.plan"),
    "a part that is none": (lambda d: rename_checked(d, "norm", "pi2.norm"), r"a tensor pi2\.norm"),
    "plan of two dimensions": (_plan_of_two_dimensions, r"pi2\.plan is uint8 \[1, \d+\]"),
    "provenance": (lambda d: d.meta.update(provenance="{}"), r"metadata has checksum \w{8}, not \w{8}"),
    "another text more": (lambda d: d.meta.update(more="x"), r"metadata has checksum"),
    "no checksum of metadata": (lambda d: d.meta.pop("metadata_check"), r"metadata has checksum \w{8}, not None"),
    "bundles of another shape": (
        lambda d: d.header["layers.0.bundles"].update(shape=[25, 1024]),
        r"\(ValueError: bundles of layers\.0",
    ),
}


def test_data_must_begin_on_a_page(toys: Path, tmp_path: Path) -> None:
    Damaged(store_of(toys / "out")).write(tmp_path / "f", pad=1)
    with pytest.raises(ArtifactError, match=r"data begins at byte \d+"):
        StoreReader(tmp_path / "f")


@pytest.mark.parametrize("kind", ON_OPENING)
def test_damage_that_is_seen_on_opening(toys: Path, tmp_path: Path, kind: str) -> None:
    change, message = ON_OPENING[kind]
    damaged = Damaged(store_of(toys / "out"))
    change(damaged)
    damaged.write(tmp_path / "f", sealed="metadata has" not in message)
    with pytest.raises(ArtifactError, match=message) as error:
        StoreReader(tmp_path / "f")
    assert str(error.value).startswith(str(tmp_path / "f"))


def test_taken_apart_and_put_together_it_is_whole(toys: Path, tmp_path: Path) -> None:
    """What the tests above damage is whole before."""
    damaged = Damaged(store_of(toys / "out"))
    damaged.seal()
    damaged.write(tmp_path / "f")
    with StoreReader(tmp_path / "f") as store:
        assert store.verify() > 0


@pytest.mark.parametrize("change", [{"pi2_version": "6"}, {"pi2_format": "torch_pi2.weights"}])
def test_other_files_are_no_stores(toys: Path, tmp_path: Path, change: dict[str, str]) -> None:
    damaged = Damaged(store_of(toys / "out"))
    damaged.meta.update(change)
    damaged.write(tmp_path / "f")
    with pytest.raises(ArtifactError, match=r"expected torch_pi2\.store version 2 or 3 or 4 or 5, found torch_pi2\."):
        StoreReader(tmp_path / "f")


def test_truncated_or_foreign(toys: Path, tmp_path: Path) -> None:
    whole = store_of(toys / "out").read_bytes()
    for length in (0, 7, 4000, 4096, 8192, 20000, len(whole) - 1):
        (tmp_path / "f").write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="found damage"):
            StoreReader(tmp_path / "f")
    with pytest.raises(
        ArtifactError, match=r"expected torch_pi2\.store version 2 or 3 or 4 or 5, found torch_pi2\.weights v"
    ):
        StoreReader(toys / "in" / "pi2" / "weights.safetensors")


IN_DATA: dict[str, tuple[Callable[[Damaged], Any], str]] = {
    "bundle": (
        lambda d: _flip(d, "layers.0.bundles", 512 * 7 + 3),
        r"neuron 7 of layers\.0 has checksum \w{8}, not \w",
    ),
    "last bundle": (lambda d: _flip(d, "layers.1.bundles", 512 * 8 + 71), r"neuron 8 of layers\.1 has checksum"),
    "checks": (lambda d: _flip(d, "layers.0.checks", 4 * 49), r"neuron 49 of layers\.0 has checksum"),
    "rows": (lambda d: _flip(d, "lm_head.weight", 2519), r"lm_head\.weight has checksum \w{8}, not \w{8}"),
    "float": (lambda d: _flip(d, "norm", 5), r"norm has checksum"),
    "scalar": (lambda d: _flip(d, "number"), r"number has checksum"),
    "bias": (lambda d: _flip(d, "layers.0.bias_up"), r"layers\.0\.bias_up has checksum"),
    "dtype": (lambda d: d.header["embed"].update(dtype="F16"), r"embed has checksum"),
    "shape": (lambda d: d.header["embed"].update(shape=[40, 70]), r"embed has checksum"),
    "its checksum": (
        lambda d: d.meta.update(checks=d.meta["checks"].replace('"norm": "', '"norm": "0')),
        r"norm has checksum \w{8}, not 0\w{8}",
    ),
}


@pytest.mark.parametrize("kind", IN_DATA)
def test_damage_that_is_seen_when_read(toys: Path, tmp_path: Path, kind: str) -> None:
    change, message = IN_DATA[kind]
    damaged = Damaged(store_of(toys / "out"))
    change(damaged)
    damaged.write(tmp_path / "f")
    with StoreReader(tmp_path / "f") as store:
        with pytest.raises(ArtifactError, match=message):
            store.verify()
        name = message.partition(r" has")[0].replace("\\", "").split(" of ")[-1]
        with pytest.raises(ArtifactError, match=message):
            store.read_layer(store.keys.index(name)) if name in store.keys else store.read(name)


def test_many_damaged_neurons_are_counted(toys: Path, tmp_path: Path) -> None:
    damaged = Damaged(store_of(toys / "out"))
    for neuron in (3, 4, 9):
        _flip(damaged, "layers.0.bundles", 512 * neuron)
    damaged.write(tmp_path / "f")
    with StoreReader(tmp_path / "f") as store:
        assert store.read_layer(0, (5, 9)).shape == (4, 3, 36)
        with pytest.raises(ArtifactError, match=r"neuron 3 of layers\.0 has .*, and 2 others"):
            store.read_layer(0)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose first layer has 180 gates of 36 bytes apart: on two pages."""
    root = tmp_path_factory.mktemp("apart")
    plan = Plan.load(toy(root / "in", (180, 9)) / "pi2")
    plan.layers[0].expected_active = 0.1
    plan.save(root / "in" / "pi2")
    torch_pi2.pack(root / "in", root / "out")
    return root


def test_gates_apart_are_the_same_neurons(apart: Path, tmp_path: Path) -> None:
    pack(apart / "out", tmp_path / "again")
    torch_pi2.pack(apart / "out", tmp_path / "slots", cluster=2)
    again, out = (store_of(folder).read_bytes() for folder in (tmp_path / "again", apart / "out"))
    assert again[-len(out) + 8192 :] == out[8192:]  # without the header, which names what it was made from
    with StoreReader(store_of(apart / "out")) as store, StoreReader(store_of(tmp_path / "slots")) as slots:
        assert store.metadata["pi2_version"] == "5"
        assert (store.entries[0].neuron_bytes, slots.entries[0].neuron_bytes) == (72, 108)
        assert [bool(entry.gates) for entry in store.entries] == [True, False]
        for rows in (None, (0, 7), (113, 115), (100, 180)):
            assert torch.equal(store.read_layer(0, rows), slots.read_layer(0, rows))
        assert torch.equal(store.first_rows(0), slots.first_rows(0))
        assert store.verify() > 0
        assert sum(store.regions().values()) == store_of(apart / "out").stat().st_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: _flip(d, "layers.0.gates", 4099), r"gates of layers\.0 at byte 4096 have another checksum"),
        (lambda d: _flip(d, "layers.0.gates"), r"gates of layers\.0 at byte 0 have another checksum"),
        (lambda d: _flip(d, "layers.0.checks", 4 * 181), r"gates of layers\.0 at byte 4096 have another checksum"),
        (lambda d: _flip(d, "layers.0.checks", 4 * 9), r"neuron 9 of layers\.0 has checksum"),
    ],
)
def test_damaged_gates_are_seen_when_read(
    apart: Path, tmp_path: Path, change: Callable[[Damaged], Any], message: str
) -> None:
    damaged = Damaged(store_of(apart / "out"))
    change(damaged)
    damaged.write(tmp_path / "f")
    with StoreReader(tmp_path / "f") as store:
        for read in (store.verify, lambda: store.read_layer(0)):
            with pytest.raises(ArtifactError, match=message):
                read()
        if "gates" in message:
            with pytest.raises(ArtifactError, match=message):
                store.first_rows(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.number(128 + 64, 8192, "<Q"), r"\(ValueError: gates of layers\.0"),
        (lambda d: d.number(128 + 64, 0, "<Q"), "values where version 5 has others"),
        (lambda d: d.number(8, 4), "values where version 4 has others"),
        (lambda d: d.rename("layers.0.gates", "pi2.padding.9"), r"gates of layers\.0"),
        (lambda d: d.rename("layers.0.gates", "layers.1.gates"), r"gates of layers\.0"),
        (lambda d: d.header["layers.0.gates"].update(shape=[90, 72]), r"gates of layers\.0"),
        (lambda d: d.number(128 + 32, 64), r"slot_bytes, bundles of layers\.0"),
    ],
)
def test_damaged_places_of_gates_are_seen_on_opening(
    apart: Path, tmp_path: Path, change: Callable[[Damaged], Any], message: str
) -> None:
    damaged = Damaged(store_of(apart / "out"))
    change(damaged)
    damaged.write(tmp_path / "f", sealed=True)
    with pytest.raises(ArtifactError, match=message):
        StoreReader(tmp_path / "f")


def test_padding_is_nobodys(toys: Path, tmp_path: Path) -> None:
    damaged = Damaged(store_of(toys / "out"))
    _flip(damaged, "layers.0.bundles", 108)
    _flip(damaged, "pi2.padding.0")
    damaged.write(tmp_path / "f")
    with StoreReader(tmp_path / "f") as store:
        store.verify()


def test_a_file_that_shrinks_or_is_replaced_while_open(toys: Path, tmp_path: Path) -> None:
    path = tmp_path / "f"
    shutil.copy(store_of(toys / "out"), path)
    with StoreReader(path) as store:
        wanted = store.read_layer(0)
        (tmp_path / "g").write_bytes(b"something else")
        os.replace(tmp_path / "g", path)
        assert torch.equal(store.read_layer(0), wanted)
    shutil.copy(store_of(toys / "out"), path)
    with StoreReader(path) as store:
        os.truncate(path, 9000)
        with pytest.raises(ArtifactError, match=r"the file ends at byte 9000, within layers\.0\.bundles"):
            store.verify()


def test_a_layer_that_is_not_there(toys: Path) -> None:
    plan = Plan.load(toys / "in" / "pi2")
    site = plan.layers[0].site
    with StoreReader(store_of(toys / "out")) as store:
        other = FFNSite(**{**site.__dict__, "key": "layers.7"})
        with pytest.raises(ArtifactError, match=r"expected a layer layers\.7, found 2 others"):
            store.read_neurons(other)
        other = FFNSite(**{**site.__dict__, "hidden": 64})
        message = r"expected 50 neurons of 3 rows of 64 in layers\.0, found 50, 3 and 40"
        with pytest.raises(ArtifactError, match=message):
            store.read_neurons(other)


def test_a_checksum_covers_name_dtype_and_shape() -> None:
    spec = Spec((2, 3), torch.float32)
    checks = {
        tensor_check(name, s, [torch.tensor([7])])
        for name, s in (
            ("a", spec),
            ("b", spec),
            ("a", Spec((3, 2), torch.float32)),
            ("a", Spec((2, 3), torch.int32)),
        )
    }
    assert len(checks) == 4


# --- the command line ---


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = toy(tmp_path / "in"), tmp_path / "out"
    assert main(["pack", str(source), str(out)]) == 0
    text = capsys.readouterr().out
    assert "59 neurons of 2 layers" in text
    assert "slot padding" in text
    assert main(["pack", str(source), str(out), "--cluster", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file_bytes"] == store_of(out).stat().st_size == sum(found["regions"].values())
    assert main(["inspect", str(out), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["store"]["verified_bytes"] > 59 * 72
    assert [layer["slot_bytes"] for layer in found["layers"]] == [512, 512]
    assert found["layers"][0]["padding_share"] == pytest.approx(1 - 108 / 512)
    assert main(["inspect", str(out), "--verify"]) == 0
    assert "are as they were packed" in capsys.readouterr().out
    assert main(["inspect", str(source), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified_bytes"] > 59 * 72
    damaged = Damaged(store_of(out))
    _flip(damaged, "layers.0.bundles")
    damaged.write(store_of(out))
    assert main(["inspect", str(out), "--verify"]) == 2
    assert "neuron 0 of layers.0 has checksum" in capsys.readouterr().err
