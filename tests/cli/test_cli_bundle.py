"""`torch-pi2 run`, `inspect`, `doctor --target` and `export` of bundles: output, JSON, exit codes and messages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Ran
from npu_report import NPU_REPORT
from tiny_bundle import ROOM, shared_bundle, write_manifest

import torch_pi2
from torch_pi2 import cli
from torch_pi2.errors import LibraryMissingError
from torch_pi2.export import api, describe, executorch, run
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.run import Bundle


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_bundle(tmp_path_factory)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object, code: int = 0) -> Ran:
        capfd.readouterr()
        ran = Ran(cli.main([str(a) for a in argv]), *capfd.readouterr())
        assert ran.code == code, ran.err
        return ran

    return run


def test_run_streams_the_text(command: Any, folder: Path) -> None:
    with Bundle(folder) as opened:
        wanted = opened.generate("def f", 20)
    ran = command("run", folder, "--prompt", "def f", "--max-new-tokens", 20)
    text, _, facts = ran.out.rpartition("\n[")
    assert text == f"def f{wanted.text}"
    assert facts.startswith("20 tokens, ")
    assert "tokens/s, prompt of 2 at " in facts
    found = command("run", folder, "--prompt", "def f", "--max-new-tokens", 20, "--json", "--threads", 1).json
    assert found["sequences"] == [{"text": wanted.text, "ids": wanted.sequences[0].ids, "ended": "length"}]
    assert (found["prompt_tokens"], found["new_tokens"], found["decode_steps"]) == (2, 20, 19)
    assert found["tokens_per_second"] == pytest.approx(19 / found["decode_seconds"])
    assert found["load_seconds"] > 0
    assert (found["target"], found["hit_rate"], found["streamed"]) == ("xnnpack", None, False)


@pytest.mark.slow
def test_run_says_nothing_of_executorch(folder: Path) -> None:
    command = [sys.executable, "-m", "torch_pi2", "run", str(folder), "--ids", "5,6", "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_comes_while_it_is_generated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is written and flushed before the next token is computed."""

    class Log:
        def __init__(self) -> None:
            self.events: list[str] = []

        def write(self, text: str) -> int:
            self.events.append(text)
            return len(text)

        def flush(self) -> None:
            self.events.append("flush")

    log = Log()
    decode = run._decode
    monkeypatch.setattr(run, "_decode", lambda *args: log.events.append("step") or decode(*args))
    monkeypatch.setattr(sys, "stdout", log)
    assert cli.main(["run", str(folder), "--ids", "5,6", "--max-new-tokens", "4"]) == 0
    assert log.events.count("step") == 3
    for i in (i for i, event in enumerate(log.events) if event == "step"):
        assert log.events[i - 1] == "flush"


def test_run_of_several_sequences_and_of_chats(command: Any, folder: Path) -> None:
    sampling = ("--temperature", 1, "--top-p", 0.9, "--seed", 3, "--max-new-tokens", 6)
    found = command("run", folder, "--ids", "1,2,3", "--num-return-sequences", 3, *sampling, "--json").json
    with Bundle(folder) as opened:
        wanted = opened.generate([1, 2, 3], 6, temperature=1.0, top_p=0.9, seed=3, num_return_sequences=3)
    assert [s["ids"] for s in found["sequences"]] == [s.ids for s in wanted.sequences]
    shown = command("run", folder, "--ids", "1,2,3", "--num-return-sequences", 3, *sampling).out
    assert all(f"[{i}] {s.text}" in shown for i, s in enumerate(wanted.sequences))
    chat = command("run", folder, "--prompt", "hi", "--system", "no", "--chat", "--max-new-tokens", 2, "--json").json
    with Bundle(folder) as opened:
        assert chat["prompt_tokens"] == len(opened.tokenizer("system: no\nuser: hi\n")["input_ids"])


def test_run_says_what_is_wrong(command: Any, folder: Path, tmp_path: Path) -> None:
    for argv, message in (
        ((folder, "--prompt", "x", "--system", "y"), "--system: expected --chat beside it"),
        ((folder, "--ids", "1", "--chat"), "--chat: expected --prompt beside it, found --ids"),
        ((folder, "--ids", ",".join(["1"] * ROOM)), f"prompt: expected at most {ROOM - 1} tokens"),
        ((folder, "--ids", "1", "--budget", "1KB"), "budget for"),
        ((folder, "--ids", "1", "--store", tmp_path / "no.pi2"), "no.pi2: expected 4096 bytes"),
        ((folder, "--ids", "1", "--num-return-sequences", 9), "1 to 4, the lanes"),
        ((tmp_path, "--ids", "1"), "expected a bundle: a folder with manifest.json, found none in it"),
        *(
            ((folder, "--ids", ids), "invalid comma-separated list of token ids value")
            for ids in ("1,x", "1_0", " 1", "\u0661")
        ),
        ((folder, "--ids", "1", "--trace", "-"), "Bundle(trace): expected a file, found standard output (-)"),
        ((folder, "--ids", "1", "--seed", "1" * 30), "argument --seed: expected at most"),
        ((folder,), "one of the arguments -p/--prompt --ids is required"),
    ):
        assert message in command("run", *argv, code=2).err
    error = command("run", tmp_path / "no", "--ids", "1", "--json", code=2).json["error"]
    assert (error["type"], error["found"]) == ("ArtifactError", "nothing of that name")


def test_inspect_shows_what_is_in_a_bundle(command: Any, folder: Path, tmp_path: Path) -> None:
    found = command("inspect", folder, "--verify", "--json").json
    assert found["contains"] == ["bundle"]
    assert found["manifest"] == Manifest.load(folder).to_json()
    assert found["bytes"] == sum(found["files"].values()) == found["verified_bytes"]
    assert found["methods"]["decode_b1"]["delegates"]["XnnpackBackend"] > 1
    assert found["methods"]["decode_b4"]["hot_chunks"] == [4]
    assert found["methods"]["fork"]["operators"]["aten::index_select.out"] == 2
    shown = command("inspect", folder).out
    for text in (
        "bundle version 4: decoder for xnnpack",
        "TinyDecoder (tiny), 1 FFNs of hidden size 16 in float32",
        found["manifest"]["files"]["model.pte"]["sha256"],
    ):
        assert text in shown
    assert "verified" not in shown
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("decode_b4"))
    assert row == ["decode_b4", "4", "1", "none", str(sum(found["methods"]["decode_b4"]["operators"].values())), "4"]

    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    data = bytearray((damaged / "tokenizer.json").read_bytes())
    data[10] ^= 1
    (damaged / "tokenizer.json").write_bytes(data)
    command("inspect", damaged)
    assert "tokenizer.json: expected CRC32C" in command("inspect", damaged, "--verify", code=2).err
    assert "tokenizer.json: expected CRC32C" in command("run", damaged, "--ids", "1", code=2).err
    assert "tokenizer.json: expected CRC32C" in command("run", damaged, "--ids", "1", "--verify", code=2).err
    (damaged / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (damaged / "chat_template.jinja").write_text(" " * (folder / "chat_template.jinja").stat().st_size)
    assert "chat_template.jinja: expected CRC32C" in command("run", damaged, "--ids", "1", code=2).err
    command("run", damaged, "--ids", "1", "--no-verify")


def test_inspect_shows_what_the_npus_part_loses(command: Any, folder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(folder, tmp_path / "npu"))
    assert command("inspect", folder, "--json").json["npu"] is None
    assert "NPU" not in command("inspect", folder).out
    (bundle / "qnn.json").write_text(json.dumps(NPU_REPORT))
    write_manifest(bundle)
    assert command("inspect", bundle, "--json").json["npu"] == NPU_REPORT
    shown = command("inspect", bundle).out
    assert "NPU: SM8650, QNN v2.49.40\n" in shown
    assert (
        "nats per token on 508 tokens of calibration data after the tokens that hot parts were quantised on: without "
        "the NPU 2.0000, with its feed-forward layers (simulated in PyTorch) of decode_b1 2.0100 (+0.0100, +0.50%)"
    ) in shown
    (bundle / "qnn.json").write_text(json.dumps(NPU_REPORT | {"loss": None}))
    write_manifest(bundle)
    assert "loss with the NPU's part: not measured" in command("inspect", bundle).out
    (bundle / "qnn.json").write_text("{}")
    write_manifest(bundle)
    assert "qnn.json: expected torch_pi2.qnn version 1" in command("inspect", bundle, code=2).err


def test_inspect_without_executorch_says_what_is_not_known(
    command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: Path) -> None:
        raise LibraryMissingError("executorch", expected="it", found="nothing", fix="Get it.")

    monkeypatch.setattr(describe, "describe_program", missing)
    found = command("inspect", folder, "--json").json
    assert found["unknown"] == "executorch: expected it, found nothing. Get it."
    assert "delegates and operators: not known (executorch: expected it" in command("inspect", folder).out


def test_doctor_says_what_a_target_needs(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = command("doctor", "--target", "xnnpack", "--json").json
    assert good["target"] == {"name": "xnnpack", "problems": []}
    assert "target     xnnpack: can be exported for here" in command("doctor", "--target", "xnnpack").out
    assert "target" not in command("doctor").out.replace("--target", "")
    bad = command("doctor", "--target", "qnn:SM1", "--json", code=1).json
    assert not bad["ok"]
    assert any("SM8650" in p["expected"] and p["found"] == "'SM1'" for p in bad["target"]["problems"])
    assert "expected xnnpack, or qnn:" in command("doctor", "--target", "qnn", code=2).err

    def missing() -> None:
        raise LibraryMissingError("executorch", expected="it", found="nothing", fix="Get it.")

    monkeypatch.setattr(executorch, "load_library", missing)
    assert (
        "xnnpack: cannot be exported for yet:\n  executorch: expected it"
        in command("doctor", "--target", "xnnpack", code=1).out
    )


def test_export_refuses_before_it_loads_anything(command: Any, tmp_path: Path) -> None:
    assert "found 'tpu'" in command("export", tmp_path, "--out", tmp_path / "b", "--target", "tpu", code=2).err
    for argv, message in (
        (("--target", "qnn:SM1"), "Qualcomm SoC of the target"),
        (("--batches", "1,0"), "argument --batches: expected 1 or more, found 0"),
        (("--batches", "1;2"), "invalid comma-separated list of sizes value"),
        (("--hot", "1"), "invalid comma-separated list of batch=chunks value"),
        (("--linears", "int2"), "invalid choice"),
    ):
        assert message in command("export", tmp_path, "--out", tmp_path / "b", *argv, code=2).err
    assert "model" in command("export", tmp_path, "--out", tmp_path / "b", code=2).err
    assert not (tmp_path / "b").exists()


def test_export_passes_on_what_is_asked(
    command: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter itself is tested on its own: it takes long."""
    given: dict[str, Any] = {}

    def exporter(model: torch.nn.Module, out: Path, **settings: Any) -> Path:
        given.update(settings, model=model)
        return Path(shutil.copytree(folder, out))

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(api, "export", exporter)
    monkeypatch.setattr("torch_pi2.cli.models.load_dense", lambda args: None)
    monkeypatch.setattr(torch_pi2, "optimize", lambda dense: model)
    monkeypatch.setattr("torch_pi2.cli.models.load_tokenizer", lambda args: "tokenizer")
    out = tmp_path / "bundle"
    options = ("--max-tokens", 99, "--batches", "1,2", "--hot", "1=3,2=4", "--hot-prompts", "32,64")
    ran = command("export", "m", "--out", out, *options)
    assert (given["model"], given["target"], given["max_tokens"], given["batches"]) == (model, "xnnpack", 99, (1, 2))
    assert (given["hot"], given["hot_prompts"], given["calibration"]) == ({1: 3, 2: 4}, (32, 64), None)
    assert f"{out}: decoder for xnnpack, methods forward, decode_b1" in ran.out
    command("export", "m", "--out", tmp_path / "three", "--hot-prompts", "none")
    assert given["hot_prompts"] == ()


def test_export_with_a_budget_leaves_neurons_in_their_store(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_pi2.synthetic(tmp_path / "m", "tiny", layers=1)
    torch_pi2.pack(tmp_path / "m", tmp_path / "packed")
    given: list[int] = []

    def exporter(model: Any, *_: Any, **settings: Any) -> None:
        given.append(torch_pi2.stats(model)["budget"].total)
        raise LibraryMissingError("export", expected="it", found="enough", fix="None.")

    monkeypatch.setattr(api, "export", exporter)
    command("export", tmp_path / "packed", "--out", tmp_path / "b", "--budget", "64MB", "--max-tokens", 32, code=2)
    assert given == [64_000_000]
