"""The C++ runner: how tokens are chosen, requests of a file, talks, rounds that are measured, and Ctrl-C in each."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import runner_calls
from runner_calls import PROMPTS, call, refused, run
from tiny_bundle import ROOM, write_manifest

from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.export.run import Bundle
from torch_pi2.export.text import write_chat


@pytest.fixture
def talking(copy: Path) -> Path:
    with Bundle(copy) as twin:
        assert write_chat(twin.tokenizer, copy)
    write_manifest(copy)
    return copy


def configured(folder: Path, **settings: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 9.0, **settings}))
    write_manifest(folder)


def asked(folder: Path, *requests: object, options: tuple[object, ...] = ()) -> list[dict[str, Any]]:
    """Lines that answer these."""
    text = "".join((request if isinstance(request, str) else json.dumps(request)) + "\n" for request in requests)
    command = [runner_calls.FOLDER / "pi2_runner", folder, "--requests", "-", *options]
    done = subprocess.run([*map(str, command)], input=text, capture_output=True, text=True, timeout=60, env={})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- how tokens are chosen ---


def test_greedy_answers_are_those_of_python(bundle: Path) -> None:
    """With penalties and stop strings, which the model's own text has somewhere."""
    with Bundle(bundle) as twin:
        for prompt in PROMPTS:
            text = twin.generate(prompt, 12).text
            for how in (
                {"repetition_penalty": 1.5},
                {"repetition_penalty": 0.3},
                {"stop": text[3:5]},
                {"stop": [text[-1], "never said"]},
                {"repetition_penalty": 2.0, "stop": text[1:2], "num_return_sequences": 3},
            ):
                wanted = twin.generate(prompt, 12, **how)  # type: ignore[arg-type]
                stops = [how["stop"]] if isinstance(how.get("stop"), str) else how.get("stop", [])
                options = [part for stop in stops for part in ("--stop", stop)]  # type: ignore[union-attr]
                for name in ("repetition_penalty", "num_return_sequences"):
                    options += [f"--{name.replace('_', '-')}", how[name]] if name in how else []
                found = run(bundle, "--prompt", prompt, "--max-new-tokens", 12, *options)
                assert found["sequences"] == [vars(answer) for answer in wanted.sequences], how
                assert not any(stop in wanted.text for stop in stops)  # type: ignore[union-attr]


def test_what_the_model_says_is_obeyed(copy: Path) -> None:
    """But not its temperature; what is asked for counts more."""
    with Bundle(copy) as twin:
        greedy = twin.generate("def", 24)
        penalised = twin.generate("def", 24, repetition_penalty=1.7)
    assert greedy.sequences != penalised.sequences
    configured(copy, repetition_penalty=1.7, top_k=1)
    options = ("--prompt", "def", "--max-new-tokens", 24)
    found = run(copy, *options)
    assert found["sequences"] == [vars(answer) for answer in penalised.sequences]
    settings = {"temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1.7, "stop": []}
    assert found["sampling"] == settings
    plain = run(copy, *options, "--repetition-penalty", 1)
    assert plain["sequences"] == [vars(answer) for answer in greedy.sequences]
    assert (
        run(copy, *options, "--repetition-penalty", 1, "--temperature", 50)["sequences"] == plain["sequences"]
    )  # top_k
    with Bundle(copy) as twin:
        assert twin.generate("def", 24).sequences == penalised.sequences
        assert twin.generate("def", 24, repetition_penalty=1.0).sequences == greedy.sequences
        configured(copy, stop_strings=greedy.text[4:6])
    with Bundle(copy) as twin:
        wanted = twin.generate("def", 24)
        assert (wanted.sequences[0].ended, wanted.text) == ("stop", greedy.text[: greedy.text.index(greedy.text[4:6])])
    assert run(copy, *options)["sequences"] == [vars(answer) for answer in wanted.sequences]
    assert run(copy, *options, "--stop", "never said")["sequences"] == plain["sequences"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("repetition_penalty", -1, "0.01 to 100; 1 is none, found -1"),
        ("top_k", 1.5, None),
        ("top_p", 7, "more than 0, at most 1, found 7"),
        ("min_p", "x", None),
        ("stop_strings", ["a", ""], None),
    ],
)
def test_what_makes_no_sense_is_named(copy: Path, name: str, value: object, expected: str | None) -> None:
    configured(copy, **{name: value})
    message = refused(copy, "--prompt", "d")
    assert message.startswith(f"{copy}/generation_config.json, {name}: expected {expected or ''}")
    with pytest.raises(ArtifactError, match=rf"generation_config.json, {name}: expected .*, found .*"):
        Bundle(copy)
    if name != "stop_strings":
        with Bundle(without(copy)) as twin, pytest.raises(ConfigError, match=name):
            twin.generate("d", **{name: value})  # type: ignore[arg-type]


def without(folder: Path) -> Path:
    """``folder``, whose model says nothing."""
    (folder / "generation_config.json").unlink()
    write_manifest(folder)
    return folder


# --- requests ---


def test_each_request_is_answered_as_if_alone(bundle: Path) -> None:
    ids = run(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 1)
    requests: list[Any] = [
        {"id": 7, "prompt": PROMPTS[0], "max_new_tokens": 9},
        {"id": "two", "prompt": PROMPTS[1], "temperature": 2.0, "seed": 5, "top_k": 9, "reuse": False},
        {"ids": [5, 6], "max_new_tokens": 4, "num_return_sequences": 3},
        {"prompt": PROMPTS[2], "stop": ["e", "\n"], "repetition_penalty": 1.2, "id": None},
    ]
    found = asked(bundle, *requests, options=("--max-new-tokens", 11))
    options: list[tuple[object, ...]] = [
        ("--prompt", PROMPTS[0], "--max-new-tokens", 9),
        ("--prompt", PROMPTS[1], "--max-new-tokens", 11, "--temperature", 2, "--seed", 5, "--top-k", 9),
        ("--ids", "5,6", "--max-new-tokens", 4, "--num-return-sequences", 3),
        ("--prompt", PROMPTS[2], "--max-new-tokens", 11, "--stop", "e", "--stop", "\n", "--repetition-penalty", 1.2),
    ]
    assert [line["sequences"] for line in found] == [run(bundle, *each)["sequences"] for each in options]
    assert [line["id"] for line in found] == [7, "two", None, None]
    assert found[0]["prompt_tokens"] == ids["prompt_tokens"]


def test_what_begins_alike_is_not_read_again(bundle: Path) -> None:
    first, *rest = asked(
        bundle,
        {"ids": [5, 6, 7, 8], "max_new_tokens": 3},
        *(
            {"ids": ids, "max_new_tokens": 3, "reuse": reuse}
            for ids in ([5, 6, 9], [5, 6, 9, 1])
            for reuse in (True, False)
        ),
    )
    assert first["known_tokens"] == 0
    assert [line["known_tokens"] for line in rest] == [2, 0, 3, 0]
    assert rest[0]["sequences"] == rest[1]["sequences"]
    assert rest[2]["sequences"] == rest[3]["sequences"]
    said = first["sequences"][0]["ids"]
    whole = [5, 6, 7, 8, *said[:-1]]
    first_ids, longer = (
        {"ids": [5, 6, 7, 8], "max_new_tokens": 3},
        {"ids": [*whole, 4], "max_new_tokens": 2, "reuse": True},
    )
    again = asked(bundle, first_ids, longer)[1]
    assert again["known_tokens"] == len(whole)  # its own answer, too
    alone = run(bundle, "--ids", ",".join(map(str, [*whole, 4])), "--max-new-tokens", 2)
    assert again["sequences"] == alone["sequences"]
    assert asked(bundle, first_ids, {**longer, "reuse": False})[1]["known_tokens"] == 0
    assert asked(bundle, first_ids, {"ids": longer["ids"]})[1]["known_tokens"] == 0  # unless it is a talk
    several = asked(bundle, {"ids": [5, 6], "num_return_sequences": 2}, {"ids": [5, 6, 7], "reuse": True})
    assert several[1]["known_tokens"] == 0


@pytest.mark.parametrize("count", [1, 3, 4])
def test_prompts_together_are_answered_as_if_alone(bundle: Path, count: int) -> None:
    """Each of another length; one that has no room for more ends before the others."""
    prompts = ["d", "def f(x", "a" * (ROOM - 6), "x = 3\n"][:count]
    with Bundle(bundle) as twin:
        alone = [twin.generate(prompt, 9).sequences[0] for prompt in prompts]
        assert len({tuple(answer.ids) for answer in alone}) == count
        tokens = sum(len(twin.tokenizer(prompt)["input_ids"]) for prompt in prompts)
    (found,) = asked(bundle, {"prompts": prompts, "max_new_tokens": 9})
    assert found["sequences"] == [vars(answer) for answer in alone]
    assert found["prompt_tokens"] == tokens
    assert found["decode_steps"] == max(len(answer.ids) for answer in alone) - 1


def test_a_stream_of_lines_is_the_text(bundle: Path) -> None:
    *pieces, whole = asked(bundle, {"id": 1, "prompt": PROMPTS[1], "max_new_tokens": 20, "stream": True})
    assert all(set(piece) == {"id", "sequence", "text"} for piece in pieces)
    assert "".join(piece["text"] for piece in pieces) == whole["sequences"][0]["text"]
    assert len(pieces) > 3


def test_what_is_wrong_with_a_request_is_said_and_the_others_are_answered(talking: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ("no JSON", "request: expected JSON, found "),
        ([1], "request: expected an object, found [1]. "),
        ({}, "request: expected prompt, prompts, ids or messages, found none or several of them. "),
        (
            {"prompt": "d", "ids": [1]},
            "request: expected prompt, prompts, ids or messages, found none or several of them. ",
        ),
        ({"prompt": "d", "max_new_tokens": 0}, "request, max_new_tokens: expected 1 or more, found 0. Correct the"),
        ({"ids": [1, 999]}, "prompt: expected tokens of one sequence below 300, found the token 999. "),
        (
            {"ids": [1], "stop": [""]},
            'request, stop: expected text, or a list of texts, none of them empty, found [""]. ',
        ),
        ({"ids": [1], "num_return_sequences": 99}, "num_return_sequences: expected 1 to 4, the lanes of the bundle, "),
        ({"ids": [1] * ROOM}, f"prompt: expected at most {ROOM - 1} tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "a system message before them or none, found tool. "),
        ({"ids": [1], "chat": True}, "request, chat: expected prompt beside it, found none. "),
        ({"ids": [1], "system": "x"}, "request, system: expected chat and prompt beside it, found none. "),
        ({"ids": [1], "id": 1 << 64}, "request, id: expected a number of at most 64 bits, or a text, found 1.8"),
        ({"prompt": "d" * (256 * ROOM)}, f"prompt: expected at most {ROOM - 1} tokens: the bundle has room for {ROOM}"),
    ]
    requests = [part for request, _ in wrong for part in (request, {"id": "sound", "ids": [5], "max_new_tokens": 1})]
    found = asked(talking, *requests)
    assert [line.get("id") for line in found[1::2]] == ["sound"] * len(wrong)
    assert all("sequences" in line for line in found[1::2])
    for (_, message), line in zip(wrong, found[::2], strict=True):
        assert set(line) == {"id", "error"}
        assert message in line["error"]


# --- talks ---


def test_a_talk_is_what_python_makes_of_its_messages(talking: Path) -> None:
    said = ["a", "b"]
    command = [runner_calls.FOLDER / "pi2_runner", talking, "--chat", "--max-new-tokens", 2]
    done = subprocess.run(
        [*map(str, command)],
        input="".join(f"{line}\n" for line in said),
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )
    assert done.returncode == 0, done.stderr
    messages = list[dict[str, str]]()
    with Bundle(talking) as twin:
        wanted = ""
        for line in said:
            messages.append({"role": "user", "content": line})
            made = twin.generate(messages, 2)
            messages.append({"role": "assistant", "content": made.text})
            wanted += made.text + "\n"
    assert done.stdout == wanted
    assert done.stderr.count("tokens/s") == 2 * len(said)


def test_messages_of_a_request_are_a_talk(talking: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
    ]
    (found,) = asked(talking, {"messages": turns, "max_new_tokens": 5})
    with Bundle(talking) as twin:
        made = twin.generate(turns, 5)
    assert found["sequences"] == [vars(answer) for answer in made.sequences]
    chat = json.loads((talking / "chat.json").read_text())
    (talking / "chat.json").write_text(json.dumps({**chat, "assistant": None}))
    write_manifest(talking)
    (found,) = asked(talking, {"messages": turns})
    assert (
        "expected a chat template that writes earlier answers as they are, found one that does more" in found["error"]
    )


def test_a_talk_without_room_forgets_what_was_said_first(talking: Path) -> None:
    command = [str(runner_calls.FOLDER / "pi2_runner"), str(talking), "--chat", "--max-new-tokens", "2"]
    text = "x" * ROOM + "\n" + "a\n" * 5
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, env={})
    assert done.returncode == 0
    assert done.stderr.count(f"pi2_runner: prompt: expected at most {ROOM - 1} tokens") == 1
    assert done.stderr.count("(the oldest question and its answer are forgotten: no room)") >= 3
    assert done.stderr.count("tokens/s") == 2 * 5


# --- measuring ---


def test_rounds_are_measured(bundle: Path) -> None:
    found = run(bundle, "--prompt", "def", "--max-new-tokens", 8, "--repeat", 5, "--warm-up", 2)
    assert (found["rounds"], found["warm_up"], found["new_tokens"]) == (5, 2, 8)
    for name in ("prompt_tokens_per_second", "tokens_per_second"):
        rates = found[name]
        assert 0 < rates["min"] <= rates["p10"] <= rates["median"] <= rates["p90"] <= rates["max"]
    assert set(found["before"]) == {"celsius", "battery_percent"}
    text = call(bundle, "--prompt", "def", "--max-new-tokens", 8, "--repeat", 2).stdout.decode()
    assert text.startswith("2 rounds, 8 tokens after ")
    assert "decoding" in text


# --- Ctrl-C ---


def signalled(
    command: list[object], after: bytes, text: str, one: signal.Signals, wait: float = 0.0
) -> tuple[int, str]:
    """Exit code, and all that was printed, of a program that gets ``one`` so long after it has printed ``after``."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, stderr=both, bufsize=0, env={}) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text.encode())
        before = b""
        while after not in before:
            piece = process.stdout.read(1)
            assert piece, before
            before += piece
        time.sleep(wait)
        process.send_signal(one)
        out, _ = process.communicate(timeout=60)
    return process.returncode, (before + out).decode()


def test_an_answer_that_is_ended_is_told_with_its_trace(predicted: Path, tmp_path: Path) -> None:
    trace, command = tmp_path / "trace", [runner_calls.FOLDER / "pi2_runner", predicted]
    several = "".join(json.dumps({"ids": [5, 6], "id": n}) + "\n" for n in range(300))
    code, out = signalled([*command, "--requests", "-", "--trace", trace], b'"id":3', several, signal.SIGINT)
    assert code == -signal.SIGINT, out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert 3 < len(lines) < 300
    last = lines[-1]  # one that was in its prompt has no answer
    assert last.get("error") == "interrupted" or last["sequences"][0]["ended"] in (
        "interrupted",
        "room",
        "eos",
        "length",
    )
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_talk_ends_by_a_signal_where_it_waits(talking: Path) -> None:
    command = [runner_calls.FOLDER / "pi2_runner", talking, "--chat", "--max-new-tokens", 1]
    for one in (signal.SIGINT, signal.SIGTERM):
        code, out = signalled(command, b"]\n", "a\n", one, wait=0.5)  # behind the figures of the answer
        assert code == -one, out
