"""Decoding on a GPU, without one: a device that is made up, a thread in a GPU's place, and a made-up CUDA graph."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from serving import greedy_alone, quantised
from thread_link import ThreadLink
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.decode import chunked_prefill, hf_generate, step_graph
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.hf_generate import DecoderPool
from torch_pi2.decode.step_graph import captured
from torch_pi2.errors import ConfigError, DeviceError
from torch_pi2.layers import gpu
from torch_pi2.layers.gpu import device_of
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.prompt import dense_on_gpu_from
from torch_pi2.ops.gpu.operators import products_from
from torch_pi2.rewrite.gpu import hot_on_gpu, rest_bytes
from torch_pi2.serve.batch import Batch, Sequence

HELPERS = Path(__file__).parents[1] / "helpers"
IDS = torch.arange(6)[None]


def divided(model: nn.Module, share: float = 0.5) -> nn.Module:
    """``model`` with about ``share`` of its neurons on a thread in a GPU's place."""
    hot_on_gpu(
        model, rest_bytes(model) + int(share * sum(home.neuron_rows.nbytes for home in homes(model))), ThreadLink()
    )
    return model


def whole(model: nn.Module) -> nn.Module:
    """``model``, divided no more."""
    for home in homes(model):
        home.end_split()
    return model


@pytest.mark.slow
def test_all_of_a_decoder_is_where_its_model_is() -> None:
    environment = os.environ | {"PYTHONPATH": str(HELPERS)}
    done = subprocess.run(
        [sys.executable, str(HELPERS / "made_up_device.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {"llama", "opt", "sparse"}
    assert {place for places in found.values() for place in places} == {"npy:0"}


# --- divided between a GPU and the CPU ---


def test_a_divided_model_says_what_it_would_as_a_whole() -> None:
    wanted = torch_pi2.generate(torch_pi2.optimize(tiny("drelu")), IDS, max_new_tokens=24).sequences
    model = divided(torch_pi2.optimize(tiny("drelu")))
    assert torch_pi2.generate(model, IDS, max_new_tokens=24).sequences == wanted
    assert torch_pi2.generate(model, IDS, max_new_tokens=24, prompt_lookup=3).sequences == wanted


def test_steps_of_a_divided_model_are_not_recorded() -> None:
    """Calls alone would not wait for the other half."""
    model = divided(torch_pi2.optimize(tiny("drelu")))
    decoder = Decoder(model, max_tokens=40, compiled=False)
    ids = decoder.prompt(IDS)
    for _ in range(14):
        ids = decoder.step(ids)
    assert [replay.is_stable for replay in decoder._runners.values()] == [False]
    with pytest.raises(ConfigError, match="compiled: expected a model that is on one device as a whole, found layers"):
        Decoder(model, max_tokens=40, compiled=True)
    whole(model)
    ids = decoder.prompt(IDS)
    for _ in range(14):
        ids = decoder.step(ids)
    assert [replay.is_stable for replay in decoder._runners.values()] == [True]


def test_a_divided_model_answers_requests() -> None:
    model: Any = quantised()
    prompts = [[5, 9, 13, 40], [7, 8, 9, 10, 11, 12]]
    wanted = [greedy_alone(model, ids, 10) for ids in prompts]
    divided(model)
    said: list[list[int]] = [[] for _ in prompts]
    batch = Batch(model, max_tokens=64, max_batch_size=2)
    sequences = [
        Sequence(ids, 10, lambda what, to=to: to.append(what.token) if hasattr(what, "token") else None)
        for ids, to in zip(prompts, said, strict=True)
    ]
    for sequence in sequences:
        batch.submit(sequence)
    batch.start()
    batch.close(60)
    assert said == wanted


def test_prompts_go_the_ways_of_what_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts of layers there, which ask no predictor, and of quantised linear layers."""
    ids = torch.randint(0, 64, (12, 32), generator=torch.Generator().manual_seed(0))
    model = torch_pi2.optimize(tiny("drelu"), ids, method="lowrank", weights="int4")
    inside = sum(layer.neuron_rows.nbytes for layer in sparse_layers(model))
    hot_on_gpu(model, rest_bytes(model) + inside // 2, ThreadLink())
    monkeypatch.setattr(chunked_prefill, "device_of", lambda _: torch.device("cuda"))
    ways = chunked_prefill.prompt_path_lengths(model)
    parts = [layer.split.hot for layer in sparse_layers(model) if layer.split is not None]
    assert {dense_on_gpu_from(part) for part in parts if part is not None} <= {*ways}
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert linears
    assert {products_from("int4", module.in_features, 4) for module in linears} <= {*ways}


# --- places ---


def made_up(monkeypatch: pytest.MonkeyPatch, *where: torch.Tensor) -> None:
    """These tensors are on a GPU to what asks."""
    monkeypatch.setattr(gpu, "on_gpu", lambda tensor: any(tensor is one for one in where))


def test_a_model_that_moves() -> None:
    model = tiny("llama")
    decoder = Decoder(model, max_tokens=40, compiled=False)
    decoder.device = torch.device("cuda", 0)  # as if it had been there
    with pytest.raises(DeviceError, match="expected the model on cuda:0, where keys and values are, found it on cpu"):
        decoder.prompt(IDS)


def test_a_kept_decoder_is_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    free = DecoderPool(type(model))
    first = free.acquire(model, 20, 1)
    free.release(first)
    assert free.acquire(model, 20, 1) is first
    free.release(first)
    monkeypatch.setattr(hf_generate, "device_of", lambda _: torch.device("cuda", 0))
    assert free.acquire(model, 20, 1) is not first


def test_parameters_in_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    assert device_of(model) == torch.device("cpu")
    one: Any = next(model.parameters())
    held = [one, torch.empty(2, device="meta"), *list(model.parameters())[1:]]
    monkeypatch.setattr(model, "parameters", lambda: iter(held))
    made_up(monkeypatch, one)
    assert device_of(model) == torch.device("cpu")  # where the made-up one says that it is

    class Elsewhere:
        device, is_meta = torch.device("cuda", 1), False

    held.append(Elsewhere())  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"the CPU, or one GPU, found cpu, cuda:1. Load it without device_map"):
        device_of(model)


# --- CUDA graphs ---


class MadeUpGraph:
    """Writes down a function, and makes it again into the tensor that the first one gave."""

    made: ClassVar[list[MadeUpGraph]] = []

    def __init__(self) -> None:
        self.replays = 0
        MadeUpGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.again()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[MadeUpGraph]:
    """CUDA graphs that are made up. What is captured must be ``run`` of :func:`stepped`."""
    MadeUpGraph.made = []

    @contextmanager
    def capture(graph: MadeUpGraph, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == ("its own", "thread_local")
        Step.capturing = graph
        try:
            yield
        finally:
            Step.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", MadeUpGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "its own")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the thread's")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(step_graph, "on_gpu", lambda _: True)
    return MadeUpGraph.made


class Step:
    """Doubles ids; captured, it computes nothing yet."""

    capturing: MadeUpGraph | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.capturing is None:
            return ids * 2
        result = torch.full_like(ids, -1)
        self.capturing.again = lambda: result.copy_(ids * 2)  # type: ignore[attr-defined]
        return result


@pytest.mark.slow
def test_what_a_graph_has_addresses_of_lives_as_long(graphs: list[MadeUpGraph]) -> None:
    step = Step()
    alive, run = weakref.ref(step), captured(step, torch.tensor([[1]]))
    del step
    gc.collect()
    assert alive() is not None
    del run
    graphs.clear()
    gc.collect()
    assert alive() is None


def test_what_cannot_be_captured_runs_as_it_is(graphs: list[MadeUpGraph], caplog: pytest.LogCaptureFixture) -> None:
    def run(ids: torch.Tensor) -> torch.Tensor:
        if Step.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return ids + 1

    made = captured(run, torch.tensor([[1]]))
    assert made is run
    assert int(made(torch.tensor([[4]]))) == 5
    assert "steps are not captured as CUDA graphs: operation not permitted" in caplog.text
