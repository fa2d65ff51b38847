"""Where answers end: end tokens, stop strings that are special tokens; tokenizers and models of other sizes; names."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Server
from tiny_tokenizers import TOKENIZERS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import torch_pi2
from torch_pi2.cli import main
from torch_pi2.cli.serve import _server, names_of
from torch_pi2.decode.sequence import StopStrings, TextStream, end_tokens
from torch_pi2.serve.chat import ChatSession
from torch_pi2.serve.constraint import Grammars

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["one", "two", "three", "four"]


def tokenizer_of(end: str = "<|endoftext|>", special: bool = True, pad: bool = False) -> Any:
    """Bytes, ``WORDS`` with a space before them, and the tokens of ChatML; ``end`` is the tokenizer's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(
        models.BPE({letter: n for n, letter in enumerate([*alphabet, *(f"Ġ{word}" for word in WORDS)])}, [])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    raw.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    if pad:
        raw.add_special_tokens(["<pad>", "<other>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end, chat_template=CHATML)


def saying(tokenizer: Any, tokens: Sequence[str], rows: int = 0, ends: int | None = None) -> Any:
    """A model that says ``tokens`` one after another, again and again; it has ``rows`` of them (0: the tokenizer's)."""
    rows, script = rows or len(tokenizer), tokenizer.convert_tokens_to_ids(list(tokens))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows,
            hidden_size=320,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            hidden_act="relu",
            tie_word_embeddings=False,
            eos_token_id=ends,
        )
    ).eval()
    with torch.no_grad():
        for part in (model.lm_head, model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            part.weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(rows, 320))
        after = dict(zip(script, [*script[1:], script[0]]))
        for token in range(rows):
            model.lm_head.weight[after.get(token, script[0]), token] = 1
    return model


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    servers = []

    def start(model: Any, tokenizer: Any) -> Callable[..., Any]:
        servers.append(Server(model, tokenizer))

        def ask(path: str, **body: Any) -> Any:
            made = httpx.post(f"{servers[-1].url}/v1/{path}", json={"model": "tiny", "temperature": 0, **body})
            return made.json()["choices"][0] if made.status_code == 200 else made.json()["error"]["message"]

        return ask

    yield start
    for server in servers:
        server.close()


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("by", ["tokenizer", "template", "template, not special", "generation_config", "config"])
def test_any_of_the_end_tokens_ends_an_answer(serve: Any, by: str) -> None:
    tokenizer = tokenizer_of(
        "<|im_end|>" if by == "tokenizer" else "<|endoftext|>", special=by != "template, not special"
    )
    if not by.startswith("template"):
        tokenizer.chat_template = None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model = saying(tokenizer, ["Ġone", "Ġtwo", "<|im_end|>", "Ġthree"], ends=end if by == "config" else other)
    model.generation_config.eos_token_id = end if by == "generation_config" else other
    made = serve(model, tokenizer)("completions", prompt="hi", max_tokens=16)
    assert (made["text"], made["finish_reason"]) == (" one two", "stop")
    made = torch_pi2.generate(model, "hi", tokenizer=tokenizer, max_new_tokens=16)
    assert (made.text, made.sequences[0][-1]) == (" one two", end)
    talk = ChatSession(model, tokenizer, max_tokens=64, limit=16)
    assert "".join(talk.say("hi")) == " one two"
    assert end_tokens(model, [3], tokenizer) == {3}


def test_words_that_a_configuration_calls_ends_by_default_are_words() -> None:
    """Llama's class says 2, which is a letter here; the generation configuration knows better."""
    tokenizer = tokenizer_of()
    model = saying(tokenizer, ["Ġone"], ends=2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    assert 2 not in end_tokens(model, None, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_tokens(model, None, tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize("stop", ["<|im_start|>", " two<|im_start|>", "<|im_start|> th", "o<|im_start|> three"])
def test_stop_strings_see_special_tokens(serve: Any, stop: str) -> None:
    tokenizer = tokenizer_of()
    model = saying(tokenizer, ["Ġone", "Ġtwo", "<|im_start|>", "Ġthree", "Ġfour"])
    ask = serve(model, tokenizer)
    wanted = " one two<|im_start|> three".partition(stop)[0]
    for more in ({}, {"stop": [stop]}):
        made = ask("chat/completions", messages=HI, max_tokens=5, **more)
        expected = (wanted, "stop") if more else (" one two three four", "length")
        assert (made["message"]["content"], made["finish_reason"]) == expected


def test_what_is_hidden_is_left_out_of_text_that_was_held_back() -> None:
    stops = StopStrings(["a<e>b"])
    assert [stops.add("xa"), stops.add("<e>", shown=False), stops.add("c"), stops.flush()] == ["x", "", "ac", ""]
    tokenizer = tokenizer_of()
    stream = TextStream(tokenizer, ["one<|im_start|>two"])
    ids = tokenizer(" one<|im_start|> two é")["input_ids"]
    assert "".join([stream.add(token) for token in ids] + [stream.end()]) == " one two é"


def test_the_space_after_a_hidden_token_is_kept() -> None:
    raw = Tokenizer(models.WordLevel({"<e>": 0, "one": 1, "two": 2}, unk_token="<e>"))
    raw.add_special_tokens(["<e>"])
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=raw))
    assert "".join([stream.add(token) for token in (1, 0, 2, 0, 0, 1)] + [stream.end()]) == "one two one"


@pytest.mark.parametrize("more", [-2, 0, 50])
def test_a_tokenizer_and_a_model_of_other_sizes(serve: Any, more: int) -> None:
    tokenizer = tokenizer_of(pad=True)
    ask = serve(saying(tokenizer, ["Ã", "©", "Ġone", "<|im_start|>", "Ġtwo"], rows=len(tokenizer) + more), tokenizer)
    made = ask("chat/completions", messages=HI, max_tokens=4, logprobs=True, top_logprobs=20)
    content = made["logprobs"]["content"]
    assert [one["bytes"] for one in content[:3]] == [[0xC3], [0xA9], list(b" one")]
    assert [len(one["top_logprobs"]) for one in content] == [20] * 4
    made = ask("completions", prompt="hi", max_tokens=5, logprobs=20)
    assert [len(one) for one in made["logprobs"]["top_logprobs"]] == [20] * 5
    assert made["text"] == "é one two"
    assert made["logprobs"]["text_offset"] == [0, 0, 1, 5, 5]
    made = ask("chat/completions", messages=HI, max_tokens=40, response_format={"type": "json_object"})
    assert made["message"]["content"].startswith("{")
    if more < 0:
        wrong = ask("completions", prompt="<other>", max_tokens=2)
        assert wrong.startswith("prompt: expected tokens of 0 to 262, the model's vocabulary, found the token 264.")


def test_a_base_model_reads_lines(serve: Any) -> None:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = None
    talk = ChatSession(saying(tokenizer, ["Ġone", "Ġtwo"]), tokenizer, max_tokens=99, limit=2, system="S")
    for said in ("A is", "B is", " and"):
        list(talk.say(said))
    assert tokenizer.decode(talk._ids()) == "S\nA is one two\nB is one two and one two"


def test_a_request_that_offers_h2c_is_read_whole() -> None:
    """As Java's HttpClient sends all; httptools, uvicorn's choice where it is installed, drops their bodies."""
    assert _server(None).config.http == "h11"
    tokenizer = tokenizer_of()
    server = Server(saying(tokenizer, ["Ġone"]), tokenizer)
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        f"HTTP2-Settings: AAEAAEAAAAIAAAAA\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as line:
            line.sendall(head.encode())
            line.sendall(body)
            found = b""
            while b" one one" not in found and (more := line.recv(1 << 16)):
                found += more
        assert found.startswith(b"HTTP/1.1 200")
        assert b" one one" in found
    finally:
        server.close()


def test_names_are_those_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "snapshot-4f2a").mkdir(parents=True)
    (tmp_path / "assistant").symlink_to(tmp_path / "deep" / "snapshot-4f2a")
    monkeypatch.chdir(tmp_path / "deep")
    given = [str(tmp_path / "assistant"), "snapshot-4f2a/", ".", "../model.gguf"]
    assert names_of(given) == ["assistant", "snapshot-4f2a", "deep", "model.gguf"]


def test_a_gguf_file_is_called_by_its_name_not_by_that_of_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch_pi2.cli.serve._run", lambda _, names, __: found.extend(names) or {})
    file = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
    assert main(["serve", str(file), "--port", "0"]) == 0
    assert found == [file.name]


def test_bytes_of_tokens_that_no_grammar_knows_have_their_space() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS["mistral"]())
    (token,) = tokenizer.convert_tokens_to_ids(["▁café"])
    assert Grammars(tokenizer, [], len(tokenizer)).bytes_of(token) == " café".encode()
