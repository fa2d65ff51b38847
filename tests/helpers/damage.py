"""Damage to files, drawn at random: what disks, copies and editors do to bytes, to headers and to JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch


def flipped(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 3))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def in_front(data: bytearray, chance: random.Random) -> None:
    """A bit of the first kilobyte, where headers and names are."""
    data[chance.randrange(min(len(data), 1024))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def zeroed(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    end = min(len(data), at + chance.choice((1, 4, 64, 512, 4096)))
    data[at:end] = bytes(end - at)


def swapped(data: bytearray, chance: random.Random) -> None:
    size = min(chance.choice((1, 4, 64, 512)), len(data) // 2)
    a, b = (chance.randrange(len(data) - size + 1) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def longer(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice((1, 8, 4096)))


def other_digit(data: bytearray, chance: random.Random) -> None:
    """Another digit in one of its texts."""
    found = chance.choice([m.start() for m in re.finditer(rb"\d", bytes(data[: 1 << 16]))] or [0])
    data[found] = chance.choice(b"0123456789")


def edited(data: bytearray, chance: random.Random) -> None:
    """An entry of the header, or of JSON, that is missing, twice, renamed, exchanged or of another value."""
    header = data[:1] != b"{"
    length = int.from_bytes(data[:8], "little") if header else len(data)
    text = data[8 : 8 + length] if header else data
    try:
        value = json.loads(bytes(text))
    except ValueError:  # numbers alone
        flipped(data, chance)
        return
    at, path = value, chance.randrange(4)
    while path and isinstance(at, dict) and (inner := [v for v in at.values() if isinstance(v, dict) and v]):
        at, path = chance.choice(inner), path - 1
    name = chance.choice(list(at))
    way, other = chance.randrange(5), chance.choice(list(at))
    if way == 0:
        at.pop(name)
    elif way == 1:
        at[name + "x"] = at.pop(name)
    elif way == 2:
        at[name], at[other] = at[other], at[name]
    elif way == 3:
        at[name] = chance.choice((0, 1, 7.5, "", "x", [], {}, None, True, "F32", [2, 2]))
    made = json.dumps(value).encode()
    if way == 4:  # the name twice, the second with another value
        made = b'{"' + name.encode() + b'": ' + json.dumps(at[other]).encode() + b", " + made[1:]
    if header:
        made += b" " * (-(8 + len(made)) % 8)
        made = len(made).to_bytes(8, "little") + made + data[8 + length :]
    data[:] = made


WAYS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(flipped, in_front, cut, zeroed, swapped, longer, other_digit, edited, edited),
)


def damaged(sound: bytes, seed: int) -> tuple[str, bytes]:
    """How, and the damaged file."""
    chance, data = random.Random(seed), bytearray(sound)
    way = WAYS[seed % len(WAYS)]
    way(data, chance)
    return way.__name__, bytes(data)


def content(value: Any) -> Any:
    """What can be compared of something read: all its numbers and texts."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, Mapping):
        more = content(vars(value)) if type(value) is not dict and hasattr(value, "__dict__") else ()
        return [(name, content(value[name])) for name in sorted(value)], more
    if isinstance(value, list | tuple):
        return [content(item) for item in value]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, [(name, content(v)) for name, v in vars(value).items() if not name.startswith("_")]
    return repr(value)
