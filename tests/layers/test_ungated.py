"""Layers without gates: up rows apart from down rows and in blocks, with the bits of any other layout."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from offloading import IDS, logits, smallest
from operators import opcheck
from torch import nn

import torch_pi2
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import ffn as reference
from torch_pi2.ops import load
from torch_pi2.ops.constants import constants, wants_blocks
from torch_pi2.ops.linear import IN_BLOCKS, to_blocks

blocks_here = pytest.mark.skipif(not constants().blocks, reason="this CPU has no kernels for blocks")
TOKENS = (1, 2, 3, 5, 11, 13, 70)


def _layouts(kind: str, hidden: int, intermediate: int) -> dict[str, torch.Tensor]:
    """The same neurons by layout; the operator's name of the format is the key without its first word."""
    rows = torch.randn(2, intermediate, hidden)
    if kind == "float":
        return {"plain float": rows.transpose(0, 1).contiguous(), "apart float": rows.transpose(0, 1)}
    stored = torch.ops.pi2.quantize(rows.view(-1, hidden), kind).view(2, intermediate, -1)
    found = {f"plain {kind}": stored.transpose(0, 1).contiguous(), f"apart {kind}": stored.transpose(0, 1)}
    if wants_blocks(kind, intermediate, hidden, True):
        blocks = torch.stack((to_blocks(stored[0], kind, hidden), stored[1]))
        found[f"apart {kind}{IN_BLOCKS}"] = blocks.transpose(0, 1)
    return found


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["float", "int4", "int8"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 16), (192, 333), (320, 1008), (100, 75)])
def test_layouts_have_the_same_bits(kind: str, int8: bool, hidden: int, intermediate: int) -> None:
    load()
    if kind == "float" and int8:
        pytest.skip("int8 activations are for quantised neurons")
    bias = torch.randn(intermediate) - hidden**0.5  # some fire
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden)
        found = []
        for name, rows in _layouts(kind, hidden, intermediate).items():
            if IN_BLOCKS in name and not int8:
                continue
            for n_hot in (0, intermediate // 3, intermediate):
                how = (None, bias, None, None, "relu2", False, n_hot, 0.0, name.split()[1], int8)
                found.append(torch.ops.pi2.sparse_ffn(x, rows, *how))
                wanted = reference.sparse_ffn(x, rows, *how)
                torch.testing.assert_close(found[-1], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
            if tokens < constants().gemm_tokens:
                alone = [torch.ops.pi2.sparse_ffn(x[t : t + 1], rows, *how) for t in range(tokens)]
                found.append(torch.cat(alone))
        assert all(torch.equal(y, found[0]) for y in found[1:])


def test_nan_shows_in_its_token() -> None:
    for name, rows in _layouts("int4", 192, 48).items():
        x = torch.randn(3, 192)
        x[1, 70] = torch.nan
        how = (None, None, None, None, "relu", False, 0, 0.0, name.split()[1], True)
        assert torch.ops.pi2.sparse_ffn(x, rows, *how).isnan().any(-1).tolist() == [False, True, False]


@blocks_here
def test_opcheck_and_refusals() -> None:
    rows = _layouts("int4", 192, 48)[f"apart int4{IN_BLOCKS}"]
    x, name = torch.randn(3, 192), f"int4{IN_BLOCKS}"
    how = (x, rows, None, torch.randn(48), None, None, "relu2", False, 0, 0.0, name)
    opcheck(torch.ops.pi2.sparse_ffn.default, (*how, True))
    with pytest.raises(RuntimeError, match="neuron_rows in blocks: expected int8 activations"):
        torch.ops.pi2.sparse_ffn(*how, False)
    with pytest.raises(RuntimeError, match="neuron_rows in blocks: expected int8 activations"):
        torch.ops.pi2.sparse_ffn(x, rows.contiguous(), *how[2:], True)
    masked = (*how[:5], torch.ones(3, 48, dtype=torch.bool), *how[6:])
    with pytest.raises(RuntimeError, match="neuron_rows with a mask or a predictor: expected rows in their own order"):
        torch.ops.pi2.sparse_ffn(*masked, True)


def _model(**settings: str) -> nn.Module:
    from transformers import ArceeConfig, ArceeForCausalLM

    torch.manual_seed(0)
    config = ArceeConfig(
        vocab_size=64, hidden_size=128, intermediate_size=208, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        mlp_bias=True,
    )  # fmt: skip
    model = ArceeForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(5)
            layer.mlp.up_proj.bias.fill_(-1.3)  # a tenth fires
    return torch_pi2.optimize(model, torch.randint(3, 64, (8, 16)), method="exact", **settings)


@pytest.mark.parametrize("settings", [{}, {"weights": "int4"}, {"weights": "int4", "activations": "int8"}], ids=str)
def test_a_folder_and_a_store_have_the_bits_of_the_model(tmp_path: Path, settings: dict[str, str]) -> None:
    model = _model(**settings)
    int8 = "activations" in settings
    assert all(layer.up_in_blocks == (int8 and bool(constants().blocks)) for layer in sparse_layers(model))
    assert not any(layer.neuron_rows.is_contiguous() for layer in sparse_layers(model))
    with torch_pi2.layers.prompt.sparse_only():
        wanted = logits(model)
        torch_pi2.save(model, tmp_path / "plain")
        loaded = torch_pi2.load(tmp_path / "plain")
        assert torch.equal(logits(loaded), wanted)
        torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
        stored = torch_pi2.load(tmp_path / "store", budget=smallest(tmp_path / "store") + 20_000)
        assert torch.equal(logits(stored), wanted)
        torch_pi2.pack(tmp_path / "plain", tmp_path / "single", cluster=1)
        whole = torch_pi2.stats(torch_pi2.load(tmp_path / "single", budget="1GiB"))["budget"]
        budget = whole.smallest + whole.in_slots(int(0.6 * whole.neurons))
        stored = torch_pi2.load(tmp_path / "single", budget=budget)
        assert torch_pi2.stats(stored)["budget"].gates > 0
        for ids in (IDS[:1, :1], IDS[:1, :2], IDS[:, :5]):
            assert torch.equal(logits(stored, ids), logits(model, ids))


@blocks_here
def test_blocks_are_shown_to_nobody() -> None:
    model = _model(weights="int4", activations="int8")
    layer, x = sparse_layers(model)[0], torch.randn(3, 128)
    wanted, state = layer(x), model.state_dict()
    rows = layer.in_row_order()
    for first, last in ((0, 208), (5, 9), (16, 33), (200, 208)):
        assert torch.equal(layer.in_row_order(first, last), rows[first:last])
    plain = copy.deepcopy(model)
    for one in sparse_layers(plain):
        one.leave_blocks()
        assert one.neuron_rows.is_contiguous()
    assert torch.equal(sparse_layers(plain)[0](x), wanted)
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), wanted)
