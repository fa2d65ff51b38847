"""examples/minimal.py: the whole idea in at most 400 lines, and it works."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "minimal.py"
MODEL = ROOT / "examples" / "models" / "drelu-stdlib-5m"


@pytest.fixture(scope="module")
def minimal() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["minimal"]


@pytest.fixture(scope="module")
def dense() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)


@pytest.fixture(scope="module")
def calibration_ids(minimal: ModuleType, tokenizer: Any) -> torch.Tensor:
    return tokenizer(minimal.calibration_text(20_000), return_tensors="pt").input_ids[0][:4096].view(-1, 256)


def test_at_most_400_lines_and_nothing_but_torch_and_numpy() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 400
    assert "import torch_pi2" not in text


@pytest.mark.parametrize("cache_share", [0, 0.01, 0.3, 1.0])
def test_exact_gate_gives_the_dense_text(
    minimal: ModuleType, dense: Any, tokenizer: Any, calibration_ids: torch.Tensor, cache_share: float, tmp_path: Path
) -> None:
    sparse = copy.deepcopy(dense)
    counters = minimal.sparsify(sparse, calibration_ids, tmp_path / "neurons", cache_share=cache_share)
    prompt = tokenizer("def read_file(path):", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(sparse(**prompt).logits, dense(**prompt).logits, atol=1e-3)
    texts = [m.generate(**prompt, max_new_tokens=24, do_sample=False).tolist() for m in (dense, sparse)]
    assert texts[0] == texts[1]
    assert 0 < counters.computed < 0.5 * counters.possible
    assert counters.bytes_read == counters.misses * 2 * 4 * 256
    assert (counters.hits == 0) == (cache_share == 0)
    if cache_share == 1.0:  # each neuron is read once at most
        assert counters.misses <= 5 * 1024


@pytest.mark.slow
def test_low_rank_predictor_reaches_its_recall(
    minimal: ModuleType, dense: Any, tokenizer: Any, calibration_ids: torch.Tensor
) -> None:
    site = minimal.find_ffns(dense)[2]
    seen = minimal.profile(dense, [site], calibration_ids)[0]
    predictor = minimal.LowRankPredictor.fit(site, seen, rank=64, recall=0.95, steps=100)
    with torch.no_grad():
        fires = seen.inputs_TH @ site.gate_IH.T > 0
        predicted = predictor(seen.inputs_TH) > predictor.threshold
    held = len(fires) // 10
    recall = (fires & predicted)[:held].sum() / fires[:held].sum()
    assert 0.94 < recall < 0.96
    assert predicted.float().mean() < 0.5


@pytest.mark.slow
def test_predicted_neurons_come_whole_from_the_store(
    minimal: ModuleType, dense: Any, tokenizer: Any, calibration_ids: torch.Tensor, tmp_path: Path
) -> None:
    """A predictor that misses nothing gives the dense logits."""
    sparse = copy.deepcopy(dense)
    counters = minimal.sparsify(
        sparse, calibration_ids[:2], tmp_path / "neurons", predictor="low-rank", rank=8, cache_share=0.05
    )
    for module in sparse.modules():
        if isinstance(module, minimal.SparseFFN):
            module.predictor.threshold = float("-inf")
    prompt = tokenizer("import os", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(sparse(**prompt).logits, dense(**prompt).logits, atol=1e-3)
    assert counters.computed == counters.possible
    assert counters.bytes_read == counters.misses * 3 * 4 * 256


def test_ffns_are_found_whatever_they_are_called(minimal: ModuleType, dense: Any) -> None:
    sites = minimal.find_ffns(dense)
    assert [site.name for site in sites] == [f"model.layers.{i}.mlp" for i in range(5)]
    assert all(site.up_relu for site in sites)

    class Odd(torch.nn.Module):  # ReGLU with the matrices in another order
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.nn.Linear(24, 8, bias=False)
            self.b = torch.nn.Linear(8, 24, bias=False)
            self.a = torch.nn.Linear(8, 24, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.a(x)) * self.b(x))

    (site,) = minimal.find_ffns(torch.nn.Sequential(Odd(), torch.nn.SiLU()))
    assert site.gate_IH is site.module.a.weight
    assert site.up_IH is site.module.b.weight
    assert not site.up_relu


def test_a_cut_store_is_refused(minimal: ModuleType, dense: Any, tmp_path: Path) -> None:
    path = tmp_path / "neurons"
    minimal.NeuronStore.write(path, minimal.find_ffns(dense))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="write the store again"):
        minimal.NeuronStore(path)
