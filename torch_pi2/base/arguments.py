"""What callers pass to public functions has the types that the functions say, or is refused by name."""

from __future__ import annotations

import difflib
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch_pi2.base.fields import shown
from torch_pi2.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number", type(None): "None"}
#: Whole numbers as the core and PyTorch's generators have them.
_MOST_WHOLE: Any = 1 << 62
_MOST_NUMBER: Any = 1e300
#: What is expected in place of a larger one.
_SMALLER = {int: "a whole number between -2^62 and 2^62", float: "a number between -1e300 and 1e300"}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose arguments are compared with its annotations first. Wrong ones raise ConfigError."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_call(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def check_fields(made: Any) -> None:
    """Of a dataclass, in its ``__post_init__``. Raises ConfigError: a field is not what its annotation says."""
    hints = _hints(type(made).__init__)
    for field in fields(made):
        if field.init:
            _check(hints[field.name], getattr(made, field.name), f"{type(made).__name__}.{field.name}")


def check_values(made: Any, checks: Iterable[tuple[str, bool, str]], called: str, fix: str) -> None:
    """Of a dataclass, in its ``__post_init__``. Raises ConfigError: a field is not good.

    Args:
        checks: name of a field, whether it is good, what is expected. called: what messages call a field, with ``{}``
            for its name.
    """
    for name, good, expected in checks:
        if not good:
            raise ConfigError(called.format(name), expected=expected, found=repr(getattr(made, name)), fix=fix)


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature, name = inspect.signature(function), function.__qualname__.removesuffix(".__init__")
    fields = _fields(function)
    _check_names(name, signature, fields, kwargs)
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise _wrong_call(name, signature, str(error)) from error
    hints = _hints(function)
    for argument, value in given.items():
        if argument in hints:
            _check(hints[argument], value, f"{name}({argument})")
    for field, hint in fields.items():
        if field in kwargs:
            _check(hint, kwargs[field], f"{name}({field})")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _wrong_call(name, signature, str(error)) from error


def _wrong_call(name: str, signature: inspect.Signature, found: str) -> ConfigError:
    wanted = ", ".join(p.name for p in signature.parameters.values() if p.default is p.empty and p.name != "self")
    return ConfigError(f"{name}()", expected=f"arguments {wanted}", found=found, fix=f"See help(torch_pi2.{name}).")


def _check_names(name: str, signature: inspect.Signature, fields: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for a keyword that the function does not have, with the one that may have been meant."""
    parameters = signature.parameters.values()
    if not fields and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return  # whatever it is given
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [*(p.name for p in parameters if p.kind in named and p.name != "self"), *fields]
    for keyword in kwargs:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, 1)
            raise ConfigError(
                f"{name}({keyword}=...)",
                expected=f"one of {', '.join(known)}",
                found=shown(keyword),
                fix=f"Did you mean {near[0]}?" if near else f"See help(torch_pi2.{name}).",
            )


@cache
def _fields(function: Callable[..., Any]) -> dict[str, Any]:
    """By name: the annotations of what ``**fields: Unpack[SomeTypedDict]`` takes; nothing without such."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and str(parameter.annotation).startswith("Unpack["):
            (fields,) = typing.get_args(eval(parameter.annotation, scope))
            return typing.get_type_hints(fields)
    return {}


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """By argument: its annotation. Names that only type checkers import, and ``*args``, are left out."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "self":
            continue
        try:
            found[parameter.name] = eval(parameter.annotation, scope)
        except NameError:
            found[parameter.name] = Any
    return found


def _check(hint: Any, value: Any, name: str) -> None:
    kinds = _kinds(hint)
    if not any(_is(kind, value) for kind in kinds):
        words = _WORDS | (_SMALLER if isinstance(value, numbers.Real) and abs(value) >= _MOST_WHOLE else {})
        expected = " or ".join(dict.fromkeys(words.get(kind) or f"a {kind.__name__}" for kind in kinds))
        if str in kinds and Path in kinds:
            expected = expected.replace("text or a Path", "the name of a file or folder")
        raise ConfigError(name, expected=expected, found=shown(value), fix="Correct it.")
    for part in _alternatives(hint):
        if isinstance(value, Mapping) and typing.get_origin(part) is Mapping:
            for key, element in value.items():
                _check(typing.get_args(part)[1], element, f"{name}[{shown(key)}]")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows; ``object`` for what cannot be compared."""
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
