"""Answers of random JSON schemas: each ends, and is what its schema says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from serving import MODEL, Server, quantised
from transformers import AutoTokenizer

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


def test_answers_of_schemas(client: openai.OpenAI) -> None:
    answers_are_valid(client, 40, seed=1)


@pytest.mark.slow
def test_answers_of_a_thousand_schemas(client: openai.OpenAI) -> None:
    answers_are_valid(client, 1000, seed=2)
