"""examples/methods: each published method is what its paper's equation says, works as a whole, and reads its share."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny, wider

import torch_pi2
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ConfigError
from torch_pi2.eval.work import work
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only

FOLDER = Path(__file__).parents[2] / "examples" / "methods"
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "template")
IDS = torch.randint(3, 64, (20, 32), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"seq_len": 32, "sparsity": 0.5}
SHARE = 0.6


def module(stem: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_methods_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def kind(stem: str) -> Any:
    """The one class of a file that is a method."""
    of_file, bases = module(stem), (torch_pi2.SparseMethod, torch_pi2.InputMethod)
    own = [c for c in vars(of_file).values() if isinstance(c, type) and c.__module__ == of_file.__name__]
    (found,) = (c for c in own if issubclass(c, bases))
    return found


def samples(name: str = "llama", layer: int = 0) -> torch_pi2.LayerSamples:
    """A layer of a tiny model, and its inputs."""
    model = tiny(name)
    site = torch_pi2.find_sites(model)[layer]
    inputs: list[torch.Tensor] = []
    hook = model.get_submodule(site.owner).register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        model(IDS)
    hook.remove()
    made = torch_pi2.LayerSamples(site, site.weights(model), inputs[0].flatten(0, 1), torch.empty(0))
    size_TI = made.gate_TI().abs()
    return torch_pi2.LayerSamples(site, made.weights, made.x_TH, size_TI > size_TI.quantile(0.5))


@torch.no_grad()
def fitted(stem: str, layer: torch_pi2.LayerSamples | torch_pi2.LinearSamples, *args: Any, **settings: Any) -> Any:
    method = kind(stem)(*args, **settings)
    method.fit(layer)
    return method


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def numbers(layer: torch_pi2.LayerSamples) -> tuple[np.ndarray, ...]:
    """Inputs, act(gate), up and products of a layer of ``llama`` in float64, and its down matrix."""
    x, gate, up, down = (t.double().numpy() for t in (layer.x_TH, *layer.weights[:3]))  # type: ignore[union-attr]
    act = silu(x @ gate.T)
    return x, act, x @ up.T, act * (x @ up.T), down


def largest(score: np.ndarray, share: float) -> np.ndarray:
    """Bool, in each row the largest numbers."""
    order = np.argsort(-score, axis=-1)[..., : round(share * score.shape[-1])]
    mask = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask


def same(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Equal but for some pairs at the cutoff, where rounding decides."""
    assert found.shape == wanted.shape
    assert float((found.numpy() != wanted).mean()) < 1e-3


def test_random_keeps_neurons_that_were_drawn_once() -> None:
    layers = [samples(layer=i) for i in range(2)]
    masks = [fitted("random_neurons", layer, 0.25).select(layer.x_TH) for layer in layers]
    assert all((mask == mask[0]).all() and mask[0].sum() == 12 for mask in masks)
    assert not masks[0].equal(masks[1])
    assert not fitted("random_neurons", layers[0], 0.25, seed=1).select(layers[0].x_TH).equal(masks[0])


def test_oracle_is_the_largest_contributions() -> None:
    layer = samples()
    _, _, _, h, down = numbers(layer)
    method = fitted("oracle", layer, 0.25)
    same(method.select(layer.x_TH), largest(np.abs(h) * np.linalg.norm(down, axis=0), 0.25))
    assert method.read_bytes() > 2 * layer.weights.up.nbytes
    layer.weights.up.copy_(layer.weights.up.bfloat16())
    assert fitted("oracle", layer, 0.25).up_IH.dtype == torch.bfloat16  # half of the memory where nothing is lost


def kept(share: float) -> float:
    """Neurons whose up and down are read, where gates are read in full."""
    return (3 * share - 1) / 2


def test_cats_cuts_at_a_percentile_of_all_gates() -> None:
    layer = samples()
    _, act, *_ = numbers(layer)
    cut_I = fitted("cats", layer, SHARE).cut_I
    assert cut_I.unique().numel() == 1
    assert float(cut_I[0]) == pytest.approx(np.quantile(np.abs(act), 1 - kept(SHARE)), rel=1e-3)


def test_chess_has_one_threshold_on_expected_products() -> None:
    layer = samples()
    _, act, up, *_ = numbers(layer)
    importance = np.abs(act) * np.abs(up).mean(0)
    cut_I = fitted("chess", layer, SHARE).cut_I
    same(layer.gate_TI().abs() > cut_I, importance > np.quantile(importance, 1 - kept(SHARE)))
    plain = samples("opt")  # no gate, no up to expect
    assert torch.equal(fitted("chess", plain, 0.7).cut_I, fitted("cats", plain, 0.7).cut_I)


@pytest.mark.parametrize("stem", ["cats", "chess", "learned_thresholds", "spon"])
def test_a_share_below_the_gates_is_refused_by_name(stem: str) -> None:
    with pytest.raises(ConfigError, match=r"share of .*: expected more than 1/3, at most 1, found 0.3"):
        fitted(stem, samples(), 0.3)
    layer = samples("llama-relu")
    assert ((layer.gate_TI() > fitted(stem, layer, 1.0).cut_I) == (layer.gate_TI() > 0)).all()


def test_sparseinfer_counts_signs_of_products() -> None:
    layer = samples("llama-relu")
    method = fitted("sparseinfer", layer, 0.4)
    few_TH = layer.x_TH[:50].clone()
    few_TH[0, 3] = 0.0  # its sign bit is that of a positive number
    sign = np.where(few_TH.numpy() < 0, -1, 1)[:, None] * np.where(layer.weights.gate.numpy() < 0, -1, 1)[None]
    positive, negative = (sign > 0).sum(2), (sign < 0).sum(2)
    assert np.array_equal(method.select(few_TH).numpy(), ~(method.alpha * positive < negative))
    assert method.read_bytes() == 48 * 32 // 8
    assert fitted("sparseinfer", layer, 0.8).alpha > method.alpha


def test_dejavu_learns_which_neurons_fire() -> None:
    layer = samples("llama-relu")
    fit, other = (torch_pi2.LayerSamples(layer.site, layer.weights, x, f) for x, f in zip(
        layer.x_TH.split(480), layer.fired_TI.split(480)
    ))  # fmt: skip
    method = fitted("dejavu", fit, 0.5, rank=16)
    two_TI = other.x_TH.bfloat16() @ method.a_rH.T @ method.b_Ir.T + method.c_I
    mask_TI = method.select(other.x_TH)
    assert (mask_TI.sum(1) == 24).all()
    assert float((largest(two_TI.float().numpy(), 0.5) == mask_TI.numpy()).mean()) > 0.95  # rounded otherwise
    often_I = torch.from_numpy(largest(fit.fired_TI.float().mean(0).numpy(), 0.5))

    def recall(mask: torch.Tensor) -> float:
        return float((mask & other.fired_TI).sum() / other.fired_TI.sum())

    assert recall(mask_TI) > 0.75 > recall(often_I.expand_as(mask_TI)) + 0.05
    assert recall(fitted("dejavu", fit, 0.5, rank=16, steps=1).select(other.x_TH)) < 0.75


def test_lowrank_gate_is_the_best_of_its_rank_for_its_inputs() -> None:
    layer, rank = samples(), 8
    x, act, _, h, down = numbers(layer)
    gate = layer.weights.gate.double().numpy()
    method = fitted("lowrank_gate", layer, 0.25, rank=rank)
    found = x @ method.a_rH.double().numpy().T @ method.b_Ir.double().numpy().T
    values = np.linalg.svd(x @ gate.T, compute_uv=False)  # no gate of this rank is nearer on these inputs
    error = np.sum((x @ gate.T - found) ** 2)
    assert np.sum(values[rank:] ** 2) <= error * 1.001
    assert error < 1.05 * np.sum(values[rank:] ** 2)
    full = fitted("lowrank_gate", layer, 0.25, rank=32).select(layer.x_TH)
    scale = np.abs(h).mean(0) / np.abs(act).mean(0) * np.linalg.norm(down, axis=0)
    assert float((full.numpy() == largest(np.abs(act) * scale, 0.25)).mean()) > 0.98  # bfloat16


def test_spon_replaces_what_is_skipped_by_its_mean() -> None:
    layer = samples()
    _, act, _, h, down = numbers(layer)
    method = fitted("spon", layer, SHARE)
    assert torch.equal(method.cut_I, fitted("cats", layer, SHARE).cut_I)
    skipped = np.abs(act) <= method.cut_I.numpy()
    np.testing.assert_allclose(method.bias_H.numpy(), (h * skipped).mean(0) @ down.T, atol=2e-3)  # a pair at the cutoff


def test_learned_thresholds_keep_the_share_and_lose_less_of_the_output() -> None:
    layer = samples()
    _, _, _, h, down = numbers(layer)
    lost = {}
    for stem in ("learned_thresholds", "cats"):
        cut_I = fitted(stem, layer, SHARE).cut_I
        kept_TI = (layer.gate_TI().abs() > cut_I).numpy()
        assert kept_TI.mean() == pytest.approx(kept(SHARE), abs=2e-3)
        lost[stem] = np.square((h * ~kept_TI) @ down.T).sum()
    assert lost["learned_thresholds"] < 0.99 * lost["cats"]
    assert fitted("learned_thresholds", layer, SHARE).cut_I.unique().numel() > 1
    assert fitted("learned_thresholds", layer, SHARE, steps=0).cut_I.allclose(fitted("cats", layer, SHARE).cut_I)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    with sparse_only():
        return model(IDS[:2]).logits


def test_spon_is_nearer_to_the_dense_model_than_its_cutoffs_alone() -> None:
    plain, changed = logits(tiny("llama")), {}
    for stem in ("spon", "cats"):
        model = torch_pi2.optimize(tiny("llama"), IDS, method=kind(stem)(SHARE), **HOW)
        changed[stem] = float((logits(model) - plain).square().mean())
    assert changed["spon"] < changed["cats"]


def test_griffin_sums_the_prompts_normalised_products() -> None:
    layer = samples()
    h_TI = layer.h_TI() * torch.logspace(0, 3, len(layer.x_TH))[:, None]  # tokens count alike
    h, method = h_TI.double().numpy(), fitted("griffin", layer, 0.25)
    pieces = zip(layer.x_TH.split(100), h_TI.split(100))
    found = method.choose(sum(method.prompt_scores(x_TH, h_TI) for x_TH, h_TI in pieces))
    s = np.linalg.norm(h / np.linalg.norm(h, axis=1, keepdims=True), axis=0)
    assert np.array_equal(found.numpy(), largest(s, 0.25))


def test_coreinfer_counts_the_tokens_of_a_core_neuron() -> None:
    layer = samples("llama-relu")
    method = fitted("coreinfer", layer, 0.25, alpha=0.5)
    count = np.zeros(48)
    for h in layer.h_TI().abs().numpy():
        activated = np.flatnonzero(h)
        count[activated[np.argsort(-h[activated])[: round(0.5 * len(activated))]]] += 1
    score_I = sum(method.prompt_scores(x, h) for x, h in zip(layer.x_TH.split(100), layer.h_TI().split(100)))
    assert np.array_equal(score_I.numpy(), count)
    mask_I = method.choose(score_I)
    assert mask_I.sum() == 12
    assert score_I[mask_I].min() >= score_I[~mask_I].max()


@pytest.fixture(scope="module")
def stats() -> Any:
    return torch_pi2.profile(tiny("llama"), IDS, **HOW)


NEURONS = [stem for stem in FILES if issubclass(kind(stem), torch_pi2.SparseMethod)]
INPUTS = [stem for stem in FILES if stem not in NEURONS]


@pytest.mark.parametrize("stem", NEURONS)
def test_each_is_saved_and_loaded_and_reads_its_share(stem: str, stats: Any, tmp_path: Path) -> None:
    model = torch_pi2.optimize(tiny("llama"), IDS, stats=stats, method=kind(stem)(SHARE), weights="int4", **HOW)
    with work() as done:
        wanted = logits(model)
    torch_pi2.save(model, tmp_path)
    loaded = torch_pi2.load(tmp_path)
    assert torch.equal(logits(loaded), wanted)
    assert (wanted - logits(tiny("llama"))).abs().max() > 1e-3
    method = loaded.torch_pi2.predictors[sparse_layers(loaded)[0].site.key]
    assert method.share == SHARE
    said = [torch_pi2.generate(m, IDS[:1, :8], max_new_tokens=30).sequences for m in (model, loaded)]
    assert said[0] == said[1]
    decoders = [Decoder(loaded, max_tokens=64, recorded=recorded) for recorded in (True, False)]
    tokens = [[decoder.prompt(IDS[:1, :8])] for decoder in decoders]
    for decoder, made in zip(decoders, tokens):
        for _ in range(30):
            made.append(decoder.step(made[-1]))
    assert torch.equal(torch.cat(tokens[0]), torch.cat(tokens[1]))
    read = method.card.predicted_active if method.scope == "prompt" else done.rows_used
    assert read == pytest.approx(SHARE, rel=0.1)


def linear(seed: int = 0) -> torch_pi2.LinearSamples:
    drawn = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(200, 64, generator=drawn) * torch.rand(64, generator=drawn)
    return torch_pi2.LinearSamples("layers.0.mlp.up_proj", torch.randn(96, 64, generator=drawn), x_TK)


def test_teal_and_wina_have_thresholds_at_quantiles() -> None:
    layer = linear()
    size = np.abs(layer.x_TK.numpy())
    assert fitted("teal", layer, 0.3).threshold == pytest.approx(np.quantile(size, 0.7), rel=1e-2)
    wina = fitted("wina", layer, 0.3)
    size = size * np.sqrt((layer.weight_NK.numpy() ** 2).sum(0))
    same(wina.select(layer.x_TK), size > np.quantile(size, 0.7))
    for stem in INPUTS:
        assert fitted(stem, layer, 1.0).threshold == 0


@torch.no_grad()
def test_teal_takes_channels_where_they_cost_least() -> None:
    layers = {f"model.layers.{i // 2}.{'ab'[i % 2]}": linear(i) for i in range(4)}
    layers["model.layers.0.a"].x_TK[:, :48] *= 1e-3  # which can do with a quarter of its channels
    method = kind("teal")(0.6)
    method.allocate(layers)
    shares = method._shares
    for block in range(2):
        assert sum(shares[f"model.layers.{block}.{name}"] for name in "ab") / 2 == pytest.approx(0.6, abs=0.026)
    assert shares["model.layers.0.a"] <= 0.3 < 0.85 < shares["model.layers.0.b"]

    def error(name: str, share: float) -> float:
        layer = layers[name]
        size = np.abs(x := layer.x_TK.double().numpy())
        lost = (x * (size <= np.quantile(size, 1 - share))) @ layer.weight_NK.double().numpy().T
        return float(np.square(lost).sum() / np.square(x @ layer.weight_NK.double().numpy().T).sum())

    assert method.errors(layers["model.layers.1.a"])[10] == pytest.approx(error("model.layers.1.a", 0.5), rel=0.25)
    for block in range(2):
        names = [f"model.layers.{block}.{name}" for name in "ab"]
        assert sum(error(name, shares[name]) for name in names) <= 1.02 * sum(error(name, 0.6) for name in names)


@torch.no_grad()
def test_r_sparse_multiplies_small_inputs_by_the_low_rank_part() -> None:
    of_file, layer = module("r_sparse"), linear()
    for w_NK in (layer.weight_NK, layer.weight_NK.T[:, :64].contiguous()):  # more outputs than inputs, and as many
        dense = torch.nn.Linear(64, len(w_NK))
        dense.weight.copy_(w_NK)
        made = of_file.Split(dense, 8)
        torch.testing.assert_close(made(layer.x_TK), dense(layer.x_TK), atol=1e-4, rtol=1e-4)
        u, s, v = np.linalg.svd(w_NK.double().numpy(), full_matrices=False)
        low, x = (u[:, :8] * s[:8]) @ v[:8], layer.x_TK.double().numpy()
        method = fitted("r_sparse", layer, 0.3)
        large = x * (np.abs(x) > method.threshold)
        wanted = large @ w_NK.double().numpy().T + (x - large) @ low.T + dense.bias.double().numpy()
        kept_TK = layer.x_TK * (layer.x_TK.abs() > method.threshold)
        found = made.rest(kept_TK) + made.lowrank_b(made.lowrank_a(layer.x_TK))
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-4)
    part = torch_pi2.LinearSamples("layers.0.mlp.up_proj.lowrank_a", layer.weight_NK, layer.x_TK)
    assert fitted("r_sparse", part, 0.3).threshold == 0


@pytest.mark.parametrize("stem", INPUTS)
def test_each_method_of_inputs_reads_its_share_in_all_linear_layers(stem: str) -> None:
    settings = {"rank": 0} if stem == "r_sparse" else {}
    model = torch_pi2.optimize(wider(), IDS, method=kind(stem)(SHARE, **settings), weights="int4", **HOW)
    assert logits(model).isfinite().all()
    layers = [m for m in model.modules() if getattr(m, "is_input_sparse", False)]
    assert len(layers) == 14
    assert sum(m.used for m in layers) / sum(m.seen for m in layers) == pytest.approx(SHARE, rel=0.1)
    assert len(torch_pi2.generate(model, IDS[:1, :8], max_new_tokens=4).sequences[0]) > 0
    if stem == "r_sparse":  # the same share, of which its low-rank parts are some
        method = kind(stem)(SHARE, rank=8)
        split = wider()
        method.prepare(split)
        torch.testing.assert_close(logits(split), logits(wider()), atol=1e-3, rtol=1e-3)
        better = torch_pi2.optimize(wider(), IDS, method=method, **HOW)
        assert logits(better).isfinite().all()
        layers = [m for m in better.modules() if getattr(m, "is_input_sparse", False)]
        read = sum(m.used / m.seen * m.in_features * m.out_features for m in layers)
        read += sum(m.weight.numel() for name, m in better.named_modules() if "lowrank" in name)
        assert read / sum(p.numel() for p in wider().model.layers.parameters()) == pytest.approx(SHARE, rel=0.1)


def test_a_file_is_named_in_place_of_a_class() -> None:
    assert torch_pi2.Config(method=f"{FOLDER / 'cats.py'}:Cats").method == "custom"


def test_the_template_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / "template.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert len(re.findall(r"of neurons chosen", said)) == 2
    assert re.search(r"loss [\d.]+ dense, [\d.]+ with mine\ngenerated \[\d+", said)


def test_the_table_lists_all_files() -> None:
    rows = re.findall(r"^\| `(\w+)\.py` `([\w-]+)` \|.*\| (\d+) \|$", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(stem for stem, *_ in rows) == sorted(FILES)
    for stem, name, lines in rows:
        assert kind(stem).name == name
        assert int(lines) == len((FOLDER / f"{stem}.py").read_text().splitlines()) <= 120
