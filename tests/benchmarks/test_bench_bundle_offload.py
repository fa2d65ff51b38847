"""``bench bundle-offload``: a bundle in the C++ runner, by budget; models whose layers are there again and again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_experts import IDS, build, logits

import torch_pi2
from benchmarks import bundle_offload
from benchmarks.__main__ import render
from torch_pi2.errors import ConfigError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.rewrite.handle import parts_of


def test_layers_again_and_again() -> None:
    few, many = build("Mixtral"), build("Mixtral", num_hidden_layers=5)
    few.load_state_dict({name: value for name, value in many.state_dict().items() if name in few.state_dict()})
    for i in range(2, 5):
        many.model.layers[i].load_state_dict(few.model.layers[i % 2].state_dict())
    wanted = logits(many)
    torch_pi2.optimize(few, method="exact")
    bundle_offload.repeat_layers(few, 5)
    torch.testing.assert_close(logits(few), wanted)
    first, others = (
        [*blocks.parameters(), *blocks.buffers()] for blocks in (few.model.layers[:2], few.model.layers[2:])
    )
    assert {id(tensor) for tensor in others} <= {id(tensor) for tensor in first}  # no copies
    layers, plan = sparse_layers(few), parts_of(few).plan
    assert [layer.site for layer in layers] == [layer.site for layer in plan.layers]
    assert [layer.site.layer for layer in layers] == [*range(20)]
    with torch.no_grad():
        assert few(IDS, use_cache=True).past_key_values.get_seq_length(4) == IDS.shape[1]


@pytest.mark.slow
@pytest.mark.long
def test_figures_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Path("build/runner/pi2/pi2_runner").resolve()
    monkeypatch.setattr(bundle_offload, "WORK", tmp_path)
    sizes = {"distinct_layers": 2, "budgets": ("26MB", "60MB"), "tokens": 6, "rounds": 2}
    result = bundle_offload.run("tiny", **sizes, runner=runner)
    for budget, found in result["budgets"].items():
        for name in ("prompt", "decode"):
            low, high = found["spread"][name]
            assert 0 < low <= found[name] <= high
        assert 0 < found["peak_bytes"] <= float(budget[:-2]) * 1e6
        assert 0 < found["in_cache"] <= 1
    assert result["export"]["seconds"] > 0
    again = bundle_offload.run("tiny", **sizes, runner=runner)
    assert again["export"] is None
    assert json.loads(json.dumps(again))["budgets"].keys() == result["budgets"].keys()
    assert "26MB" in render(again)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no runner"):
        bundle_offload.run("tiny", runner=tmp_path / "none")
    with pytest.raises(ConfigError, match="rounds"):
        bundle_offload.run("tiny", rounds=0)
