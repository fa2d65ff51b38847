"""Tasks of lm-eval on our models: its figures are those of an own computation, and nothing is fetched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizers import TEXT, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.cli import main
from torch_pi2.errors import ConfigError, LibraryMissingError, UnsupportedModelError
from torch_pi2.eval.harness import harness

pytest.importorskip("lm_eval", reason="without the extra eval")

DOCS = [
    {"q": "def f(x):", "choices": [" return", " import"], "gold": 0},
    {"q": "import ", "choices": ["os", "def"], "gold": 0},
    {"q": "for i in", "choices": [" range", " return", " x"], "gold": 2},
    {"q": "return", "choices": [" x", " def"], "gold": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, hidden_act="relu", initializer_range=0.3))
    model.eval().save_pretrained(base / "float")
    byte_tokenizer(TEXT).save_pretrained(base / "float")
    torch_pi2.quantize(base / "float", base / "int4")
    (base / "tasks").mkdir()
    data = base / "tasks" / "data.jsonl"
    data.write_text("".join(f"{json.dumps(doc)}\n" for doc in DOCS))
    (base / "tasks" / "quiz.yaml").write_text(TASK.format(name="quiz", data=data, kind="multiple_choice"))
    return base


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lm-eval makes of the data goes into no cache of the user's."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def by_hand(model: Any, tokenizer: Any) -> float:
    """Share of documents in which the right choice has the largest log likelihood."""
    right = 0
    for doc in DOCS:
        likelihoods = []
        for choice in doc["choices"]:
            prompt = tokenizer(doc["q"], add_special_tokens=False).input_ids
            ids = tokenizer(doc["q"] + choice, add_special_tokens=False).input_ids
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            likelihoods.append(sum(float(log_p[i - 1, ids[i]]) for i in range(len(prompt), len(ids))))
        right += likelihoods.index(max(likelihoods)) == doc["gold"]
    return right / len(DOCS)


@pytest.mark.slow
def test_figures_are_those_of_an_own_computation(root: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "int4")
    before = torch.get_rng_state()
    for model in (torch_pi2.load(root / "int4"), load_dense(root / "int4")):
        found = harness(model, tokenizer, [str(root / "tasks" / "quiz.yaml")], batch_size=3)
        assert found["quiz"]["acc"] == by_hand(model, tokenizer)
        assert found["quiz"].keys() == {"acc", "acc_stderr"}
    assert torch.equal(torch.get_rng_state(), before)
    folder = harness(torch_pi2.load(root / "int4"), tokenizer, [str(root / "tasks")], limit=1)
    assert folder["quiz"]["acc"] in (0.0, 1.0)


@pytest.mark.slow
def test_what_is_refused(root: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = torch_pi2.load(root / "int4"), AutoTokenizer.from_pretrained(root / "int4")
    with pytest.raises(ConfigError, match=r"task arc_easi: expected a name .* found KeyError: .*arc_easi"):
        harness(model, tokenizer, ["arc_easi"])
    with pytest.raises(ConfigError, match=r"task arc_easy: .*in the cache of datasets, found .*Offline.*downloaded"):
        harness(model, tokenizer, ["arc_easy"])
    with pytest.raises(ConfigError, match=r"expected a name that it knows, .* no task in it"):
        harness(model, tokenizer, [str(tmp_path)])
    (tmp_path / "broken.yaml").write_text("task: [")
    with pytest.raises(ConfigError, match=r"broken.yaml: expected a name .* found .*Error"):
        harness(model, tokenizer, [str(tmp_path / "broken.yaml")])
    with pytest.raises(UnsupportedModelError, match="expected a model of transformers, found a Linear"):
        harness(torch.nn.Linear(1, 1), tokenizer, ["arc_easy"])


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(LibraryMissingError, match=r"lm_eval: expected an installed lm_eval.*pip install 'lm-eval"):
        harness(torch.nn.Linear(1, 1), None, ["arc_easy"])


@pytest.mark.slow
def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = torch_pi2.optimize(AutoModelForCausalLM.from_pretrained(root / "float"))
    torch_pi2.save(model, tmp_path / "saved", AutoTokenizer.from_pretrained(root / "float"))

    def told(folder: Path, *more: str) -> str:
        task = str(root / "tasks" / "quiz.yaml")
        capsys.readouterr()
        assert main(["eval", str(folder), "--max-tokens", "200", "--limit", "4", "--lm-eval", task, *more]) == 0
        return capsys.readouterr().out

    found = json.loads(told(tmp_path / "saved", "--json", "--rounds", "1", "--decode-tokens", "2"))
    quiz = found["lm_eval"]["quiz"]
    assert quiz["dense"] == quiz["sparse"]  # lossless
    assert quiz["dense"].keys() == {"acc", "acc_stderr"}
    assert found["dense"]["bits_per_byte"] > 0
    (line,) = (line for line in told(root / "int4").splitlines() if line.startswith("quiz "))
    _, form, figure, _ = line.split()
    assert form == "sparse"  # there is no dense one
    assert 0 <= float(figure) <= 1
