"""Rewriting eager models: every way, exact both ways, and a model that still looks dense from outside."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from rewriting import (
    MLP,
    X_BTH,
    Around,
    FusedBlock,
    assert_same_state,
    close,
    count_op_calls,
    make_plan,
    predictor,
    sequential,
)
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn

from torch_pi2.base.modules import has_sparse_layers
from torch_pi2.errors import (
    ConfigError,
    DtypeError,
    GradientError,
    NonFiniteError,
    ShapeError,
    StaleArtifactError,
)
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown, LazyFFN, LazySource
from torch_pi2.layers.of_model import replacement_of, replacements, sparse_layers
from torch_pi2.layers.sequence import FusedIdentity
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.rewrite.rewrite import restore, rewrite
from torch_pi2.types.plan import weights_hash


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(HIDDEN), *sequential(nn.GELU(), nn.Dropout()))

    def forward(self, x):
        return x + self.inner(x)


class InPlaceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.d = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x):
        h = self.u(x)
        h.relu_()
        h *= h
        return x + self.d(h.view(-1, h.size(-1))).view_as(x)


#: model, and what must compute in the place of its modules after a rewrite
MODELS = {
    "functional": (lambda: plain(FunctionalBlock(), FunctionalBlock()), {LazySource: 2, LazyDown: 2}),
    "gated": (lambda: plain(GatedBlock(), FunctionalBlock()), {LazySource: 3, LazyDown: 2}),
    "fused": (lambda: plain(FusedBlock()), {LazySource: 1, LazyDown: 1}),
    "in place": (lambda: plain(InPlaceBlock()), {LazySource: 1, LazyDown: 1}),
    "root sequential": (lambda: plain(*sequential(nn.ReLU())), {SparseFFN: 1, FusedIdentity: 2}),
    "owned sequential": (lambda: plain(nn.LayerNorm(HIDDEN), sequential(nn.GELU())), {SparseFFN: 1}),
    "pre-norm": (lambda: plain(PreNorm(), PreNorm()), {SparseFFN: 2, FusedIdentity: 6}),
    "encoder": (
        lambda: plain(nn.TransformerEncoderLayer(HIDDEN, 4, INTERMEDIATE, batch_first=True, activation="gelu")),
        {LazySource: 1, LazyDown: 1},
    ),
    "encoder stack": (
        lambda: plain(nn.TransformerEncoder(nn.TransformerEncoderLayer(HIDDEN, 4, INTERMEDIATE, batch_first=True), 2)),
        {LazySource: 2, LazyDown: 2},
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["dense", "exact"])
@torch.no_grad()
def test_rewrite_and_restore(name, method):
    build, expected = MODELS[name]
    model = build()
    wanted, state = model(X_BTH), {k: v.clone() for k, v in model.state_dict().items()}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    classes = {name: type(module) for name, module in modules.items()}
    assert rewrite(model, make_plan(model, (X_BTH,), method=method)) is model
    assert has_sparse_layers(model)
    assert Counter(type(part) for _, part in replacements(model)) == expected
    now = {name: module for name, module in model.named_modules() if "sparse_ffn" not in name}
    assert now == modules
    assert {name: type(module) for name, module in now.items()} == classes
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    calls = count_op_calls(lambda: model(X_BTH))
    assert calls == len(sparse_layers(model)), "the sparse operator must run, not a dense fallback"
    for x in (X_BTH, X_BTH[:1, :1], X_BTH.repeat(1, 3, 1)):
        restored_free = copy.deepcopy(model)
        assert close(model(x), restore(restored_free)(x))
    assert_same_state(model, state)
    assert restore(model) is model
    assert not has_sparse_layers(model)
    assert_same_state(model, state)
    assert torch.equal(model(X_BTH), wanted)
    assert all(a is b for a, b in zip(model.modules(), modules.values(), strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))


@torch.no_grad()
def test_lazy_falls_back_to_the_truth():
    """Whatever the block does with the tensor in between, the values are those of the dense layer."""
    model = plain(FunctionalBlock())
    block = model[0]
    fc1, fc2 = block.banana, block.cherry
    dense1, dense2 = copy.deepcopy(fc1), copy.deepcopy(fc2)
    rewrite(model, make_plan(model, (X_BTH,)))
    lazy = block.banana(X_BTH)
    assert isinstance(lazy, LazyFFN)
    assert lazy.shape == (2, 5, INTERMEDIATE)
    assert (lazy.dtype, lazy.device) == (torch.float32, torch.device("cpu"))
    h = dense1(X_BTH)
    assert close(lazy + 0.0 * h, h)
    assert close(lazy.sum(), h.sum())
    assert close(torch.cat([lazy, lazy]), torch.cat([h, h]))
    assert close(lazy[0].softmax(-1), h[0].softmax(-1))
    assert "LazyFFN" in repr(lazy)
    assert close(block.cherry(torch.tanh(block.banana(X_BTH))), dense2(torch.tanh(h)))  # another formula
    assert close(block.cherry(F.relu(block.banana(X_BTH)) + F.relu(block.banana(X_BTH.clone()))), dense2(2 * F.relu(h)))
    assert close(block.cherry(h), dense2(h))  # no lazy tensor at all
    assert close(block.cherry(F.relu(block.banana(X_BTH))), dense2(F.relu(h)))


@torch.no_grad()
def test_dense_memory_is_given_back():
    model = plain(*[FunctionalBlock() for _ in range(2)])
    parameters = [model[0].banana.weight, model[0].banana.bias, model[1].cherry.weight]
    rewrite(model, make_plan(model, (X_BTH,)))
    assert [p.untyped_storage().nbytes() for p in parameters] == [4, 4, 4]
    gc.collect()
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == 4 * 4 * HIDDEN  # the norms
    restore(model)
    sizes = [4 * HIDDEN * INTERMEDIATE, 4 * INTERMEDIATE, 4 * HIDDEN * INTERMEDIATE]
    assert [p.untyped_storage().nbytes() for p in parameters] == sizes


@torch.no_grad()
@pytest.mark.parametrize("name", ["functional", "fused", "owned sequential", "pre-norm"])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_dense_state_dict(name, assign):
    model = MODELS[name][0]()
    other = {k: torch.randn_like(v) * 0.3 for k, v in model.state_dict().items()}
    rewrite(model, make_plan(model, (X_BTH,)))
    assert str(model.load_state_dict(other, assign=assign)) == "<All keys matched successfully>"
    assert_same_state(model, other)
    dense = MODELS[name][0]()
    dense.load_state_dict(other)
    assert close(model(X_BTH), dense(X_BTH))
    assert_same_state(restore(model), other)


def test_loading_other_weights_under_a_predictor_warns(caplog):
    model = plain(FunctionalBlock())
    rewrite(model, make_plan(model, (X_BTH,), method="threshold", threshold=0.1))
    model.load_state_dict(model.state_dict())
    assert "optimise" not in caplog.text
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert "optimise the model again" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("name", ["functional", "gated", "pre-norm", "owned sequential"])
def test_deepcopy_and_pickle(name):
    model = MODELS[name][0]()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rewrite(model, make_plan(model, (X_BTH,)))
    model(X_BTH)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X_BTH), model(X_BTH))
        restore(twin)
        assert has_sparse_layers(model)
        assert_same_state(twin, state)


@torch.no_grad()
def test_dtype_changes_follow():
    model = plain(FunctionalBlock(), nn.LayerNorm(HIDDEN), sequential(nn.ReLU()))
    dense = copy.deepcopy(model).to(torch.bfloat16)
    plan = make_plan(model, (X_BTH,), method="lowrank")
    rewrite(model, plan, {layer.site.key: predictor() for layer in plan.layers})
    model.to(torch.bfloat16)
    layer = sparse_layers(model)[0]
    assert (layer.neuron_rows.dtype, layer.predictor_a.dtype) == (torch.bfloat16, torch.int8)
    assert layer.predictor_a_scale.dtype == layer.predictor_bias.dtype == torch.float32
    assert model(X_BTH.bfloat16()).dtype == torch.bfloat16
    assert_same_state(restore(model), dense.state_dict())


@pytest.mark.parametrize("make", [lambda: MLP(), lambda: sequential(nn.ReLU())], ids=["owner", "chain"])
@torch.no_grad()
def test_dtypes_that_no_kernel_has_are_refused(make) -> None:
    model = plain(make())
    rewrite(model, make_plan(model, (X_BTH,)))
    wanted = model(X_BTH)
    with pytest.raises(DtypeError, match=r"input of .*: expected float32, bfloat16 or float16, found float64"):
        model(X_BTH.double())
    with pytest.raises(DtypeError, match=r"weights of .*: expected float32, bfloat16 or float16, found float64"):
        sparse_layers(model.double())[0](X_BTH)
    assert torch.equal(model.float()(X_BTH), wanted)


@torch.no_grad()
def test_shared_ffn_and_partly_shared_weights():
    shared = sequential(nn.ReLU())
    model = plain(shared, nn.LayerNorm(HIDDEN), shared)
    wanted = model(X_BTH)
    rewrite(model, make_plan(model, (X_BTH,)))
    assert model[0] is model[2]
    assert close(model(X_BTH), wanted)
    restore(model)
    assert model[0] is model[2] is shared
    assert torch.equal(model(X_BTH), wanted)


@torch.no_grad()
def test_partly_shared_weights_keep_their_memory():
    class Tied(nn.Sequential):
        def forward(self, x):
            return F.linear(super().forward(x), self.tied.T)

    one, two = sequential(nn.ReLU()), sequential(nn.ReLU())
    two[0] = one[0]
    model = plain(one, two)
    model = Tied(*model)
    model.tied = one[2].weight  # used by something that is not rewritten
    wanted, state = model(X_BTH), {k: v.clone() for k, v in model.state_dict().items()}
    rewrite(model, make_plan(model, (X_BTH,)))
    assert model.tied.numel() == one[0].weight.numel() == HIDDEN * INTERMEDIATE
    assert close(model(X_BTH), wanted)
    assert_same_state(model, state)
    assert_same_state(restore(model), state)
    assert model[1][0] is model[0][0]
    assert model.tied is model[0][2].weight


@torch.no_grad()
def test_lowrank_computes_what_the_reference_says():
    from torch_pi2.ops import predictors as reference

    model = plain(nn.LayerNorm(HIDDEN), sequential(nn.ReLU()))
    plan = make_plan(model, (X_BTH,), method="lowrank")
    layer, tensors = plan.layers[0], predictor()
    weights = layer.site.weights(model)
    ffn = SparseFFN(layer.site, weights, layer, tensors, threshold=0.3)
    active = reference.predict_lowrank(X_BTH, *(tensors[name] for name in LowRank.tensor_names), 0.3)
    keep = active.clone()
    keep[..., layer.order[: layer.n_hot].long()] = True
    h = F.relu(F.linear(X_BTH, weights.up, weights.bias_up)) * keep
    assert 0 < int(active.sum()) < active.numel()
    assert close(ffn(X_BTH), F.linear(h, weights.down, weights.bias_down))
    assert close(ffn._compute(X_BTH, ffn.site.intermediate, 0.0), model[1](X_BTH))


@torch.no_grad()
def test_threshold_skips_small_gates():
    model = plain(nn.LayerNorm(HIDDEN), sequential(nn.SiLU()))
    plan = make_plan(model, (X_BTH,), method="threshold", hot=0.0, threshold=0.5)
    weights = plan.layers[0].site.weights(model)
    h = F.silu(F.linear(X_BTH, weights.up, weights.bias_up))
    wanted = F.linear(h * (h.abs() > 0.5), weights.down, weights.bias_down)
    ffn = SparseFFN(plan.layers[0].site, weights, plan.layers[0])
    assert close(ffn(X_BTH), wanted)
    assert not close(ffn(X_BTH), model[1](X_BTH), 1e-3)


def test_gradients_are_refused_and_shapes_checked():
    model = plain(nn.LayerNorm(HIDDEN), sequential(nn.ReLU()))
    rewrite(model, make_plan(model, (X_BTH,)))
    with pytest.raises(GradientError, match="an input that requires grad"):
        model(X_BTH)
    model.requires_grad_(False)
    model(X_BTH)
    model.train()
    with pytest.raises(GradientError, match="a model in training mode"):
        model(X_BTH)
    with torch.no_grad(), pytest.raises(ShapeError, match=rf"expected {HIDDEN}, found {HIDDEN + 1}"):
        model[1](torch.randn(2, HIDDEN + 1))


def test_bad_plans_and_weights_leave_the_model_dense():
    model = plain(FunctionalBlock(), nn.LayerNorm(HIDDEN), sequential(nn.ReLU()))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    plan = make_plan(model, (X_BTH,), method="lowrank")
    with pytest.raises(ConfigError, match="Fit predictors"):
        rewrite(model, plan)
    with pytest.raises(ShapeError, match="predictor b of 2"):
        rewrite(model, plan, {"0": predictor(), "2": predictor(intermediate=INTERMEDIATE + 1)})
    plan.layers[1].n_hot = INTERMEDIATE + 1
    with pytest.raises(ConfigError, match="plan of 2"):
        rewrite(model, plan, {layer.site.key: predictor() for layer in plan.layers})
    plan.layers[1].n_hot = 0
    for number in (int(plan.layers[0].order[2]), -1, INTERMEDIATE):  # twice, and none of the layer
        wrong = copy.deepcopy(plan)
        wrong.layers[0].order[3] = number
        with pytest.raises(ConfigError, match=f"plan of 0: expected an order of {INTERMEDIATE} different neurons"):
            rewrite(model, wrong, {layer.site.key: predictor() for layer in plan.layers})
    plan.layers[0].method = "magic"
    with pytest.raises(ConfigError, match="'magic'"):
        rewrite(model, plan)
    assert not has_sparse_layers(model)
    assert_same_state(model, state)

    plan = make_plan(model, (X_BTH,))
    with torch.no_grad():
        model[2][0].weight[0, 0] += 1
    with pytest.raises(StaleArtifactError, match="FFN weights"):
        rewrite(model, plan)
    with pytest.raises(StaleArtifactError, match=r"without one"):
        rewrite(plain(FunctionalBlock()), plan)
    with torch.no_grad():
        model[2][0].weight[0, 0] = float("nan")
    plan.model_hash = weights_hash(model, [layer.site for layer in plan.layers])
    with pytest.raises(NonFiniteError, match="1 NaN or infinite"):
        rewrite(model, plan)
    assert not has_sparse_layers(model)


def test_sparse_layers_are_listed():
    model = tiny("llama-relu")
    assert sparse_layers(model) == []
    plan = make_plan(model)
    rewrite(model, plan)
    assert [layer.site for layer in sparse_layers(model)] == [layer.site for layer in plan.layers]
    assert "relu(gate) * up, exact, 12 hot" in repr(model)


class Middle(nn.Module):
    """A lazily rewritten block with something done in ``between`` its linears: ``h = between(h, y)``."""

    def __init__(self, between):
        super().__init__()
        self.n, self.up, self.down = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, INTERMEDIATE),
            nn.Linear(INTERMEDIATE, HIDDEN),
        )
        self.between = lambda h, y: F.relu(h)
        self.later = between

    def forward(self, x):
        y = self.n(x)
        return x + self.down(self.between(self.up(y), y))


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_owners_that_hold_more_are_not_replaced(kind):
    """An adapter that starts at zero computes nothing yet; it must work once it is loaded."""

    class Adapted(MLP):
        def __init__(self):
            super().__init__()
            self.adapter = kind(torch.zeros(HIDDEN))

        def forward(self, x):
            return super().forward(x) + self.adapter * x

    model = Around(Adapted()).eval()
    rewrite(model, make_plan(model, (X_BTH,)))
    assert replacement_of(model.mlp) is None
    state = {k: v.clone() for k, v in model.state_dict().items()} | {"mlp.adapter": torch.ones(HIDDEN)}
    model.load_state_dict(state)
    dense = Around(Adapted()).eval()
    dense.load_state_dict(state)
    assert close(model(X_BTH), dense(X_BTH))


@torch.no_grad()
def test_chains_that_hold_more_are_not_replaced():
    class Scaled(nn.ReLU):
        on = False

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return super().forward(x) * self.scale if self.on else super().forward(x)

    model = plain(*sequential(Scaled()))
    rewrite(model, make_plan(model, (X_BTH,)))
    assert replacement_of(model[1]) is None
    model[1].on, model[1].scale[0] = True, 2.0
    found = model(X_BTH)
    assert close(found, restore(model)(X_BTH))


@torch.no_grad()
def test_owners_that_take_out_tokens_or_batch_rows_are_not_replaced():
    class Cutting(MLP):
        def __init__(self, cut):
            super().__init__()
            self.cut = cut

        def forward(self, x):
            return self.cut(super().forward(x))

    for cut in (lambda y: y[:2], lambda y: y[:, :6]):
        model = plain(nn.LayerNorm(HIDDEN), Cutting(cut))
        plan = make_plan(model, (X_BTH,))
        assert plan.layers[0].site.owner_runs
        rewrite(model, plan)
        assert replacement_of(model[1]) is None
        x = torch.randn(4, 12, HIDDEN)
        found = model(x)
        assert close(found, restore(model)(x))


@torch.no_grad()
def test_an_owner_whose_parts_are_called_from_outside_is_not_replaced():
    model = Around(MLP(), lambda mlp, x: mlp.down(F.relu(mlp.up(x)))).eval()
    wanted = model(X_BTH)
    plan = make_plan(model, (X_BTH,))
    assert not plan.layers[0].site.owner_runs
    rewrite(model, plan)
    assert replacement_of(model.mlp) is None
    assert close(model(X_BTH), wanted)
    assert count_op_calls(lambda: model(X_BTH)) == 1


@torch.no_grad()
def test_arguments_by_keyword():
    model = Around(MLP(), lambda mlp, x: mlp(hidden_states=x)).eval()
    wanted = model(X_BTH)
    rewrite(model, make_plan(model, (X_BTH,)))
    assert isinstance(replacement_of(model.mlp), SparseFFN)
    assert close(model(X_BTH), wanted)
    for args, kwargs in [((X_BTH, None), {}), ((), {"x": X_BTH}), ((X_BTH,), {"scale": 2}), ((), {})]:
        with pytest.raises(
            ConfigError, match="arguments of mlp: expected one tensor, by position or as hidden_states="
        ):
            model.mlp(*args, **kwargs)
    block = plain(FunctionalBlock())
    wanted = block(X_BTH)
    rewrite(block, make_plan(block, (X_BTH,)))
    first, second, norm = block[0].banana, block[0].cherry, block[0].n
    assert close(X_BTH + second(input=F.relu(first(input=norm(X_BTH)))), wanted)


def _set(h, part, value):
    h[part] = value
    return F.relu(h)


def _also(*changes):
    """``changes`` one after another on ``h``, then relu."""

    def between(h, y):
        for change in changes:
            change(h)
        return F.relu(h)

    return between


def _kept_view(change):
    def between(h, y):
        view = h.view(-1, INTERMEDIATE)
        change(view)
        return F.relu(h)

    return between


def _changed_base(h, y):
    view = h.view(h.shape)
    h.mul_(-1)
    return F.relu(view)


def _pieces(h, y):
    one, other = h.chunk(2, -1)
    one.relu_()
    other.neg_()
    return F.relu(h)


def _changed_input(h, y):
    y.view(-1).mul_(3)
    return F.relu(h)


BETWEEN = {
    "masked_fill_": _also(lambda h: h.masked_fill_(torch.arange(INTERMEDIATE) % 2 == 0, -1.0)),
    "copy_": _also(lambda h: h.copy_(torch.ones_like(h))),
    "index_fill_": _also(lambda h: h.index_fill_(-1, torch.tensor([1, 3]), 2.0)),
    "setitem": lambda h, y: _set(h, (..., slice(0, 9)), 1.0),
    "setitem then noted": lambda h, y: _set(h.mul_(2), 0, 1.0),
    "noted then masked": _also(lambda h: h.neg_(), lambda h: h.masked_fill_(torch.arange(INTERMEDIATE) < 9, 1.0)),
    "transposed": _also(lambda h: h.transpose(0, 1).neg_()),
    "data": _also(lambda h: h.data.mul_(-2)),
    "view": _kept_view(lambda v: v.neg_()),
    "view set": _kept_view(lambda v: v.zero_()),
    "base of a view": _changed_base,
    "pieces": _pieces,
    "input": _changed_input,
    "out": lambda h, y: torch.relu(torch.add(h, 1.0, out=torch.empty(0))),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", BETWEEN)
def test_lazy_changes_in_place_are_not_lost(name, mode):
    model = plain(Middle(BETWEEN[name]))
    rewrite(model, make_plan(model, (X_BTH,)))
    assert isinstance(replacement_of(model[0].down), LazyDown)
    model[0].between = model[0].later
    with mode():
        found = model(X_BTH)
        assert close(found, restore(model)(X_BTH))


@torch.no_grad()
def test_lazy_with_one_of_two_streams_is_dense():
    class Half(GatedBlock):
        one = False

        def forward(self, x):
            g = F.relu(self.a(self.n(x)))
            return x + self.c(g if self.one else g * self.b(self.n(x)))

    class Same(Half):
        def forward(self, x):
            y = self.n(x)
            g = F.relu(self.a(y))
            return x + self.c(g if self.one else g * self.b(y))

    model = plain(Same())
    rewrite(model, make_plan(model, (X_BTH,)))
    assert count_op_calls(lambda: model(X_BTH)) == 1
    model[0].one = True
    found = model(X_BTH)
    assert close(found, restore(model)(X_BTH))


@torch.no_grad()
@pytest.mark.parametrize("block", [lambda: sequential(nn.ReLU()), FunctionalBlock], ids=["owner", "lazy"])
def test_autocast_gives_the_dtype_of_the_dense_model(block):
    model = plain(nn.LayerNorm(HIDDEN), block())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(X_BTH)
        rewrite(model, make_plan(model, (X_BTH,)))
        found = model(X_BTH)
    assert found.dtype == wanted.dtype
    assert close(found.float(), wanted.float(), 5e-2)


@pytest.mark.parametrize("make", [FunctionalBlock, lambda: sequential(nn.ReLU())], ids=["lazy", "chain"])
@torch.no_grad()
def test_under_vmap_and_the_jit_tracer(make) -> None:
    """Before anything else has run, so that notes of lazy tensors are checked there."""
    model = plain(make())
    wanted = model(X_BTH)
    rewrite(model, make_plan(model, (X_BTH,)))
    assert close(torch.vmap(model)(X_BTH), wanted)
    assert close(torch.jit.trace(model, X_BTH)(X_BTH), wanted)


@torch.no_grad()
def test_half_precision_keeps_the_predictor_exact():
    model = plain(FunctionalBlock())
    plan = make_plan(model, (X_BTH,), method="lowrank")
    tensors = predictor()
    tensors["a_scale"][:] = 1.2345e-9
    tensors["bias"][:] = 1e30
    rewrite(model, plan, {plan.layers[0].site.key: tensors})
    layer = sparse_layers(model)[0]
    before = [t.clone() for t in layer.predictor()]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model.to(dtype)
        assert layer.neuron_rows.dtype == dtype
        assert all(torch.equal(a, b) for a, b in zip(layer.predictor(), before, strict=True))


def test_loading_a_wrong_state_dict_reports_like_a_dense_model():
    model = plain(FunctionalBlock())
    state = model.state_dict()
    rewrite(model, make_plan(model, (X_BTH,)))
    wrong = dict(state)
    wrong["0.extra"] = wrong.pop("0.banana.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.banana.weight"') as error:
        model.load_state_dict(wrong)
    assert '"0.extra"' in str(error.value)
    assert_same_state(model, state)
