"""Attention on an accelerator: parts of fixed shape over keys and values that they are given, XNNPACK in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import ROOM, bundle_of, decoder_methods, drawn_model, one_layer
from runner_calls import run
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import qnn
from torch_pi2.export.attention import masks_of
from torch_pi2.export.calibrate import first_batches
from torch_pi2.export.decoder import Lanes
from torch_pi2.export.describe import describe_program
from torch_pi2.export.hot_attention import (
    AttentionCall,
    AttentionPart,
    attention_calls,
    check_parts,
    float_parts,
    place_attention,
    samples_of,
    with_parts,
)
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.qnn import MOST_BYTES, open_program, zeros
from torch_pi2.export.run import Bundle
from torch_pi2.export.settings import ExportSettings

IDS = torch.randint(3, 250, (ROOM,), generator=torch.Generator().manual_seed(3)).tolist()
#: A family, and what is special: groups of query heads, a window, norms of heads, soft caps, positions in a table.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 2.0},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 32},
}


def lanes_of(model: nn.Module, lanes: int = 2, kv: str = "float32") -> Lanes:
    return Lanes(model, lanes, ROOM, kv)


def with_float_parts(lanes: Lanes) -> Lanes:
    calls = attention_calls(lanes)
    return with_parts(lanes, calls, float_parts(calls))


def first_call(family: str, **config: Any) -> AttentionCall:
    return attention_calls(lanes_of(drawn_model(family, **config)))[0]


@torch.no_grad()
def played(lanes: Lanes) -> list[torch.Tensor]:
    """Logits of two prompts in pieces, the last one padded, and of steps of both and of one; then the caches."""
    lanes.forget()
    methods = decoder_methods(lanes, (1, 2), (12,))
    ids_2T = torch.randint(0, 50, (2, ROOM), generator=torch.Generator().manual_seed(1))
    found = []
    for lane in range(2):
        start = torch.tensor([lane * ROOM])
        found.append(methods["forward"](ids_2T[lane : lane + 1, :9], start))
        found.append(methods["prefill_12"](ids_2T[lane : lane + 1, 9:21], start + 9, torch.tensor([11])))
        found.append(methods["prefill_12"](ids_2T[lane : lane + 1, 21:33], start + 21, torch.tensor([4])))
    positions = torch.tensor([[26], [26]])
    for step in range(3):
        found.append(methods["decode_b2"](ids_2T[:, 26 + step : 27 + step], positions + step))
    found.append(methods["decode_b1"](ids_2T[:1, 29:30], positions[:1] + 3))
    kept = [lanes.floats(lane, 29, layer) for lane in range(2) for layer in range(lanes.layers)]
    read = [cache[:, :29] for pair in kept for cache in pair]
    return [*found, *read]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kv"), [*((family, "float32") for family in FAMILIES), ("Llama", "float16")])
def test_a_part_is_the_attention_that_it_stands_for(family: str, kv: str) -> None:
    lanes = lanes_of(drawn_model(family, **FAMILIES[family]), kv=kv)
    before = played(lanes)
    off = 2e-5 if kv == "float32" else 5e-3  # of tokens that are new the numbers are not yet rounded
    for first, second in zip(before, played(with_float_parts(lanes))):
        torch.testing.assert_close(first, second, rtol=0, atol=off * float(first.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mistral", "OPT"])
def test_a_part_with_open_sizes(family: str) -> None:
    """What an NPU's compiler is given: one program, quantised once, for every number of sequences and of tokens."""
    call = first_call(family, **FAMILIES[family])
    part = AttentionPart(call)
    program = open_program(part, zeros(call.shapes(2, 3)), call.open).module(check_guards=False)
    for batch, tokens in ((1, 1), (3, 1), (1, 17)):
        inputs = [torch.randn(sizes).to(dtype) for sizes, dtype in call.shapes(batch, tokens)]
        for found, wanted in zip(program(*inputs), part(*inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_calibration_reads_as_decoding_does() -> None:
    call, random = first_call("Mistral", **FAMILIES["Mistral"]), torch.Generator().manual_seed(0)
    states = [torch.randn(1, 60, width, generator=random) for width in call.widths]
    with torch.no_grad():
        part = AttentionPart(call)
        pieces = samples_of(part, [states, [s[:, :7] for s in states]])
        assert [x[0].shape[1] for x in pieces] == [12, 12, 12, 12, 3, 3, 1]  # no more than there is room for
        assert all(bool(cache.any()) == (i not in (0, 4)) for i, x in enumerate(pieces) for cache in x[-4:-2])
        caches = [torch.zeros(sizes) for sizes, _ in call.shapes(1, 1)[-4:-2]]
        whole = part(*(s[:, :ROOM] for s in states), *caches, *masks_of(torch.arange(ROOM)[None], ROOM, call.window))
        for i, of_output in enumerate(zip(*(part(*piece) for piece in pieces[:4]))):
            torch.testing.assert_close(torch.cat(of_output, 1), whole[i], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "key_heads", "times"), [(8, 2, 2), (8, 8, 2), (8, 1, 1)])
def test_a_few_heads_are_computed_at_a_time(heads: int, key_heads: int, times: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 64, "head_dim": 8}
    call = first_call("Llama", **sizes)
    program = open_program(AttentionPart(call), zeros(call.shapes(2, 3)), call.open)
    found = [node.args[0].meta["val"].shape for node in program.graph.nodes if "softmax" in str(node.target)]
    assert len(found) == times


#: Keys and values, and batches: of a second size another has what there is to see.
KINDS = {"float32": (1,), "float16": (1, 2)}


@pytest.fixture(scope="module", params=["float32", pytest.param("float16", marks=pytest.mark.long)])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    return bundle_of(
        tmp_path_factory,
        f"hot-attention-{request.param}",
        lambda: torch_pi2.optimize(one_layer(num_key_value_heads=1)),
        batches=KINDS[request.param],
        hot=dict.fromkeys(KINDS[request.param], 1),
        hot_prompts=(16,),
        hot_attention="prompts",
        kv=request.param,
    )


@pytest.mark.slow
def test_a_bundle_decodes_the_same_text(bundle: tuple[nn.Module, Path]) -> None:
    model, folder = bundle
    methods = describe_program(folder / "model.pte")["methods"]
    batches = Manifest.load(folder).batches
    assert "pi2::write_cache.out" in methods["prefill_16"]["operators"]
    assert "pi2::cached_attention.out" not in methods["prefill_16"]["operators"]
    for name in ("forward", *(f"decode_b{batch}" for batch in batches)):
        assert "pi2::cached_attention.out" in methods[name]["operators"]
    with Bundle(folder) as opened, torch.no_grad():
        for length in (1, 9, 16, 20, 33, 40):
            logits, wanted = opened.logits(IDS[:length], length)[0], model(torch.tensor([IDS[:length]])).logits[0, -1]
            tolerance = 1e-4 if folder.name.endswith("float32") else 3e-3
            torch.testing.assert_close(logits, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
            greedy = model.generate(torch.tensor([IDS[:length]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert opened.generate(IDS[:length], 8).sequences[0].ids == greedy[0, length:].tolist(), length
        together = opened.generate(IDS[:21], 6, num_return_sequences=max(batches))
        assert together.sequences == opened.generate(IDS[:21], 6).sequences * max(batches)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 16, 21])
def test_the_runner_decodes_alike(bundle: tuple[nn.Module, Path], length: int, tmp_path: Path) -> None:
    ids, logits = ",".join(map(str, IDS[:length])), tmp_path / "logits.npy"
    found = run(bundle[1], "--ids", ids, "--max-new-tokens", 8, "--logits", logits)
    with Bundle(bundle[1]) as opened:
        assert found["sequences"][0]["ids"] == opened.generate(IDS[:length], 8).sequences[0].ids
        assert np.array_equal(np.load(logits)[0, 0], opened.logits(IDS[:length], length)[0].numpy())


@pytest.mark.slow
@pytest.mark.long
def test_quantised_linear_layers_are_those_numbers(tmp_path: Path) -> None:
    """An accelerator's parts are made of what is stored: of int8 rows, and of what the exporter has rounded."""
    sizes: dict[str, Any] = {"batches": (1,), "max_tokens": 24, "max_prompt": 8, "hot": {1: 2}, "hot_prompts": (8,)}
    # of two layers, so that the keys of the second depend on the accelerator's part of the first
    for layers, settings, more, most in ((2, {"weights": "int8"}, {}, 1e-3), (1, {}, {"linears": "int8"}, 0.1)):
        model = one_layer(num_hidden_layers=layers, intermediate_size=600)
        model = torch_pi2.optimize(model, method="exact", **settings)
        folder = torch_pi2.export(model, tmp_path / "b", **sizes, **more, hot_attention="prompts")
        with Bundle(folder) as opened, torch.no_grad():
            found, wanted = opened.logits(IDS[:14], 12), model(torch.tensor([IDS[:14]])).logits[0, 11:].float()
        assert float((found - wanted).norm() / wanted.norm()) < most


def npu(hot_attention: str | None, kv: str = "float32") -> ExportSettings:
    return ExportSettings("qnn:SM8650", ROOM, batches=(1,), kv=kv, hot_attention=hot_attention)


def test_scores_far_below_what_is_not_seen() -> None:
    """Large biases of keys, as Qwen2 has them: every score is some -2000, and slots that nobody has written have 0."""
    model: Any = drawn_model("Qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.fill_(60.0)
            layer.self_attn.q_proj.bias.fill_(-60.0)
    lanes = lanes_of(model)
    for first, second in zip(played(lanes), played(with_float_parts(lanes))):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-3 * float(first.abs().max()))


def test_parts_are_compared_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = AttentionPart.forward

    def other(self: AttentionPart, x: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return forward(self, x + 1, *inputs)

    for wrong, message in (
        (lambda *_, **__: 1 / 0, r"one that cannot be called alone \(ZeroDivisionError: division by zero\)"),
        (other, r"one that computes something else alone \(.* % off\)"),
    ):
        lanes = lanes_of(drawn_model("Llama"))
        monkeypatch.setattr(AttentionPart, "forward", wrong)
        with pytest.raises(UnsupportedModelError, match=message):
            check_parts(lanes, attention_calls(lanes))


def test_what_is_refused(tmp_path: Path) -> None:
    model = torch_pi2.optimize(one_layer())
    for settings, message in (
        ({"hot_attention": "prompts"}, r"export\(hot_attention=...\): expected it only with hot or an NPU"),
        (
            {"hot_attention": "all", "hot": {1: 1}},
            "hot_attention=...\\): expected none or prompts, found 'all'",
        ),
        ({"hot_attention": "prompts", "hot": {1: 1}, "kv": "int8"}, "expected it only with kv in float32 or float16"),
        ({"hot_attention": "prompts", "hot": {1: 1}}, r"expected methods that read prompts on the accelerator"),
    ):
        with pytest.raises(ConfigError, match=message):
            torch_pi2.export(model, tmp_path / "b", batches=(1,), max_tokens=ROOM, **settings)
    falcon = drawn_model("Falcon", ffn_hidden_size=96, hidden_act="relu")
    lanes = Lanes(falcon, 1, ROOM)
    arguments: dict[str, Any] = {"calibration": (), "ffn_bytes": 0}
    with pytest.raises(UnsupportedModelError, match="attention of FalconForCausalLM on an accelerator: expected"):
        place_attention(falcon, lanes, ["prefill_16"], npu("prompts"), report={}, **arguments)
    report: dict[str, Any] = {}
    assert place_attention(falcon, lanes, ["prefill_16"], npu(None), report=report, **arguments) == ((), {})
    assert report["attention"].startswith("on the CPU: ")
    for kv, methods in (("int8", ["prefill_16"]), ("float32", ["decode_b1"])):
        assert place_attention(falcon, lanes, methods, npu(None, kv), report={}, **arguments) == ((), {})


@pytest.mark.slow
def test_the_memory_of_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn_model("Llama")
    most: dict[str, Any] = {"calibration": (), "ffn_bytes": MOST_BYTES}
    message = (
        r"export\(hot_attention='prompts'\) for SM8650: expected at most 3584 MiB of weights, which an NPU can have, "
        r"found 3584 MiB: attention 0 MiB, feed-forward layers 3584 MiB in w4a16\. Leave"
    )
    with pytest.raises(ConfigError, match=message):
        place_attention(model, lanes_of(model), ["prefill_16"], npu("prompts"), report={}, **most)
    report: dict[str, Any] = {}
    model = drawn_model("Llama")
    assert place_attention(model, lanes_of(model), ["prefill_16"], npu(None), report=report, **most) == ((), {})
    assert report["attention"].startswith("on the CPU: 3584 MiB: attention 0 MiB")
    model, asked = drawn_model("Llama"), []
    lowered = qnn.Lowered({}, {}, {}, {})
    monkeypatch.setattr(qnn, "lower_parts", lambda parts, *_, **__: asked.extend(p[2].block for p in parts) or lowered)
    weights = sum(p.numel() for layer in model.model.layers for p in layer.self_attn.parameters())
    for ffn_bytes, block in ((MOST_BYTES - weights, 0), (MOST_BYTES - weights + 1, 32)):
        model, first = drawn_model("Llama"), first_batches([torch.randint(0, 50, (2, 40))])
        arguments: dict[str, Any] = {"calibration": first, "ffn_bytes": ffn_bytes, "report": {}}
        assert place_attention(model, lanes_of(model), ["prefill_16"], npu("prompts"), **arguments)[0]
        assert {*asked} == {block}
        asked.clear()
