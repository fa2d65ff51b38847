"""Mixtures of experts as operators: against the references, in any company, in memory and over a store; refusals."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from drawn_layers import quantised
from operators import opcheck

import torch_pi2
from torch_pi2.layers.offloaded import Store
from torch_pi2.ops import experts as reference
from torch_pi2.ops import load
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.linear import to_blocks
from torch_pi2.predict.signbit import pack_signs
from torch_pi2.store.storefile import StoreReader

load()
KINDS = ["none", "lowrank", "lowrank_q", "signbit", "mask"]
RANK = 21
ARGUMENTS = (
    "x", "index", "routing", "neuron_rows", "predictor", "kind", "cuts", "predictor_weights",
    "predictor_int8_activations", "activation", "activation_on_up", "thresholds", "weights", "int8_activations",
)  # fmt: skip


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def predictors(kind: str, experts: int, neurons: int, hidden: int) -> tuple[list[torch.Tensor], str, list[float], str]:
    """Stacked tensors, kind, cuts and weights: every expert has its own cut."""
    g = generator(4)
    cuts = [0.1 * e for e in range(experts)]
    if kind in ("none", "mask"):
        return [], kind, [], ""
    if kind == "signbit":
        signs = pack_signs(torch.randn(experts * neurons, hidden, generator=g)).view(experts, neurons, -1)
        return [signs], kind, [0.9 + cut for cut in cuts], ""
    bias = torch.randn(experts, neurons, generator=g)
    if kind == "lowrank_q":
        a = quantised(experts, RANK, hidden, weights="int4", seed=5)
        return [a, quantised(experts, neurons, RANK, weights="int4", seed=6), bias], kind, cuts, "int4"
    a8 = torch.randint(-127, 128, (experts, RANK, hidden), dtype=torch.int8, generator=g)
    b8 = torch.randint(-127, 128, (experts, neurons, RANK), dtype=torch.int8, generator=g)
    scales = torch.rand(experts, RANK, generator=g) * 0.01, torch.rand(experts, neurons, generator=g) * 0.01
    return [a8, scales[0], b8, scales[1], bias], kind, cuts, ""


def routed(
    experts: int, tokens: int, slots: int, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, where they go (some nowhere, some twice to one expert) and how that is weighed."""
    g = generator(1)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    index = torch.randint(0, experts + 1, (tokens, slots), generator=g)
    return x, index, torch.rand(tokens, slots, generator=g)


def mixture(
    kind: str = "none",
    weights: str = "int4",
    experts: int = 4,
    tokens: int = 7,
    slots: int = 2,
    sizes: tuple[int, int, int] = (85, 3, 111),
    dtype: torch.dtype = torch.float32,
    **changed: object,
) -> dict[str, object]:
    """Arguments of ``experts_ffn``; sizes are I, R and H; ``weights`` may be the name of a float dtype."""
    neurons, rows, hidden = sizes
    if weights in ("int4", "int8"):
        neuron_rows = quantised(experts, neurons, rows, hidden, weights=weights, seed=2)
    else:
        neuron_rows = torch.randn(experts, neurons, rows, hidden, generator=generator(2)) * hidden**-0.5
        neuron_rows, weights = neuron_rows.to(getattr(torch, weights)), "float"
    how = predictors(kind, experts, neurons, hidden)
    if kind == "mask":
        how = [torch.rand(tokens, slots, neurons, generator=generator(7)) < 0.4], kind, [], ""
    values = (
        *routed(experts, tokens, slots, hidden, dtype),
        neuron_rows,
        *how,
        False,
        "relu",
        False,
        [],
        weights,
        False,
    )
    return dict(zip(ARGUMENTS, values, strict=True)) | changed


def run(arguments: dict[str, object]) -> torch.Tensor:
    found: torch.Tensor = torch.ops.pi2.experts_ffn(**arguments)
    return found


def assert_follows_reference(arguments: dict[str, object]) -> None:
    found, wanted = run(arguments), reference.experts_ffn(**arguments)
    assert found.dtype is wanted.dtype
    # Half: one rounding of nearly the same sum. Predicted: a neuron at its cut may go either way.
    relative = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[found.dtype]
    off = (found.float() - wanted.float()).abs().amax(-1) > relative * float(wanted.float().abs().max()) + 1e-7
    assert int(off.sum()) <= (0 if arguments["kind"] in ("none", "signbit", "mask") else len(off) // 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "int4", "int8"])
def test_follows_the_reference(kind: str, weights: str) -> None:
    assert_follows_reference(mixture(kind, weights))
    assert_follows_reference(mixture(kind, weights, tokens=30, slots=3, sizes=(70, 2, 33)))


@pytest.mark.parametrize("experts", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sizes_and_dtypes(experts: int, slots: int, dtype: torch.dtype) -> None:
    for sizes in ((1, 3, 1), (300, 3, 65)):
        arguments = mixture("signbit", "float32", experts, 5, slots, sizes, dtype)
        arguments["routing"] = arguments["routing"].to(dtype)
        assert_follows_reference(arguments)


def test_settings() -> None:
    assert_follows_reference(mixture(activation="silu", activation_on_up=True))
    assert_follows_reference(mixture(activation="gelu_tanh", thresholds=[0.5, 0.0, 0.1, 1.0]))
    assert_follows_reference(mixture(int8_activations=True))
    lossy = mixture("lowrank_q", predictor_int8_activations=True, tokens=40)
    assert_follows_reference(lossy)
    assert not torch.equal(run(lossy), run(lossy | {"predictor_int8_activations": False}))
    assert not torch.equal(run(lossy), run(lossy | {"cuts": [0.0] * 4}))


def test_tensors_may_be_strided() -> None:
    arguments = mixture(tokens=6)
    wanted = run(arguments)
    for name in ("x", "index", "routing"):
        strided = arguments[name].T.contiguous().T
        assert not strided.is_contiguous()
        assert torch.equal(run(arguments | {name: strided}), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("weights", "int8_activations"), [("int4", True), ("int8", False), ("bfloat16", False)])
def test_bits_depend_on_neither_company_nor_threads(kind: str, weights: str, int8_activations: bool) -> None:
    tokens = 11 if int8_activations else 150  # from 12 tokens of an expert on, int8 activations have tiles
    arguments = mixture(kind, weights, tokens=tokens, slots=3, int8_activations=int8_activations, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = run(arguments)
        torch.set_num_threads(1)
        for t in range(0, tokens, 7):
            alone = {name: arguments[name][t : t + 1] for name in ("x", "index", "routing")}
            if kind == "mask":
                alone["predictor"] = [arguments["predictor"][0][t : t + 1]]
            assert torch.equal(run(arguments | alone)[0], together[t])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4", "int8"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_bits_do_not_depend_on_how_neurons_without_gates_lie(weights: str, tokens: int) -> None:
    form = {"activation": "relu2", "activation_on_up": False, "int8_activations": weights.startswith("int")}
    rows = mixture("none", weights, tokens=tokens, sizes=(96, 2, 128), **form)
    neuron_rows = rows["neuron_rows"]
    assert isinstance(neuron_rows, torch.Tensor)
    apart = neuron_rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert not apart.is_contiguous()
    wanted = run(rows)
    assert torch.equal(run(rows | {"neuron_rows": apart}), wanted)
    kind = str(rows["weights"])
    if kind != "float" and wants_blocks(kind, 96, 128, True):
        for rows_of_one, neurons in zip(apart, neuron_rows, strict=True):
            rows_of_one[:, 0] = to_blocks(neurons[:, 0].contiguous(), kind, 128)
        assert torch.equal(run(rows | {"neuron_rows": apart, "weights": f"{kind}_blocks"}), wanted)


def test_one_expert_twice_none_at_all_and_no_tokens() -> None:
    one = mixture(tokens=1, slots=1, index=torch.tensor([[3]]), routing=torch.ones(1, 1))
    y = run(one)
    twice = run(one | {"index": torch.tensor([[3, 4, 3]]), "routing": torch.tensor([[0.5, float("nan"), 0.25]])})
    assert torch.equal(twice, 0.5 * y + 0.25 * y)
    assert torch.equal(run(one | {"index": torch.tensor([[4]])}), torch.zeros(1, 111))
    empty = {name: one[name][:0] for name in ("x", "index", "routing")}
    assert run(one | empty).shape == (0, 111)
    assert torch.equal(run(one | {"index": one["index"][:, :0], "routing": one["routing"][:, :0]}), torch.zeros(1, 111))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of layers of equal sizes, which could as well be experts."""
    base = tmp_path_factory.mktemp("experts")
    shape = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 5, "vocab_size": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch_pi2.synthetic(base / "plain", shape, active=0.2, weights="int8", predictor=None)
    torch_pi2.pack(base / "plain", base / "store")
    return base / "store" / "pi2" / "model.pi2"


def stored(path: Path, kind: str, **changed: object) -> tuple[dict[str, object], dict[str, object], StoreReader]:
    """Arguments of ``stored_experts`` for layers 1 and on, but for the store; those of ``experts_ffn`` for the same."""
    with StoreReader(path) as reader:
        experts, entry = len(reader.entries) - 1, reader.entries[1]
        neuron_rows = torch.stack([reader.read_layer(1 + e) for e in range(experts)])
    sizes = (entry.neurons, entry.rows, entry.hidden)
    memory = mixture(kind, "int8", experts, sizes=sizes, dtype=torch.bfloat16, **changed) | {"neuron_rows": neuron_rows}
    over = {name: value for name, value in memory.items() if name not in ("neuron_rows", "weights")}
    return over | {"first_layer": 1, "experts": experts}, memory, reader


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8_activations", [False, True])
def test_bits_do_not_depend_on_where_experts_are(path: Path, kind: str, int8_activations: bool) -> None:
    over, memory, reader = stored(path, kind, int8_activations=int8_activations)
    wanted = run(memory)
    assert wanted.abs().max() > 0
    for budget in (0, 30_000, 1 << 30):
        store = Store(path, budget)
        for _ in range(2):
            assert torch.equal(torch.ops.pi2.stored_experts(**over, store=store.number), wanted)
    with StoreReader(reader.path) as again:
        found = reference.stored_experts(**over, reader=again)
    assert torch.equal(found, reference.experts_ffn(**memory))


@pytest.mark.parametrize("kind", KINDS)
def test_first_neurons_of_each_expert_are_somebody_elses(path: Path, kind: str) -> None:
    """Bits of experts that have the others alone, in memory and over a store."""
    for weights, int8_activations, tokens in (("int4", True, 40), ("bfloat16", False, 7)):
        whole = mixture(kind, weights, tokens=tokens, sizes=(330, 3, 64), int8_activations=int8_activations)
        whole |= {
            "bias_up": torch.randn(4, 330, generator=generator(8)).to(
                torch.float32 if weights == "int4" else torch.bfloat16
            )
        }
        for first in (64, 320):
            others = whole | {"neuron_rows": whole["neuron_rows"][:, first:].contiguous()}
            others["bias_up"] = whole["bias_up"][:, first:].contiguous()
            by_neuron = {"lowrank": 2, "lowrank_q": 1}.get(kind, 0)
            others["predictor"] = [
                tensor[..., first:].contiguous()
                if kind == "mask"
                else tensor[:, first:].contiguous()
                if place >= by_neuron
                else tensor
                for place, tensor in enumerate(whole["predictor"])
            ]
            assert torch.equal(run(whole | {"first": first}), run(others))
            assert_follows_reference(whole | {"first": first})
    over, memory, _ = stored(path, kind)
    for budget in (0, 30_000, 1 << 30):
        store = Store(path, budget)
        store.leave_out(1, [128] * over["experts"])
        for _ in range(2):
            found = torch.ops.pi2.stored_experts(**over, store=store.number, first=128)
            assert torch.equal(found, run(memory | {"first": 128}))


@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_masks_are_of_pairs(path: Path, tokens: int) -> None:
    over, memory, _ = stored(path, "mask", tokens=tokens, slots=3)
    index, mask = memory["index"], memory["predictor"][0]
    store = Store(path, 30_000)
    call = functools.partial(torch.ops.pi2.stored_experts, store=store.number)
    assert torch.equal(call(**over), run(memory))
    assert_follows_reference(memory)
    neurons = mask.shape[-1]
    used = torch.zeros(over["experts"] + 1, neurons, dtype=torch.bool)
    for t in range(tokens):
        for e in set(index[t].tolist()):
            used[e] |= mask[t, index[t].tolist().index(e)]
    if tokens == 1:
        store.stats(reset=True)
        call(**over)
        assert store.stats()["wanted"] == int(used[:-1].sum())
    # the choice of a token's expert counts where it is named first
    twice = memory | {"index": index[:, :1].expand(tokens, 3).contiguous()}
    other = mask.clone()
    other[:, 1:] = ~other[:, 1:]
    assert torch.equal(run(twice), run(twice | {"predictor": [other]}))
    for bad, found in (
        ([], "expected 1 tensor and no cuts for kind mask, found 0 and 0"),
        (
            [mask[:, :2].contiguous()],
            rf"{tokens} tokens, 3 slots, {neurons} neurons\], found \[{tokens}, 2, {neurons}\]",
        ),
        ([mask[..., 1:]], "mask: expected contiguous bool .*found "),
        ([mask.byte()], "mask: expected contiguous bool .* of another dtype"),
    ):
        for operator, arguments in (
            (run, {"arguments": memory | {"predictor": bad}}),
            (call, over | {"predictor": bad}),
        ):
            with pytest.raises(RuntimeError, match=found):
                operator(**arguments)
    early = (torch.randn(2, memory["x"].shape[1]), None, None, 1, [mask], "mask", [], "", False)
    with pytest.raises(RuntimeError, match="expected a predictor that computes, found 'mask'"):
        torch.ops.pi2.store_early_routing(store.number, 0, 1, 2, *early)


@pytest.mark.parametrize("sizes", [(3, 2, 60_000), ((1 << 17) + 7, 2, 1)], ids=str)
def test_masks_of_long_prompts_are_cut_into_slices_with_them(sizes: tuple[int, int, int]) -> None:
    whole = mixture("mask", "float32", 2, 70, 2, sizes)
    y = run(whole)
    for t in (0, 63, 64, 69):
        alone = {name: whole[name][t : t + 1] for name in ("x", "index", "routing")}
        assert torch.equal(run(whole | alone | {"predictor": [whole["predictor"][0][t : t + 1]]})[0], y[t])


def with_gates(neuron_rows: torch.Tensor) -> dict[str, object]:
    """Arguments with the gates of two experts, in another order."""
    of_E = torch.tensor([1, -1, 0, -1])
    return {"predictor": [neuron_rows[[2, 0], :, 0].contiguous(), of_E], "kind": "gate"}


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_gates_of_some_experts_change_no_bit(path: Path, int8_activations: bool, tokens: int) -> None:
    over, memory, _ = stored(path, "none", int8_activations=int8_activations, tokens=tokens)
    gates, store = with_gates(memory["neuron_rows"]), Store(path, 100_000)
    wanted = run(memory)
    assert torch.equal(run(memory | gates), wanted)
    for first in (0, 128):
        found = torch.ops.pi2.stored_experts(**over | gates, store=store.number, first=first)
        assert torch.equal(found, run(memory | {"first": first}))
    opcheck(torch.ops.pi2.stored_experts.default, (), over | gates | {"store": store.number})
    rows, of_E = gates["predictor"]
    for bad, message in (
        ([rows], "expected the gate rows alone and their numbers for kind gate, found 1 tensors"),
        ([rows[:, 1:], of_E], r"gate rows: expected contiguous \[experts, 320, "),
        ([rows, of_E[1:]], r"numbers of gate rows as contiguous int64 \[4\] for kind gate, found 0 and \[3\]"),
        ([rows, of_E + 1], "numbers of gate rows: expected less than 2, found 2 for expert 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.pi2.stored_experts(**over | gates | {"predictor": bad}, store=store.number)


def test_opcheck(path: Path) -> None:
    for kind in KINDS:
        opcheck(torch.ops.pi2.experts_ffn.default, (), mixture(kind))
    opcheck(torch.ops.pi2.experts_ffn.default, (), mixture("signbit", first=64))
    store = Store(path, 1 << 20)
    over, _, _ = stored(path, "signbit")
    opcheck(torch.ops.pi2.stored_experts.default, (), over | {"store": store.number})


LONG = torch.zeros(7, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(7, 1, 111)}, r"shape of x: expected \[tokens, hidden\], found \[7, 1, 111\]"),
        ({"x": torch.zeros(7, 111).double()}, "dtype of x: expected float32, bfloat16 or float16, found another"),
        ({"x": torch.zeros(7, 96)}, r"neuron_rows: expected rows of 54 bytes \(hidden size 96"),
        ({"index": LONG.int()}, "dtype of index: expected int64, found another. Use .long"),
        ({"index": LONG[1:]}, r"shape of index: expected \[7 \(tokens of x\), slots\], found \[6, 2\]"),
        ({"index": LONG + 5}, "index: expected 0 to 3, or 4 for no expert, found 5 for token 0, slot 0"),
        ({"routing": torch.zeros(7, 3)}, r"shape of routing: expected that of index, \[7, 2\], found \[7, 3\]"),
        ({"routing": LONG}, "dtype of routing: expected float32, bfloat16 or float16, found another"),
        (
            {"neuron_rows": torch.zeros(0, 85, 3, 72).byte()},
            r"none of them 0, found \[0, 85, 3, 72\]. Stack the neurons",
        ),
        ({"neuron_rows": torch.zeros(85, 4, 3, 72).byte().transpose(0, 1)}, r"found strided \[4, 85, 3, 72\]"),
        ({"neuron_rows": torch.zeros(4, 85, 3, 111)}, "dtype of neuron_rows: expected uint8 with weights 'int4'"),
        (
            {"weights": "float"},
            "dtype of neuron_rows: expected float32, bfloat16 or float16 with weights 'float', found",
        ),
        (
            {"thresholds": [0.0, -1.0, 0.0, 0.0]},
            "thresholds: expected 0 or more, found -1 for expert 1. Check the plan",
        ),
        ({"first": 63}, "first: expected a multiple of 64 below 85, found 63. It is how many neurons of each expert"),
        ({"first": 128}, "first: expected a multiple of 64 below 85, found 128"),
        ({"thresholds": [0.5]}, "thresholds: expected none, or 4, one for each expert, found 1"),
        ({"kind": "none"}, "predictor: expected no tensors and cuts for kind none, found 1 and 4"),
        ({"kind": "oracle"}, "kind: expected lowrank, lowrank_q, signbit or mask, found 'oracle'"),
        ({"kind": "lowrank_q"}, r"predictor: expected 2 tensors \(and a bias\) for kind lowrank_q, found 1"),
        ({"cuts": [1.0] * 3}, "cuts: expected 4, one for each expert, found 3"),
        ({"cuts": [1.0, 1.0, -2.0, 1.0]}, "cuts: expected finite margins of at least 0, found -2 for expert 2"),
        (
            {"predictor": [torch.zeros(3, 85, 16).byte()]},
            r"tensor 0: expected contiguous \[4 experts, ...\], found \[3",
        ),
        ({"predictor": [torch.zeros(85, 4, 16).byte().transpose(0, 1)]}, r"tensor 0: .*, found strided \[4, 85, 16\]"),
        ({"predictor": [torch.zeros(4, 9, 16).byte()]}, r"predictor: expected at least 85 cold neurons .*, found 9"),
        (
            {"predictor": [torch.zeros(4, 85, 8).byte()]},
            r"shape of signs: expected \[neurons, 16\] .*, found \[85, 8\]",
        ),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(mixture("signbit") | change)


def test_bad_thresholds_and_float_weights() -> None:
    with pytest.raises(RuntimeError, match=r"cuts: expected thresholds, found -?nan for expert 1"):
        run(mixture("lowrank", cuts=[0.0, float("nan"), 0.0, 0.0]))
    with pytest.raises(RuntimeError, match="int8_activations: expected false with float weights, found true"):
        run(mixture(weights="float32", int8_activations=True))
    with pytest.raises(RuntimeError, match=r"hidden size of x: expected 111 \(the layer's\), found 96"):
        run(mixture(weights="float32", x=torch.zeros(7, 96)))


def test_bad_stores(path: Path) -> None:
    store = Store(path, 0)
    over, _, reader = stored(path, "none")
    layers = len(reader.entries)
    call = functools.partial(torch.ops.pi2.stored_experts, store=store.number)
    for change, message in (
        ({"experts": 0}, f"experts: expected 1 to {layers}, found 0. The store is of another model"),
        ({"experts": layers + 1}, f"experts: expected 1 to {layers}, found {layers + 1}"),
        ({"first_layer": 2}, rf"first_layer: expected 0 to 1 \({layers - 1} experts of {layers} layers\), found 2"),
        ({"first_layer": -1}, "first_layer: expected 0 to 1 .* found -1"),
        ({"x": over["x"][:, :-1]}, r"hidden size of x: expected \d+ \(the layer's\), found \d+"),
        ({"cuts": [1.0]}, "predictor: expected no tensors and cuts for kind none, found 0 and 1"),
        ({"index": over["index"] + layers}, rf"index: expected 0 to {layers - 2}, or {layers - 1} for no expert"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**over | change)
    with pytest.raises(RuntimeError, match="store: expected an open one, found number 1000000"):
        torch.ops.pi2.stored_experts(**over, store=1_000_000)
