"""Checkpoints whose names, layouts or values transformers changes: multimodal, of experts, of another class, RWKV-4."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import quantised_folders
import torch
import transformers
from families import inputs_of, tiny_family
from safetensors.torch import load_file, save_file
from torch import nn

import torch_pi2
from torch_pi2.cli.models import load_dense
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.layers.of_model import sparse_layers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 96, "intermediate_size": 96, "num_key_value_heads": 2}
PICTURES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES |= {"image_size": 28, "patch_size": 14}
TOKENS = {"vision_start_token_id": 1, "vision_end_token_id": 2, "image_token_id": 3, "video_token_id": 4}
IDS = torch.tensor([[5, 17, 90, 33, 8, 61]])


def multimodal(name: str) -> nn.Module:
    config: Any
    if name == "llava":
        text, pictures = transformers.LlamaConfig(**TEXT, hidden_act="relu"), transformers.CLIPVisionConfig(**PICTURES)
        config = transformers.LlavaConfig(text_config=text, vision_config=pictures, image_token_index=3)
    elif name == "gemma3":
        tokens = {"mm_tokens_per_image": 4, "boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
        text = {**TEXT, "head_dim": 16, "sliding_window": 32}
        config = transformers.Gemma3Config(text_config=text, vision_config=PICTURES, **tokens)
    else:
        pictures = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        text = {**TEXT, "rope_parameters": rope}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=pictures, **TOKENS)
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, f"{type(config).__name__[:-6]}ForConditionalGeneration")._from_config(
        config
    )
    return made.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def same(model: nn.Module, folder: Path) -> None:
    found = torch_pi2.load_mapped(folder).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
def test_multimodal(tmp_path: Path, name: str) -> None:
    model, folder = multimodal(name), tmp_path / "model"
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    assert not names & {f"model.language_model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    same(model, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
def test_stores_of_multimodal_models(tmp_path: Path, name: str) -> None:
    model, folder = multimodal(name), tmp_path / "model"
    model.save_pretrained(folder)
    torch_pi2.pack(folder, tmp_path / "packed")
    packed = torch_pi2.load(tmp_path / "packed", budget="64MiB")
    assert len(sparse_layers(packed)) == 2
    torch.testing.assert_close(logits(packed), logits(model))


@pytest.mark.parametrize("name", ["mixtral", "gte", "olmo_hybrid"])
def test_joined_and_divided(tmp_path: Path, name: str) -> None:
    """Experts are stacked, q, k and v of one matrix are divided, convolutions of several are joined."""
    model: Any = tiny_family(name)
    model.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors").keys() >= model.state_dict().keys()
    same(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "phimoe", "lfm2_moe"])
def test_experts_that_are_stacked_at_loading(tmp_path: Path, name: str) -> None:
    model: Any = tiny_family(name)
    model.save_pretrained(tmp_path / "model")
    torch_pi2.pack(tmp_path / "model", tmp_path / "packed")
    packed: Any = torch_pi2.load(tmp_path / "packed", budget="64MiB")
    assert sparse_layers(packed)
    with torch.no_grad():
        torch.testing.assert_close(packed(**inputs_of(model)).logits, model(**inputs_of(model)).logits)


def test_an_operation_that_cannot_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_family("gte").save_pretrained(tmp_path / "model")  # type: ignore[operator]

    def convert(*_: Any, **__: Any) -> Any:
        raise RuntimeError("needs the values")

    monkeypatch.setattr("transformers.core_model_loading.Chunk.convert", convert)
    with pytest.raises(UnsupportedModelError, match=r"Chunk.*needs the values.*torch_pi2\.optimize\(model"):
        torch_pi2.load_mapped(tmp_path / "model")


def llama(folder: Path, tied: bool, base: bool, architectures: list[str] | None) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TEXT, hidden_act="relu", tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    (model.model if base else model).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"architectures": architectures}))
    return model


def test_a_base_model_as_one_with_a_head_and_the_reverse(tmp_path: Path) -> None:
    same(llama(tmp_path / "tied", True, True, ["LlamaForCausalLM"]), tmp_path / "tied")
    same(llama(tmp_path / "full", False, False, ["LlamaModel"]).model, tmp_path / "full")
    llama(tmp_path / "untied", False, True, None)
    for read in (torch_pi2.load_mapped, lambda folder: torch_pi2.quantize(folder, tmp_path / "out")):
        with pytest.raises(ArtifactError, match=r"lm_head\.weight.*architectures"):
            read(tmp_path / "untied")


def test_the_command_makes_up_no_weights(tmp_path: Path) -> None:
    """transformers only warns of parameters that it initialises at random."""
    llama(tmp_path, False, True, None)
    how = {"trust_remote_code": False, "allow_download": False, "dtype": "auto", "verb": "optimize"}
    with pytest.raises(ArtifactError, match=r"found no lm_head\.weight"):
        load_dense(argparse.Namespace(model=str(tmp_path), **how))


@pytest.mark.slow
def test_quantised_matrices_by_other_names(tmp_path: Path) -> None:
    """A base model's GPTQ checkpoint with a head, whose names transformers prefixes."""
    folder = tmp_path / "model"
    quantised_folders.quantised(folder, "gptq")
    torch_pi2.import_quantized(folder, tmp_path / "before")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    torch_pi2.import_quantized(folder, tmp_path / "after")
    before, after = torch_pi2.load(tmp_path / "before"), torch_pi2.load(tmp_path / "after")
    assert torch.equal(logits(before), logits(after))


@pytest.mark.slow
def test_weights_that_the_first_evaluation_divides(tmp_path: Path) -> None:
    """RWKV-4 does so in place, from its second layer on here: a saved folder has them undivided."""
    model: Any = tiny_family("rwkv")
    config = transformers.RwkvConfig(**{**model.config.to_dict(), "num_hidden_layers": 2, "rescale_every": 1})
    torch.manual_seed(0)
    model = transformers.RwkvForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "floats")
    wanted = logits(model)
    optimized = torch_pi2.optimize(model, method="exact")
    torch.testing.assert_close(logits(optimized), wanted)
    torch_pi2.save(optimized, tmp_path / "saved")
    loaded = torch_pi2.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(optimized))
    assert torch.equal(logits(torch_pi2.restore(loaded)), wanted)
    assert torch.equal(logits(transformers.RwkvForCausalLM.from_pretrained(tmp_path / "saved").eval()), wanted)
    torch_pi2.quantize(tmp_path / "floats", tmp_path / "quantised", weights="int8")
    torch.testing.assert_close(logits(torch_pi2.load(tmp_path / "quantised")), wanted, rtol=0.1, atol=0.05)


def test_what_lies_beside_or_in_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama(tmp_path, True, False, ["LlamaForCausalLM"])
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.layers.7.mlp.other": torch.ones(2)}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    same(model, tmp_path)
    assert "model.layers.7.mlp.other left out, which LlamaForCausalLM has not" in caplog.text
    (tmp_path / "adapter_config.json").write_text("{}")
    for read in (torch_pi2.load_mapped, lambda folder: torch_pi2.pack(folder, tmp_path.with_name("out"))):
        with pytest.raises(ArtifactError, match=r"found an adapter \(adapter_config\.json\).*merge_and_unload"):
            read(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="expected floats, found what 'another method' has quantised"):
        torch_pi2.load_mapped(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    with pytest.raises(ArtifactError, match=r"found model\.fp16\.safetensors\. .*variant='fp16'"):
        torch_pi2.load_mapped(tmp_path)


@torch.no_grad()
def test_an_output_layer_of_its_own_where_the_configuration_ties_it(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    llama(source, True, False, ["LlamaForCausalLM"])
    tensors = load_file(source / "model.safetensors")
    of_both = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"])
    for factor in (1.0, 2.0):
        both = {"model.embed_tokens.weight": of_both, "lm_head.weight": factor * of_both}
        save_file(tensors | both, source / "model.safetensors", {"format": "pt"})
        wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        torch_pi2.pack(source, store, weights="float32")
        found: Any = torch_pi2.load(store)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == (factor == 1)
        torch.testing.assert_close(logits(found), logits(wanted))
