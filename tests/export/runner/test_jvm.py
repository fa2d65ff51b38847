"""What is for Android, its library and its Kotlin, under a JVM (``make jni``): the runner's answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runner_calls import FOLDER, PROMPTS, ROOT, call, run
from tiny_bundle import write_manifest

from torch_pi2.export.run import Bundle
from torch_pi2.export.text import write_chat

CLASSES = ROOT / "build" / "jni"
SOURCES = [
    ROOT / "export" / "android" / "jni.cc",
    *(ROOT / "export" / "android" / "src").rglob("*.kt"),
    *(ROOT / "tests" / "export" / "jni").glob("*.kt"),
]
ASKED = {"prompt": "def f1(x", "max_new_tokens": 20}


@pytest.fixture(scope="module", autouse=True)
def jvm() -> None:
    made = CLASSES / ".built"
    if shutil.which("java") is None or not made.exists():
        pytest.skip("needs a JDK (Debian: default-jdk-headless), and make jni")
    newest = max(path.stat().st_mtime for path in SOURCES)
    assert made.stat().st_mtime > newest, "older than its sources: make jni"


def calls(*args: object) -> list[str]:
    """What Calls.kt prints, a line each. JNI is checked for what Android's is."""
    classes = f"{CLASSES}:{ROOT / 'build' / 'deps' / 'kotlin' / 'kotlin.jar'}"
    command = [
        "java",
        "-Xcheck:jni",
        f"-Djava.library.path={FOLDER}",
        "-Dstdout.encoding=UTF-8",
        "-cp",
        classes,
        "calls.CallsKt",
    ]
    done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "WARNING in native method" not in done.stdout + done.stderr
    return done.stdout.removesuffix("\n").split("\n")  # U+2028 may be in one


def requests(folder: Path, tmp_path: Path, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (tmp_path / "requests").write_text("".join(json.dumps(one) + "\n" for one in asked))
    done = call(folder, "--requests", tmp_path / "requests")
    return [json.loads(line) for line in done.stdout.split(b"\n") if line]


def same(line: str, wanted: dict[str, Any]) -> None:
    found = json.loads(line)
    for name in ("sequences", "sampling", "seed", "prompt", "prompt_tokens", "known_tokens"):
        assert found[name] == wanted[name]
    assert [found["store"].get(name) for name in ("wanted", "hits")] == [
        wanted["store"].get(name) for name in ("wanted", "hits")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [False, True])
def test_answers_are_the_runners(engine: bool, bundle: Path, predicted: Path, tmp_path: Path) -> None:
    """Of a model without neurons, and of one whose neurons the engine chooses."""
    if engine:
        folder = shutil.copytree(predicted, tmp_path / "bundle")
        shutil.copy(bundle / "tokenizer.json", folder)
        write_manifest(folder)
    else:
        folder = bundle
    prompts = [*PROMPTS, '"\\\x01\u2028']
    drawn = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5}
    asked = [
        {"prompt": prompt, "max_new_tokens": 12, **how}
        for prompt in prompts
        for how in ({}, {**drawn, "stop": ["🙂"], "seed": 3})
    ]
    lines = calls("answers", folder)
    wanted = requests(folder, tmp_path, asked)
    assert len(lines) == len(wanted)
    for line, one in zip(lines, wanted):
        same(line, one)
    with Bundle(folder) as twin:
        for prompt, line in zip(prompts, lines[::2]):
            assert json.loads(line)["sequences"] == [vars(answer) for answer in twin.generate(prompt, 12).sequences]


def test_text_comes_in_whole_characters(bundle: Path, tmp_path: Path) -> None:
    """One of four tokens, which are two characters of Java: what the model says first is called by its bytes."""
    prompt = "def f1(x"
    options = ("--prompt", prompt, "--temperature", 9, "--seed", 1, "--max-new-tokens", 8)
    ids = run(bundle, *options)["sequences"][0]["ids"]
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = {token: name for name, token in vocab.items()}
    for token, byte in zip(ids, "ðŁĻĤ"):  # F0 9F 99 82, as byte-level tokenizers write them
        other = vocab[byte]
        vocab[names[token]], vocab[byte] = other, token
        names = {token: name for name, token in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_manifest(folder)
    wanted = run(folder, *options)["sequences"][0]
    assert wanted["ids"] == ids
    report, *pieces = calls("pieces", folder, prompt)
    assert json.loads(report)["sequences"] == [wanted]
    texts = [bytes(int(byte) % 256 for byte in piece.split()).decode() for piece in pieces]
    assert texts[0] == "🙂"
    assert "".join(texts) == wanted["text"]


def test_a_talk_goes_on_from_what_was_read(bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    with Bundle(folder) as twin:
        assert write_chat(twin.tokenizer, folder)
    write_manifest(folder)
    first, second = calls("talk", folder)
    messages = [{"role": "user", "content": "a"}]
    limit = {"max_new_tokens": 3}
    said = requests(folder, tmp_path, [{"messages": messages, **limit}])[0]["sequences"][0]["text"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "🙂"}]
    wanted = requests(folder, tmp_path, [{"messages": messages[:1], **limit}, {"messages": messages, **limit}])
    same(first, wanted[0])
    same(second, wanted[1])
    assert json.loads(second)["known_tokens"] > 0


def test_answers_are_ended(bundle: Path, tmp_path: Path) -> None:
    whole = requests(bundle, tmp_path, [ASKED])[0]
    cancelled, mine, mine_too, taken, collectors, in_prompt, last = calls("stops", bundle)
    answer = json.loads(cancelled)["sequences"][0]
    assert answer["ended"] == "interrupted"
    assert answer["ids"] == whole["sequences"][0]["ids"][: len(answer["ids"])]
    assert len(answer["ids"]) < 20
    assert mine == "ArithmeticException: mine 🙂"
    assert mine_too == "IllegalStateException: mine, too"
    assert taken == "3"
    assert collectors == "IllegalStateException: the collector's"
    assert in_prompt == "CancellationException: stopped before the first token"
    same(last, whole)


def test_errors_are_one_line(bundle: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "no🙂where"
    lines = calls("errors", bundle, nowhere)
    expected = (
        f"{nowhere}: expected a bundle: a folder with manifest.json, found no such folder. ",
        "--budget: expected more than ",
        "bundle: expected one that is open in this process, found a second one. ",
        "request: expected prompt, prompts, ids or messages, found none or several of them. ",
        "request: expected prompt, prompts, ids or messages, found none or several of them. ",
        f"{bundle / 'chat.json'}: expected the chat template of the bundle, ",
        "request: expected JSON, found ",
        "prompt: expected at most 39 tokens: ",
        None,  # half a character: as "?"
        "bundle: expected one answer at a time, found a call in onText. ",
        "request: expected prompt, prompts, ids or messages, found none or several of them. ",
        None,
    )
    assert len(lines) == len(expected)
    for line, begins in zip(lines, expected):
        kind = "NoRoom" if begins == "prompt: expected at most 39 tokens: " else "IllegalStateException"
        assert line.startswith('{"bundle":' if begins is None else f"{kind}: {begins}")
    same(lines[-1], requests(bundle, tmp_path, [ASKED])[0])


def test_closing_ends_an_answer(bundle: Path, tmp_path: Path) -> None:
    within, closed, beside, again = calls("closing", bundle)
    assert closed == "IllegalStateException: bundle: expected an open one, found a closed one. Open it again."
    for line in (within, beside):
        assert json.loads(line)["sequences"][0]["ended"] == "interrupted"
    same(again, requests(bundle, tmp_path, [ASKED])[0])


def test_threads_that_ask_cancel_and_close(bundle: Path, tmp_path: Path) -> None:
    (line,) = calls("races", bundle, 30)
    same(line, requests(bundle, tmp_path, [ASKED])[0])
