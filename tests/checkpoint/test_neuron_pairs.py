"""Neurons of two formats: gate and up rows as a GGUF file has them, down in int8; in memory, in files and in stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import ggufs
import pytest
import torch

import torch_pi2
from torch_pi2.base.tensorfile import Spec, TensorReader, TensorWriter
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import ArtifactError, ConfigError, DeviceError, Pi2Error, UnsupportedModelError
from torch_pi2.formats import GGML, PAIRS, formats_of, neuron_shape, row_bytes
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.ops.operators import REFERENCES
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.superblock import LayerEntry, Superblock
from torch_pi2.store.weights import QuantizedWeights

reference = SimpleNamespace(**REFERENCES)

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])
#: Written with the file's types, and imported: (folder, file, the file's numbers).
Typed = Callable[..., tuple[Path, Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model's float32 file."""
    root = tmp_path_factory.mktemp("floats")

    def make(name: str) -> Path:
        file = root / f"{name}.gguf"
        if not file.exists():
            ggufs.tiny(name).save_pretrained(root / name)
            ggufs.tokenizer(root / name)
            ggufs.written(root / name, file)
        return file

    return make


@pytest.fixture
def typed(floats: Callable[[str], Path], tmp_path: Path) -> Typed:
    """That file in another type, and where it is to be imported."""

    def make(name: str, kind: str, others: dict[str, str] | None = None) -> tuple[Path, Path, dict[str, Any]]:
        values = ggufs.retyped(floats(name), tmp_path / "typed.gguf", kind, others=others)
        return tmp_path / "out", tmp_path / "typed.gguf", values

    return make


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits.float()


def loaded(folder: Path, **how: Any) -> Any:
    return torch_pi2.load(folder, dtype=torch.float32, **how)


def tokens_of(model: Any) -> list[int]:
    found: list[int] = model.generate(TOKENS, max_new_tokens=12, do_sample=False)[0].tolist()
    return found


def rows_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of a file as ours: the scales of Q4_0 go to their end."""
    if kind != "int4":
        return blocks
    blocks = blocks.unflatten(1, (-1, 18))
    return torch.cat((blocks[..., 2:].flatten(1), blocks[..., :2].flatten(1)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", *GGML])
def test_gate_and_up_are_the_files_bytes(typed: Typed, kind: str) -> None:
    """The bytes of the file, its numbers in float32, and a model near the one of these numbers."""
    theirs = "Q4_0" if kind == "int4" else kind.upper()
    folder, file, values = typed("llama", theirs)
    report = torch_pi2.import_gguf(file, folder, neurons="all")
    downs = {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    assert report.rounded == dict.fromkeys(downs, f"{theirs} to int8")
    assert (report.weights, report.neurons) == (f"{kind}+int8", 2)
    assert all(0 < report.errors[f"model.layers.{i}.mlp"] < 0.01 for i in range(2))
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(file).tensors}
    model = loaded(folder, activations="float")
    for i, layer in enumerate(sparse_layers(model)):
        assert layer.weights == f"{kind}+int8"
        for row, role in enumerate(("gate", "up")):
            found, of = row_of_neurons(layer.neuron_rows, row, layer.weights, 256)
            assert of == kind
            assert torch.equal(found, rows_of(stored[f"blk.{i}.ffn_{role}.weight"].view(torch.uint8), kind))
    state = model.state_dict()
    for role in ("gate", "up", "down"):
        wanted = torch.from_numpy(values[f"blk.1.ffn_{role}.weight"])
        value = state[f"model.layers.1.mlp.{role}_proj.weight"]
        assert torch.equal(value, wanted) if role != "down" else float((value - wanted).norm() / wanted.norm()) < 0.01
    dense = load_dense(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-4 * float(logits(dense).abs().max()))
    exact = logits(loaded(torch_pi2_none(file), activations="float"))
    assert float((logits(model) - exact).norm() / exact.norm()) < 0.02
    rounded = logits(loaded(folder))
    assert 0 < float((rounded - logits(model)).norm() / rounded.norm()) < 0.05


def torch_pi2_none(file: Path) -> Path:
    """The same file with plain linear layers, of which nothing is rounded."""
    torch_pi2.import_gguf(file, file.parent / "linears")
    return file.parent / "linears"


def test_a_file_of_llama_cpp(tmp_path: Path) -> None:
    """Its down is Q6_K, its gate and up are Q4_K: they are kept, and the tokens are its own."""
    report = torch_pi2.import_gguf(GOLDEN, tmp_path / "out", neurons="all")
    assert report.weights == "q4_k+int8"
    assert all(name.endswith("down_proj.weight") for name in report.rounded)
    said = json.loads((GOLDEN.parent / "tiny-llama.json").read_text())
    with torch.no_grad():
        found = loaded(tmp_path / "out")(torch.tensor([said["tokens"]])).logits[0]
    theirs = torch.tensor(said["logits"])
    assert float((found - theirs).norm() / theirs.norm()) < 0.04
    assert torch.equal(found.argmax(-1), theirs.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "activations"),
    [
        ("qwen2", "Q4_K", "int8"),
        ("phi3", "Q5_K", "float"),
        ("gemma2", "Q5_0", "int8"),
        ("mixtral", "Q4_K", "float"),
        ("qwen3_moe", "Q6_K", "int8"),
        ("llama", "Q4_0", "int8"),
        ("qwen2_moe", "Q4_0", "float"),
    ],
)
def test_over_flash_the_same_bits(typed: Typed, tmp_path: Path, name: str, kind: str, activations: str) -> None:
    """Under any budget what the model in memory gives, bit for bit; the budget is obeyed."""
    folder, file, _ = typed(name, kind)
    report = torch_pi2.import_gguf(file, folder, neurons="all")
    assert report.weights == f"{'int4' if kind == 'Q4_0' else kind.lower()}+int8"
    torch_pi2.pack(folder, tmp_path / "packed")
    model = loaded(folder, activations=activations)
    wanted, tokens, prompt = logits(model), tokens_of(model), TOKENS.repeat(1, 4)
    whole = loaded(tmp_path / "packed", activations=activations)
    assert torch.equal(logits(whole), wanted)
    parts = torch_pi2.stats(loaded(tmp_path / "packed", activations=activations, budget="1GB", context=64))["budget"]
    first, down = formats_of(report.weights)
    assert parts.slot >= 2 * row_bytes(first, 256) + row_bytes(down, 256)
    for neurons in (1, parts.neurons // parts.slot // 3):
        total = parts.smallest + neurons * (parts.slot + 64)
        stored = loaded(tmp_path / "packed", activations=activations, budget=total, context=64)
        with sparse_only():  # a prompt long enough for tiles, where there are such
            assert torch.equal(logits(stored, prompt), logits(model, prompt))
        assert torch.equal(logits(stored), wanted)
        assert tokens_of(stored) == tokens
        found = torch_pi2.stats(stored)
        assert found["cache_bytes"] <= total - parts.smallest
        assert found["bytes_read"] > 0


def test_layers_of_several_formats(typed: Typed, tmp_path: Path) -> None:
    """A layer whose gate and up differ is int8 throughout, beside others that keep theirs; saved, packed, and dense."""
    folder, file, values = typed("llama", "Q4_K", {"blk.0.ffn_up": "Q6_K"})
    report = torch_pi2.import_gguf(file, folder, neurons="all")
    assert report.weights == "int8, q4_k+int8"
    assert {name.split(".mlp.")[0] for name in report.rounded if "gate" in name} == {"model.layers.0"}
    model = loaded(folder)
    assert [layer.weights for layer in sparse_layers(model)] == ["int8", "q4_k+int8"]
    torch_pi2.save(model, tmp_path / "again")
    again = loaded(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    torch_pi2.pack(tmp_path / "again", tmp_path / "packed")
    stored = loaded(tmp_path / "packed", budget="40MB")
    assert torch.equal(logits(stored), logits(model))
    torch_pi2.pack(tmp_path / "packed", tmp_path / "once-more", cluster=4)
    assert torch.equal(logits(loaded(tmp_path / "once-more", budget="40MB")), logits(model))
    state = load_dense(tmp_path / "once-more", dtype=torch.float32).state_dict()
    assert torch.equal(state["model.layers.1.mlp.gate_proj.weight"], torch.from_numpy(values["blk.1.ffn_gate.weight"]))


def test_the_reference_over_a_store(typed: Typed, tmp_path: Path) -> None:
    """What the operators over a store give is what their readable references make of its slots."""
    folder, file, _ = typed("qwen3_moe", "Q4_1")
    torch_pi2.import_gguf(file, folder)
    torch_pi2.pack(folder, tmp_path / "packed")
    model = loaded(tmp_path / "packed", budget="1GB")
    store = torch_pi2.stats(model)["store"]
    x, generator = torch.randn(3, 256), torch.Generator().manual_seed(3)
    index, routing = torch.randint(0, 4, (3, 2), generator=generator), torch.rand(3, 2, generator=generator)
    experts = (4, [], "none", [], "", False, "silu", False, [], True)
    layer = (None, None, None, [], "none", 0.0, "", False, "silu", False, 0, 0.0, True)
    found = torch.ops.pi2.stored_experts(x, index, routing, store.number, 4, *experts)
    one = torch.ops.pi2.stored_ffn(x, store.number, 5, *layer)
    with StoreReader(store.path) as reader:
        wanted = reference.stored_experts(x, index, routing, reader, 4, *experts)
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * (1 + float(wanted.abs().max())))
        wanted = reference.stored_ffn(x, reader, 5, *layer)
        torch.testing.assert_close(one, wanted, rtol=0, atol=3e-5 * (1 + float(wanted.abs().max())))


@pytest.mark.slow
def test_compiled_and_planned(tmp_path: Path) -> None:
    torch_pi2.import_gguf(GOLDEN, tmp_path / "out", neurons="all")
    model = loaded(tmp_path / "out")
    wanted = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="aot_eager")), wanted, rtol=1e-4, atol=1e-4)
    stats = torch_pi2.profile(load_dense(tmp_path / "out"), TOKENS.repeat(64 // TOKENS.shape[1] + 1, 1))
    stats.model_hash = model.torch_pi2.plan.model_hash
    plan = torch_pi2.plan_for(model, "sm8650-ufs4.0", stats=stats)
    assert plan.hardware is not None
    torch_pi2.follow(model, plan)
    assert torch.equal(logits(model), wanted)
    message = r"accelerator memory for model.layers.0.mlp: expected neurons of one format, found q4_k\+int8\. Leave"
    with pytest.raises(UnsupportedModelError, match=message):
        torch_pi2.plan_for(model, "sm8650-ufs4.0", stats=stats, accelerator_memory="1MB")


def test_refused_by_name(typed: Typed, tmp_path: Path) -> None:
    """What has no room or no kernels for a second format."""
    folder, file, _ = typed("llama", "Q4_1")
    torch_pi2.import_gguf(file, folder, neurons="all")
    model = loaded(folder)
    (first, _), pair = homes(model), "q4_1[+]int8"
    with pytest.raises(DeviceError, match=rf"model.layers.0.mlp, whose neurons are {pair}: expected it on the CPU"):
        first.check_gpu_has_kernels()
    with pytest.raises(ConfigError, match=rf"weights=...\): expected {pair}, as the weights are, found 'int8'"):
        torch_pi2.pack(folder, tmp_path / "packed", weights="int8")
    with pytest.raises(ConfigError, match=r"other weights for .*: expected a layer with float weights, found q4_1"):
        first.assign("model.layers.0.mlp.up_proj.weight", torch.zeros(512, 256))
    with pytest.raises(ConfigError, match=r"weights: expected int4 or int8, found 'q4_1\+int8'"):
        torch_pi2.layers.ffn.SparseFFN(first.site, None, None, kind="q4_1+int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"weights"):
        torch_pi2.Config(weights="q4_1+int8")


FIRST = "model.layers.0.mlp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("neurons", "about", "drop", "message"),
    [
        ("all", {"formats": {FIRST: "q4_k"}}, 0, "expected int4 or int8 or int4[+]int8.*found 'q4_k'"),
        ("all", {"formats": {FIRST: "q4_k+q4_k"}}, 0, "found 'q4_k[+]q4_k'"),
        ("all", {"formats": {FIRST: "int8"}}, 0, r"as uint8 \[256, 3, 272\], found uint8 \[256, 560\]"),
        ("all", {"formats": {FIRST: "q5_k+int8"}}, 0, r"as uint8 \[256, 624\], found uint8 \[256, 560\]"),
        ("all", {"formats": {"lm_head": "q4_k+int8"}}, 0, "found 'q4_k[+]int8'"),
        ("all", {}, 2, r"bundles as uint8 \[256, 560\], found uint8 \[256, 558\]"),
        ("all", {"pi2_version": 2}, 0, f"linear layers and embeddings alone, in version 2, found {FIRST}"),
        ("all", {"weights": "float32", "linears": {}, "blocks": []}, 0, "formats: expected none, in a file of float32"),
        ("auto", {"formats": {"model.embed_tokens": "q7_k"}}, 0, "q7_k"),
        ("auto", {"embeddings": {"model.norm": 256}}, 0, "model, model.norm of 256 numbers a token"),
        ("auto", {"embeddings": {"model.embed_tokens": 512}}, 0, "model.embed_tokens of 512 numbers a token"),
        ("auto", {"embeddings": []}, 0, "embeddings"),
        ("auto", {"pi2_version": 6}, 0, "version 1 or 2 or 3 or 4 or 5"),
        ("auto", {"pi2_version": 4, "blocks": {}}, 0, "blocks: expected a list"),
        ("auto", {"pi2_version": 4, "blocks": ["model.norm"]}, 0, "blocks, 0: expected .* found 'model.norm'"),
        ("auto", {"pi2_version": 3, "blocks": ["lm_head"]}, 0, "blocks: expected none, in version 3, found 1"),
    ],
)
def test_damaged_metadata(tmp_path: Path, neurons: str, about: dict[str, Any], drop: int, message: str) -> None:
    """``drop``: bytes of each neuron of the first layer less."""
    torch_pi2.import_gguf(GOLDEN, tmp_path / "out", neurons=neurons)
    path = tmp_path / "out" / "pi2" / "weights.safetensors"
    with TensorReader(path) as reader:
        tensors = {name: reader.read(name) for name in reader.specs}
        found = dict(reader.metadata)
    for name, value in about.items():
        value = json.loads(found[name]) | value if name in ("formats", "embeddings") and value else value
        found[name] = value if isinstance(value, str) else json.dumps(value)
    if drop:
        tensors[f"{FIRST}.bundles"] = tensors[f"{FIRST}.bundles"][:, drop:].contiguous()
    with TensorWriter(path, {name: Spec.of(tensor) for name, tensor in tensors.items()}, found) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
    with pytest.raises(ArtifactError, match=message):
        torch_pi2.load(tmp_path / "out")


def test_a_store_that_says_otherwise(tmp_path: Path) -> None:
    """Superblock, metadata and slots are compared; any bit of a neuron is noticed."""
    torch_pi2.import_gguf(GOLDEN, tmp_path / "out", neurons="all")
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    path = tmp_path / "packed" / "pi2" / "model.pi2"
    with StoreReader(path) as store:
        block = Superblock(store.file_bytes, bytes.fromhex(store.model_hash), store.entries)
        start = store.offset("pi2.superblock")
        assert store.neuron_formats == "q4_k+int8"
        assert {(entry.weights, entry.row_bytes, entry.down, entry.down_row_bytes) for entry in store.entries} == {
            (9, 144, 5, 272)
        }
        assert torch.equal(store.read_layer(0, (3, 9)), store.read_layer(0)[3:9])
        neuron = store.entries[0].slots + 300
        assert store.verify() > 0
    whole = path.read_bytes()

    def refused(data: bytes, message: str) -> None:
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=message):
            loaded(tmp_path / "packed", budget="40MB")(TOKENS)
        path.write_bytes(whole)

    def with_entry(**fields: int) -> bytes:
        made = replace(block, layers=(replace(block.layers[0], **fields), *block.layers[1:])).pack()
        return whole[:start] + made + whole[start + len(made) :]

    assert with_entry() == whole
    refused(with_entry(down=4), "down of model.layers.0.mlp")
    refused(with_entry(down=4, down_row_bytes=144), "down, down_row_bytes of model.layers.0.mlp")
    refused(with_entry(weights=10, row_bytes=176), "weights, row_bytes, slot_bytes of model.layers.0.mlp")
    refused(with_entry(down=0, down_row_bytes=0), "down, down_row_bytes of model.layers.0.mlp")
    flipped = whole[:neuron] + bytes([whole[neuron] ^ 4]) + whole[neuron + 1 :]
    refused(flipped, "layer 0, neuron 0 at 8192: its checksum does not match")
    for version in (1, 2, 4):
        bad = bytearray(block.pack())
        bad[8:12] = version.to_bytes(4, "little")
        with pytest.raises(ValueError, match=r"checksum|version"):
            Superblock.parse(bytes(bad))


def test_superblock_of_two_formats() -> None:
    """Version 3 only where it is needed; each value is at its place in the file (docs/STORE.md)."""
    one = LayerEntry(8192, 0, 4, 256, 3, 5, 1024, 272, 0, 0)
    two = replace(one, weights=9, row_bytes=144, down=5, down_row_bytes=272, cluster=2)
    data = Superblock(1 << 20, bytes(32), (one, two)).pack()
    assert data[8:12] == bytes.fromhex("03000000")
    assert data[128 + 48 : 128 + 60] == bytes.fromhex("01000000 00000000 00000000")
    assert data[256 + 48 : 256 + 60] == bytes.fromhex("02000000 05000000 10010000")
    assert Superblock.parse(data).layers == (one, two)
    assert (one.neuron_bytes, two.neuron_bytes) == (3 * 272, 2 * 144 + 272)
    assert Superblock(1 << 20, bytes(32), (one,)).pack()[8:12] == bytes.fromhex("01000000")


def test_sizes_of_pairs() -> None:
    assert (*(f"{first}+int8" for first in ("int4", *GGML)), "tq2_0+int4", "tq2_0+tq2_0") == PAIRS
    assert formats_of("q4_k+int8") == ("q4_k", "int8")
    assert formats_of("int4") == ("int4", "int4")
    assert neuron_shape("q5_0+int8", 2, 96) == (66 + 102,)
    assert neuron_shape("int4", 2, 96) == (2, 54)
    with pytest.raises(Pi2Error, match="columns of q4_k: expected a multiple of 256"):
        neuron_shape("q4_k+int8", 3, 96)


def test_a_weights_file_of_before_is_read(tmp_path: Path) -> None:
    """Without neurons of two formats files are what they were."""
    torch_pi2.import_gguf(GOLDEN, tmp_path / "out")
    torch_pi2.import_gguf(GOLDEN, tmp_path / "int8", neurons="int8")
    for folder in ("out", "int8"):
        with QuantizedWeights(tmp_path / folder / "pi2" / "weights.safetensors") as file:
            assert file.metadata["pi2_version"] == ("4" if file.in_blocks else "2")
