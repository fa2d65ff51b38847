"""SmallThinker, which transformers does not have: its windows, its router, and folders as its authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
from safetensors.torch import load_file

import torch_pi2
from torch_pi2.errors import ArtifactError
from torch_pi2.layers.smallthinker import SmallThinkerConfig

IDS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18, 11, 94]])


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize("slides", [0, 1])
def test_windows(slides: int) -> None:
    """With a window of four tokens the first one does not reach the fifth."""
    layout = {"num_hidden_layers": 1, "rope_layout": [1], "sliding_window_layout": [slides], "sliding_window_size": 4}
    model = ggufs.tiny("smallthinker", **layout)
    changed = IDS.clone()
    changed[0, 0] = 99
    same = torch.isclose(logits(model), logits(model, changed), atol=1e-5).all(-1)
    assert same.tolist() == [False] * 4 + [bool(slides)] * 8


@pytest.mark.parametrize("positions", [0, 1])
def test_layers_without_positions(positions: int) -> None:
    """There the order of the tokens before the last one is not seen."""
    layout = {"num_hidden_layers": 1, "rope_layout": [positions], "sliding_window_layout": [0]}
    model = ggufs.tiny("smallthinker", **layout)
    other = torch.cat([IDS[:, :-1].flip(1), IDS[:, -1:]], 1)
    assert torch.allclose(logits(model)[-1], logits(model, other)[-1], atol=1e-4) == (not positions)


def test_experts_are_chosen_by_what_attention_has_not_changed() -> None:
    model = ggufs.tiny("smallthinker", num_hidden_layers=1, rope_layout=None, sliding_window_layout=None)
    layer, seen = model.model.layers[0], []
    router = layer.block_sparse_moe.primary_router
    router.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    logits(model)
    assert torch.equal(seen[0], model.model.embed_tokens(IDS))
    with torch.no_grad():
        weights, chosen = router(seen[0])
        scores = (seen[0][0] @ router.weight.T).sigmoid()
    top = scores.topk(2, -1)
    assert torch.equal(chosen, top.indices)
    torch.testing.assert_close(weights, top.values / top.values.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["smallthinker", "smallthinker_softmax"])
def test_folders_as_they_are_published(tmp_path: Path, name: str) -> None:
    """Experts singly, under the authors' names; their code is not needed. Zeros are skipped, and answers the same."""
    dense = ggufs.tiny(name)
    dense.save_pretrained(tmp_path / "dense")
    names = {*load_file(tmp_path / "dense" / "model.safetensors")}
    block = "model.layers.1.block_sparse_moe"
    assert {f"{block}.primary_router.weight", *(f"{block}.experts.3.{part}.weight" for part in ("up", "gate"))} <= names
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    theirs = {"AutoConfig": "configuration_smallthinker.SmallThinkerConfig"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"auto_map": theirs}))
    again = torch_pi2.load_dense(tmp_path / "dense")
    assert torch.equal(logits(again), logits(dense))
    model = torch_pi2.optimize(again, method="exact")
    assert torch.allclose(logits(model), logits(dense), atol=1e-4)
    wanted = dense.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, IDS.shape[1] :].tolist()
    assert torch_pi2.generate(model, IDS, max_new_tokens=8, eos_token_id=[]).sequences[0] == wanted
    torch_pi2.quantize(tmp_path / "dense", tmp_path / "int8", weights="int8")
    torch_pi2.pack(tmp_path / "int8", tmp_path / "packed")
    whole = torch_pi2.load(tmp_path / "int8", dtype=torch.float32)
    assert 0 < float((logits(whole) - logits(dense)).norm() / logits(dense).norm()) < 0.1
    assert torch.equal(logits(torch_pi2.load(tmp_path / "packed", dtype=torch.float32, budget="64MiB")), logits(whole))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_layout": [1]}, "rope_layout has 1 layers, num_hidden_layers is 2"),
        ({"sliding_window_layout": [1, 1], "sliding_window_size": None}, "sliding_window_size None"),
    ],
)
def test_configurations_that_make_no_sense(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallThinkerConfig(num_hidden_layers=2, **keys)
    ggufs.tiny("smallthinker_softmax").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ArtifactError, match=message):
        torch_pi2.load_dense(tmp_path)
