"""``InputMethod``: fitted, tried on the dense model, saved, and beside int8 activations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import wider

import torch_pi2
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.cli import main
from torch_pi2.errors import ArtifactError, CalibrationError, ConfigError
from torch_pi2.layers.inputs import InputSparseLinear
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.prompt import sparse_only

IDS = torch.randint(3, 64, (20, 32), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"seq_len": 32}


@torch_pi2.register_method
class Channels(torch_pi2.InputMethod):
    name = "channels"

    def __init__(self, share: float = 0.4, by_norm: bool = False) -> None:
        self.share, self.by_norm = share, by_norm

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        if self.by_norm:
            self.scale_K = linear.weight_NK.norm(dim=0)
        scale_K = 1 if self.scale_K is None else self.scale_K
        self.threshold = float((linear.x_TK.abs() * scale_K).flatten().quantile(1 - self.share))


class Two(torch.nn.Module):
    """Two linear layers in place of one, whose sum it is."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.first, self.other = (torch.nn.Linear(*linear.weight.shape[::-1], bias=False) for _ in range(2))
        self.first.weight, self.other.weight = (torch.nn.Parameter(linear.weight * part) for part in (0.25, 0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.other(x)


@torch_pi2.register_method
class Split(Channels):
    name = "split-channels"

    def prepare(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.down_proj = Two(layer.mlp.down_proj)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    with sparse_only():
        return model(IDS[:2]).logits


@torch.no_grad()
@pytest.mark.parametrize("by_norm", [False, True])
def test_a_method_is_fitted_tried_and_used(by_norm: bool) -> None:
    dense = wider(bias=True)
    methods = torch_pi2.fit(dense, IDS, method=Channels(0.4, by_norm), **HOW)
    cards = [method.card for method in methods.values()]
    assert len(cards) == 14
    assert all(0.25 < card.predicted_active < 0.55 for card in cards)
    assert all(card.recall == pytest.approx(card.predicted_active) for card in cards)
    assert all(card.mass_recall > card.recall for card in cards)  # the larger ones
    plain = logits(dense)
    with torch_pi2.trying(dense, methods):
        wanted = logits(dense)
    assert torch.equal(logits(dense), plain)
    assert (wanted - plain).abs().max() > 0.1
    for given in ({"predictors": methods}, {"method": Channels(0.4, by_norm)}):
        model = torch_pi2.optimize(wider(bias=True), IDS, **given, **HOW)
        torch.testing.assert_close(logits(model), wanted, atol=1e-4, rtol=1e-4)
    assert model.torch_pi2.lossy
    assert model.torch_pi2.loss_change is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Channels(), {}),
        (Channels(by_norm=True), {"weights": "int4"}),
        (Channels(0.2), {"weights": "int8", "activations": "int8"}),
        (Split(), {"weights": "int4"}),
        ({"*.mlp.*": Channels(0.3)}, {"weights": "int4"}),
        ({"*.q_proj": Channels(0.3), "*.mlp.*": Channels()}, {}),
    ],
)
def test_a_saved_model_is_the_same(method: Any, settings: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = torch_pi2.optimize(wider(True, dtype), IDS, method=method, **settings, **HOW)
    torch_pi2.save(model, tmp_path / "one")
    torch_pi2.save(torch_pi2.load(tmp_path / "one"), tmp_path / "two")
    for name in ("one", "two"):
        loaded = torch_pi2.load(tmp_path / name)
        assert torch.equal(logits(loaded), logits(model))
        kinds = [[type(m) for m in of.modules()] for of in (loaded, model)]
        assert kinds[0] == kinds[1]
        assert loaded.torch_pi2.inputs == model.torch_pi2.inputs
    made = [torch_pi2.generate(m, IDS[:1, :5], max_new_tokens=20).sequences for m in (loaded, model)]
    assert made[0] == made[1]


@pytest.mark.parametrize("base", [torch_pi2.InputMethod, torch_pi2.SparseMethod])
def test_a_method_sees_all_layers_before_any_is_fitted(base: Any) -> None:
    class Divided(base):
        seen: ClassVar[list[list[str]]] = []

        def allocate(self, layers: Any) -> None:
            Divided.seen.append([*layers])
            for name in layers:
                given = layers[name]
                assert (given.key if base is torch_pi2.InputMethod else given.site.key) == name
                assert given.x_TK.shape[0] > 2 if base is torch_pi2.InputMethod else len(given.h_TI()) > 2
            self.shares = {name: len(name) for name in layers}

        def fit(self, layer: Any) -> None:
            assert len(self.shares) == 2 * (7 if base is torch_pi2.InputMethod else 1)
            self.own = self.shares[layer.key if base is torch_pi2.InputMethod else layer.site.key]

        def select(self, x: torch.Tensor) -> torch.Tensor:
            return x.new_ones((len(x), 128 if base is torch_pi2.SparseMethod else x.shape[1]), dtype=torch.bool)

    method = Divided()
    model = torch_pi2.optimize(wider(), IDS, method=method, sparsity=0.5, **HOW)
    assert not hasattr(method, "shares")
    assert len(Divided.seen) == 1
    assert all(own.own == len(name) for name, own in model.torch_pi2.predictors.items())
    Divided.seen.clear()
    two = {"*.layers.0.*": Divided(), "*": Divided()}
    with pytest.raises(AssertionError):  # each saw its own layers
        torch_pi2.optimize(wider(), IDS, method=two, sparsity=0.5, **HOW)
    assert [{name.split(".")[2] for name in names} for names in Divided.seen] == [{"0"}, {"1"}]


def test_other_linear_layers_are_quantised() -> None:
    model = torch_pi2.optimize(wider(), IDS, method={"*.mlp.*": Channels()}, weights="int4", **HOW)
    kinds = {name: type(m) for name, m in model.named_modules() if isinstance(m, InputSparseLinear | QuantLinear)}
    assert kinds["lm_head"] is kinds["model.layers.0.self_attn.q_proj"] is QuantLinear
    assert kinds["model.layers.0.mlp.up_proj"] is InputSparseLinear
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Linear)]


def test_layers_that_would_be_slower_use_all_channels(caplog: pytest.LogCaptureFixture) -> None:
    int8: dict[str, Any] = {"weights": "int4", "activations": "int8"}
    with caplog.at_level(logging.WARNING):
        model = torch_pi2.optimize(wider(), IDS, method=Channels(0.9), **int8, **HOW)
    assert "14 of 14 linear layers use all channels" in caplog.text
    assert not model.torch_pi2.inputs
    assert sum(isinstance(m, QuantLinear) and m.int8_activations for m in model.modules()) == 15
    model = torch_pi2.optimize(wider(), IDS, method=Channels(0.9), weights="int4", **HOW)
    assert len(model.torch_pi2.inputs) == 14


def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    dense = wider()
    with pytest.raises(CalibrationError, match="fit: expected statistics of the model, found none"):
        torch_pi2.fit(dense, IDS, method="lowrank", **HOW)
    with pytest.raises(ConfigError, match=r"expected names of linear layers .*, found one method for all"):  # noqa: SIM117
        with torch_pi2.trying(dense, Channels()):
            pass
    methods = torch_pi2.fit(dense, IDS, method=Channels(), **HOW)
    methods["nothing"] = methods["model.layers.0.mlp.up_proj"]
    with pytest.raises(ConfigError, match="expected linear layers of the model, found nothing"):
        torch_pi2.optimize(dense, IDS, predictors=methods, **HOW)
    with pytest.raises(ConfigError, match="expected names of linear layers of the dense model, found nothing"):  # noqa: SIM117
        with torch_pi2.trying(dense, methods):
            pass
    one = type("One", (torch_pi2.SparseMethod,), {"select": lambda self, x_TH: x_TH > 0})
    with pytest.raises(ConfigError, match="an InputMethod, as other layers have"):
        torch_pi2.optimize(dense, IDS, method={"*.mlp.*": Channels(), "*": one()}, **HOW)
    with pytest.raises(ConfigError, match="expected rtn, found gptq"):
        torch_pi2.optimize(dense, IDS, method=Channels(), weights="int4", quantization="gptq", **HOW)
    torch_pi2.save(torch_pi2.optimize(dense, IDS, method=Channels(), **HOW), tmp_path / "saved")
    with pytest.raises(ConfigError, match="linear layers by input channel"):
        torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    for use in (torch_pi2.load_dense, lambda folder: torch_pi2.export(torch_pi2.load(folder), tmp_path / "b")):
        with pytest.raises(ConfigError, match=r"sparse inputs|an InputMethod"):
            use(tmp_path / "saved")


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("about", "tensor", "message"),
    [
        ({"channels": {NAME: 127}}, None, f"{NAME} with 127 outputs, found 128"),
        ({"channels": {"model.norm": 64}}, None, "model.norm with 64 outputs, found LlamaRMSNorm"),
        ({"channels": {NAME: 0}}, None, f"channels, {NAME}: expected"),
        ({"channels": []}, None, "channels"),
        ({"pi2_version": 4}, None, "channels: expected none, in version 4, found 14"),
        ({}, lambda rows: rows[:-1].contiguous(), rf"{NAME}\.channels as uint8 \[64, 72\], found uint8 \[63, 72\]"),
        ({}, lambda rows: None, rf"a tensor {NAME}\.channels"),
    ],
)
def test_damage_is_refused_by_name(about: dict[str, Any], tensor: Any, message: str, tmp_path: Path) -> None:
    model = torch_pi2.optimize(wider(), IDS, method=Channels(), weights="int4", **HOW)
    torch_pi2.save(model, tmp_path)
    path = tmp_path / "pi2" / "weights.safetensors"
    with TensorReader(path) as reader:
        found = dict(reader.metadata) | {name: json.dumps(value) for name, value in about.items()}
    tensors = load_file(path)
    if tensor is not None:
        changed = tensor(tensors.pop(f"{NAME}.channels"))
        tensors |= {} if changed is None else {f"{NAME}.channels": changed}
    save_file(tensors, path, found)
    with pytest.raises(ArtifactError, match=message):
        torch_pi2.load(tmp_path)


def test_a_method_that_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    model = torch_pi2.optimize(wider(), IDS, method=Channels(), **HOW)
    torch_pi2.save(model, tmp_path)
    path = tmp_path / "pi2" / "predictors.safetensors"
    with TensorReader(path) as reader:
        found, tensors = dict(reader.metadata), {name: reader.read(name) for name in reader.specs}
    entries = json.loads(found["predictors"])
    for changed, message in (
        ({NAME: entries[NAME] | {"kind": "custom"}}, "the name of a SparseMethod"),
        ({name: entry for name, entry in entries.items() if name != NAME}, f"expected the InputMethod of {NAME}"),
    ):
        save_file(
            tensors, path, found | {"predictors": json.dumps(entries | changed if len(changed) == 1 else changed)}
        )
        with pytest.raises(ArtifactError, match=message):
            torch_pi2.load(tmp_path)


@pytest.mark.slow
def test_the_command_line_writes_and_runs_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root, out = Path(__file__).parents[2], str(tmp_path / "out")
    teal = f"{root / 'examples' / 'methods' / 'teal.py'}:Teal"
    quick = ["--tokens", "2000", "--trust-remote-code", "-q"]
    what = ["optimize", str(root / "examples" / "models" / "drelu-stdlib-5m"), "--method", teal, "--weights", "int4"]
    assert main([*what, "--out", out, *quick]) == 0, capfd.readouterr().err
    capfd.readouterr()
    assert main(["inspect", out, "--import", teal.rpartition(":")[0]]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert said.count("inputs (teal)") == 35
    assert "35 int4 by channel" in said
    assert f"--method {teal}" in "".join(line.strip() + " " for line in said.splitlines())
    assert "lossy (int4 weights, sparse inputs)" in said
    assert main(["generate", out, "--prompt", "import os", "--max-new-tokens", "5", "-q"]) == 0
