"""Conversion of bytes and shares to and from text."""

import math
import re

from torch_pi2.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}{u}": 1024**i for i, p in enumerate("KMGT", 1) for u in ("i", "iB")}
_UNITS |= {f"{p}{u}": 1000**i for i, p in enumerate("KMGT", 1) for u in ("", "B")}


def parse_bytes(value: float | str, what: str = "budget") -> int:
    """``2.5GiB``, ``700MB``, ``1G`` (decimal) or a number of bytes. Raises ConfigError."""
    found: float = -1
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value, re.ASCII) if isinstance(value, str) else None
    if match is not None and match.group(2) in _UNITS:
        found = round(float(match.group(1)) * _UNITS[match.group(2)], 3)
    if not 0 <= found < math.inf:
        raise ConfigError(what, expected="bytes, or text such as 2.5GiB or 700MB", found=repr(value), fix="Correct it.")
    return math.ceil(found)  # rounded up, so that sizes from messages (tenths of a MiB) suffice


def size(count: float) -> str:
    """Bytes as text: 812 B, 4.2 KB, 1.3 MB (powers of 1000)."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def mebibytes(count: int, up: bool = False) -> str:
    """With one digit, rounded down, or ``up``."""
    return f"{(-(-count * 10 >> 20) if up else count * 10 >> 20) / 10:.1f} MiB"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"
