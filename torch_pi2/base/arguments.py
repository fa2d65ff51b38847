"""``checked``: arguments of public functions have the types that their annotations say, or are refused by name."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from torch_pi2.base.fields import check, shown
from torch_pi2.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose arguments are compared with its annotations first. Wrong ones raise ConfigError."""

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
    fix = f"See help(torch_pi2.{name})."
    unknown = next((keyword for keyword in kwargs if keyword not in known), None)
    if unknown is None:
        return ConfigError(f"{name}()", expected=f"arguments of {', '.join(known)}", found=found, fix=fix)
    near = difflib.get_close_matches(unknown, known, 1)
    fix = f"Did you mean {near[0]}?" if near else fix
    return ConfigError(f"{name}({unknown}=...)", expected=f"one of {', '.join(known)}", found=shown(unknown), fix=fix)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """With annotations as types, ``Any`` where there is nothing to compare, and ``**fields`` taken apart.

    A ``**fields: Unpack[SomeTypedDict]`` becomes a keyword for each entry. Names that only type checkers import are
    ``Any``.
    """
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.kind
        try:
            hint = eval(parameter.annotation, scope) if isinstance(parameter.annotation, str) else Any
        except NameError:
            hint = Any
        if kind is kind.VAR_KEYWORD and str(parameter.annotation).startswith("Unpack["):
            entries = typing.get_type_hints(typing.get_args(hint)[0])
            parameters += [
                inspect.Parameter(n, kind.KEYWORD_ONLY, default=None, annotation=h) for n, h in entries.items()
            ]
        else:
            variable = kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            parameters.append(parameter.replace(annotation=Any if variable else hint))
    return inspect.Signature(parameters)
