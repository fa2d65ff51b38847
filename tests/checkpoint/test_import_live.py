"""Models in memory that torchao's ``quantize_`` has quantised, taken over with their own integers and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, NoFFNFoundError, NonFiniteError, UnsupportedModelError

quantization = pytest.importorskip("torchao.quantization")
TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])


def made(name: str, config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = ggufs.tiny(name).to(dtype)
    quantization.quantize_(model, config)
    return model


def int4() -> Any:
    group = quantization.granularity.PerGroup(32)
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)


def values(weight: torch.Tensor) -> torch.Tensor:
    """float32, of integers and scales."""
    of: Any = weight.detach()
    scale_NG = of.scale.float().reshape(-1, of.scale.shape[-1]).expand(len(of.qdata), -1)
    wide = scale_NG.repeat_interleave(of.qdata.shape[1] // scale_NG.shape[1], 1)
    return of.qdata.float() * wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "kept", "neurons"),
    [
        ("qwen2", quantization.Int8WeightOnlyConfig(), "int8", "int8"),
        ("qwen3", quantization.Int8DynamicActivationInt8WeightConfig(), "int8", "int8"),
        ("llama", int4(), "int4", "int4+int8"),
    ],
    ids=("int8", "int8-tied-dynamic", "int4"),
)
def test_integers_and_scales_are_kept(tmp_path: Path, name: str, config: Any, kept: str, neurons: str) -> None:
    model = made(name, config)
    before = {n: values(m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    report = torch_pi2.import_quantized(model, tmp_path / "out")
    assert (report.rounded, report.tokenizer) == ({}, "the model has none")
    assert sum(report.types.values()) == len(before)
    ours = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    for linear, wanted in before.items():
        assert torch.equal(ours.get_submodule(linear).dequantized(), wanted)
        assert ours.get_submodule(linear).weights == kept
    assert torch.equal(values(model.model.layers[0].mlp.up_proj.weight), before["model.layers.0.mlp.up_proj"])
    assert torch_pi2.import_quantized(model, tmp_path / "neurons", neurons="all").weights == neurons


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["PerRow", "PerTensor", "PerGroup", "int4"])
def test_a_model_that_transformers_has_quantised(tmp_path: Path, granularity: str) -> None:
    """By its own configuration, which is not said of the folder any more: integers and scales are kept."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    ggufs.tiny("qwen2").save_pretrained(tmp_path / "floats")
    of = quantization.granularity.PerGroup(64) if granularity == "PerGroup" else None
    of = of or getattr(quantization, granularity, quantization.PerRow)()
    int8 = quantization.Int8WeightOnlyConfig(granularity=of, set_inductor_config=False)
    config = TorchAoConfig(int4() if granularity == "int4" else int8)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16, quantization_config=config)
    theirs.save_pretrained(tmp_path / "in")
    torch_pi2.import_quantized(theirs, tmp_path / "live")
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "folder")
    assert (report.rounded, sum(report.types.values())) == ({}, 14)
    live, folder = (torch_pi2.load(tmp_path / name, dtype=torch.float32) for name in ("live", "folder"))
    with torch.no_grad():
        assert torch.equal(live(TOKENS).logits, folder(TOKENS).logits)
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        assert torch.equal(folder.get_submodule(name).dequantized(), values(theirs.get_submodule(name).weight))


def plain_int4(
    q_NK: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor, group: int, **more: Any
) -> torch.Tensor:
    """What Int4WeightOnlyConfig makes where its kernels are: integers from -8 to 7, even columns in low halves."""
    nibbles = q_NK & 15
    qdata = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scale, zero = (t.T.contiguous() for t in (scale_NG, zero_NG))
    return quantization.Int4Tensor(qdata, scale, zero, [1, group], q_NK.shape, **more)


def with_plain_int4(model: Any, zeros: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Linear layers of ``model`` become Int4Tensors of random numbers; what these stand for, float64."""
    generator, stand_for = torch.Generator().manual_seed(3), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            q_NK = torch.randint(-8, 8, (rows, columns), generator=generator)
            scale_NG = ((torch.rand(rows, columns // 64, generator=generator) + 0.5) / 8 / columns**0.5).to(dtype)
            zero_NG = (zeros * torch.randn(scale_NG.shape, generator=generator) * scale_NG).to(dtype)
            module.weight = nn.Parameter(plain_int4(q_NK, scale_NG, zero_NG, 64), requires_grad=False)
            wide = (t.double().repeat_interleave(64, 1) for t in (scale_NG, zero_NG))
            stand_for[name] = q_NK * next(wide) + next(wide)
    return stand_for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zeros", "dtype", "kept", "most"),
    [
        (0.0, torch.bfloat16, "int4", 0.0),
        (2.0, torch.float32, "int8", 0.01),
    ],
)
def test_integers_of_four_bits_stay(tmp_path: Path, zeros: float, dtype: torch.dtype, kept: str, most: float) -> None:
    """In memory and in a folder; with zero points between integers they are rounded to int8."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    model = ggufs.tiny("qwen2")
    before = with_plain_int4(model, zeros, dtype)
    folder = tmp_path / "in"
    ggufs.tiny("qwen2").save_pretrained(folder)
    tensors, header = flatten_tensor_state_dict(model.state_dict())
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", header)
    about = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": said}))
    for source, out in ((model, "live"), (folder, "of-folder")):
        report = torch_pi2.import_quantized(source, tmp_path / out)
        if most == 0:
            assert (report.rounded, any(report.errors.values())) == ({}, False)
        else:
            assert set(report.rounded.values()) == {f"torchao in groups of 64 to {kept}"}
        ours = torch_pi2.load(tmp_path / out, dtype=torch.float32)
        for linear in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
            assert ours.get_submodule(linear).weights == kept
            off = (ours.get_submodule(linear).dequantized().double() - before[linear]).norm() / before[linear].norm()
            assert (off == 0) if most == 0 else 0 < off < most
            assert report.errors[linear] == pytest.approx(float(off), rel=1e-2, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "kept"), [(3.0, True), (0.5, False), (65536.0, False)])
def test_zero_points_in_floats(tmp_path: Path, z: float, kept: bool) -> None:
    model = made("llama", int4())
    name = "model.layers.0.self_attn.q_proj"
    weight: Any = model.get_submodule(name).weight.detach()
    weight.zero_point = torch.full_like(weight.scale, z)
    wanted = values(weight).double() - z * weight.scale.double().repeat_interleave(32, 1)
    model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
    report = torch_pi2.import_quantized(model, tmp_path / "out")
    found = torch_pi2.load(tmp_path / "out", dtype=torch.float32).get_submodule(name)
    assert (found.weights, name in report.rounded) == ("int8", not kept)
    assert float((found.dequantized() - wanted).norm() / wanted.norm()) < (2.0**-10 if kept else 0.01)


@pytest.mark.slow
def test_what_changes_numbers_is_refused(tmp_path: Path) -> None:
    model = made("qwen2", quantization.Int8WeightOnlyConfig())
    weight: Any = model.model.layers[0].self_attn.q_proj.weight.detach()
    weight.act_pre_scale = torch.ones(1)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"found .*q_proj._weight_act_pre_scale as well"):
        torch_pi2.import_quantized(model, tmp_path / "out")
    other = made("qwen2", quantization.Float8WeightOnlyConfig())
    with pytest.raises(UnsupportedModelError, match=r"of Int8Tensor, .*, found Float8Tensor\. .*int4_packing_format"):
        torch_pi2.import_quantized(other, tmp_path / "out")
    with pytest.raises(ConfigError, match="expected linear layers that torchao has quantised, found none"):
        torch_pi2.import_quantized(ggufs.tiny("qwen2"), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="import of a Sequential: expected a Hugging Face model"):
        torch_pi2.import_quantized(nn.Sequential(nn.Linear(64, 64)), tmp_path / "out")
    with pytest.raises(
        UnsupportedModelError, match=r"import of a OptimizedModule: .*model\._orig_mod of torch.compile"
    ):
        torch_pi2.import_quantized(torch.compile(made("qwen2", int4())), tmp_path / "out")
    broken = ggufs.tiny("qwen2")
    with_plain_int4(broken, 2.0, torch.bfloat16)
    broken.model.layers[1].mlp.up_proj.weight.detach().zero_point[0, 5] = torch.nan
    with pytest.raises(
        NonFiniteError, match=r"scales of model.layers.1.mlp.up_proj in .*: expected numbers, found NaN"
    ):
        torch_pi2.import_quantized(broken, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NoFFNFoundError, match=r"torch_pi2\.import_quantized\(model, folder\)"):
        torch_pi2.optimize(made("qwen2", quantization.Int8WeightOnlyConfig()), method="exact")


def test_modules_that_the_configuration_does_not_give(tmp_path: Path) -> None:
    """The folder is built of it, and would compute something else."""
    edited, cut, changed = (made("qwen2", int4()) for _ in range(3))
    edited.model.layers[0].mlp.act_fn = nn.ReLU()
    cut.model.layers = cut.model.layers[:1]
    changed.config.hidden_act = "relu"
    for model, message in (
        (edited, r"layers.0.mlp.act_fn of a model in memory: expected SiLUActivation, as its .*, found ReLU"),
        (cut, r"model.layers.1 of a model in memory: expected Qwen2DecoderLayer, .*, found nothing"),
        (changed, r"layers.0.mlp.act_fn of a model in memory: expected ReLU, .* found SiLU"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            torch_pi2.import_quantized(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
