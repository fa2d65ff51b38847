"""CRC32C of rows of bytes (Castagnoli: polynomial 0x1EDC6F41, reflected, first and last XOR 0xFFFFFFFF; RFC 3720)."""

from __future__ import annotations

import torch

from torch_pi2.ops.library import load

_REFLECTED = 0x82F63B78


def crc32c(rows: torch.Tensor) -> torch.Tensor:
    """Checksum of every row: uint8 ``[N, M]`` contiguous -> int64 ``[N]``, each below 2^32."""
    load()
    found: torch.Tensor = torch.ops.pi2.crc32c(rows)
    return found


def continue_crc32c(crc: int, data: bytes) -> int:
    """Checksum of bytes with checksum ``crc`` (0: no bytes) followed by ``data``."""
    if len(data) < 4:
        state = crc ^ 0xFFFFFFFF
        for byte in data:
            state ^= byte
            for _ in range(8):
                state = (state >> 1) ^ (_REFLECTED if state & 1 else 0)
        return state ^ 0xFFFFFFFF
    # the previous checksum only changes the first four bytes of what follows
    rest = bytearray(data)
    rest[:4] = (int.from_bytes(data[:4], "little") ^ crc).to_bytes(4, "little")
    return int(crc32c(torch.frombuffer(rest, dtype=torch.uint8)[None])[0])
