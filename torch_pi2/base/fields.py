"""Validation of values from files and from callers: type, range and finiteness.

* :func:`checked` checks the arguments of a public function against its annotations.
* :class:`Field` is one value with its path, and has a method for each kind of value.
* :func:`from_json` reads a dataclass from parsed JSON by its annotations; :func:`to_json` is its inverse.
* :func:`check_fields` and :func:`check` check callers' values against annotations.

``limited`` gives a dataclass field a range or choices; ``Annotated[int, Limits(1)]`` does so for files.
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error

T = TypeVar("T")

#: Largest number in a file: sums and products of a few are finite, and integers are exact as floats.
MOST = 1e15
#: A missing value (None may be a value).
MISSING: Any = object()
#: Largest numbers from callers; for integers a limit of the core and of PyTorch's generators.
_MOST_WHOLE: Any = 1 << 62
_MOST_NUMBER: Any = 1e300
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number", type(None): "None"}
#: Expectation in messages about larger numbers.
_SMALLER = {int: "a whole number between -2^62 and 2^62", float: "a number between -1e300 and 1e300"}


class _Short(reprlib.Repr):
    """Truncates long texts and lists; values that are not JSON are described by their type."""

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
    """A short form of ``value`` for messages."""
    return _SHORT.repr(value)


@dataclass(frozen=True)
class Limits:
    """Range of a number (``above``, ``below``: exclusive ends), choices of a text, and whether files may omit it."""

    least: float = 0.0
    most: float = MOST
    above: bool = False
    below: bool = False
    choices: Collection[str] | None = None
    optional: bool = False


_NO_LIMITS = Limits()


def limited(least: float = 0.0, most: float = MOST, **more: Any) -> Any:
    """A dataclass field with :class:`Limits`; ``more``: of these, or of ``dataclasses.field``, such as ``default``."""
    own = {one.name: more.pop(one.name) for one in fields(Limits) if one.name in more}
    return field(metadata={"limits": Limits(least, most, **own)}, **more)


def optional(default: Any) -> Any:
    """A dataclass field that files of older versions lack."""
    return limited(optional=True, default=default)


class Field:
    """A value, and the ``path`` to it for messages. Methods return the value as a certain kind, or raise ``error``."""

    def __init__(self, value: Any, path: str, fix: str, error: type[Pi2Error] = ArtifactError) -> None:
        self.value, self.path, self.fix, self.error = value, path, fix, error

    def wrong(self, expected: str, found: object = MISSING) -> NoReturn:
        """Raises ``error``; ``found`` replaces the value in the message."""
        words = shown(self.value) if found is MISSING else found if isinstance(found, str) else shown(found)
        raise self.error(self.path, expected=expected, found=words, fix=self.fix)

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

    def at(self, name: str | int, default: Any = MISSING) -> "Field":
        """A field of an object, or an element of a list; ``default`` if the field is missing."""
        if isinstance(name, str) and default is not MISSING:
            value = self.names(allowed=None).get(name, default)
        elif isinstance(name, str):
            value = self.names([name], None)[name]
        else:
            value = self.value[name]
        return Field(value, f"{self.path}, {name}", self.fix, self.error)

    def each(self) -> "dict[str, Field]":
        """All fields of an object."""
        return {name: self.at(name) for name in self.names(allowed=None)}

    def items(self, least: int = 0, most: float = math.inf) -> "list[Field]":
        """The elements of a list of ``least`` to ``most``."""
        if not isinstance(self.value, list | tuple) or not least <= len(self.value) <= most:
            many = f"{least}" if least == most else _range(Limits(least, most))
            self.wrong("a list" + (f" of {many}" if least or most < math.inf else ""))
        return [self.at(i) for i in range(len(self.value))]

    def text(self, choices: Collection[str] | None = None, *, empty: bool = False) -> str:
        """Text that is valid UTF-8, one of ``choices`` if given; not blank unless ``empty``."""
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
        if not _is_whole(self.value) or not least <= self.value <= most:
            self.wrong(f"a whole number, {_range(Limits(least, most), self.value)}")
        return int(self.value)

    def number(self, least: float = 0, most: float = MOST, *, above: bool = False, below: bool = False) -> float:
        """A finite number from ``least`` to ``most``; ``above``, ``below``: exclusive ends."""
        good = isinstance(self.value, numbers.Real) and not isinstance(self.value, bool)
        good = good and (least < self.value if above else least <= self.value)
        if not good or not (self.value < most if below else self.value <= most):
            self.wrong(f"a number, {_range(Limits(least, most, above, below), self.value)}")
        return float(self.value)

    def take(self, hint: Any, limits: Limits = _NO_LIMITS) -> Any:
        """The value converted by the annotation ``hint``: JSON objects become dataclasses, lists tuples."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):  # X | None
            return None if self.value is None else self.take(arguments[0], limits)
        if origin is typing.Annotated:  # [X, Limits]
            return self.take(arguments[0], arguments[1])
        if origin is tuple:
            return tuple(item.take(arguments[0], limits) for item in self.items())
        if origin is not None:  # Mapping[str, X]
            return {key: item.take(arguments[1], limits) for key, item in self.each().items()}
        if is_dataclass(hint):
            kind = typing.cast(type, hint)
            known, hints = _public_fields(kind), _hints(typing.cast(Any, kind))
            later = [f.name for f in known if _limits(f).optional]
            present = self.names([f.name for f in known if f.name not in later], later)
            return kind(**{f.name: self.at(f.name).take(hints[f.name], _limits(f)) for f in known if f.name in present})
        if hint is str:
            return self.text(limits.choices, empty=True)
        if hint is bool:
            return self.flag()
        if hint is float:
            return self.number(limits.least, limits.most, above=limits.above, below=limits.below)
        return self.whole(int(limits.least), int(limits.most)) if hint is int else self.value


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _range(limits: Limits, found: object = None) -> str:
    """In words; a large ``most`` is mentioned only if it was exceeded."""
    low = f"above {_plain(limits.least)}" if limits.above else f"{_plain(limits.least)} or more"
    exceeded = isinstance(found, int | float) and limits.most < found < math.inf
    if limits.most >= MOST and not exceeded:
        return low
    return f"{low}, {'below' if limits.below else 'at most'} {_plain(limits.most)}"


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def argument(value: Any, name: str, fix: str = "Correct it.") -> Field:
    """A caller's argument ``name``; a wrong value is a ConfigError."""
    return Field(value, name, fix, ConfigError)


def to_json(value: Any) -> Any:
    """A dataclass as ``json.dumps`` takes it, without fields whose names begin with ``_``."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in _public_fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple | list) else value


def from_json(kind: type[T], value: Any, path: str, fix: str = "Correct it, or make it again.") -> T:
    """Inverse of :func:`to_json`; ``path``, ``fix``: for messages. Raises ArtifactError: a missing or wrong field."""
    return Field(value, path, fix).take(kind)


def check_fields(made: Any, called: str = "") -> None:
    """For ``__post_init__``. Raises ConfigError: a field violates annotation or limits; ``called``: its name's form."""
    called = called or f"{type(made).__name__}.{{}}"
    hints = _hints(typing.cast(Any, type(made)))
    for one in fields(made):
        if one.init:
            check(hints[one.name], getattr(made, one.name), called.format(one.name), one.metadata)


def check(hint: Any, value: Any, name: str, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> None:
    """Raises ConfigError: the caller's argument ``name`` violates its annotation or limits."""
    kinds = _kinds(hint)
    if not any(_is(kind, value) for kind in kinds):
        words = _WORDS | (_SMALLER if isinstance(value, numbers.Real) and abs(value) >= _MOST_WHOLE else {})
        expected = " or ".join(dict.fromkeys(words.get(kind) or f"a {kind.__name__}" for kind in kinds))
        if str in kinds and Path in kinds:
            expected = expected.replace("text or a Path", "the name of a file or folder")
        argument(value, name).wrong(expected)
    if "limits" in metadata:
        argument(value, name).take(hint, metadata["limits"])
    for part in _alternatives(hint):
        if isinstance(value, Mapping) and typing.get_origin(part) is Mapping:
            for key, element in value.items():
                check(typing.get_args(part)[1], element, f"{name}[{shown(key)}]")


def _public_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in fields(kind) if not f.name.startswith("_")]


def _limits(one: dataclasses.Field[Any]) -> Limits:
    return typing.cast(Limits, one.metadata.get("limits", _NO_LIMITS))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows; ``object`` if they cannot be checked."""
    if hint is None:
        return (type(None),)
    if isinstance(hint, TypeVar):
        return _kinds(hint.__bound__ or Any)
    if len(parts := _alternatives(hint)) > 1:
        return tuple(kind for part in parts for kind in _kinds(part))
    kind = typing.get_origin(hint) or hint
    known = isinstance(kind, type) and kind is not Any
    if getattr(kind, "_is_protocol", False):
        known = getattr(kind, "_is_runtime_protocol", False)
    return (kind,) if known else (object,)


def _is(kind: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    if kind is int:
        return isinstance(value, numbers.Integral) and abs(int(value)) < _MOST_WHOLE
    if kind is float:
        return isinstance(value, numbers.Real) and -_MOST_NUMBER < value < _MOST_NUMBER
    if kind is Path:
        return isinstance(value, os.PathLike) and "\0" not in os.fspath(value)
    if kind is str:
        return isinstance(value, str) and "\0" not in value
    return isinstance(value, kind) and not (kind is Sequence and isinstance(value, str | bytes))


P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` with a check of its arguments against its annotations. Wrong ones raise ConfigError."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_call(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature, name = _signature(function), function.__qualname__.removesuffix(".__init__")
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise _wrong_call(name, [p for p in signature.parameters if p != "self"], kwargs, str(error)) from error
    for argument, value in given.items():
        if (hint := signature.parameters[argument].annotation) is not Any:
            check(hint, value, f"{name}({argument})")


def _wrong_call(name: str, known: list[str], kwargs: Mapping[str, Any], found: str) -> ConfigError:
    known, fix = [field for field in known if field[0] != "_"], f"See help(torch_pi2.{name})."
    unknown = next((keyword for keyword in kwargs if keyword not in known), None)
    if unknown is None:
        return ConfigError(f"{name}()", expected=f"arguments of {', '.join(known)}", found=found, fix=fix)
    near = difflib.get_close_matches(unknown, known, 1)
    fix = f"Did you mean {near[0]}?" if near else fix
    return ConfigError(f"{name}({unknown}=...)", expected=f"one of {', '.join(known)}", found=shown(unknown), fix=fix)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """With types as annotations (``Any``: not checked); ``**more: Annotated[Any, X]``: the fields of ``X``."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind, hint = parameter.kind, Any if parameter.annotation is parameter.empty else parameter.annotation
        try:
            hint = eval(hint, scope) if isinstance(hint, str) else hint
        except NameError:
            hint = Any
        if typing.get_origin(hint) is typing.Annotated:
            entries = _hints(typing.get_args(hint)[1]).items()
            parameters += [inspect.Parameter(n, kind.KEYWORD_ONLY, default=None, annotation=h) for n, h in entries]
        else:
            variable = kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            parameters.append(parameter.replace(annotation=Any if variable else hint))
    return inspect.Signature(parameters)
