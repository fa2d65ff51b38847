"""The torch.compile backend: the same rewrite on Dynamo's graph, Inductor for the rest."""

from __future__ import annotations

import copy
import importlib.metadata
import warnings

import pytest
import torch
import torch.nn.functional as F
from rewriting import close, count_op_calls, make_plan, predictor
from tiny_experts import build
from tiny_models import HIDDEN, INTERMEDIATE, VOCAB, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import torch_pi2.compile as compile_module
from torch_pi2.base import progress as warn
from torch_pi2.rewrite import fx_pass
from torch_pi2.rewrite.rewrite import restore, rewrite
from torch_pi2.types.plan import weights_hash

X_BTH = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    warn._said.clear()


@pytest.fixture
def captured_alone(monkeypatch):
    """Graphs run as they are: for what is not about Inductor's code."""
    monkeypatch.setattr(compile_module, "_inductor", lambda gm, inputs, mode: aot_eager(gm, inputs))


def compiled(model, **options):
    return torch.compile(model, backend=compile_module.backend, options=options or None)


def relu_model():
    return plain(FunctionalBlock(), nn.LayerNorm(HIDDEN), FunctionalBlock())


@torch.no_grad()
def test_backend_is_found_by_name_and_equals_dense():
    """Through the entry point where the package is installed, else registered as the entry point says."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="torch_pi2")
    if not points:  # not installed in this environment: do what the entry point would
        torch._dynamo.register_backend(compile_module.backend, name="torch_pi2")
    assert torch._dynamo.lookup_backend("torch_pi2") is compile_module.backend
    model = relu_model()
    fast = torch.compile(model, backend="torch_pi2")
    assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 2


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_as_many_compilations_as_torch_itself_and_neurons_are_shared(monkeypatch):
    counts = {"eager": 0, "ours": 0, "neuron_rows": 0}

    def eager(gm, inputs):
        counts["eager"] += 1
        return gm.forward

    def ours(gm, inputs):
        counts["ours"] += 1
        return compile_module.backend(gm, inputs)

    class Counting(fx_pass.SparseFFN):
        def __init__(self, *args, **kwargs):
            counts["neuron_rows"] += 1
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(fx_pass, "SparseFFN", Counting)
    model = relu_model()
    for backend in (eager, ours):
        torch._dynamo.reset()
        fast = torch.compile(model, backend=backend)
        for length in (7, 1, 1, 9, 1):
            x = torch.randn(1, length, HIDDEN)
            assert close(fast(x), model(x))
    assert counts["ours"] == counts["eager"]
    assert counts["neuron_rows"] == 2


@torch.no_grad()
def test_changed_weights_are_seen():
    model = relu_model()
    fast = compiled(model)
    fast(X_BTH)
    model[0].banana.weight.mul_(2)
    model[2].cherry.bias.add_(1)
    assert close(fast(X_BTH), model(X_BTH))
    model[0].cherry.weight.data = torch.randn(HIDDEN, INTERMEDIATE)
    assert close(fast(X_BTH), model(X_BTH))
    for change in (lambda w: w.add_(0.5), lambda w: w.zero_()):  # PyTorch counts neither
        change(model[0].banana.weight.data)
        assert close(fast(X_BTH), model(X_BTH))


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_other_activations_need_a_plan():
    model = plain(GatedBlock())
    fast = compiled(model)
    with pytest.warns(UserWarning, match="layers with silu stay dense without a plan"):
        fast(X_BTH)
    assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 0


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_plan_and_predictors(tmp_path):
    model = plain(GatedBlock(), nn.LayerNorm(HIDDEN), FunctionalBlock())
    plan = make_plan(model, (X_BTH,), method="lowrank")
    predictors = {layer.site.key: predictor(seed=i) for i, layer in enumerate(plan.layers)}
    wanted = rewrite(copy.deepcopy(model), plan, predictors)(X_BTH)
    fast = compiled(model, plan=plan, predictors=predictors)
    assert close(fast(X_BTH), wanted)
    assert not close(wanted, model(X_BTH), 1e-3)

    for layer in plan.layers:
        layer.method, layer.threshold = "threshold", 0.4
    plan.save(tmp_path)
    torch._dynamo.reset()
    assert close(compiled(model, plan=str(tmp_path))(X_BTH), rewrite(copy.deepcopy(model), plan)(X_BTH))


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_models_of_a_gpu_are_compiled_from_copies_of_their_weights(monkeypatch):
    """On the CPU, which is taken for a GPU; nothing looks at numbers in each call there, counted changes are seen."""
    monkeypatch.setattr(fx_pass, "on_gpu", lambda _: True)
    monkeypatch.setattr(fx_pass, "_sample", lambda _: pytest.fail("a wait for the GPU"))
    model = plain(GatedBlock())
    plan = make_plan(model, (X_BTH,), method="lowrank")
    predictors = {layer.site.key: predictor(seed=i) for i, layer in enumerate(plan.layers)}
    fast = compiled(model, plan=plan, predictors=predictors)
    wanted = rewrite(copy.deepcopy(model), plan, predictors)(X_BTH)
    assert close(fast(X_BTH), wanted)
    for parameter in model.parameters():
        parameter.zero_()
    assert close(fast(X_BTH), model(X_BTH))
    assert not close(wanted, model(X_BTH), 1e-3)


@pytest.mark.usefixtures("captured_alone")
@pytest.mark.parametrize("up_first", [False, True])
@torch.no_grad()
def test_neurons_with_thresholds_of_their_own(up_first):
    model = plain(GatedBlock())
    plan = make_plan(model, (X_BTH,), method="threshold", hot=0.0, threshold=0.3)
    for layer in plan.layers:
        if up_first:
            layer.site = layer.site.swapped()
        layer.thresholds = torch.rand(layer.site.intermediate, generator=torch.Generator().manual_seed(0)) * 0.6
    plan.model_hash = weights_hash(model, [layer.site for layer in plan.layers])
    wanted = rewrite(copy.deepcopy(model), plan)(X_BTH)
    assert not close(model(X_BTH), wanted, 1e-3)  # they do drop something
    fast = compiled(model, plan=plan)
    assert close(fast(X_BTH), wanted)
    for layer in plan.layers:
        layer.thresholds = None
    assert not close(wanted, rewrite(copy.deepcopy(model), plan)(X_BTH), 1e-3)


@pytest.mark.slow
def test_graphs_it_cannot_use_go_to_inductor_with_one_warning():
    model = plain(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
    with pytest.warns(UserWarning, match="needs gradients"):
        compiled(model)(X_BTH).sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        norm = nn.LayerNorm(HIDDEN)
        with pytest.warns(UserWarning, match="without feed-forward layers"):
            assert close(compiled(norm)(X_BTH), norm(X_BTH))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            torch._dynamo.reset()
            compiled(norm)(X_BTH)
        broken = plain(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        broken[0].weight[0, 0] = float("nan")
        with pytest.warns(UserWarning, match="1 NaN or infinite"):
            compiled(broken)(X_BTH)
        tanh = plain(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        with pytest.warns(UserWarning, match=r"stays dense: another formula, of tanh"):
            assert close(compiled(tanh)(X_BTH), tanh(X_BTH))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("backend", ["inductor", compile_module.backend], ids=["inductor", "torch_pi2"])
def test_a_rewritten_model_compiles(backend):
    """Owner and lazy ways; nothing warns about missing FFNs, for they are there already."""
    model = plain(
        nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, HIDDEN)), nn.LayerNorm(HIDDEN), FunctionalBlock()
    )
    rewrite(model, make_plan(model, (X_BTH,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch_pi2")
        fast = torch.compile(model, backend=backend, fullgraph=True)
        assert close(fast(X_BTH), model(X_BTH))
        assert count_op_calls(lambda: fast(X_BTH)) >= 1


@torch.no_grad()
def test_matmul_spelling_in_place_and_functional_graphs():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (
                nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN)),
                nn.Parameter(torch.randn(HIDDEN, INTERMEDIATE)),
            )
            self.bias = nn.Parameter(torch.randn(INTERMEDIATE))

        def forward(self, x):
            h = x @ self.one.T + self.bias
            h.relu_()
            return x + F.linear(h, self.two)

    model = Raw()
    fast = compiled(model)
    assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": 5}, "plan of the torch_pi2 backend: expected a Plan, or a folder that has one, found 5"),
        ({"predictors": 5}, "predictors of the torch_pi2 backend: expected what torch_pi2.fit gives, found 5"),
        ({"nope": 1}, "expected only plan, predictors, before, after, found nope"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=f"ConfigError: .*{message}"):
        compiled(plain(nn.Linear(HIDDEN, HIDDEN)), **options)(X_BTH)


@pytest.mark.slow
@pytest.mark.usefixtures("captured_alone")
def test_plan_folder_brings_its_predictors(tmp_path) -> None:
    """options={"plan": "my-sparse-model/pi2"} uses the predictors that lie beside the plan."""
    import torch_pi2

    model = tiny("drelu")
    ids = torch.randint(0, VOCAB, (64, 32), generator=torch.Generator().manual_seed(5))
    config = torch_pi2.Config(method="lowrank", calibration_tokens=2000, seq_len=32)
    torch_pi2.save(torch_pi2.optimize(model, ids, config), tmp_path / "m")
    with torch.no_grad():
        wanted = model(ids[:2, :9]).logits
        torch_pi2.restore(model)
        compiled = torch.compile(model, backend=compile_module.backend, options={"plan": str(tmp_path / "m" / "pi2")})
        found = compiled(ids[:2, :9]).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        assert float((found - model(ids[:2, :9]).logits).abs().max()) > 1e-4 * float(wanted.abs().max())


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_an_ffn_fed_by_another_one():
    def pair():
        return nn.Linear(HIDDEN, INTERMEDIATE), nn.ReLU(), nn.Linear(INTERMEDIATE, HIDDEN)

    model = plain(*pair(), *pair(), *pair())
    fast = compiled(model)
    assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 3
    plan = make_plan(model, (X_BTH,), method="lowrank")
    predictors = {layer.site.key: predictor(seed=i) for i, layer in enumerate(plan.layers)}
    torch._dynamo.reset()
    fast = compiled(model, plan=plan, predictors=predictors)
    assert close(fast(X_BTH), rewrite(copy.deepcopy(model), plan, predictors)(X_BTH))


@pytest.mark.slow
@torch.no_grad()
def test_an_input_changed_through_a_view_stays_right():
    class Changing(FunctionalBlock):
        def forward(self, x):
            z = x + x
            x = z * 1.0
            view = x.view(-1, HIDDEN)
            h = self.banana(x)
            view.mul_(2)
            return z + self.cherry(F.relu(h))

    model = plain(Changing())
    assert close(compiled(model)(X_BTH), model(X_BTH))


@torch.no_grad()
def test_in_place_changes_elsewhere_in_the_graph_stay():
    class Changing(FunctionalBlock):
        def forward(self, x):
            y = x + 1.0
            y.mul_(3)
            y[:, 0] = 5.0
            y.view(-1).neg_()
            return y + self.cherry(F.relu(self.banana(x)))

    model = plain(Changing())
    fast = compiled(model)
    assert close(fast(X_BTH), model(X_BTH))
    assert count_op_calls(lambda: fast(X_BTH)) == 1


@torch.no_grad()
def test_reading_that_fails_raises_what_modules_raise(tmp_path, monkeypatch):
    import torch_pi2
    from torch_pi2.errors import ArtifactError

    torch_pi2.synthetic(tmp_path / "plain", "tiny", layers=1, active=0.2)
    torch_pi2.pack(tmp_path / "plain", tmp_path / "store")
    model = torch_pi2.load(tmp_path / "store", budget="1GiB", offload=torch_pi2.OffloadConfig(preload=False))
    store = torch_pi2.stats(model)["store"]
    layer = model.model.layers[0].mlp
    fast = torch.compile(layer, backend="torch_pi2", fullgraph=True)
    x = torch.randn(1, 1, store.layers()[0][1])
    whole = store.path.read_bytes()
    store.path.write_bytes(bytes(4096) + bytes(len(whole) - 4096))  # the same file, which is open
    with pytest.raises(ArtifactError, match=r"model\.pi2: expected .*, found layer 0, neuron \d+ .*checksum") as error:
        fast(x)
    assert isinstance(error.value.__cause__, RuntimeError)
    store.path.write_bytes(whole)
    assert torch.equal(fast(x), layer(x))
    store.close()
    with pytest.raises(ArtifactError, match=r"model\.pi2: .* found a store that has been closed"):
        fast(x)

    def fails(*_):
        raise RuntimeError("something else")

    torch._dynamo.reset()
    monkeypatch.setattr(compile_module, "_inductor", lambda *_: fails)
    with pytest.raises(RuntimeError, match="something else"):
        torch.compile(layer, backend="torch_pi2", fullgraph=True)(x)


@torch.no_grad()
def test_layers_that_are_code_of_a_bigger_block_are_said_to_be_dense(caplog: pytest.LogCaptureFixture) -> None:
    model = plain(FunctionalBlock())
    rewrite(model, make_plan(model, (X_BTH,)))
    warn._said.clear()
    found = torch.compile(model, backend="eager", fullgraph=True)(X_BTH)
    assert "computes feed-forward layers densely, and slowly, whose activation is code of" in caplog.text
    assert close(found, restore(model)(X_BTH))


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_neurons_go_with_the_model():
    import gc

    gc.collect()  # models of earlier tests
    before = len(fx_pass._packed)
    model = relu_model()
    compiled(model)(X_BTH)
    assert len(fx_pass._packed) == before + 2
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(fx_pass._packed) <= before


@torch.no_grad()
def test_wrong_options_and_stale_plans_are_errors():
    model = relu_model()
    with pytest.raises(Exception, match="only plan, predictors, before, after, found speed"):
        compiled(model, speed=11)(X_BTH)
    plan = make_plan(model, (X_BTH,))
    model[0].banana.weight.add_(1)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Make a new plan for this model"):
        compiled(model, plan=plan)(X_BTH)


# --- stacked experts ---


def mixtures(count: int, **settings) -> nn.Module:
    model = build("Mixtral", num_hidden_layers=count, **settings)
    return nn.Sequential(*(layer.mlp for layer in model.model.layers))


def agrees(fast, model, experts: int, tokens: int = 6) -> bool:
    """Whether both agree, and the compiled one computes this many modules of experts sparsely."""
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    return close(fast(x), model(x)) and count_op_calls(lambda: fast(x), "pi2::experts_ffn") == experts


@pytest.mark.usefixtures("captured_alone")
@pytest.mark.parametrize(
    ("code", "said"), [("grouped_mm", r"experts stays dense: stacked experts need"), ("eager", "is left to Inductor")]
)
@torch.no_grad()
def test_stacked_experts_stay_dense_with_a_warning(code: str, said: str) -> None:
    model = mixtures(2, experts_implementation=code)
    with pytest.warns(UserWarning, match=rf"{said} .*torch_pi2.optimize"):
        assert agrees(compiled(model), model, 0)


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_a_parameter_with_the_id_of_another_one_is_not_taken_for_it():
    import weakref

    model = relu_model()
    compiled(model)(X_BTH)
    shared = fx_pass._packed[model[0].cherry.weight]
    ((key, old),) = shared.items()
    assert old.is_of([model[0].banana.weight, model[0].banana.bias, model[0].cherry.weight, model[0].cherry.bias])
    old.parameters[0] = weakref.ref(nn.Parameter(torch.zeros(1)))  # gone, and its id given to banana.weight
    torch._dynamo.reset()
    assert close(compiled(model)(X_BTH), model(X_BTH))
    assert shared[key] is not old


@pytest.mark.usefixtures("captured_alone")
@torch.no_grad()
def test_passes_of_users_run_before_and_after_ours():
    """The one before turns tanh into relu, by which ours finds the layers; the one after scales what ours computed."""

    class Tanh(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    def to_relu(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.tanh):
            node.target = torch.relu

    def doubled(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.pi2.sparse_ffn.default):
            with gm.graph.inserting_after(node):
                twice = gm.graph.call_function(torch.mul, (node, 2))
            twice.meta = dict(node.meta)
            node.replace_all_uses_with(twice, lambda user, twice=twice: user is not twice)

    model = Tanh().eval()
    wanted = model.down(torch.relu(model.up(X_BTH)))
    fast = compiled(model, before=[to_relu])
    assert close(fast(X_BTH), wanted)
    assert count_op_calls(lambda: fast(X_BTH)) == 1
    assert count_op_calls(lambda: compiled(model)(X_BTH)) == 0
    torch._dynamo.reset()
    assert close(compiled(model, before=[to_relu], after=[doubled])(X_BTH), 2 * wanted)
    torch._dynamo.reset()
    for options, message in (
        ({"before": to_relu}, "before of the torch_pi2 backend: expected a list of functions"),
        ({"after": [lambda gm: gm]}, "after of the torch_pi2 backend: result of .*: expected None"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(model, **options)(X_BTH)
        torch._dynamo.reset()
