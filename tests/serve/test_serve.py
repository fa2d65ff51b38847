"""OpenAI's own client against a real server: what comes is what the model says alone, whoever else asks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from serving import Server, dense, greedy_alone, quantised, tokenizer_of_example
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from torch_pi2.errors import GroupError

PROMPTS = ["def main(", "import os\n\nclass", "for", "    return self._", "if __name__ == '__main__':\n    "]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of_example()


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[Server]:
    made = Server(quantised(), tokenizer)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def alone(tokenizer: Any) -> Any:
    """The greedy text of a prompt, decoded alone."""
    model = quantised()

    def text(prompt: str, tokens: int) -> str:
        made = greedy_alone(model, tokenizer(prompt)["input_ids"], tokens, {tokenizer.eos_token_id})
        found: str = tokenizer.decode(made, skip_special_tokens=True)
        return found

    return text


def test_models(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed.id == "tiny" == client.models.retrieve("tiny").id
    with pytest.raises(openai.NotFoundError, match="expected one of the models tiny, found other"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="found other"):
        client.completions.create(model="other", prompt="x")


def test_a_completion_is_the_greedy_text(client: openai.OpenAI, alone: Any, tokenizer: Any) -> None:
    made = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0)
    assert made.object == "text_completion"
    assert made.choices[0].text == alone(PROMPTS[0], 24)
    assert made.choices[0].finish_reason == "length"
    tokens = len(tokenizer(PROMPTS[0])["input_ids"])
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (
        tokens,
        24,
        tokens + 24,
    )
    ids = tokenizer(PROMPTS[1])["input_ids"]
    both = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=9, temperature=0)
    assert [choice.text for choice in both.choices] == [alone(PROMPTS[1], 9)] * 2


def test_a_stream_is_the_same_text(client: openai.OpenAI, alone: Any) -> None:
    chunks = list(client.completions.create(model="tiny", prompt=PROMPTS[2], max_tokens=40, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone(PROMPTS[2], 40)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len(chunks) > 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_chats(client: openai.OpenAI, alone: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 20,
        "temperature": 0,
    }
    wanted = alone("# system: Be brief.\n# user: Hello\n", 20)
    made = client.chat.completions.create(**asked)
    assert (made.choices[0].message.role, made.choices[0].message.content) == ("assistant", wanted)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **options)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert last.choices == []
    assert last.usage.completion_tokens == 20 == made.usage.completion_tokens
    with client.chat.completions.stream(**asked, stop=wanted[12:16]) as stream:  # the client's own reader of streams
        found = stream.get_final_completion().choices[0].message.content
    assert found == wanted[: wanted.find(wanted[12:16])]


@pytest.mark.slow
def test_concurrent_requests_have_the_text_of_each_alone(client: openai.OpenAI, alone: Any) -> None:
    wanted = {(prompt, tokens): alone(prompt, tokens) for prompt in PROMPTS for tokens in (5, 30, 61)}

    def ask(case: tuple[str, int]) -> str:
        made = client.completions.create(model="tiny", prompt=case[0], max_tokens=case[1], temperature=0)
        return made.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            for case, found in zip(wanted, pool.map(ask, wanted), strict=True):
                assert found == wanted[case], case


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, server: Server, alone: Any) -> None:
    whole = alone(PROMPTS[1], 60)
    stop = whole[20:26]
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0}
    before = dict(server.batch.counts.ended)
    made = client.completions.create(**asked, stop=[stop, "never there"])
    assert made.choices[0].text == whole[: whole.find(stop)]
    until(lambda: server.batch.counts.ended == before | {"stop": before.get("stop", 0) + 1})
    assert made.choices[0].finish_reason == "stop"
    streamed = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == made.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_seeds_choices_and_bias(client: openai.OpenAI, tokenizer: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 1.2}
    one = client.completions.create(**asked, n=3, seed=7)
    again = client.completions.create(**asked, n=3, seed=7)
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert client.completions.create(**asked, seed=8).choices[0].text == texts[1]
    other = client.completions.create(**asked).choices[0].text, client.completions.create(**asked).choices[0].text
    assert other[0] != other[1]  # without a seed
    token = tokenizer("z")["input_ids"][0]
    biased = client.completions.create(**asked | {"max_tokens": 5, "temperature": 0}, logit_bias={str(token): 100})
    assert biased.choices[0].text == tokenizer.decode([token] * 5)


def test_log_probabilities(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    made = client.completions.create(**asked, prompt=PROMPTS[0], logprobs=2).choices[0]
    assert "".join(made.logprobs.tokens) == made.text
    for token, value, top in zip(
        made.logprobs.tokens, made.logprobs.token_logprobs, made.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values()) <= 0
        assert len(top) == 2
    assert made.logprobs.text_offset[1] == len(made.logprobs.tokens[0])
    held = {"stop": made.text + "\0"}  # what may be a beginning of it is sent in the end
    streamed = list(client.completions.create(**asked, prompt=PROMPTS[0], logprobs=2, stream=True, extra_body=held))
    offsets = [offset for chunk in streamed for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == made.logprobs.text_offset
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(**asked, messages=messages, logprobs=True, top_logprobs=4)
    content = chat.choices[0].logprobs.content
    assert [len(said.top_logprobs) for said in content] == [4, 4, 4]
    assert bytes(b for said in content for b in said.bytes).decode() == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"top_p": 0}, "top_p: Input should be greater than 0"),
        ({"n": 0}, "n: Input should be"),
        ({"stop": ["a"] * 5}, "stop: List should have at most 4 items"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"logit_bias": {"999999": 1}}, "logit_bias: expected tokens of 0 to .*found 999999"),
        ({"prompt": ""}, "prompt: expected one token or more.*found none"),
        ({"prompt": [10**6]}, "found the token 1000000"),
        ({"prompt": "x " * 300}, "prompt and answer: expected .*at most 256 together"),
        ({"max_tokens": 300}, "prompt and answer: expected .*at most 256 together"),
        ({"prompt": {"a": 1}}, "prompt: .*expected a text, token ids, or a list of texts or of lists of token ids"),
        ({"prompt": [10**30]}, "prompt: expected tokens of 0 to"),
        ({"prompt": [-1]}, "found the token -1"),
        ({"best_of": 2}, "best_of is not supported, unless it is n"),
        ({"suffix": "y"}, "suffix is not supported"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1: Input should be less than or equal to 100"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options is for streams"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4} | changes
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as found:
            client.completions.create(**{"stream": stream} | asked)
        assert found.value.body["type"] == "invalid_request_error"


def test_answers_that_are_objects_of_any_kind(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "JSON"}], "max_tokens": 60}
    made = client.chat.completions.create(**asked, temperature=0, response_format={"type": "json_object"}, n=2)
    for choice in made.choices:
        assert choice.message.content.lstrip().startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    chunks = client.chat.completions.create(
        **asked,
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": {"a": [1, "b"]}}}},
    )
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == {"a": [1, "b"]}
    asked["temperature"] = 0
    text = client.chat.completions.create(**asked, response_format={"type": "text"})
    assert text.choices[0].message == client.chat.completions.create(**asked).choices[0].message
    anything = {"type": "json_schema", "json_schema": {"name": "it"}}
    assert client.chat.completions.create(**asked, response_format=anything).choices[0].message.content
    for wrong, message in (
        ({"type": "json_schema"}, "json_schema is missing"),
        (
            {"type": "json_schema", "json_schema": {"name": "it", "schema": {"$ref": "#"}}},
            r"found one that no text satisfies\. Correct the schema\.$",
        ),
        ({"type": "xml"}, "Input should be 'text', 'json_object' or 'json_schema'"),
        (
            {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "nothing"}}},
            "response_format: expected a JSON schema that can be followed",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**asked, response_format=wrong)


def test_malformed_requests(server: Server) -> None:
    assert httpx.post(f"{server.url}/v1/completions", content=b" " * (9 << 20)).status_code == 413
    assert httpx.post(f"{server.url}/v1/completions", content=iter([b"{}"])).status_code == 411
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/v1/completions").headers["allow"] == "POST"
    for body, message in (
        (b'{"model": ', "expected a body of JSON, found none: Expecting value (character 10)"),
        (b'{"model": NaN}', "body: NaN and Infinity are no numbers of JSON"),
        (b"", "body: Field required"),
    ):
        headers = {"Content-Type": "application/json"}
        error = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).json()["error"]
        assert (error["message"], error["param"]) == (message, None)


def test_settings_at_their_ends(server: Server, client: openai.OpenAI, alone: Any) -> None:
    for settings in ({"temperature": 1e-10}, {"temperature": 1, "top_p": 1e-300}):
        made = client.completions.create(model="tiny", prompt="for", max_tokens=5, **settings)
        assert made.choices[0].text == alone("for", 5)
    with pytest.raises(openai.BadRequestError, match="at most 1000 characters"):
        client.completions.create(model="tiny", prompt="for", stop=["x", "a" * 1001])
    assert httpx.get(f"{server.url}/health", timeout=2).status_code == 200


def test_the_first_space_of_a_completion(tokenizer: Any) -> None:
    """Tokenizers of SentencePiece's kind leave it out where nothing is before it."""
    words = Tokenizer(WordLevel({f"\u2581w{i}": i for i in range(2048)}, unk_token="\u2581w0"))
    words.pre_tokenizer = Metaspace()
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    server = Server(dense(), PreTrainedTokenizerFast(tokenizer_object=words))
    asked: dict[str, Any] = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 3, "temperature": 0}
    try:
        made = server.client().completions.create(**asked).choices[0].text
        echoed = server.client().completions.create(**asked, echo=True).choices[0].text
        streamed = server.client().completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == made
    finally:
        server.close()
    assert re.fullmatch(r"( w\d+){3}", made)
    assert echoed == f"w5 w6{made}"


def test_a_server_that_ends_answers_503(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pi2.cli.serve.GRACE_S", 0.3)
    server = Server(quantised(), tokenizer, max_batch_size=1, max_tokens=4096)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "for", "max_tokens": 4000, "logit_bias": {"0": -100}}
    stream = server.client().completions.create(**asked, stream=True)
    next(stream)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.client().completions.create, **asked)
        while not server.batch.state()["waiting"]:
            time.sleep(0.01)
        pool.submit(server.close)
        with pytest.raises(openai.APIError, match="expected a server that goes on, found one that ends"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="expected a server that goes on") as found:
            waiting.result()
    assert found.value.status_code == 503


def test_a_server_that_has_lost_a_process_ends(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To those who are answered, who wait, who come later, and who watch it."""
    monkeypatch.setattr("torch_pi2.cli.serve._TELLS_S", 1.0)
    server = Server(quantised(), tokenizer, max_batch_size=1, max_tokens=4096)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "for", "max_tokens": 4000, "logit_bias": {"0": -100}}
    lost = GroupError("processes", expected="an answer of each", found="none of process 1", fix="See what it says.")
    group, step = SimpleNamespace(failure=None), server.batch._decoder.step
    server.batch._group = group  # type: ignore[assignment]

    def failing(ids_B1: torch.Tensor) -> torch.Tensor:
        if server.batch.state()["waiting"]:
            group.failure = lost
            raise GroupError("another", expected="a", found="b", fix="c")
        return step(ids_B1)

    monkeypatch.setattr(server.batch._decoder, "step", failing)
    stream = server.client().completions.create(**asked, stream=True)
    next(stream)
    with pytest.raises(openai.InternalServerError, match="found none of process 1") as waiting:
        server.client().completions.create(**asked)
    with pytest.raises(openai.APIError, match="found none of process 1"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="found none of process 1") as later:
        server.client().completions.create(**asked)
    health = httpx.get(f"{server.url}/health")
    assert waiting.value.status_code == later.value.status_code == health.status_code == 503
    assert health.json()["error"]["message"] == str(lost)
    assert health.json()["error"]["code"] == "group_failed"
    server._thread.join(timeout=30)
    assert not server._thread.is_alive()  # by itself
    server.close()


def test_a_chat_without_a_template_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError, match="tokenizer has a chat template, found one that has none"):
        server.client().chat.completions.create(model="tiny", messages=messages)


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to it"
        time.sleep(0.01)


def test_a_client_that_disconnects_frees_its_slot(server: Server, client: openai.OpenAI, alone: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 250, "temperature": 0}
    before = server.batch.counts.ended.get("cancelled", 0)
    stream = client.completions.create(**asked, stream=True, logit_bias={"0": -100})
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**asked, timeout=0.05)
    until(lambda: server.batch.counts.ended.get("cancelled", 0) >= before + 2)
    until(lambda: server.batch.state() == {"live": 0, "waiting": 0})
    assert client.completions.create(**asked | {"max_tokens": 6}).choices[0].text == alone(PROMPTS[0], 6)


def test_a_client_that_disconnects_while_waiting(tokenizer: Any) -> None:
    server = Server(quantised(), tokenizer, max_batch_size=1, max_queue=2, max_tokens=2048)
    try:
        asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 2000, "logit_bias": {"0": -100}}
        stream = server.client().completions.create(**asked, stream=True)
        next(iter(stream))
        read = server.batch.counts.prompt_tokens
        for streamed in (False, True):
            with pytest.raises(openai.APITimeoutError):
                server.client().completions.create(**asked, stream=streamed, timeout=0.2)
        until(lambda: server.batch.state() == {"live": 1, "waiting": 0})
        assert server.batch.counts.ended == {"cancelled": 2}
        stream.close()
        until(lambda: server.batch.state() == {"live": 0, "waiting": 0})
        assert server.batch.counts.prompt_tokens == read
    finally:
        server.close()


def test_more_answers_than_can_ever_be_are_refused(tokenizer: Any) -> None:
    server = Server(quantised(), tokenizer, max_batch_size=1, max_queue=2)
    try:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
        assert len(server.client().completions.create(**asked, prompt=["x", "y", "z"]).choices) == 3
        for more in ({"prompt": ["x", "y"], "n": 2}, {"prompt": "x", "n": 4}):
            with pytest.raises(openai.BadRequestError, match=r"n: expected at most 3 answers .*, found 4"):
                server.client().completions.create(**asked, **more)
    finally:
        server.close()


def test_a_full_queue_is_429(tokenizer: Any) -> None:
    server = Server(quantised(), tokenizer, max_batch_size=1, max_queue=1)
    try:
        asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 240, "temperature": 0}
        streams = [server.client().completions.create(**asked, stream=True)]
        until(lambda: server.batch.state()["live"] == 1)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(server.client().completions.create, **asked | {"max_tokens": 2})
            until(lambda: server.batch.state()["waiting"] == 1)
            with pytest.raises(openai.RateLimitError, match="at most 1 waiting, beside a batch of 1") as found:
                server.client().completions.create(**asked)
            assert found.value.response.headers["retry-after"] == "1"
            streams[0].close()
            assert waits.result().choices[0].finish_reason == "length"
    finally:
        server.close()


def test_metrics(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="x", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    counts = server.batch.counts
    assert f'torch_pi2_tokens_total{{kind="answer",model="tiny"}} {float(counts.answer_tokens)}' in text
    assert f'torch_pi2_sequences_total{{kind="length",model="tiny"}} {float(counts.ended["length"])}' in text
    assert 'torch_pi2_sequences_now{kind="waiting",model="tiny"} 0.0' in text


def test_a_model_that_fails_fails_the_request_alone(server: Server, client: openai.OpenAI, alone: Any) -> None:
    step, calls = server.batch._decoder.step, []

    def failing(ids_B1: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a step that fails")
        return step(ids_B1)

    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.batch._decoder, "step", failing)
        with pytest.raises(openai.InternalServerError, match="RuntimeError while answering"):
            client.completions.create(**asked)
    assert client.completions.create(**asked).choices[0].text == alone(PROMPTS[0], 6)


@pytest.mark.slow
def test_penalties_and_echo(client: openai.OpenAI, tokenizer: Any, alone: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    token = tokenizer("z")["input_ids"][0]
    # a bias that is as large as can be comes again, until what has come is less
    biased = client.completions.create(**asked, logit_bias={str(token): 100}, logprobs=0)
    assert biased.choices[0].logprobs.tokens == ["z"] * 12
    bias = {str(token): 100, str(tokenizer("y")["input_ids"][0]): 99.5}
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        tokens = client.completions.create(**asked, logit_bias=bias, logprobs=0, **penalty).choices[0].logprobs.tokens
        assert set(tokens) == {"z", "y"}, tokens
    for ids in (PROMPTS[0], tokenizer(PROMPTS[0])["input_ids"]):
        echoed = client.completions.create(**asked | {"prompt": ids}, echo=True)
        assert echoed.choices[0].text == PROMPTS[0] + alone(PROMPTS[0], 12)
        assert echoed.usage.completion_tokens == 12
    chunks = client.completions.create(**asked, echo=True, stream=True, n=2)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [PROMPTS[0] + alone(PROMPTS[0], 12)] * 2
