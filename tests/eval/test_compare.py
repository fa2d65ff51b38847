"""``compare``: a table of methods beside the dense model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ggufs
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny, wider

import torch_pi2
from torch_pi2 import compare
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.eval.compare import Beside

GOLDEN = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
DRAWN = torch.Generator().manual_seed(0)
IDS, HELD = (torch.randint(3, 64, (rows, 32), generator=DRAWN) for rows in (20, 6))
HOW: dict[str, Any] = {"calibration": IDS, "window": 32, "seq_len": 32, "rounds": 0}


class First(torch_pi2.SparseMethod):
    """The first neurons of all; reads a table of as many bytes as an eighth of the layer's weights."""

    name = "first"

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        if self.share > 1:
            raise ConfigError("share", expected="at most 1", found=str(self.share), fix="Lower it.")
        self.table_N = torch.zeros(layer.site.rows_per_neuron * layer.site.intermediate * layer.site.hidden // 8)
        self.kept_I = torch.arange(layer.site.intermediate) < self.share * layer.site.intermediate

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.kept_I.expand(len(x_TH), -1)

    def read_bytes(self) -> int:
        return self.table_N.nbytes


class FirstOfPrompt(torch_pi2.SparseMethod):
    name = "first-of-prompt"
    scope = "prompt"

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        return torch.zeros(h_TI.shape[1])

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(score_I)) < len(score_I) // 2


class Magnitude(torch_pi2.InputMethod):
    name = "magnitude"

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        self.threshold = float(linear.x_TK.abs().flatten().quantile(0.6))


def masked(share: float, whole: int) -> Any:
    """The dense model, whose first ``whole`` tokens use all neurons and the others the first ones."""
    model: Any = tiny("llama")

    def mask(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        h_BTI = args[0].clone()
        h_BTI[:, whole:, int(share * h_BTI.shape[2]) :] = 0
        return h_BTI

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(mask)
    return model


@torch.no_grad()
def test_figures_are_those_of_masks_on_the_dense_model() -> None:
    model = tiny("llama")
    rows = compare(model, [First(0.25), FirstOfPrompt(), First(2.0)], HELD, **HOW)
    assert [row["method"] for row in rows] == ["dense", "first(share=0.25)", "first-of-prompt()", "first(share=2.0)"]
    assert rows[3]["refused"].startswith("share: expected at most 1")
    for row, share, whole, read in ((rows[1], 0.25, 0, 0.125), (rows[2], 0.5, 16, 0.0)):
        assert row["tokens"] == len(HELD) * 15
        assert row["neurons"] == pytest.approx(share)
        assert row["ffn_bytes"] == pytest.approx(share + read)
        dense, other = (F.log_softmax(m(HELD[:, :-1]).logits[:, 16:], -1) for m in (model, masked(share, whole)))
        nats, before = (F.nll_loss(y.flatten(0, 1), HELD[:, 17:].flatten()) for y in (other, dense))
        assert row["loss"] == pytest.approx(float(nats / before - 1), abs=1e-5)
        assert row["kl"] == pytest.approx(
            float(F.kl_div(other, dense, log_target=True, reduction="sum")) / 90, rel=1e-3
        )
        assert row["agreement"] == pytest.approx(float((other.argmax(-1) == dense.argmax(-1)).float().mean()))
    assert abs(rows[0]["loss"]) < 1e-6
    assert rows[0]["ffn_bytes"] == rows[0]["agreement"] == 1
    assert rows[1]["size_bytes"] > rows[0]["size_bytes"] == 0
    assert "first(share=0.25)" in str(rows).splitlines()[2]


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    drawn, held = torch.Generator().manual_seed(1), 0
    logs_TV, ids_T = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0])
    for _ in range(400):
        found = Beside()
        for noise in torch.randn(6, generator=drawn).tolist():
            share = math.exp(-math.log(2) * (1.1 + 0.05 * noise))
            found.add(logs_TV, torch.tensor([[share, 1 - share]]).log(), ids_T)
        about = found.to_json()
        held += abs(about["loss"] - 0.1) < about["loss_error"]
    assert 0.92 < held / 400 < 0.98
    assert Beside([(1.0, 2.0)], tokens=1).to_json()["loss_error"] is None


def test_texts_have_rows_of_their_own_and_rows_come_one_by_one() -> None:
    told: list[Any] = []
    methods = {"zeros": "exact", "cats": {"method": "threshold", "sparsity": 0.6}}
    texts = {"one": HELD[:3], "two": HELD[3:]}
    rows = compare(lambda: tiny("llama"), methods, texts, each=told.append, weights="int4", **HOW)
    assert told == rows
    assert [(row["method"], row["text"]) for row in rows[::3]] == [("dense", "one"), ("zeros", "two")]
    assert rows[0]["loss"] != rows[1]["loss"]
    assert 0.3 < rows[4]["neurons"] < 0.5


def test_input_channels_and_speed() -> None:
    rows = compare(wider(), [Magnitude()], HELD, **HOW | {"rounds": 2})
    assert 0.3 < rows[1]["ffn_bytes"] < 0.5
    assert rows[1]["neurons"] is None
    assert 0 < rows[1]["speed_low"] <= rows[1]["speed"] <= rows[1]["speed_high"]
    assert rows[1]["tokens_per_s"] > 0 < rows[1]["dense_tokens_per_s"]


def test_over_a_store_half_of_the_neurons_are_cached() -> None:
    registered = torch_pi2.register_method(First)
    _, fits, more = compare(tiny("llama"), [registered(0.25), registered(0.9)], HELD, store=True, **HOW)
    assert fits["hits"] > 0.9 > more["hits"]
    assert fits["flash_bytes"] < more["flash_bytes"] > 0


def test_what_is_kept_belongs_to_settings_and_calibration(tmp_path: Path) -> None:
    registered, how = torch_pi2.register_method(First), HOW | {"keep": tmp_path / "kept"}

    def neurons(share: float, name: str, **more: Any) -> float:
        found: float = compare(tiny("llama"), {name: registered(share)}, HELD, **how | more)[1]["neurons"]
        return found

    assert [neurons(0.5, "../a b"), neurons(0.25, "../a b"), neurons(0.75, "../a-b")] == [0.5, 0.25, 0.75]
    neurons(0.5, "other text", calibration=IDS[:12])
    assert len([*(tmp_path / "kept").iterdir()]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_cannot_be_compared_is_said_at_once() -> None:
    for wrong, what in (({"rounds": -1}, "rounds"), ({"methods": {"dense": First()}}, "other names")):
        with pytest.raises(ConfigError, match=what):
            compare(tiny("llama"), **{"methods": [First()], "text": HELD, **HOW, **wrong})
    for methods, fields in ((["magic"], {}), ([First()], {"weights": "int3"})):
        with pytest.raises(ConfigError):
            compare(tiny("llama"), methods, HELD, **HOW | fields)
    with pytest.raises(CalibrationError):
        compare(tiny("llama"), [First()], HELD[:1, :8], **HOW)


def test_models_of_a_files_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GGUF file: gate and up in Q4_K, down in int8 for Q6_K. What was fitted is taken from ``keep``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch_pi2.import_gguf(GOLDEN, tmp_path / "imported")
    plain = torch_pi2.load_dense(tmp_path / "imported", dtype=torch.float32)
    registered = torch_pi2.register_method(First)
    how = HOW | {"file": GOLDEN, "keep": tmp_path / "kept"}
    dense, half, inputs = torch_pi2.compare(plain, [registered(0.5), Magnitude()], HELD, **how)
    bits = {"q4_k": 4.5, "q6_k": 6.5625, "int8": 8.5}
    per_neuron, dense_bits = 2 * bits["q4_k"] + bits["int8"], 2 * bits["q4_k"] + bits["q6_k"]
    table = 4 * 3 / 8  # bytes of float32 a weight, of an eighth of a layer's
    assert half["ffn_bytes"] == pytest.approx((0.5 * per_neuron / 8 + table) / (dense_bits / 8), rel=1e-3)
    assert half["kl"] > dense["kl"] > 0  # int8 activations
    assert 0.3 < inputs["ffn_bytes"] < 0.5
    with pytest.raises(ConfigError, match="the file of the model"):
        torch_pi2.compare(ggufs.tiny("llama"), [], HELD, file=GOLDEN, **HOW)
    with pytest.raises(ConfigError, match="the weights of the file"):
        torch_pi2.compare(plain, [], HELD, file=GOLDEN, weights="int4", **HOW)
    again = torch_pi2.compare(plain, [registered(0.5)], HELD, scored=False, **how | {"rounds": 2})
    assert [row["method"] for row in again] == [row["method"] for row in (dense, half)]
    assert again[1]["fit_s"] < half["fit_s"]
    assert again[1]["speed"] > 0
    assert "loss" not in again[1]
