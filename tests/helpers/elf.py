"""What an ELF file says of itself: how it is to be loaded, and the names that it needs. Enough for tests."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_LOAD, _DYNAMIC, _STACK, _RELRO = 1, 2, 0x6474E551, 0x6474E552
_NEEDED, _STRTAB, _SYMTAB, _FLAGS, _STRSZ, _FLAGS_1 = 1, 5, 6, 30, 10, 0x6FFFFFFB
_BIND_NOW, _NOW, _PIE = 8, 1, 0x08000000


@dataclass(frozen=True)
class Elf:
    position_independent: bool
    relro: bool
    bind_now: bool
    executable_stack: bool
    needed: tuple[str, ...]
    #: Names of functions and data that others have.
    undefined: frozenset[str]


def read_elf(path: Path) -> Elf:
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", f"{path}: not a little-endian 64-bit ELF file"
    kind, at, size, count = struct.unpack_from("<H", data, 16) + struct.unpack_from("<Q14xHH", data, 32)
    headers = [struct.unpack_from("<IIQQQQ", data, at + i * size) for i in range(count)]  # type, flags, offset, address
    loads = [h for h in headers if h[0] == _LOAD]

    def offset(address: int) -> int:
        return next(h[2] + address - h[3] for h in loads if h[3] <= address < h[3] + h[5])

    (dynamic,) = (h for h in headers if h[0] == _DYNAMIC)
    entries = list(struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    one = dict(entries)
    text_at, symbols = offset(one[_STRTAB]), offset(one[_SYMTAB])

    def name(index: int) -> str:
        return data[text_at + index : data.index(b"\0", text_at + index)].decode()

    # The symbols end where their names begin, as every linker writes them.
    found = struct.iter_unpack("<IBBHQQ", data[symbols : symbols + (text_at - symbols) // 24 * 24])
    return Elf(
        position_independent=kind == 3,
        relro=any(h[0] == _RELRO for h in headers),
        bind_now=bool(one.get(_FLAGS, 0) & _BIND_NOW or one.get(_FLAGS_1, 0) & _NOW),
        executable_stack=any(h[0] == _STACK and h[1] & 1 for h in headers),
        needed=tuple(name(value) for tag, value in entries if tag == _NEEDED),
        undefined=frozenset(name(n) for n, _, _, section, _, _ in found if section == 0 and n),
    )
