"""NeuronClusterMode and PredictedMaskMode: the sparse result is the reference's, on models nobody changed."""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, GradientError, StaleArtifactError
from torch_pi2.graph import find_sites
from torch_pi2.graph.dispatch import NeuronClusterMode, PredictedMaskMode
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.ops.ffn import sparse_ffn
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.types.plan import LayerPlan, Plan, weights_hash
from torch_pi2.types.site import FFNSite, LinearRef

H, I = 12, 37  # noqa: E741  the package's suffixes; 37 is no multiple of 8


class FFN(nn.Module):
    """Gated or plain, biased or not, gate first or last, fused or not, biases added apart or not."""

    def __init__(self, act: str, *, gated: bool = True, on_up: bool = False, bias: bool = True, form: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.act, self.gated, self.on_up, self.form = ACTIVATIONS[act], gated, on_up, form
        if form == "fused":
            self.gate_up = nn.Linear(H, 2 * I, bias=bias)
        else:
            if gated:
                self.gate = nn.Linear(H, I, bias=bias)
            self.up = nn.Linear(H, I, bias=bias)
        self.down = nn.Linear(I, H, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "fused":
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(up * self.act(gate))
        if self.form == "bias apart":
            gate, up = x @ self.gate.weight.T + self.gate.bias, x @ self.up.weight.T + self.up.bias
            return self.down(self.act(gate) * up)
        if not self.gated:
            h = self.act(self.up(x))
            return self.down(torch.sigmoid(h).logit() if self.form == "odd op" else h)
        if self.form == "up first":
            up = self.up(x)
            return self.down(up * self.act(self.gate(x)))
        if self.form == "in place":
            h = torch.relu_(self.gate(x))
            h *= self.up(x)
            return self.down(F.dropout(h, 0.5, self.training))
        up = self.up(x)
        return self.down(self.act(self.gate(x)) * (self.act(up) if self.on_up else up))

    def site(self, activation: str) -> FFNSite:
        b: Callable[[str], str | None] = lambda n: f"{n}.bias" if self.down.bias is not None else None  # noqa: E731
        if self.form == "fused":
            gate = LinearRef("gate_up.weight", b("gate_up"), (0, I))
            up = LinearRef("gate_up.weight", b("gate_up"), (I, 2 * I))
        else:
            gate = LinearRef("gate.weight", b("gate")) if self.gated else None
            up = LinearRef("up.weight", b("up"))
        return FFNSite("ffn", 0, activation, self.on_up, gate, up, LinearRef("down.weight", b("down")), H, I, "")


def predictor(hidden: int, intermediate: int, seed: int = 0) -> LowRankRows:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(8, hidden, generator=g), torch.randn(intermediate, 8, generator=g)
    return LowRankRows.fitted(a, b, torch.zeros(intermediate))


def make_plan(model: nn.Module, sites: list[FFNSite], method: str, n_hot: int = 5, threshold: float = 0.0) -> Plan:
    g = torch.Generator().manual_seed(1)
    layers = [LayerPlan(s, method, n_hot, torch.randperm(s.intermediate, generator=g).int(), threshold) for s in sites]
    return Plan(layers, weights_hash(model, sites)).bind(model)


FORMS = [
    ("relu", {}),
    ("silu", {}),
    ("relu", {"on_up": True, "bias": False}),
    ("relu2", {"gated": False}),
    ("gelu", {"gated": False, "bias": False}),
    ("relu", {"gated": False, "form": "odd op"}),
    ("silu", {"form": "fused"}),
    ("relu", {"form": "fused", "bias": False}),
    ("relu", {"form": "bias apart"}),
    ("silu", {"form": "up first"}),
    ("relu", {"form": "in place"}),
]


@pytest.mark.parametrize("method", ["exact", "threshold", "lowrank"])
@pytest.mark.parametrize(("act", "options"), FORMS, ids=[f"{a}-{o}" for a, o in FORMS])
@pytest.mark.parametrize("shape", [(H,), (2, 1, 2, H)])
def test_mode_equals_reference_operator(method: str, act: str, options: dict, shape: tuple[int, ...]) -> None:
    ffn = FFN(act, **options).eval()
    site = ffn.site(act)
    threshold = 0.15 if method == "threshold" else 0.0
    plan = make_plan(ffn, [site], method, threshold=threshold)
    order = plan.layers[0].order.long()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    low = predictor(H, I)
    w = site.weights(ffn)
    rows = [r for r in (w.gate, w.up, w.down.T) if r is not None]
    active = (
        (low.scores(x.reshape(-1, H)) >= low.threshold)[:, order][:, 5:].view(*shape[:-1], -1)
        if method == "lowrank"
        else None
    )
    take = lambda b: None if b is None else b[order]  # noqa: E731
    want = sparse_ffn(
        x,
        torch.stack(rows, 1)[order],
        take(w.bias_gate),
        take(w.bias_up),
        w.bias_down,
        active,
        act,
        site.activation_on_up,
        5,
        threshold,
    )
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, NeuronClusterMode(plan, {"ffn": low}) as mode:
            got = ffn(x)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert 0 < mode.computed_share() <= 1
    if method == "lowrank":
        with torch.no_grad():
            assert not torch.allclose(got, ffn(x), atol=1e-4), "the predictor must have skipped something"


@pytest.mark.parametrize("name", ["drelu", "phi3", "opt"])
def test_models_equal_dense_and_masked(name: str) -> None:
    model = tiny(name)
    sites = find_sites(model)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    call = lambda: model(input_ids=ids, attention_mask=mask).logits  # noqa: E731
    with torch.no_grad():
        dense = call()
        with NeuronClusterMode(make_plan(model, sites, "exact")) as exact:
            torch.testing.assert_close(call(), dense, rtol=1e-4, atol=1e-4)
        plan = make_plan(model, sites, "lowrank", threshold=0.05)
        predictors = {s.key: predictor(s.hidden, s.intermediate, s.layer) for s in sites}
        with NeuronClusterMode(plan, predictors) as low:
            sparse = call()
        cold = {y.site.key: y.order[y.n_hot :].long() for y in plan.layers}
        with PredictedMaskMode(model, sites, predictors, cold, {s.key: 0.05 for s in sites}):
            masked = call()
    torch.testing.assert_close(sparse, masked, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sparse, dense, atol=1e-3)
    for mode in (exact, low):
        assert all(c["tokens"] == ids.numel() for c in mode.counters.values())
    assert low.computed_share() < 1


def test_generate_inside_the_block_is_the_dense_text() -> None:
    model = tiny("drelu")
    sites = find_sites(model)
    prompt = torch.tensor([[5, 6, 7], [9, 10, 11]])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    dense = model.generate(prompt, **options)
    with NeuronClusterMode(make_plan(model, sites, "exact")) as mode:
        sparse = model.generate(prompt, **options)
    assert torch.equal(dense, sparse)
    assert mode.computed_share() < 0.95, "dReLU leaves zeros to skip"
    assert torch.equal(model.generate(prompt, **options), dense), "nothing stays behind"


def test_exact_gate_skips_up_rows_of_silent_neurons() -> None:
    """One token: gate is computed in full, up and down only where the gate is positive."""
    ffn = FFN("relu", form="in place").eval()
    x = torch.randn(1, H)
    fires = int((ffn.gate(x) > 0).sum())
    with torch.no_grad(), NeuronClusterMode(make_plan(ffn, [ffn.site("relu")], "exact", n_hot=0)) as mode:
        ffn(x)
    assert mode.counters["ffn"]["computed"] == H * (I + 2 * fires)


def test_dense_layers_are_left_alone() -> None:
    ffn = FFN("silu").eval()
    x = torch.randn(3, H)
    with torch.no_grad(), NeuronClusterMode(make_plan(ffn, [ffn.site("silu")], "dense")) as mode:
        got = ffn(x)
        assert torch.equal(got, ffn(x))
    assert mode.counters == {}
    assert mode.computed_share() == 0


def test_bfloat16_keeps_its_dtype() -> None:
    ffn = FFN("relu", on_up=True).eval().to(torch.bfloat16)
    x = torch.randn(4, H).bfloat16()
    with torch.no_grad():
        dense = ffn(x)
        with NeuronClusterMode(make_plan(ffn, [ffn.site("relu")], "exact")):
            got = ffn(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, dense, rtol=2e-2, atol=2e-2)


def test_an_exception_inside_leaves_no_state_behind() -> None:
    ffn = FFN("silu", form="up first").eval()
    mode = NeuronClusterMode(make_plan(ffn, [ffn.site("silu")], "exact"))
    with torch.no_grad():
        with contextlib.suppress(KeyboardInterrupt), mode:
            ffn.up(torch.randn(3, H))
            raise KeyboardInterrupt
        x = torch.randn(5, H)
        with mode:
            got = ffn(x)
        torch.testing.assert_close(got, ffn(x), rtol=1e-5, atol=1e-5)


def test_unbound_and_dead_plans_are_refused() -> None:
    ffn = FFN("silu")
    site = ffn.site("silu")
    plan = Plan([LayerPlan(site, "exact", 0, torch.arange(I).int())], weights_hash(ffn, [site]))
    with pytest.raises(ConfigError, match=r"plan: expected one that is bound .* found not bound\. Call plan\.bind"):
        NeuronClusterMode(plan)
    plan.bind(ffn)
    del ffn
    gc.collect()
    with pytest.raises(ConfigError, match="found a model that no longer exists"):
        NeuronClusterMode(plan)


def test_binding_to_other_weights_is_stale() -> None:
    ffn = FFN("silu")
    site = ffn.site("silu")
    plan = Plan([LayerPlan(site, "exact", 0, torch.arange(I).int())], weights_hash(ffn, [site]))
    with torch.no_grad():
        ffn.up.weight[0, 0] += 1
    with pytest.raises(StaleArtifactError, match="plan: expected a model with FFN weights"):
        plan.bind(ffn)


def test_a_bound_plan_can_be_pickled_and_comes_back_unbound() -> None:
    ffn = FFN("silu")
    plan = pickle.loads(pickle.dumps(make_plan(ffn, [ffn.site("silu")], "exact")))
    with pytest.raises(ConfigError, match="not bound"):
        plan.model()
    assert plan.bind(ffn).model() is ffn


def test_missing_predictor_is_refused() -> None:
    ffn = FFN("silu")
    plan = make_plan(ffn, [ffn.site("silu")], "lowrank")
    with pytest.raises(
        ConfigError, match=r"predictor of ffn: expected one with .* for every .* found predictors for no layer"
    ):
        NeuronClusterMode(plan)


def test_gradients_are_refused() -> None:
    ffn = FFN("silu")
    with (
        NeuronClusterMode(make_plan(ffn, [ffn.site("silu")], "exact")),
        pytest.raises(GradientError, match=r"found grad mode on .* Wrap the call in torch\.no_grad"),
    ):
        ffn(torch.randn(2, H))


def test_masked_mode_counts_and_keeps_hot() -> None:
    ffn = FFN("relu").eval()
    site = ffn.site("relu")
    none = predictor(H, I)
    none.threshold = float("inf")
    x = torch.randn(4, H)
    with torch.no_grad():
        dense = ffn(x)
        with PredictedMaskMode(ffn, [site], {"ffn": none}, {"ffn": torch.arange(I)}) as mode:
            torch.testing.assert_close(ffn(x), ffn.down.bias.expand(4, H))
        assert mode.cold_share == 0
        with PredictedMaskMode(ffn, [site], {"ffn": none}, {"ffn": torch.arange(0)}):
            torch.testing.assert_close(ffn(x), dense)
        with PredictedMaskMode(ffn, [site], {}):
            assert torch.equal(ffn(x), dense)


def test_what_the_mode_cannot_see_through_is_refused() -> None:
    model = tiny("llama-relu")
    plan = torch_pi2.optimize(tiny("llama-relu")).torch_pi2.plan
    plan.bind(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match=r"without torch\.autocast"):
        NeuronClusterMode(plan).__enter__()
    torch_pi2.optimize(model)
    with pytest.raises(ConfigError, match="expected a dense model, found one that torch_pi2 has rewritten"):
        NeuronClusterMode(plan)
