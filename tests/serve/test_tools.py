"""Calls of functions by OpenAI's own client, of a model that was taught to call in each of the known forms."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import MODEL, Server
from tokenizers import AddedToken
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torch_pi2.errors import ConfigError
from torch_pi2.serve.batch import EndEvent, Sequence
from torch_pi2.serve.tools import HERMES, LLAMA, MISTRAL, ToolCallDelta, ToolCallFormat, ToolCallParser, format_of

_HEAD = "{% for t in tools or [] %}# {{ t.function.name }}\n{% endfor %}"
_TALK = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
_END = "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "hermes": _HEAD
    + '{# {"name": <function-name>, "arguments": <args-json-object>} #}'
    + _TALK
    + '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}" + _END,
    "llama": _HEAD
    + '{# {"name": function name, "parameters": dictionary of argument name and its value} #}'
    + _TALK
    + '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% endfor %}" + _END,
    "mistral": _HEAD + _TALK + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{% if c.id | length != 9 %}{{ raise_exception("nine letters") }}{% endif %}'
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _END,
}
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like outside.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
QUESTION = {"role": "user", "content": "Rain in Paris?"}
SAID = "It is dry é."


def a_call(name: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": "Paris"})}
    return {"id": "a23456789", "type": "function", "function": function}


def taught(tokenizer: Any, name: str) -> nn.Module:
    """A tiny model that calls ``weather`` for a question, and says ``SAID`` for the result."""
    torch.manual_seed(0)
    size = (len(tokenizer) + 31) // 32 * 32
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=0,
    )
    model = LlamaForCausalLM(config).train()
    called = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [_with_dict(a_call(name))]}]
    result = {"role": "tool", "tool_call_id": "a23456789", "content": "dry", "name": "weather"}
    ids, labels = [], []
    for talk in (called, [*called, result, {"role": "assistant", "content": SAID}]):
        for tools in ([WEATHER], [WEATHER, CLOCK]):
            asked = tokenizer.apply_chat_template(talk[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(talk, tools=tools, tokenize=False).removesuffix("\n")
            before, after = tokenizer(asked)["input_ids"], tokenizer(whole.removeprefix(asked))["input_ids"]
            ids.append(torch.tensor([*before, *after, 0]))
            labels.append(torch.tensor([*[-100] * len(before), *after, 0]))
    ids_BT = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=0)
    labels_BT = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss, steps = 9.0, 0
    while loss > 0.05:
        steps += 1
        assert steps < 200, loss
        out = model(input_ids=ids_BT, labels=labels_BT).loss
        adam.zero_grad()
        out.backward()
        adam.step()
        loss = float(out)
    return model.eval()


def _with_dict(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.loads(function["arguments"])}}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str) -> Iterator[Server]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
    # as Qwen, Mistral and Llama have them
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<|python_tag|>", special=True)])
    tokenizer.chat_template = TEMPLATES[name]
    made = Server(taught(tokenizer, name), tokenizer, max_tokens=512)
    yield made
    made.close()


@pytest.fixture
def ask(server: Server) -> Any:
    def asked(**more: Any) -> Any:
        known = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER], "temperature": 0, "max_tokens": 120}
        return server.client().chat.completions.create(**known | more)

    return asked


def streamed(chunks: Any) -> tuple[str, list[dict[str, Any]], str]:
    """What a client puts together: text, calls, why it ended."""
    text, calls, finish = "", list[dict[str, Any]](), ""
    for chunk in chunks:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert (call.type, bool(call.id)) == ("function", True)
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        finish = choice.finish_reason or finish
    return text, calls, finish


@pytest.mark.slow
def test_a_model_calls_and_takes_the_result(ask: Any, name: str) -> None:
    (choice,) = ask().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert len(call.id) == (9 if name == "mistral" else len("call_") + 24)
    said = ask(
        messages=[
            QUESTION,
            choice.message.model_dump(),  # as clients send it back, with what is null
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "dry"}]},
        ]
    ).choices[0]
    assert (said.message.content, said.message.tool_calls, said.finish_reason) == (SAID, None, "stop")


def test_a_stream_has_the_same_calls(ask: Any, server: Server) -> None:
    text, calls, finish = streamed(ask(stream=True))
    assert (text, finish) == ("", "tool_calls")
    assert calls == [{"name": "weather", "arguments": ask().choices[0].message.tool_calls[0].function.arguments}]
    pieces = [
        call.function.arguments
        for chunk in ask(stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
        if call.function.arguments
    ]
    assert len(pieces) > 2  # as they come
    with server.client().chat.completions.stream(
        model="tiny", messages=[QUESTION], tools=[WEATHER], temperature=0
    ) as s:
        (call,) = s.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_choices_of_tools(ask: Any) -> None:
    none = ask(tool_choice="none").choices[0]
    assert none.message.tool_calls is None
    assert none.finish_reason in ("stop", "length")
    both = {"tools": [WEATHER, CLOCK]}
    for choice in (
        {"type": "function", "function": {"name": "clock"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]},
        },
    ):
        made = ask(**both, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert made.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in made.message.tool_calls] == [("clock", "{}")]
    made = ask(**both, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in made.message.tool_calls] == ["weather"]
    assert jsonschema.validate(json.loads(made.message.tool_calls[0].function.arguments), PARAMETERS) is None
    likely = ask(logprobs=True, top_logprobs=2).choices[0]
    assert len(likely.logprobs.content) > 5


PARAMETERS = WEATHER["function"]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_calls_that_are_needed_have_the_arguments_of_the_schema(ask: Any, strict: bool) -> None:
    """However unlikely: sampled at the highest temperature."""
    chosen = random.Random(3)
    schema = {
        "type": "object",
        "$defs": {"unit": {"enum": ["C", "F", 3]}},
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    }
    named: dict[str, Any] = {"type": "function", "function": {"name": "forecast"}}
    tool = {"type": "function", "function": {"name": "forecast", "parameters": schema, "strict": strict}}
    for seed in range(4):
        choice = chosen.choice(["required", named])
        made = ask(tools=[tool, CLOCK], tool_choice=choice, temperature=2, seed=seed, parallel_tool_calls=False, n=2)
        for one in made.choices:
            assert one.finish_reason == "tool_calls"
            (call,) = one.message.tool_calls
            wanted = schema if call.function.name == "forecast" else {"const": {}}
            jsonschema.validate(json.loads(call.function.arguments), wanted)


@pytest.mark.parametrize("cut", range(1, len("\n</tool_call>")))
def test_an_end_that_is_cut_is_no_text(cut: int) -> None:
    calls = ToolCallParser(HERMES, ["weather"])
    text = '<tool_call>\n{"name": "weather", "arguments": {}}' + "\n</tool_call>"[:cut]
    parts = list(calls.add(text, last=True))
    assert [part for part in parts if isinstance(part, str)] == []
    assert (calls.count, calls.complete) == (1, True)


def test_strict_calls_of_an_answer_that_need_not_call(ask: Any, server: Server, name: str) -> None:
    """From its first letters on, a call that comes is what the schema says; text is what it was."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    (call,) = ask(tools=[strict]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    other = WEATHER["function"] | {
        "strict": True,
        "parameters": PARAMETERS | {"properties": {"city": {"const": "Rome"}}},
    }
    (call,) = ask(tools=[{"type": "function", "function": other}]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": "a23456789", "content": "dry"}
    called = {"role": "assistant", "tool_calls": [a_call(name)]}
    said = ask(tools=[strict], messages=[QUESTION, called, result]).choices[0]
    assert said.message.content == SAID


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type: Input should be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: String should match"),
    ({"tools": [WEATHER, WEATHER]}, "two functions have the same name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice: there are no tools"),
    ({"tool_choice": "sometimes"}, "tool_choice: .*expected none, auto, required, a function or allowed_tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "other is none of the tools weather"),
    (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
        "expected the schema of an object",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"type": 3}}}}}
            ],
            "tool_choice": "required",
        },
        "tools: expected a JSON schema that can be followed",
    ),
    ({"functions": [{"name": "x"}]}, "functions is not supported"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id is missing"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "someone", "content": "x"}]}, "messages.0.role: Input should be 'system'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content: .*part 0: image_url is not supported",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "part 0: its content is not supported"),
    ({"top_logprobs": 2}, "top_logprobs: logprobs is not true"),
    ({"modalities": ["audio"]}, "modalities is not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort is not supported"),
]


@pytest.mark.parametrize("name", ["hermes"], indirect=True)
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_what_is_refused(ask: Any, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(**changes)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages }}", "tools: expected a model whose chat template takes tools, found one that does not"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "tools: expected a chat template with calls as .*found another form"),
        ('{{ tools }}<tool_call><function=x>"arguments"', "found another form"),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", "found another form"),
    ],
)
def test_templates_without_a_known_form_are_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        format_of(template)


def test_forms_are_found_by_the_text_of_templates(name: str) -> None:
    assert format_of(TEMPLATES[name]) is FORMS[name]
    escaped = '{% if tools %}{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}'
    assert format_of(escaped) is HERMES


def told(form: ToolCallFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """What is said and called of a text that comes in pieces."""
    calls, said, made = ToolCallParser(form, ["weather", "clock"]), "", list[list[str]]()
    cuts = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for part in [part for piece in pieces for part in calls.add(piece)] + list(calls.add("", last=True)):
        if isinstance(part, ToolCallDelta):
            if part.name is not None:
                made.append([part.name, ""])
            made[part.number][1] += part.arguments
        else:
            said += part
    assert calls.count == len(made)
    return said, [(called[0], called[1]) for called in made]


_PARIS = '{"city": "Pa}r\\"is {[", "a": {"b": [1]}}'
READ: list[tuple[ToolCallFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Just text < that", "Just text < that", []),
    (HERMES, "A", "A", []),
    (HERMES, "  blank ", "  blank ", []),
    (
        HERMES,
        f'I look.\n\n<tool_call>\n{{"name": "weather", "arguments": {_PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name":"clock","arguments":{}}\n</tool_call>\n',
        "I look.",
        [("weather", _PARIS), ("clock", "{}")],
    ),
    # the other order, and arguments as a text
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", [("clock", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', "", [("clock", "{}")]),
    # none
    (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, "<tool_call> no", "<tool_call> no", []),
    (HERMES, "<tool_call>{no}", "<tool_call>{no}", []),
    (HERMES, '<tool_call>{"name": ["weather"]}', '<tool_call>{"name": ["weather"]}', []),
    # cut short
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
    (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (LLAMA, f'{{"name": "weather", "parameters": {_PARIS}}}', "", [("weather", _PARIS)]),
    (LLAMA, f'\n<|python_tag|>{{"name": "weather", "parameters": {_PARIS}}}', "", [("weather", _PARIS)]),
    (
        LLAMA,
        '{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        [("clock", "{}"), ("weather", "{}")],
    ),
    (LLAMA, '{"name": "Ann", "age": 3} is JSON', '{"name": "Ann", "age": 3} is JSON', []),
    (LLAMA, 'So {"name": "clock", "parameters": {}}', 'So {"name": "clock", "parameters": {}}', []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_PARIS}, "id": "abc"}}, '
        '{"name": "clock", "arguments": {}}]',
        "",
        [("weather", _PARIS), ("clock", "{}")],
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "clock", "arguments": {}}]', "", [("clock", "{}")]),
    (MISTRAL, "a [TOOL", "a [TOOL", []),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(READ), st.lists(st.integers(0, 200), max_size=30))
def test_calls_are_found_wherever_pieces_end(
    case: tuple[ToolCallFormat, str, str, list[tuple[str, str]]], cuts: list[int]
) -> None:
    form, text, said, calls = case
    assert told(form, text, cuts) == (said, calls)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.lists(
        st.sampled_from([*'{}[]",:<>\\/ \nab|', "<tool_call>", "[TOOL_CALLS]", '{"name": "clock", "arguments": {']),
        max_size=40,
    ).map("".join),
    st.lists(st.integers(0, 200), max_size=9),
)
def test_any_text_is_the_same_whole_and_in_pieces(form: ToolCallFormat, text: str, cuts: list[int]) -> None:
    assert told(form, text, cuts) == told(form, text, [])


@pytest.mark.parametrize("name", ["hermes"], indirect=True)
def test_a_constraint_that_fails_ends_its_own_answer_alone(server: Server, name: str) -> None:
    """Two sequences, of which one has a constraint that raises at its third token."""

    class Failing:
        def __init__(self) -> None:
            self.taken = 0

        def allowed(self, scores_V: torch.Tensor) -> torch.Tensor:
            return scores_V

        def take(self, token: int) -> bool:
            self.taken += 1
            if self.taken == 3:
                raise ConfigError("response_format", expected="a", found="b", fix="c")
            return False

    told: dict[str, list[Any]] = {"failing": [], "other": []}
    ids = [5, 6, 7]
    server.batch.submit(Sequence(ids, 20, told["failing"].append, constraint=Failing()))
    server.batch.submit(Sequence(ids, 20, told["other"].append))
    end = time.monotonic() + 20
    while not all(isinstance(found[-1] if found else None, EndEvent) for found in told.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    failed, other = told["failing"][-1], told["other"][-1]
    assert (failed.reason, str(failed.error)) == ("error", "response_format: expected a, found b. c")
    assert (other.reason, other.error, len(told["other"])) == ("length", None, 21)


WITHOUT_ARGUMENTS = ['{"name": "now", "arguments": ""}', '{"name": "now"}', '{"name": "now", "arguments": null}']


@pytest.mark.parametrize("call", WITHOUT_ARGUMENTS)
@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
def test_calls_without_arguments_have_none(form: ToolCallFormat, call: str) -> None:
    text = call if form.bare else form.begin + form.opens + call + form.closes + form.end
    (found,) = ToolCallParser(form, ["now"]).add(text, last=True)
    assert isinstance(found, ToolCallDelta)
    assert (found.name, found.arguments) == ("now", "{}")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, 'Write <tool_call>\n{"a": 1}\n</tool_call> here'),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": "soon"}\n</tool_call>'),
        (MISTRAL, 'Write [TOOL_CALLS] [{"name": "later"}] here'),
        (LLAMA, '\n {"a": 1} is no call'),
    ],
)
def test_what_is_no_call_is_the_text_that_was_written(form: ToolCallFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = ToolCallParser(form, ["now"])
        said = [part for n, piece in enumerate(pieces, 1) for part in parser.add(piece, last=n == len(pieces))]
        assert "".join(part for part in said if isinstance(part, str)) == text
