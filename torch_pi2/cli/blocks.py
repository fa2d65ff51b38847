"""Tables with a line for all experts of a block: a mixture has thousands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

_EXPERT = re.compile(r"(.*experts)\.\d+")
#: Fields of which the sum is shown.
_SUMMED = ("bytes",)


def by_block(layers: Sequence[dict[str, Any]], fields: Iterable[str]) -> list[dict[str, Any]]:
    """``layers`` with one for the experts of each block, ``KEY.0-7``: of ``fields`` the mean, or what all have."""
    shown: list[dict[str, Any]] = []
    for name, group in groupby(layers, key=_block):
        own = list(group)
        if name is None or len(own) == 1:
            shown += own
            continue
        row: dict[str, Any] = {"key": f"{own[0]['key']}-{own[-1]['key'].rpartition('.')[2]}"}
        for field in fields:
            values = [layer[field] for layer in own if layer.get(field) is not None]
            if values:
                row[field] = _of_all(field, values)
        shown.append(row)
    return shown


def _block(layer: dict[str, Any]) -> str | None:
    found = _EXPERT.fullmatch(layer["key"])
    return None if found is None else found.group(1)


def _of_all(field: str, values: list[Any]) -> Any:
    if field not in _SUMMED and len(set(values)) == 1:
        return values[0]
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    total = sum(values)
    if field in _SUMMED:
        return total
    return round(total / len(values)) if isinstance(values[0], int) else total / len(values)
