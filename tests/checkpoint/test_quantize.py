"""Float checkpoints to quantised folders and back: names, errors, memory, and the same numbers on every way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import by_hand
from safetensors.torch import load_file, save_file
from tiny_models import BUILDERS, randomise, tiny
from torch import nn

import torch_pi2
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import main
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    DtypeError,
    NonFiniteError,
    StaleArtifactError,
)
from torch_pi2.graph.find import find_sites
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load as load_library
from torch_pi2.predict.file import FittedPredictors, load_predictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.rewrite.linears import find_linears
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.types.method import PredictorCard
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite

Tensors = dict[str, torch.Tensor]
Meta = dict[str, str]
TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "drelu-stdlib-5m"
NAMES = ["llama-relu", "phi3", "opt", "gemma"]


def rounded(w: torch.Tensor, weights: str) -> torch.Tensor:
    load_library()
    rows = torch.ops.pi2.quantize(w, weights)
    return torch.ops.pi2.dequantize(rows, weights, w.shape[1], torch.float32)


@cache
def found_in(name: str) -> tuple[list[FFNSite], set[str]]:
    """FFNs of the tiny model, and names of its large linears: the same every time, and a second or two to find."""
    model = tiny(name)
    sites = find_sites(model)
    return sites, set(find_linears(model, sites)[0])


def rounded_model(name: str, weights: str) -> nn.Module:
    """The tiny model rounded as a quantised one: FFNs, the down projections column by column, and large linears."""
    model = tiny(name)
    sites, linears = found_in(name)
    downs = {site.down.weight for site in sites}
    inside = {ref.weight for site in sites for ref in (site.gate, site.up, site.down) if ref is not None}
    for module_name, module in model.named_modules():
        if module_name in linears or f"{module_name}.weight" in inside:
            w = module.weight.detach()
            down = f"{module_name}.weight" in downs
            value = rounded(w.T.contiguous(), weights).T if down else rounded(w, weights)
            module.weight = nn.Parameter(value)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 19)[None].view(2, 8)).logits.float()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), list(zip(NAMES, ("int4", "int8", "int4", "int8"))))
def test_quantised_folder_holds_the_rounded_model(tmp_path: Path, name: str, weights: str) -> None:
    tiny(name).save_pretrained(tmp_path / "float")
    report = torch_pi2.quantize(tmp_path / "float", tmp_path / "out", weights)
    wanted = logits(rounded_model(name, weights))
    assert distance(logits(load_dense(tmp_path / "out")), wanted) < 1e-5
    sparse = torch_pi2.load(tmp_path / "out")
    assert distance(logits(sparse), wanted) < 1e-4
    assert not [n for n, t in (*sparse.named_parameters(), *sparse.named_buffers()) if t.is_meta]
    assert isinstance(sparse.get_output_embeddings(), QuantLinear)
    low, high = (0.05, 0.12) if weights == "int4" else (0.002, 0.01)
    assert all(low < error < high for error in report.errors.values())
    sites, linears = found_in(name)
    assert report.errors.keys() == {site.key for site in sites} | linears


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}


class Scaled(nn.Linear):
    """A linear layer of another class, as adapters bring."""


def both_ways(model: nn.Module, folder: Path, weights: str = "int4") -> list[dict[str, torch.Tensor]]:
    """The weights files of ``model`` quantised on disk and in memory."""
    model.save_pretrained(folder / "float")
    torch_pi2.quantize(folder / "float", folder / "disk", weights)
    method = "exact" if getattr(model.config, "hidden_act", "relu") == "relu" else "dense"
    torch_pi2.save(
        torch_pi2.optimize(model, config=torch_pi2.Config(method=method, weights=weights)), folder / "memory"
    )
    kinds = []
    for name in ("disk", "memory"):
        with TensorReader(folder / name / "pi2" / "weights.safetensors") as reader:
            kinds.append({key: reader.metadata[key] for key in ("weights", "linears", "sites", "model_hash")})
    parsed = [kind | {key: json.loads(kind[key]) for key in ("linears", "sites")} for kind in kinds]
    assert parsed[0] == parsed[1]
    return [load_file(str(folder / name / "pi2" / "weights.safetensors")) for name in ("disk", "memory")]


def same_files(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.dtype]:
    """Asserts that both are the same to the byte; dtype by name."""
    disk, memory = found
    assert {k: (t.dtype, t.shape) for k, t in disk.items()} == {k: (t.dtype, t.shape) for k, t in memory.items()}
    assert all(
        torch.equal(disk[name].view(-1).view(torch.uint8), memory[name].view(-1).view(torch.uint8)) for name in disk
    )
    return {name: tensor.dtype for name, tensor in disk.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("Qwen2", torch.bfloat16), ("Phi3", torch.float32), ("OPT", torch.bfloat16)]
)
def test_on_disk_and_in_memory_the_same_is_quantised(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    import transformers

    more = (
        {"ffn_dim": 96, "word_embed_proj_dim": 64} if name == "OPT" else {"num_key_value_heads": 2, "pad_token_id": 0}
    )
    config = getattr(transformers, f"{name}Config")(**WIDE, **more, max_position_embeddings=64)
    torch.manual_seed(0)
    model = randomise(getattr(transformers, f"{name}ForCausalLM")(config).eval()).to(dtype)
    kinds = same_files(both_ways(model, tmp_path))
    first = "model.decoder.layers.0.self_attn" if name == "OPT" else "model.layers.0.self_attn"
    wanted = {"Qwen2": {"q_proj", "o_proj"}, "Phi3": {"qkv_proj", "o_proj"}}.get(
        name, {"q_proj", "k_proj", "v_proj", "out_proj"}
    )
    rows = {n for n, kind in kinds.items() if kind == torch.uint8}
    assert {n.split(".")[-2] for n in rows if n.startswith(first)} == wanted  # Qwen2: k and v have 32 outputs
    assert "lm_head.weight" in rows
    if name != "Phi3":
        assert kinds[f"{first}.q_proj.bias"] == torch.float32
    if name == "Qwen2":
        assert kinds[f"{first}.k_proj.bias"] == dtype
    wanted_logits = logits(torch_pi2.load(tmp_path / "memory"))
    assert torch.equal(logits(torch_pi2.load(tmp_path / "disk")), wanted_logits)


@pytest.mark.slow
def test_what_optimize_leaves_float_stays_float_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses, linears that nothing calls, small ones, and a parameter without dimensions."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention

    init = LlamaAttention.__init__

    def with_more(self: nn.Module, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        self.o_proj.__class__ = Scaled
        self.unused = nn.Linear(64, 64)
        self.number = nn.Parameter(torch.tensor(0.5))

    monkeypatch.setattr(LlamaAttention, "__init__", with_more)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**WIDE, num_key_value_heads=2, hidden_act="relu")).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.number.fill_(0.5)
    wanted = set(find_linears(model, find_sites(model))[0])
    kinds = same_files(both_ways(model, tmp_path))
    rows = {n.removesuffix(".weight") for n, kind in kinds.items() if kind == torch.uint8 and n.endswith(".weight")}
    assert rows == wanted == {"lm_head", *(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1))}
    loaded = torch_pi2.load(tmp_path / "disk")
    assert float(loaded.model.layers[1].self_attn.number) == 0.5
    assert loaded.model.layers[1].self_attn.number.shape == ()
    assert logits(loaded).isfinite().all()


def test_shards_and_large_matrices_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-relu")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    torch_pi2.quantize(tmp_path / "one", tmp_path / "a")
    monkeypatch.setattr("torch_pi2.checkpoint.weights_writer._CHUNK", 700)
    torch_pi2.quantize(tmp_path / "many", tmp_path / "b")
    files = [load_file(str(tmp_path / name / "pi2" / "weights.safetensors")) for name in "ab"]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert torch.equal(logits(load_dense(tmp_path / "a")), logits(load_dense(tmp_path / "b")))
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    first, second, *_ = sorted((tmp_path / "many").glob("*.safetensors"))
    name, value = next(iter(load_file(str(first)).items()))
    save_file(load_file(str(second)) | {name: value + 1}, str(second), {"format": "pt"})
    with pytest.raises(
        ArtifactError, match=rf"expected {name} in one of its shards, found it in {first.name} and {second.name}"
    ):
        torch_pi2.quantize(tmp_path / "many", tmp_path / "c")


def test_optimised_folder_keeps_its_order_and_predictors(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    ids_BT = torch.randint(3, 64, (16, 32), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="lowrank", calibration_tokens=512, seq_len=32)
    stats = torch_pi2.profile(model, ids_BT, config=config)
    predictors = FittedPredictors()
    for site in find_sites(model):  # any numbers do: it is the file that is followed
        predictors[site.key] = LowRankRows.fitted(torch.randn(4, 32), torch.randn(48, 4), torch.zeros(48))
        predictors[site.key].card = PredictorCard(0.9, 0.5, 0.2, 100, 0.1, 4)
    made = torch_pi2.optimize(model, config=config, stats=stats, predictors=predictors)
    torch_pi2.save(made, tmp_path / "sparse")
    torch_pi2.quantize(tmp_path / "sparse", tmp_path / "out")
    before, after = Plan.load(tmp_path / "sparse" / "pi2"), Plan.load(tmp_path / "out" / "pi2")
    assert before.model_hash == after.model_hash
    assert all(torch.equal(a.order, b.order) for a, b in zip(before.layers, after.layers, strict=True))
    written = load_predictors(tmp_path / "out" / "pi2", model_hash=after.model_hash)
    assert written.keys() == {layer.site.key for layer in after.layers}
    assert distance(logits(load_dense(tmp_path / "out")), logits(rounded_model("llama-relu", "int4"))) < 1e-5
    assert torch_pi2.load(tmp_path / "out").torch_pi2.plan.layers[0].method == "lowrank"
    shutil.copy(tmp_path / "sparse" / "model.safetensors", tmp_path / "copy")
    tensors = load_file(str(tmp_path / "copy"))
    tensors["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(tensors, str(tmp_path / "sparse" / "model.safetensors"), {"format": "pt"})
    with pytest.raises(StaleArtifactError, match="The weights were changed or converted since"):
        torch_pi2.quantize(tmp_path / "sparse", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_saved_after_optimize_generates_the_same(tmp_path: Path) -> None:
    """The trained model, int4 in memory: greedy tokens before save and after load are equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    dense = AutoModelForCausalLM.from_pretrained(TRAINED, trust_remote_code=True, dtype=torch.float32).eval()
    sparse = torch_pi2.optimize(dense, config=torch_pi2.Config(method="exact", weights="int4"))
    inputs = tokenizer("def main(argv):\n    ", return_tensors="pt")
    wanted = sparse.generate(**inputs, max_new_tokens=24, do_sample=False)
    torch_pi2.save(sparse, tmp_path / "m", tokenizer=tokenizer)
    names = sorted(str(p.relative_to(tmp_path / "m")) for p in (tmp_path / "m").rglob("*") if p.is_file())
    assert "pi2/weights.safetensors" in names
    assert not [n for n in names if n.startswith("model.") and "safetensors" in n]
    assert (tmp_path / "m" / "pi2" / "weights.safetensors").stat().st_size < 5.5e6
    again = torch_pi2.load(tmp_path / "m", trust_remote_code=True, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "m")("def main(argv):\n    ", return_tensors="pt")
    assert torch.equal(again.generate(**tokens, max_new_tokens=24, do_sample=False), wanted)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, sparse(**inputs).logits)
    torch_pi2.save(again, tmp_path / "twice")
    first, second = (load_file(str(tmp_path / n / "pi2" / "weights.safetensors")) for n in ("m", "twice"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, True), (torch.float16, False)])
def test_loaded_dtype_is_the_checkpoints(tmp_path: Path, dtype: torch.dtype, said: bool) -> None:
    """Whether config.json says it or not: biases beside rows are float32, and do not decide it."""
    tiny("llama-bias").to(dtype).save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("dtype") == str(dtype).removeprefix("torch.")
    if not said:
        path.write_text(json.dumps(config))
    model = torch_pi2.load(tmp_path / "out")
    assert model.dtype == model.config.dtype == model.lm_head.dtype == model.lm_head.weight.dtype == dtype
    assert {layer.dtype for layer in sparse_layers(model)} == {dtype}
    assert {t.dtype for t in model.state_dict().values()} == {dtype}
    x = torch.randn(2, 3, 32, dtype=dtype)
    with torch.no_grad():
        assert sparse_layers(model)[0](x).dtype == dtype
    assert logits(model).isfinite().all()
    with torch.no_grad():
        assert model(torch.arange(4)[None]).logits.dtype == dtype
    assert load_dense(tmp_path / "out").dtype == dtype


def test_float_folders_load_densely_too(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    wanted = logits(model)
    torch_pi2.save(torch_pi2.optimize(model), tmp_path / "m")
    assert torch.equal(logits(load_dense(tmp_path / "m")), wanted)


@pytest.mark.parametrize("name", sorted({*BUILDERS} - {"drelu"}))  # its code is not in the folder
def test_skeleton_computes_its_buffers(tmp_path: Path, name: str) -> None:
    """Rotary frequencies and the like are there without weights, and equal those of the loaded model."""
    tiny(name).save_pretrained(tmp_path)
    wanted = dict(tiny(name).named_buffers())
    found = dict(skeleton(tmp_path).named_buffers())
    assert found.keys() == wanted.keys()
    for buffer, value in wanted.items():
        assert torch.equal(found[buffer], value)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised folder of the tiny model, to copy and to damage."""
    folder = tmp_path_factory.mktemp("quantised")
    tiny("llama-relu").save_pretrained(folder / "float")
    torch_pi2.quantize(folder / "float", folder / "out")
    return folder / "out"


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].contiguous()


#: Tensor, its change (None: it is missing), and the message.
DAMAGED: list[tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = [
    ("model.norm.weight", None, r"found none for model\.norm\.weight"),
    ("model.layers.1.mlp.bundles", None, r"expected a tensor model\.layers\.1\.mlp\.bundles"),
    ("model.layers.0.self_attn.q_proj.weight", None, r"found none for model\.layers\.0\.self_attn\.q_proj"),
    ("model.embed_tokens.weight", lambda t: t.T.contiguous(), r"as float32 \[64, 32\], found float32 \[32, 64\]"),
    ("model.norm.weight", lambda t: t.view(torch.int32), r"as float32 \[32\], found int32 \[32\]"),
    ("lm_head.weight", lambda t: t.flatten(), r"as uint8 \[64, 18\], found uint8 \[1152\]"),
    ("lm_head.weight", _cut, r"as uint8 \[64, 18\], found uint8 \[63, 18\]"),
    ("model.layers.1.mlp.bundles", _cut, r"as uint8 \[48, 3, 18\], found uint8 \[47, 3, 18\]"),
]
#: Changed metadata, and the message.
MISLEADING: list[tuple[Meta, str]] = [
    ({"linears": '{"model.norm": 32}'}, "layers of the model, model.norm with 32 inputs, found a LlamaRMSNorm"),
    ({"linears": '{"model.nothing": 32}'}, "layers of the model, model.nothing with 32 inputs, found a Identity"),
    ({"linears": '{"lm_head": 31}'}, "lm_head with 31 inputs, found 32"),
    ({"model_hash": "ef" * 32}, "found efefefefefef"),
    ({"sites": "{}"}, r"expected a site model\.layers\.0\.mlp, found 0 others"),
]


def changed(folder: Path, out: Path, tensors: Tensors, meta: Meta) -> None:
    """Copy ``folder`` to ``out``, with another weights file."""
    shutil.copytree(folder, out)
    path = out / "pi2" / "weights.safetensors"
    with TensorReader(path) as reader:
        about = reader.metadata | meta
    save_file(tensors or load_file(str(path)), str(path), about)


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED)
def test_damaged_weights_are_refused(quantised: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    tensors = load_file(str(quantised / "pi2" / "weights.safetensors"))
    value = tensors.pop(name)
    changed(quantised, tmp_path / "out", tensors | ({} if change is None else {name: change(value)}), {})
    for load in (torch_pi2.load, load_dense):
        with pytest.raises(ArtifactError, match=message):
            load(tmp_path / "out")


@pytest.mark.parametrize(("meta", "message"), MISLEADING)
def test_metadata_of_another_model_is_refused(quantised: Path, tmp_path: Path, meta: Meta, message: str) -> None:
    changed(quantised, tmp_path / "out", {}, meta)
    for load in (torch_pi2.load, load_dense):
        with pytest.raises((ArtifactError, StaleArtifactError), match=message):
            load(tmp_path / "out")


def test_plans_of_other_models_are_refused(quantised: Path, tmp_path: Path) -> None:
    shutil.copytree(quantised, tmp_path / "out")
    path = tmp_path / "out" / "pi2" / "plan.json"
    path.write_text(by_hand(path.read_text()).replace("layers.1.mlp.down_proj", "layers.7.mlp.down_proj"))
    for load in (torch_pi2.load, load_dense):
        with pytest.raises(StaleArtifactError, match=r"expected a model with a parameter model\.layers\.7"):
            load(tmp_path / "out")


@pytest.mark.slow
def test_what_cannot_be_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-relu")
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"quantize\(weights=\.\.\.\): expected int4 or int8, found 'int2'"):
        torch_pi2.quantize(tmp_path / "m", tmp_path / "out", "int2")
    with pytest.raises(ConfigError, match=r"quantization=\.\.\.\): expected rtn or gptq, found 'nearest'"):
        torch_pi2.quantize(tmp_path / "m", tmp_path / "out", quantization="nearest")
    with pytest.raises(ConfigError, match="quantize's folders: expected two separate ones"):
        torch_pi2.quantize(tmp_path / "m", tmp_path / "m" / "out")
    (tmp_path / "empty").mkdir()
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "empty")
    with pytest.raises(ArtifactError, match="found neither"):
        torch_pi2.quantize(tmp_path / "empty", tmp_path / "out")
    tensors = load_file(str(tmp_path / "m" / "model.safetensors"))
    broken = {
        "large": (tensors["lm_head.weight"] * 1e9, NonFiniteError, "lm_head.weight: expected finite numbers of at"),
        "flat": (torch.ones(64), ArtifactError, r"lm_head.weight in .*expected \[64, 32\], found \[64\]"),
        "whole": (torch.ones((64, 32), dtype=torch.int8), DtypeError, "found int8"),
        "missing": (None, ArtifactError, "expected a tensor lm_head.weight, found"),
    }
    for value, error, message in broken.values():
        changed = tensors | {"lm_head.weight": value} if value is not None else dict(tensors)
        if value is None:
            del changed["lm_head.weight"]
        save_file(changed, str(tmp_path / "m" / "model.safetensors"), {"format": "pt"})
        with pytest.raises(error, match=message):
            torch_pi2.quantize(tmp_path / "m", tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: torch.ones(48, 32)}, str(tmp_path / "m" / "model.safetensors"))
    with pytest.raises(ArtifactError, match=r"down_proj.weight in .*: expected \[32, 48\], found \[48, 32\]"):
        torch_pi2.quantize(tmp_path / "m", tmp_path / "out")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "model.safetensors.index.json")
    with pytest.raises(ArtifactError, match="expected an index of shards, found damage"):
        torch_pi2.quantize(tmp_path / "m", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"m", "empty"}


def test_what_cannot_be_loaded(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected no model: a quantised one is built from its configuration"):
        torch_pi2.load(quantised, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="expected float or int8, found 'int4'"):
        torch_pi2.load(quantised, activations="int4")
    torch_pi2.save(torch_pi2.optimize(tiny("llama-relu")), tmp_path / "float")
    with pytest.raises(ConfigError, match="expected float, as the weights are float"):
        torch_pi2.load(tmp_path / "float", activations="int8")


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(TRAINED), str(tmp_path / "q"), "--weights", "int8", "--trust-remote-code"]
    assert main(["quantize", *arguments]) == 0
    text = capsys.readouterr().out
    assert "model.layers.4.mlp" in text
    assert "10.9 MB -> 6.8 MB int8" in text
    (tmp_path / "text").write_text(stdlib_text("train", max_bytes=8_000))
    arguments = [*arguments[:2], "--trust-remote-code", "--no-verdict", "--json", "--quantization", "gptq"]
    assert main(["quantize", *arguments, "--tokens", "1024", "--text", str(tmp_path / "text")]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert len(errors) == 5 + 4 * 5 + 1  # feed-forward layers, q, k, v, o, and the output layer
    assert all(0.05 < error < 0.2 for error in errors.values())
    assert main(["quantize", *arguments, "--text", str(tmp_path / "no")]) != 0
    assert "--text" in capsys.readouterr().err
    assert main(["synthetic", str(tmp_path / "s"), "--shape", "tiny", "--rank", "16"]) == 0
    assert "tiny, int4, 10.0 % active" in capsys.readouterr().out


_MEMORY = """
import re, sys, torch, torch_pi2
def read(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_num_threads(1)
how = {"quantization": "gptq", "calibration": torch.arange(256).view(8, 32) % 60} if sys.argv[5] == "gptq" else {}
torch_pi2.quantize(sys.argv[1], sys.argv[3], **how)  # everything imported and compiled once
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
torch_pi2.quantize(sys.argv[2], sys.argv[4], **how)
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("quantization", "hidden", "intermediate", "layers", "most"),
    [("rtn", 1024, 4096, 4, 2.0), ("gptq", 512, 512, 16, 12.0)],
)
def test_memory_is_bounded_by_a_layer(
    tmp_path: Path, quantization: str, hidden: int, intermediate: int, layers: int, most: float
) -> None:
    """GPTQ has moments of inputs, too, 36 bytes for each pair: here less than three quarters of all layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": 8}
    sizes["vocab_size"] = 4 * hidden
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    model.save_pretrained(tmp_path / "big", max_shard_size="100MB")
    del model
    tiny("llama").save_pretrained(tmp_path / "small")
    layer = 4 * (3 * hidden * intermediate + 4 * hidden * hidden)
    folders = [str(tmp_path / name) for name in ("small", "big", "a", "b")]
    # what is held is measured, not what malloc keeps of freed blocks below 32 MB (those of real models are larger)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", _MEMORY, *folders, quantization]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < most * layer
