"""Hot neurons on a device that works by itself: a thread of the CPU in a GPU's place, which has its own queue."""

from __future__ import annotations

import pytest
import torch
from shared import small_store
from thread_link import ThreadLink
from tiny_experts import build
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.checkpoint import save_load
from torch_pi2.errors import ConfigError, DeviceError, OutOfMemoryError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.rewrite.gpu import hot_on_gpu

CPU = torch.device("cpu")
IDS = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
CALIBRATION = torch.randint(0, 64, (6, 32), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, tokens: int = 3) -> torch.Tensor:
    with torch.no_grad(), sparse_only():
        found: torch.Tensor = model(input_ids=IDS[:, :tokens], use_cache=False).logits
    return found


def rest_bytes(model: nn.Module) -> int:
    """Of what is no feed-forward layer."""
    with pytest.raises(OutOfMemoryError) as found:
        hot_on_gpu(model, 0, ThreadLink())
    assert "or more: what is no feed-forward layer is there as a whole, found 0 B" in str(found.value)
    inside = {id(t) for layer in sparse_layers(model) for t in layer.buffers()}
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in inside and not t.is_meta)


def made(method: str = "exact", weights: str = "float", name: str = "drelu") -> nn.Module:
    calibration = None if method == "exact" else CALIBRATION
    return torch_pi2.optimize(tiny(name), calibration, method=method, weights=weights)


@pytest.mark.parametrize(
    ("method", "weights", "name"),
    [
        ("exact", "float", "drelu"),
        ("exact", "float", "opt"),
        ("exact", "int4", "drelu"),
        ("threshold", "float", "llama"),
    ],
)
def test_both_parts_together_are_the_layer(method: str, weights: str, name: str) -> None:
    model = made(method, weights, name)
    wanted = logits(model)
    layers = sparse_layers(model)
    room = sum(layer.neuron_rows.nbytes for layer in layers)
    for share in (0.0, 0.3, 1.0):
        counts = hot_on_gpu(model, rest_bytes(model) + int(room * share * 1.2), ThreadLink())
        assert [layer.split.n_gpu for layer in layers if layer.split is not None] == list(counts.values())
        in_all = sum(layer.site.intermediate for layer in layers)
        assert sum(counts.values()) == pytest.approx(min(1.0, share * 1.2) * in_all, abs=0.1 * in_all)
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)
        for layer in layers:
            layer.split = None


def test_both_work_at_the_same_time_and_in_order() -> None:
    model = made()
    layers = sparse_layers(model)
    half = rest_bytes(model) + sum(layer.neuron_rows.nbytes for layer in layers) // 2
    link = ThreadLink(together=True)
    hot_on_gpu(model, half, link)
    logits(model)
    assert [{*link.done[i : i + 2]} for i in range(0, len(link.done), 2)] == [{"hot", "cold"}] * len(layers)


def test_a_predictor_is_asked_for_neurons_on_the_cpu_alone() -> None:
    """What it would have missed of the others is computed: no further from the dense model than before."""
    dense = logits(tiny("drelu"))
    model = made("signbit")
    without = (logits(model) - dense).abs().mean()
    layers = sparse_layers(model)
    for share in (0.2, 0.9):
        hot_on_gpu(model, rest_bytes(model) + int(share * sum(y.neuron_rows.nbytes for y in layers)), ThreadLink())
        assert float((logits(model) - dense).abs().mean()) <= float(without) * 1.05
        assert all(y.split is not None and y.split.hot is not None and not y.split.hot.has_predictor for y in layers)
        for layer in layers:
            layer.split = None


def test_those_that_fire_most_go_first() -> None:
    model = made("threshold", name="llama")
    stats = model.torch_pi2.stats
    layers = sparse_layers(model)
    counts = hot_on_gpu(model, rest_bytes(model) + layers[0].neuron_rows.nbytes // 2, ThreadLink())
    fired = {y.site.key: (stats[y.site.key].fired[y.order], counts[y.site.key]) for y in layers}
    least = min(int(fires[:n].min()) for fires, n in fired.values() if n)
    most = max(int(fires[n:].max()) for fires, n in fired.values() if n < len(fires))
    assert least >= most - 1


def test_moves_and_conversions() -> None:
    model = made()
    wanted = logits(model)
    layers = sparse_layers(model)
    hot_on_gpu(model, 1 << 30, ThreadLink())
    with pytest.raises(ConfigError, match=r"restoring .*: expected a model on the CPU, found one with its hot neurons"):
        torch_pi2.restore(model)
    model.to(CPU)  # where they are
    assert all(layer.split is not None for layer in layers)
    model.double().float()
    assert all(layer.split is None for layer in layers)
    assert torch.equal(logits(model), wanted)
    torch_pi2.restore(model)


def test_what_cannot_be_divided_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceError, match=r"mixtures of experts or over a store,: expected it on the CPU"):
        hot_on_gpu(torch_pi2.optimize(build("Mixtral")), 1 << 30, ThreadLink())
    dense = tiny("drelu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
            torch_pi2.optimize(dense, gpu_memory="1GiB")
        with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
            torch_pi2.load(small_store(tmp_path_factory) / "plain", gpu_memory=10**9)
    with pytest.raises(ConfigError, match="gpu_memory: expected bytes"):
        torch_pi2.optimize(dense, gpu_memory="much")
    monkeypatch.setattr(save_load, "checked_memory", lambda _: 1)
    with pytest.raises(ConfigError, match="expected one of them, found both"):
        torch_pi2.load(small_store(tmp_path_factory) / "store", gpu_memory=1, budget="1GiB")
    assert not sparse_layers(dense)


def test_other_weights_are_refused_while_some_are_on_a_gpu() -> None:
    """They would be computed with the old ones there."""
    model = made()
    hot_on_gpu(model, 1 << 30, ThreadLink())
    with pytest.raises(ConfigError, match=r"other weights for .*: expected all of its neurons on the CPU"):
        model.load_state_dict(tiny("drelu", seed=5).state_dict())
