"""Programs of a step: PyTorch's bits, on odd sizes, of every call that becomes an instruction."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_pi2 import ops
from torch_pi2.decode import step_program
from torch_pi2.decode.step_graph import StepGraph, record
from torch_pi2.decode.step_program import translated
from torch_pi2.ops.linear import to_blocks

Forward = Callable[[torch.Tensor], torch.Tensor]
IDS = torch.tensor([[1, 2]])
ops.load()
RUN = torch.ops.pi2.step_run.default


def translation(forward: Forward) -> step_program.Translation:
    _, calls = record(forward, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    _, made = translated(graph._run, IDS, graph.inputs)
    assert made is not None, "the program has other bits"
    return made


def check(forward: Forward, left: int = 0) -> None:
    """Recorded steps have the bits of ``forward``, and PyTorch computes only ``left`` of its calls."""
    with torch.inference_mode():
        calls = [node.target for node in translation(forward).graph.nodes if node.op == "call_function"]
        assert RUN in calls
        views = (
            "getitem",
            "as_strided.default",
            "view.default",
            "reshape.default",
            "select.int",
            "slice.Tensor",
            "detach.default",
        )
        others = [call for call in calls if call is not RUN and getattr(call, "__name__", "") not in views]
        assert len(others) == left, others
        _, recorded = record(forward, IDS)
        assert recorded is not None
        graph = StepGraph(recorded)
        for ids in (IDS, IDS + 3, IDS + 1, IDS + 2):
            found, wanted = graph(ids), forward(ids)
            assert found.dtype == wanted.dtype
            assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def table(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("width", [2, 30, 64, 640, 1026])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_and_rotations(width: int, dtype: torch.dtype) -> None:
    rows, weight, cos = table(width, dtype), table(width, dtype)[0], table(width, dtype)[:2]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = rows[ids]
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        gemma = (h * (1.0 + weight.float())).type_as(x)
        llama = weight * h.to(dtype)
        turned = torch.cat((-gemma[..., width // 2 :], gemma[..., : width // 2]), dim=-1)
        return x + (gemma * cos + turned * cos) / llama - x.relu().sqrt() * 0.5

    check(forward, left=1)


def test_means_have_pytorchs_order_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in [*range(1, 70), 127, 512, 513, 640, 1000, 2048, 4097, 8192, 11008, 16384, 30000]:
        x = torch.randn(8, width, generator=generator) * torch.rand(8, 1, generator=generator).exp()
        check(lambda ids, x=x: x.narrow(0, 0, 2).mean(-1) + ids[0], left=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 333, 4864])
def test_activations(dtype: torch.dtype, width: int) -> None:
    rows = table(width, dtype)
    for act in (torch.nn.functional.silu, torch.sigmoid, torch.tanh, torch.exp, torch.relu):
        check(lambda ids, act=act: act(rows[ids] * 3) * rows[ids], left=2)
    gelu = torch.nn.functional.gelu
    check(lambda ids: gelu(rows[ids] * 3, approximate="tanh") * rows[ids] * gelu(rows[ids]), left=5)


def test_strided_and_broadcast_numbers() -> None:
    rows, other = table(24), table(24).T.contiguous()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = rows[ids].view(1, 2, 4, 6).transpose(1, 2)
        y = x * other.view(1, 4, 6, 8)[..., 2:4].transpose(2, 3).contiguous()[..., :6] - x[:, :, :1]
        return torch.cat((y.expand(3, -1, -1, -1), y.repeat(3, 1, 1, 1)[..., ::2]), dim=3).reshape(3, -1) * 2

    check(forward, left=2)


def test_embeddings_masks_and_the_likeliest_token() -> None:
    """The start and the end of a step, of several sequences; also where a logit is not a number."""
    packed, lengths = torch.ops.pi2.quantize(table(96), "int8"), torch.tensor([[3], [1]])
    logits = torch.randn(8, 301).round(decimals=1)  # some are equal
    logits[2, 250], logits[3, [7, 100]], logits[4] = torch.nan, torch.inf, -torch.inf

    def forward(ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        x = torch.ops.pi2.dequantize(packed.index_select(0, flat), "int8", 96, torch.float32).view(2, 96)
        x = x + torch.nn.functional.embedding(ids, logits).view(2, -1)[:, :96].contiguous().cos() * x.sin()
        keys, positions = torch.arange(5), lengths + torch.arange(3)
        seen = (keys <= positions[..., None]) & (keys > positions[..., None] - 2) & (keys >= lengths[..., None] - 1)
        rows = logits.index_select(0, flat)
        best = rows.argmax(-1, keepdim=True)
        token = torch.where(rows.gather(-1, best).isfinite(), best, -1)
        return torch.cat((x, token.float(), seen.reshape(2, -1).to(torch.int64).float()), -1)

    check(forward, left=1)


def test_positions_and_a_cache() -> None:
    cache, lengths, rows = torch.zeros(2, 3, 9, 4), torch.tensor([4]), table(12)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        position = lengths + torch.arange(2) * 3 - 1
        keys = rows[ids].view(1, 2, 3, 4).transpose(1, 2).expand(2, -1, -1, -1)
        return cache.index_copy_(2, position, keys) + position.float().sum()

    check(forward, left=2)
    assert cache[:, :, [3, 6]].any()
    assert not cache[:, :, [0, 1, 2, 4, 5, 7, 8]].any()
    _, calls = record(forward, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    graph(IDS)
    lengths.fill_(8)
    with pytest.raises(RuntimeError, match="beyond it"):
        graph(IDS)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_linear_layers_and_attention(weights: str) -> None:
    width, rows = 64, table(64)
    packed = torch.ops.pi2.quantize(table(64).repeat(8, 1), weights)
    blocks, bias, sinks = to_blocks(packed, weights, width), torch.arange(64.0), torch.tensor([0.1, 0.2])
    mask = torch.arange(2)[None, None, None] <= torch.arange(2)[None, None, :, None]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = rows[ids]
        y = torch.ops.pi2.linear(x, packed, bias, weights, True) * torch.ops.pi2.linear(x, packed, None, weights)
        if torch.ops.pi2.kernel_tables().endswith("vnni"):
            y = y + torch.ops.pi2.linear_blocks(x, blocks, bias, weights)
        q, k = y.view(1, 2, 2, 32).transpose(1, 2), x.view(1, 2, 2, 32).transpose(1, 2)[:, :1]
        seen = torch.ops.pi2.attention(q, k, k, mask, 0.3, False, None)
        return seen + torch.ops.pi2.attention(q, k, k, None, 0.3, True, sinks) - 1

    check(forward, left=1)


def test_operators_of_others_stay_in_order() -> None:
    """Schemas of c10d do not say that its operators write."""
    library, rows = torch.library.Library("others", "FRAGMENT"), table(6)
    library.define("double(Tensor[] x) -> Tensor[]")
    library.impl("double", lambda x: [part.mul_(2) for part in x], "CompositeExplicitAutograd")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = rows[ids] + 1
        y = x * 3
        torch.ops.others.double([x])
        return x + y

    check(forward, left=2)


def test_a_program_reads_weights_as_they_are_now() -> None:
    weight, rows = torch.ones(6), table(6)
    _, calls = record(lambda ids: rows[ids] * weight, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    graph(IDS)
    assert torch.equal(graph(IDS), rows[IDS])
    weight.fill_(2)
    assert torch.equal(graph(IDS), rows[IDS] * 2)
    weight.data = torch.full((6,), 3.0)
    assert torch.equal(graph(IDS), rows[IDS] * 3)
    weight.data = torch.ones(5)
    with pytest.raises(RuntimeError, match="another shape"):
        graph(IDS)


def test_ids_may_be_part_of_longer_ones() -> None:
    rows, longer = table(6), torch.arange(8)[None]
    with torch.inference_mode():
        _, calls = record(
            lambda ids: torch.nn.functional.embedding(ids, rows) * 2, torch.zeros(1, 1, dtype=torch.int64)
        )
        assert calls is not None
        graph = StepGraph(calls)
        graph(torch.zeros(1, 1, dtype=torch.int64))
        for place in range(3):
            assert torch.equal(graph(longer[:, place : place + 1])[0, 0], rows[place] * 2)


@pytest.mark.parametrize(
    "other", [lambda w: torch.cat((torch.ones(7), w.flatten()))[7:].view(4, 6), lambda w: w.T.contiguous().T]
)
def test_parts_of_weights_are_taken_anew(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Also when the weight lies elsewhere later, or in another order."""
    weight, rows = table(6)[:4].clone(), table(6)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        gate, up = weight.chunk(2)
        x = rows[ids]
        return (x * 2 + 1) @ gate.T * (x @ up.T) + 1

    _, calls = record(forward, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    assert torch.equal(graph(IDS), forward(IDS))
    weight.data = other(weight * 3)
    assert torch.equal(graph(IDS + 1), forward(IDS + 1))


def test_what_is_written_by_another_name_is_read_in_order() -> None:
    ring, place = torch.zeros(2, 6), torch.tensor([1])
    recent, rows = ring[1:], table(6)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        ring.index_copy_(0, place, rows[ids[0, :1]] * 0.5)
        return torch.cumsum(recent, 0) + rows[ids[0, :1]]

    _, calls = record(forward, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    for ids in (IDS, IDS + 1, IDS + 4):
        assert torch.equal(graph(ids), rows[ids[0, :1]] * 0.5 + rows[ids[0, :1]])


def test_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(6)
    _, calls = record(lambda ids: rows[ids] * 2, IDS)
    assert calls is not None
    graph = StepGraph(calls)
    monkeypatch.setattr(step_program, "_same_bits", lambda a, b: False)
    assert torch.equal(graph(IDS), rows[IDS] * 2)
    assert torch.equal(graph(IDS + 1), rows[IDS + 1] * 2)
    assert translated(graph._run, IDS, graph.inputs)[1] is None


def test_a_program_ends_with_its_step() -> None:
    rows = table(6)
    _, calls = record(lambda ids: rows[ids] * 2, IDS)
    assert calls is not None
    graph: Any = StepGraph(calls)
    graph(IDS)
    first = torch.ops.pi2.step_program(
        [rows], [], [rows[0].clone()], [], torch.tensor([0, 2, 0, *[1, 0, 0, 1, 6, 1], *[0, 0, 0, 1, 6, 1]])
    )
    assert torch.equal(torch.ops.pi2.step_run(first, [])[0], rows[0])
    del graph, calls
    gc.collect()
    with pytest.raises(RuntimeError, match="closed"):
        torch.ops.pi2.step_run(first - 1, [rows[IDS]])
    assert torch.ops.pi2.step_close(first)
    assert not torch.ops.pi2.step_close(first)


def test_unsound_code_is_refused() -> None:
    x, copy = torch.randn(6), [0, 2, 0, *[1, 0, 0, 1, 6, 1], *[0, 0, 0, 1, 6, 1]]
    torch.ops.pi2.step_close(torch.ops.pi2.step_program([x], [], [x], [], torch.tensor(copy)))
    for at, word in ((0, 99), (1, 3), (4, 4), (5, 3), (7, 7), (8, 2), (9, 9), (13, 7)):
        code = torch.tensor(copy)
        code[at] = word
        with pytest.raises(RuntimeError, match="sound"):
            torch.ops.pi2.step_program([x], [], [x], [], code)
    with pytest.raises(RuntimeError, match="sound"):
        torch.ops.pi2.step_program([x], [], [x], [], torch.tensor(copy[:-1]))
