"""Every row of the table in docs/FORMATS.md, and plans damaged at random: a Pi2Error or the same plan, nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from torch_pi2.errors import ArtifactError, Pi2Error, StaleArtifactError
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef


def make_plan() -> Plan:
    layers = []
    for i in range(2):
        refs = [LinearRef(f"layers.{i}.{n}.weight") for n in ("gate", "up", "down")]
        site = FFNSite(f"layers.{i}", i, "relu", True, *refs, 8, 12, f"layers.{i}")
        order = torch.randperm(12, generator=torch.Generator().manual_seed(i)).to(torch.int32)
        layers.append(LayerPlan(site, "lowrank", 3, order, 0.0, 0.25))
    return Plan(layers, "ab" * 32, {"planner": "test"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_plan().save(tmp_path)
    return tmp_path


def same(a: Plan, b: Plan) -> bool:
    def plain(plan: Plan) -> list:
        return [(y.site, y.method, y.n_hot, y.order.tolist(), y.threshold, y.expected_active) for y in plan.layers]

    return plain(a) == plain(b) and a.model_hash == b.model_hash


def test_round_trip(folder: Path) -> None:
    assert same(Plan.load(folder), make_plan())
    assert sorted(p.name for p in folder.iterdir()) == ["plan.json", "plan.safetensors"]


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors"])
def test_missing_and_truncated(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"damage"):
            Plan.load(folder)
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match="found nothing"):
        Plan.load(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "magic", "method: expected dense or exact.* found 'magic'"),
        ("n_hot", -1, "n_hot: expected a whole number, 0 or more, at most 12, found -1"),
        ("n_hot", 13, "n_hot: .* at most 12, found 13"),
        ("threshold", -0.5, "threshold: .* found -0.5"),
        ("site", {}, "layers, 1, site: expected a field key"),
    ],
    ids=str,
)
def test_fields_out_of_range(folder: Path, field: str, value: object, message: str) -> None:
    data = json.loads((folder / "plan.json").read_text())
    del data["crc32c"]
    data["layers"][1][field] = value
    (folder / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=message):
        Plan.load(folder)
    del data["layers"][1][field]
    (folder / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match=f"layers, 1: expected a field {field}"):
        Plan.load(folder)


def test_versions_and_hashes(folder: Path) -> None:
    data = json.loads((folder / "plan.json").read_text())
    del data["crc32c"]
    for change, error, message in (
        ({"version": 4}, ArtifactError, r"expected torch_pi2\.plan version 2, found torch_pi2\.plan version 4"),
        ({"format": "other"}, ArtifactError, "found other version 2"),
        ({"model_hash": "cd" * 32}, StaleArtifactError, "expected model hash cdcdcdcdcdcd"),
    ):
        (folder / "plan.json").write_text(json.dumps(data | change))
        with pytest.raises(error, match=message):
            Plan.load(folder)


def test_orders(folder: Path) -> None:
    path = folder / "plan.safetensors"
    orders = load_file(path)
    for change in ({"layers.0.order": torch.zeros(12, dtype=torch.int32)}, {"layers.0.order": torch.arange(12)}):
        save_file(orders | change, path, metadata={"model_hash": "ab" * 32})
        with pytest.raises(ArtifactError, match=r"expected layers\.0\.order, a permutation of 12"):
            Plan.load(folder)
    del orders["layers.1.order"]
    save_file(orders, path, metadata={"model_hash": "ab" * 32})
    with pytest.raises(ArtifactError, match=r"layers\.1\.order"):
        Plan.load(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_is_refused_or_harmless(folder: Path, data: st.DataObject) -> None:
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    make_plan().save(work)
    path = work / data.draw(st.sampled_from(["plan.json", "plan.safetensors"]))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(bytes(content))
    try:
        plan = Plan.load(work)
    except Pi2Error:
        return
    # What still loads is a plan: every number in range, every order a permutation.
    for layer in plan.layers:
        assert sorted(layer.order.tolist()) == list(range(layer.site.intermediate))
        assert 0 <= layer.n_hot <= layer.site.intermediate


@pytest.mark.parametrize(
    "change",
    [{"gate": None}, {"activation_on_up": True}, {"up": LinearRef("layers.0.up_proj", expert=1)}],
    ids=["plain", "on both", "expert"],
)
def test_only_layers_of_two_first_matrices_have_the_activation_of_the_second(change: dict) -> None:
    site = replace(make_plan().layers[0].site, activation="silu[second=1]", activation_on_up=False)
    assert FFNSite.from_json(site.to_json()) == site
    with pytest.raises(ArtifactError, match=r"activation: expected one of the second .* found 'silu\[second=1\]'"):
        FFNSite.from_json(replace(site, **change).to_json())


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (LinearRef(""), "site, up, weight: expected text, found ''"),
        (LinearRef("up.weight", " "), "site, up, bias: expected text, found ' '"),
    ],
)
def test_parameters_have_names(ref: LinearRef, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        FFNSite.from_json(replace(make_plan().layers[0].site, up=ref).to_json())
