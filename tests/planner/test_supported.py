"""``supported`` and ``torch-pi2 inspect CHECKPOINT``: what would be done with each layer, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_experts import build
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, tiny
from torch import nn

import torch_pi2
from torch_pi2.cli.inspect import describe_checkpoint, render_checkpoint
from torch_pi2.errors import ArtifactError, CalibrationError, ConfigError, UnsupportedModelError

#: Its head has the embedding's rows.
TIED = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
X_BTH = torch.zeros(1, 3, HIDDEN)


def checkpoint(folder: Path, name: str = "llama-relu") -> Path:
    """As it is on disk, but for the weights."""
    tiny(name).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder


def test_a_checkpoint_is_told_without_its_weights(tmp_path: Path) -> None:
    found = torch_pi2.supported(checkpoint(tmp_path))
    assert [layer.key for layer in found.layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    first = found.layers[0]
    assert (first.form, first.hidden, first.neurons) == ("relu(gate)*up", HIDDEN, INTERMEDIATE)
    assert (first.method, first.lossless) == ("exact", True)
    assert first.parameters == 3 * HIDDEN * INTERMEDIATE
    assert (found.model, found.left, found.refused) == ("LlamaForCausalLM", {}, "")
    model = tiny("llama-relu")
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found == torch_pi2.supported(model)
    assert found.share == 2 * first.parameters / found.parameters


def test_what_optimize_does_is_what_was_said() -> None:
    model = tiny("llama-relu")
    said = torch_pi2.supported(model)
    torch_pi2.optimize(model, method="auto")
    done = model.torch_pi2.plan.layers
    assert [(y.site.key, str(y.method)) for y in done] == [(layer.key, layer.method) for layer in said.layers]


def test_smooth_activations_need_thresholds(tmp_path: Path) -> None:
    found = torch_pi2.supported(str(checkpoint(tmp_path, "llama")))
    assert {(layer.form, layer.method, layer.lossless) for layer in found.layers} == {
        ("silu(gate)*up", "threshold", False)
    }


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.n = nn.LayerNorm(INTERMEDIATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.n(F.relu(self.up(x))))


def test_what_stays_dense_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    found = torch_pi2.supported(nn.Sequential(FunctionalBlock(), Normed()), (X_BTH,))
    assert [layer.key for layer in found.layers] == ["0"]
    assert found.left == {"1": "a norm over all its neurons stands before the last matmul"}
    assert "left dense" not in caplog.text
    found = torch_pi2.supported(nn.Sequential(nn.Sequential(Normed())), (X_BTH,))
    assert (found.layers, found.left) == ([], {"0.0": "a norm over all its neurons stands before the last matmul"})
    assert found.refused == "each of its feed-forward layers stays dense"
    found = torch_pi2.supported(nn.LayerNorm(HIDDEN), (X_BTH,))
    assert (found.layers, found.left) == ([], {})
    assert found.refused.startswith("0 linear layers; modules: 1 LayerNorm")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "expected a model's configuration, found \\[\\]"),
        ("nope", "expected a model's configuration, found damage"),
        ("{}", "found ValueError: Unrecognized model .*Correct its config.json, or update transformers"),
        ('{"model_type": "nope"}', "model type `nope` but .*Correct its config.json, or update transformers"),
        ('{"model_type": "llama", "hidden_size": "x"}', "'hidden_size' expected int.*Correct its config.json"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "found ZeroDivisionError: integer .*Correct its config"),
        ('{"model_type": "llama", "hidden_act": "zzz"}', "found KeyError: 'zzz'. Correct its config.json"),
    ],
)
def test_odd_configurations(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    for ask in (torch_pi2.supported, lambda folder: describe_checkpoint(folder, False, False)):
        with pytest.raises(ArtifactError, match=message):
            ask(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "torchao", "hqq", "torch_pi2"])
def test_weights_that_others_have_quantised(tmp_path: Path, method: str) -> None:
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    found = torch_pi2.supported(tmp_path)
    reason = "its weights are what 'hqq' has quantised; the float checkpoint can be" if method == "hqq" else ""
    assert (found.refused, bool(found.layers)) == (reason, not reason)
    shown = render_checkpoint(describe_checkpoint(tmp_path, False, False))
    first = f"its weights are what {method!r} has quantised: torch-pi2 import it first"
    assert (first in shown) == (method in ("gptq", "torchao"))


def test_experts_share_a_line_of_what_is_shown(tmp_path: Path) -> None:
    build("Qwen2Moe").save_pretrained(tmp_path)
    shown = render_checkpoint(describe_checkpoint(tmp_path, False, False))
    assert "model.layers.1.mlp.experts.0 to model.layers.1.mlp.experts.3" in shown
    assert "not optimised: no weights were read" in shown
    assert "small values: lossy, needs calibration text" in shown
    assert "parameters are in these layers" in shown


def test_models_that_we_have_quantised(tmp_path: Path) -> None:
    torch_pi2.import_gguf(TIED, tmp_path / "model")
    dense: Any = torch_pi2.load_dense(tmp_path / "model")
    quantised = torch_pi2.load(tmp_path / "model")
    assert torch_pi2.supported(dense).layers
    count = sum(parameter.numel() for parameter in dense.parameters()) - dense.lm_head.weight.numel()  # of its own
    for found in map(torch_pi2.supported, (tmp_path / "model", quantised)):
        assert found.parameters == count
        assert not found.layers
        assert found.refused.startswith("its weights are in torch_pi2's own form")
    for wrong in (torch_pi2.optimize, torch_pi2.quantize_):
        with pytest.raises(ConfigError, match=r"found \d+ matrices that torch_pi2 has quantised. Take the float model"):
            wrong(quantised)


def test_what_cannot_be_told() -> None:
    with pytest.raises(ArtifactError, match="/nowhere"):
        torch_pi2.supported("/nowhere")
    with pytest.raises(ArtifactError, match=r"found a GGUF file. Import it: torch_pi2.import_gguf\(file, folder\)"):
        torch_pi2.supported("model.gguf")
    with pytest.raises(CalibrationError, match="args or kwargs for one forward call"):
        torch_pi2.supported(FunctionalBlock())
    with pytest.raises(UnsupportedModelError, match=r"before torch\.compile"):
        torch_pi2.supported(torch.compile(FunctionalBlock()), (X_BTH,))
    model = torch_pi2.optimize(tiny("llama-relu"), method="exact")
    with pytest.raises(ConfigError, match="already rewritten"):
        torch_pi2.supported(model)
