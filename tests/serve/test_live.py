"""``/v1/live``: what it tells is what was done, and nothing is counted while nobody looks on."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, dense, quantised, tokenizer_of_example

import torch_pi2
from torch_pi2.errors import ConfigError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.watch import Watch
from torch_pi2.serve import app

Event = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(quantised(), tokenizer_of_example())
    yield made
    made.close()


def events(response: httpx.Response) -> Iterator[Event]:
    name = ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def ask(url: str, tokens: int = 60, model: str = "tiny") -> None:
    body = {"model": model, "prompt": "def main(", "max_tokens": tokens, "temperature": 0, "logit_bias": {"0": -100}}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def watched(url: str, work: Callable[[], None], **params: str) -> list[Event]:
    """What is told from before ``work`` until it is done."""
    found = []
    with httpx.stream("GET", f"{url}/v1/live", params=params, timeout=60) as response:
        assert response.status_code == 200
        worker = None
        for name, body in events(response):
            found.append((name, body))
            if name == "idle" and worker is None:
                worker = threading.Thread(target=work)
                worker.start()
            elif name == "idle" and worker is not None and not worker.is_alive():
                break
    return found


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)


def unwatched(model: Any) -> bool:
    try:
        with Watch(sparse_layers(model)):  # which there can be one of
            return True
    except ConfigError:
        return False


def test_it_tells_what_is_done(server: Server) -> None:
    (first, about), *told = watched(server.url, lambda: ask(server.url, 60), model="tiny")
    assert (first, about["model"], about["sparse"], about["store"], about["together"]) == (
        "model", "tiny", True, False, 1,
    )  # fmt: skip
    assert [layer["key"] for layer in about["layers"]] == [f"model.layers.{i}.mlp" for i in range(5)]
    figures = [body for name, body in told if name == "figures"]
    assert sum(body["answer_tokens"] for body in figures) == 60
    assert any(body["prompt"] for body in figures)
    assert all(body["prompt"]["ms"] > 0 for body in figures if body["prompt"])
    steps = [body["step"] for body in figures if body["step"]]
    assert 60 / 3 <= sum(step["rounds"] for step in steps) <= 60  # two drafts at most are accepted in each
    assert all(step["ms"] > 0 for step in steps)
    shares = [layer for body in figures for layer in body["layers"] if layer["tokens"]]
    assert shares
    assert all(0 < layer["fired_cold"] + layer["fired_hot"] < 1 for layer in shares)
    used = [body["ffn"]["rows_used"] for body in figures if body["ffn"]["rows_used"] is not None]
    assert used
    assert all(0 < share < 1 for share in used)
    assert told[-1][1]["live"] == told[-1][1]["waiting"] == 0


def test_nothing_is_counted_without_listeners(server: Server) -> None:
    model = server.model
    until(lambda: unwatched(model))
    with Watch(sparse_layers(model)):  # which there can be one of
        ask(server.url, 4)
    watched(server.url, lambda: ask(server.url, 4))
    until(lambda: unwatched(model))


def test_one_of_several_listeners_leaves(server: Server) -> None:
    with httpx.stream("GET", f"{server.url}/v1/live", timeout=60) as stays:
        told = events(stays)
        assert next(told)[0] == "model"
        watched(server.url, lambda: ask(server.url, 30), model="tiny")
        assert not unwatched(server.model)
        assert sum(body.get("answer_tokens", 0) for _, body in (next(told) for _ in range(3))) > 0
    until(lambda: unwatched(server.model))


def test_models_that_are_not_served_and_not_sparse(server: Server) -> None:
    refused = httpx.get(f"{server.url}/v1/live", params={"model": "other"})
    assert refused.status_code == 404
    assert "expected one of the models tiny, found other" in refused.json()["error"]["message"]
    plain = Server(dense(), tokenizer_of_example(None))
    try:
        (listed,) = httpx.get(f"{plain.url}/v1/models").json()["data"]
        assert (listed["chat"], listed["max_tokens"]) == (False, 256)
        (_, about), *told = watched(plain.url, lambda: ask(plain.url, 8))
        assert (about["sparse"], about["layers"], about["weights"]) == (False, [], "float")
        assert sum(body["answer_tokens"] for _, body in told) == 8
    finally:
        plain.close()


def test_a_store_tells_of_its_cache(tmp_path: Path) -> None:
    torch_pi2.save(quantised(), tmp_path / "m")
    torch_pi2.pack(tmp_path / "m", tmp_path / "packed")
    over = Server(torch_pi2.load(tmp_path / "packed", budget="64MiB", trust_remote_code=True), tokenizer_of_example())
    try:
        (_, about), *told = watched(over.url, lambda: ask(over.url, 30))
        assert about["store"]
        stores = [body["store"] for _, body in told]
        assert sum(store["wanted"] for store in stores) >= sum(store["hits"] for store in stores) > 0
        assert all(store["cache_bytes"] > 0 for store in stores)
    finally:
        over.close()


def test_keys_are_asked_for_by_all_but_the_page(server: Server) -> None:
    locked = Server(server.model, tokenizer_of_example(), api_key="secret")
    try:
        for path in (*app.page_files(), "/health"):
            assert httpx.get(f"{locked.url}{path}").status_code == 200
        for path in ("/v1/live", "/v1/models", "/metrics", "/page/other.js", "/page/../metrics", "/page/"):
            refused = httpx.get(f"{locked.url}{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError, match="expected the server's API key"):
            locked.client("wrong").models.list()
        assert locked.client("secret").models.list().data[0].id == "tiny"
        headers = {"Authorization": "Bearer secret"}
        with httpx.stream("GET", f"{locked.url}/v1/live", headers=headers, timeout=20) as response:
            assert next(events(response))[0] == "model"
    finally:
        locked.close()


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    assert {"/", "/page/page.js", "/page/style.css"} <= app.page_files().keys()
    for path, file in app.page_files().items():
        sent = httpx.get(f"{server.url}{path}")
        assert sent.content == file.read_bytes()
        policy = dict(part.split(" ", 1) for part in sent.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) <= {"'none'", "'self'", "'script'"}
        assert sent.headers["x-content-type-options"] == "nosniff"
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*$", "", text, flags=re.M))
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", text)
        assert not re.search(r"<script(?! type=\"module\" src)|<style|\son\w+=|\sstyle=", text)


def test_a_server_that_ends_does_not_wait_for_listeners(server: Server) -> None:
    ending = Server(server.model, tokenizer_of_example())
    with httpx.stream("GET", f"{ending.url}/v1/live", timeout=20) as response:
        told = events(response)
        assert next(told)[0] == "model"
        started = time.monotonic()
        ending.close()
        assert time.monotonic() - started < 15  # others have 30 seconds to end
        assert {name for name, _ in told} <= {"figures", "idle"}
