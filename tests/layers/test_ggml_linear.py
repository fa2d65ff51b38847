"""``QuantLinear`` over rows in ggml's blocks: what it computes and shows, and who refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ggml_rows import gguf_values, random_rows
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pi2
from torch_pi2.errors import ConfigError, GradientError, ShapeError
from torch_pi2.formats import FORMATS, GGML
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.ops.constants import constants


def made(kind: str, int8_activations: bool = False, rows: int = 48) -> QuantLinear:
    columns = 2 * FORMATS[kind].block
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    stored = random_rows(kind, rows, columns, columns**-0.5)
    return QuantLinear(stored, bias, columns, kind, int8_activations, "layers.0.up_proj").eval()


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_float_layer_of_what_its_rows_stand_for(kind: str, dtype: torch.dtype) -> None:
    layer = made(kind)
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight = gguf_values(layer.rows, kind)
    assert torch.equal(layer.dequantized(), weight)
    assert torch.equal(layer.state_dict()["weight"], weight)
    assert layer.relative_error(weight) == 0
    with torch.no_grad():
        found = layer(x)
    wanted = x.float() @ weight.T + layer.bias
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-5 if dtype is torch.float32 else 5e-2)
    assert f"{kind}, bias=True" in repr(layer)
    with pytest.raises(GradientError, match=r"torch.ops.pi2.linear: expected no gradients"):
        layer(x.requires_grad_())


@pytest.mark.parametrize("kind", GGML)
def test_rows_in_blocks_are_shown_to_nobody(kind: str) -> None:
    layer = made(kind, int8_activations=True)
    before = layer.rows.clone()
    x = torch.randn(1, layer.in_features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        y = layer(x)
        layer.use_blocks()
        assert layer.blocks == bool(constants().blocks >> FORMATS[kind].code & 1)
        torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-5 if layer.blocks else 0.0)
        assert torch.equal(layer.rows, before) != layer.blocks
        assert torch.equal(layer.dequantized(), gguf_values(before, kind))
    assert torch.equal(layer.in_row_order(), before)


def test_what_is_no_such_row_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows of a linear layer: expected uint8 \[N, 288\] \(512 columns of q4_k\)"):
        QuantLinear(random_rows("q4_k", 3, 256), None, 512, "q4_k")
    with pytest.raises(ShapeError, match=r"columns of q4_k: expected a multiple of 256 \(its blocks\), found 100"):
        QuantLinear(random_rows("q4_k", 3, 256), None, 100, "q4_k")
    with pytest.raises(ConfigError, match=r"weights: expected int4 or int8 or q4_1 or .* or tq2_0, found 'q3_k'"):
        QuantLinear(random_rows("q4_k", 3, 256), None, 256, "q3_k")
    with pytest.raises(ConfigError, match=r"weights: expected int4 or int8, found 'q4_k'\. Blocks of GGUF files"):
        QuantLinear.from_linear(nn.Linear(256, 3), "q4_k")
    with pytest.raises(ConfigError, match=r"expected int4 or int8, found 'q5_0'"):
        torch_pi2.quantize_(nn.Sequential(nn.Linear(64, 64)), "q5_0")
    with pytest.raises(ConfigError, match=r"Config.weights: expected float or int4 or int8, found 'q4_k'"):
        torch_pi2.Config(weights="q4_k")


def test_saved_as_they_are(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=72, num_hidden_layers=1, hidden_act="relu", **sizes)).eval()
    model = torch_pi2.optimize(dense, config=torch_pi2.Config(method="exact", weights="int4"))
    model.lm_head = QuantLinear(random_rows("q5_0", 72, 64), None, 64, "q5_0").eval()
    torch_pi2.save(model, tmp_path / "out")
    again = torch_pi2.load(tmp_path / "out")
    assert (again.lm_head.weights, torch.equal(again.lm_head.rows, model.lm_head.rows)) == ("q5_0", True)
