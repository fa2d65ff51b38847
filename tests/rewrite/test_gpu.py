"""Hot neurons on a device that works by itself: a thread of the CPU in a GPU's place, which has its own queue."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offloading import smallest
from shared import small_store
from thread_link import ThreadLink, placed
from tiny_experts import build
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2 import api
from torch_pi2.checkpoint import save_load
from torch_pi2.decode.plan_controller import controller_of
from torch_pi2.errors import ArtifactError, ConfigError, DeviceError, OutOfMemoryError
from torch_pi2.layers import ffn
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Accelerator, Hardware
from torch_pi2.observe.live import Firing
from torch_pi2.planner.for_machine import plannable_gpu_bytes
from torch_pi2.rewrite import gpu
from torch_pi2.rewrite.gpu import hot_on_gpu, on_the_cpu
from torch_pi2.store.storefile import StoreReader

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
IDS = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
CALIBRATION = torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module, tokens: int = 3) -> torch.Tensor:
    with torch.no_grad(), sparse_only():
        found: torch.Tensor = model(input_ids=IDS[:, :tokens], use_cache=False).logits
    return found


def rest_bytes(model: nn.Module) -> int:
    """Of what is no feed-forward layer."""
    with pytest.raises(OutOfMemoryError) as found:
        hot_on_gpu(model, 0, ThreadLink())
    assert "or more: what is no feed-forward layer is there as a whole, found 0 B" in str(found.value)
    inside = {id(t) for home in homes(model) for t in home.buffers()}
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
        hot_on_gpu(model, rest_bytes(model) + int(room * share * 1.2), ThreadLink())
        counts = placed(model)
        in_all = sum(layer.site.intermediate for layer in layers)
        assert sum(counts.values()) == pytest.approx(min(1.0, share * 1.2) * in_all, abs=0.1 * in_all)
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)
        for layer in layers:
            layer.split = None


@pytest.mark.parametrize(("method", "weights"), [("exact", "float"), ("exact", "int4"), ("lowrank", "float")])
def test_no_more_goes_there_than_was_said(method: str, weights: str) -> None:
    """Of neurons with all that belongs to them, and of what is no feed-forward layer."""
    model = made(method, weights)
    room = sum(layer.neuron_rows.nbytes for layer in sparse_layers(model))
    for share in (0.1, 0.5, 0.9):
        memory = rest_bytes(model) + int(room * share)
        hot_on_gpu(model, memory, ThreadLink())
        parts = [layer.split.hot for layer in sparse_layers(model) if layer.split is not None]
        there = sum(tensor.nbytes for part in parts if part is not None for tensor in part.buffers())
        assert 0.8 * (memory - rest_bytes(model)) < there <= memory - rest_bytes(model)


def test_moves_and_conversions(caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    wanted = logits(model)
    layers = sparse_layers(model)
    hot_on_gpu(model, 1 << 30, ThreadLink())
    with pytest.raises(ConfigError, match=r"restoring .*: expected a model on the CPU, found one with neurons"):
        torch_pi2.restore(model)
    model.to(CPU)  # where they are
    model.float()  # as it is
    assert all(layer.split is not None for layer in layers)
    model.double().float()
    assert all(layer.split is None and layer.dtype == torch.float32 for layer in layers)
    assert "a conversion to float64 ends the division" in caplog.text
    assert torch.equal(logits(model), wanted)
    torch_pi2.restore(model)


def test_a_gpu_is_needed_and_a_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    dense = tiny("drelu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
            torch_pi2.optimize(dense, gpu_memory="1GiB")
        with pytest.raises(DeviceError, match="expected a GPU, and a torch that was built for it"):
            torch_pi2.load(small_store(tmp_path_factory) / "plain", gpu_memory=10**9)
    with pytest.raises(ConfigError, match="gpu_memory: expected bytes"):
        torch_pi2.optimize(dense, gpu_memory="much")
    assert not sparse_layers(dense)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> ThreadLink:
    """In the place of a GPU."""
    made = ThreadLink()
    monkeypatch.setattr(save_load, "checked_memory", int)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "TransferBuffer", lambda _: made)
    return made


def test_a_store_keeps_what_is_on_no_gpu(tmp_path_factory: pytest.TempPathFactory, link: ThreadLink) -> None:
    folder = small_store(tmp_path_factory)
    budget = smallest(folder / "store") + (1 << 20)
    plain = torch_pi2.load(folder / "store", budget=budget)
    wanted = logits(plain)
    room = torch_pi2.load(folder / "plain")
    some = rest_bytes(room) + sum(layer.neuron_rows.nbytes for layer in sparse_layers(room)) // 4
    model = torch_pi2.load(folder / "store", budget=budget, gpu_memory=some)
    layers = sparse_layers(model)
    store = layers[0].store  # type: ignore[attr-defined]
    counts = [layer.split.n_gpu for layer in layers if layer.split is not None]
    assert counts == store.left_out
    assert all(count % 64 == 0 for count in counts)
    assert sum(counts) > 0
    stats = store.stats()
    assert store.config.preload  # later, too, when the budget grows
    assert 0 < stats["slots"] - len(layers) <= stats["resident"]  # filled, with others (shares of layers are rounded)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0.1)  # bfloat16, and fewer are missed
    assert link.done[:2] in (["cold", "hot"], ["hot", "cold"])
    same = logits(model)
    assert torch.equal(logits(model), same)
    for layer in layers:
        layer.end_split()
    assert store.left_out == [0] * len(layers)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("name", ["drelu", "opt", "Mixtral"])
def test_other_weights_are_for_both_parts(name: str) -> None:
    def model_of(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build(name) if name == "Mixtral" else tiny(name, seed=seed)

    model, other = torch_pi2.optimize(model_of(0)), model_of(5)
    wanted = logits(torch_pi2.optimize(model_of(5)))
    hot_on_gpu(model, rest_bytes(model) + sum(y.neuron_rows.nbytes for y in sparse_layers(model)) // 2, ThreadLink())
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)


def test_a_divided_model_is_neither_watched_nor_calibrated() -> None:
    model = made()
    hot_on_gpu(model, 1 << 30, ThreadLink())
    for what, call in {
        "watching": lambda: Firing(model),
        "taking to the CPU": lambda: torch_pi2.profile(model, CALIBRATION),
    }.items():
        with pytest.raises(ConfigError, match=rf"{what} .*: expected a model on the CPU, found one with neurons on a"):
            call()
    assert all(layer.split is not None for layer in sparse_layers(model))


# --- moves that fail ---


def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_of", lambda _: GPU)
    monkeypatch.setattr(gpu, "check_gpu", lambda _: None)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Models are taken for those of a GPU; where they are moved to."""
    found: list[object] = []
    of_a_gpu(monkeypatch)
    monkeypatch.setattr(nn.Module, "to", lambda _, device: found.append(device))
    return found


def test_a_model_of_a_gpu_goes_back_unless_it_is_to_stay(moves: list[object]) -> None:
    model = nn.Linear(2, 2)
    for stays, back in ((False, [GPU]), (True, [])):
        moves.clear()
        with on_the_cpu(model, stays):
            assert moves == ["cpu"]
        assert moves == ["cpu", *back]
        moves.clear()
        with pytest.raises(ZeroDivisionError), on_the_cpu(model, stays):
            raise ZeroDivisionError
        assert moves == ["cpu", GPU]


def test_a_gpu_that_is_full_leaves_all_of_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, went = nn.Linear(2, 2), []

    def full(_: nn.Module, device: object) -> None:
        went.append(device)
        if len(went) == 2:
            raise torch.OutOfMemoryError("no room")

    of_a_gpu(monkeypatch)
    monkeypatch.setattr(nn.Module, "to", full)
    with (
        pytest.raises(
            OutOfMemoryError, match=r"Linear to a GPU: expected 24 B free on cuda:0, found no room\. Give it less"
        ),
        on_the_cpu(model),
    ):
        pass
    assert went == ["cpu", GPU, "cpu"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to\n allocate"), KeyboardInterrupt()])
def test_a_division_that_fails_is_taken_back(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    wanted, layers, real = logits(model), sparse_layers(model), ffn.SparseFFN.split_off

    def full(layer: ffn.SparseFFN, *how: Any) -> None:
        real(layer, *how)
        if layer is layers[-1]:
            raise error

    monkeypatch.setattr(ffn.SparseFFN, "split_off", full)
    expected = OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else KeyboardInterrupt
    with pytest.raises(expected) as found:
        hot_on_gpu(model, 1 << 30, ThreadLink())
    if expected is OutOfMemoryError:
        assert "to a GPU: expected 1.1 GB free on cpu, found tried to allocate. Give it less" in str(found.value)
    assert all(layer.split is None for layer in layers)
    assert torch.equal(logits(model), wanted)


# --- as a plan says ---


def machine(merge_us: float = 1.0) -> Hardware:
    """A CPU, and a GPU beside it."""
    found = Accelerator("a GPU", 1 << 32, 1.0, 5000.0, 5100.0, 1e6, merge_us, holds_rest=True)
    return replace(find_hardware("sm8650-ufs4.0"), accelerator=found)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, int]:
    """Optimised for a machine whose GPU has room for one of two layers and more; bytes of its memory."""
    memory = rest_bytes(made(name="llama-relu")) + int(
        1.6 * sparse_layers(made(name="llama-relu"))[0].neuron_rows.nbytes
    )
    for module in (api, save_load):
        monkeypatch.setattr(module, "checked_memory", lambda found: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "TransferBuffer", lambda _: ThreadLink())
    return (
        torch_pi2.optimize(tiny("llama-relu"), CALIBRATION, method="exact", hardware=machine(), gpu_memory=memory),
        memory,
    )


def test_neurons_are_placed_as_the_plan_of_a_machine_says(planned: tuple[nn.Module, int]) -> None:
    model, _ = planned
    layers, plan = sparse_layers(model), model.torch_pi2.plan
    counts = [layer.split.n_gpu for layer in layers if layer.split is not None]
    sizes = [layer.site.intermediate for layer in layers]
    assert sorted(counts) == [0] * (len(sizes) - 1) + [sizes[0]]  # a whole layer: chunks are larger than that
    assert all(bucket.accelerator == tuple(counts) for bucket in plan.hardware.buckets)
    engine = controller_of(model)
    assert engine is not None
    assert engine.plan is plan.hardware  # and it is followed
    torch.testing.assert_close(logits(model), logits(tiny("llama-relu")), rtol=0, atol=1e-4)
    for layer in layers:
        assert layer.split is not None
        for part in (layer.split.hot, layer.split.cold):
            if part is not None:
                assert [hot for _, hot in part.by_batch] == [
                    max(0, min(hot, part.span[1]) - part.span[0]) for _, hot in layer.by_batch
                ]


def test_a_folder_keeps_where_its_neurons_are(
    planned: tuple[nn.Module, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, memory = planned
    counts = [layer.split.n_gpu for layer in sparse_layers(model) if layer.split is not None]
    folder = torch_pi2.save(model, tmp_path / "m")
    again = torch_pi2.load(folder, gpu_memory=memory)
    assert [layer.split.n_gpu for layer in sparse_layers(again) if layer.split is not None] == counts
    assert controller_of(again) is not None
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)
    half = memory - sparse_layers(model)[0].neuron_rows.nbytes
    with caplog.at_level(logging.WARNING):
        less = torch_pi2.load(folder, gpu_memory=half)
    assert "on a GPU, gpu_memory has room for" in caplog.text
    few = [layer.split.n_gpu for layer in sparse_layers(less) if layer.split is not None]
    assert 0 < sum(few) < sum(counts)
    torch.testing.assert_close(logits(less), logits(model), rtol=0, atol=1e-5)


def test_what_a_plan_may_fill_of_a_gpu() -> None:
    model, biased = made(), made(name="opt")
    order = sum(layer.order.nbytes for layer in sparse_layers(model))
    assert plannable_gpu_bytes(model, machine(), 1000 + order) == 1000
    assert plannable_gpu_bytes(model, machine(), 1 << 40) == 1 << 32  # what it has
    beside = sum(y.bias_up.nbytes + y.order.nbytes for y in sparse_layers(biased) if y.bias_up is not None)
    assert plannable_gpu_bytes(biased, machine(), 1 << 20) == (1 << 20) - beside > 0
    assert plannable_gpu_bytes(biased, machine(), 1) == 0
    assert plannable_gpu_bytes(made("threshold", name="llama"), machine(), 1000) == 0
    assert plannable_gpu_bytes(model, find_hardware("sm8650-ufs4.0"), 1000) == 0  # that of a phone is in its memory


def test_a_predictor_is_asked_for_neurons_on_the_cpu_alone() -> None:
    """What it would have missed of the others is computed: no further from the dense model than before."""
    dense = logits(tiny("drelu"))
    model = made("lowrank")
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
    hot_on_gpu(model, rest_bytes(model) + layers[0].neuron_rows.nbytes // 2, ThreadLink())
    counts = placed(model)
    fired = {y.site.key: (stats[y.site.key].fired[y.order], counts[y.site.key]) for y in layers}
    least = min(int(fires[:n].min()) for fires, n in fired.values() if n)
    most = max(int(fires[n:].max()) for fires, n in fired.values() if n < len(fires))
    assert least >= most - 1


def test_experts_that_the_router_asks_for_most_are_there() -> None:
    model = torch_pi2.optimize(build("Mixtral"), CALIBRATION, method="exact")
    wanted, [first, *_] = logits(model), homes(model)
    assert isinstance(first, SparseExperts)
    every, experts = len(sparse_layers(model)), len(first.sites)
    expert_bytes = sum(t.nbytes for t in first.buffers()) // experts
    rest = rest_bytes(model)
    for count in (0, 3, every):
        link = ThreadLink()
        hot_on_gpu(model, rest + count * expert_bytes, link)
        there = placed(model)
        assert sum(n > 0 for n in there.values()) == count
        assert set(there.values()) <= {0, first.site.intermediate}
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4)
        if count == 3:
            stats = model.torch_pi2.stats
            asked = {key: stats[key].tokens - stats[key].borrowed for key in there}
            assert "hot" in link.done
            assert max(asked, key=asked.__getitem__) in {key for key, n in there.items() if n}
        model.to(CPU)


def test_a_store_that_cannot_be_read_leaves_the_model_on_the_cpu(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, link: ThreadLink
) -> None:
    folder = shutil.copytree(small_store(tmp_path_factory) / "store", tmp_path / "store")
    model = torch_pi2.load(folder, budget="1GiB")
    file, layer = folder / "pi2" / "model.pi2", sparse_layers(model)[-1]
    data = bytearray(file.read_bytes())
    with StoreReader(file) as reader:
        start = reader.offset(f"{layer.site.key}.bundles")
    data[start] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"neuron 0 of .* has checksum"):
        hot_on_gpu(model, 1 << 30, link)
    assert all(layer.split is None for layer in sparse_layers(model))
