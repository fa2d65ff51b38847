"""``crc32c``: a checksum of each row of bytes."""

from __future__ import annotations

import torch

from torch_pi2.errors import ShapeError


def fake(rows: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 2 or rows.dtype != torch.uint8:
        raise ShapeError("rows", expected="uint8 [n, bytes]", found=str(tuple(rows.shape)), fix="View them as bytes.")
    return rows.new_empty((rows.shape[0],), dtype=torch.int64)
