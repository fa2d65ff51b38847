"""Rows in ggml's blocks: random bytes with scales that are numbers, and what the package ``gguf`` reads in them."""

from __future__ import annotations

import gguf
import torch
from gguf import quants

from torch_pi2.formats import FORMATS

#: Where a block has float16 scales, and of what size they make weights of about 1.
_HALVES = {
    "q4_1": {0: 1 / 8, 2: 1.0},
    "q5_0": {0: 1 / 8},
    "q5_1": {0: 1 / 16, 2: 1.0},
    "q4_k": {0: 1 / 256, 2: 1 / 32},
    "q5_k": {0: 1 / 512, 2: 1 / 32},
    "q6_k": {208: 1 / 1024},
    "tq2_0": {64: 1.0},
}


def random_rows(kind: str, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    """uint8 ``[rows, row_bytes(columns)]``; weights of about ``scale``, some groups of zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    shape = (rows, columns // FORMATS[kind].block, FORMATS[kind].block_bytes)
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    for at, size in _HALVES[kind].items():
        halves = torch.randn(*shape[:2], 1, generator=generator) * size * scale
        halves[torch.rand(halves.shape, generator=generator) < 0.1] = 0
        blocks[..., at : at + 2] = halves.half().view(torch.uint8)
    return blocks.flatten(1)


def gguf_values(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """float32 ``[rows, columns]``."""
    return torch.from_numpy(quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.upper()]))
