"""``SparseMethod``: a method of sparsity in Python, in every way that a model is used."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import nats_per_token
from tiny_models import tiny, wider
from transformers import MixtralConfig, MixtralForCausalLM

import torch_pi2
from torch_pi2.base import plugins
from torch_pi2.base.fields import Field
from torch_pi2.cli import main
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import ArtifactError, ConfigError, DtypeError, Pi2Error, ShapeError
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.types import method as registry

IDS = torch.randint(3, 64, (20, 32), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"seq_len": 32, "sparsity": 0.5}


@torch_pi2.register_method
class Largest(torch_pi2.SparseMethod):
    """Neurons of the largest weighted inputs: depends on the token, and on what was fitted."""

    name = "largest"

    def __init__(self, share: float = 0.5) -> None:
        self.share, self.labels = share, {"source": ["a test", 1, None]}

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        first = layer.weights.up if layer.weights.gate is None else layer.weights.gate
        self.first_IH, self.scale_I = first.clone(), layer.h_TI().abs().mean(0)
        assert layer.x_TH.shape[1] == layer.site.hidden
        assert layer.fired_TI.shape == layer.gate_TI().shape == (len(layer.x_TH), layer.site.intermediate)

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        score_TI = (x_TH.float() @ self.first_IH.T).abs() * self.scale_I
        return score_TI >= score_TI.quantile(1 - self.share, dim=1, keepdim=True)


@torch_pi2.register_method
class Recorded(Largest):
    name = "recorded"
    recordable = True


@torch_pi2.register_method
class Cuts(torch_pi2.SparseMethod):
    name = "cuts"

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        self.cut_I = layer.gate_TI().abs().quantile(0.6, dim=0)


def tiny_mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads, initializer_range=0.3)).eval()


@pytest.fixture(scope="module", params=["llama", "llama-relu", "opt"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def optimised(name: str, method: Any, **settings: Any) -> Any:
    return torch_pi2.optimize(tiny(name), IDS, method=method, **HOW, **settings)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS[:2]) -> torch.Tensor:
    with sparse_only():
        return model(ids).logits


@pytest.mark.parametrize("kind", [Largest, Cuts])
def test_a_method_leaves_out_the_same_neurons_of_sparse_and_of_dense_layers(name: str, kind: Any) -> None:
    dense = tiny(name)
    stats = torch_pi2.profile(dense, IDS, **HOW)
    methods = torch_pi2.fit(dense, IDS, stats=stats, method=kind(), **HOW)
    with torch.no_grad(), torch_pi2.trying(dense, methods):
        wanted = dense(IDS[:2]).logits
    assert (wanted - logits(dense)).abs().max() > 1e-3
    model = optimised(name, kind(), stats=stats, predictors=methods)
    torch.testing.assert_close(logits(model), wanted, atol=1e-4, rtol=1e-4)
    assert model.torch_pi2.lossy
    assert model.torch_pi2.loss_change is None
    card = next(iter(methods.values())).card
    assert 0.3 < card.predicted_active < 0.6
    assert card.bytes > 0


@pytest.mark.parametrize("weights", ["float", "int4", "int8"])
@pytest.mark.parametrize("kind", [Largest, Cuts])
def test_a_method_is_saved_and_loaded_with_its_model(kind: Any, weights: str, tmp_path: Path) -> None:
    model = optimised("llama", kind(), weights=weights)
    torch_pi2.save(model, tmp_path)
    loaded = torch_pi2.load(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(copy.deepcopy(loaded)), logits(model))
    own = loaded.torch_pi2.predictors[sparse_layers(loaded)[0].site.key]
    assert type(own) is kind
    assert vars(own).keys() == vars(model.torch_pi2.predictors[sparse_layers(model)[0].site.key]).keys()
    made_by = loaded.torch_pi2.plan.made_by["config"]
    assert made_by["custom"]["*"]["name"] == kind.name


def decoded(decoder: Decoder, tokens: int = 40) -> torch.Tensor:
    said = [decoder.prompt(IDS[:3, :5])]
    for _ in range(tokens - 1):
        said.append(decoder.step(said[-1]))
    return torch.cat(said, 1)


def test_generated_tokens_are_those_of_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the plain and the recorded step, one sequence and three; and a change between two answers is seen."""
    calls = []
    for kind in (Largest, Recorded):
        model = optimised("llama", kind(), weights="int4")
        asked = kind.select

        def counted(self: Any, x_TH: torch.Tensor, asked: Any = asked) -> Any:
            calls.append(len(x_TH))
            return asked(self, x_TH)

        monkeypatch.setattr(kind, "select", counted)
        for share in (0.5, 0.1):
            for layer in sparse_layers(model):
                layer.custom.share = share
            before = len(calls)
            made = decoded(Decoder(model, max_tokens=64, batch=3))
            asked_for = len(calls) - before
            if kind is Largest:
                assert asked_for >= 39 * len(sparse_layers(model))
            assert torch.equal(decoded(Decoder(model, max_tokens=64, batch=3, recorded=False)), made)
        monkeypatch.undo()


class Counted(Largest):
    recordable = True
    calls: list[int] = []  # noqa: RUF012 shared by all layers

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x_TH))
        return super().select(x_TH)


def test_recorded_steps_do_not_call_a_recordable_method() -> None:
    model = optimised("llama", Counted(), weights="int4")
    steps, layers = 60, len(sparse_layers(model))
    Counted.calls.clear()
    decoded(Decoder(model, max_tokens=128, batch=3), steps)
    assert 0 < Counted.calls.count(3) < steps // 2 * layers


def test_a_registered_name_stands_for_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimised("llama", "largest")
    assert model.torch_pi2.plan.layers[0].method == "custom"
    monkeypatch.delitem(registry.plugins._known, "cuts")
    with pytest.raises(ConfigError, match="found 'cuts'"):
        torch_pi2.Config(method="cuts")
    point = type("Point", (), {"name": "cuts", "load": lambda self: Cuts})()
    monkeypatch.setattr(plugins, "entry_points", lambda group, name: [point] if name == "cuts" else [])
    assert torch_pi2.Config(method="cuts").method == "custom"


def test_a_file_with_an_unknown_method_says_how_to_load_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_pi2.save(optimised("llama", Largest()), tmp_path)
    monkeypatch.delitem(registry.plugins._known, "largest")
    with pytest.raises(ConfigError, match=r"found 'largest'.*import the module that registers it"):
        torch_pi2.load(tmp_path)


class Wrong(Largest):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def select(self, x_TH: torch.Tensor) -> Any:
        return self._result(super().select(x_TH))


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda mask: mask.float(), DtypeError, "expected a bool tensor, found torch.float32"),
        (lambda mask: mask[:, :-1], ShapeError, "tokens and neurons in the model's order"),
        (lambda mask: None, DtypeError, "found NoneType"),
    ],
)
def test_what_select_must_not_return_is_said_while_fitting(result: Any, error: type[Pi2Error], words: str) -> None:
    with pytest.raises(error, match=words):
        optimised("llama", Wrong(result))


def test_settings_that_cannot_be_saved_are_refused_while_fitting() -> None:
    method = Largest()
    method.labels = {"x": object()}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="labels of method Largest: expected what JSON can hold"):
        optimised("llama", method)


class WrongCuts(Cuts):
    def __init__(self, cut: float, size: int | None = None) -> None:
        self.cut, self.size = cut, size

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        self.cut_I = torch.full((self.size or layer.site.intermediate,), self.cut)


@pytest.mark.parametrize(("wrong", "error"), [((0.1, 3), ShapeError), ((float("nan"),), ConfigError)])
def test_cuts_must_be_numbers_for_every_neuron(wrong: Any, error: type[Pi2Error]) -> None:
    with pytest.raises(error, match=r"WrongCuts.cut_I: expected"):
        optimised("llama", WrongCuts(*wrong))


def test_uses_without_python_are_refused_by_name(tmp_path: Path) -> None:
    model = optimised("llama", Largest())
    torch_pi2.save(model, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"export: expected methods that kernels know, found a SparseMethod"):
        torch_pi2.export(model, tmp_path / "bundle", max_tokens=32)
    with pytest.raises(ConfigError, match=r"pack\(ranks=2\): expected methods that kernels know"):
        torch_pi2.pack(tmp_path / "saved", tmp_path / "shards", ranks=2)


def test_names_are_checked_when_they_are_registered() -> None:
    for bad in (int, type("Bad", (torch_pi2.SparseMethod,), {}), type("Bad", (Cuts,), {"name": "exact"})):
        with pytest.raises(ConfigError):
            torch_pi2.register_method(bad)  # type: ignore[type-var]
    unnamed = type("Unnamed", (Largest,), {})
    with pytest.raises(ConfigError, match="saving method Unnamed"):
        optimised("llama", unnamed()).torch_pi2.predictors["model.layers.0.mlp"].fields()


@torch.no_grad()
def test_compiled_models_ask_the_method() -> None:
    model = optimised("llama", Recorded(), weights="int4")
    wanted = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="torch_pi2")
    torch.testing.assert_close(logits(compiled), wanted, atol=1e-4, rtol=1e-4)


def test_experts_have_methods_of_their_own() -> None:
    dense = tiny_mixture()
    stats = torch_pi2.profile(dense, IDS, **HOW)
    methods = torch_pi2.fit(dense, IDS, stats=stats, method=Largest(0.3), **HOW)
    assert len(methods) == sum(site.experts is not None for site in torch_pi2.find_sites(dense))
    with torch.no_grad(), torch_pi2.trying(dense, methods):
        wanted = dense(IDS[:2]).logits
    assert (wanted - logits(dense)).abs().max() > 1e-3
    model = torch_pi2.optimize(tiny_mixture(), stats=stats, predictors=methods, method=Largest(0.3), **HOW)
    torch.testing.assert_close(logits(model), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="a method with select: an expert has one threshold"):
        torch_pi2.optimize(tiny_mixture(), IDS, method=Cuts(), **HOW)


@pytest.mark.parametrize("weights", ["float", "int4"])
@pytest.mark.parametrize("mixture", [False, True])
def test_over_a_store_the_choice_decides_what_is_read(mixture: bool, weights: str, tmp_path: Path) -> None:
    read = {}
    for share in (0.1, 0.5):
        method = Largest(share)
        dense = tiny_mixture() if mixture else tiny("llama")
        model = torch_pi2.optimize(dense, IDS, method=method, weights=weights, **HOW)
        folder = tmp_path / str(share)
        torch_pi2.save(model, folder / "saved")
        torch_pi2.pack(folder / "saved", folder / "store")
        reads = torch_pi2.OffloadConfig(policy="none", preload=False, gap_bytes=0)
        over = torch_pi2.load(folder / "store", budget="1GiB", offload=reads)
        torch_pi2.stats(over, reset=True)
        assert torch.equal(logits(over), logits(model))
        read[share] = torch_pi2.stats(over)["wanted"]
    assert 0 < read[0.1] < 0.8 * read[0.5]


@torch_pi2.register_method
class Biased(Largest):
    """What it skips is replaced by a vector that can be seen."""

    name = "biased"

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        super().fit(layer)
        self.bias_H = 0.1 * torch.arange(layer.site.hidden)


@torch_pi2.register_method
class BiasedCuts(Cuts):
    name = "biased-cuts"

    def fit(self, layer: torch_pi2.LayerSamples) -> None:
        super().fit(layer)
        self.bias_H = 0.1 * torch.arange(layer.site.hidden)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float", "int4"])
@pytest.mark.parametrize("kind", [Biased, BiasedCuts])
def test_what_is_skipped_may_become_a_bias(name: str, kind: Any, weights: str, tmp_path: Path) -> None:
    model = optimised(name, kind(), weights=weights)
    found = logits(model)
    methods = model.torch_pi2.predictors
    if weights == "float":  # what trying gives, and a bias of down by hand
        dense = tiny(name)
        with torch_pi2.trying(dense, methods):
            torch.testing.assert_close(dense(IDS[:2]).logits, found, atol=1e-4, rtol=1e-4)
        unbiased = copy.deepcopy(methods)
        for site in torch_pi2.find_sites(dense):
            down = dense.get_submodule(site.down.weight.rpartition(".")[0])
            down.register_forward_hook(lambda _, args, y, bias_H=methods[site.key].bias_H: y + bias_H)
            unbiased[site.key].bias_H = None
        with torch_pi2.trying(dense, unbiased):
            torch.testing.assert_close(dense(IDS[:2]).logits, found, atol=1e-4, rtol=1e-4)
    prompt = model(IDS[:2]).logits
    if kind is Biased:  # a prompt skips nothing
        plain = model if weights == "int4" else tiny(name)
        for layer in sparse_layers(model):
            layer.bias_skipped = None
        torch.testing.assert_close(prompt, plain(IDS[:2]).logits, atol=1e-4, rtol=1e-4)
        assert (logits(model) - found).abs().max() > 1e-2
        model = optimised(name, kind(), weights=weights)
    torch_pi2.save(model, tmp_path / "saved")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "saved")), found)
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "store", budget="1GiB")), found)
    with pytest.raises(ConfigError, match=r"expected (no bias_H|methods that kernels know)"):
        torch_pi2.export(model, tmp_path / "bundle", max_tokens=32)


def test_a_bias_that_cannot_be_added_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a method without it: experts have no such bias"):
        torch_pi2.optimize(tiny_mixture(), IDS, method=Biased(), **HOW)
    with pytest.raises(ConfigError, match="scope of PromptBias with bias_H: expected token"):
        optimised("llama", type("PromptBias", (Biased, ByPrompt), {"scope": "prompt"})())

    class Short(Biased):
        def fit(self, layer: torch_pi2.LayerSamples) -> None:
            super().fit(layer)
            self.bias_H = torch.ones(3)

    with pytest.raises(ShapeError, match=r"Short\.bias_H: expected finite numbers \(\d+,\), found \(3,\)"):
        optimised("llama", Short())

    class Broken(Biased):
        def fit(self, layer: torch_pi2.LayerSamples) -> None:
            super().fit(layer)
            self.bias_H[1] = torch.nan

    with pytest.raises(ShapeError, match=r"Broken\.bias_H: expected finite numbers \(\d+,\), found NaN or infinity"):
        optimised("llama", Broken())


@torch_pi2.register_method
class Scaled(Largest):
    """Changes the model first, without changing what it computes."""

    name = "scaled"

    def prepare(self, model: Any) -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight *= 4
                layer.mlp.down_proj.weight /= 4


def test_a_method_may_change_the_dense_model_first() -> None:
    model = optimised("llama", {"*.0.mlp": Scaled(), "*": Largest()})
    assert torch.equal(logits(model), logits(optimised("llama", Largest())))  # powers of two
    up = model.model.layers[1].mlp.down_proj.sparse_ffn.dense_values()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(up, 4 * tiny("llama").model.layers[1].mlp.up_proj.weight)


def test_prepare_may_not_return_another_model() -> None:
    other = type("Other", (Largest,), {"prepare": lambda self, model: copy.deepcopy(model)})
    with pytest.raises(ConfigError, match=r"Other\.prepare: expected None: .* found a LlamaForCausalLM"):
        optimised("llama", other())


@torch_pi2.register_method
class ByPrompt(torch_pi2.SparseMethod):
    """As GRIFFIN (arXiv 2404.01365): the norms of each token's products, of length one."""

    name = "by-prompt"
    scope = "prompt"
    recordable = True

    def __init__(self, share: float = 0.4) -> None:
        self.share = share

    def prompt_scores(self, x_TH: torch.Tensor, h_TI: torch.Tensor) -> torch.Tensor:
        assert len(x_TH) == len(h_TI)
        return (h_TI / h_TI.norm(dim=1, keepdim=True)).square().sum(0)

    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        mask_I = torch.zeros(len(score_I), dtype=torch.bool)
        mask_I[score_I.topk(int(self.share * len(score_I))).indices] = True
        return mask_I


def by_hand(model: Any, ids: torch.Tensor, tokens: int, fed: int = 0) -> list[int]:
    """Greedy tokens of one sequence with masks of the prompt's choice, by hooks on the dense ``model``. ``fed``: last
    tokens of the prompt that follow the choice.
    """
    method, prompt = ByPrompt(), ids.shape[1] - fed

    def choose(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        h_TI = args[0][0]
        chosen_I = method.choose(method.prompt_scores(h_TI[:prompt], h_TI[:prompt]))
        return (torch.cat((h_TI[:prompt], h_TI[prompt:] * chosen_I))[None],)

    hooks = [y.mlp.down_proj.register_forward_pre_hook(choose) for y in model.model.layers]
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    for hook in hooks:
        hook.remove()
    return ids[0, prompt + fed :].tolist()


def test_a_prompt_chooses_for_its_own_sequence() -> None:
    prompts = [IDS[i : i + 1, : 7 + 2 * i] for i in range(3)]
    model = optimised("llama", ByPrompt())
    for prompt in prompts:
        made, plain = (torch_pi2.generate(m, prompt, max_new_tokens=30).sequences[0] for m in (model, tiny("llama")))
        assert made == by_hand(tiny("llama"), prompt, 30)[: len(made)]  # it ends with the token that says so
        assert made != plain
    wanted = [by_hand(tiny("llama"), prompt, 30, fed=1) for prompt in prompts]
    for how in ({}, {"recorded": False}, {"chunk_tokens": 4}):
        decoder = Decoder(model, max_tokens=64, batch=3, **how)
        for prompt in prompts:  # several lengths, one after another
            for _ in decoder.add(prompt):
                pass
        fed = torch.stack([prompt[0, -1:] for prompt in prompts])
        said = [decoder.step(fed)]
        for _ in range(29):
            said.append(decoder.step(said[-1]))
        assert torch.cat(said, 1).tolist() == wanted


def test_the_first_half_is_the_prompt_without_a_decoder() -> None:
    model, dense = optimised("llama", ByPrompt(1.0)), tiny("llama")
    torch.testing.assert_close(logits(model), logits(dense), atol=1e-4, rtol=1e-4)
    model = optimised("llama", ByPrompt(0.2))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS[:2]).logits, logits(dense), atol=1e-4, rtol=1e-4)
    got, half = logits(model), IDS.shape[1] // 2
    torch.testing.assert_close(got[:, :half], logits(dense)[:, :half], atol=1e-4, rtol=1e-4)
    assert (got - logits(dense))[:, half:].abs().max() > 1e-2


def test_what_a_choice_by_prompt_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scope 'token': a sequence's tokens go to different experts"):
        torch_pi2.optimize(tiny_mixture(), IDS, method=ByPrompt(), **HOW)
    with pytest.raises(ConfigError, match=r"trying, method of .*: expected scope 'token'"):
        torch_pi2.trying(tiny("llama"), ByPrompt())
    torch_pi2.save(optimised("llama", ByPrompt()), tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    with pytest.raises(ConfigError, match=r"over a store: expected scope 'token'"):
        torch_pi2.load(tmp_path / "store", budget="1GiB")


@torch_pi2.register_method
class Magnitude(torch_pi2.InputMethod):
    """TEAL (arXiv 2408.14690)."""

    name = "magnitude"
    recordable = True

    def __init__(self, share: float = 0.5, by_norm: bool = False) -> None:
        self.share, self.by_norm = share, by_norm

    def fit(self, linear: torch_pi2.LinearSamples) -> None:
        if self.by_norm:
            self.scale_K = linear.weight_NK.norm(dim=0)
        scale_K = 1 if self.scale_K is None else self.scale_K
        self.threshold = float((linear.x_TK.abs() * scale_K).flatten().quantile(1 - self.share))


@torch.no_grad()
@pytest.mark.parametrize("by_norm", [False, True])
def test_linear_layers_use_the_channels_of_an_input_method(by_norm: bool) -> None:
    dense, model = wider(), torch_pi2.optimize(wider(), IDS, method=Magnitude(0.4, by_norm), **HOW)
    layers = {name: m for name, m in model.named_modules() if getattr(m, "is_input_sparse", False)}
    assert len(layers) == 7 * len(dense.model.layers)
    torch.testing.assert_close(model(IDS[:2]).logits, dense(IDS[:2]).logits, atol=1e-4, rtol=1e-4)  # a prompt

    def masked(name: str, x: torch.Tensor) -> torch.Tensor:
        method = layers[name].custom
        return x * (x.abs() * (1 if method.scale_K is None else method.scale_K) > method.threshold)

    for name in layers:
        dense.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: masked(name, args[0]))
    torch.testing.assert_close(logits(model), logits(dense), atol=1e-4, rtol=1e-4)
    share = sum(m.used for m in layers.values()) / sum(m.seen for m in layers.values())
    assert 0.3 < share < 0.5
    made = torch_pi2.generate(model, IDS[:1, :5], max_new_tokens=30).sequences
    assert decoded(Decoder(model, max_tokens=64, batch=3, recorded=False))[0, : len(made[0])].tolist() == made[0]


def test_an_input_method_says_what_it_cannot() -> None:
    model = torch_pi2.optimize(wider(), IDS, method=Magnitude(), weights="int4", **HOW)
    assert logits(model).isfinite().all()
    with pytest.raises(ConfigError, match="expected a dense model, found sparse layers"):
        torch_pi2.optimize(model, IDS, method=Magnitude(), **HOW)


def test_layers_can_have_methods_of_their_own() -> None:
    patterns = {"*.layers.0.*": Largest(0.2), "*.layers.1.*": "cuts"}
    model = optimised("llama", patterns)
    methods = [layer.method for layer in model.torch_pi2.plan.layers]
    assert methods[:2] == ["custom", "threshold"]
    assert set(methods[2:]) <= {"dense"}
    described = model.torch_pi2.plan.made_by["config"]["custom"]
    assert [one["name"] for one in described.values()] == ["largest", "cuts"]
    with pytest.raises(ConfigError, match=r"Config\.method: expected the name of a method"):
        torch_pi2.Config(method={"*": 5})


FILE = """
import torch_pi2

@torch_pi2.register_method
class Every(torch_pi2.SparseMethod):
    name = "every-third"

    def select(self, x_TH):
        mask_TI = x_TH.new_zeros((len(x_TH), self.neurons), dtype=bool)
        mask_TI[:, ::3] = True
        return mask_TI

    def fit(self, layer):
        self.neurons = layer.site.intermediate
"""


@pytest.mark.slow
def test_the_command_line_takes_a_method_from_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    model = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    quick = ["--tokens", "2000", "--trust-remote-code", "-q"]
    what = ["optimize", str(model), "--method", f"{tmp_path / 'mine.py'}:Every", "--out", str(tmp_path / "out")]
    assert main([*what, *quick, "--no-verdict"]) == 0, capfd.readouterr().err
    registry.plugins._known.pop("every-third")
    shown = ["inspect", str(tmp_path / "out")]
    assert main(shown) == 2
    assert "import the module that registers it" in capfd.readouterr().err
    assert main([*shown, "--import", str(tmp_path / "mine.py")]) == 0
    assert "custom (every-third)" in capfd.readouterr().out


def test_more_hot_neurons_for_larger_batches_are_computed_beside_the_choice() -> None:
    model, half = optimised("llama", Largest(0.2)), tiny("llama").config.intermediate_size // 2
    alone = logits(model, IDS[:1, :1])
    for layer in sparse_layers(model):
        layer.by_batch = ((1, 0), (4, half))
    assert torch.equal(logits(model, IDS[:1, :1]), alone)
    several = logits(model, IDS[:3, :1])
    for layer in sparse_layers(model):
        chosen, hot_I = layer.custom.select, torch.zeros(2 * half, dtype=torch.bool)
        hot_I[layer.order[:half]] = True
        layer.custom.select = lambda x_TH, chosen=chosen, hot_I=hot_I: chosen(x_TH) | hot_I
        layer.by_batch = ()
    torch.testing.assert_close(logits(model, IDS[:3, :1]), several, atol=1e-5, rtol=1e-5)


def test_a_folder_cannot_name_a_file_to_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    entry = {"name": f"{tmp_path / 'evil.py'}:Largest", "settings": {}, "tensors": []}
    with pytest.raises(ConfigError, match="expected auto, dense"):
        torch_pi2.SparseMethod.read({}, Field(entry, "predictors", ""), 0.5, None)
    for wrong in ({"settings": {"select": 1}}, {"settings": {"scope": "x"}}, {"tensors": ["gone"]}):
        entry = {"name": "largest", "settings": {}, "tensors": []} | wrong
        with pytest.raises(ArtifactError):
            torch_pi2.SparseMethod.read({}, Field(entry, "predictors", ""), 0.5, None)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_each_sequence_of_a_batch_has_its_own_choice(name: str) -> None:
    """Also where the layer's input is [sequences x tokens, H]."""
    model = optimised(name, ByPrompt())
    decoder = Decoder(model, max_tokens=64, batch=3, logits=True)
    decoder.prompt(IDS[:3, :12])
    together = decoder.step(IDS[:3, 12:13])
    for row in range(3):
        decoder = Decoder(model, max_tokens=64, logits=True)
        decoder.prompt(IDS[row : row + 1, :12])
        alone = decoder.step(IDS[row : row + 1, 12:13])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-4)
    several = nats_per_token(model, [IDS[:3]])
    mean = sum(nats_per_token(model, [IDS[row : row + 1]]) for row in range(3)) / 3
    assert several == pytest.approx(mean, rel=1e-4)


class Nothing(ByPrompt):
    def choose(self, score_I: torch.Tensor) -> torch.Tensor:
        return score_I < 0


def test_a_prompt_may_choose_nothing() -> None:
    decoder = Decoder(optimised("llama", Nothing()), max_tokens=64, logits=True)
    decoder.prompt(IDS[:1, :12])
    dense = tiny("llama")
    for layer in dense.model.layers:
        layer.mlp.register_forward_hook(lambda _, args, y: torch.cat((y[:, :12], 0 * y[:, 12:]), 1))
    with torch.no_grad():
        wanted = dense(IDS[:1, :13]).logits[:, -1]
    torch.testing.assert_close(decoder.step(IDS[:1, 12:13]), wanted, atol=1e-4, rtol=1e-4)


class Nested(Recorded):
    """Its choice depends on a number inside of an attribute."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        self._held = holder

    def select(self, x_TH: torch.Tensor) -> torch.Tensor:
        found_TI = super().select(x_TH)
        return found_TI if self.inner()[0] > 0 else ~found_TI

    def inner(self) -> Any:
        return self._held["a"][0] if isinstance(self._held, dict) else self._held


@pytest.mark.parametrize("holder", [{"a": [[1.0]]}, deque([1.0])])
def test_a_change_anywhere_in_a_recordable_method_is_seen(holder: Any) -> None:
    logits_of = []
    for recorded in (None, False):
        model = optimised("llama", Nested(copy.deepcopy(holder)), weights="int4")
        decoder = Decoder(model, max_tokens=128, logits=True, recorded=recorded)
        decoder.prompt(IDS[:1, :5])
        for _ in range(20):
            before = decoder.step(IDS[:1, :1])
        for layer in sparse_layers(model):
            layer.custom.inner()[0] = -1.0
        logits_of.append(decoder.step(IDS[:1, :1]))
    assert torch.equal(*logits_of)
    assert (logits_of[0] - before).abs().max() > 1e-3


@torch.no_grad()
def test_a_threshold_of_inputs_that_changes_is_seen() -> None:
    logits_of = []
    for recorded in (None, False):
        model = torch_pi2.optimize(wider(), IDS, method=Magnitude(0.5), **HOW)
        decoder = Decoder(model, max_tokens=128, logits=True, recorded=recorded)
        decoder.prompt(IDS[:1, :5])
        for _ in range(20):
            before = decoder.step(IDS[:1, :1])
        for layer in model.modules():
            if getattr(layer, "is_input_sparse", False):
                layer.custom.threshold *= 3
        logits_of.append(decoder.step(IDS[:1, :1]))
    assert torch.equal(*logits_of)
    assert (logits_of[0] - before).abs().max() > 1e-3


def test_methods_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a layer's name, such as model\.layers\.0\.mlp"):
        optimised("llama", {"*nothing*": Largest()})
    with pytest.raises(ConfigError, match="found scope 'promt' of Misspelt"):
        optimised("llama", type("Misspelt", (Largest,), {"scope": "promt"})())
    hiding = Largest()
    hiding.tensors = {}  # type: ignore[assignment, method-assign]
    with pytest.raises(ConfigError, match="found the attribute tensors, a name of the class's own"):
        optimised("llama", hiding)
    model = torch_pi2.optimize(wider(), IDS, method=Magnitude(), **HOW)
    for use in (torch_pi2.restore, lambda m: m.state_dict(), lambda m: m.save_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match="sparse inputs"):
            use(model)


def test_a_file_whose_class_is_not_registered_is_refused_before_the_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing could open what is written; and a class that needs arguments says which."""
    (tmp_path / "mine.py").write_text(FILE.replace("@torch_pi2.register_method", ""))
    (tmp_path / "needy.py").write_text(FILE + "\n    def __init__(self, share, *, depth, seed=0): ...\n")
    golden = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
    model = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    for made_of, name, message in (
        (golden, "mine.py", "saving method Every: expected a registered class"),
        (model, "mine.py", "saving method Every: expected a registered class"),
        (model, "needy.py", "made without arguments, found one that needs share, depth. Give them defaults"),
    ):
        what = ["optimize", str(made_of), "--method", f"{tmp_path / name}:Every", "--out", str(tmp_path / "out")]
        assert main([*what, "--no-verdict", "--trust-remote-code", "-q"]) == 2
        assert message in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
    for name, message in (
        ("gone.py:Every", "expected a file .*gone.py, found none of that name"),
        ("mine.py:Gone", "expected a class that derives from SparseMethod or InputMethod, found None"),
    ):
        with pytest.raises(ConfigError, match=message):
            torch_pi2.Config(method=str(tmp_path / name))
    found = optimised("llama", f"{tmp_path / 'mine.py'}:Every")
    with pytest.raises(ConfigError, match="saving method Every"):
        torch_pi2.save(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()
