"""``bench gpu``: its calls on the CPU; that it needs a GPU for figures of one."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu
from torch_pi2.errors import DeviceError

SMALL = {"hidden": 64, "intermediate": 300, "rank": 16, "layers": 2, "rounds": 2, "device": "cpu"}


@pytest.mark.parametrize(("weights", "tokens"), [("float", 1), ("int4", 3)])
def test_figures_and_table(weights: str, tokens: int) -> None:
    result = gpu.run(**SMALL, active=0.2, weights=weights, tokens=tokens)
    four_bits = weights == "int4"
    assert list(result["us"]) == ["dense", *["dense_int4"] * four_bits, "exact", "sparse", "read"]
    assert ("over_dense_int4" in result) == four_bits
    assert ("PyTorch's 4-bit kernel" in gpu.render(result)) == four_bits
    for name, us in result["us"].items():
        low, high = result["spread"][name]
        assert 0 < low <= us <= high
    assert result["fired"] == pytest.approx(0.2, abs=0.02)
    assert result["of_read"] > 0
    assert json.loads(json.dumps(result)) == result
    assert f"FFN 64 x 300 {weights}, {tokens} token(s), {100 * result['fired']:.1f} % predicted" in gpu.render(result)


def test_what_is_timed_is_the_layer() -> None:
    x_TH = torch.randn(2, 64).bfloat16()
    layer = gpu._Layer(64, 300, 16, 1.0, "float", x_TH, seed=3)
    for found in (layer.sparse(x_TH), layer.exact(x_TH)):
        torch.testing.assert_close(found, layer.dense(x_TH), rtol=0.05, atol=0.05)

    layer = gpu._Layer(64, 300, 16, 1.0, "int4", x_TH, seed=3)
    for found in (layer.sparse(x_TH), layer.dense_int4(x_TH)):
        off = (found - layer.dense(x_TH)).float().norm() / layer.dense(x_TH).float().norm()
        assert 0.01 < off < 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed_for_its_figures() -> None:
    with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
        gpu.run()
