"""The command line, end to end on a tiny model: JSON contract, exit codes, messages, and what each verb writes."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Ran
from tiny_models import _hf, drelu_module, randomise
from tiny_tokenizers import byte_tokenizer

import torch_pi2
from torch_pi2 import cli
from torch_pi2.cli import common

TEXT = "".join(f"def f{i}(x, y={i}):\n    return x * {i % 7} + y\n\n" for i in range(200))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random dReLU model with a tokenizer, as a user's checkpoint with its own modelling code."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    module = drelu_module()
    torch.manual_seed(0)
    config = module.DReLULlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        hidden_act="relu",
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    config.auto_map = {
        "AutoConfig": "modeling_drelu_llama.DReLULlamaConfig",
        "AutoModelForCausalLM": "modeling_drelu_llama.DReLULlamaForCausalLM",
    }
    model = module.DReLULlamaForCausalLM(config)
    model.save_pretrained(folder)
    byte_tokenizer(TEXT).save_pretrained(folder)
    shutil.copy(module.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def made(model_dir: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders written by profile, fit, plan and optimize."""
    root = tmp_path_factory.mktemp("made")
    shared = [str(model_dir), "--trust-remote-code"]
    data = ["--text", str(text_file), "--tokens", "2048"]
    steps = {
        "stats": ["profile", *shared, *data],
        "predictors": ["fit", *shared, "--stats", str(root / "stats"), *data, "--method", "lowrank"],
        "plan": ["plan", *shared, "--stats", str(root / "stats"), "--predictors", str(root / "predictors")],
        "exact": ["optimize", *shared, *data, "--method", "exact", "--no-verdict"],
        "lowrank": ["optimize", *shared, *data, "--method", "lowrank", "--no-verdict"],
    }
    for name, argv in steps.items():
        assert cli.main([*argv, "--out", str(root / name), "--json"]) == 0, name
    return {name: root / name for name in steps}


# --- the contract of every verb ---


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_help_has_an_example_that_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    example = text.partition("example:\n")[2].strip().splitlines()[0]
    assert example.startswith(f"torch-pi2 {verb}")
    assert "--json" in text
    import shlex

    cli.build_parser().parse_args(shlex.split(example)[1:])


# --- verbs ---


def test_inspect_reads_what_verbs_write(command, made) -> None:
    from transformers import AutoModelForCausalLM

    stats, predictors, plan, exact = (
        command("inspect", made[name], "--json").json for name in ("stats", "predictors", "plan", "exact")
    )
    assert [found["contains"] for found in (stats, predictors, plan)] == [["stats"], ["predictors"], ["plan"]]
    assert [layer["key"] for layer in stats["layers"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for layer in stats["layers"]:
        assert 0.5 < layer["sparsity"] < 0.95  # dReLU of random weights: three quarters are zero
        assert layer["active_share"] == pytest.approx(1 - layer["sparsity"])
        assert 1000 < layer["tokens"] < 2048 + 8 * 128  # calibration ends with a whole batch
    assert all(0 < layer["recall"] <= 1 and layer["rank"] >= 1 and layer["bytes"] > 0 for layer in predictors["layers"])
    assert all(layer["hot"] + layer["cold"] == 64 for layer in plan["layers"])
    assert {layer["form"] for layer in plan["layers"]} == {"relu(gate)*relu(up)"}
    assert exact["contains"][0] == "model"
    assert {layer["method"] for layer in exact["layers"]} == {"exact"}
    AutoModelForCausalLM.from_pretrained(made["exact"], trust_remote_code=True, local_files_only=True)


def test_settings_reach_the_plan(command, model_dir, made, tmp_path) -> None:
    base = ["plan", model_dir, "--trust-remote-code", "--stats", made["stats"], "--method", "exact", "--json"]
    none_hot = command(*base, "--out", tmp_path / "a", "--hot-frequency", "1.0").json
    some_hot = command(*base, "--out", tmp_path / "b", "--hot-frequency", "0.1").json
    assert sum(layer["hot"] for layer in none_hot["layers"]) < sum(layer["hot"] for layer in some_hot["layers"])


def test_optimize_takes_what_profile_and_fit_wrote(command, model_dir, text_file, made, tmp_path) -> None:
    argv = ["--stats", made["stats"], "--predictors", made["predictors"], "--method", "lowrank", "--text", text_file]
    found = command("optimize", model_dir, "--trust-remote-code", *argv, "--out", tmp_path / "m", "--json").json
    fitted = command("inspect", made["predictors"], "--json").json
    assert [layer["rank"] for layer in found["layers"]] == [layer["rank"] for layer in fitted["layers"]]


def test_scores_and_loss_budgets(command, text_file, tmp_path) -> None:
    randomise(_hf("Llama", vocab_size=300)).save_pretrained(tmp_path / "swiglu")
    byte_tokenizer(TEXT).save_pretrained(tmp_path / "swiglu")
    base = [tmp_path / "swiglu", "--text", text_file, "--tokens", "2048", "--method", "threshold", "--score", "output"]
    found = command("optimize", *base, "--max-loss", "0.3", "--out", tmp_path / "m", "--no-verdict", "--json").json
    assert (found["thresholds"]["score"], found["thresholds"]["max_loss"]) == ("output", 0.3)
    assert found["thresholds"]["loss_change"] <= 0.3
    assert "thresholds on the score 'output': loss" in command("inspect", tmp_path / "m").out
    command("profile", *base, "--out", tmp_path / "stats", "--json")
    argv = [
        "plan",
        tmp_path / "swiglu",
        "--stats",
        tmp_path / "stats",
        "--method",
        "threshold",
        "--out",
        tmp_path / "p",
    ]
    planned = command(*argv, "--score", "output", "--json").json
    assert all(layer["expected_active"] == pytest.approx(0.5, abs=0.02) for layer in planned["layers"])
    error = _error(command(*argv, "--json", ok=False))
    assert error["found"] == "score='output' and max_loss=None"


def test_exact_generation_is_the_dense_models(command, made) -> None:
    argv = ["generate", made["exact"], "--prompt", "def f1(", "--max-new-tokens", "12", "--trust-remote-code", "--json"]
    sparse, dense = command(*argv).json, command(*argv, "--dense").json
    assert sparse["text"] == dense["text"]
    assert (sparse["sparse"], dense["sparse"]) == (True, False)
    assert 1 <= sparse["new_tokens"] <= 12


def test_several_sequences_in_one_batch(command, made) -> None:
    argv = ["generate", made["exact"], "--prompt", "def", "--max-new-tokens", "8", "--trust-remote-code"]
    argv += ["--num-return-sequences", "3"]
    sampling = ["--temperature", "1.5"]
    made_at_once, again = (command(*argv, *sampling, "--json").json for _ in range(2))
    assert len(set(made_at_once["texts"])) == 3
    assert made_at_once["texts"] == again["texts"]
    assert made_at_once["text"] == made_at_once["texts"][0]
    assert made_at_once["sequences_by_step"][0] == 3
    assert 3 < made_at_once["new_tokens"] <= 24
    assert command(*argv, *sampling, "--seed", "1", "--json").json["texts"][:2] == made_at_once["texts"][1:]
    shown = command(*argv, *sampling).out
    assert shown.startswith("--- 1 of 3\ndef")
    assert "--- 3 of 3\ndef" in shown
    assert "sequences that would all be the most likely one" in _error(command(*argv, "--json", ok=False))["found"]


def test_a_budget_has_room_for_the_keys_and_values_of_all_sequences(command, made, tmp_path) -> None:
    torch_pi2.pack(made["exact"], tmp_path / "store")
    argv = ["generate", tmp_path / "store", "--prompt", "def", "--max-new-tokens", "800", "--trust-remote-code"]
    argv += ["--temperature", "1", "--budget", "1MB", "--json"]
    one, many = (_error(command(*argv, "--num-return-sequences", n, ok=False))["expected"] for n in (1, 40))
    one_mib, many_mib = (float(re.search(r"at least ([\d.]+) MiB", text)[1]) for text in (one, many))
    assert many_mib > one_mib + 20


def test_guesses_from_the_prompt_change_no_text(command, made) -> None:
    prompt = "def f1(a, b):\n    return a\n\ndef f1(a, b):\n    return a\n\ndef f1("
    argv = ["generate", made["exact"], "--prompt", prompt, "--max-new-tokens", "24", "--trust-remote-code"]
    plain, guessed = command(*argv, "--json").json, command(*argv, "--prompt-lookup", "4", "--json").json
    assert guessed["text"] == plain["text"]
    assert "drafts" not in plain
    assert 0 < guessed["drafts"]["accepted"] <= guessed["drafts"]["drafted"]
    assert guessed["drafts"]["passes"] <= len(guessed["sequences_by_step"])
    assert " drafted tokens accepted]" in command(*argv, "--prompt-lookup", "4").out
    eight = "argument --prompt-lookup: expected at most 7, found 8"
    alone = "--draft-tokens: expected --draft-model beside it"
    both = "--draft-model with --prompt-lookup: expected one of them"
    several = "--prompt-lookup with --num-return-sequences: expected one of them"
    wrong = [(["--prompt-lookup", "8"], eight), (["--draft-tokens", "3"], alone), (["--draft-model", "m"], both)]
    for option, message in (*wrong, (["--num-return-sequences", "2"], several)):
        assert message in command(*argv, "--prompt-lookup", "4", *option, ok=False).err


def test_drafts_of_another_model_change_no_text(command, made) -> None:
    argv = ["generate", made["exact"], "--prompt", "def f1(a, b):", "--max-new-tokens", "40", "--trust-remote-code"]
    draft = ["--draft-model", made["lowrank"], "--draft-tokens", "3"]
    for drawn in ([], ["--temperature", "0.3", "--seed", "7"]):
        plain, drafted = command(*argv, *drawn, "--json").json, command(*argv, *drawn, *draft, "--json").json
        assert drafted["text"] == plain["text"]
        assert 0 <= drafted["drafts"]["accepted"] <= drafted["drafts"]["drafted"]  # steps this short seldom draft
    assert "nothing of that name" in command(*argv, "--draft-model", "no/such.gguf", ok=False).err


def test_generate_records_a_trace(command, made, tmp_path) -> None:
    argv = ["generate", made["lowrank"], "--prompt", "def f1(", "--max-new-tokens", "3", "--trust-remote-code"]
    assert command(*argv, "--json").json["trace"] is None
    path = tmp_path / "out.json"
    shown = command(*argv, "--trace", path).out
    assert f" events into {path}]" in shown
    assert "recording 0 events" not in shown
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"ffn", "compute", "predict"} <= names
    found = command(*argv, "--trace", path, "--json").json["trace"]
    assert (found["path"], found["lost_events"]) == (str(path), 0)
    error = _error(command(*argv, "--trace", tmp_path, "--json", ok=False))
    assert error["type"] == "ArtifactError"


@pytest.mark.parametrize("method", ["exact", "lowrank"])
def test_eval_compares_dense_and_sparse(command, made, text_file, method) -> None:
    argv = ["--text", text_file, "--max-tokens", "500", "--decode-tokens", "3", "--rounds", "2", "--trust-remote-code"]
    found = command("eval", made[method], *argv, "--json").json
    dense, sparse = found["dense"], found["sparse"]
    assert dense["tokens"] == sparse["tokens"]
    assert 490 < dense["tokens"] <= 500
    bits = dense["nats_per_token"] * dense["tokens"] / math.log(2)
    assert dense["bits_per_byte"] == pytest.approx(bits / dense["bytes"])
    assert sparse["neurons"] == dense["tokens"] * 2 * 64  # every scored token, in both layers
    assert sparse["total_ms"] > 0
    if method == "exact":
        assert sparse["nats_per_token"] == pytest.approx(dense["nats_per_token"], rel=1e-5)
        assert sparse["neurons_computed"] == 1
        assert sparse["neurons_used"] < 0.5
    shown = command("eval", made[method], *argv).out
    assert "bits per byte" in shown


def test_doctor_knows_the_library_and_the_extras(command) -> None:
    found = command("doctor", "--json").json
    assert found["ok"] is True
    assert found["library"]["loaded"] is True
    assert found["library"]["kernels"] in found["library"]["kernels_built"]
    assert found["versions"]["torch"] == torch.__version__
    assert {"hf", "dev"} <= set(found["extras"])
    for extra in found["extras"].values():
        assert (extra["install"] is not None) == bool(extra["missing"])
    assert "all is well" in command("doctor").out
    alone = command("doctor", "--measure-folder", ".", ok=False).err
    assert "--measure-folder: expected --measure beside it, found none. Pass --measure, or" in alone


def test_doctor_reports_a_missing_library(command, monkeypatch) -> None:
    from torch_pi2.errors import LibraryMissingError
    from torch_pi2.ops import library

    def missing() -> None:
        raise LibraryMissingError("the C++ library", expected="it", found="no such file", fix="make install")

    monkeypatch.setattr(library, "load", missing)
    found = command("doctor", "--json", ok=False)
    assert found.code == 1
    assert "make install" in found.json["library"]["problem"]
    assert "NOT LOADED" in command("doctor", ok=False).out


# --- mistakes ---


def _error(ran: Ran) -> dict[str, str]:
    assert ran.code == 2
    error = ran.json["error"]
    assert set(error) == {"type", "what", "expected", "found", "fix"}
    assert all(error.values())
    assert error["fix"] in ran.err
    return error


@pytest.mark.parametrize(
    ("argv", "field", "text"),
    [
        (("profile", "{tmp}/nowhere"), "fix", "Check the name"),
        (("profile", "{broken}", "--trust-remote-code"), "what", "broken"),
        (("profile", "{model}"), "fix", "--trust-remote-code"),
        (("profile", "{model}", "--trust-remote-code", "--text", "{tmp}/nowhere"), "found", "No such file"),
        (("profile", "{model}", "--trust-remote-code", "--text", "{tmp}/binary"), "found", "not UTF-8"),
        (("profile", "{model}", "--trust-remote-code", "--text", "{tmp}/short"), "type", "CalibrationError"),
        (("profile", "{model}", "--out", "{tmp}/short/deeper"), "expected", "a folder that can be written"),
        (("optimize", "{model}", "--trust-remote-code", "--predictors", "{predictors}"), "expected", "--stats beside"),
    ],
    ids=str,
)
def test_mistakes(command, model_dir, made, tmp_path, argv, field, text) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("x = 1\n")
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    paths = {"tmp": tmp_path, "broken": broken, "model": model_dir, "predictors": made["predictors"]}
    out = () if "--out" in argv else ("--out", tmp_path / "out")
    error = _error(command(*(str(a).format(**paths) for a in argv), *out, "--json", ok=False))
    assert text in error[field]
    assert not (tmp_path / "out").exists()


def test_optimize_replaces_no_folder_of_something_else(command, model_dir, tmp_path) -> None:
    source = shutil.copytree(model_dir, tmp_path / "outer" / "dense")
    (tmp_path / "outer" / "pi2").mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    before = sorted(tmp_path.rglob("*"))
    for out, found in (
        (tmp_path / "thesis", "a folder with other files in it: thesis.tex, and no folder pi2/"),
        (tmp_path / "outer", "outer"),
        (source / "sparse", "sparse"),
    ):
        argv = ["optimize", source, "--trust-remote-code", "--method", "exact", "--out", out]
        ran = command(*argv, ok=False)
        assert (ran.code, found in ran.err) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_cannot_be(command, made) -> None:
    long = "a" * 300
    for argv in (
        ["inspect", long],
        ["generate", long, "--prompt", "x"],
        ["run", long, "--ids", "1"],
        ["pack", made["exact"], long],
    ):
        assert _error(command(*argv, "--json", ok=False))["found"] == "File name too long"
    assert "'a\\udcff': expected text" in command("inspect", "a\udcff", ok=False).err


@pytest.mark.parametrize(
    ("option", "found"),
    [
        (("--seed", 10**30), "at most 4611686018427387903, found 1000"),
        (("--seed", "-1"), "expected 0 or more, found -1"),
        (("--seed", "1_0"), "invalid seed value: '1_0'"),
        (("--threads", 4294967297), "at most 1024, found 4294967297"),
        (("--temperature", "warm"), "invalid float value: 'warm'"),
        (("--max-new-tokens", "\u0661"), "invalid positive value"),
    ],
)
def test_numbers_out_of_range(command, option, found) -> None:
    assert found in _error(command("generate", "m", "--prompt", "x", *option, "--json", ok=False))["found"]


def test_folders_that_hold_something_else(command, model_dir, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for argv in (
        ["inspect", tmp_path / "empty"],
        ["inspect", tmp_path / "nowhere"],
        ["eval", model_dir],
        ["eval", tmp_path / "nowhere"],
        ["plan", model_dir, "--stats", tmp_path / "empty", "--out", tmp_path / "p"],
        ["plan", model_dir, "--stats", tmp_path / "empty", "--predictors", tmp_path / "empty", "--out", tmp_path / "p"],
    ):
        assert _error(command(*argv, "--json", ok=False))["type"] == "ArtifactError"


def test_statistics_of_another_model_are_refused(command, model_dir, made, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.5)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    argv = ["plan", other, "--trust-remote-code", "--stats", made["stats"], "--out", tmp_path / "p", "--json"]
    assert _error(command(*argv, ok=False))["type"] == "StaleArtifactError"


def test_interrupting_is_quiet(monkeypatch, capsys) -> None:
    def interrupted(_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_pi2.cli.doctor.run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err.startswith("torch-pi2: interrupted")


def test_what_libraries_print_does_not_reach_standard_output(monkeypatch, capsys) -> None:
    def chatty(_args: object) -> dict[str, Any]:
        print("downloading the internet")
        return {"ok": True}

    monkeypatch.setattr("torch_pi2.cli.doctor.run", chatty)
    assert cli.main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"ok": True}
    assert "downloading" in err


@pytest.mark.slow
@pytest.mark.parametrize(("split", "tokens"), [("train", 100_000), ("heldout", 50_000)])
def test_samples_of_the_library_are_long_enough_and_not_only_heads(split: str, tokens: int) -> None:
    from torch_pi2.profiling.text import read_files, stdlib_files

    tokenizer = byte_tokenizer(TEXT)
    text = common.stdlib_sample(split, tokenizer, tokens)
    assert tokens <= len(tokenizer(text)["input_ids"]) < 2 * tokens
    excerpts = text.split("\f\n")
    heads = {t[:64] for t in read_files(stdlib_files(split))}
    assert sum(e[:64] in heads for e in excerpts) < 0.6 * len(excerpts)
    assert text == common.stdlib_sample(split, tokenizer, tokens)


def test_inspect_of_a_checkpoint(command, model_dir) -> None:
    found = command("inspect", model_dir, "--trust-remote-code", "--json").json
    assert found["contains"] == ["checkpoint"]
    assert [(layer["form"], layer["method"], layer["lossless"]) for layer in found["layers"]] == [
        ("relu(gate)*relu(up)", "exact", True)
    ] * 2
    shown = command("inspect", model_dir, "--trust-remote-code").out
    assert "not optimised: no weights were read" in shown
    assert "zeros: lossless" in shown
    assert "--verify: expected files with checksums" in command("inspect", model_dir, "--verify", ok=False).err
