"""The C++ runner: requests that it refuses or cannot finish, sessions of an app, and parts that have no bundle."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import runner_calls
from runner_calls import PROMPTS, ROOT, call, refused, run
from tiny_bundle import LANES, ROOM, VOCAB
from tiny_tokenizers import TOKENIZERS
from transformers import PreTrainedTokenizerFast

from torch_pi2.decode.sequence import TextStream


def built(name: str, *args: object, lines: list[Any] | None = None) -> list[Any]:
    """What a program of the runner's tests answers to each line."""
    result = subprocess.run(
        [runner_calls.BUILT / name, *map(str, args)],
        input="".join(json.dumps(line) + "\n" for line in lines or []),
        capture_output=True,
        text=True,
        timeout=60,
        env={"LD_LIBRARY_PATH": str(runner_calls.FOLDER)},
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()] if lines else []


def test_what_cannot_be_finished_leaves_nothing_behind(bundle: Path, tmp_path: Path) -> None:
    assert "prompt: expected at most " in refused(bundle, "--prompt", "d" * 999, "--logits", tmp_path / "logits.npy")
    assert not list(tmp_path.iterdir())


def test_lanes_that_are_not_in_use_want_no_neurons(predicted: Path) -> None:
    """Greedy sequences want the same ones: three of them in four lanes as many as four."""
    options = ("--ids", "5,6", "--max-new-tokens", 12, "--num-return-sequences")
    three, four = (run(predicted, *options, n)["stages"]["decode"] for n in (3, 4))
    assert 11 * 16 < three["wanted"] == four["wanted"] < 11 * 400
    assert three["calls"] == four["calls"] == 11


def test_cache_of_the_environment_is_reported(predicted: Path) -> None:
    command = [runner_calls.FOLDER / "pi2_runner", predicted, "--ids", "5,6", "--json"]
    result = subprocess.run(command, capture_output=True, env={"PI2_CACHE_KIB": "32"}, check=True)
    found = json.loads(result.stdout)
    assert 0 < found["memory"]["cache_bytes"] <= 32 * 1024
    assert found["memory"]["cache_bytes"] == found["store"]["cache_bytes"]
    assert found["memory"]["cache_bytes"] < run(predicted, "--ids", "5,6")["memory"]["cache_bytes"]


def test_numbers_of_apps_are_checked_as_those_of_the_command_line(bundle: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": "nan"}, "temperature: expected 0 (greedy) or more, found nan. "),
        ({"temperature": "inf"}, "temperature: expected 0 (greedy) or more, found inf. "),
        ({"temperature": 1, "top_p": 0}, "top_p: expected more than 0, at most 1, found 0. "),
        ({"temperature": 1, "top_p": "nan"}, "top_p: expected more than 0, at most 1, found nan. "),
        ({"max_new_tokens": -3}, "max_new_tokens: expected 1 or more, or 0: as many as there is room for, found -3. "),
        ({"sequences": 0}, f"num_return_sequences: expected 1 to {LANES}, the lanes of the bundle, found 0. "),
        ({"ids": [-1]}, f"prompt: expected tokens of one sequence below {VOCAB}, found the token -1. "),
    ]
    asked = [{"generate": "a", "ids": [1], **given} for given, _ in wrong]
    opened = {"open": "a", "bundle": str(bundle)}
    found = built("pi2_session_test", lines=[opened, *asked, {"generate": "a", "ids": [1]}])
    for (_, message), said in zip(wrong, found[1:], strict=False):
        assert said["error"].startswith(message)
    assert found[-1]["sequences"][0]["ended"] == "room"
    assert len(found[-1]["sequences"][0]["ids"]) == ROOM - 1


def test_sessions_of_a_process_come_one_after_the_other(predicted: Path) -> None:
    first = {"open": "a", "bundle": str(predicted), "threads": 1, "budget": (1 << 20) + 32 * 1024}
    again = {"open": "b", "bundle": str(predicted)}
    asked = [{"generate": name, "ids": [5, 6], "max_new_tokens": 4} for name in ("a", "b")]
    found = built("pi2_session_test", lines=[first, again, asked[0], {"close": "a"}, again, asked[1]])
    assert found[1]["error"] == (
        "bundle: expected one that is open in this process, found a second one. Close the other one first."
    )
    assert found[2]["sequences"] == found[5]["sequences"]
    assert found[2]["threads"] == 1
    assert found[5]["threads"] == run(predicted, "--ids", "5,6")["threads"]  # not those of the one before
    assert found[2]["store"]["cache_bytes"] < found[5]["store"]["cache_bytes"] == found[5]["memory"]["cache_bytes"]


def test_characters_of_bytes_are_not_lost(tmp_path: Path) -> None:
    """Tokens <0xE6> and so on, as Llama 2 has them for characters outside of its vocabulary, are decoded in runs."""
    raw = TOKENIZERS["llama2"]()
    raw.save(str(tmp_path / "tokenizer.json"))
    twin = PreTrainedTokenizerFast(tokenizer_object=raw)
    bytes_of = [raw.token_to_id(f"<0x{byte:02X}>") for byte in "鬱憂鬱憂".encode()]
    assert raw.encode("鬱憂鬱憂", add_special_tokens=False).ids[-12:] == bytes_of
    a, b, end = raw.token_to_id("a"), raw.token_to_id("e"), raw.token_to_id("</s>")
    cases = [
        ([b, *bytes_of[:9]], [*bytes_of[:6], a], "鬱憂a"),  # the context would begin within the run
        ([b, *bytes_of[:7]], [*bytes_of[7:9], a], "鬱a"),  # the prompt ends within a character
        ([b, a], [*bytes_of[:7], a], "\ufffd" * 7 + "a"),  # the answer's run is no UTF-8
        ([b, *bytes_of], bytes_of * 3, "鬱憂" * 6),
        ([b, *bytes_of[:6], end, *bytes_of[6:]], [*bytes_of, a], "鬱憂鬱憂a"),  # special tokens do not end a run
        ([*bytes_of[1:], b], [a], "a"),
    ]
    found = built("pi2_parts_test", "stream", tmp_path / "tokenizer.json", lines=[case[:2] for case in cases])
    for (prompt, answer, expected), theirs in zip(cases, found, strict=True):
        assert theirs["text"] == expected
        if "\ufffd" not in expected:  # else pieces came before the run ended
            ours = TextStream(twin, before=prompt)
            pieces = [ours.add(token) for token in answer] + [ours.end()]
            assert theirs["pieces"] == pieces
            assert "".join(pieces) == expected


def test_parts_that_sanitizers_look_at(tmp_path: Path) -> None:
    """As make sanitize does, but shorter."""
    built("pi2_parts_test", "sampler")
    file = shutil.copy(ROOT / "export" / "runner" / "tests" / "tokenizer.json", tmp_path)
    built("pi2_parts_test", "tokenizer", file, 300)


def test_dependencies_run_nothing_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source package's build would run its code: its hash is compared before."""
    spec = importlib.util.spec_from_file_location("dependencies", ROOT / "export" / "runner" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    dependencies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dependencies)
    index, ran, deps = tmp_path / "index", tmp_path / "ran", tmp_path / "deps"
    sources = index / "pi2sham-1.0"
    sources.mkdir(parents=True)
    (sources / "setup.py").write_text(
        f"open({str(ran)!r}, 'a').close()\nfrom setuptools import setup\nsetup(name='pi2sham', version='1.0')\n"
    )
    archive = index / "pi2sham-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(sources, sources.name)
    arguments = ["--no-index", f"--find-links={index}", "--no-build-isolation"]
    monkeypatch.setattr(dependencies, "UNPACK", {"sham": lambda found, to: to.mkdir()})
    monkeypatch.setattr(dependencies, "SOURCES", {"sham": ("pi2sham==1.0", arguments, "0" * 64)})
    with pytest.raises(SystemExit, match=r"sham: expected pip to download pi2sham==1\.0 with SHA-256 0{64}, found:"):
        dependencies.fetch("sham", deps)
    assert not ran.exists()
    assert not (deps / "sham").exists()


def test_nothing_is_printed_before_the_prompt_is_taken(bundle: Path) -> None:
    for prompt, message in ((b"d" * 999, b"prompt: expected at most "), (b"d\xff", b"prompt: expected UTF-8")):
        result = subprocess.run(
            [runner_calls.FOLDER / "pi2_runner", bundle, b"--prompt=" + prompt], capture_output=True, env={}
        )
        assert message in result.stderr
        assert result.stdout == b""
    result = call(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 1)
    assert result.stdout.decode().startswith(PROMPTS[0])
