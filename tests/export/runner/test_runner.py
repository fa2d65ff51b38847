"""The C++ runner (``make runner``): its tokenizer against Hugging Face's, its answers against the Python twin's."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executorch.devtools import Inspector
from exported import bundle_of, one_layer
from runner_calls import BUILT, PROMPTS, call, change, refused, run
from tiny_bundle import EOS, LANES, PROMPT, ROOM, TEXT, VOCAB, write_manifest
from tiny_tokenizers import TOKENIZERS, _odd

import torch_pi2
from torch_pi2.export.etdump import call_figures
from torch_pi2.export.manifest import Manifest, describe_files, sealed
from torch_pi2.export.run import Bundle
from torch_pi2.export.text import chat_text, write_chat

FIGURES = ("wanted", "hits", "reads", "bytes_read")
TOKENIZE = BUILT / "pi2_tokenize"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answer_is_the_twins(bundle: Path, prompt: str) -> None:
    with Bundle(bundle) as twin:
        expected = twin.generate(prompt, 12)
    found = run(bundle, "--prompt", prompt, "--max-new-tokens", 12)
    assert len(expected.prompt_ids) > (PROMPT if prompt is PROMPTS[1] else 0)  # one of them is read in pieces
    assert found["prompt_tokens"] == len(expected.prompt_ids)
    answer = expected.sequences[0]
    assert found["sequences"] == [{"text": answer.text, "ids": answer.ids, "ended": answer.ended}]


def test_text_is_streamed_and_is_whole_utf8(bundle: Path) -> None:
    expected = run(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 20)["sequences"][0]["text"]
    result = call(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 20)
    assert result.stdout.decode() == PROMPTS[0] + expected + "\n"
    assert "tokens/s" in result.stderr.decode().splitlines()[-1]


def test_ids_need_no_tokenizer(copy: Path) -> None:
    expected = run(copy, "--ids", "5,6,7", "--max-new-tokens", 5)["sequences"][0]
    for file in copy.glob("*token*"):
        file.unlink()
    write_manifest(copy)
    assert run(copy, "--ids", "5,6,7", "--max-new-tokens", 5)["sequences"] == [{**expected, "text": ""}]
    assert call(copy, "--ids", "5,6,7", "--max-new-tokens", 5).stdout.decode().split()[1:] == [
        str(i) for i in expected["ids"]
    ]


def test_each_of_several_answers_is_the_one_of_its_seed(bundle: Path) -> None:
    options = ("--prompt", PROMPTS[0], "--temperature", 0.9, "--top-p", 0.9, "--max-new-tokens", ROOM)
    several = run(bundle, *options, "--seed", 3, "--num-return-sequences", LANES - 1)
    alone = [run(bundle, *options, "--seed", 3 + i) for i in range(LANES - 1)]
    assert several["sequences"] == [one["sequences"][0] for one in alone]
    assert len({tuple(s["ids"]) for s in several["sequences"]}) == LANES - 1  # they differ: it was drawn
    assert several["decode_steps"] == max(one["decode_steps"] for one in alone)
    assert several["new_tokens"] == sum(len(s["ids"]) for s in several["sequences"])
    assert "room" in {s["ended"] for s in several["sequences"]}


def test_answer_ends_at_eos(copy: Path) -> None:
    ids = run(copy, "--prompt", PROMPTS[0], "--max-new-tokens", 12)["sequences"][0]["ids"]
    change(copy, eos=[EOS, ids[4]])
    found = run(copy, "--prompt", PROMPTS[0], "--max-new-tokens", 12)["sequences"][0]
    assert found["ids"] == ids[: ids.index(ids[4]) + 1]
    assert found["ended"] == "eos"


def test_logits_are_the_twins(bundle: Path, tmp_path: Path) -> None:
    found = run(bundle, "--prompt", PROMPTS[0], "--max-new-tokens", 6, "--logits", tmp_path / "logits.npy")
    with Bundle(bundle) as twin:
        prompt = twin.generate(PROMPTS[0], 1).prompt_ids
        expected = twin.logits(prompt + found["sequences"][0]["ids"][:-1], len(prompt))
    logits = np.load(tmp_path / "logits.npy")
    assert logits.shape == (6, 1, VOCAB)
    np.testing.assert_allclose(logits[:, 0], expected.numpy(), atol=1e-5)
    assert logits[:, 0].argmax(-1).tolist() == found["sequences"][0]["ids"]


def test_figures(bundle: Path, tmp_path: Path) -> None:
    found = run(bundle, "--prompt", PROMPTS[0], "--threads", 1, "--etdump", tmp_path / "dump", "--verify")
    assert found["threads"] == 1
    assert found["tokens_per_second"] > 0
    assert found["prompt_tokens_per_second"] > 0
    assert 0 < found["memory"]["resident_bytes"] <= found["memory"]["peak_bytes"] < 200 << 20
    assert set(found["stages"]) == {"prompt", "decode"}
    assert (tmp_path / "dump").read_bytes()[8:12] == b"ED00"  # an ETDump
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("budget", ["1.05MiB", "64MiB"])  # of 1 MiB without neurons
def test_figures_of_calls_are_those_of_the_report(predicted: Path, tmp_path: Path, budget: str) -> None:
    prompt = ("--ids", "1,2,3,4", "--max-new-tokens", 8)
    found = run(predicted, *prompt, "--budget", budget, "--etdump", tmp_path / "dump")
    inspector = Inspector(str(tmp_path / "dump"), delegate_metadata_parser=call_figures)
    events = [event for block in inspector.event_blocks for event in block.events if event.is_delegated_op]
    calls: Any = [event.delegate_debug_metadatas for event in events if event.name == "pi2_ffn.0"]
    of_calls = {name: sum(sum(call[name]) for call in calls) for name in calls[0]}
    of_all = {name: sum(found["stages"][stage][name] for stage in ("prompt", "decode")) for name in FIGURES}
    assert of_calls["tokens"] == 8  # the last of the prompt, and those of seven steps
    for name in ("wanted", "hits"):
        assert of_calls[name] == of_all[name] > 0
    for name in ("reads", "bytes_read"):  # what is preloaded is nobody's
        assert of_calls[name] <= of_all[name]
    assert of_calls["reads"] > 8 or budget == "64MiB"


def test_budget_is_for_all_of_the_process(bundle: Path) -> None:
    memory = run(bundle, "--prompt", "d", "--budget", "1.5MiB")["memory"]
    assert memory["budget_bytes"] == 3 << 19
    assert memory["cache_bytes"] == 4096  # no more than the store has
    message = refused(bundle, "--prompt", "d", "--budget", "1MiB")
    expected = f"more than {1 << 20} bytes (1 MiB), which it takes without any neurons"
    assert message.startswith(f"--budget: expected {expected}, found {1 << 20} bytes. ")


IDS = [7, 30, 201, 5, 90, 11]
ANSWER = ("--ids", ",".join(map(str, IDS)), "--max-new-tokens", 20)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a layer of our delegate."""
    return bundle_of(tmp_path_factory, "plain", lambda: torch_pi2.optimize(one_layer()), batches=(1,))[1]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With neurons that take more than all else together."""
    sizes = {"hidden_size": 256, "intermediate_size": 16384}
    return bundle_of(tmp_path_factory, "large", lambda: torch_pi2.optimize(one_layer(**sizes)), batches=(1,))[1]


@pytest.mark.parametrize("extra", [(), ("--engine", "pread", "--policy", "lru", "--threads", 1)])
def test_layers_of_the_store_are_the_twins(plain: Path, tmp_path: Path, extra: tuple[object, ...]) -> None:
    with Bundle(plain) as twin:
        expected = twin.generate(IDS, 20).sequences[0].ids
        rows = twin.logits(IDS + expected[:-1], len(IDS))
    assert len(set(expected)) > 5  # a text that says something
    found = run(plain, *ANSWER, "--logits", tmp_path / "logits.npy", *extra)
    assert found["sequences"][0]["ids"] == expected
    assert (found["hit_rate"], found["store"]["calls"]) == (1.0, 20)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy")[:, 0], rows.numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "whole_fits"), [(0.5, True), (0.2, False)])
def test_memory_of_a_budget_is_obeyed(large: Path, share: float, whole_fits: bool) -> None:
    whole = run(large, *ANSWER)
    manifest = Manifest.load(large)
    budget = manifest.fixed_bytes + int(share * manifest.ffn_bytes)
    assert (whole["memory"]["peak_bytes"] <= budget) == whole_fits  # that of a full cache has room for staging, too
    result = call(large, *ANSWER, "--budget", budget, "--json")
    assert result.stderr.decode().startswith("warning: the cache of ")
    assert "holds less than the 48.0 MiB of neurons that a token wants on average" in result.stderr.decode()
    found = json.loads(result.stdout)
    assert found["sequences"] == whole["sequences"]
    assert (whole["hit_rate"], whole["memory"]["budget_bytes"]) == (1.0, None)
    assert whole["memory"]["cache_bytes"] == whole["store"]["cache_bytes"]
    assert share - 0.1 <= found["hit_rate"] <= share
    assert 0.6 * budget < found["memory"]["peak_bytes"] <= budget
    assert found["store"]["cache_bytes"] <= found["memory"]["cache_bytes"] == (budget - manifest.fixed_bytes) & -1024


@pytest.mark.slow
def test_what_is_wrong_with_a_store_is_said(plain: Path, large: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "bundle"))
    store = folder / "model.pi2"
    whole, other = store.read_bytes(), (large / "model.pi2").read_bytes()
    hashes = [Manifest.load(path).model.model_hash[:8] for path in (plain, large)]
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    said = f"{store}: expected {len(whole)} bytes, as manifest.json says, found"
    store.unlink()
    assert f"{said} no such file" in refused(folder, *ANSWER)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    assert run(folder, *ANSWER, "--store", elsewhere)["sequences"] == run(plain, *ANSWER)["sequences"]
    for found, first, behind in (
        (
            whole[:-4096],
            f"{len(whole) - 4096} bytes: it is cut",
            f"{len(whole)} bytes, found {len(whole) - 4096} bytes",
        ),
        (other, f"{len(other)} bytes", f"weights {hashes[0]}, found {hashes[1]}. "),
        (bytes(damaged), None, "its neurons, found layer 0, neuron "),  # when it is wanted
    ):
        store.write_bytes(found)
        if first is not None:
            assert f"{said} {first}" in refused(folder, *ANSWER)
        manifest = write_sizes(folder)  # then only what opens it can tell
        where = f"{store}, layer 0" if first is None else f"neuron store {store}"
        assert f"{where}: expected {behind}" in refused(folder, *ANSWER)
        (folder / "manifest.json").write_text(manifest)


def write_sizes(folder: Path) -> str:
    """The manifest says what its files are now; what it said before."""
    before = (folder / "manifest.json").read_text()
    described = json.loads(before)
    files = describe_files(folder)
    described["files"] = {name: dict(vars(entry)) for name, entry in files.items()}
    described["bytes"]["store"] = files["model.pi2"].bytes
    (folder / "manifest.json").write_text(sealed(described))
    return before


#: All that Python strips, at both ends, and what it does not.
SPACES = "".join(chr(c) for c in range(0x3001) if chr(c).isspace())
SAID = [
    (None, SPACES + "d" + SPACES),
    (" s ", " u "),
    ("", "d"),
    (SPACES, "d"),
    ("s", "\u200bd\u200b"),
    (None, "é日\u3000"),
]


@pytest.mark.parametrize("template", ["{{ m.content | trim }}", "{{ m.content }}", "user"])
def test_chats_are_those_of_python(copy: Path, template: str) -> None:
    """The texts, by their tokens; ``user`` alone is stripped by the last."""
    if template == "user":
        template = "{{ m.content | trim if m.role == 'user' else m.content }}"
    with Bundle(copy) as twin:
        twin.tokenizer.chat_template = "{% for m in messages %}<" + template + ">{% endfor %}"
        assert write_chat(twin.tokenizer, copy)
        write_manifest(copy)
        for system, user in SAID:
            messages = [] if system is None else [{"role": "system", "content": system}]
            text = chat_text(twin.tokenizer, [*messages, {"role": "user", "content": user}])
            expected = twin.tokenizer(text, add_special_tokens=False)["input_ids"]
            asked = ("--chat", "--prompt", user, *(() if system is None else ("--system", system)))
            if len(expected) < ROOM:
                assert run(copy, *asked, "--max-new-tokens", 1)["prompt_tokens"] == len(expected), (system, user)
            else:
                assert f"found {len(expected)}. " in refused(copy, *asked)


def test_templates_that_are_not_described_are_named(copy: Path) -> None:
    asked = ("--chat", "--prompt", "d")
    (copy / "chat_template.jinja").write_text("{{ messages[0].content | upper }}")
    write_manifest(copy)
    found = "no such file: export leaves it out if what the template writes depends on what is said. "
    assert f"chat.json: expected the chat template of the bundle, found {found}" in refused(copy, *asked)
    chat = {"format": "torch_pi2.chat", "version": 1, "user": ["<", ">"], "system_user": None, "strips": True}
    (copy / "chat.json").write_text(json.dumps(chat))
    write_manifest(copy)
    message = "chat.json: expected format torch_pi2.chat, version 3, found torch_pi2.chat, version 1. "
    assert message in refused(copy, *asked)
    (copy / "chat.json").write_text(json.dumps({**chat, "version": 3, "strips": {}}))
    write_manifest(copy)
    message = (
        "system message: expected a chat template that writes a system message as it is, found one that takes none, or "
    )
    for system in ("s", ""):
        assert message in refused(copy, *asked, "--system", system)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"made_by": {"executorch": "1.4.1+cpu"}}, "made_by: expected executorch 1.5.1, as this runner is built with,"),
        ({"version": 1}, "expected format torch_pi2.bundle, version 4, found torch_pi2.bundle, version 1. "),
        ({"lanes": 8}, "methods: expected forward, decode_bN up to as many sequences as there are lanes, and fork"),
        ({"max_tokens": "many"}, 'max_tokens: expected a whole number, 0 to 2^53, found "many". '),
        ({"target": "qnn:SM8650"}, "expected ExecuTorch's QNN backend in this process, found none. Pass --backend"),
    ],
)
def test_manifests_that_it_cannot_run_are_refused(copy: Path, fields: dict[str, Any], message: str) -> None:
    change(copy, **fields)
    assert message in refused(copy, "--prompt", "d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "d" * 999], f"prompt: expected at most {ROOM - 1} tokens: the bundle has room for {ROOM}, "),
        (["--prompt", "d", "--num-return-sequences", LANES + 1], f"expected 1 to {LANES}, the lanes of the bundle"),
        (["--prompt", ""], "prompt: expected tokens of one sequence below 300, found no tokens. "),
        (["--ids", "1,300"], "prompt: expected tokens of one sequence below 300, found the token 300. "),
        (["--ids", "1,x"], "--ids: expected token ids such as 1,2,3, found 'x'. "),
        (["--prompt", "d", "--temperature", "nan"], "--temperature: expected 0 (greedy) or more, found 'nan'. "),
        (["--prompt", "d", "--ids", "1"], "arguments: expected --prompt or --ids, found both. "),
        (["--prompt", "d", "--chat"], "chat.json: expected the chat template of the bundle, found no such file: "),
        (["--ids", "1", "--chat"], "--chat: expected --prompt beside it, or nothing, found --ids. "),
        (["--chat", "--json"], "--chat without --prompt: expected it without --json, found both. "),
        (["--requests", "-", "--prompt", "d"], "--requests: expected it without --prompt or --ids, found both. "),
        (["--requests", "nowhere"], "nowhere: expected lines that can be read, found No such file or directory. "),
        (["--prompt", "d", "--warm-up", "2"], "--warm-up: expected --repeat beside it, found none. "),
        (
            ["--prompt", "d", "--repetition-penalty", "0"],
            "repetition_penalty: expected 0.01 to 100; 1 is none, found 0. ",
        ),
        (["--prompt", "d", "--system", "x"], "--system: expected --chat beside it, found none. "),
        (["--prompt", "d", "--budget", "2 apples"], "--budget: expected bytes, or text such as 2.5GiB or 700MB"),
        (["--prompt", "d", "--polcy", "lru"], "arguments: expected an option of this program, found '--polcy'. "),
        (
            ["--prompt", "d", "--policy", "new"],
            "policy of Pi2Backend: expected lru, sieve, s3-fifo, lfu, static or none, found 'new'. ",
        ),
        (["--prompt", "d", "--backend", "/no.so"], "--backend: expected a library that can be loaded, found /no.so"),
        (
            ["--prompt", "d", "--logits", "/no/such"],
            "/no/such: expected a file that can be written, found No such ",
        ),
        (["--prompt"], "--prompt: expected a value behind it, found none. "),
        (["another", "--prompt", "d"], "arguments: expected one bundle, found "),
    ],
)
def test_wrong_options_are_refused(bundle: Path, options: list[object], message: str) -> None:
    assert message in refused(bundle, *options)


_PARTS = [
    *["a", "b", "The", " ", "  ", "\n", "\t", ".", ",", "'s", "'S", "12", "7", "4", "é", "e\u0301", "日本", "🙂"],
    *["\u00a0", "\u3000", "\u180e", "\u0085", "if", "(", ")", "\r\n", "_", "\u0301\u0323", "ſ", "<|end|>", "<mask>"],
    *[
        "Tool",
        "<tool>",
        "<s>",
        "</s>",
        "가",
        "\u1100\u1161\u11a8",
        "ﬁ",
        "½",
        "\u212b",
        "xy",
        "▁",
        "<0x41>",
        "\0",
        "ǅ",
        "ß",
    ],
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_is_hugging_faces(name: str, tmp_path: Path) -> None:
    raw = TOKENIZERS[name]()
    raw.save(str(tmp_path / "tokenizer.json"))
    rng = random.Random(name)
    texts = ["".join(rng.choices(_PARTS, k=rng.randrange(15))) for _ in range(300)]
    texts += [TEXT[i : i + rng.randrange(200)] for i in range(0, len(TEXT), 97)]
    ids = [[rng.randrange(raw.get_vocab_size()) for _ in range(rng.randrange(12))] for _ in range(200)]
    lines = "".join(json.dumps(given) + "\n" for given in (*texts, *ids))
    result = subprocess.run(
        [TOKENIZE, tmp_path / "tokenizer.json"], input=lines, capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    expected = [e.ids for e in raw.encode_batch(texts)] + [raw.decode(i, skip_special_tokens=True) for i in ids]
    for given, theirs, ours in zip([*texts, *ids], expected, found, strict=True):
        assert ours == theirs, repr(given)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", {"type": "BertPreTokenizer"}, "expected ByteLevel, Digits, Metaspace, Split or Sequence"),
        ("post_processor", {"type": "BertProcessing"}, "expected ByteLevel, TemplateProcessing or Sequence"),
        (
            "model",
            {"type": "Unigram"},
            "model, type: expected BPE, found Unigram. This runner does not have it: use torch-pi2 run, or pass "
            "token ids with --ids.",
        ),
    ],
)
def test_unknown_parts_of_tokenizers_are_refused(
    tmp_path: Path, part: str, value: dict[str, str], message: str
) -> None:
    description = json.loads(_odd().to_str()) | {part: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    result = subprocess.run([TOKENIZE, tmp_path / "tokenizer.json"], input="", capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
