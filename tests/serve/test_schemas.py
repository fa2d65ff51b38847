"""Answers of random JSON schemas: each ends, and is what its schema says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from serving import MODEL, Server, quantised
from transformers import AutoTokenizer

from torch_pi2.errors import ConfigError
from torch_pi2.serve.constraint import MOST_INTEGER, as_object

NAMES = ["name", "age", "tags", "a b", "x", "été", "id", 'q"uote', "$ref"]
PATTERNS = ["^[a-z]{1,4}$", "^(yes|no)!?$", "^[A-Z][0-9]{2}-[^\"']{1,2}$", "^\\d{3}$", "^(a|bc){1,3}$"]
FORMATS = ["date", "ipv4", "uuid"]  # of times jsonschema has a narrower idea than RFC 3339


def a_leaf(chosen: random.Random) -> dict[str, Any]:
    """Of values that end by themselves."""
    least = chosen.randrange(-50, 50)
    within = chosen.choice(
        [
            {"minimum": least, "maximum": least + chosen.randrange(200)},
            {"exclusiveMinimum": least, "exclusiveMaximum": least + 2 + chosen.randrange(9)},
            {"minimum": least, "maximum": least + 40, "multipleOf": chosen.choice([2, 5, 7])},
        ]
    )
    shortest = chosen.randrange(3)
    return chosen.choice(
        [
            {"type": "integer"} | within,
            {"type": "number", "minimum": least, "maximum": least + 9, "multipleOf": 0.25},
            {"type": "string", "minLength": shortest, "maxLength": shortest + chosen.randrange(5)},
            {"type": "string", "pattern": chosen.choice(PATTERNS)},
            {"type": "string", "format": chosen.choice(FORMATS)},
            {"type": "boolean"},
            {"type": ["boolean", "null"]},
            {"enum": chosen.sample(["red", "green", 'a "quoted" one', 3, -0.5, None, True, [1], {"a": "é"}], 3)},
            {"const": chosen.choice([0, "so\nit is", [], {"a": [None]}])},
        ]
    )


def a_schema(chosen: random.Random, leaves: int, shared: dict[str, Any]) -> dict[str, Any]:
    """Of at most so many leaves; what it refers to comes into ``shared``."""
    if leaves < 2:
        if chosen.random() < 0.15:
            shared[f"d{len(shared)}"] = a_leaf(chosen)
            return {"$ref": f"#/$defs/d{len(shared) - 1}"}
        return a_leaf(chosen)
    parts = chosen.randrange(2, 5)
    of = [a_schema(chosen, leaves // parts, shared) for _ in range(parts)]
    kind = chosen.choice(["object", "object", "array", "tuple", "any", "map"])
    if kind == "object":
        names = chosen.sample(NAMES, parts)
        required = [name for name in names if chosen.random() < 0.6]
        made = {"type": "object", "properties": dict(zip(names, of, strict=True)), "required": required}
        return made | {"additionalProperties": False}
    if kind == "array":
        least = chosen.randrange(parts)
        return {"type": "array", "items": of[0], "minItems": least, "maxItems": parts}
    if kind == "tuple":
        return {"type": "array", "prefixItems": of, "items": False, "minItems": chosen.randrange(parts)}
    if kind == "map":
        properties = {"of": of[0]}
        return {"type": "object", "properties": properties, "required": ["of"], "additionalProperties": False}
    return {"anyOf": of}


def whole(chosen: random.Random) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    made = a_schema(chosen, chosen.choice([1, 3, 5, 7]), shared)
    return made | ({"$defs": shared} if shared else {})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    server = Server(quantised(), tokenizer, max_tokens=1024)
    yield server.client()
    server.close()


def answers_are_valid(client: openai.OpenAI, count: int, seed: int) -> None:
    chosen = random.Random(seed)
    schemas = [whole(chosen) for _ in range(count)]

    def ask(schema: dict[str, Any]) -> Any:
        wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
        messages = [{"role": "user", "content": "JSON"}]
        made = client.chat.completions.create(model="tiny", messages=messages, response_format=wanted, seed=seed)
        return made.choices[0]

    kinds = set()
    with ThreadPoolExecutor(4) as pool:
        for schema, choice in zip(schemas, pool.map(ask, schemas), strict=True):
            assert choice.finish_reason == "stop", schema
            found = json.loads(choice.message.content)
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(found)
            kinds.add(type(found))
    assert len(kinds) > 3


#: What llguidance's native code ends the process for, or follows to something else, and what is said.
REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum -9.22337e+18, below"),
    ({"type": "integer", "minimum": -(10**26), "maximum": -(10**25)}, "maximum -1e+25, below"),
    ({"type": "integer", "minimum": 10**30}, "minimum 1e+30, above"),
    ({"items": [{"exclusiveMinimum": 2**53}]}, "exclusiveMinimum 9.0072e+15, above"),
    ({"enum": [1, [{"a": 2**53}]]}, "the value 9.0072e+15, beyond 2"),
    ({"properties": {"const": {"const": -(10**20)}}}, "the value -1e+20, beyond 2"),
    ({"type": "object", "minProperties": 2, "required": ["a"]}, "minProperties 2 beyond what is required"),
    (
        {"$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": {}}, "$ref": "#/$defs/0"},
        "5001",
    ),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, schema: Any, message: str) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "JSON"}]}
    with pytest.raises(openai.BadRequestError, match=f"that can be followed, found .*{re.escape(message)}"):
        client.chat.completions.create(**asked, response_format=wanted)
    wanted["json_schema"]["schema"] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    made = client.chat.completions.create(**asked, response_format=wanted, max_tokens=60)
    assert abs(int(made.choices[0].message.content or "")) < 2**53


def test_schemas_are_changed_where_numbers_bound_and_nowhere_else() -> None:
    schema = {"properties": {"minimum": {"maximum": 2**70}, "enum": {"minimum": 3}}, "default": 2**70, "title": "x"}
    wanted = schema | {"properties": {"minimum": {"maximum": MOST_INTEGER}, "enum": {"minimum": 3}}}
    assert as_object(schema, "it") == wanted
    assert (as_object(True, "it"), as_object(False, "it")) == ({}, {"not": {}})
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ConfigError, match="too deep in each other"):
        as_object(deep, "it")


def test_answers_of_schemas(client: openai.OpenAI) -> None:
    answers_are_valid(client, 40, seed=1)
