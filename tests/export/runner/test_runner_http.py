"""The C++ runner behind OpenAI's API, asked by OpenAI's own client: the tokens of the command line and of PyTorch."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
import tiny_bundle
import torch
from runner_calls import PROMPTS, refused, run
from runner_http import Server, client, served, until
from shared import shared_folder
from tiny_bundle import EOS, LANES, ROOM, Decode, Forward, TinyDecoder

from torch_pi2.export.run import Bundle
from torch_pi2.export.text import write_chat

LONG = 3000  # tokens of a sequence that is still answered when its client goes away


@pytest.fixture(scope="module")
def talking(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, with chat.json."""

    def make(folder: Path) -> None:
        shutil.copytree(bundle, folder)
        with Bundle(folder) as twin:
            assert write_chat(twin.tokenizer, folder)
        tiny_bundle.write_manifest(folder)

    return shared_folder(tmp_path_factory, "talking", make)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        with mock.patch.object(tiny_bundle, "ROOM", LONG), mock.patch.object(tiny_bundle, "EOS", 1):
            tiny_bundle.make_bundle(folder)
            tiny_bundle.write_manifest(folder)

    return shared_folder(tmp_path_factory, "long", make)


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking) as made:
        yield made


@pytest.fixture(scope="module")
def ask(server: Server) -> openai.OpenAI:
    return client(server)


def greedy(ids: list[int], tokens: int) -> list[int]:
    """What the model says in PyTorch."""
    model = TinyDecoder().eval()
    found: list[int] = []
    with torch.no_grad():
        logits = Forward(model)(torch.tensor([ids]), torch.tensor([0]))
        while True:
            found.append(int(logits.argmax()))
            if found[-1] == EOS or len(found) == tokens:
                return found
            logits = Decode(model, 1)(torch.tensor([[found[-1]]]), torch.tensor([[len(ids) + len(found) - 1]]))


def test_health_and_models(ask: openai.OpenAI, server: Server, talking: Path) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.first == f"{server.url}/v1, model {talking.name}\n"
    (listed,) = ask.models.list().data
    assert listed.id == talking.name == ask.models.retrieve(talking.name).id
    for unknown in (
        lambda: ask.models.retrieve("other"),
        lambda: ask.completions.create(model="other", prompt="d"),
    ):
        with pytest.raises(openai.NotFoundError, match=f"model: expected {talking.name}, found other") as told:
            unknown()
        assert told.value.code == "model_not_found"


def test_a_completion_is_that_of_the_command_line_and_of_pytorch(ask: openai.OpenAI, talking: Path) -> None:
    with Bundle(talking) as twin:
        for prompt in PROMPTS:
            made = ask.completions.create(model=talking.name, prompt=prompt, max_tokens=9)
            alone = run(talking, "--prompt", prompt, "--max-new-tokens", 9)
            ids = twin.tokenizer(prompt)["input_ids"]
            wanted = greedy(ids, 9)
            assert wanted == alone["sequences"][0]["ids"]
            assert made.choices[0].text == alone["sequences"][0]["text"] == twin.generate(prompt, 9).text
            assert made.choices[0].finish_reason == {"length": "length", "eos": "stop"}[alone["sequences"][0]["ended"]]
            assert made.usage is not None
            assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), len(wanted))
            by_ids = ask.completions.create(model=talking.name, prompt=ids, max_tokens=9)
            assert by_ids.choices[0].text == made.choices[0].text
        several = ask.completions.create(model=talking.name, prompt=PROMPTS, max_tokens=5)
        assert [one.text for one in several.choices] == [twin.generate(prompt, 5).text for prompt in PROMPTS]
        room = ask.completions.create(model=talking.name, prompt="def")
        assert room.choices[0].text == twin.generate("def", ROOM).text


def test_a_stream_is_the_same_text(ask: openai.OpenAI, talking: Path) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask.completions.create(model=talking.name, prompt=PROMPTS[1], max_tokens=9, **options)
    alone = run(talking, "--prompt", PROMPTS[1], "--max-new-tokens", 9)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone["sequences"][0]["text"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len(chunks) > 4
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert last.choices == []
    assert last.usage.completion_tokens == len(alone["sequences"][0]["ids"])


def test_a_talk_of_two_turns_reads_what_is_new(ask: openai.OpenAI, talking: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}]
    with Bundle(talking) as twin:
        for turn in range(2):
            wanted = twin.generate(messages, 2)
            made = ask.chat.completions.create(model=talking.name, messages=messages, max_completion_tokens=2)
            assert made.choices[0].message.role == "assistant"
            assert made.choices[0].message.content == wanted.text
            assert made.usage is not None
            assert made.usage.prompt_tokens_details is not None
            assert bool(made.usage.prompt_tokens_details.cached_tokens) == (turn > 0)
            messages += [{"role": "assistant", "content": wanted.text}, {"role": "user", "content": "b"}]
    parts = [{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]
    said = ask.chat.completions.create(model=talking.name, messages=parts, max_tokens=3)  # type: ignore[arg-type]
    alone = run(talking, "--chat", "--system", "x", "--prompt", "aa", "--max-new-tokens", 3)
    assert said.choices[0].message.content == alone["sequences"][0]["text"]


def test_a_chat_is_streamed_for_the_clients_own_reader(ask: openai.OpenAI, talking: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    whole = run(talking, "--chat", "--prompt", "ab", "--max-new-tokens", 12)["sequences"][0]["text"]
    chunks = list(ask.chat.completions.create(model=talking.name, messages=messages, max_tokens=12, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"
    stop = whole[3:5]
    with ask.chat.completions.stream(model=talking.name, messages=messages, max_tokens=12, stop=stop) as stream:
        ended = stream.get_final_completion().choices[0]
    assert (ended.message.role, ended.message.content) == ("assistant", whole[: whole.find(stop)])
    assert ended.finish_reason == "stop"


def test_several_choices_and_seeds(ask: openai.OpenAI, talking: Path) -> None:
    asked: dict[str, Any] = {"model": talking.name, "prompt": PROMPTS[0], "max_tokens": 9, "temperature": 1.5}
    made = ask.completions.create(**asked, n=3, seed=7, extra_body={"top_k": 40, "min_p": 0.01})
    options = ("--prompt", PROMPTS[0], "--max-new-tokens", 9, "--temperature", 1.5, "--top-k", 40, "--min-p", 0.01)
    alone = run(talking, *options, "--num-return-sequences", 3, "--seed", 7)
    assert [one.text for one in made.choices] == [one["text"] for one in alone["sequences"]]
    chunks = list(ask.completions.create(**asked, n=3, seed=7, stream=True, extra_body={"top_k": 40, "min_p": 0.01}))
    for number, one in enumerate(made.choices):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == number) == one.text
    without = {ask.completions.create(**asked).choices[0].text for _ in range(4)}
    assert len(without) > 1  # each has a seed of its own


def test_many_clients_at_once_have_the_text_of_each_alone(ask: openai.OpenAI, talking: Path) -> None:
    with Bundle(talking) as twin:
        wanted = {(prompt, tokens): twin.generate(prompt, tokens).text for prompt in PROMPTS for tokens in (3, 7, 11)}

    def of(case: tuple[str, int]) -> str:
        made = ask.completions.create(model=talking.name, prompt=case[0], max_tokens=case[1], stream=True)
        return "".join(chunk.choices[0].text for chunk in made)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for case, found in zip(wanted, pool.map(of, wanted), strict=True):
                assert found == wanted[case], case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "request, max_tokens: expected 1 or more, found 0"),
        ({"temperature": -1}, "temperature: expected 0 (greedy) or more, found -1"),
        ({"n": LANES + 1}, f"request, n: expected 1 to {LANES}, the lanes of the bundle, found {LANES + 1}"),
        ({"prompt": [[1]]}, "request, prompt: expected a text, token ids, or a list of texts, found [[1]]"),
        ({"prompt": "d" * 99}, f"prompt: expected at most {ROOM - 1} tokens"),
        ({"prompt": ["a", "b"], "n": 2}, "request, n: expected 1, as prompt has several texts, found 2"),
        ({"prompt": ["a"] * (LANES + 1)}, f"request, prompt: expected at most {LANES} texts, the lanes of the bundle"),
        ({"best_of": 3, "n": 2}, "request, best_of: expected none, or n: this is not supported, found 3"),
        ({"suffix": "y"}, 'request, suffix: expected none: this is not supported, found "y". Leave it out.'),
        ({"stream_options": {"include_usage": True}}, "request, stream_options: expected stream beside it, found none"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_as_openai_does(
    server: Server, talking: Path, changes: dict[str, Any], message: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "d", "max_tokens": 2} | changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", None)
    assert error["message"].startswith(message)
    assert error["code"] == ("context_length_exceeded" if message.startswith("prompt: expected at most") else None)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "d", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "request, messages: expected one or more, found none"),
        ({"messages": [{"role": "user"}]}, "request, messages, content: expected text, found nothing"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages: expected user, or user, assistant, user and so on, a system message before them or none, ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "request, messages, content: expected parts of type text, found image_url",
        ),
        ({"tools": [{"type": "function"}]}, "request, tools: expected none: this is not supported"),
        (
            {"response_format": {"type": "json_object"}},
            "request, response_format: expected none: this is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_chat_is_said(server: Server, changes: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | changes
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    nothing = {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "user": "me", "n": None}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | nothing
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


def test_settings_of_the_command_line_are_those_of_requests(talking: Path) -> None:
    options = ("--max-new-tokens", 5, "--temperature", 1.5, "--seed", 3)
    alone = run(talking, "--prompt", "def", *options)["sequences"][0]["text"]
    with served(talking, *options) as made:
        assert client(made).completions.create(model=talking.name, prompt="def").choices[0].text == alone


@pytest.mark.slow
def test_an_answer_ends_when_its_client_goes_away(long: Path) -> None:
    """Streamed or not, in the queue or not: others are answered soon after."""
    with served(long) as made:
        ask = client(made)
        stream = ask.completions.create(model=long.name, prompt="def", temperature=0, stream=True)
        assert next(iter(stream)).choices[0].text
        stream.close()
        until(lambda: made.said().count("/v1/completions: the client has gone") == 1)
        with pytest.raises(openai.APITimeoutError):
            ask.completions.create(model=long.name, prompt="def", temperature=0, timeout=0.3)
        until(lambda: made.said().count("/v1/completions: the client has gone") == 2)
        running = ask.completions.create(model=long.name, prompt="def", temperature=0, stream=True)
        next(iter(running))
        with pytest.raises(openai.APITimeoutError):  # waits behind it, and is never begun
            ask.completions.create(model=long.name, prompt="def", temperature=0, timeout=0.3)
        running.close()
        until(lambda: made.said().count("/v1/completions: the client has gone") == 3)
        assert ask.completions.create(model=long.name, prompt="def", max_tokens=3).choices[0].text
        until(lambda: "tokens/s" in made.said())
        assert made.said().count("/v1/completions: ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_answers_with_an_error(long: Path, tmp_path: Path, by: int) -> None:
    """And the trace is written."""
    trace = tmp_path / "trace.json"
    with served(long, "--trace", trace) as made:
        ask = client(made)
        stream = ask.completions.create(model=long.name, prompt="def", stream=True)
        next(iter(stream))
        waits = made.raw()
        waits.ask("POST /v1/completions HTTP/1.1", json.dumps({"prompt": "def"}))
        until(lambda: httpx.get(f"{made.url}/health").status_code == 200)
        assert made.end(by) == -by
        with pytest.raises(openai.APIError, match="runner: expected one that goes on, found that it ends"):
            list(stream)
        assert waits.all().startswith(b"HTTP/1.1 503 ")


def test_addresses_that_are_taken_or_of_others(server: Server, bundle: Path) -> None:
    for address in (f"127.0.0.1:{server.port}", "192.0.2.1:0"):
        message = refused(bundle, "--http", address)
        assert message.startswith(f"--http {address}: expected an address and a port that can be listened on, found ")


def test_only_this_machine_unless_it_is_asked_for(server: Server, bundle: Path) -> None:
    assert server.first.startswith("http://127.0.0.1:")
    assert "warning" not in server.said()
    with served(bundle, "--http", "0.0.0.0:0") as made:
        assert "warning: whoever reaches http://0.0.0.0:" in made.said()
        assert httpx.get(f"{made.url}/health").status_code == 200


def test_a_chat_without_a_template_is_refused(bundle: Path) -> None:
    with served(bundle) as made:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        with pytest.raises(openai.BadRequestError, match=r"chat.json: expected the chat template of the bundle, found"):
            client(made).chat.completions.create(model=bundle.name, messages=messages)


# --- hostile requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status", "message"),
    [
        ("GET /v1/completions HTTP/1.1\r\nHost: localhost", 405, "method: expected POST, found GET. "),
        ("POST /health HTTP/1.1\r\nHost: localhost", 405, "method: expected GET, HEAD, found POST. "),
        (
            "GET / HTTP/1.1\r\nHost: localhost",
            404,
            "path: expected /v1/chat/completions, /v1/completions, /v1/models or",
        ),
        (
            "GET /health HTTP/1.1\r\nHost: evil.example",
            403,
            "host: expected localhost or an address, found evil.example",
        ),
        ("GET /health HTTP/1.1\r\nHost: [::1]:99", 200, ""),
        (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost",
            415,
            "content-type: expected application/json, found none. ",
        ),
        (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain",
            415,
            "content-type: expected application/json, found text/plain. ",
        ),
    ],
)
def test_what_pages_of_others_may_not_ask(server: Server, head: str, status: int, message: str) -> None:
    raw = server.raw()
    raw.send(f"{head}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    answer, _, body = raw.all().partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status != 200:
        assert json.loads(body)["error"]["message"].startswith(message)
    if status == 405:
        assert b"Allow: " in answer


def test_memory_of_what_is_sent_is_bounded(bundle: Path) -> None:
    """Whatever is sent: texts without spaces are the most for a tokenizer, and small values the most for JSON."""
    size = (16 << 20) - 99
    sent = [
        (json.dumps({"prompt": "d" * size}), "prompt: expected at most 39 tokens: the bundle has room for 40, "),
        (json.dumps({"prompt": ["def f(x): " * (size // 10)]}), "prompt: expected at most 39 tokens: the bundle has "),
        ('{"prompt": [1' + ",1" * (size // 2) + "]}", "request: expected JSON of at most 262144 values, found more."),
        ('{"x": [[]' + ",[]" * (size // 3) + "]}", "request: expected JSON of at most 262144 values, found more."),
        ('{"x": [{}' + ',{"a":1}' * (1 << 16) + "]}", "request, prompt: expected a text, token ids, or a list of "),
    ]
    with served(bundle) as made:
        for body, message in sent:
            answer = httpx.post(
                f"{made.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{made.process.pid}/status").read_text())
        assert found is not None
        assert int(found[1]) << 10 < 9 * len(sent[0][0]) + (20 << 20)
