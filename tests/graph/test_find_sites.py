"""Finding FFNs by structure: names never matter, formulas always do."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, INTERMEDIATE, FunctionalBlock, GatedBlock, plain, tiny
from torch import nn

from torch_pi2.errors import CalibrationError, ConfigError, DeviceError, NoFFNFoundError, UnsupportedModelError
from torch_pi2.graph import FFNSite, find_sites
from torch_pi2.graph.activation import identify
from torch_pi2.graph.capture import capture
from torch_pi2.types.site import Formula

X_BTH = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    """``down(middle(up(x)))``, or with a gate ``down(middle(gate(x), up(x)))``, or with both in one linear."""

    def __init__(self, middle, *, sources: int = 1, width: int = INTERMEDIATE, out: int = HIDDEN) -> None:
        super().__init__()
        self.middle = middle
        self.sources = nn.ModuleList(nn.Linear(HIDDEN, width) for _ in range(sources))
        self.z = nn.Linear(INTERMEDIATE, out)

    def forward(self, x):
        return self.z(self.middle(*(source(x) for source in self.sources)))


def only_site(model: nn.Module) -> FFNSite:
    (site,) = find_sites(model, (X_BTH,))
    return site


def gelu_by_hand(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def changed_in_place(h):
    h.relu_()
    h *= 1
    return h


PLAIN = {
    "result left in its argument": (changed_in_place, "relu"),
    "F.relu": (F.relu, "relu"),
    "clamp": (lambda h: h.clamp(min=0), "relu"),
    "maximum": (lambda h: torch.maximum(h, torch.zeros_like(h)), "relu"),
    "mask": (lambda h: h * (h > 0), "relu"),
    "where": (lambda h: torch.where(h > 0, h, 0.0), "relu"),
    "in place": (lambda h: F.relu(h, inplace=True), "relu"),
    "relu2": (lambda h: F.relu(h) ** 2, "relu2"),
    "relu2 as gate": (lambda h: F.relu(h) * h, "relu2"),
    "silu by hand": (lambda h: h * torch.sigmoid(h), "silu"),
    "silu by exp": (lambda h: h / (1 + torch.exp(-h)), "silu"),
    "gelu": (nn.GELU(), "gelu"),
    "gelu by erf": (lambda h: h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))), "gelu"),
    "gelu tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "gelu by hand": (gelu_by_hand, "gelu_tanh"),
    "fast gelu": (lambda h: 0.5 * h * (1.0 + torch.tanh(h * 0.7978845608 * (1.0 + 0.044715 * h * h))), "gelu_tanh"),
    "dropout and view": (lambda h: F.dropout(F.relu(h.view(-1, h.shape[-1])), 0.5, False).view(h.shape), "relu"),
}


@pytest.mark.parametrize("spelling", PLAIN)
def test_plain_activation_is_recognised_however_spelled(spelling):
    middle, name = PLAIN[spelling]
    site = only_site(MLP(middle))
    assert (site.activation, site.gated, site.activation_on_up) == (name, False, False)
    assert (site.hidden, site.intermediate) == (HIDDEN, INTERMEDIATE)
    assert site.up.weight == "sources.0.weight"
    assert site.up.bias == "sources.0.bias"
    assert site.down.weight == "z.weight"


# formula over the two sources -> activation, on up, which source is the gate
GATED = {
    "silu(a) * b": (lambda a, b: F.silu(a) * b, ("silu", False, 0)),
    "a * silu(b)": (lambda a, b: a * F.silu(b), ("silu", False, 1)),
    "relu(a) * b": (lambda a, b: F.relu(a).mul(b), ("relu", False, 0)),
    "relu(a) * relu(b)": (lambda a, b: F.relu(a) * F.relu(b), ("relu", True, 0)),
    "gelu by hand": (lambda a, b: b * gelu_by_hand(a), ("gelu_tanh", False, 0)),
}


@pytest.mark.parametrize("formula", GATED)
def test_gated_roles(formula):
    middle, (name, on_up, gate) = GATED[formula]
    site = only_site(MLP(middle, sources=2))
    assert (site.activation, site.activation_on_up) == (name, on_up)
    assert site.gate is not None
    assert site.gate.weight == f"sources.{gate}.weight"
    assert site.up.weight == f"sources.{1 - gate}.weight"


FUSED = {
    "chunk": (lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], (0, INTERMEDIATE)),
    "split": (
        lambda h: h.split(INTERMEDIATE, -1)[0] * F.silu(h.split(INTERMEDIATE, -1)[1]),
        (INTERMEDIATE, 2 * INTERMEDIATE),
    ),
    "slices": (lambda h: F.silu(h[..., :INTERMEDIATE]) * h[..., INTERMEDIATE:], (0, INTERMEDIATE)),
}


@pytest.mark.parametrize("spelling", FUSED)
def test_fused_gate_and_up(spelling):
    middle, gate_rows = FUSED[spelling]
    site = only_site(MLP(middle, width=2 * INTERMEDIATE))
    assert site.gate is not None
    assert site.gate.rows == gate_rows
    assert sorted([site.gate.rows, site.up.rows]) == [(0, INTERMEDIATE), (INTERMEDIATE, 2 * INTERMEDIATE)]
    assert site.gate.weight == site.up.weight == "sources.0.weight"


def test_interleaved_gate_and_up_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="z"):
        find_sites(MLP(lambda h: F.silu(h[..., ::2]) * h[..., 1::2], width=2 * INTERMEDIATE), (X_BTH,))


@pytest.mark.parametrize("name", ["tanh", "mish", "sigmoid"])
def test_unknown_activation_is_named(name):
    with pytest.raises(UnsupportedModelError, match=rf"another formula, of {name}\).*use the model as it is"):
        find_sites(MLP(getattr(torch, name, None) or getattr(F, name)), (X_BTH,))


def test_not_strict_leaves_unknown_ones_out(caplog):
    model = nn.Sequential(MLP(F.relu), MLP(torch.tanh))
    (site,) = find_sites(model, (X_BTH,), strict=False)
    assert site.key == "0"
    assert "left dense: 1 (another formula, of tanh)" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"1 \(another formula, of tanh\).*strict=False"):
        find_sites(model, (X_BTH,))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (MLP(lambda h: h), "2 linear layers"),
        (MLP(lambda h: 2 * h + 1), "2 linear layers"),
        (MLP(lambda a, b: a * b, sources=2), "3 linear layers"),
        (MLP(lambda a, b: a + b, sources=2), "3 linear layers"),
        (MLP(F.relu, out=HIDDEN + 1), "2 linear layers"),
        (MLP(lambda h: h.softmax(-1)), "softmax"),
        (nn.MultiheadAttention(HIDDEN, 4, batch_first=True), "linear layers"),
        (nn.LayerNorm(HIDDEN), "1 LayerNorm"),
    ],
    ids=["identity", "affine", "bilinear", "sum", "other width", "softmax", "attention", "norm"],
)
def test_what_is_no_ffn_is_listed(model, text):
    args = (X_BTH, X_BTH, X_BTH) if isinstance(model, nn.MultiheadAttention) else (X_BTH,)
    with pytest.raises(NoFFNFoundError, match=text):
        find_sites(model, args)


class Bare(nn.Module):
    """An FFN on parameters that no module holds, in any of their layouts and spellings."""

    def __init__(self, product, *, turned=(True, True), bias: bool = True) -> None:
        super().__init__()
        self.product = product
        shapes = [(INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        first, second = (shape[::-1] if turn else shape for shape, turn in zip(shapes, turned))
        self.w_in, self.w_out = nn.Parameter(torch.randn(first)), nn.Parameter(torch.randn(second))
        self.b_in = nn.Parameter(torch.randn(INTERMEDIATE)) if bias else None
        self.b_out = nn.Parameter(torch.randn(HIDDEN)) if bias else None

    def forward(self, x):
        h = F.relu(self.product(x, self.w_in, self.b_in))
        return self.product(h, self.w_out, self.b_out)


def addmm(x, w, b):
    return torch.addmm(b, x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[-1])


PRODUCTS = {
    "matmul": (lambda x, w, b: x @ w + b, (True, True)),
    "addmm": (addmm, (True, True)),
    "linear of a transpose": (lambda x, w, b: F.linear(x, w.t(), b), (True, True)),
    "matmul of a transpose": (lambda x, w, b: x @ w.mT + b, (False, False)),
    "einsum": (lambda x, w, b: torch.einsum("bth,hi->bti", x, w) + b, (True, True)),
    "einsum with an ellipsis": (lambda x, w, b: torch.einsum("...h, ih -> ...i", x, w) + b, (False, False)),
}


@pytest.mark.parametrize("spelling", PRODUCTS)
def test_weights_in_any_layout(spelling):
    product, turned = PRODUCTS[spelling]
    model = nn.Sequential(Bare(product, turned=turned)).eval()
    site = only_site(model)
    assert (site.up.transposed, site.down.transposed) == turned
    assert (site.hidden, site.intermediate, site.up.bias, site.down.bias) == (HIDDEN, INTERMEDIATE, "0.b_in", "0.b_out")
    weights = site.weights(model)
    assert (weights.up.shape, weights.down.shape) == ((INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    assert FFNSite.from_json(site.to_json()) == site
    assert site.to_json()["up"].get("transposed", False) == turned[0]


@pytest.mark.parametrize("equation", ["bth,hi->bit", "bth,th->bt", "bhh,hi->bhi"])
def test_other_sums_are_no_product(equation):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
            self.down = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            size = HIDDEN if "bhh" in equation or "th->" in equation else 5
            y = torch.einsum(equation, x[:, :1].expand(-1, size, -1), self.w)
            return self.down(F.relu(y if y.shape[-1] == HIDDEN else y.mT.contiguous()))

    with pytest.raises(NoFFNFoundError):
        find_sites(Other(), (X_BTH,))


def test_order_keys_and_names_of_a_strange_model():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = FunctionalBlock(), GatedBlock()
            self.w_in, self.w_out = (
                nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN)),
                nn.Parameter(torch.randn(HIDDEN, INTERMEDIATE)),
            )
            self.two = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

        def forward(self, x):
            x = self.last(self.first(x))
            x = F.silu(x @ self.w_in.t()) @ self.w_out.T
            return self.two[1](F.relu(self.two[0](x.sin()))) + self.two[3](F.gelu(self.two[2](x.cos())))

    sites = find_sites(Strange(), (X_BTH,))
    assert [(s.key, s.layer, s.activation) for s in sites] == [
        ("first", 0, "silu"),
        ("last", 1, "relu"),
        (":0", 2, "silu"),
        ("two:0", 3, "relu"),
        ("two:1", 4, "gelu"),
    ]
    assert sites[0].gate is not None
    assert (sites[0].gate.weight, sites[0].up.weight) == ("first.a.weight", "first.b.weight")
    assert sites[2].up.weight == "w_in"
    assert FFNSite.from_json(sites[0].to_json()) == sites[0]


def test_square_mlp_uses_no_linear_twice():
    model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(HIDDEN, HIDDEN), nn.ReLU())])
    (site,) = find_sites(model, (X_BTH,))
    assert (site.up.weight, site.down.weight) == ("0.weight", "2.weight")


def test_shared_ffn_is_one_site():
    shared = MLP(F.relu)
    site = only_site(nn.Sequential(shared, nn.LayerNorm(HIDDEN), shared))
    assert (site.key, site.layer) == ("0", 0)


def test_partly_shared_weights_keep_their_owner():
    first, second = MLP(F.relu), MLP(F.relu)
    second.sources[0] = first.sources[0]
    sites = find_sites(nn.Sequential(first, second), (X_BTH,))
    assert [s.owner for s in sites] == ["0", "1"]
    assert sites[1].up.weight == "1.sources.0.weight"


def test_graph_breaks_do_not_hide_ffns_and_leave_no_trace():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([FunctionalBlock(), FunctionalBlock()])

        def forward(self, x):
            x = self.parts[0](x)
            torch._dynamo.graph_break()
            return self.parts[1](x)

    model = Breaking()
    for _ in range(3):
        assert [s.key for s in find_sites(model, (X_BTH,))] == ["parts.0", "parts.1"]


def test_inner_modules_are_known_only_where_modules_do_it_all():
    assert only_site(nn.Sequential(nn.Linear(HIDDEN, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, HIDDEN))).inner == (
        "1",
        "2",
    )
    assert only_site(FunctionalBlock()).inner == ()


def test_mode_random_state_and_compiled_code_of_the_user_stay():
    model = plain(FunctionalBlock(), MLP(F.relu))
    model.train()
    model[1].eval()
    calls = []

    def counting(gm, inputs):
        calls.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=counting)
    with torch.no_grad():
        compiled(X_BTH)
        state = torch.random.get_rng_state()
        find_sites(model, (X_BTH,))
        compiled(X_BTH)
    assert len(calls) == 1
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_errors_of_bad_input():
    with pytest.raises(CalibrationError, match=r"no config\.vocab_size"):
        find_sites(MLP(F.relu))
    with pytest.raises(CalibrationError, match="arguments that its forward accepts, found RuntimeError"):
        find_sites(MLP(F.relu), (torch.randn(2, HIDDEN + 1),))
    with pytest.raises(DeviceError, match="meta"):
        find_sites(MLP(F.relu).to("meta"), (X_BTH,))
    with pytest.raises(UnsupportedModelError, match=r"before torch\.compile"):
        find_sites(torch.compile(MLP(F.relu)), (X_BTH,))


def test_a_model_that_dynamo_cannot_capture_is_refused_with_the_reason():
    class Excluded(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x + 1

    with pytest.raises(UnsupportedModelError, match="can capture"):
        find_sites(Excluded(), (X_BTH,))


def test_an_optimised_model_is_refused():
    from rewriting import make_plan

    from torch_pi2.rewrite.rewrite import rewrite

    model = tiny("llama-relu")
    rewrite(model, make_plan(model))
    with pytest.raises(ConfigError, match="restore"):
        find_sites(model)


def test_identify_tells_the_gelus_apart_and_sees_linearity():
    shapes = [(1, 4, 16)]
    assert identify(lambda p: F.gelu(p[0]), shapes, 16) == Formula("gelu", False, None, 0)
    assert identify(lambda p: F.gelu(p[0], approximate="tanh"), shapes, 16) == Formula("gelu_tanh", False, None, 0)
    assert identify(lambda p: p[0] * torch.tanh(p[0]), shapes, 16) == "unknown"
    assert identify(lambda p: 3 * p[0] - 1, shapes, 16) == "linear"
    assert identify(lambda p: p[0] * p[1] * 2, shapes * 2, 16) == "linear"
    assert identify(lambda p: 1 / 0, shapes, 16) == "unknown"


def clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


NUMBERS = {
    "CLIP": (lambda p: p[0] * torch.sigmoid(1.702 * p[0]), 1, "silu[in=1.702,out=0.587544066]"),
    "scaled gate": (lambda p: F.silu(p[0] * 0.25) * p[1], 2, "silu[in=0.25]"),
    "scaled product": (lambda p: 0.1 * F.gelu(p[0]) * p[1], 2, "gelu[out=0.1]"),
    "scaled relu": (lambda p: F.relu(3 * p[0]) * p[1], 2, "relu[out=3]"),
    "square": (lambda p: F.relu(0.5 * p[0]).square(), 1, "relu2[out=0.25]"),
    "gpt-oss": (lambda p: clamped(*p), 2, "silu[in=1.702,out=0.587544066,limit=7,plus=1]"),
    "clamped": (lambda p: F.silu(p[0].clamp(max=10)) * p[1].clamp(-10, 10), 2, "silu[limit=10]"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_activations_are_found(name):
    region, streams, activation = NUMBERS[name]
    found = identify(region, [(1, 4, 16)] * streams, 16)
    assert isinstance(found, Formula)
    assert (found.activation, found.on_up) == (activation, False)
    assert found.gate == (0 if streams == 2 else None)


@pytest.mark.parametrize(
    "region",
    [
        lambda p: F.silu(p[0].clamp(max=10)) * p[1],
        lambda p: F.silu(p[0]) * p[1].clamp(-10, 10),
        lambda p: F.silu(p[0].clamp(max=10)) * p[1].clamp(-5, 5),
        lambda p: F.silu(p[0].clamp(min=-10)) * p[1],
        lambda p: F.silu(p[0] + 0.1) * p[1],
        lambda p: F.mish(p[0]) * p[1],
        lambda p: torch.sigmoid(p[0]) * p[1],
        lambda p: F.silu(p[0]) * p[1] + 1e-3 * p[1],
    ],
)
def test_numbers_do_not_make_another_formula_a_known_one(region):
    assert identify(region, [(1, 4, 16)] * 2, 16) == "unknown"


def halves(h):
    """As Moshi has gate and up: two dimensions in the place of the last."""
    return h.view(*h.shape[:-1], 2, -1)


CUTS = {
    "slice": (lambda h: h[:, :6], 1),
    "narrow": (lambda h: h.narrow(1, 0, 5), 1),
    "batch": (lambda h: h[:2], 1),
    "split": (lambda h: h.split(6, 1)[0], 1),
    "ellipsis": (lambda h: h[0:2, ..., :], 1),
    "batch of halves": (lambda h: halves(h)[:2, :, 0], 2),
    "tokens of halves": (lambda h: halves(h)[:, :5, 0], 2),
    "ellipsis of halves": (lambda h: halves(h)[0:2, ..., 0, :], 2),
}


@pytest.mark.parametrize("name", CUTS)
def test_slices_of_tokens_are_no_part_of_an_ffn(name):
    """They keep all of the example, but not of a longer input."""
    cut, halves = CUTS[name]
    with pytest.raises(NoFFNFoundError, match="of tokens"):
        find_sites(MLP(lambda h: F.relu(cut(h)), width=halves * INTERMEDIATE), (X_BTH,))


@pytest.mark.parametrize(
    "gated",
    [
        lambda h: F.silu(halves(h)[..., 0, :]) * halves(h)[..., 1, :],
        lambda h: F.silu(halves(h)[:, :, 0]) * halves(h)[:, :, 1],
        lambda h: F.silu(h.unflatten(-1, (2, -1))[..., 0, :]) * h.unflatten(-1, (2, -1))[..., 1, :],
    ],
    ids=["ellipsis", "colons", "unflatten"],
)
def test_gate_and_up_as_a_dimension_of_their_own(gated):
    site = only_site(MLP(gated, width=2 * INTERMEDIATE))
    assert site.form == "silu(gate)*up"
    assert (site.gate.rows, site.up.rows) == ((0, INTERMEDIATE), (INTERMEDIATE, 2 * INTERMEDIATE))


def test_slices_that_keep_all_tokens_are():
    for cut in (lambda h: h[:], lambda h: h[:, :, :INTERMEDIATE], lambda h: h.narrow(-1, 0, INTERMEDIATE)):
        assert only_site(MLP(lambda h, cut=cut: F.relu(cut(h)))).activation == "relu"


def test_in_place_changes_through_views_of_the_input_are_seen():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

        def forward(self, x):
            x = x * 1.0
            view = x.view(-1)
            h = self.up(x)
            view.mul_(2)
            return x + self.down(F.relu(h))

    with pytest.raises(NoFFNFoundError, match="changed in place between its projections"):
        find_sites(Changing(), (X_BTH,))


def test_whether_the_owner_itself_runs():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MLP(F.relu)

        def forward(self, x):
            return self.mlp.z(F.relu(self.mlp.sources[0](x)))

    assert not only_site(Outside()).owner_runs
    assert only_site(nn.Sequential(nn.LayerNorm(HIDDEN), MLP(F.relu))).owner_runs
    site = find_sites(tiny("llama"))[1]
    assert site.owner_runs
    assert FFNSite.from_json(site.to_json()).owner_runs
    assert FFNSite.from_json({**site.to_json(), "drops": "inside"}).drops == "inside"
    old = {k: v for k, v in site.to_json().items() if k != "owner_runs"}
    assert FFNSite.from_json(old) == site


def test_a_model_that_was_captured_is_not_kept_in_memory() -> None:
    """Dynamo remembers its backends, and what those refer to."""
    model = tiny("mistral")
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    assert capture(model)
    del model
    gc.collect()
    assert weight() is None
