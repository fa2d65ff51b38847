"""What a user writes without looking it up: settings as keywords, text for ids, quantising in one call, statistics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from offloading import logits
from tiny_models import tiny
from tiny_tokenizers import byte_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.errors import CalibrationError, ConfigError, ShapeError
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.rewrite.linears import MIN_OUTPUTS
from torch_pi2.store.storefile import weights_path

TEXT = "def some(x):\n    return x + 1\n" * 20
FEW: dict[str, Any] = {"calibration_tokens": 64, "seq_len": 16, "batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An optimised model of some bytes' vocabulary, with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="relu",
    )
    made = tmp_path_factory.mktemp("guesses") / "model"
    model = torch_pi2.optimize(LlamaForCausalLM(config).eval(), method="exact")
    torch_pi2.save(model, made, tokenizer=byte_tokenizer(TEXT))
    return made


def test_settings_as_keywords_are_those_of_a_config() -> None:
    ids = torch.randint(3, 60, (16, 16), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"method": "threshold", "sparsity": 0.7, **FEW}
    plans = []
    for given in (how, {"config": torch_pi2.Config(**how)}):
        model = tiny("llama")
        stats = torch_pi2.profile(model, ids, **given)
        plans.append(torch_pi2.plan(model, stats, **given))
        torch_pi2.optimize(model, ids, **given)
        plans.append(model.torch_pi2.plan)
    assert len({str([(y.method, y.n_hot, y.threshold) for y in plan.layers]) for plan in plans}) == 1
    assert {layer.method for layer in plans[0].layers} == {"threshold"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metod": "exact"},
            r"optimize\(metod=...\): expected one of model, .*seed, found 'metod'. Did you mean method?",
        ),
        ({"tokeniser": None}, "Did you mean tokenizer?"),
        ({"colour": 3}, r"found 'colour'. See help\(torch_pi2.optimize\)"),
        ({"target_recall": "high"}, r"optimize\(target_recall\): expected a finite number, found 'high'"),
        ({"target_recall": 2.0}, r"Config.target_recall: expected a number, above 0, below 1, found 2.0"),
        (
            {"method": "exact", "seed": 1, "config": torch_pi2.Config()},
            r"config and method, seed: expected a Config, or its fields as keywords, found both. "
            r"Pass dataclasses.replace\(config, method=..., seed=...\) as config.",
        ),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    model = tiny("llama-relu")
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        torch_pi2.optimize(model, **given)
    assert not sparse_layers(model)


def test_the_other_functions_refuse_them_too() -> None:
    model = tiny("llama-relu")
    stats = torch_pi2.profile(model, torch.randint(3, 60, (16, 16)), **FEW)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch_pi2.profile, (model, TEXT)),
        (torch_pi2.plan, (model, stats)),
    ]
    for function, arguments in calls:
        with pytest.raises(ConfigError, match=r"\(hot_frequenzy=...\).* Did you mean hot_frequency\?"):
            function(*arguments, hot_frequenzy=0.2)
        with pytest.raises(ConfigError, match=r"config and seed: .* found both"):
            function(*arguments, config=torch_pi2.Config(), seed=1)


def test_generate_reads_and_writes_text(folder: Path) -> None:
    model, tokenizer = torch_pi2.load(folder), byte_tokenizer(TEXT)
    ids = tokenizer("def some", return_tensors="pt")["input_ids"]
    wanted = torch_pi2.generate(model, ids, max_new_tokens=6)
    for given in ({}, {"tokenizer": tokenizer}):  # that of the folder, and another
        found = torch_pi2.generate(model, "def some", max_new_tokens=6, **given)
        assert found.sequences == wanted.sequences
        assert found.text == found.texts[0] == tokenizer.decode(wanted.sequences[0], skip_special_tokens=True)
    several = torch_pi2.generate(model, "def some", num_return_sequences=2, do_sample=True, max_new_tokens=3)
    assert several.texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in several.sequences]
    guessed = torch_pi2.generate(model, "def some", prompt_lookup=2, max_new_tokens=6)
    assert guessed.text == torch_pi2.generate(model, ids, tokenizer=tokenizer, max_new_tokens=6).text


def test_a_space_between_prompt_and_answer_is_kept(folder: Path) -> None:
    class Words:
        """Decodes as sentencepiece does: the first word has no space before it."""

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return " ".join(f"w{i}" for i in ids)

    found = torch_pi2.generate(torch_pi2.load(folder), "a bcd", tokenizer=Words(), max_new_tokens=2)
    assert found.text == " " + " ".join(f"w{i}" for i in found.sequences[0])


def test_text_without_a_tokenizer_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model, loaded = tiny("llama-relu"), torch_pi2.load(folder)
    said = r"expected a tokenizer to read text with, found none, and a model of no folder. Pass tokenizer="
    with pytest.raises(ConfigError, match=rf"generate\(text\): {said}"):
        torch_pi2.generate(model, "text")
    with pytest.raises(CalibrationError, match=f"calibration text: {said}"):
        torch_pi2.optimize(model, TEXT)
    with pytest.raises(ConfigError, match=rf"bits_per_byte\(text\): {said}"):
        bits_per_byte(model, None, TEXT)
    with pytest.raises(
        ConfigError, match=r"generate\(text\): tokenizer: expected a tokenizer: called with text .* a int"
    ):
        torch_pi2.generate(model, "text", tokenizer=5)
    with pytest.raises(ShapeError, match=r"input_ids: expected one prompt, int64 \[1, tokens\], found int64 \[1, 0\]"):
        torch_pi2.generate(loaded, "")
    with pytest.raises(ConfigError, match=r"expected a tokenizer, found none: the prompt was given as token ids"):
        _ = torch_pi2.generate(loaded, torch.tensor([[5]]), max_new_tokens=1).text
    torch_pi2.save(torch_pi2.optimize(model), tmp_path / "bare")
    with pytest.raises(ConfigError, match=rf"found none, and none in {re.escape(str(tmp_path / 'bare'))}"):
        torch_pi2.generate(torch_pi2.load(tmp_path / "bare"), "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_text("{")
    with pytest.raises(ConfigError, match=r"found that of .*bare, which cannot be loaded"):
        torch_pi2.generate(torch_pi2.load(tmp_path / "bare"), "text")


def test_calibration_and_loss_take_the_folders_tokenizer(folder: Path) -> None:
    model, tokenizer = torch_pi2.restore(torch_pi2.load(folder)), byte_tokenizer(TEXT)
    wanted = torch_pi2.profile(model, TEXT, tokenizer=tokenizer, **FEW)
    for text in (TEXT, [TEXT]):
        found = torch_pi2.profile(model, text, **FEW)
        assert [layer.fired.tolist() for layer in found] == [layer.fired.tolist() for layer in wanted]
    assert bits_per_byte(model, None, TEXT) == bits_per_byte(model, tokenizer, TEXT)


@pytest.mark.parametrize("name", ["llama-relu", "llama"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantize_in_place(name: str, weights: str, tmp_path: Path) -> None:
    model = tiny(name)
    dense = logits(model)
    assert torch_pi2.quantize_(model, weights) is model
    assert {layer.weights for layer in sparse_layers(model)} == {weights}
    assert {layer.method for layer in model.torch_pi2.plan.layers} == {"dense"}
    assert isinstance(model.lm_head, QuantLinear)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features >= MIN_OUTPUTS]
    assert 0 < float((logits(model) - dense).norm() / dense.norm()) < 0.5
    assert all(0 < error < 0.2 for error in model.torch_pi2.quantization.values())
    torch_pi2.save(model, tmp_path / "m")
    assert weights_path(tmp_path / "m" / "pi2") is not None
    assert torch.equal(logits(torch_pi2.load(tmp_path / "m")), logits(model))


def test_quantize_is_refused_by_name() -> None:
    model = tiny("llama-relu")
    with pytest.raises(ConfigError, match=r"quantize_\(weights\): expected int4 or int8, found 'float'"):
        torch_pi2.quantize_(model, "float")
    with pytest.raises(CalibrationError, match=r"quantization='gptq'\): expected calibration data, found none"):
        torch_pi2.quantize_(model, quantization="gptq")
    ids = torch.randint(3, 60, (16, 16))
    torch_pi2.quantize_(model, "int4", ids, quantization="gptq", activations="int8")
    assert all(0 < error < 0.3 for error in model.torch_pi2.quantization.values())
    with pytest.raises(ConfigError, match="expected a dense model, found one that torch_pi2 has already rewritten"):
        torch_pi2.quantize_(model)


def test_statistics_of_nothing_say_so(folder: Path, tmp_path: Path) -> None:
    torch_pi2.pack(folder, tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB")
    stats = torch_pi2.stats(model)
    assert (stats.generated, stats["hit_rate"], stats["wait_share"]) == (False, None, None)
    assert re.fullmatch(r"nothing generated yet \([\d.]+ MiB of cache\)", str(stats))
    torch_pi2.generate(model, "def", max_new_tokens=2)
    stats = torch_pi2.stats(model, reset=True)
    assert stats.generated
    assert stats["hit_rate"] == 1.0
    said = r"100.0% of \d+ neurons were in the cache, [\d.]+% of the time waiting for them \([\d.]+ MiB of cache\)"
    assert re.fullmatch(said, str(stats))
    assert not torch_pi2.stats(model).generated
    with pytest.raises(ConfigError, match="expected a model over a neuron store"):
        torch_pi2.stats(tiny("llama-relu"))
