"""What is told of layers and of time is what other counters say."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_experts
import torch
from serving import dense
from torch import nn

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.eval.work import work
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.observe.live import Firing
from torch_pi2.observe.watch import Watch

IDS_1T = torch.arange(5, 17).reshape(1, 12)


def stepped(model: nn.Module, each: Any = lambda: None) -> None:
    decoder = Decoder(model, max_tokens=32, compiled=False)
    decoder.prompt(IDS_1T[:, :1])
    for next_11 in IDS_1T.split(1, dim=1):
        each()
        decoder.step(next_11)


@pytest.mark.slow
def test_what_fired_is_what_was_used() -> None:
    model = torch_pi2.optimize(dense(), method="exact")
    firing = Firing(model)
    assert [layer["key"] for layer in firing.layers] == [layer.site.key for layer in sparse_layers(model)]
    firing.start()
    with work() as done:
        stepped(model)
    fired = firing.read(1)
    tokens = done.neurons / sum(layer["neurons"] for layer in firing.layers)
    assert tokens >= len(IDS_1T[0])
    assert {layer["tokens"] for layer in fired} == {tokens}
    assert all(layer["hot"] == layer["fired_hot"] == 0 for layer in fired)
    share = sum(layer["fired_cold"] for layer in fired) / len(fired)
    assert share == pytest.approx(done.neurons_used, rel=1e-6)
    assert 0 < share < 0.5
    again = firing.read(1)  # from where it was read
    assert {layer["tokens"] for layer in again} == {0}
    firing.stop()
    with work() as done:
        stepped(model)
    firing.start()
    assert {layer["tokens"] for layer in firing.read(1)} == {0}
    assert done.down_rows > 0
    firing.stop()


def test_hot_and_cold_ones_are_told_apart() -> None:
    ids = [list(range(start, start + 64)) for start in range(0, 640, 64)]
    model = torch_pi2.optimize(dense(), ids, method="exact", hot_frequency=0.05)
    with Watch(sparse_layers(model)) as watched:
        stepped(model)
        counts = watched.counts()
    firing = Firing(model)
    firing.start()
    stepped(model)
    for layer, fired, count in zip(sparse_layers(model), firing.read(1), counts, strict=True):
        in_order_I = count[1:].double() / int(count[0]) / layer.site.intermediate
        assert fired["hot"] == layer.n_hot / layer.site.intermediate
        assert fired["fired_hot"] == pytest.approx(float(in_order_I[: layer.n_hot].sum()))
        assert fired["fired_cold"] == pytest.approx(float(in_order_I[layer.n_hot :].sum()))
    firing.stop()
    assert any(layer.n_hot for layer in sparse_layers(model))


@pytest.mark.slow
def test_experts_of_a_layer_are_one() -> None:
    model = torch_pi2.optimize(tiny_experts.build("Mixtral"), method="exact")
    firing = Firing(model)
    layers = model.config.num_hidden_layers
    assert [(y["experts"], y["chosen"], y["neurons"]) for y in firing.layers] == [(4, 0.5, 4 * 48)] * layers
    firing.start()
    with work() as done:
        stepped(model)
    tokens = done.neurons / (2 * 48 * layers)  # each goes to two experts
    found = firing.read(1)
    assert [layer["tokens"] for layer in found] == [2 * tokens] * layers
    fired = sum(tokens * 4 * 48 * (layer["fired_hot"] + layer["fired_cold"]) for layer in found)
    assert fired == pytest.approx(done.down_rows, rel=1e-6)
    firing.stop()


def test_a_model_in_which_nothing_is_sparse_has_no_layers() -> None:
    for model in (dense(), torch_pi2.quantize_(dense(), "int4")):
        firing = Firing(model)
        firing.start()
        stepped(model)
        assert firing.layers == firing.read(1) == []
        firing.stop()


def test_somebody_else_who_watches_is_named() -> None:
    model = torch_pi2.optimize(dense(), method="exact")
    with (
        Watch(sparse_layers(model)),
        pytest.raises(ConfigError, match="expected one watch of it at a time, found another one running"),
    ):
        Firing(model).start()
