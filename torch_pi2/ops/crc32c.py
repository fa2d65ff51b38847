"""CRC32C (Castagnoli: polynomial 0x1EDC6F41, reflected, initial and final XOR 0xFFFFFFFF; RFC 3720) of rows of bytes.

By the core's operator where it is there (which has an instruction for it), otherwise by tables in numpy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from torch_pi2.errors import LibraryMissingError
from torch_pi2.ops.library import load

_REFLECTED = 0x82F63B78
#: Rows that the tables take at a time: as many as keep a column of words in the first-level cache.
_ROWS = 1024

U32s = np.ndarray[Any, np.dtype[np.uint32]]


def crc32c(rows: torch.Tensor) -> torch.Tensor:
    """Checksum of every row: uint8 ``[N, M]`` contiguous -> int64 ``[N]``, each below 2^32."""
    if has_operator():
        found: torch.Tensor = torch.ops.pi2.crc32c(rows)
        return found
    return crc32c_by_table(rows)


def continue_crc32c(crc: int, data: bytes) -> int:
    """Checksum of bytes whose own is ``crc`` (0: none), and of ``data`` behind them."""
    if len(data) < 4:
        table, state = _tables()[0], crc ^ 0xFFFFFFFF
        for byte in data:
            state = int(table[(state ^ byte) & 0xFF]) ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    # What came before changes the first four bytes of what follows, and nothing else.
    rest = bytearray(data)
    rest[:4] = (int.from_bytes(data[:4], "little") ^ crc).to_bytes(4, "little")
    return int(crc32c(torch.frombuffer(rest, dtype=torch.uint8)[None])[0])


@cache
def has_operator() -> bool:
    """Whether the core computes checksums."""
    try:
        load()
    except LibraryMissingError:
        return False
    return hasattr(torch.ops.pi2, "crc32c")


def crc32c_by_table(rows: torch.Tensor) -> torch.Tensor:
    """As :func:`crc32c`, four bytes of many rows at a time."""
    data = rows.numpy()
    parts = [_by_table(data[start : start + _ROWS]) for start in range(0, len(data), _ROWS)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))


def _by_table(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    tables = _tables()
    n, length = data.shape
    whole = length - length % 4
    crc: U32s = np.full(n, 0xFFFFFFFF, np.uint32)
    # by columns: the four bytes of all rows at one place lie together
    words_WN = np.ascontiguousarray(np.ascontiguousarray(data[:, :whole]).view("<u4").T)
    for word in words_WN:
        crc ^= word
        crc = (
            tables[3][crc & 0xFF] ^ tables[2][(crc >> 8) & 0xFF] ^ tables[1][(crc >> 16) & 0xFF] ^ tables[0][crc >> 24]
        )
    for column in range(whole, length):
        crc = tables[0][(crc ^ data[:, column]) & 0xFF] ^ (crc >> 8)
    return (crc ^ np.uint32(0xFFFFFFFF)).astype(np.int64)


@cache
def _tables() -> U32s:
    """``[4, 256]``: what a byte does to the checksum 0, 1, 2 and 3 bytes later."""
    table: U32s = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(_REFLECTED)
    tables = [table]
    for _ in range(3):
        tables.append(table[tables[-1] & 0xFF] ^ (tables[-1] >> 8))
    return np.stack(tables).astype(np.uint32)
