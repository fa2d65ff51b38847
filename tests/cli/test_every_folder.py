"""Every kind of path, given to every verb that talks: what it does, or which verb it names instead."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Ran
from safetensors.torch import load_file, save_file
from shared import shared_folder
from tiny_models import randomise
from tiny_tokenizers import TEXT, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.errors import ArtifactError

Command = Callable[..., Ran]


def _write(base: Path) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=64, hidden_act="relu", eos_token_id=0)
    dense = randomise(LlamaForCausalLM(config).eval())
    tokenizer = byte_tokenizer(TEXT)
    for made in (dense, tokenizer):
        made.save_pretrained(base / "checkpoint")
    torch_pi2.save(torch_pi2.optimize(dense), base / "optimised", tokenizer=tokenizer)
    torch_pi2.pack(base / "optimised", base / "store")
    torch_pi2.quantize(base / "checkpoint", base / "quantised", weights="int8")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A path of every kind, by name."""
    base, own = shared_folder(tmp_path_factory, "every-folder", _write), tmp_path_factory.mktemp("others")
    (own / "notes").mkdir()
    (own / "notes" / "notes.txt").write_text("nothing of ours\n")
    return {
        **{name: base / name for name in ("checkpoint", "optimised", "quantised", "store")},
        "notes": own / "notes",
        "a file": own / "notes" / "notes.txt",
        "missing": own / "missing",
    }


TALKS = ("checkpoint", "optimised", "quantised", "store")
NEEDS = {"generate": ["--prompt", "x"], "run": ["--prompt", "x"], "chat": [], "serve": []}


@pytest.mark.parametrize("verb", NEEDS)
@pytest.mark.parametrize("kind", ["notes", "a file", "missing"])
def test_what_is_nothing_of_ours(command: Command, kinds: dict[str, Path], verb: str, kind: str) -> None:
    ran = command(verb, kinds[kind], *NEEDS[verb], ok=False)
    assert (ran.code, ran.out) == (2, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith("torch-pi2: ")
    assert str(kinds[kind]) in last
    assert "expected" in last
    assert "found" in last


def test_what_has_no_dense_weights_and_what_is_no_folder(command: Command, kinds: dict[str, Path]) -> None:
    ran = command("generate", kinds["store"], "--dense", "--prompt", "x", ok=False)
    assert f"dense model of {kinds['store']}: expected a folder with float weights" in ran.err
    ran = command("generate", kinds["missing"], "--prompt", "x", ok=False)
    assert f"torch-pi2: {kinds['missing']}: expected a GGUF file or a folder, found nothing of that name." in ran.err
    ran = command("generate", "an-org/a-name", "x", ok=False)
    assert "model an-org/a-name: expected a folder, a GGUF file, or a model of the Hub, found no such folder" in ran.err


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tokenizer.json", "", "expected files of a Hugging Face tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: expected"),
        ("model.safetensors", "x", "model.safetensors: expected .* Copy it again"),
    ],
)
def test_damaged_folders(
    command: Command, kinds: dict[str, Path], tmp_path: Path, file: str, damage: str, message: str
) -> None:
    shutil.copytree(kinds["optimised"], tmp_path / "damaged")
    (tmp_path / "damaged" / file).write_text(damage)
    said = command("generate", tmp_path / "damaged", "--prompt", "x", ok=False).err
    assert re.search(message, said)
    assert "trust_remote_code" not in said


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "dtype", 0),
        ("config.json", "hidden_size", [1, 2, 3]),
        ("config.json", "rope_parameters", {"rope_type": {}}),
        ("tokenizer.json", "added_tokens", [None]),
        ("tokenizer_config.json", "model_max_length", ""),
        ("generation_config.json", "eos_token_id", 7.5),
        ("generation_config.json", None, "{"),
    ],
)
def test_damaged_checkpoints(
    command: Command, kinds: dict[str, Path], tmp_path: Path, file: str, field: str | None, value: Any
) -> None:
    """Whatever a library raises for them, it is one line; a file of settings is not passed over."""
    path = Path(shutil.copytree(kinds["checkpoint"], tmp_path / "damaged")) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}) if field else value)
    ran = command("generate", path.parent, "--prompt", "x", ok=False)
    assert ran.code == 2
    assert ran.err.count("torch-pi2: ") == 1 + ran.err.count("torch-pi2: load ")
    assert str(path.parent) in ran.err.splitlines()[-1]
    assert "--allow-download" not in ran.err
    if field is None:
        shutil.copy(path, shutil.copytree(kinds["optimised"], tmp_path / "optimised"))
        with pytest.raises(ArtifactError, match=r"generation_config.json: expected settings of generation"):
            torch_pi2.load(tmp_path / "optimised")


def test_a_checkpoint_that_lacks_a_tensor(command: Command, kinds: dict[str, Path], tmp_path: Path) -> None:
    """transformers would make it up at random."""
    weights = Path(shutil.copytree(kinds["checkpoint"], tmp_path / "less")) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    for verb in (("generate", "--prompt", "x"), ("optimize", "--out", tmp_path / "out")):
        ran = command(verb[0], weights.parent, *verb[1:], ok=False)
        assert ran.code == 2
        assert "found no model.layers.1.mlp.up_proj.weight" in ran.err


def test_an_adapter(command: Command, kinds: dict[str, Path], tmp_path: Path) -> None:
    """A folder of PEFT has no config.json: it names the checkpoint."""
    peft = pytest.importorskip("peft")
    dense = LlamaForCausalLM.from_pretrained(kinds["checkpoint"])
    config = peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    peft.get_peft_model(dense, config).save_pretrained(tmp_path)
    for file in kinds["checkpoint"].glob("tok*"):
        shutil.copy(file, tmp_path)
    assert command("generate", tmp_path, "--prompt", "x", "--max-new-tokens", 2).out.startswith("x")


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_sampling_is_checked_before_anything_is_loaded(command: Command, verb: str) -> None:
    prompt = ["--prompt", "x"] if verb == "generate" else []
    ran = command(verb, "nowhere", *prompt, "--top-p", "0.5", ok=False)
    assert "--top-p 0.5: expected a --temperature above 0 beside it, found the most likely token each time" in ran.err
    wrongs = ("--temperature", "nan"), ("--temperature", "-1"), ("--temperature", "1", "--top-p", "5"), ("--top-p", "2")
    for wrong in wrongs:
        ran = command(verb, "nowhere", *prompt, *wrong, ok=False)
        assert "expected a temperature of 1e-06 or more, top_k of 0 or more, top_p above 0 and at most 1" in ran.err
    for seconds in ("0", "-1", "nan", "inf"):
        ran = command(verb, "nowhere", *prompt, "--timeout", seconds, ok=False)
        assert f"argument --timeout: expected more than 0, found '{seconds}'" in ran.err


def test_what_is_wrong_has_a_line_of_its_own(
    command: Command, kinds: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, streamer: Any = None, **__: Any) -> None:
        streamer(0, 5)
        raise ArtifactError("it", expected="this", found="that", fix="Mend it.")

    monkeypatch.setattr("torch_pi2.decode.generate.generate", fails)
    out = command("generate", kinds["optimised"], "--prompt", "def f", ok=False).out
    assert out.startswith("def f")
    assert out.endswith("\n")


def test_generate_takes_every_kind_of_model(command: Command, kinds: dict[str, Path]) -> None:
    texts = {}
    for kind in TALKS:
        asked = ["generate", kinds[kind], "--prompt", "def f", "--max-new-tokens", "9"]
        said = command(*asked, "--json").json
        texts[kind] = said["text"]
        assert (said["prompt"], said["prompt_tokens"]) == ("def f", 2)
        assert 0 < said["new_tokens"] <= 9
        assert said["ms_per_token"] > 0
        assert command(*asked).out.startswith(f"def f{said['text']}\n["), kind
    assert texts["checkpoint"] == texts["optimised"] == texts["store"]


def test_a_budget_is_of_what_is_in_a_store(command: Command, kinds: dict[str, Path]) -> None:
    asked = ("--prompt", "x", "--max-new-tokens", "1", "--budget", "1GB")
    assert "% of " in command("generate", kinds["store"], *asked).out.partition("sparse; ")[2]
    store = command("generate", kinds["store"], *asked, "--json").json["store"]
    assert (store["budget_bytes"], store["lossy"], store["left_out"]) == (10**9, False, 0)
    assert store["wanted"] > 0
    assert command("generate", kinds["optimised"], *asked[:-2], "--json").json["store"] is None
    folder = kinds["checkpoint"]
    assert (
        f"--budget 1GB: expected a model over a store, as pack writes it, found {folder}, whose "
        f"weights are all in memory. Leave --budget out, or pack it: torch-pi2 pack {folder} STORE."
    ) in command("generate", folder, *asked, ok=False).err
    dense = command("generate", kinds["optimised"], *asked, "--dense", ok=False).err
    assert "--budget 1GB: expected a model over a store, as pack writes it, found --dense, whose weights" in dense
    few = command("generate", kinds["store"], *asked[:-1], "20KB", ok=False).err
    assert "Give it more, or lower --max-new-tokens or --num-return-sequences." in few
    few = command("eval", kinds["store"], "--budget", "20KB", ok=False).err
    assert "Give it more, or lower --window or --batch-size." in few


@pytest.mark.parametrize(
    ("option", "field", "needs"),
    [
        ("--miss-margin", "miss_margin", "layers with low-rank predictors"),
        ("--drop-experts", "drop_experts", "mixtures of experts"),
    ],
)
def test_what_is_left_out_is_not_in_memory(
    command: Command, kinds: dict[str, Path], option: str, field: str, needs: str
) -> None:
    asked, share = ("--prompt", "x", "--max-new-tokens", "1"), (option, "1")
    for kind, more, message in (
        ("checkpoint", (), f"{option} 1.0: expected a model over a store, as pack writes it"),
        ("store", (), f"{option} 1: expected --budget beside it"),
        ("store", ("--budget", "1GB"), f"OffloadConfig.{field}: expected {needs}"),
    ):
        said = command("generate", kinds[kind], *asked, *share, *more, ok=False)
        assert said.code == 2
        assert message.format(kinds[kind]) in said.err


@pytest.mark.parametrize("kind", TALKS)
def test_chat_takes_every_kind_of_model_of_pytorch(
    command: Command, kinds: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    wanted = command("generate", kinds[kind], "--prompt", "def f", "--max-new-tokens", "5", "--json").json["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n"))
    assert command("chat", kinds[kind], "--max-new-tokens", "5").out.strip() == wanted.strip()


def test_eval_keeps_to_a_budget(command: Command, kinds: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    store, asked = kinds["store"], ("--max-tokens", "900", "--budget", "1GB", "--json")
    found = command("eval", store, *asked, "--window", "512").json
    assert found["store"]["budget_bytes"] == 10**9
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    for more, expected in (
        (("--batch-size", "3", "--window", "512"), "at most 1024 tokens in a call"),
        (("--window", "2048"), "--window 2048 with --budget: expected at most 1024 tokens in a call"),
    ):
        assert re.search(expected, command("eval", store, *asked[:-1], *more, ok=False).err)
