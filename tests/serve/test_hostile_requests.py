"""Requests that nobody should send: none is answered with 500, and each refusal has OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatFields
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionFields
from serving import MODEL, Server, quantised
from transformers import AutoTokenizer

SERVING = Path(__file__).parents[2] / "docs" / "SERVING.md"
FIELDS = {
    "/v1/completions": sorted(CompletionFields.__annotations__),
    "/v1/chat/completions": sorted(ChatFields.__annotations__),
}
# JSON as Python reads it, with what JSON has not: NaN, and halves of surrogate pairs
LETTERS = st.characters(codec=None, categories=None)
WORDS = st.sampled_from(["", "x", "type", "text", "function", "json_schema", "schema", "required", "auto", "name"])
TEXTS = st.text(LETTERS, max_size=8) | WORDS
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40])
JSON = {"Content-Type": "application/json"}
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda of: st.lists(of, max_size=4) | st.dictionaries(TEXTS, of, max_size=4),
    max_leaves=12,
)
SCHEMAS = st.recursive(
    st.sampled_from([True, {}, {"type": "integer"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}])
    | VALUES,
    lambda of: st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array", "string", 3])},
        optional={"properties": st.dictionaries(TEXTS, of, max_size=3), "items": of, "anyOf": st.lists(of, max_size=2)},
    ),
    max_leaves=6,
)
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.just("x") | st.lists(st.integers(-2, 3000), max_size=4) | TEXTS,
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"]),
                "content": VALUES | TEXTS,
            },
            optional={"tool_calls": VALUES, "tool_call_id": TEXTS, "name": VALUES},
        ),
        max_size=3,
    ),
    "tools": st.lists(
        st.builds(
            lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}, TEXTS, SCHEMAS
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "response_format": st.builds(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, SCHEMAS),
    "logit_bias": st.dictionaries(st.integers(-1, 3000).map(str), st.floats(-101, 101), max_size=3),
    "n": st.integers(0, 3),
    "temperature": st.floats(-0.5, 2.5),
    "frequency_penalty": st.floats(-2.5, 2.5),
    "seed": st.integers(),
    "stop": TEXTS | st.lists(TEXTS, max_size=5),
}


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Requests that are right but for a few fields."""
    right: dict[str, Any] = {"model": "tiny", "max_tokens": 3}
    right |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    field = st.sampled_from(FIELDS[path]).flatmap(
        lambda name: st.tuples(st.just(name), NEAR[name] | VALUES if name in NEAR else VALUES)
    )
    # without a bound an answer may take what room there is
    changes = st.lists(field, max_size=4).map(dict).map(lambda made: made | {"max_completion_tokens": 3})
    return changes.map(lambda made: right | made) | VALUES


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    tokenizer.chat_template = (
        '{% for t in tools or [] %}{{ t | tojson }}<tool_call>{"name": <name>, "arguments": <object>}{% endfor %}'
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    )
    made = Server(quantised(), tokenizer, max_tokens=64)
    yield made
    made.close()


def is_an_answer(answer: httpx.Response) -> None:
    """Of OpenAI's form, whether it is one, a stream or an error."""
    assert answer.status_code in (200, 400, 404, 405, 413), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events.pop() == "[DONE]", answer.text
        assert all("choices" in json.loads(event) for event in events)
    else:
        assert answer.json()["choices"]


@pytest.mark.slow
@pytest.mark.parametrize("path", list(FIELDS))
def test_any_body_is_answered_or_refused(server: Server, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60, headers=JSON) as http:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies(path))
        def holds(body: Any) -> None:
            is_an_answer(http.post(path, content=json.dumps(body).encode()))

        holds()
    assert server.batch.state() == {"live": 0, "waiting": 0}


def test_any_bytes_paths_and_methods_are_refused(server: Server) -> None:
    deep = b"[" * 100_000
    with httpx.Client(base_url=server.url, timeout=60, headers=JSON) as http:
        for path in FIELDS:
            for body in (b"", b"\xff\xfe", b"{" * 9, deep, b'{"model": "tiny", "prompt": ' + deep, b"null", b"NaN"):
                answer = http.post(path, content=body)
                is_an_answer(answer)
                assert answer.status_code == 400
            answer = http.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
            assert "Content-Type: application/json" in answer.json()["error"]["message"]
            for method in ("GET", "PUT", "DELETE", "PATCH"):
                answer = http.request(method, path)
                is_an_answer(answer)
                assert answer.status_code == 405
        for depth in range(50, 1050, 50):
            body = b'{"model": "tiny", "max_tokens": 1, "prompt": "x", "user": ' + b"[" * depth + b"]" * depth + b"}"
            is_an_answer(http.post("/v1/completions", content=body))
        for path in ("/v1", "/v1/models/other", "/v1/models/%00", "/v1/models/a/b", "/v1/nothing", "/%ff"):
            answer = http.get(path)
            is_an_answer(answer)
            assert answer.status_code == 404
        assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", list(FIELDS))
def test_every_field_of_the_client_is_in_the_table(path: str) -> None:
    column = ["/v1/chat/completions", "/v1/completions"].index(path) + 1
    rows = [line.strip("|").split("|") for line in SERVING.read_text().splitlines() if line.startswith("| `")]
    told = {field for row in rows if len(row) == 3 and row[column].strip() for field in re.findall(r"`(\w+)`", row[0])}
    assert set(FIELDS[path]) <= told, set(FIELDS[path]) - told


@pytest.mark.parametrize("path", list(FIELDS))
def test_what_the_table_says_is_refused_or_ignored(server: Server, path: str) -> None:
    column = ["/v1/chat/completions", "/v1/completions"].index(path) + 1
    rows = [line.strip("|").split("|") for line in SERVING.read_text().splitlines() if line.startswith("| `")]
    right: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    right |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    seen = set()
    for row in (row for row in rows if len(row) == 3):
        what = row[column].strip().split(":")[0]
        for field in re.findall(r"`(\w+)`", row[0]) if what in ("refused", "ignored") else []:
            if field != "medium":
                answer = httpx.post(f"{server.url}{path}", json=right | {field: {"some": "thing"}})
                assert answer.status_code == (200 if what == "ignored" else 400), (field, answer.text)
                seen.add(what)
    assert seen == {"refused", "ignored"}
