"""GPTQ of whole models, in memory and from folder to folder: the same bytes, better outputs, nothing else changed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import HIDDEN, FunctionalBlock, tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from torch_pi2.fitting import gptq_model
from torch_pi2.fitting.gptq_model import calibrated_rows
from torch_pi2.graph.find import find_sites
from torch_pi2.ops.rows import values
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.linears import find_linears

IDS = torch.randint(3, 64, (48, 24), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(3, 64, (16, 24), generator=torch.Generator().manual_seed(1))
NAMES = ["llama-relu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "phi3", "opt", "gpt2"))]


def logits(model: nn.Module, ids: torch.Tensor = OTHER) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits.float()


def rows_of(
    model: nn.Module, data: list[Batch], weights: str = "int4"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    sites, found = find_sites(model), {}
    linears, _ = find_linears(model, sites)
    return found, calibrated_rows(model, data, sites, linears, weights, found.__setitem__)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_folder_and_memory_give_the_same_bytes_and_better_outputs(tmp_path: Path, name: str) -> None:
    dense = tiny(name)
    dense.save_pretrained(tmp_path / "float")
    torch_pi2.quantize(tmp_path / "float", tmp_path / "disk", quantization="gptq", calibration=IDS)
    made = torch_pi2.quantize_(copy.deepcopy(dense), "int4", IDS, quantization="gptq")
    torch_pi2.save(made, tmp_path / "memory")
    disk, memory = (load_file(str(tmp_path / f / "pi2" / "weights.safetensors")) for f in ("disk", "memory"))
    assert disk.keys() == memory.keys()
    assert all(torch.equal(disk[key].view(torch.uint8), memory[key].view(torch.uint8)) for key in disk)
    assert torch.equal(logits(torch_pi2.load(tmp_path / "disk")), logits(made))
    nearest = torch_pi2.quantize_(copy.deepcopy(dense), "int4")
    wanted = logits(dense)
    errors = [float((logits(model) - wanted).norm()) for model in (made, nearest)]
    assert errors[0] < 0.85 * errors[1]


def test_neurons_are_found_in_the_order_of_a_plan() -> None:
    dense = tiny("llama-relu")
    settings = {"weights": "int4", "quantization": "gptq", "hot_frequency": 0.45}
    made = torch_pi2.optimize(copy.deepcopy(dense), IDS, method="exact", **settings)
    layer = made.torch_pi2.plan.layers[0]
    assert layer.order.tolist() != sorted(layer.order.tolist())
    plain = torch_pi2.quantize_(copy.deepcopy(dense), "int4", IDS, quantization="gptq").state_dict()
    assert all(torch.equal(value, plain[key]) for key, value in made.state_dict().items())


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_every_matrix_has_rows_and_the_model_stays_as_it_was(weights: str) -> None:
    model = tiny("llama-relu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    found, left = rows_of(model, [Batch(IDS, None)], weights)
    assert not left
    sites = [f"model.layers.{i}.mlp.{role}" for i in (0, 1) for role in ("gate", "up", "down")]
    assert found.keys() == {"lm_head.weight", *sites}
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    down_IH = values(found["model.layers.0.mlp.down"], weights, HIDDEN)
    off = (down_IH - before["model.layers.0.mlp.down_proj.weight"].T).norm() / down_IH.norm()
    assert 0 < off < (0.3 if weights == "int4" else 0.02)
    assert all(torch.equal(rows, found[key]) for key, rows in rows_of(model, [Batch(IDS, None)], weights)[0].items())


def test_padding_does_not_count() -> None:
    model = tiny("llama-relu")
    ids, mask = IDS.clone(), torch.ones_like(IDS, dtype=torch.bool)
    mask[:, 16:] = False
    found, _ = rows_of(model, [Batch(ids, mask)])
    other, _ = rows_of(model, [Batch(ids[:20], mask[:20]), Batch(ids[20:, :16], None)])
    assert all(torch.equal(rows, other[key]) for key, rows in found.items())

    def share_of_same(others: dict[str, torch.Tensor]) -> float:
        same = [values(rows, "int4", HIDDEN) == values(others[key], "int4", HIDDEN) for key, rows in found.items()]
        return float(torch.cat(same).float().mean())

    short, _ = rows_of(model, [Batch(IDS[:, :16], None)])
    assert share_of_same(short) > 0.98 > 0.9 > share_of_same(rows_of(model, [Batch(IDS, None)])[0])


def mixture() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=64, num_local_experts=4, num_key_value_heads=4)).eval()


@pytest.mark.slow
def test_experts_have_rows_for_the_tokens_that_reach_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dense = mixture()
    dense.save_pretrained(tmp_path / "float")
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        torch_pi2.quantize(tmp_path / "float", tmp_path / "disk", quantization="gptq", calibration=IDS)
    assert "rounded to nearest" not in caplog.text
    made = torch_pi2.quantize_(copy.deepcopy(dense), "int4", IDS, quantization="gptq")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "disk")), logits(made))
    nearest = torch_pi2.quantize_(copy.deepcopy(dense), "int4")
    wanted = logits(dense)
    assert (logits(made) - wanted).norm() < 0.9 * (logits(nearest) - wanted).norm()


def test_experts_that_few_tokens_reach_are_rounded_to_nearest_and_it_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mixture()
    few = Batch(IDS[:4], None)  # 96 tokens, two of four experts each
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        found, left = rows_of(model, [few])
        gptq_model.warn_rounded(left)
    rounded = {key.rpartition(".")[0] for key in left}
    assert rounded
    assert len(left) == 3 * len(rounded)
    assert not left.keys() & found.keys()
    assert set(left.values()) == {"experts that fewer than 64 calibration tokens reach"}
    assert f"rounded to nearest, not by GPTQ: {next(iter(left))}, " in caplog.text
    assert "(experts that fewer than 64 calibration tokens reach)" in caplog.text


def test_what_is_not_called_is_rounded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(64, HIDDEN), FunctionalBlock(), nn.Linear(HIDDEN, 64)
            self.unused = nn.Linear(HIDDEN, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embed(ids)))

    model = Model().eval()
    sites = find_sites(model, (IDS[:2],))
    found: dict[str, torch.Tensor] = {}
    left = calibrated_rows(model, [Batch(IDS, None)], sites, ["head", "unused"], "int4", found.__setitem__)
    assert set(found) == {"head.weight", "block.up", "block.down"}
    assert left == {"unused.weight": "not called as a module"}


def test_few_tokens_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama-relu")
    monkeypatch.setattr(gptq_model, "_MOST_BYTES", 2 * 24 * 16 * 4 * 4 * 48)
    with caplog.at_level(logging.WARNING, "torch_pi2"):
        found, _ = rows_of(model, [Batch(IDS, None)])
    assert "GPTQ sees 16 of 48 sequences, to bound memory" in caplog.text
    monkeypatch.undo()
    wanted, _ = rows_of(model, [Batch(IDS[::3], None)])
    assert all(torch.equal(rows, wanted[key]) for key, rows in found.items())


def test_what_is_refused(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    with pytest.raises(CalibrationError, match=r"quantization='gptq': expected token ids, or text, found batches with"):
        rows_of(model, [Batch(IDS, None, (), {"labels": IDS})])
    model.save_pretrained(tmp_path / "float")
    for settings, message in (
        ({"quantization": "gptq"}, r"quantize\(quantization='gptq'\): expected calibration data, found none"),
        ({"calibration": IDS}, r"quantization='rtn'\): expected no calibration data, .* found some"),
    ):
        with pytest.raises(CalibrationError, match=message):
            torch_pi2.quantize(tmp_path / "float", tmp_path / "out", **settings)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp"):
        rows_of(model, [Batch(IDS, None)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_mixes_sequences_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, HIDDEN), nn.Linear(HIDDEN, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids).cumsum(0))

    with pytest.raises(UnsupportedModelError, match="input of head: expected the same for the same sequence"):
        calibrated_rows(Mixing().eval(), [Batch(IDS, None)], [], ["head"], "int4", {}.__setitem__)
