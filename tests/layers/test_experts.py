"""Mixtures of experts: found, in memory and over a store, quantised, saved; and what is refused."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import MODELS, SHAPE, SYNTHETIC, build, logits, off
from torch import nn

import torch_pi2
from torch_pi2.checkpoint.quantize import quantize
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    NoFFNFoundError,
    ShapeError,
    StaleArtifactError,
    UnsupportedModelError,
)
from torch_pi2.graph import FFNSite, find_sites
from torch_pi2.graph.experts import check_known_experts, probe_experts
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts, expert_groups
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load as load_library
from torch_pi2.planner.hot_neurons import plan_without_data
from torch_pi2.rewrite.linears import Storage
from torch_pi2.rewrite.rewrite import rewrite
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.types.config import Config
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash


@pytest.fixture(scope="module")
def mixtral() -> nn.Module:
    return build("Mixtral")


@pytest.fixture(scope="module")
def sites(mixtral: nn.Module) -> list[FFNSite]:
    return find_sites(mixtral)


def plan_of(model: nn.Module, sites: list[FFNSite]) -> Plan:
    return plan_without_data(sites, weights_hash(model, sites), Config())


# --- finding ---


def test_experts_are_sites_of_their_own(mixtral: nn.Module, sites: list[FFNSite]) -> None:
    assert [site.key for site in sites] == [f"model.layers.{i}.mlp.experts.{e}" for i in range(2) for e in range(4)]
    assert [site.layer for site in sites] == list(range(8))
    site = sites[5]
    assert (site.activation, site.hidden, site.intermediate, site.owner_class) == ("relu", 64, 48, "MixtralExperts")
    assert site.experts == "model.layers.1.mlp.experts"
    experts: Any = mixtral.get_submodule(site.experts)
    weights = site.weights(mixtral)
    assert weights.gate is not None
    assert torch.equal(torch.cat([weights.gate, weights.up]), experts.gate_up_proj[1])
    assert torch.equal(weights.down, experts.down_proj[1])
    assert weights.down.data_ptr() == experts.down_proj[1].data_ptr()
    data = json.loads(json.dumps(site.to_json()))
    assert FFNSite.from_json(data) == site
    for ref in ("gate", "up", "down"):
        del data[ref]["expert"]  # as older files are
    assert FFNSite.from_json(data).experts is None


def test_dense_layers_and_shared_experts_are_found_beside_them() -> None:
    model = build("Qwen2Moe")
    found = find_sites(model)
    beside = {site.key: site.intermediate for site in found if site.experts is None}
    assert beside == {"model.layers.0.mlp": 48, "model.layers.1.mlp.shared_expert": 32}
    assert [site.key for site in found if site.experts] == [f"model.layers.1.mlp.experts.{e}" for e in range(4)]
    assert [site.layer for site in found] == list(range(6))
    assert model.model.layers[1].mlp.experts.num_experts == 4  # back where they were


def test_unknown_forms_are_refused_by_name(tmp_path: Path) -> None:
    model = build("GptOss", num_local_experts=4, head_dim=16)
    for layer in model.model.layers:
        layer.mlp.experts.scale = nn.Parameter(torch.ones(4))
    text = "GptOssExperts: experts of an unknown form; parameters down_proj, down_proj_bias, gate_up_proj"
    named = r"model\.layers\.0\.mlp\.experts, model\.layers\.1\.mlp\.experts"
    with pytest.raises(NoFFNFoundError, match=rf"not supported yet: {named} \({text}"):
        find_sites(model)
    with pytest.raises(UnsupportedModelError, match=rf"quantize: expected experts with gate_up_proj.* found {text}"):
        check_known_experts("quantize", model)


@pytest.mark.slow
def test_what_only_looks_alike_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = build("Qwen2Moe")
    experts: Any = model.model.layers[1].mlp.experts
    experts.act_fn = nn.Softplus()
    assert [site.key for site in find_sites(model)] == ["model.layers.0.mlp", "model.layers.1.mlp.shared_expert"]
    left = "left dense: model.layers.1.mlp.experts (Qwen2MoeExperts: experts of an unknown form; activation "
    assert left in caplog.text


# --- in memory ---


@pytest.mark.parametrize("name", MODELS)
def test_float_experts_compute_what_transformers_does_and_come_back(name: str) -> None:
    model = build(name)
    wanted, before = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    torch_pi2.optimize(model, config=Config(method="exact"))
    assert isinstance(model.model.layers[1].mlp.experts.sparse_ffn, SparseExperts)
    found = logits(model)
    assert 0 < off(found, wanted) < 1e-5
    assert (
        model.model.layers[1].mlp.experts.gate_up_proj.untyped_storage().nbytes() == 4
    )  # its memory is in the neurons
    again = copy.deepcopy(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    torch_pi2.restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(again), found)


def test_other_weights_can_be_loaded_into_them(mixtral: nn.Module, sites: list[FFNSite]) -> None:
    model, other = copy.deepcopy(mixtral), copy.deepcopy(mixtral)
    for parameter in other.parameters():
        parameter.data.neg_()
    rewrite(model, plan_of(model, sites))
    model.load_state_dict(other.state_dict())
    assert off(logits(model), logits(other)) < 1e-5
    wider = model.to(torch.bfloat16)
    assert wider.model.layers[0].mlp.experts.sparse_ffn.neuron_rows.dtype == torch.bfloat16
    assert off(logits(wider).float(), logits(other)) < 0.05


def test_the_bits_of_a_token_do_not_depend_on_others(mixtral: nn.Module, sites: list[FFNSite]) -> None:
    model = copy.deepcopy(mixtral)
    rewrite(model, plan_of(model, sites))
    experts: Any = model.model.layers[0].mlp.experts
    (x, index, routing), _ = probe_experts(mixtral, sites[:4])
    y = experts(x, index, routing)
    assert all(torch.equal(y[t], experts(x[t : t + 1], index[t : t + 1], routing[t : t + 1])[0]) for t in range(len(x)))
    nobody = torch.full_like(index, 4)  # as expert parallelism says that an expert is elsewhere
    assert not experts(x, nobody, routing).any()


def test_an_expert_that_is_not_there_is_named(mixtral: nn.Module) -> None:
    model: Any = torch_pi2.optimize(copy.deepcopy(mixtral), method="dense")
    experts = model.model.layers[0].mlp.experts
    x_TH, index_TK = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.long)
    for wrong in (-1, 5):
        index_TK[1, 1] = wrong
        found = (
            rf"chosen for model.layers.0.mlp.experts: expected 0 to 3, or 4 for none, found {wrong} for token 1, slot"
        )
        with pytest.raises(ShapeError, match=found), torch.no_grad():
            experts(x_TH, index_TK, torch.ones(3, 2))


def test_a_forward_that_does_more_is_seen(mixtral: nn.Module, sites: list[FFNSite]) -> None:
    plan, model = plan_of(mixtral, sites), copy.deepcopy(mixtral)
    experts: Any = model.model.layers[1].mlp.experts
    forward = type(experts).forward
    experts.forward = lambda *args: 2 * forward(experts, *args)
    wanted = logits(model)
    for weights in ("float", "int8"):
        with pytest.raises(UnsupportedModelError, match=r"MixtralExperts.*experts computes something else as well"):
            rewrite(model, plan, storage=Storage(weights))
        assert torch.equal(logits(model), wanted)


def test_what_one_operator_cannot_compute_is_refused(mixtral: nn.Module, sites: list[FFNSite]) -> None:
    plan = plan_of(mixtral, sites)
    layers = plan.layers

    def with_layer(changed: LayerPlan) -> Plan:
        return Plan([layers[0], changed, *layers[2:]], plan.model_hash)

    for changed, text in (
        (replace(layers[1], n_hot=3), r"expected an expert without hot neurons.* found 3 hot neurons"),
        (replace(layers[1], method="dense"), r"found 48 hot neurons"),
        (
            replace(layers[1], method="threshold", threshold=0.5),
            r"expected the method and sizes of .*, found threshold",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            rewrite(mixtral, with_layer(changed))
    with pytest.raises(ArtifactError, match=r"plan of model.layers.0.mlp.experts: expected all of its experts, in ord"):
        expert_groups(layers[1:])
    short = [*layers[:3], *layers[4:]]
    with pytest.raises(StaleArtifactError, match=r"expected 4 experts, as MixtralExperts has, found 3"):
        rewrite(mixtral, Plan(short, weights_hash(mixtral, [layer.site for layer in short])))
    assert logits(mixtral).isfinite().all()


# --- quantised: saved, from a checkpoint, over a store ---


@pytest.fixture(scope="module")
def quantised(mixtral: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """An optimised model and the folder that it was saved in; ``store`` beside it has the store."""
    base = tmp_path_factory.mktemp("experts")
    mixtral.save_pretrained(base / "float")
    model = torch_pi2.optimize(copy.deepcopy(mixtral), weights="int8")
    torch_pi2.save(model, base / "saved")
    torch_pi2.pack(base / "saved", base / "store")
    return model, base / "saved"


def test_quantised_experts_are_near_and_say_how_near(mixtral: nn.Module, quantised: tuple[nn.Module, Path]) -> None:
    model, folder = quantised
    assert 1e-5 < off(logits(model), logits(mixtral)) < 0.05
    errors = model.torch_pi2.quantization
    assert 0 < errors["model.layers.1.mlp.experts.3"] < 0.02
    with pytest.raises(ConfigError, match=r"int8 in model.*lossy"):
        torch_pi2.restore(model)
    assert torch.equal(logits(torch_pi2.load(folder)), logits(model))
    assert off(logits(load_dense(folder)), logits(model)) < 1e-5


def test_a_checkpoint_on_disk_becomes_the_same(quantised: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, saved = quantised
    report = quantize(saved.parent / "float", tmp_path / "out", "int8")
    assert report.errors["model.layers.0.mlp.experts.0"] == pytest.approx(
        model.torch_pi2.quantization["model.layers.0.mlp.experts.0"], rel=1e-3
    )
    found = torch_pi2.load(tmp_path / "out")
    assert torch.equal(logits(found), logits(model))
    assert found.torch_pi2.plan.model_hash == model.torch_pi2.plan.model_hash


@pytest.mark.slow
def test_checkpoints_have_experts_one_by_one_or_stacked(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build("Qwen2Moe", hidden_act="relu")
    model.save_pretrained(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "single", "int4")
    path = tmp_path / "float" / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if ".mlp.experts." not in k}
    tensors |= {k: v for k, v in model.state_dict().items() if ".mlp.experts." in k}
    save_file(tensors, path, {"format": "pt"})
    quantize(tmp_path / "float", tmp_path / "stacked", "int4")
    wanted = logits(torch_pi2.optimize(model, weights="int4"))
    assert torch.equal(logits(torch_pi2.load(tmp_path / "single")), wanted)
    assert torch.equal(logits(torch_pi2.load(tmp_path / "stacked")), wanted)


def test_a_checkpoint_of_other_sizes_is_refused(quantised: tuple[nn.Module, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    float_folder = quantised[1].parent / "float"
    tensors = load_file(float_folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text((float_folder / "config.json").read_text())
    save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{name}: expected \[64, 48\], as others .*, found \[64, 47\]"):
        quantize(tmp_path / "bad", tmp_path / "out")


def test_experts_are_never_float_when_a_folder_is_loaded(quantised: tuple[nn.Module, Path]) -> None:
    experts: Any = skeleton(quantised[1]).model.layers[0].mlp.experts
    assert experts.gate_up_proj.is_meta
    assert experts.down_proj.is_meta
    loaded: Any = torch_pi2.load(quantised[1]).model.layers[0].mlp.experts
    assert loaded.gate_up_proj.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("config", [OffloadConfig(), OffloadConfig(policy="sieve", preload=False, pipeline=False)])
def test_the_bits_do_not_depend_on_the_budget(quantised: tuple[nn.Module, Path], config: OffloadConfig) -> None:
    model, saved = quantised
    with pytest.raises(ConfigError, match="expected at least") as caught:
        torch_pi2.load(saved.parent / "store", budget=0, context=16, offload=config)
    least = math.ceil(float(caught.value.expected.split()[2]) * 2**20)
    wanted = logits(model)
    for budget in (least, least + 20_000, "1GiB"):
        stored = torch_pi2.load(saved.parent / "store", budget=budget, context=16, offload=config)
        assert isinstance(stored.model.layers[0].mlp.experts.sparse_ffn, OffloadedExperts)
        assert torch.equal(logits(stored), wanted)
        assert torch.equal(logits(stored), wanted)  # with what the first left in the cache
    assert torch_pi2.stats(stored)["wanted"] > 0
    reread = torch_pi2.load(saved.parent / "store")  # the same file, all of it in memory
    assert torch.equal(logits(reread), wanted)


def test_what_a_store_cannot_do_says_so(quantised: tuple[nn.Module, Path], tmp_path: Path) -> None:
    stored = torch_pi2.load(quantised[1].parent / "store", budget="1GiB", context=16)
    with pytest.raises(ConfigError, match=r"saving a MixtralForCausalLM over a neuron store.*found 2 layers"):
        torch_pi2.save(stored, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"the weights of model.layers.0.mlp.experts.0: expected a layer in memory"):
        stored.state_dict()
    stored.model.layers[0].mlp.experts.sparse_ffn.store.close()
    with pytest.raises(
        ArtifactError, match=r"read for model.layers.0.mlp.experts: .*found a store that has been closed"
    ):
        logits(stored)


# --- synthetic models ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A synthetic model of every type, two with predictors; beside each its ``store``."""
    made = {}
    for kind, predictor in zip(SHAPE, ("lowrank", "lowrank", None), strict=True):
        folder = tmp_path_factory.mktemp(kind)
        shape = SYNTHETIC | SHAPE[kind] | {"model_type": kind}
        torch_pi2.synthetic(folder / "plain", shape, active=0.25, rank=16, predictor=predictor)
        torch_pi2.pack(folder / "plain", folder / "store")
        made[kind] = folder
    return made


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("kind", SHAPE)
def test_synthetic_experts_have_the_same_bits_over_a_store(
    folders: dict[str, Path], kind: str, activations: str
) -> None:
    model = torch_pi2.load(folders[kind] / "plain", activations=activations)
    wanted = logits(model)
    assert wanted.isfinite().all()
    whole = torch_pi2.load(folders[kind] / "store", budget="1GiB", activations=activations, context=16)
    least = torch_pi2.stats(whole)["budget"].smallest
    for budget in (least, least + 200_000, "1GiB"):
        stored = torch_pi2.load(folders[kind] / "store", budget=budget, activations=activations, context=16)
        assert torch.equal(logits(stored), wanted), budget
    statistics = torch_pi2.stats(stored)
    predictors = model.torch_pi2.plan.layers and [p.tensors() for p in model.torch_pi2.predictors.values()]
    assert statistics["budget"].predictors == sum(t.nbytes for tensors in predictors for t in tensors.values())
    # half of the experts, and of each what its predictor or gate says
    plan = model.torch_pi2.plan.layers
    share = sum(layer.expected_active for layer in plan) / len(plan)
    assert statistics["budget"].token / statistics["budget"].neurons == pytest.approx(share / 2, rel=0.05)


def test_predictors_of_experts_are_needed(folders: dict[str, Path], tmp_path: Path) -> None:
    load_library()
    plan = Plan.load(folders["mixtral"] / "plain" / "pi2")
    model = torch_pi2.load(folders["mixtral"] / "plain")
    assert sparse_layers(model)[3].predictor_threshold == model.torch_pi2.predictors[plan.layers[3].site.key].threshold
    (folders["mixtral"] / "plain" / "pi2" / "predictors.safetensors").rename(tmp_path / "p")
    try:
        with pytest.raises(ConfigError, match=r"predictor of model.layers.0.mlp.experts.0: expected tensors a"):
            torch_pi2.load(folders["mixtral"] / "plain")
    finally:
        (tmp_path / "p").rename(folders["mixtral"] / "plain" / "pi2" / "predictors.safetensors")
