"""JSON schemas of requests as llguidance is to be given them, whose native code takes some numbers and depths badly."""

from __future__ import annotations

from typing import Any

from torch_pi2.errors import ConfigError

#: Integers up to this are the same to whatever reads JSON (RFC 8259, section 6).
MOST_INTEGER = (1 << 53) - 1
#: Of different ``$ref``: each may lead to the next, and is followed by a call within a call.
MOST_REFERENCES = 500
#: Keywords whose values name schemas, are values, and are bounds of numbers.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const"}
_LEAST, _MOST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}


def as_object(schema: dict[str, Any] | bool, what: str) -> dict[str, Any]:
    """``schema``, or one that allows no more: ``true`` is anything, ``false`` nothing, bounds are of safe integers.

    Args:
        what: asks for it, as errors name it.

    Raises:
        ConfigError: it has what an answer could not be held to.
    """
    if not isinstance(schema, dict):
        return {} if schema else {"not": {}}
    references = set[str]()
    try:
        made: dict[str, Any] = _taken(schema, references)
    except _Refused as error:
        raise refused(what, str(error)) from error
    except RecursionError as error:
        raise refused(what, "schemas that are too deep in each other") from error
    if len(references) > MOST_REFERENCES:
        raise refused(what, f"{len(references)} different $ref, of which at most {MOST_REFERENCES} are followed")
    return made


def refused(what: str, found: str) -> ConfigError:
    return ConfigError(what, expected="a JSON schema that can be followed", found=found, fix="Correct the schema.")


class _Refused(Exception):
    pass


def _taken(schema: Any, references: set[str]) -> Any:
    if isinstance(schema, list):
        return [_taken(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise _Refused(f"minProperties {least} beyond what is required, which a name that comes twice would count for")
    if isinstance(schema.get("$ref"), str):
        references.add(schema["$ref"])
    return {key: _of_keyword(key, value, references) for key, value in schema.items()}


def _of_keyword(key: str, value: Any, references: set[str]) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _taken(part, references) for name, part in value.items()}
    if key in _VALUES:
        _check_integers(value)
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key in _LEAST:
            if value > MOST_INTEGER:
                raise _Refused(f"{key} {value:g}, above 2^53 - 1")
            return max(value, -MOST_INTEGER)
        if key in _MOST:
            if value < -MOST_INTEGER:
                raise _Refused(f"{key} {value:g}, below -(2^53 - 1)")
            return min(value, MOST_INTEGER)
    return _taken(value, references)


def _check_integers(value: Any) -> None:
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    for part in parts:
        _check_integers(part)
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise _Refused(f"the value {value:g}, beyond 2^53 - 1, which would be rounded")
