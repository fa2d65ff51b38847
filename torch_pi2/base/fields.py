"""``Field``: a value out of a file or from a caller, taken only as what it has to be: type, range, finiteness."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error

#: Numbers of at most this: sums and products of a few such are finite, and whole ones are exact as floats.
MOST = 1e15
#: What is not there; None may be.
MISSING: Any = object()


class _Short(reprlib.Repr):
    """Long texts and lists are cut, and what is no JSON is told by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxdict = self.maxtuple = 8
        self.maxstring = self.maxother = 80
        self.maxlong = 60
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**400 else f"a number of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if x is MISSING or x is None:
            return "none" if x is MISSING else "None"
        return repr(x) if isinstance(x, bool | float | Path) else f"a {type(x).__name__}"


_SHORT = _Short()


def shown(value: object) -> str:
    """``value`` in a message: short whatever it is."""
    return _SHORT.repr(value)


class Field:
    """A value, and the ``path`` that leads to it in messages.

    Every method gives the value as what it is named for, or raises ``error``.
    """

    def __init__(self, value: Any, path: str, fix: str, error: type[Pi2Error] = ArtifactError) -> None:
        self.value, self.path, self.fix, self.error = value, path, fix, error

    def wrong(self, expected: str, found: object = MISSING) -> NoReturn:
        """Raises ``error``; ``found``: instead of the value, in words if it is text."""
        said = shown(self.value) if found is MISSING else found if isinstance(found, str) else shown(found)
        raise self.error(self.path, expected=expected, found=said, fix=self.fix)

    def names(self, needed: Iterable[str] = (), allowed: Iterable[str] | None = ()) -> dict[str, Any]:
        """An object with the fields ``needed``, and no others than ``allowed`` (None: any)."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
        needed = list(needed)
        if missing := [name for name in needed if name not in self.value]:
            self.wrong(f"a field {missing[0]}", "none")
        if allowed is not None:
            known = [*needed, *allowed]
            if unknown := [name for name in self.value if name not in known]:
                self.wrong(f"no other fields than {', '.join(known)}", shown(unknown[0]))
        return self.value

    def at(self, name: str | int, default: Any = MISSING) -> Field:
        """A field of an object, or an element of a list, that is known to be one; ``default`` if it is not there."""
        if isinstance(name, str) and default is not MISSING:
            value = self.names(allowed=None).get(name, default)
        elif isinstance(name, str):
            value = self.names([name], None)[name]
        else:
            value = self.value[name]
        return Field(value, f"{self.path}, {name}", self.fix, self.error)

    def each(self) -> dict[str, Field]:
        """The fields of an object, whatever their names."""
        return {name: self.at(name) for name in self.names(allowed=None)}

    def items(self, least: int = 0, most: float = math.inf) -> list[Field]:
        """The elements of a list of ``least`` to ``most``."""
        if not isinstance(self.value, list | tuple) or not least <= len(self.value) <= most:
            many = f"{least}" if least == most else _range(least, most)
            self.wrong("a list" + (f" of {many}" if least or most < math.inf else ""))
        return [self.at(i) for i in range(len(self.value))]

    def text(self, choices: Collection[str] | None = None, *, empty: bool = False) -> str:
        """Text that can be written as UTF-8, of ``choices`` if there are such; not blank unless ``empty``."""
        good = isinstance(self.value, str) and (empty or bool(self.value.strip()))
        if not good or (choices is not None and self.value not in choices):
            self.wrong("text" if choices is None else " or ".join(choices))
        if not self.value.isascii() and any("\ud800" <= c <= "\udfff" for c in self.value):
            self.wrong("text", "half a character (a lone surrogate)")
        return str(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.wrong("true or false")
        return self.value

    def whole(self, least: int = 0, most: int = int(MOST)) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not least <= self.value <= most:
            self.wrong(f"a whole number, {_range(least, most, said=self._too_large(most))}")
        return int(self.value)

    def number(self, least: float = 0, most: float = MOST, *, above: bool = False) -> float:
        """A finite number of ``least`` to ``most``; ``above``: more than ``least``."""
        good = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not good or not (least < self.value if above else least <= self.value) or not self.value <= most:
            self.wrong(f"a number, {_range(least, most, above, self._too_large(most))}")
        return float(self.value)

    def _too_large(self, most: float) -> bool:
        return isinstance(self.value, int | float) and most < self.value < math.inf

    def path_name(self) -> Path:
        """The name of a file or folder, which may or may not be there."""
        if not isinstance(self.value, str | os.PathLike) or not str(self.value) or "\0" in str(self.value):
            self.wrong("the name of a file or folder")
        return Path(self.value)


def _range(least: float, most: float, above: bool = False, said: bool = False) -> str:
    """``said``: whether ``most`` is, even if hardly anybody has more."""
    low = f"above {_plain(least)}" if above else f"{_plain(least)} or more"
    return low if most >= MOST and not said else f"{low}, at most {_plain(most)}"


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def argument(value: Any, name: str, fix: str = "Correct it.") -> Field:
    """What a caller passed as ``name``; wrong ones are a ConfigError."""
    return Field(value, name, fix, ConfigError)
