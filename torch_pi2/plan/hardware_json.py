"""Frozen dataclasses as JSON and back, every field checked: what a file says is what its types and limits allow."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from torch_pi2.errors import ArtifactError

_FIX = "Measure again with `torch-pi2 doctor --measure`, or correct the file; its format is in docs/HARDWARE.md."
_MOST = 1e15  # sums and products of a few such numbers are finite
_SHOWN = 60

T = TypeVar("T")


def limited(least: float = 0.0, most: float = _MOST, *, above: bool = False, default: Any = MISSING) -> Any:
    """A dataclass field for a number of ``least`` to ``most``; ``above``: more than ``least``."""
    metadata = {"least": least, "most": most, "above": above}
    return field(metadata=metadata) if default is MISSING else field(metadata=metadata, default=default)


def to_plain(value: Any) -> Any:
    """What ``json.dumps`` takes of a dataclass; fields whose names begin with ``_`` are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(kind: type[T], value: Any, path: str) -> T:
    """Inverse of :func:`to_plain`; ``path`` leads to the value, for messages.

    Raises:
        ArtifactError: a field is missing, unknown, or not what it has to be.
    """
    if not isinstance(value, dict):
        wrong(path, "an object", value)
    known, hints = _fields(kind), typing.get_type_hints(kind)
    names = [f.name for f in known]
    if missing := [name for name in names if name not in value]:
        wrong(path, f"a field {missing[0]}", None)
    if unknown := [name for name in value if name not in names]:
        wrong(path, f"no other fields than {', '.join(names)}", str(unknown[0]))
    made: T = kind(**{f.name: _value(hints[f.name], value[f.name], f"{path}, {f.name}", f.metadata) for f in known})
    return made


def wrong(path: str, expected: str, found: object) -> NoReturn:
    """Raises ArtifactError about the part of a file to which ``path`` leads."""
    text = "none" if found is None else repr(found)
    raise ArtifactError(path, expected=expected, found=text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...", fix=_FIX)


def _fields(kind: Any) -> list[Field[Any]]:
    return [f for f in fields(kind) if not f.name.startswith("_")]


def _value(hint: Any, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        return None if value is None else _value(arguments[0], value, path, limits)
    if origin is tuple:
        if not isinstance(value, list):
            wrong(path, "a list", value)
        return tuple(_value(arguments[0], item, f"{path}, {i}", limits) for i, item in enumerate(value))
    if origin is not None:  # Mapping[str, X]
        if not isinstance(value, dict):
            wrong(path, "an object", value)
        return {key: _value(arguments[1], item, f"{path}, {key}", limits) for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, path)
    if hint in (float, int):
        return _number(hint, value, path, limits)
    if not isinstance(value, hint):
        wrong(path, {str: "text", bool: "true or false"}[hint], value)
    return value


def _number(hint: type, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
    least, most, above = limits.get("least", 0.0), limits.get("most", _MOST), limits.get("above", False)
    good = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not (least < value if above else least <= value) or value > most:
        name = "a whole number" if hint is int else "a number"
        wrong(path, f"{name} {'above' if above else 'of at least'} {least:g} and at most {most:g}", value)
    return hint(value)
