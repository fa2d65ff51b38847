"""Folders of GPTQ, AWQ and compressed-tensors: the numbers that these say, without another rounding where they fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from safetensors.torch import load_file, save_file

import torch_pi2
from torch_pi2.errors import Pi2Error

TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])
GROUP = 128
Tensors = dict[str, torch.Tensor]
#: Integers ``[N, K]``, their scales and zero points ``[N, G]`` -> tensors behind a matrix's name.
Packer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]


def packed(numbers: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """``32 / bits`` numbers in an int32, low bits first; written as a loop, unlike what reads it."""
    numbers = numbers.movedim(axis, -1).long()
    out = torch.zeros((*numbers.shape[:-1], numbers.shape[-1] * bits // 32), dtype=torch.int64)
    for k in range(numbers.shape[-1]):
        out[..., k * bits // 32] |= numbers[..., k] << (k * bits % 32)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32).movedim(-1, axis)


def gptq(bits: int, version: int) -> Packer:
    def of(q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor) -> Tensors:
        columns = q_NK.shape[1]
        return {
            "qweight": packed(q_NK.T, bits, 0),
            "qzeros": packed(z_NG.T - (1 if version == 1 else 0), bits, 1),
            "scales": scale_NG.T,
            "g_idx": (torch.arange(columns) // (columns // scale_NG.shape[1])).int(),
        }

    return of


def awq(q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(numbers_KN: torch.Tensor) -> torch.Tensor:
        return packed(numbers_KN.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

    return {"qweight": mixed(q_NK.T), "qzeros": mixed(z_NG.T), "scales": scale_NG.T}


def pack_quantized(q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor) -> Tensors:
    return {
        "weight_packed": packed(q_NK, 4, 1),
        "weight_scale": scale_NG,
        "weight_zero_point": packed(z_NG, 4, 0),
        "weight_shape": torch.tensor(q_NK.shape),
    }


def int_quantized(q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor) -> Tensors:
    return {
        "weight": (q_NK - z_NG.repeat_interleave(q_NK.shape[1] // z_NG.shape[1], 1)).to(torch.int8),
        "weight_scale": scale_NG,
    }


def compressed(kind: str, bits: int) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "group_size": GROUP}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


#: Name -> quantization_config, what packs, bits, zero points from and to, format that it becomes.
WAYS: dict[str, tuple[dict[str, Any], Packer, int, tuple[int, int], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4, 1), 4, (8, 8), "int4"),
    "gptq asymmetric": ({"quant_method": "gptq", "bits": 4}, gptq(4, 1), 4, (3, 12), "int8"),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 2), 4, (8, 8), "int4"),
    "gptq of 2 bits": ({"quant_method": "gptq", "bits": 2}, gptq(2, 1), 2, (1, 3), "int4"),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, gptq(8, 1), 8, (128, 128), "int8"),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, 4, (3, 12), "int8"),
    "awq symmetric": ({"quant_method": "awq", "w_bit": 4}, awq, 4, (8, 8), "int4"),
    "pack-quantized": (compressed("pack-quantized", 4), pack_quantized, 4, (8, 8), "int4"),
    "pack-quantized asymmetric": (compressed("pack-quantized", 4), pack_quantized, 4, (4, 11), "int8"),
    "int-quantized": (compressed("int-quantized", 8), int_quantized, 8, (128, 128), "int8"),
}


def quantised(folder: Path, way: str, *, scales: torch.dtype = torch.float16, model: str = "qwen2") -> Any:
    """Write a tiny model's folder in this way; the model with the numbers that it stands for."""
    config, pack, bits, (low, high), _ = WAYS[way]
    made = ggufs.tiny(model)
    made.save_pretrained(folder)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "_proj" not in name:
            tensors[name] = value
            continue
        rows, columns = value.shape
        groups = columns // GROUP if way != "int-quantized" else 1
        z_NG = torch.randint(low, high + 1, (rows, groups), generator=generator)
        least = 1 if bits == 8 else 0  # -128 is no number of ours
        q_NK = torch.randint(least, 1 << bits, (rows, columns), generator=generator)
        scale_NG = (torch.rand((rows, groups), generator=generator) + 0.5) / (1 << bits) / columns**0.5
        scale_NG = scale_NG.to(scales)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{part}": t.contiguous() for part, t in pack(q_NK, scale_NG, z_NG).items()}
        of_K = torch.arange(columns) // (columns // groups)
        with torch.no_grad():
            made.get_parameter(name).copy_((q_NK - z_NG[:, of_K]).float() * scale_NG.float()[:, of_K])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": config}))
    return made


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_rounded(tmp_path: Path, way: str) -> None:
    wanted = logits(quantised(tmp_path / "in", way))
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert (report.rounded, sum(report.types.values()), any(report.errors.values())) == ({}, 14, False)
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    assert again.get_submodule("model.layers.0.mlp.up_proj").weights == WAYS[way][-1]
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_scales_that_float16_does_not_have(tmp_path: Path) -> None:
    model = quantised(tmp_path / "in", "gptq", scales=torch.float32)
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert set(report.rounded.values()) == {"gptq in groups of 128 to int8"}
    assert 0 < max(report.errors.values()) < 0.01
    wanted = logits(model)
    off = float((logits(torch_pi2.load(tmp_path / "out", dtype=torch.float32)) - wanted).norm() / wanted.norm())
    assert 0 < off < 0.03


def test_as_neurons(tmp_path: Path) -> None:
    """Gate and up as they are, down rounded again; then a store and a budget."""
    wanted = logits(quantised(tmp_path / "in", "gptq"))
    report = torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out", neurons="all")
    assert (report.neurons, report.weights) == (2, "int4")
    assert set(report.rounded) == {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    again = logits(torch_pi2.load(tmp_path / "packed", dtype=torch.float32, budget="40MB"))
    assert float((again - wanted).norm() / wanted.norm()) < 0.15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method gptq, awq or compressed-tensors, found 'bitsandbytes'",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 96},
            "of one size, found 256 columns of .* groups of 96",
        ),
        ({"quant_method": "gptq", "bits": 3}, "expected gptq of 2, 4 or 8 bits, found 3"),
        ({"quant_method": "awq", "version": "gemv"}, "awq of 4 bits, version gemm, found 4 bits, gemv"),
        (
            compressed("float-quantized", 8),
            "pack-quantized or int-quantized of 4 or 8 bits, found float-quant",
        ),
        ({}, "compressed-tensors, found none"),
    ],
)
def test_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    quantised(tmp_path / "in", "gptq")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": change}))
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "to", "message"),
    [
        ("g_idx", torch.arange(256, dtype=torch.int32) % 2, "columns in another order"),
        ("scales", torch.zeros(2, 5).half(), "scales of 256 rows of 256"),
        ("qzeros", None, "expected a tensor model.layers.0.self_attn.q_proj.qzeros"),
        ("other", torch.zeros(1), "found model.layers.0.self_attn.q_proj.other as well"),
    ],
)
def test_damage(tmp_path: Path, part: str, to: torch.Tensor | None, message: str) -> None:
    quantised(tmp_path / "in", "gptq")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensors.pop(name, None)
    save_file(tensors | ({} if to is None else {name: to}), tmp_path / "in" / "model.safetensors")
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_quantized(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_beside_compressed_tensors(tmp_path: Path) -> None:
    """What its own package packs."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    numbers = torch.randint(-8, 8, (24, 96), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(numbers, 4), packed(numbers + 8, 4, 1))
    assert torch.equal(helpers.pack_to_int32(numbers, 4, 0), packed(numbers + 8, 4, 0))
