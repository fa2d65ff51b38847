"""CRC32C of rows of bytes (Castagnoli: polynomial 0x1EDC6F41, reflected, first and last XOR 0xFFFFFFFF; RFC 3720)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.library import load_library

_REFLECTED = 0x82F63B78
#: Bytes per checksum of a tensor, so that parts of it can be checked in parallel.
BLOCK = 4096
#: Bytes of a file read at a time.
_PIECE = 1 << 20


@cache
def _operator() -> Any:
    load_library()
    return torch.ops.pi2.crc32c


def crc32c(rows: torch.Tensor) -> torch.Tensor:
    """Checksum of every row: uint8 ``[N, M]`` contiguous -> int64 ``[N]``, each below 2^32."""
    return _operator()(rows)


def block_checks(data: torch.Tensor) -> torch.Tensor:
    """CRC32C of every ``BLOCK`` bytes of uint8 ``[n]``, the last ones possibly fewer: int64 ``[ceil(n / BLOCK)]``."""
    whole = len(data) - len(data) % BLOCK
    parts = (data[:whole].view(-1, BLOCK), data[None, whole:].contiguous())
    return torch.cat([crc32c(part) for part in parts if part.numel()] or [torch.empty(0, dtype=torch.int64)])


def check_bytes(checksums: torch.Tensor) -> torch.Tensor:
    """Checksums, int64 ``[N]``, as stored: uint8 ``[4 N]``, little endian."""
    return torch.from_numpy(checksums.numpy().astype("<u4")).view(torch.uint8)


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


def crc32c_of_file(path: Path, progress: Any = None, also: Callable[[bytes], object] = len) -> tuple[int, str]:
    """Size and CRC32C, 8 hexadecimal digits; ``also`` gets pieces, ``progress.update`` their sizes. Raises OSError."""
    count, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            also(piece)
            crc = continue_crc32c(crc, piece)
            count += len(piece)
            if progress is not None:
                progress.update(len(piece))
    return count, f"{crc:08x}"
