"""Tiny models in folders as GPTQ, AWQ, compressed-tensors and torchao write them, packed by code of the tests' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggufs
import torch
from safetensors.torch import load_file, save_file

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


def torchao(q_NK: torch.Tensor, scale_NG: torch.Tensor, z_NG: torch.Tensor) -> Tensors:
    z_NG = z_NG - 128  # theirs are signed
    return {"_weight_qdata": (q_NK - 128).to(torch.int8), "_weight_scale": scale_NG, "_weight_zero_point": z_NG.char()}


INT8_OF_TORCHAO = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}


def compressed(kind: str, bits: int) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "group_size": GROUP}, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


#: Name -> quantization_config, what packs, bits, zero points from and to, format that it becomes.
FORMATS: dict[str, tuple[dict[str, Any], Packer, int, tuple[int, int], str]] = {
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
    "torchao": ({"quant_method": "torchao", "quant_type": INT8_OF_TORCHAO}, torchao, 8, (128, 128), "int8"),
}


def quantised(folder: Path, way: str, *, scales: torch.dtype = torch.float16, model: str = "qwen2") -> Any:
    """Write a tiny model's folder in this way; the model with the numbers that it stands for."""
    config, pack, bits, (low, high), _ = FORMATS[way]
    made = ggufs.tiny(model)
    made.save_pretrained(folder)
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "_proj" not in name:
            tensors[name] = value
            continue
        rows, columns = value.shape
        groups = columns // GROUP if way not in ("int-quantized", "torchao") else 1
        z_NG = torch.randint(low, high + 1, (rows, groups), generator=generator)
        q_NK = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
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
