"""Frozen dataclasses as JSON and back, every field checked: what a file says is what its types and limits allow."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from torch_pi2.base.fields import MISSING, MOST, Field

_FIX = "Measure again with `torch-pi2 doctor --measure`, or correct the file; its format is in docs/HARDWARE.md."

T = TypeVar("T")


def limited(least: float = 0.0, most: float = MOST, *, above: bool = False, default: Any = MISSING) -> Any:
    """A dataclass field for a number of ``least`` to ``most``; ``above``: more than ``least``."""
    metadata = {"least": least, "most": most, "above": above}
    return field(metadata=metadata) if default is MISSING else field(metadata=metadata, default=default)


def later(default: Any) -> Any:
    """A dataclass field that files of before have not."""
    return field(metadata={"later": True}, default=default)


def to_plain(value: Any) -> Any:
    """What ``json.dumps`` takes of a dataclass; fields whose names begin with ``_`` are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(kind: type[T], value: Any, path: str, fix: str = _FIX) -> T:
    """Inverse of :func:`to_plain`; ``path`` leads to the value, and ``fix`` says what to do, for messages.

    Raises:
        ArtifactError: a field is missing, unknown, or not what it has to be.
    """
    return _made(kind, Field(value, path, fix))


def wrong(path: str, expected: str, found: object) -> NoReturn:
    """Raises ArtifactError about the part of a file to which ``path`` leads."""
    Field(MISSING if found is None else found, path, _FIX).wrong(expected)


def _made(kind: type[T], found: Field) -> T:
    known, hints = _fields(kind), typing.get_type_hints(kind)
    newer = [f.name for f in known if f.metadata.get("later")]
    there = found.names([f.name for f in known if f.name not in newer], newer)
    return kind(**{f.name: _value(hints[f.name], found.at(f.name), f.metadata) for f in known if f.name in there})


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in fields(kind) if not f.name.startswith("_")]


def _value(hint: Any, found: Field, limits: Mapping[str, Any]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        return None if found.value is None else _value(arguments[0], found, limits)
    if origin is tuple:
        return tuple(_value(arguments[0], item, limits) for item in found.items())
    if origin is not None:  # Mapping[str, X]
        return {key: _value(arguments[1], item, limits) for key, item in found.each().items()}
    if is_dataclass(hint):
        return _made(typing.cast(type, hint), found)
    if hint is str:
        return found.text(empty=True)
    if hint is bool:
        return found.flag()
    least, most, above = limits.get("least", 0.0), limits.get("most", MOST), limits.get("above", False)
    if hint is float:
        return found.number(least, most, above=above)
    return found.whole(int(least), int(most))
