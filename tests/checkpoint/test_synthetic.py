"""Synthetic models: what they promise is measured by running them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pi2
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import ConfigError
from torch_pi2.ops import load as load_library
from torch_pi2.ops.rows import values
from torch_pi2.predict.file import load_predictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.store.synthetic import (
    LOCALITY,
    TOPIC_IDS,
    TOPIC_TOKENS,
    TokenStream,
    embedding_noise,
    power_law,
    random_rows,
)
from torch_pi2.types.plan import Plan

ACTIVE, LAYERS = 0.1, 4
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 80}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "tiny"
    torch_pi2.synthetic(path, "tiny", active=ACTIVE, rank=64, locality=0)  # 8 topics would be no sample of a law
    return path


@pytest.fixture(scope="module")
def dense(folder: Path) -> nn.Module:
    return load_dense(folder, dtype=torch.float32)


class Firing:
    """Records, per layer, the share of tokens for which each neuron fires."""

    def __init__(self, model: nn.Module) -> None:
        self.fired: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
        for recorded, layer in zip(self.fired, model.model.layers, strict=True):
            layer.mlp.act_fn.register_forward_hook(lambda m, i, out, r=recorded: r.append((out > 0).flatten(0, -2)))

    def shares(self) -> list[torch.Tensor]:
        shares = [torch.cat(recorded).double().mean(0) for recorded in self.fired]
        for recorded in self.fired:
            recorded.clear()
        return shares


@pytest.mark.parametrize("active", [0.03, 0.1, 0.3, 0.6])
def test_law_has_the_mean_and_the_hot_share(active: float) -> None:
    p = power_law(4096, active)
    assert float(p.mean()) == pytest.approx(active, rel=1e-3)
    assert bool((p.diff() <= 0).all())
    assert float(p.max()) <= 0.95
    assert float(p.min()) > 0
    if active < 0.4:
        assert float(p[: int(0.43 * 4096)].sum() / p.sum()) == pytest.approx(0.8, abs=0.01)


def test_neurons_fire_as_the_law_says_in_every_layer(dense: nn.Module) -> None:
    wanted = power_law(1024, ACTIVE)
    firing = Firing(dense)
    with torch.no_grad():
        ids_BT = torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(0))
        logits = dense(ids_BT).logits
    assert bool(logits.isfinite().all())
    assert 0.3 < float(logits.std()) < 3
    for share in firing.shares():
        assert float(share.mean()) == pytest.approx(ACTIVE, rel=0.15)
        hot = wanted >= 0.4
        assert float(share[hot].mean()) == pytest.approx(float(wanted[hot].mean()), rel=0.15)
        assert float(torch.corrcoef(torch.stack([share, wanted]))[0, 1]) > 0.97
        assert float((share - wanted).abs().max()) < 0.25


@pytest.mark.parametrize(
    ("locality", "new", "together"), [(LOCALITY, (0.021, 0.027), (0.23, 0.27)), (0.0, (0.034, 0.041), (0.28, 0.33))]
)
def test_locality_is_that_of_text(locality: float, new: tuple[float, float], together: tuple[float, float]) -> None:
    """What a token wants that the five before did not, and what those five wanted: 2.4 % and 24 % in the paper."""
    g = torch.Generator().manual_seed(0)
    vocabulary, neurons, hidden = 200 * TOPIC_IDS, 2048, 128
    noise_VH = embedding_noise(vocabulary, hidden, locality, g)
    assert float(noise_VH.std()) == pytest.approx(1, rel=0.02)
    rows_IH = torch.nn.functional.normalize(torch.randn((neurons, hidden), generator=g))
    beta_I = torch.special.ndtri(power_law(neurons, ACTIVE)).float()
    ids = TokenStream(vocabulary, topics=True, generator=g).draw(3000)
    fires = noise_VH[ids] @ rows_IH.T + beta_I > 0
    windows = fires[:-1].unfold(0, 5, 1).any(-1)
    assert new[0] < float((fires[5:] & ~windows).float().mean()) < new[1]
    assert together[0] < float(windows.float().mean()) < together[1]


def test_token_streams() -> None:
    g = torch.Generator().manual_seed(0)
    topics = TokenStream(1000, topics=True, generator=g).draw(20_000) // TOPIC_IDS
    stays = float((topics[1:] == topics[:-1]).float().mean())
    assert 1 - stays == pytest.approx((1 - 1 / 8) / TOPIC_TOKENS, rel=0.2)  # the next of 8 may be the same
    assert topics.unique().tolist() == list(range(8))
    assert int(TokenStream(1000, topics=True, generator=g).draw(20_000).max()) < 1000
    independent = TokenStream(1000, topics=False, generator=g).draw(20_000)
    assert int(independent.max()) < 1000
    assert float((independent[1:] // TOPIC_IDS == independent[:-1] // TOPIC_IDS).float().mean()) < 0.2


def test_predictor_finds_what_fires(folder: Path, dense: nn.Module) -> None:
    """On the running model, not on the numbers by which it was made."""
    plan, predictors = Plan.load(folder / "pi2"), load_predictors(folder / "pi2")
    inputs: list[torch.Tensor] = []
    for layer in dense.model.layers:
        layer.mlp.register_forward_pre_hook(lambda m, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        dense(torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(1)))
        for layer, x_TH in zip(plan.layers, inputs, strict=True):
            predictor = predictors[layer.site.key]
            assert isinstance(predictor, LowRankRows)
            assert predictor.rank == 64
            cold = layer.order[layer.n_hot :].long()
            said = (predictor.scores(x_TH) >= predictor.threshold)[:, cold]
            fires = (x_TH @ dense.get_parameter(layer.site.gate.weight).T > 0)[:, cold]
            recall = int((said & fires).sum()) / int(fires.sum())
            precision = int((said & fires).sum()) / int(said.sum())
            assert recall > 0.93
            assert precision > 0.65
            assert recall == pytest.approx(predictor.card.recall, abs=0.04)
            assert precision == pytest.approx(predictor.card.precision, abs=0.08)
            assert predictor.card.recall >= 0.95


def test_sparse_model_computes_what_the_dense_equivalent_does(folder: Path, dense: nn.Module, tmp_path: Path) -> None:
    torch_pi2.synthetic(tmp_path / "exact", "tiny", active=ACTIVE, predictor=None)
    sparse = torch_pi2.load(tmp_path / "exact", dtype=torch.float32)
    same = load_dense(tmp_path / "exact", dtype=torch.float32)
    ids_BT = torch.randint(0, 1024, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = same(ids_BT).logits, sparse(ids_BT).logits
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3
        predicted = torch_pi2.load(folder, dtype=torch.float32)(ids_BT).logits
        assert float((predicted - dense(ids_BT).logits).norm() / wanted.norm()) < 0.05
        rounded = torch_pi2.load(folder)(ids_BT).logits
        assert rounded.dtype == torch.bfloat16
        assert float((rounded.float() - predicted).norm() / wanted.norm()) < 0.1


def test_folder_says_that_it_is_synthetic(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_pi2_synthetic"]["active"] == ACTIVE
    assert config["hidden_act"] == "relu"
    plan = Plan.load(folder / "pi2")
    assert plan.made_by["planner"] == "synthetic"
    assert plan.layers[0].n_hot == int((power_law(1024, ACTIVE) >= torch_pi2.Config().hot_frequency).sum()) > 0
    with TensorReader(folder / "pi2" / "weights.safetensors") as weights:
        assert json.loads(weights.metadata["synthetic"])["shape"] == "tiny"
        assert weights.specs["model.layers.3.mlp.bundles"].shape == (1024, 3, 8 * 18)


def test_sites_are_those_that_are_found(folder: Path, dense: nn.Module) -> None:
    found = torch_pi2.find_sites(load_dense(folder, dtype=torch.float32))
    planned = [layer.site for layer in Plan.load(folder / "pi2").layers]
    assert found == planned
    assert [site.owner_class for site in found] == [site.owner_class for site in planned]


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch_pi2.synthetic(tmp_path / name, SMALL, active=0.2, rank=16, seed=seed)
    a, b, c = ((tmp_path / name / "pi2" / "weights.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize(("kind", "weights"), [("qwen2", "int4"), ("mistral", "int8")])
def test_other_architectures_run(tmp_path: Path, kind: str, weights: str) -> None:
    torch_pi2.synthetic(tmp_path / "m", SMALL | {"model_type": kind}, weights=weights, rank=16, layers=1)
    model = torch_pi2.load(tmp_path / "m", dtype=torch.float32)
    dense = load_dense(tmp_path / "m", dtype=torch.float32)
    assert len(model.model.layers) == 1
    with torch.no_grad():
        wanted, found = dense(torch.arange(12)[None]).logits, model(torch.arange(12)[None]).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


STATES = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4}
STATES |= {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 1024}
STATES |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}


RANKS = [f"{part}_low_rank_dim" for part in ("decay", "a", "v", "gate")]


@pytest.mark.parametrize("kind", ["arcee", "jais2", "nemotron_h", "bitnet", "rwkv7"])
def test_layers_of_relu2_fire_as_often_as_asked(tmp_path: Path, kind: str) -> None:
    shape = SMALL | {"model_type": kind, "intermediate_size": 1024, "hidden_size": 256, "num_key_value_heads": 4}
    shape |= {"num_attention_heads": 4, "head_dim": 64, "vocab_size": 512} | (STATES if kind == "nemotron_h" else {})
    shape |= dict.fromkeys(RANKS, 32) if kind == "rwkv7" else {}
    if kind == "nemotron_h":
        del shape["num_hidden_layers"]
        with pytest.raises(ConfigError, match=r"layers=...\): expected 4, the kinds that the shape lists"):
            torch_pi2.synthetic(tmp_path / "n", shape, layers=3)
    how: dict[str, object] = {"active": 0.1, "rank": 32, "locality": 0}
    if kind == "bitnet":
        with pytest.raises(ConfigError, match="needs all that fire"):
            torch_pi2.synthetic(tmp_path / "n", shape, **how)
        how["predictor"] = None
    torch_pi2.synthetic(tmp_path / "m", shape, **how)
    plan, expected = Plan.load(tmp_path / "m" / "pi2"), ("lowrank", "relu2(up)")
    expected = ("exact", "relu2[rms=1e-05](gate)*up") if kind == "bitnet" else expected
    assert {(layer.method, layer.site.form) for layer in plan.layers} == {expected}
    dense = load_dense(tmp_path / "m", dtype=torch.float32)
    ids_NT = torch.randint(512, (16, 32), generator=torch.Generator().manual_seed(0))
    for layer in torch_pi2.zeros(dense, ids_NT, tokens=512).layers:
        assert layer.zeros == pytest.approx(0.9, abs=0.02)
    model = torch_pi2.load(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        wanted, found = dense(ids_NT[:1]).logits, model(ids_NT[:1]).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.05
    assert float(wanted.std()) < 3  # blocks add little


@pytest.mark.parametrize(("kind", "method"), [("llama", "dense"), ("qwen3_moe", "exact")])
def test_swiglu(tmp_path: Path, kind: str, method: str) -> None:
    """Layers all of whose neurons are computed; over a store they give the same."""
    shape = SMALL | {"model_type": kind}
    if kind == "qwen3_moe":
        shape |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    torch_pi2.synthetic(tmp_path / "m", shape, active=1.0, predictor=None)
    model = torch_pi2.load(tmp_path / "m", dtype=torch.float32)
    plan = Plan.load(tmp_path / "m" / "pi2")
    assert {(layer.method, layer.site.activation) for layer in plan.layers} == {(method, "silu")}
    dense = load_dense(tmp_path / "m", dtype=torch.float32)
    ids_1T = torch.arange(12)[None]
    with torch.no_grad():
        wanted, found = dense(ids_1T).logits, model(ids_1T).logits
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3
        torch_pi2.pack(tmp_path / "m", tmp_path / "store")
        stored = torch_pi2.load(tmp_path / "store", budget="64MiB", dtype=torch.float32)
        assert float((stored(ids_1T).logits - wanted).norm() / wanted.norm()) < 1e-3
    budget = torch_pi2.stats(stored)["budget"]
    assert budget.token * (2 if kind == "qwen3_moe" else 1) == budget.neurons  # half of the experts, each whole


def test_later_layers_can_be_copies(tmp_path: Path) -> None:
    label = torch_pi2.synthetic(tmp_path / "m", "tiny", layers=5, distinct_layers=2)
    assert label["distinct_layers"] == 2
    model = torch_pi2.load(tmp_path / "m")
    layers = [layer.mlp.down_proj.sparse_ffn for layer in model.model.layers]
    for i, j, same in ((0, 2, True), (1, 3, True), (0, 4, True), (0, 1, False)):
        assert torch.equal(layers[i].neuron_rows, layers[j].neuron_rows) == same
        assert torch.equal(layers[i].predictor_b, layers[j].predictor_b) == same
    with pytest.raises(ConfigError, match=r"distinct_layers=...\): expected at least 1, found 0"):
        torch_pi2.synthetic(tmp_path / "n", "tiny", distinct_layers=0)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_random_rows_have_their_deviation_and_zeros_past_the_end(weights: str) -> None:
    load_library()
    rows = random_rows(64, 77, weights, 0.5, torch.Generator().manual_seed(0))
    padded = values(rows, weights, 96)
    assert float(padded[:, :77].std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(padded[:, :77].mean())) < 0.1
    assert not padded[:, 77:].any()
    assert torch.equal(torch.ops.pi2.dequantize(rows, weights, 77, torch.float32), padded[:, :77])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "mistral-8b"}, r"expected mistral-7b, llama-1b, .* found 'mistral-8b'"),
        (
            {"shape": {"model_type": "opt"}},
            r"shape's model_type: expected llama, .*, arcee, .*, found 'opt'",
        ),
        ({"active": 0.0}, r"synthetic\(active=...\): expected more than 0, at most 0.9, or 1, found 0.0"),
        ({"weights": "int3"}, r"synthetic\(weights=...\): expected int4 or int8 or float32 or .*, found 'int3'"),
        ({"active": 1.0}, r"predictor=...\): expected None where every neuron is computed .*, found 'lowrank'"),
        ({"predictor": "guess"}, r"expected lowrank or None, found 'guess'"),
        ({"rank": 0}, r"synthetic\(rank=...\): expected at least 1, found 0"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torch_pi2.synthetic(tmp_path / "m", **({"shape": SMALL} | settings))
    assert not list(tmp_path.iterdir())
