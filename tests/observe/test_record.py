"""Activations: those of hooks on dense models, what optimised layers choose, and folders written in bounded memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared import small_store
from tiny_experts import build
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.base.files import atomic_write
from torch_pi2.base.tensorfile import packed, read_tensors
from torch_pi2.errors import ArtifactError, ConfigError, ShapeError
from torch_pi2.graph.routed import Routed
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.signbit import SignBit
from torch_pi2.rewrite.rewrite import apply
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash

IDS = torch.randint(3, 60, (6, 20), generator=torch.Generator().manual_seed(0))


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        one[key].keys() == other[key].keys() and all(torch.equal(one[key][n], other[key][n]) for n in one[key])
        for key in one
    )


@pytest.mark.parametrize("name", ["llama-bias", "phi3", "opt", "gpt2-relu", "drelu", "gemma2"])
def test_values_are_those_of_hooks(name: str) -> None:
    model = tiny(name)
    sites = torch_pi2.find_sites(model)
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    for site in sites:
        for role, ref in site.refs.items():
            module = model.get_submodule(ref.weight.rpartition(".")[0])

            def hook(
                _: nn.Module, args: Any, y: torch.Tensor, role: str = role, site: Any = site, ref: Any = ref
            ) -> None:
                if role == "down":
                    seen[f"{site.key}.product"].append(args[0].flatten(0, -2).clone())
                    return
                if role == "up":
                    seen[f"{site.key}.input"].append(args[0].flatten(0, -2).clone())
                y_TI = y.flatten(0, -2)
                seen[f"{site.key}.{role}"].append(y_TI if ref.rows is None else y_TI[:, slice(*ref.rows)].clone())

            module.register_forward_hook(hook)
    token: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, kw: token.append(kw["input_ids"].flatten()), with_kwargs=True)
    found = torch_pi2.record(model, IDS, batch_size=4, sites=sites, progress=False)
    assert list(found) == [site.key for site in sites]
    for site in sites:
        own = found[site.key]
        gate = ["gate"] if site.gated else []
        assert list(own) == ["input", *gate, "up", "product", "selected", "token"]
        for value in ("input", *gate, "up", "product"):
            assert torch.equal(own[value], torch.cat(seen[f"{site.key}.{value}"])), value
        first = F.relu(own["gate" if site.gated else "up"])
        if site.activation == "relu":
            assert torch.equal(own["selected"], (first * F.relu(own["up"]) if site.activation_on_up else first) > 0)
            assert 0.1 < own["selected"].float().mean() < 0.9
        assert torch.equal(own["token"], torch.cat(token[-2:]))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        return self.down(F.silu(gate, inplace=True).mul_(self.up(x)))


def test_what_the_model_changes_in_place_is_recorded_before() -> None:
    model, x = InPlace(), torch.randn(5, 9, 8)
    (own,) = torch_pi2.record(model, [(x,)], progress=False).values()
    gate = model.gate(x).reshape(-1, 24)
    assert torch.equal(own["gate"], gate)
    assert torch.equal(own["product"], (F.silu(gate) * model.up(x).reshape(-1, 24)).detach())
    assert "token" not in own
    with pytest.raises(
        ConfigError, match=r"what of .*: expected input or gate or up or product or selected, found 'token'"
    ):
        torch_pi2.record(model, [(x,)], ["token"], progress=False)


def test_experts_have_the_rows_that_the_router_gave_them() -> None:
    model = build("Mixtral")
    calls: list[Routed] = []
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    experts.register_forward_pre_hook(lambda _, args, kw: calls.append(Routed.of(args, kw, 4)), with_kwargs=True)
    found = torch_pi2.record(model, IDS, batch_size=6, progress=False, layers=["model.layers.1.*"])
    routed = calls[-1]
    for site in torch_pi2.find_sites(model)[4:]:
        tokens, own = routed.tokens_of(site), found[site.key]
        assert torch.equal(own["input"], routed.x_TH[tokens])
        assert torch.equal(own["token"], IDS.flatten()[tokens])
        w_gate, w_up = experts.gate_up_proj[site.up.expert].chunk(2)
        assert torch.equal(own["gate"], own["input"] @ w_gate.T)
        assert torch.equal(own["up"], own["input"] @ w_up.T)
        torch.testing.assert_close(own["product"], F.relu(own["gate"]) * own["up"])
        assert torch.equal(own["selected"], own["gate"] > 0)


def test_padding_is_left_out_and_tokens_are_counted() -> None:
    model = tiny("llama-relu")
    rows = [IDS[0, :n] for n in (20, 7, 13)]
    found = torch_pi2.record(model, rows, progress=False)
    alone = torch_pi2.record(model, rows, batch_size=1, progress=False)
    for key in found:
        assert torch.equal(found[key]["token"].sort().values, torch.cat(rows).sort().values)
        assert torch.equal(alone[key]["token"], torch.cat(rows))
    some = torch_pi2.record(model, rows, ["up", "token"], tokens=23, batch_size=1, layers=[1], progress=False)
    assert list(some) == ["model.layers.1.mlp"]
    assert torch.equal(some["model.layers.1.mlp"]["token"], torch.cat(rows)[:23])
    assert torch.equal(some["model.layers.1.mlp"]["up"], alone["model.layers.1.mlp"]["up"][:23])


# --- optimised models ---


def planned(method: str, weights: str = "float", hot: int = 11) -> tuple[nn.Module, nn.Module]:
    """A tiny dense model, and itself rewritten by a plan of random neuron orders."""
    model = tiny("llama-relu")
    sites, layers, predictors = torch_pi2.find_sites(model), [], FittedPredictors()
    for site in sites:
        order = torch.randperm(site.intermediate, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        layers.append(LayerPlan(site, method, hot, order, 0.0, 0.5))
        if method == "signbit":
            gate = site.weights(model).gate
            assert gate is not None
            predictors[site.key] = SignBit.from_weights(gate)
    state = SparseState(Plan(layers, weights_hash(model, sites)), predictors, None)
    return model, apply(copy.deepcopy(model), state, False, Config(weights=weights))


def test_an_exact_gate_selects_what_fires() -> None:
    dense, sparse = planned("exact")
    wanted = torch_pi2.record(dense, IDS, ["input", "selected", "token"], progress=False)
    found = torch_pi2.record(sparse, IDS, progress=False)
    for layer in sparse_layers(sparse):
        key = layer.site.key
        hot_I = torch.zeros(48, dtype=torch.bool)
        hot_I[layer.order[:11]] = True
        torch.testing.assert_close(found[key]["input"], wanted[key]["input"])
        other = found[key]["selected"] ^ (wanted[key]["selected"] | hot_I)
        assert int(other.sum()) <= 2  # the inputs of the second layer differ in their last bits
        assert torch.equal(found[key]["token"], wanted[key]["token"])
    assert torch.equal(
        torch_pi2.record(torch_pi2.restore(sparse), IDS, ["up"], progress=False)["model.layers.0.mlp"]["up"],
        torch_pi2.record(dense, IDS, ["up"], progress=False)["model.layers.0.mlp"]["up"],
    )


def test_a_predictor_selects_what_it_chooses_and_hot_neurons() -> None:
    dense, sparse = planned("signbit", "int4")
    found = torch_pi2.record(sparse, IDS, progress=False)
    for layer, site in zip(sparse_layers(sparse), torch_pi2.find_sites(dense), strict=True):
        gate = site.weights(dense).gate
        assert gate is not None
        predictor, own = SignBit.from_weights(gate), found[site.key]
        wanted = predictor.scores(own["input"]) >= predictor.threshold
        wanted[:, layer.order[:11]] = True
        assert torch.equal(own["selected"], wanted)
        assert 0.2 < wanted.float().mean() < 0.95


class Strongest(torch_pi2.SparseMethod):
    name = "strongest-of-record"

    def __init__(self, share: float = 0.3, scope: str = "token") -> None:
        self.share, self.scope = share, scope

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        self.gate = layer.weights.gate.float()

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        score_TI = x_TH.float() @ self.gate.T
        return score_TI > score_TI.quantile(1 - self.share, 1, keepdim=True)

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        return h_TI.float().abs().sum(0)

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        return score_I > score_I.quantile(1 - self.share)


@pytest.mark.parametrize("name", ["llama-relu", "Mixtral"])
def test_a_method_selects_what_it_chooses(name: str) -> None:
    model = tiny(name) if name == "llama-relu" else build(name)
    torch_pi2.optimize(model, IDS.repeat(2, 1), method=Strongest())
    for layer in sparse_layers(model):
        own = torch_pi2.record(model, IDS, layers=[layer.site.key], progress=False)[layer.site.key]
        wanted = layer.custom.select(own["input"])
        wanted[:, layer.order[: layer.n_hot]] = True
        assert torch.equal(own["selected"], wanted)
    model = torch_pi2.optimize(tiny("llama-relu"), IDS.repeat(2, 1), method=Strongest(scope="prompt"))
    with pytest.raises(ConfigError, match="selected: expected a choice by the token, found one by the prompt"):
        torch_pi2.record(model, IDS, progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory)


def test_over_a_store_it_is_what_memory_has(folder: Path, tmp_path: Path) -> None:
    wanted = torch_pi2.record(torch_pi2.load(folder / "plain"), IDS[:2], progress=False)
    model = torch_pi2.load(folder / "store", budget="1GiB")
    assert equal(torch_pi2.record(model, IDS[:2], progress=False), wanted)
    assert equal(torch_pi2.record(model, IDS[:2], out=tmp_path / "a", part_bytes=5000, progress=False), wanted)
    with torch.no_grad(), sparse_only():
        torch_pi2.stats(model, reset=True)
        model(IDS[:1, :1])
        computed = torch_pi2.stats(model)["wanted"]
    one = torch_pi2.record(model, IDS[:1, :1].expand(2, -1), ["selected"], progress=False)
    assert computed == sum(int(own["selected"][0].sum()) for own in one.values())


def test_experts_that_were_optimised() -> None:
    dense = build("Mixtral")
    wanted = torch_pi2.record(dense, IDS, ["input", "selected", "token"], progress=False)
    found = torch_pi2.record(torch_pi2.optimize(copy.deepcopy(dense), method="exact"), IDS, progress=False)
    assert found.keys() == wanted.keys()
    for key, own in found.items():
        assert torch.equal(own["token"], wanted[key]["token"])
        assert int((own["selected"] ^ wanted[key]["selected"]).sum()) <= 2


def test_what_an_optimised_model_cannot_give_is_refused(folder: Path) -> None:
    _, sparse = planned("exact")
    for how in ({"what": ["up"]}, {"sites": torch_pi2.find_sites(tiny("llama-relu"))}):
        with pytest.raises(
            ConfigError, match="expected a dense model, for sites, gate, up, product, found an optimised"
        ):
            torch_pi2.record(sparse, IDS, progress=False, **how)
    lossy = torch_pi2.load(folder / "store", budget="1GiB", offload=OffloadConfig(miss_margin=0.5))
    with pytest.raises(
        ConfigError, match="selected: expected a choice by the token, found one by what is in the cache"
    ):
        torch_pi2.record(lossy, IDS, progress=False)
    assert torch_pi2.record(lossy, IDS, ["input"], progress=False)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"what": ["gates"]}, "what: expected input or gate or up or product or selected or token, found 'gates'"),
        ({"layers": ["model.layers.7.*"]}, r"layers: expected keys, .* the last of which is model.layers.1.mlp \(1\)"),
        ({"layers": [2]}, "layers: expected keys, patterns of keys, or numbers"),
        ({"tokens": 0}, "tokens: expected a whole number, 1 or more, found 0"),
        ({"part_bytes": 0}, "part_bytes: expected a whole number, 1 or more, found 0"),
        ({"what": "gate"}, r"record\(what\): expected a Sequence or None, found 'gate'"),
    ],
)
def test_mistakes(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torch_pi2.record(tiny("llama-relu"), IDS, progress=False, **how)
    with pytest.raises(
        ConfigError, match=r"what of .*: expected input or up or product or selected or token, found 'gate'"
    ):
        torch_pi2.record(tiny("opt"), IDS, ["gate"], progress=False)


def test_a_site_by_hand_that_is_wrong() -> None:
    up, down = torch_pi2.LinearRef("up.weight", "up.bias"), torch_pi2.LinearRef("down.weight", "down.bias")
    site = torch_pi2.FFNSite("", 0, "relu", False, None, up, down, 8, 23, "")
    with pytest.raises(ShapeError, match=r"up of : expected \[23, 8\], found \[24, 8\]. Correct the site"):
        torch_pi2.record(InPlace(), [(torch.randn(2, 8),)], sites=[site], progress=False)


# --- folders ---


def test_a_folder_has_the_same_in_parts(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    wanted = torch_pi2.record(model, IDS, batch_size=2, progress=False)
    made = torch_pi2.record(model, IDS, batch_size=2, out=tmp_path / "a", part_bytes=60_000, progress=False)
    found = torch_pi2.Activations(tmp_path / "a")
    assert equal(made, wanted)
    assert equal(found, wanted)
    assert found.model_hash == weights_hash(model, torch_pi2.find_sites(model))
    pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
    parts = list(found.parts())
    for part in parts:
        for key in wanted:
            pieces[key].append(part[f"{key}.up"])
    assert len(parts) > 2
    assert all(torch.equal(torch.cat(rows), wanted[key]["up"]) for key, rows in pieces.items())
    with pytest.raises(ArtifactError, match=r"expected a new or empty folder, found activations-00000.safetensors"):
        torch_pi2.record(model, IDS, out=tmp_path / "a", progress=False)


def test_a_recording_that_did_not_end_is_refused(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    calls = 0

    def stop(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    model.get_submodule("model.layers.1").register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        torch_pi2.record(model, IDS, batch_size=1, out=tmp_path / "a", part_bytes=1, progress=False)
    assert (tmp_path / "a" / "activations-00001.safetensors").exists()
    with pytest.raises(ArtifactError, match=r"no activations.json: the recording did not end. Record it again"):
        torch_pi2.Activations(tmp_path / "a")
    with pytest.raises(ArtifactError, match="expected a file, found nothing"):
        torch_pi2.Activations(tmp_path / "b")


def test_damage(tmp_path: Path) -> None:
    model = tiny("llama-relu")
    for name in ("a", "b"):
        torch_pi2.record(model, IDS, batch_size=2, out=tmp_path / name, part_bytes=60_000, progress=False)
    found, part = torch_pi2.Activations(tmp_path / "a"), tmp_path / "a" / "activations-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes((tmp_path / "b" / part.name).read_bytes())
    with pytest.raises(
        ArtifactError, match=f"{part.name}: expected a whole recording, found another part, or one of another"
    ):
        found["model.layers.1.mlp"]
    part.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(ArtifactError, match="has checksum"):
        [found[key] for key in found]
    part.unlink()
    with pytest.raises(ArtifactError, match=f"{part.name}: expected a safetensors file, found nothing"):
        found["model.layers.1.mlp"]
    part.write_bytes((tmp_path / "a" / "activations-00000.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match="found another part, or one of another"):
        list(found.parts())
    part.write_bytes(whole)
    tensors, about = read_tensors(part)
    for change in (lambda rows: rows[1:], lambda rows: rows[0, 0], lambda rows: rows.double()):
        changed = {name: change(rows) if name.endswith("product") else rows for name, rows in tensors.items()}
        atomic_write(part, packed(changed, about))
        with pytest.raises(
            ArtifactError, match=r"expected a whole recording, found other product of model.layers.\d.mlp"
        ):
            [found[key] for key in found]
    index = tmp_path / "a" / "activations.json"
    index.write_text(index.read_text().replace('"parts": ', '"parts": 1'))
    with pytest.raises(ArtifactError, match="content that has the checksum"):
        torch_pi2.Activations(tmp_path / "a")


_MEASURE = """
import resource, sys, torch, torch_pi2
from torch import nn
class FFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 8192), nn.Linear(8192, 256)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
torch.set_num_threads(1)
model, x = FFN(), torch.randn(64, 256)
torch_pi2.record(model, [(x,)], progress=False)
before = peak()
torch_pi2.record(model, [(x,)] * 100, out=sys.argv[1], part_bytes=4 << 20, progress=False)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert written > 6400 * 8192 * 9  # up and product in float32, a byte for each that is selected
    assert int(done.stdout) < 40 << 20
