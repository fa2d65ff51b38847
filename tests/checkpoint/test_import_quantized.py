"""Folders of GPTQ, AWQ and compressed-tensors: the numbers that these say, without another rounding where they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from quantised_folders import FORMATS, quantised
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TorchAoConfig

import torch_pi2
from torch_pi2.errors import ArtifactError, Pi2Error, UnsupportedModelError

TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("way", FORMATS)
def test_nothing_is_rounded(tmp_path: Path, way: str) -> None:
    wanted = logits(quantised(tmp_path / "in", way))
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert (report.rounded, sum(report.types.values()), any(report.errors.values())) == ({}, 14, False)
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    assert again.get_submodule("model.layers.0.mlp.up_proj").weights == FORMATS[way][-1]
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_transformers_saves_of_torchao(tmp_path: Path, kind: str) -> None:
    """Integers and scales are kept."""
    quantization = pytest.importorskip("torchao.quantization")
    group = quantization.granularity.PerGroup(32)
    int4 = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)
    config = TorchAoConfig(int4 if kind == "int4" else quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    ggufs.tiny("qwen2").save_pretrained(tmp_path / "floats")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16, quantization_config=config)
    theirs.save_pretrained(tmp_path / "in")
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert (report.rounded, sum(report.types.values())) == ({}, 14)
    ours = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        of: Any = theirs.get_submodule(name).weight.detach()
        scale_NG = of.scale.float().reshape(len(of.qdata), -1)
        wide = scale_NG.repeat_interleave(of.qdata.shape[1] // scale_NG.shape[1], 1)
        assert torch.equal(ours.get_submodule(name).dequantized(), of.qdata.float() * wide)
        assert ours.get_submodule(name).weights == kind


def test_scales_that_float16_does_not_have(tmp_path: Path) -> None:
    model = quantised(tmp_path / "in", "gptq", scales=torch.float32)
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert set(report.rounded.values()) == {"gptq in groups of 128 to int4 with float16 scales"}
    wanted = logits(model)
    off = float((logits(torch_pi2.load(tmp_path / "out", dtype=torch.float32)) - wanted).norm() / wanted.norm())
    assert 0 < off < 0.003


def test_scales_that_float16_takes_for_nothing(tmp_path: Path) -> None:
    """Then the integers are of no use to it."""
    quantised(tmp_path / "in", "gptq", scales=torch.float32)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.scales"
    save_file(tensors | {name: tensors[name] * 1e-6}, tmp_path / "in" / "model.safetensors")
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert report.rounded["model.layers.0.mlp.up_proj"] == "gptq in groups of 128 to int8"


@pytest.mark.slow
def test_classes_of_torchao_that_only_kernels_read(tmp_path: Path) -> None:
    quantised(tmp_path / "in", "torchao")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    for said, message in (
        ('{"_type": "Int4TilePackedTo4dTensor"}', rf"{name} of .*: expected a matrix of .*, found 'Int4TilePackedTo4"),
        ("[", rf"{name}.weight in the header of .*: expected metadata of torchao's tensors, found damage"),
        ("[]", rf"{name} of .*: expected a matrix of Int8Tensor .* found \[\]"),
    ):
        save_file(tensors, tmp_path / "in" / "model.safetensors", {f"{name}.weight": said})
        with pytest.raises(Pi2Error, match=message):
            torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")


def test_as_neurons(tmp_path: Path) -> None:
    """Gate and up as they are, down rounded again; then a store and a budget."""
    wanted = logits(quantised(tmp_path / "in", "gptq"))
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out", neurons="all")
    assert (report.neurons, report.weights) == (2, "int4+int8")
    assert set(report.rounded) == {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    again = logits(torch_pi2.load(tmp_path / "packed", dtype=torch.float32, budget="40MB"))
    assert float((again - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.slow
def test_experts_that_are_floats_lose_no_more_than_8_bits_do(tmp_path: Path) -> None:
    """Attention alone was quantised."""
    quantised(tmp_path / "in", "gptq", model="mixtral")
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert (report.weights, report.neurons, set(report.rounded.values())) == ("int8", 8, {"floats to int8"})
    assert max(report.errors.values()) < 0.01


#: Format -> what stands in the place of a tensor of a matrix (None: nothing), and the message.
DAMAGE: dict[str, list[tuple[str, torch.Tensor | None, str]]] = {
    "gptq": [
        ("g_idx", torch.arange(256, dtype=torch.int32) % 2, "columns in another order"),
        ("scales", torch.zeros(2, 5).half(), r"scales of 256 rows of 256, found \[5, 2\]"),
        ("scales", torch.zeros(0, 256).half(), r"scales of 256 rows of 256, found \[256, 0\]"),
        ("scales", torch.zeros(3, 256).half(), r"scales of 256 rows of 256, found \[256, 3\]"),
        ("scales", torch.zeros(256).half(), r"scales of 256 rows of 256, found \[256\]"),
        ("scales", torch.zeros(512, 256).half(), r"scales of 256 rows of 256, found \[256, 512\]"),
        ("qzeros", torch.zeros(3, 32, dtype=torch.int32), r"zero points for scales of \[256, 2\], found \[256, 3\]"),
        ("qweight", torch.zeros(32, dtype=torch.int32), r"expected a matrix of int32, found int32 \[32\]"),
        ("scales", torch.full((2, 256), torch.inf).half(), "scales of .*q_proj in .*: expected numbers, found NaN or"),
        ("qweight", torch.zeros(32, 256).half(), "q_proj.qweight of .*: expected a matrix of int32, found float16"),
        ("qzeros", torch.full((2, 32), -1, dtype=torch.int32), "expected zero points from 1 on, .*found 0 in model"),
        ("qzeros", None, "expected a tensor model.layers.0.self_attn.q_proj.qzeros"),
        ("other", torch.zeros(1), "found model.layers.0.self_attn.q_proj.other as well"),
    ],
    "pack-quantized": [
        ("weight_g_idx", torch.arange(256, dtype=torch.int32) % 2, "columns in another order"),
        ("weight_zero_point", torch.zeros(256, 5, dtype=torch.int8), r"scales of \[256, 2\], found \[256, 5\]"),
        ("weight_shape", torch.tensor([256]), r"scales of 0 rows of 0, found \[256, 2\]"),
        (
            "weight_packed",
            torch.zeros(256, 32, dtype=torch.int64),
            "weight_packed of .*: expected a matrix of int32, found int64",
        ),
        ("k_scale", torch.ones(1), "found model.layers.0.self_attn.q_proj.k_scale as well"),
    ],
    "int-quantized": [
        ("weight", torch.zeros(256, 256), "q_proj.weight of .*: expected a matrix of int8, found float32")
    ],
    "torchao": [
        ("_weight_act_pre_scale", torch.ones(1), "found model.layers.0.self_attn.q_proj._weight_act_pre_scale as well"),
        (
            "_weight_qdata",
            torch.zeros(256, 256, dtype=torch.uint8),
            "_weight_qdata of .*: expected a matrix of int8, found uint8",
        ),
        ("_weight_scale", torch.ones(256, 5), r"scales of 256 rows of 256, found \[256, 5\]"),
        ("_weight_zero_point", torch.zeros(256, 5).char(), r"zero points for scales of \[256, 1\], found \[256, 5\]"),
        ("_weight_scale", torch.full((256, 1), torch.nan), "scales of .*: expected numbers, found NaN"),
    ],
}


#: What the configuration says as well, and the tensors without which it is wrong.
SAID: dict[str, tuple[tuple[str, ...], Any, str, str]] = {
    "gptq": (("desc_act",), True, "g_idx", "columns in an order that no .*q_proj.g_idx says"),
    "pack-quantized asymmetric": (
        ("config_groups", "group_0", "weights", "symmetric"),
        False,
        "zero_point",
        r"expected a tensor model.layers.0.self_attn.q_proj.weight_zero_point",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", SAID)
def test_tensors_that_the_configuration_wants(tmp_path: Path, way: str) -> None:
    """Without them all numbers would be others."""
    quantised(tmp_path / "in", way)
    place, value, ending, message = SAID[way]
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    at = config["quantization_config"]
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    save_file(kept, tmp_path / "in" / "model.safetensors")
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_quantized(tmp_path / "in", tmp_path / "other")


def test_biases_of_zeros_and_groups_of_another_size(tmp_path: Path) -> None:
    """AutoGPTQ wrote biases for all linear layers; others than zeros belong to another model."""
    quantised(tmp_path / "in", "gptq")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    bias = {"model.layers.0.mlp.down_proj.bias": torch.zeros(256).half()}
    save_file(tensors | bias, tmp_path / "in" / "model.safetensors")
    assert torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out").rounded == {}
    save_file(tensors | {name: b + 0.5 for name, b in bias.items()}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"found model.layers.0.mlp.down_proj.bias as well"):
        torch_pi2.import_quantized(tmp_path / "in", tmp_path / "other")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for said, message in (
        ({"quant_method": "gptq", "bits": 4, "group_size": 96}, "of one size, found 256 columns of .* groups of 96"),
        ({}, "torchao or bitnet, found none"),
    ):
        (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
        with pytest.raises(Pi2Error, match=message):
            torch_pi2.import_quantized(tmp_path / "in", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", DAMAGE)
def test_damage(tmp_path: Path, way: str) -> None:
    quantised(tmp_path / "in", way)
    whole = load_file(tmp_path / "in" / "model.safetensors")
    for part, to, message in DAMAGE[way]:
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors = {other: value for other, value in whole.items() if other != name}
        save_file(tensors | ({} if to is None else {name: to}), tmp_path / "in" / "model.safetensors")
        with pytest.raises(Pi2Error, match=message):
            torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_other_verbs_name_the_import(tmp_path: Path) -> None:
    quantised(tmp_path / "in", "gptq")
    for verb in (torch_pi2.quantize, torch_pi2.pack):
        with pytest.raises(UnsupportedModelError, match=r"floats, found what 'gptq' has quantised.*import_quantized"):
            verb(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_load_of_a_checkpoint_that_is_not_ours(tmp_path: Path) -> None:
    quantised(tmp_path / "in", "awq")
    with pytest.raises(ArtifactError, match=r"folder that torch_pi2 wrote, .* found a checkpoint that 'awq'"):
        torch_pi2.load(tmp_path / "in")
    (tmp_path / "float").mkdir()
    (tmp_path / "float" / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"found a checkpoint without one\. Make one: torch_pi2\.quantize"):
        torch_pi2.load(tmp_path / "float")


def test_one_scale_for_all(tmp_path: Path) -> None:
    """Strategy tensor."""
    model = quantised(tmp_path / "in", "int-quantized")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    scale = torch.tensor([2.0**-9], dtype=torch.float16)
    save_file(tensors | {f"{name}.weight_scale": scale}, tmp_path / "in" / "model.safetensors")
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").copy_(tensors[f"{name}.weight"].float() * scale.float())
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert report.rounded == {}
    wanted = logits(model)
    again = logits(torch_pi2.load(tmp_path / "out", dtype=torch.float32))
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_bitnets_own_checkpoints(tmp_path: Path, linear_class: str) -> None:
    """Packed by transformers. All stay in two bits: down columns are ternary, too, with one scale."""
    from transformers.integrations.bitnet import pack_weights

    model = ggufs.tiny("bitnet")
    model.save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if "_proj.weight" in name]:
        n_NK = torch.randint(-1, 2, tensors[name].shape, generator=generator).float()
        scale = torch.tensor([2.0**-5 if linear_class == "bitlinear" else 0.03125 + 2.0**-9]).bfloat16()
        with torch.no_grad():
            model.get_parameter(name).copy_(n_NK * scale.float())
        stored = 1 / scale if linear_class == "bitlinear" else scale
        tensors |= {name: pack_weights(n_NK.clone()), f"{name}_scale": stored}
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    about = json.loads((tmp_path / "in" / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "bitnet", "linear_class": linear_class}
    (tmp_path / "in" / "config.json").write_text(json.dumps(about))
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert (report.neurons, report.weights) == (2, "tq2_0+tq2_0")
    assert report.rounded == {}
    assert max(report.errors.values()) == 0
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    assert again.get_submodule("model.layers.0.self_attn.q_proj").weights == "tq2_0"
    wanted, found = logits(model), logits(again)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "packed", dtype=torch.float32, budget="1GiB")), found)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] | 3}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"expected numbers of -1, 0 and 1, found 2"):
        torch_pi2.import_quantized(tmp_path / "in", tmp_path / "again")
