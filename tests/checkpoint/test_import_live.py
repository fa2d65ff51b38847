"""Models in memory that torchao's ``quantize_`` has quantised, taken over with their own integers and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, NoFFNFoundError, UnsupportedModelError

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


def test_a_model_that_transformers_has_quantised(tmp_path: Path) -> None:
    """By its own configuration, which is not said of the folder any more."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    ggufs.tiny("qwen2").save_pretrained(tmp_path / "floats")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.bfloat16, quantization_config=config)
    theirs.save_pretrained(tmp_path / "in")
    torch_pi2.import_quantized(theirs, tmp_path / "live")
    torch_pi2.import_quantized(tmp_path / "in", tmp_path / "folder")
    live, folder = (torch_pi2.load(tmp_path / name, dtype=torch.float32) for name in ("live", "folder"))
    with torch.no_grad():
        assert torch.equal(live(TOKENS).logits, folder(TOKENS).logits)


def test_what_changes_numbers_is_refused(tmp_path: Path) -> None:
    model = made("qwen2", quantization.Int8WeightOnlyConfig())
    weight: Any = model.model.layers[0].self_attn.q_proj.weight.detach()
    for field, to, message in (
        ("act_pre_scale", torch.ones(1), r"q_proj.weight of a model in memory: .* found factors of its inputs"),
        ("zero_point", torch.zeros(256, 1), "found zero points in float32"),
    ):
        was = getattr(weight, field)
        setattr(weight, field, to)
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(UnsupportedModelError, match=message):
            torch_pi2.import_quantized(model, tmp_path / "out")
        setattr(weight, field, was)
    other = made("qwen2", quantization.Float8WeightOnlyConfig())
    with pytest.raises(UnsupportedModelError, match=r"expected a matrix of Int8Tensor or .*, found Float8Tensor"):
        torch_pi2.import_quantized(other, tmp_path / "out")
    with pytest.raises(ConfigError, match="expected linear layers that torchao has quantised, found none"):
        torch_pi2.import_quantized(ggufs.tiny("qwen2"), tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="import of a Sequential: expected a Hugging Face model"):
        torch_pi2.import_quantized(nn.Sequential(nn.Linear(64, 64)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NoFFNFoundError, match=r"torch_pi2\.import_quantized\(model, folder\)"):
        torch_pi2.optimize(model, method="exact")
