"""Exact gates that stay in memory over a store: the bits of the model in memory, and reads of what fires alone."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from operators import opcheck
from tiny_models import tiny

import torch_pi2
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.layers.offloaded import InStore, OffloadedFFN
from torch_pi2.ops import ffn as reference
from torch_pi2.ops.constants import constants
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import LayerPlan

#: Gated with relu, without a gate, and with a threshold of each neuron's own.
KINDS: dict[str, dict[str, Any]] = {
    "llama-bias": {},
    "opt": {},
    "llama": {"method": "threshold", "score": "output", "sparsity": 0.7},
}
IDS = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(1))


def packed(folder: Path, form: str, how: dict[str, Any]) -> Path:
    """The store of ``folder / "saved"``; of form ``slots`` as before gates lay apart."""
    with pytest.MonkeyPatch.context() as patched:
        if form == "slots":
            patched.setattr(LayerPlan, "gate_decides", False)
        torch_pi2.pack(folder / "saved", folder / "store", cluster=1, **how)
    with StoreReader(folder / "store" / "pi2" / "model.pi2") as reader:
        assert {(entry.cluster, entry.gates > 0) for entry in reader.entries} == {(1, form != "slots")}
    return folder / "store"


@pytest.fixture(
    scope="module",
    params=[(kind, form) for kind in KINDS for form in ("float", "int4")] + [("llama-bias", "slots")],
    ids="-".join,
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, form = request.param
    model, made = tiny(kind), tmp_path_factory.mktemp("gates")
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith(("gate_proj.bias", "fc1.bias")):
                bias.fill_(-1.0)
    torch_pi2.save(torch_pi2.optimize(model, IDS, **({"method": "exact"} | KINDS[kind])), made / "saved")
    return packed(made, form, {"weights": form} if form == "int4" else {})


def within(folder: Path, share: float, **more: Any) -> Any:
    """A model that has room for ``share`` of its neurons."""
    whole = torch_pi2.stats(torch_pi2.load(folder, budget="1GiB", **more))["budget"]
    least, neurons = whole.smallest - whole.gates, whole.in_slots(whole.neurons) + whole.gates
    return torch_pi2.load(folder, budget=least + int(neurons * share), **more)


def layers(model: Any) -> list[Any]:
    found = sparse_layers(model)
    assert found
    return list(found)


def test_the_bits_are_those_in_memory_and_only_what_fires_is_wanted(folder: Path) -> None:
    memory, model = torch_pi2.load(folder), within(folder, 0.6)
    with StoreReader(folder / "pi2" / "model.pi2") as reader:
        entries = reader.entries
    budget = torch_pi2.stats(model)["budget"]
    rows = [layer.gate_rows for layer in layers(model)]
    assert budget.gates == sum(r.nbytes for r in rows) > 0
    for tokens in (1, 3, constants().gemm_tokens - 1, constants().gemm_tokens):
        for mine, theirs in zip(layers(model), layers(memory), strict=True):
            x_TH = torch.randn(tokens, mine.site.hidden)
            torch_pi2.stats(model, reset=True)
            assert torch.equal(mine(x_TH), theirs(x_TH))
            wanted, every = torch_pi2.stats(model)["wanted"], mine.site.intermediate
            assert (wanted == every) if tokens == constants().gemm_tokens else (wanted < every or tokens > 1)
            mine._gates.tensors, kept = (), mine._gates.tensors
            torch_pi2.stats(model, reset=True)
            assert torch.equal(mine(x_TH), theirs(x_TH))
            mine._gates.tensors = kept
            found, apart = torch_pi2.stats(model), entries[mine.store_layer].gate_bytes
            assert found["wanted"] == (wanted if apart else every)  # gates are read first
            assert found["bytes_read"] >= apart
    texts = [torch_pi2.generate(m, IDS[:1], max_new_tokens=12, eos_token_id=[]).sequences for m in (memory, model)]
    assert texts[0] == texts[1]


def test_budgets_keep_what_fits_and_change_while_in_use(folder: Path) -> None:
    model = within(folder, 0.6)
    before, text = torch_pi2.stats(model)["budget"], torch_pi2.generate(model, IDS[:1], max_new_tokens=4).sequences
    copied, decoder = copy.deepcopy(model), torch_pi2.Decoder(model, max_tokens=40)
    token = decoder.prompt(IDS[:1])
    rows = weakref.ref(layers(model)[0].gate_rows)
    least = before.smallest - before.gates
    assert torch_pi2.set_budget(model, before.smallest).gates in (0, before.gates)
    assert torch_pi2.set_budget(model, least).gates == 0
    for _ in range(2):
        token = decoder.step(token)
    assert rows() is None  # also of the copy, and of recorded steps
    assert [layer.gate_rows for m in (model, copied) for layer in layers(m)] == [None] * 2 * len(layers(model))
    assert torch_pi2.generate(copied, IDS[:1], max_new_tokens=4).sequences == text
    assert torch_pi2.stats(torch_pi2.load(folder, budget=least))["budget"].gates == 0
    assert torch_pi2.set_budget(copied, before.total) == before
    assert layers(copied)[0].gate_rows is layers(model)[0].gate_rows is not None
    assert torch_pi2.generate(model, IDS[:1], max_new_tokens=4).sequences == text
    large = torch_pi2.load(folder, budget="1GiB")
    assert torch_pi2.set_budget(large, before.total).gates == before.gates
    assert torch_pi2.generate(large, IDS[:1], max_new_tokens=4).sequences == text
    one = before.gates // len(layers(model))
    some = torch_pi2.load(folder, budget=least + one)
    assert sum(layer.gate_rows is not None for layer in layers(some)) <= 1
    assert torch_pi2.generate(some, IDS[:1], max_new_tokens=4).sequences == text


def test_conversions_and_copies_leave_the_rows_as_they_are(folder: Path) -> None:
    model = within(folder, 0.6)
    layer = layers(model)[0]
    rows = layer.gate_rows.clone()
    assert isinstance(layer, OffloadedFFN)
    layer.to(torch.bfloat16)
    assert torch.equal(layer.gate_rows, rows)
    assert layers(copy.deepcopy(model))[0].gate_rows is layer.gate_rows  # one budget has them once


def test_the_operator(folder: Path) -> None:
    model = within(folder, 0.6)
    layer = layers(model)[0]
    x = torch.randn(2, 3, layer.site.hidden)
    biases, form = (
        (layer.bias_gate, layer.bias_up, layer.bias_down),
        (layer.site.activation, layer.site.activation_on_up),
    )
    after = ("gate", 0.0, "", False, *form, layer.n_hot, layer.threshold, layer.int8_activations, 0, layer.thresholds)
    arguments = (layer.store.number, layer.store_layer, *biases, [layer.gate_rows], *after)
    opcheck(torch.ops.pi2.stored_ffn.default, (x, *arguments), {})
    with StoreReader(folder / "pi2" / "model.pi2") as reader:
        wanted = reference.stored_ffn(x, reader, *arguments[1:])
    torch.testing.assert_close(torch.ops.pi2.stored_ffn(x, *arguments), wanted, atol=1e-5, rtol=1e-4)
    for rows, found in (([], "found 0 tensors"), ([layer.gate_rows[1:]], "gate rows: expected contiguous")):
        with pytest.raises(RuntimeError, match=found):
            torch.ops.pi2.stored_ffn(x, *arguments[:5], rows, *after)


@pytest.mark.parametrize(("how", "cluster"), [({}, 1), ({"method": "exact"}, None)])
def test_neurons_lie_apart_where_a_gate_decides(how: dict[str, Any], cluster: int | None, tmp_path: Path) -> None:
    """Without statistics nothing is known of what fires: whole layers are read, in clusters."""
    model = tiny("llama-bias")
    torch_pi2.save(torch_pi2.optimize(model, IDS if cluster else None, method="exact"), tmp_path / "saved")
    torch_pi2.pack(tmp_path / "saved", tmp_path / "store")
    with StoreReader(tmp_path / "store" / "pi2" / "model.pi2") as reader:
        assert (reader.entries[0].cluster == 1) == (cluster == 1) == (reader.entries[0].gates > 0)


#: Experts without gates beside a shared one in blocks ``MEM*E``, and ReGLU experts.
SIZES = {"hidden_size": 64, "vocab_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 112,
        "moe_shared_expert_intermediate_size": 200,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 150, "num_hidden_layers": 2},
}


@pytest.fixture(
    scope="module",
    params=[(m, form) for m in MIXTURES for form in ("bfloat16", "int4", "int8")] + [("nemotron_h", "slots")],
    ids="-".join,
)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The store of a mixture of experts, and how it is loaded: int8 with int8 activations."""
    kind, form = request.param
    made = tmp_path_factory.mktemp("experts")
    shape = SIZES | MIXTURES[kind] | {"model_type": kind}
    weights = "int4" if form == "slots" else form
    torch_pi2.synthetic(made / "saved", shape, active=0.2, weights=weights, predictor=None)
    return packed(made, form, {}), {"activations": "int8"} if form == "int8" else {}


def experts_of(model: Any) -> Iterator[OffloadedExperts]:
    return (module for module in model.modules() if isinstance(module, OffloadedExperts))


def kept(model: Any) -> list[int]:
    """Number of matrices of gates in memory, by module."""
    found = [module for module in model.modules() if isinstance(module, InStore)]
    return [0 if m.gate_rows is None else len(m.gate_rows) if isinstance(m, OffloadedExperts) else 1 for m in found]


@pytest.mark.parametrize("lookahead", [False, True])
def test_experts_read_what_fires_where_their_gates_are_in_memory(
    mixture: tuple[Path, dict[str, Any]], lookahead: bool
) -> None:
    folder, how = mixture
    memory = torch_pi2.load(folder, **how)
    more = how | {"offload": torch_pi2.OffloadConfig(lookahead=lookahead)}
    few, seen = constants().gemm_tokens - 1, set()
    for share in (0.02, 0.2, 0.4, 0.7):
        model = within(folder, share, **more)
        seen.add(sum(kept(model)))
        rows = [m.gate_rows.nbytes for m in model.modules() if isinstance(m, InStore) and m.gate_rows is not None]
        assert torch_pi2.stats(model)["budget"].gates == sum(rows)
        # in memory float activations leave long prompts to PyTorch
        prompt = (2, 40) if how else (2, 7)
        for batch, tokens in ((1, 1), (3, 1), (1, few), (3, 5), prompt):
            ids = torch.randint(3, 96, (batch, tokens))
            with torch.no_grad():
                assert torch.equal(model(ids).logits, memory(ids).logits)
        texts = [torch_pi2.generate(m, IDS[:1, :12], max_new_tokens=6).sequences for m in (memory, model)]
        assert texts[0] == texts[1]
    assert min(seen) < max(seen) == len(sparse_layers(model))


def test_of_experts_in_memory_only_what_fires_is_wanted(mixture: tuple[Path, dict[str, Any]]) -> None:
    folder, how = mixture
    model = within(folder, 0.7, **how)
    experts = next(experts_of(model))
    x_TH, index = torch.randn(1, 64).bfloat16(), torch.tensor([[0, 3]])
    every = 2 * experts.site.intermediate
    wanted, of_E = [], torch.arange(len(experts.sites))
    of_E[:3] = -1
    for gates in (experts._gates.tensors, (experts.gate_rows, of_E), ()):
        experts._gates.tensors = gates
        torch_pi2.stats(model, reset=True)
        y_TH = experts.compute(x_TH, index, torch.ones(1, 2))
        wanted.append((torch_pi2.stats(model)["wanted"], y_TH))
    with StoreReader(folder / "pi2" / "model.pi2") as reader:
        apart = reader.entries[0].gates > 0
    assert 0 < wanted[0][0] < every
    if apart:
        assert wanted[0][0] == wanted[1][0] == wanted[2][0]
    else:
        assert every // 2 < wanted[1][0] < wanted[2][0] == every
    assert all(torch.equal(y, wanted[0][1]) for _, y in wanted)


def test_experts_follow_the_budget(mixture: tuple[Path, dict[str, Any]]) -> None:
    folder, how = mixture
    model = within(folder, 0.7, **how)
    before, all_kept = torch_pi2.stats(model)["budget"], kept(model)
    copied, text = copy.deepcopy(model), torch_pi2.generate(model, IDS[:1], max_new_tokens=4).sequences
    least = before.smallest - before.gates
    rows = [weakref.ref(m.gate_rows) for m in model.modules() if isinstance(m, InStore) and m.gate_rows is not None]
    for gates in (before.gates // 2, 0, before.gates // 3):
        assert torch_pi2.set_budget(model, least + gates).gates <= gates
        assert kept(copied) == kept(model) < all_kept
        for one in (model, copied):
            assert torch_pi2.generate(one, IDS[:1], max_new_tokens=4).sequences == text
    assert all(row() is None for row in rows)
    assert torch_pi2.set_budget(copied, before.total) == before
    assert kept(model) == all_kept
    assert torch_pi2.generate(model, IDS[:1], max_new_tokens=4).sequences == text
