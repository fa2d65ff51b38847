"""The public functions end to end on small models: optimise, generate, save, load, restore, and every bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn

import torch_pi2
from torch_pi2 import errors
from torch_pi2.fitting import search
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.observe import counters

QUICK = {"calibration_tokens": 2000, "seq_len": 32}


@pytest.fixture(autouse=True)
def briefly_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the steps: how good predictors become is in the tests of fitting."""
    train = search.train_matrices
    monkeypatch.setattr(search, "train_matrices", lambda *args, steps, **how: train(*args, steps=steps // 8, **how))


def ids(rows: int = 64, length: int = 32, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(5))


class Gated(nn.Module):
    """Not a transformers model: embedding, a gated FFN spelled with functions, a head."""

    def __init__(self, activation=torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(97, 24)
        self.w_in, self.w_side, self.w_out = nn.Linear(24, 70), nn.Linear(24, 70), nn.Linear(70, 24)
        self.head = nn.Linear(24, 97)
        self.activation = activation

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x = self.table(ids_BT)
        x = x + self.w_out(self.activation(self.w_in(x)) * self.w_side(x))
        return self.head(x)


@pytest.fixture
def drelu():
    module = tiny_models.drelu_module()
    # As after from_pretrained(trust_remote_code=True): save_pretrained copies the modelling file.
    module.DReLULlamaConfig.register_for_auto_class()
    module.DReLULlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return tiny_models.tiny("drelu")


@torch.no_grad()
def logits(model: nn.Module, batch: torch.Tensor | None = None) -> torch.Tensor:
    out = model(ids(4, 16) if batch is None else batch)
    return out if isinstance(out, torch.Tensor) else out.logits


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_optimize_without_calibration_is_exact_and_restores(drelu) -> None:
    before = {k: v.clone() for k, v in drelu.state_dict().items()}
    wanted = logits(drelu)
    assert torch_pi2.optimize(drelu) is drelu
    counters.reset()
    for batch in (ids(1, 1), ids(1, 7), ids(5, 3), ids(4, 16)):
        dense = torch_pi2.restore(drelu)
        expected = logits(dense, batch)
        torch_pi2.optimize(drelu)
        assert relative(logits(drelu, batch), expected) < 1e-5
    assert counters.read()["calls"] > 0
    torch_pi2.restore(drelu)
    assert torch.equal(logits(drelu), wanted)
    after = drelu.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not hasattr(drelu, "torch_pi2")
    assert torch_pi2.restore(drelu) is drelu  # a dense model is left alone


@pytest.mark.parametrize("method", ["auto", "dense", "exact", "lowrank"])
def test_optimize_save_load(drelu, method: str, tmp_path: Path) -> None:
    config = torch_pi2.Config(method=method, **QUICK)
    torch_pi2.optimize(drelu, ids(), config)
    wanted = logits(drelu)
    torch_pi2.save(drelu, tmp_path / "m")
    assert {p.name for p in (tmp_path / "m" / "pi2").iterdir()} == {
        "plan.json",
        "plan.safetensors",
        "predictors.safetensors",
        "stats.safetensors",
    }
    again = torch_pi2.load(tmp_path / "m", trust_remote_code=True)
    assert torch.equal(logits(again), wanted)
    assert json.loads((tmp_path / "m" / "pi2" / "plan.json").read_text())["made_by"]["config"]["method"] == method
    methods = {layer.method for layer in again.torch_pi2.plan.layers}
    assert methods <= {"dense", "exact", "lowrank"} if method == "auto" else method in methods <= {method, "dense"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]  # nothing temporary is left


def test_saved_folder_is_an_ordinary_checkpoint(drelu, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = logits(drelu)
    torch_pi2.save(torch_pi2.optimize(drelu, ids(), torch_pi2.Config(method="exact", **QUICK)), tmp_path / "m")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "m", trust_remote_code=True).eval()
    assert torch.equal(logits(dense), wanted)


def test_generate_greedy_sampling_batch_left_padding(drelu) -> None:
    prompt = ids(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}

    def both() -> list[torch.Tensor]:
        greedy = drelu.generate(prompt, do_sample=False, **settings)
        torch.manual_seed(7)
        return [greedy, drelu.generate(prompt, do_sample=True, top_k=20, **settings)]

    wanted = both()
    torch_pi2.optimize(drelu)
    assert all(torch.equal(a, b) for a, b in zip(both(), wanted))


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_swiglu_by_thresholds(sparsity: float, tmp_path: Path) -> None:
    model = tiny_models.tiny("llama")
    wanted = logits(model, ids())
    torch_pi2.optimize(model, ids(), torch_pi2.Config(method="threshold", sparsity=sparsity, **QUICK))
    assert {layer.method for layer in model.torch_pi2.plan.layers} == {"threshold"}
    counters.reset()
    with sparse_only():
        found = logits(model, ids())
    done = counters.read()
    assert done["up_rows"] / done["gate_rows"] == pytest.approx(1 - sparsity, abs=0.06)  # as docs/LOSSLESS.md says
    assert relative(found, wanted) > 0
    torch_pi2.save(model, tmp_path / "m")
    with sparse_only():
        assert torch.equal(logits(torch_pi2.load(tmp_path / "m"), ids()), found)


def test_threshold_of_another_sparsity_is_refused() -> None:
    model = tiny_models.tiny("llama")
    config = torch_pi2.Config(method="threshold", sparsity=0.5, **QUICK)
    stats = torch_pi2.profile(model, ids(), config=config)
    with pytest.raises(errors.ConfigError, match=r"threshold for sparsity 0\.9.*Profile again"):
        torch_pi2.plan(model, stats, config=torch_pi2.Config(method="threshold", sparsity=0.9))
    exact = torch_pi2.profile(model, ids(), config=torch_pi2.Config(method="exact", **QUICK))
    with pytest.raises(errors.ConfigError, match="found a threshold of 0"):
        torch_pi2.plan(model, exact, config=config)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(8, 16, 16)
    with torch.no_grad():
        wanted = model(x)
        torch_pi2.optimize(model, [(x,)], torch_pi2.Config(method="exact"))
        counters.reset()
        assert relative(model(x), wanted) < 1e-5
        with sparse_only():
            assert relative(model(x), wanted) < 1e-5
    assert counters.read()["calls"] == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_auto_without_a_next_token_loss_fits_no_predictors(caplog) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 70), nn.ReLU(), nn.Linear(70, 16)).eval()
    x = torch.randn(80, 16)
    with torch.no_grad():
        wanted = model(x)
        torch_pi2.optimize(model, [(x,)])
        assert relative(model(x), wanted) < 1e-5
    assert "no predictors are fitted" in caplog.text
    assert [layer.method for layer in model.torch_pi2.plan.layers] == ["exact"]


def test_plan_by_hand_for_a_plain_module() -> None:
    model = nn.Sequential(nn.Linear(16, 70), nn.ReLU(), nn.Linear(70, 16)).eval()
    data = [(torch.randn(80, 16),)]
    config = torch_pi2.Config(method="exact")
    stats = torch_pi2.profile(model, data, config=config)
    made = torch_pi2.plan(model, stats, config=config, example=data)
    with torch.no_grad(), torch_pi2.NeuronClusterMode(made):
        found = model(data[0][0])
    with torch.no_grad():
        torch.testing.assert_close(found, model(data[0][0]))


def test_plain_module_round_trip(tmp_path: Path) -> None:
    model = Gated().eval()
    wanted = logits(model)
    torch_pi2.optimize(model, ids(), torch_pi2.Config(method="exact", **QUICK))
    found = logits(model)
    assert relative(found, wanted) < 1e-5
    torch_pi2.save(model, tmp_path / "m")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "m", model=Gated())), found)
    with pytest.raises(errors.ArtifactError, match="weights of this Sequential"):
        torch_pi2.load(tmp_path / "m", model=nn.Sequential(nn.Linear(2, 2)))


def test_steps_by_hand_equal_optimize(drelu) -> None:
    config = torch_pi2.Config(method="lowrank", **QUICK)
    stats = torch_pi2.profile(drelu, ids(), config=config)
    predictors = torch_pi2.fit(drelu, ids(), stats=stats, config=config)
    plan = torch_pi2.plan(drelu, stats, predictors, config=config)
    with torch_pi2.NeuronClusterMode(plan, predictors), torch.no_grad():
        by_mode = drelu(ids(4, 16)).logits
    torch_pi2.optimize(drelu, config=config, stats=stats, predictors=predictors)
    assert relative(logits(drelu), by_mode) < 1e-5
    by_hand = logits(drelu)
    torch_pi2.restore(drelu)
    torch_pi2.optimize(drelu, ids(), config)
    assert torch.equal(logits(drelu), by_hand)  # the whole is deterministic
    order = plan.layers[0].order.long()
    frequency = stats[plan.layers[0].site.key].frequency()[order]
    assert bool((frequency[:-1] >= frequency[1:]).all())  # hottest first
    assert all(layer.n_hot == int((stats[layer.site.key].frequency() >= 0.4).sum()) for layer in plan.layers)


# Bad input: what was expected, what was found, what to do.


def test_calibration_too_short_or_empty(drelu) -> None:
    with pytest.raises(errors.CalibrationError, match=r"at least 64 tokens.*found 16 tokens"):
        torch_pi2.optimize(drelu, ids(1, 16))
    with pytest.raises(errors.CalibrationError, match="found none"):
        torch_pi2.profile(drelu, [])
    with pytest.raises(errors.CalibrationError, match="expected a tokenizer"):
        torch_pi2.profile(drelu, "some text")


def test_nan_in_weights_and_activations(drelu) -> None:
    weight = drelu.model.layers[1].mlp.up_proj.weight
    kept = weight.data.clone()
    weight.data[3, 4] = float("nan")
    with pytest.raises(errors.NonFiniteError, match=r"model\.layers\.1\.mlp up.*1 NaN or infinite"):
        torch_pi2.optimize(drelu)
    weight.data.copy_(kept)
    assert torch.isfinite(logits(torch_pi2.restore(drelu))).all()
    drelu.model.embed_tokens.weight.data[:] = float("inf")
    with pytest.raises(errors.NonFiniteError):
        torch_pi2.profile(drelu, ids())


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Gated()
    with pytest.raises(errors.DeviceError, match="meta"):
        torch_pi2.optimize(model, ids())


def test_mixed_dtypes_by_name() -> None:
    from torch_pi2.types.site import check_weights

    model = tiny_models.tiny("drelu")
    site = torch_pi2.find_sites(model)[0]
    weights = site.weights(model)
    with pytest.raises(errors.DtypeError, match=r"found bfloat16, float32.*model\.to"):
        check_weights(site, weights._replace(up=weights.up.bfloat16()))
    with pytest.raises(errors.DtypeError, match="found float64"):
        check_weights(site, type(weights)(*(None if w is None else w.double() for w in weights)))
    model.model.layers[0].mlp.bfloat16()  # the model does not run
    with pytest.raises(errors.DtypeError, match=r"one dtype for all matrices, found bfloat16 \(model"):
        torch_pi2.optimize(model)


def test_training_model_with_gradients(drelu) -> None:
    torch_pi2.optimize(drelu)
    drelu.train()
    with pytest.raises(errors.GradientError, match="no_grad"):
        drelu(ids(1, 4))


def test_what_takes_calibration_says_so(drelu) -> None:
    with pytest.raises(errors.CalibrationError, match=r"silu \(no exact zeros\).*stdlib_text"):
        torch_pi2.optimize(tiny_models.tiny("llama"))
    with pytest.raises(errors.CalibrationError, match="calibration"):
        torch_pi2.optimize(drelu, config=torch_pi2.Config(method="lowrank"))
    with pytest.raises(errors.CalibrationError, match="fitted predictors"):
        torch_pi2.optimize(drelu, stats=torch_pi2.profile(drelu, ids()), config=torch_pi2.Config(method="lowrank"))


@torch.no_grad()
def test_without_calibration_layers_without_zeros_stay_dense_and_are_named(caplog) -> None:
    model = tiny_models.tiny("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    wanted, other = model(ids(1, 4)).logits, model.model.layers[1].mlp
    torch_pi2.optimize(model)
    reason = "silu has no exact zeros, and there is no calibration"
    assert model.torch_pi2.left == {"model.layers.1.mlp": reason}
    assert f"left dense: model.layers.1.mlp ({reason})" in caplog.text
    assert [layer.site.key for layer in model.torch_pi2.plan.layers] == ["model.layers.0.mlp"]
    assert not torch_pi2.layers.of_model.sparse_layers(other)
    torch.testing.assert_close(model(ids(1, 4)).logits, wanted)
    quantised = torch_pi2.optimize(torch_pi2.restore(model), weights="int8")
    assert [layer.method for layer in quantised.torch_pi2.plan.layers] == ["exact", "dense"]
    assert quantised.torch_pi2.left == {"model.layers.1.mlp": reason}


@pytest.mark.parametrize("method", ["exact", "dense"])
@torch.no_grad()
def test_what_measures_nothing_needs_no_number_of_tokens(method: str) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    model, x = torch.nn.Sequential(layer, torch.nn.LayerNorm(32)), torch.randn(1, 3, 32)
    wanted = model(x)
    torch_pi2.optimize(model, [(x,)], method=method)
    assert [made.method for made in model.torch_pi2.plan.layers] == [method]
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(errors.CalibrationError, match="at least 64 tokens"):
        torch_pi2.optimize(torch.nn.Sequential(torch_pi2.restore(model)), [(x,)])
    alone = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    alone.forward = lambda x: alone[2](torch.relu(alone[0](x)))  # no sequence of modules
    torch_pi2.optimize(torch.nn.Sequential(alone), [(x,)], method=method)


def test_stale_artifacts(drelu, tmp_path: Path) -> None:
    config = torch_pi2.Config(method="lowrank", **QUICK)
    stats = torch_pi2.profile(drelu, ids(), config=config)
    torch_pi2.save(torch_pi2.optimize(drelu, ids(), config, stats=stats), tmp_path / "m")
    torch_pi2.restore(drelu)
    drelu.model.layers[0].mlp.gate_proj.weight.data[0, 0] += 1
    with pytest.raises(errors.StaleArtifactError, match=r"expected.*found.*again"):
        torch_pi2.fit(drelu, ids(), stats=stats, config=config)
    with pytest.raises(errors.StaleArtifactError, match="new plan"):
        torch_pi2.optimize(drelu, stats=stats, config=torch_pi2.Config(method="exact"))
    drelu.save_pretrained(tmp_path / "m")  # other weights under the old plan
    with pytest.raises(errors.StaleArtifactError, match="plan"):
        torch_pi2.load(tmp_path / "m", trust_remote_code=True)


def test_predictors_of_other_weights(drelu) -> None:
    config = torch_pi2.Config(method="lowrank", **QUICK)
    stats = torch_pi2.profile(drelu, ids(), config=config)
    predictors = torch_pi2.fit(drelu, ids(), stats=stats, config=config)
    other = tiny_models.tiny("drelu", seed=3)
    with pytest.raises(errors.StaleArtifactError, match=r"predictors: expected .*Fit them to this model"):
        torch_pi2.optimize(other, ids(), config, predictors=predictors)
    with pytest.raises(errors.StaleArtifactError, match="predictors"):
        torch_pi2.plan(other, torch_pi2.profile(other, ids(), config=config), predictors, config=config)


def test_save_after_the_weights_changed(drelu, tmp_path: Path) -> None:
    torch_pi2.optimize(drelu, ids(), torch_pi2.Config(method="exact", **QUICK))
    drelu.bfloat16()
    torch_pi2.save(drelu, tmp_path / "m")  # an exact plan is right for any weights
    again = torch_pi2.load(tmp_path / "m", trust_remote_code=True)
    assert torch.equal(sparse_layers(again)[0].neuron_rows, sparse_layers(drelu)[0].neuron_rows)
    fresh = tiny_models.tiny("drelu")
    torch_pi2.optimize(fresh, ids(), torch_pi2.Config(method="lowrank", **QUICK))
    fresh.bfloat16()
    with pytest.raises(errors.StaleArtifactError, match=r"lowrank layers.*converted or loaded anew.*restore"):
        torch_pi2.save(fresh, tmp_path / "n")
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    "stranger",
    ["other/config.json", "notes.md", "pi2/notes.txt", "pi2/plan.json/x", "additional_chat_templates/x.py", "-> pi2"],
)
def test_only_an_earlier_result_is_replaced(drelu, tmp_path: Path, stranger: str) -> None:
    torch_pi2.optimize(drelu)
    folder = torch_pi2.save(drelu, tmp_path / "m")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").touch()
    torch_pi2.save(drelu, folder)
    if stranger == "-> pi2":  # a folder of somebody else's
        stranger = "pi2"
        (folder / "pi2").rename(tmp_path / "elsewhere")
        (folder / "pi2").symlink_to(tmp_path / "elsewhere")
    elif stranger.endswith("/x"):
        stranger = stranger.removesuffix("/x")
        (folder / stranger).unlink()
        (folder / stranger).mkdir()
    else:
        (folder / stranger).parent.mkdir(exist_ok=True)
        (folder / stranger).touch()
    before = sorted(folder.rglob("*"))
    name = stranger if stranger.startswith(("pi2/", "additional")) else stranger.partition("/")[0]
    with pytest.raises(errors.ArtifactError, match=f"found a folder with other files in it: .*{name}"):
        torch_pi2.save(drelu, folder)
    assert sorted(folder.rglob("*")) == before


def test_save_follows_links_and_replaces_no_file_nor_folder_around_its_source(
    drelu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_pi2.optimize(drelu)
    (tmp_path / "file").write_text("dear")
    with pytest.raises(errors.ArtifactError, match="found a file"):
        torch_pi2.save(drelu, tmp_path / "file")
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    torch_pi2.save(drelu, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    folder = tmp_path / "m"
    again = torch_pi2.load(folder, trust_remote_code=True)
    with pytest.raises(errors.ConfigError, match="save's folders: expected two separate ones"):
        torch_pi2.save(again, folder / "sub")
    assert torch_pi2.save(again, folder) == folder  # an earlier result, by what was made of it
    monkeypatch.chdir(folder)
    with pytest.raises(errors.ArtifactError, match="found the current folder"):
        torch_pi2.save(drelu, ".")


def test_save_and_load_refusals(drelu, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="found a dense model"):
        torch_pi2.save(drelu, tmp_path / "m")
    with pytest.raises(errors.ArtifactError, match=r"plan\.json.*found nothing"):
        torch_pi2.load(tmp_path)
    torch_pi2.optimize(drelu)
    with pytest.raises(errors.ConfigError, match="already rewritten"):
        torch_pi2.optimize(drelu)
