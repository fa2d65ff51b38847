"""Neuron stores of float models: nothing is quantised, and the bits are those of the model in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offloading import logits, smallest
from operators import opcheck
from safetensors.torch import load_file, save_file
from tiny_experts import build
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.checkpoint import weights_writer
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.checkpoint.stored import Stored
from torch_pi2.errors import ConfigError, NonFiniteError, StaleArtifactError
from torch_pi2.formats import FORMATS
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import OffloadedFFN, Store
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load as load_library
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import StoreReader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def store_of(folder: Path) -> Path:
    return folder / "pi2" / "model.pi2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of every float dtype a small synthetic model with predictors (``plain``), and the ``store`` packed from it."""
    made = {}
    for weights in DTYPES:
        made[weights] = tmp_path_factory.mktemp(weights)
        torch_pi2.synthetic(made[weights] / "plain", "tiny", active=0.2, layers=2, rank=32, weights=weights)
        torch_pi2.pack(made[weights] / "plain", made[weights] / "store")
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA with biases in float32, optimised and saved."""
    folder = tmp_path_factory.mktemp("saved") / "folder"
    return torch_pi2.save(torch_pi2.optimize(tiny("llama-bias")), folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA's modules are seen to compute the layer without being traced, which takes longer than all the rest."""
    monkeypatch.setattr(Stored, "_try", lambda _self, _group, _lazy: "owner")


@pytest.mark.parametrize("weights", DTYPES)
def test_the_bits_depend_on_neither_budget_nor_threads(folders: dict[str, Path], weights: str) -> None:
    model, store = torch_pi2.load(folders[weights] / "plain"), folders[weights] / "store"
    assert {p.dtype for p in model.parameters() if p.numel()} == {DTYPES[weights]}
    threads = torch.get_num_threads()
    wanted = logits(model)
    assert wanted.isfinite().all()
    for extra in (0, 200_000, 1 << 30):
        stored = torch_pi2.load(store, budget=smallest(store) + extra)
        layers = [m for m in stored.modules() if isinstance(m, OffloadedFFN)]
        assert [(layer.weights, layer.dtype) for layer in layers] == [("float", DTYPES[weights])] * 2
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert torch.equal(logits(stored), wanted)
        finally:
            torch.set_num_threads(threads)
        assert torch_pi2.stats(stored)["wanted"] > 0


def parameters_equal(one: nn.Module, other: nn.Module) -> bool:
    found, wanted = one.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys()
    return all(torch.equal(found[name], wanted[name]) for name in found)


def experts_model() -> nn.Module:
    return build("Mixtral")


MODELS = {
    "llama-relu": ("float32", lambda: tiny("llama-relu")),
    "llama-bias": ("bfloat16", lambda: tiny("llama-bias")),
    "opt": ("float16", lambda: tiny("opt")),
    "mixtral": ("bfloat16", experts_model),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_optimised_float_model_comes_back_from_its_store(tmp_path: Path, name: str) -> None:
    """Optimised, saved, packed: over a budget, in memory and as a dense model what it was; saved again the same."""
    dtype, make = MODELS[name]
    dense = make().to(DTYPES[dtype]).eval()
    dense.config.dtype = DTYPES[dtype]
    torch_pi2.save(torch_pi2.optimize(make().to(DTYPES[dtype])), tmp_path / "saved")
    report = torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    assert sorted(os.listdir(tmp_path)) == ["saved", "store"]
    wanted = logits(torch_pi2.load(tmp_path / "saved"))
    stored = torch_pi2.load(tmp_path / "store", budget="1GiB", context=16)
    assert torch.equal(logits(stored), wanted)
    assert any(isinstance(m, OffloadedExperts if name == "mixtral" else OffloadedFFN) for m in stored.modules())
    in_memory = torch_pi2.load(tmp_path / "store")
    assert torch.equal(logits(in_memory), wanted)
    assert parameters_equal(in_memory, dense)
    assert parameters_equal(load_dense(tmp_path / "store"), dense)
    torch_pi2.save(in_memory, tmp_path / "again")
    torch_pi2.pack(tmp_path / "again", tmp_path / "store-again")
    one, other = (load_file(str(store_of(tmp_path / folder))) for folder in ("store", "store-again"))
    kept = [n for n in one if not n.startswith("pi2.")]
    assert all(torch.equal(one[n].view(-1).view(torch.uint8), other[n].view(-1).view(torch.uint8)) for n in kept)
    assert parameters_equal(torch_pi2.restore(in_memory), dense)
    with StoreReader(store_of(tmp_path / "store")) as reader:
        assert reader.kind == dtype
        assert {entry.weights for entry in reader.entries} == {FORMATS[dtype].code}
        assert all(e.neuron_bytes == e.rows * e.hidden * DTYPES[dtype].itemsize for e in reader.entries)
        assert reader.verify() > sum(entry.neurons * entry.neuron_bytes for entry in reader.entries)
    assert report.regions["linears"] == 0


def test_a_checkpoint_without_a_plan_is_packed_with_the_exact_gate(tmp_path: Path) -> None:
    tiny("llama-relu").save_pretrained(tmp_path / "float")
    torch_pi2.pack(tmp_path / "float", tmp_path / "store")
    with Parts(tmp_path / "store" / "pi2") as parts:
        plan = parts.plan()
    assert [layer.method for layer in plan.layers] == ["exact", "exact"]
    optimised = torch_pi2.optimize(tiny("llama-relu"))
    assert plan.model_hash == optimised.torch_pi2.plan.model_hash
    wanted = logits(optimised)
    for cluster in (None, 1, 4):
        torch_pi2.pack(tmp_path / "store", tmp_path / f"{cluster}", cluster=cluster)  # a store, packed once more
        assert torch.equal(logits(torch_pi2.load(tmp_path / f"{cluster}", budget="1GiB")), wanted)


def test_neurons_can_be_rounded_to_another_dtype(tmp_path: Path, saved: Path, quick: None) -> None:
    model = tiny("llama-bias")
    torch_pi2.pack(saved, tmp_path / "store", weights="bfloat16")
    found = load_dense(tmp_path / "store")
    for name, value in model.state_dict().items():
        rounded = value.bfloat16().float() if ".mlp." in name else value
        assert torch.equal(found.state_dict()[name], rounded), name
    in_memory = torch_pi2.load(tmp_path / "store")
    assert sparse_layers(in_memory)[0].dtype == torch.bfloat16
    stored = torch_pi2.load(tmp_path / "store", budget=smallest(tmp_path / "store"))
    assert torch.equal(logits(stored), logits(in_memory))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = -1e6
    model.save_pretrained(tmp_path / "float")
    with pytest.raises(NonFiniteError, match=r"layers.1.mlp.down_proj.weight: expected .* at most 65504, .*1e\+06"):
        torch_pi2.pack(tmp_path / "float", tmp_path / "store", weights="float16")
    assert sorted(os.listdir(tmp_path)) == ["float", "store"]


@pytest.mark.parametrize(
    ("name", "value", "weights", "message"),
    [
        ("down_proj.weight", float("nan"), "float", r"largest in float32, found nan\. The checkpoint is damaged"),
        ("up_proj.weight", float("-inf"), "bfloat16", r"largest in bfloat16, found inf\. The checkpoint is damaged"),
        ("up_proj.bias", 65600.0, "float16", r"at most 65504, .* found 65600\. Pack it with weights='bfloat16'"),
        ("down_proj.bias", float("nan"), "int8", r"largest in float32, found nan\. The checkpoint is damaged"),
    ],
)
def test_values_that_no_store_holds(
    tmp_path: Path, quick: None, name: str, value: float, weights: str, message: str
) -> None:
    model = tiny("llama-bias")
    with torch.no_grad():
        model.model.layers[1].mlp.get_parameter(name).flatten()[3] = value
    model.save_pretrained(tmp_path / "float")
    with pytest.raises(NonFiniteError, match=rf"layers\.1\.mlp\.{name}: expected .*{message}"):
        torch_pi2.pack(tmp_path / "float", tmp_path / "store", weights=weights)
    assert os.listdir(tmp_path) == ["float"]


def test_conversions_leave_the_neurons(tmp_path: Path, saved: Path, quick: None) -> None:
    torch_pi2.pack(saved, tmp_path / "store")
    stored = torch_pi2.load(tmp_path / "store", budget="1GiB").to(torch.bfloat16)
    layer = sparse_layers(stored)[0]
    assert (layer.neuron_rows.dtype, layer.bias_up.dtype) == (torch.float32, torch.float32)
    assert logits(stored).dtype == torch.bfloat16
    rounded = {"dtype": torch.bfloat16}
    wanted = logits(torch_pi2.load(tmp_path / "store", **rounded))
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB", **rounded)), wanted)


def test_the_operator_follows_its_reference(folders: dict[str, Path]) -> None:
    load_library()
    for weights, dtype in DTYPES.items():
        store = Store(store_of(folders[weights] / "store"), 1 << 20)
        x = torch.randn(2, store.layers()[0][1], dtype=dtype)
        settings = (0, None, None, None, [], "none", 0.0, "", False, "relu", False, 0, 0.0)
        opcheck(torch.ops.pi2.stored_ffn.default, (x, store.number, *settings))
        with StoreReader(store.path) as reader:
            wanted = reference.stored_ffn(x, reader, *settings)
        tolerance = 1e-4 if weights == "float32" else 2e-2
        found = torch.ops.pi2.stored_ffn(x, store.number, *settings)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        with pytest.raises(RuntimeError, match="int8_activations: expected false with float weights, found true"):
            torch.ops.pi2.stored_ffn(x, store.number, *settings, True)


def test_what_cannot_be_done_says_so(folders: dict[str, Path], tmp_path: Path, saved: Path, quick: None) -> None:
    store = folders["bfloat16"] / "store"
    for more in ({}, {"budget": "1GiB"}):
        with pytest.raises(ConfigError, match=r"model\.pi2: expected float, as the weights are bfloat16, found 'int8'"):
            torch_pi2.load(store, activations="int8", **more)
    with pytest.raises(ConfigError, match=r"expected bfloat16, as the weights are, found 'int4'"):
        torch_pi2.pack(store, tmp_path / "out", weights="int4")
    shutil.copytree(saved, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"expected a folder with a neuron store .* which changes no number"):
        torch_pi2.load(tmp_path / "saved", budget="1GiB")
    tensors = load_file(str(tmp_path / "saved" / "model.safetensors"))
    save_file({n: t * 2 for n, t in tensors.items()}, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(StaleArtifactError, match="The weights were changed or converted since"):
        torch_pi2.pack(tmp_path / "saved", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["saved"]


_MEMORY = """
import re, sys, torch, torch_pi2
from torch_pi2.checkpoint import weights_writer
def read(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
torch_pi2.pack(sys.argv[1], sys.argv[3])  # everything imported and compiled once
weights_writer._GROUP, weights_writer._CHUNK = 16 << 20, 1 << 20
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
report = torch_pi2.pack(sys.argv[2], sys.argv[4])
print(read("VmHWM") - before, report.file_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_is_bounded_by_a_layer(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 1024}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, hidden_act="relu", dtype="bfloat16", **sizes))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "big", max_shard_size="100MB")
    del model
    tiny("llama").save_pretrained(tmp_path / "small")
    layer = 2 * 3 * 1024 * 4096
    folders = [str(tmp_path / name) for name in ("small", "big", "a", "b")]
    # what is held is measured, not what malloc keeps of freed blocks below 32 MB (those of real models are larger)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run([sys.executable, "-c", _MEMORY, *folders], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    memory, size = map(int, done.stdout.split())
    assert size > 5 * layer
    assert memory < 3 * layer  # one in the checkpoint's form, to see what its module computes; then pieces


@pytest.mark.parametrize("name", ["phi3", "mixtral"])  # rows of one matrix, stacked matrices
def test_groups_and_chunks_do_not_show(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (experts_model() if name == "mixtral" else tiny(name)).save_pretrained(tmp_path / "float")
    torch_pi2.pack(tmp_path / "float", tmp_path / "whole")
    monkeypatch.setattr(weights_writer, "_GROUP", 3000)
    monkeypatch.setattr(weights_writer, "_CHUNK", 700)
    torch_pi2.pack(tmp_path / "float", tmp_path / "pieces")
    assert store_of(tmp_path / "pieces").read_bytes() == store_of(tmp_path / "whole").read_bytes()


def test_the_dtype_is_that_of_the_loaded_model(tmp_path: Path, quick: None) -> None:
    """A checkpoint whose configuration says another dtype than its tensors have, as transformers reads it."""
    tiny("llama-relu").save_pretrained(tmp_path / "float")
    config = tmp_path / "float" / "config.json"
    about = json.loads(config.read_text())
    for said, kind in (("bfloat16", "bfloat16"), (None, "float32")):
        config.write_text(json.dumps(about | {"dtype": said}))
        torch_pi2.pack(tmp_path / "float", tmp_path / "store")
        with StoreReader(store_of(tmp_path / "store")) as reader:
            assert reader.kind == kind
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="auto", local_files_only=True)
        assert parameters_equal(load_dense(tmp_path / "store"), loaded)
        wanted = logits(torch_pi2.load(tmp_path / "store"))
        assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB")), wanted)
